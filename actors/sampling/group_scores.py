"""The scores of a whole group: the samples wait for the whole group, and a single call scores all completions."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from actors.sampling.jobs import SampleFailed, ended
from actors.sampling.services import Rewards
from areal.data.rows import Row, prompt_text
from areal.rewards.functions import Result, all_scored


class Sibling(Protocol):
    """A sample that waits for the rest of its group (actors.sampling.sessions.SampleSession)."""

    async def save_rest(self) -> None: ...
    def close(self) -> None: ...


class GroupScores:
    """The scores of a group of `sessions`, in the order of places. needed: the samples of a complete group."""

    def __init__(self, rewards: Rewards, row: Row, sessions: Sequence[Sibling], needed: int) -> None:
        self._rewards = rewards
        self._row = row
        self._sessions = sessions
        self._needed = needed
        self._completions: dict[Sibling, str] = {}
        self._complete = asyncio.Event()
        self._scoring: asyncio.Task[dict[Sibling, dict[str, Result]]] | None = None

    async def score(self, session: Sibling, names: Iterable[str], completion: str) -> dict[str, Result]:
        """Return the results of these rewards for a completion, once the group is complete. Meanwhile the sample is
        saved. Raises SampleFailed if a reward fails, or if the group is complete without the sample."""
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
        """Note that a workflow has ended. A sample that did not ask for scores counts without a completion. Raises
        SampleFailed if the group is complete without the sample."""
        if session not in self._completions:
            if self._complete.is_set():
                raise ended()
            self._needed -= 1
            self._close_if_complete()

    async def close(self) -> None:
        """End the scoring and its task."""
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
