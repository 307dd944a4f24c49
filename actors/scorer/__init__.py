"""The scorer: a frozen model by name, on a vLLM engine.

In: tokens or completions. Out: log-probs, or scores. Read `scorer.py` first, with the table of loops.
"""
