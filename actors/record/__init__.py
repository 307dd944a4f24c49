"""A run folder before a run goes on from the folder: missing files, and copies.

In: the folder of a run that has ended. Out: a folder to resume from, or a UserError. Read `completeness.py` first.
"""
