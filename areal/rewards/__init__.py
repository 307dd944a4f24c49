"""Rewards: lookup by name, worker processes, and the built-in reward functions.

In: a prompt, completions and a row. Out: finite numbers, or a failure instead of a score. Read `functions.py` first,
for the interface; then `pool.py`, which runs rewards in worker processes. `lookup.py` finds rewards by name.

The names in `__all__` are public, for use in custom rewards. A reward that is a plain function needs none of them.
"""

from areal.rewards.functions import Result, RewardError

__all__ = ["Result", "RewardError"]
