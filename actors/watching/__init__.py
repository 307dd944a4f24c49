"""Displays and probes of a run: the terminal, the web pages, the health check.

In: the status that a master publishes, and run folders. Out: pages, numbers, exit statuses. Nothing here changes a run.
Read `dashboard.py` first.
"""
