"""How sessions end: by a reward, by their client, by idleness, or without a reward in time."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import structlog

from actors.gateway.session_table import GONE, REWARDED, SessionTable
from actors.gateway.user_sessions import UserReward, UserSession, note_error
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Sampling
from areal.base.errors import explain
from areal.config import Config
from areal.extensions.agents.openai_api import ApiError
from areal.samples.trajectory import Trajectory, row_text
from protocols.bus_errors import BusError
from protocols.messages import GroupAccepted, ScoredSample, StoreSamples
from protocols.session_messages import SessionAnswer

T = TypeVar("T")
log = structlog.get_logger()


class SessionEnds:
    """See the module. A session that ends with a reward becomes a sample of the trainer."""

    def __init__(self, config: Config, sampling: Sampling, table: SessionTable) -> None:
        self._config = config
        self._settings = config.gateway
        self._sampling = sampling
        self._table = table
        self._works: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a reward or an end is in progress."""
        return bool(self._works)

    async def close(self) -> None:
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)

    async def _see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which continues even if the client stops waiting."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        task.add_done_callback(note_error)
        return await asyncio.shield(task)

    async def look(self) -> None:
        """End idle sessions, and expire sessions that have no reward in time."""
        now = asyncio.get_running_loop().time()
        for session in list(self._table.sessions.values()):
            try:
                await self._look_at(session, now)
            except (ApiError, BusError) as error:
                log.warning("a session could not be ended", session=session.name, error=str(error))

    async def _look_at(self, session: UserSession, now: float) -> None:
        if session.rewarding.locked():
            return
        if not session.ended and not session.running and now - session.used >= self._settings.idle_seconds:
            await self._end(session)
        elif session.group is not None and now - session.begun >= self._settings.session_seconds:
            await self._table.discard(session, "expired")

    async def reward(self, name: str, reward: UserReward) -> dict[str, Any]:
        """Take a reward, and answer once it is stored. The reward of a session ends the session, and makes the sample
        ready, or gives it up. The reward of a call is stored with its session. A repeat with the same mark gets the
        same answer. Raises ApiError."""
        session = await self._table.find(name, reward.mark)
        if isinstance(session, SessionAnswer):
            earlier = _known_reward(session, name, reward)
            return earlier or {"id": name, "state": session.state or GONE, "changed": False}
        return await self._see_through(self._reward(session, reward))

    async def _reward(self, session: UserSession, reward: UserReward) -> dict[str, Any]:
        name, mark, call, links = session.name, reward.mark, reward.call, self._table.links
        async with session.rewarding:
            earlier = None
            _check_gave(session.gave.get(mark, ""), reward)
            if mark and (session.rewarded or mark not in session.gave):
                earlier = _known_reward(await links.ask(name, False, mark), name, reward, session.admitted)
            if earlier or session.group is None or session.rewarded:  # the lease may have ended meanwhile
                return earlier or await self._table.state(name) | {"changed": False}
            if call is not None:
                session.give_reward(reward.value, call, mark)
                await session.save()
                return _taken(name, call)
            is_first = not (session.group.resumed or session.is_over)
            accepted = await self._finish(session, reward)
            if mark and not (is_first and accepted):  # an earlier request may have stored the trainer's sample
                answer = await links.ask(name, False, mark)
                accepted = bool(_known_reward(answer, name, reward, session.admitted))
            return _taken(name, call) if accepted else {"id": name, "state": GONE, "changed": False}

    async def end(self, name: str) -> dict[str, Any]:
        """End a session for its client. Returns its state."""
        session = await self._table.find(name)
        if isinstance(session, SessionAnswer):
            return {"id": name, "state": session.state or GONE}
        await self._see_through(self._end(session))
        return await self._table.state(name)

    async def _end(self, session: UserSession) -> None:
        """Stop the calls of a session. A session with rewards, or scored by gateway.score, becomes a sample."""
        async with session.rewarding:
            self._stop_calls(session)
            if session.rewarded:
                return
            if session.group is None:
                self._table.end_for_good(session)
            elif session.chat.rewards:
                await self._finish(session)
            elif self._settings.score and session.sample.calls:
                await self._score(session)
            else:
                await session.save()

    def _stop_calls(self, session: UserSession) -> None:
        """Take no more calls, and make room for another session in the account of the key."""
        session.ended = True
        session.account.open.discard(session.name)

    async def _score(self, session: UserSession) -> None:
        try:
            score = await session.sample.score(session.chat.last_text)
        except SampleFailed as failure:
            self._sampling.report_failure(failure.cause, f"{failure}")
            await self._table.discard(session, "failed")
        else:
            if session.running or not session.ended:  # a client has come back meanwhile, and the session continues
                session.ended = False
                session.account.open.add(session.name)
                return
            if session.group is None:  # the session has expired meanwhile
                return self._table.end_for_good(session)
            await self._finish(session, UserReward(score, session.sample.reward_parts, None, ""))

    async def _finish(self, session: UserSession, reward: UserReward | None = None) -> bool:
        """Have the trainer store the sample. Returns False if the session was deleted or has expired, and is not
        trained. Raises ApiError."""
        group = session.group
        assert group is not None
        self._stop_calls(session)
        if not session.sample.calls:
            if not await self._table.links.is_open(group):  # the gateway before may have had its calls
                self._table.end_for_good(session)
                return False
            raise ApiError("nothing was sampled in this session", "no_calls")
        with explain(ValueError, "the session cannot be trained: {why}", partial(ApiError, code="bad_reward")):
            trajectory = session.sample.trajectory(None if reward is None else reward.value)
        if session.chat.rewards:
            trajectory = _clipped(trajectory, self._settings.reward_range)
        gave = session.gave | ({reward.mark: reward.gave} if reward and reward.mark else {})
        fields = {"session": session.name, "messages": session.sample.messages}
        sample = ScoredSample(
            place=0,
            frame=np.frombuffer(trajectory.frame(), np.uint8),
            parts=dict(reward.parts) if reward else {},
            discarded=max(0, session.sample.tokens_sampled - int(trajectory.sampled.sum())),
            generators=tuple(session.sample.generators),
            marks=tuple(gave),
            gave=tuple(gave.values()),
        )
        request = StoreSamples(
            group=group.group,
            prompt_index=group.prompt_index,
            row=row_text(fields) if self._config.observe.rollouts != "none" else "",
            samples=(sample,),
        )
        session.is_over = True
        accepted = (await self._table.links.store(session, request, GroupAccepted)).accepted
        session.rewarded = True
        self._table.counts["rewarded" if accepted else "expired"] += 1
        self._sampling.services.succeeded += accepted
        self._table.end_for_good(session)
        return accepted


