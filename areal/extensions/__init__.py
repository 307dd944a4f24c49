"""Features beyond the core. A run of rows with functions as rewards needs none. A folder can be deleted.

The `README.md` of a folder describes the feature, the cost and the removal. The `extension.toml` beside it adds entries
to the table of extensions (areal/base/extensions.py). The core imports nothing from here.
"""
