"""The Python API: a run that is started, watched and served from a notebook or a program (docs/notebooks.md)."""
