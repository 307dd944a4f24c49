"""The master: it keeps the ledger, the versions and the directory, and answers every other role.

Read first: `master.py`.
"""
