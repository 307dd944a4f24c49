"""The evaluator: scores published versions on held-out rows and benchmarks while training goes on.

In: a version that is due, from the master. Out: its scores. Read `evaluator.py`: it has the table of loops.
"""
