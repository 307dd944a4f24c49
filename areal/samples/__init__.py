"""A sample as data: the table of its tokens, the trajectory, the tokenizer, pictures.

A sample's columns live in one table from the engine to the disk. Read `table.py` first: it declares the columns; then
`trajectory.py`, which validates a sample at the trainer's door.
"""
