"""A run folder before a run goes on from it: what the folder lacks, and copies.

In: the folder of a run that has ended. Out: a folder that can be resumed, or a UserError. Read `completeness.py` first.
"""
