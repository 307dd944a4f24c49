"""What every other room uses: errors, texts, processes, secrets, plug-ins. It imports no other room.

Read `errors.py` first, then `extensions.py`, the table by which names become objects.
"""
