"""State machines without I/O: which groups may start, which are trained next, and how far generation runs ahead.

In: permits asked for, groups that are ready, steps that are committed. Out: events, and the decisions that follow from
them. Read `ledger.py` first, then docs/staleness.md, which proves the bound.
"""
