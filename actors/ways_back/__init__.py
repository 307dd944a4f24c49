"""Ways back to a checkpoint: a run goes back to a checkpoint, or a new run, a fork, begins with a checkpoint.

In: the folder of a run. Out: the folder as it was at the checkpoint, or the fork's folder. Read `rollback.py` first.
"""
