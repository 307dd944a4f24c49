"""Results that a stranger can check: the record of a run as one file, and recipes with the results to expect of them.

In: run folders, and configurations with an expect.yaml beside them. Out: records, a table, an exit code. Read
`run_archive.py` first for records, `recipe.py` for recipes.
"""
