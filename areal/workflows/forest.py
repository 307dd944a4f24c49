"""All calls of a sample to the policy, as prefix trees: every sampled token once, shared prefixes once.

A call continues an earlier call if the prompt begins with all tokens of the earlier call and answer. Any other call
begins a branch: the branch shares the longest common prefix with an existing branch, and owns the remaining tokens. So
an agent may shorten the history, call itself or repeat a question: the result is a sample without any token lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from areal.config.scoring import Credit
from areal.samples.table import Generation, TokenTable, joined, unsampled
from areal.samples.trajectory import Branch, Trajectory, common


@dataclass(slots=True, eq=False)
class _Path:
    """A branch under construction. table: all tokens of the path, of which the first `shared` belong to `parent`.
    calls: the numbers of the branch's calls, and the places of their answers in the path."""

    table: TokenTable
    shared: int
    parent: "_Path | None"
    calls: list[tuple[int, int]] = field(default_factory=list)
    children: "list[_Path]" = field(default_factory=list)


class Forest:
    """See the module. `calls`: the answers, in order of arrival. `rewards`: by number of the call. `credits`: credits
    of calls in place of the sample's rewards, by number; None: the call is not trained. `agents`: the values of the
    column `agents`, by number of the call."""

    def __init__(self) -> None:
        self.calls: list[Generation] = []
        self.rewards: dict[int, float] = {}
        self.credits: dict[int, float | None] = {}
        self.agents: dict[int, int] = {}
        self._paths: list[_Path] = []

    def add(self, prompt: np.ndarray, sampled: Generation, pictures: np.ndarray | None = None) -> None:
        """Add a call. prompt: int32 [n]. pictures: as in `unsampled`. An answer without tokens is ignored."""
        if not len(sampled.tokens):
            return
        table = unsampled(prompt, pictures)
        path, shared = self._longest(table)
        if path is None or shared < len(path.table):
            path = self._branch(path, shared)
        path.table.append(table.view(shared))
        path.table.append(sampled)
        path.calls.append((len(self.calls), len(prompt)))
        self.calls.append(sampled)

    def reward(self, call: Generation, value: float) -> None:
        """Set the reward of a call. Raises ValueError if `call` is not an answer of this sample."""
        self.rewards[self._number(call)] = float(value)

    def credit(self, call: Generation, value: float | None, agent: str = "") -> None:
        """Credit a call with `value` in place of the sample's rewards; None: do not train it. Raises as `reward`."""
        number = self._number(call)
        self.credits[number], self.agents[number] = value, crc32(agent.encode()) >> 1

    def trajectory(self, reward: float | None, credit: Credit, discount: float) -> Trajectory:
        """Return the sample, with `reward` (0 for None) plus the rewards of all calls as its reward.

        `credit` chooses the credit of tokens. "sample": the sample's reward. "call": `reward` plus the reward of the
        token's call. "return_to_go": the rewards of this and later calls, with `reward` at the last, times `discount`
        for every call in between. `credits` of a call come first. Raises ValueError if nothing was sampled, if there is
        no reward at all, or if a reward is not a valid score.
        """
        if None in self.credits.values():
            return self._trained().trajectory(reward, credit, discount)
        if not self.calls:
            raise ValueError("nothing was sampled")
        if reward is None and not self.rewards:
            raise ValueError("neither the sample nor a call has a reward")
        order = list(self._order())
        columns = joined(path.table.view(path.shared) for path in order)
        total = (reward or 0.0) + sum(self.rewards.values())
        of_calls = self._credits(reward or 0.0, total, credit, discount)
        credits = [total if (gain := self.credits.get(n, value)) is None else gain for n, value in enumerate(of_calls)]
        branches = tuple(Branch(path.shared, len(path.table) - path.shared) for path in order)
        if any(value != total for value in credits):
            columns["returns"] = self._of_calls(order, credits)
        if any(self.agents.values()):
            agents = [self.agents.get(number, 0) for number in range(len(self.calls))]
            columns["agents"] = self._of_calls(order, agents).astype(np.int32)
        finish = self.calls[-1].finish or "length"
        return Trajectory(**columns, reward=total, finish=finish, branches=branches if len(branches) > 1 else ())

    def places(self) -> list[int]:
        """Return the numbers of the calls, in the order of their tokens in `trajectory`."""
        return [number for path in self._order() for number, _ in path.calls]

    def _number(self, call: Generation) -> int:
        number = next((i for i, answer in enumerate(self.calls) if answer is call), None)
        if number is None:
            raise ValueError("a reward was given to a call that this sample does not have, or that sampled no token")
        return number

    def _trained(self) -> "Forest":
        """Return a forest of the trained calls alone. In the prompts, the other calls remain as unsampled text."""
        prompts = {number: path.table.view(0, place) for path in self._paths for number, place in path.calls}
        forest = Forest()
        for number, call in enumerate(self.calls):
            if self.credits.get(number, 0.0) is None:
                continue
            forest.add(prompts[number].tokens, call, prompts[number].pictures)
            for name in ("rewards", "credits", "agents"):
                if number in (of_all := getattr(self, name)):
                    getattr(forest, name)[len(forest.calls) - 1] = of_all[number]
        return forest

    def _longest(self, prompt: TokenTable) -> tuple[_Path | None, int]:
        """Return the path with the longest common prefix with the prompt, and the length of this prefix."""
        best, shared = None, 0
        for path in reversed(self._paths):
            if len(path.table) > shared and (same := common(path.table, prompt)) > shared:
                best, shared = path, same
        return best, shared

    def _branch(self, beside: _Path | None, shared: int) -> _Path:
        while beside is not None and shared <= beside.shared:  # these tokens are not the path's own
            beside = beside.parent
        path = _Path(beside.table.view(0, shared) if beside else TokenTable(), shared, beside)
        if beside is not None:
            beside.children.append(path)
        self._paths.append(path)
        return path

    def _order(self) -> Iterator[_Path]:
        """Yield every path before its branches, the branch with the last branching point first."""
        waiting = [path for path in reversed(self._paths) if path.parent is None]
        while waiting:
            path = waiting.pop()
            yield path
            waiting += sorted(reversed(path.children), key=lambda child: child.shared)

    def _credits(self, reward: float, total: float, credit: Credit, discount: float) -> list[float]:
        """Return the credit of the tokens of each call."""
        rewards = [self.rewards.get(number, 0.0) for number in range(len(self.calls))]
        match credit:
            case "sample":
                return [total] * len(rewards)
            case "call":
                return [reward + value for value in rewards]
        rewards[-1] += reward
        for number in reversed(range(len(rewards) - 1)):
            rewards[number] += discount * rewards[number + 1]
        return rewards

    def _of_calls(self, order: Sequence[_Path], values: Sequence[float]) -> np.ndarray:
        """Return float64 [T]: each call's value at the tokens of the call, and 0 at unsampled tokens."""
        column, start = np.zeros(sum(len(path.table) - path.shared for path in order)), 0
        for path in order:
            for number, place in path.calls:
                begin = start + place - path.shared
                column[begin : begin + len(self.calls[number].tokens)] = values[number]
            start += len(path.table) - path.shared
        return column
