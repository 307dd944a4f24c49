"""Alerts: what the metrics and the rollouts of a run show to be wrong, in sentences for people. They stop nothing."""
