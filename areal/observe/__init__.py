"""What a run says of itself: alerts.

In: the metrics of the steps, and rollouts. Out: sentences for people. Nothing here changes the run. Read `alerts.py`
first.
"""
