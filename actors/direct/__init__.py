"""Weights straight from the trainer into the engines of generators, by vLLM's weight transfer.

In: a version that the trainer has written. Out: the version's tensors in an engine, without files. Read
`direct_weights.py` first.
"""
