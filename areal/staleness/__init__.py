"""State machines without I/O: they decide which groups may start, which are trained next, and how far generation leads.

In: requests for permits, ready groups, committed steps. Out: events, and the decisions. Read `ledger.py` first, then
docs/staleness.md, which proves the bound.
"""
