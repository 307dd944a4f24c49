"""The data of a run on disk: the journal, the spool, rollouts, and the run folder with its records.

In: changes, samples, metrics. Out: the same after any crash. Read `journal.py` and `spool.py` first; `record.py` is the
record of a run as one object, read-only, which all tools read.
"""
