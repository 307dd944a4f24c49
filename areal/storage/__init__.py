"""The data of a run on disk: the journal, the spool, rollouts, and the run folder with its records.

In: changes, samples, metrics. Out: the same data after any crash. Read `journal.py` and `spool.py` first. All tools
read a run by `record.py`, the record of a run as a read-only object.
"""
