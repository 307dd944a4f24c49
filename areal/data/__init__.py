"""Sources of rows: files, data sets, generated tasks, and the quickstart's own task and model.

In: `data` of the configuration. Out: rows by index. Read `rows.py` first, then `sources.py`.

The names in this package's `__all__` are public, for users' own workflows, environments and samplers.
"""

from areal.data.history import History, RowHistory
from areal.data.rows import Prompt, Row, prompt_text

__all__ = ["History", "Prompt", "Row", "RowHistory", "prompt_text"]
