"""Weights as files: a model's folder, published versions, chunks on the bus, the choice of the sender, adapters.

In: a model's folder, tensors of the trainer. Out: tensors by name, folders that loaders read. Read `model_files.py`
first: one function says which files, tensors, types and ties a model's folder has.
"""
