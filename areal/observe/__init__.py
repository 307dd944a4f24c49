"""What a run says of itself: alerts, and the trackers that get its numbers.

In: the metrics of the steps, and rollouts. Out: sentences for people, and records for trackers. Nothing here changes
the run. Read `alerts.py` first.
"""