def _known_reward(
    answer: SessionAnswer, name: str, reward: UserReward, group: str | None = None
) -> dict[str, Any] | None:
    """The answer to an earlier reward with the same mark, or None. group: the group of the session at this gateway.
    Raises ApiError if another reward has ended the session, or if the mark belongs to another reward or session."""
    receipt = answer.receipt
    if receipt is None:
        if reward.mark and answer.state in REWARDED:
            raise ApiError(f"session {name} has its reward already: it came with another id", "rewarded", 409)
        return None
    _check_gave(receipt.gave, reward)
    if group not in (None, receipt.group):
        why = f"the reward with this id was taken for an earlier session {name}: give this reward a new id"
        raise ApiError(why, "id_in_use", 409)
    return _taken(name, reward.call)


def _check_gave(gave: str, reward: UserReward) -> None:
    """Raises ApiError if an earlier reward with this mark gave something else. gave: the value in the earlier receipt;
    empty if unknown."""
    if gave not in ("", reward.gave):
        raise ApiError("another reward came with this id: give this reward a new id", "id_in_use", 409)


def _taken(name: str, call: str | None) -> dict[str, Any]:
    """The answer to a reward that counts."""
    return {"id": name, "state": "ready" if call is None else "open", "changed": True}


def _clipped(trajectory: Trajectory, bounds: tuple[float, float]) -> Trajectory:
    """The sample with its reward clipped to the bounds, which a sum of rewards of answers may exceed."""
    changes: dict[str, Any] = {"reward": float(np.clip(trajectory.reward, *bounds))}
    if trajectory.returns is not None:
        changes["returns"] = trajectory.returns.clip(*bounds)
    return replace(trajectory, **changes)
