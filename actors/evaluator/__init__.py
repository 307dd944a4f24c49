"""The evaluator: scores published versions on held-out rows and benchmarks while training goes on.

In: a version that is due, from the master. Out: scores. Read `evaluator.py` first, with the table of loops.
"""
