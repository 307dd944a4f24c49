"""What a terminal shows of a run: the lines of its start and its steps, or a live view.

In: the status of the run, from its master. Read `display.py` first; `monitor.py` shows a run elsewhere.
"""
