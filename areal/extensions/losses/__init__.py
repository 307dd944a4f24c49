"""Losses of objectives that are not settings of decoupled PPO: a file for each equation, such as `gspo.py`."""
