"""A sample as data: the table of tokens, the trajectory, the tokenizer, pictures.

A sample's columns live in a table from the engine to the disk. Read `table.py` first, with the declaration of the
columns, then `trajectory.py`, which validates a sample before the trainer takes it.
"""
