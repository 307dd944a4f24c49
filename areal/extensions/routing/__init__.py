"""Gives routers of mixtures the experts that sampling chose. All of it is in `routes.py`."""
