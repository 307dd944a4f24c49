"""Features that a run of rows with functions as rewards does not need. A folder adds one feature and can be deleted.

A folder's `README.md` says what the folder adds, what it costs and how to remove it. Its `extension.toml` adds entries
to the table of extensions (areal/base/extensions.py). The core imports nothing from here.
"""
