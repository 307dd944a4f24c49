"""Errors, texts, processes, secrets and plug-ins. All other rooms use this room, and base imports no other room.

Read `errors.py` first, then `extensions.py`, the table by which names become objects.
"""
