"""Rewards and tokens of groups. The ledger has neither."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from actors.master.changes import Rewarded


@dataclass(slots=True)
class GroupTally:
    """The rewards and tokens of every group that is ready and not trained yet, and sums over groups.

    rewards, reward_parts: the mean reward of a group, and the mean of every part of the reward. tokens: the sampled
    tokens of a group. tokens_trained, tokens_discarded: sums over the run. tokens_sampled: sum of the generators'
    counts up to the last step, without tokens of evaluations. scored, score: the number of groups that became ready
    since the last step, filtered groups too, and the sum of their mean rewards. discarded: prompt and reason of every
    group discarded since the last step.
    """

    rewards: dict[str, float] = field(default_factory=dict)
    reward_parts: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    tokens_trained: int = 0
    tokens_discarded: int = 0
    tokens_sampled: int = 0
    scored: int = 0
    score: float = 0.0
    discarded: list[tuple[int, str]] = field(default_factory=list)

    def add(self, rewarded: Rewarded) -> None:
        """Add a group that became ready."""
        self.scored, self.score = self.scored + 1, self.score + rewarded.mean
        self.rewards[rewarded.group], self.reward_parts[rewarded.group] = rewarded.mean, rewarded.parts
        self.tokens[rewarded.group] = rewarded.tokens
        self.tokens_discarded += rewarded.discarded

    def drop(self, group: str) -> None:
        """Count the tokens of a group as discarded."""
        self._forget_reward(group)
        self.tokens_discarded += self.tokens.pop(group, 0)

    def train(self, groups: Iterable[str], step: Mapping[str, Any]) -> None:
        """Count the tokens of groups as trained, in a step with the metrics `step`. Begin the next step's counts."""
        self.tokens_sampled += step.get("tokens_generated", 0) - step.get("tokens_evaluated", 0)
        for group in groups:
            self._forget_reward(group)
            self.tokens_trained += self.tokens.pop(group, 0)
        self.discarded.clear()
        self.scored, self.score = 0, 0.0

    def _forget_reward(self, group: str) -> None:
        self.rewards.pop(group, None)
        self.reward_parts.pop(group, None)

    def dump(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def load(self, dump: Mapping[str, Any]) -> None:
        for part in fields(self):
            setattr(self, part.name, dump[part.name])
        self.discarded = [(prompt, reason) for prompt, reason in dump["discarded"]]
