"""The terminal's display of a run: lines of the start and of steps, or a live view.

In: the status of the run, from the master. Read `display.py` first; `monitor.py` shows a run elsewhere.
"""
