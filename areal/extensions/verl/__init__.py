"""Rewards that were written for verl work as they are: `verl_rewards.py`."""
