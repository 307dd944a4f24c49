"""Ways back to a checkpoint: a run goes back to one, or a new run, a fork, begins with one.

In: the folder of a run. Out: the folder as it was at the checkpoint, or that of the fork. Read `rollback.py` first.
"""
