"""A sample as data: the table of its tokens, the trajectory, the tokenizer, pictures.

Read first: `table.py`, then `trajectory.py`.
"""
