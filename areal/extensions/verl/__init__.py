"""Calls rewards that were written for verl: `verl_rewards.py`."""
