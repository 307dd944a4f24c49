"""Weights as files: a model's folder, published versions, chunks on the bus, the choice of the sender, adapters.

In: a model's folder, tensors of the trainer. Out: tensors by name, folders that loaders read. Read `model_files.py`
first: a single function finds the files, tensors, types and ties of a model's folder.
"""
