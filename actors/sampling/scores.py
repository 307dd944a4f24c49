"""The scores of completions, by reward actors, scorers or the policy: of one sample, or of all samples of a group.

The samples of a group wait for each other, and one call scores all their completions.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from actors.sampling.flows import Job
from actors.sampling.jobs import (
    SampleFailed,
    ScoreJob,
    ScoringRules,
    TokensJob,
    ended,
    score_with_retries,
)
from areal.base import extensions
from areal.config import Config
from areal.data.rows import Row, prompt_text
from areal.rewards.result import Result, all_scored
from areal.samples.trajectory import TokenScores


class Dispatcher(Protocol):
    """What does jobs (actors.sampling.dispatch.Dispatch)."""

    async def run(self, job: Job) -> Any:
        """The result of a job. Raises SampleFailed."""


def judges_of(config: Config, dispatch: Dispatcher, tokenizer: Any) -> Any:
    """The rewards for which the policy itself is asked (actors.scorer.policy_judges). Raises UserError if their options
    do not fit."""
    if not config.policy_judges:
        return {}
    return extensions.need("scorer", "policy_judges", "url: policy").load()(config, dispatch, tokenizer)


class Rewards:
    """The rewards and the scorers of a run. scorers: those that give rewards, by the reward's name. judges: of
    `judges_of`."""

    def __init__(self, dispatch: Dispatcher, rules: ScoringRules, scorers: Mapping[str, str], judges: Any) -> None:
        self._dispatch = dispatch
        self._rules = rules
        self._scorers = scorers
        self._judges = judges

    async def score(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: np.ndarray | None
    ) -> list[Result]:
        """The score by the reward `name` of one completion, or if it is one of groups of each of those of a group.
        Raises SampleFailed if the reward failed on every attempt."""
        if name in self._judges:
            judged = partial(self._judges.score, name, prompt, completions, row)
            return await score_with_retries(name, self._rules.config.retries, judged, self._rules.on_refusal)
        job = ScoreJob(self._rules, name, prompt, completions, row, tokens, self._scorers.get(name))
        results: list[Result] = await self._dispatch.run(job)
        return results

    async def score_tokens(self, name: str, tokens: np.ndarray) -> TokenScores:
        """What the scorer `name` gives int32 [T] tokens. Raises SampleFailed."""
        scores: TokenScores = await self._dispatch.run(TokensJob(self._rules, name, tokens))
        return scores


class Sibling(Protocol):
    """A sample that waits for the others of its group (actors.sampling.sessions.SampleSession)."""

    async def save_rest(self) -> None: ...
    def close(self) -> None: ...


class GroupScores:
    """The scores of a group of `sessions`, in the order of their places. `needed`: as many samples make the group."""

    def __init__(self, rewards: Rewards, row: Row, sessions: Sequence[Sibling], needed: int) -> None:
        self._rewards = rewards
        self._row = row
        self._sessions = sessions
        self._needed = needed
        self._completions: dict[Sibling, str] = {}
        self._complete = asyncio.Event()
        self._scoring: asyncio.Task[dict[Sibling, dict[str, Result]]] | None = None

    async def score(self, session: Sibling, names: Iterable[str], completion: str) -> dict[str, Result]:
        """The results of these rewards for a sample's completion, once the group has all. What the sample has sampled
        is saved meanwhile. Raises SampleFailed if a reward fails, or if the group has enough without the sample."""
        if session in self._completions:
            reason = f"it calls session.score twice, but {', '.join(names)} scores all samples of a group once"
            raise SampleFailed("workflow", reason)
        if self._complete.is_set():
            raise ended()
        self._completions[session] = completion
        self._close_if_complete()
        await session.save_rest()
        await self._complete.wait()
        if self._scoring is None:
            self._scoring = asyncio.create_task(self._score_all([*names]))
        return (await asyncio.shield(self._scoring))[session]

    def finished(self, session: Sibling) -> None:
        """A workflow has ended. If it did not ask for scores, the group is complete without its completion. Raises
        SampleFailed if the group has enough without the sample."""
        if session not in self._completions:
            if self._complete.is_set():
                raise ended()
            self._needed -= 1
            self._close_if_complete()

    async def close(self) -> None:
        """End the scoring. No task of it is left."""
        if self._scoring is not None:
            self._scoring.cancel()
            await asyncio.gather(self._scoring, return_exceptions=True)

    def _close_if_complete(self) -> None:
        if len(self._completions) == self._needed:
            self._complete.set()
            for session in self._sessions:
                if session not in self._completions:
                    session.close()

    async def _score_all(self, names: Sequence[str]) -> dict[Sibling, dict[str, Result]]:
        sessions = [session for session in self._sessions if session in self._completions]
        completions, prompt = [self._completions[session] for session in sessions], prompt_text(self._row.prompt)
        results = await all_scored(
            names, lambda name: self._rewards.score(name, prompt, completions, self._row.fields, None)
        )
        return {session: {name: results[name][n] for name in names} for n, session in enumerate(sessions)}
