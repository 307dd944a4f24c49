"""Rewards: name resolution, worker processes, and the built-in reward functions.

The names in `__all__` are public, for use in custom rewards. A reward that is a plain function needs none of them.
"""

from areal.rewards.result import Result, RewardError

__all__ = ["Result", "RewardError"]
