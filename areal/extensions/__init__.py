"""What a run of rows with functions as rewards does not need. Each folder adds one thing and can be deleted.

The `README.md` of a folder says what it adds, what it costs and how it is removed; its `extension.toml` has the entries
that it adds to the table of extensions (areal/base/extensions.py). The core imports nothing from here.
"""
