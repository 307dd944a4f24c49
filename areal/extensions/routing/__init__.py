"""Gives routers of mixtures the experts chosen in sampling. The code is in `routes.py`."""
