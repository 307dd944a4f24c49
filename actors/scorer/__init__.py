"""The scorer: one frozen model by name, on a vLLM engine of its own.

In: tokens or completions. Out: log-probs, or scores. Read `scorer.py`: it has the table of loops.
"""
