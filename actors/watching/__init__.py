"""Displays and probes of a run: the web pages, the health check, the runs of this machine.

In: the status that a master publishes, and run folders. Out: pages, numbers, exit statuses. Nothing here changes a run.
Read `dashboard.py` first.
"""
