"""A run folder before a run is resumed: missing files, and copies.

In: the folder of a run that has ended. Out: a folder to resume from, or a UserError. Read `completeness.py` first.
"""
