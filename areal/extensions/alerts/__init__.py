"""Alerts: sentences about faults in the metrics and rollouts of a run. An alert stops nothing."""
