"""The sessions of users that a gateway has: they are opened, found, adopted, rewarded and ended.

A session holds a permit from its first call until its reward is stored, or until it expires; nothing waits for it.
Without a permit it is served and not trained.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import structlog

from actors.gateway.endpoint import NO_SESSION
from actors.gateway.keys import UserKeys
from actors.gateway.served_policy import ServedPolicy
from actors.gateway.user_sessions import UserReward, UserSession, note_error
from actors.runtime.membership import Membership
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Sampling
from areal.base.errors import explain
from areal.extensions.agents.openai_api import ApiError, SamplingFields
from areal.samples.trajectory import Trajectory, row_text
from protocols.bus_errors import BusError, FencedError, RefusedError
from protocols.messages import (
    AskCalls,
    AskSamples,
    Done,
    GroupAccepted,
    GroupStarted,
    LostLeases,
    Message,
    RenewLeases,
    ScoredSample,
    StoreCalls,
    StoredCalls,
    StoredSamples,
    StoreSamples,
)
from protocols.session_messages import (
    AdoptSessions,
    AskSession,
    DiscardSession,
    SessionAnswer,
    SessionDiscarded,
    SessionGroup,
    Sessions,
)

# Sessions that a gateway adopts at a time.
ADOPTED = 64
# Calls of which the seconds to the first token are averaged.
FIRST_TOKENS = 256
# The states of a session that has its reward.
REWARDED = ("ready", "batched", "trained")
# The state of a session of which nothing is known here.
GONE = "gone"
NOT_STORED = "the session could not be stored, so this answer or reward does not count: ask again"
# Answered calls of sessions of a key that have ended, which are known.
ANSWERED = 10_000

T = TypeVar("T")
M = TypeVar("M", bound=Message)
log = structlog.get_logger()


class SessionLinks:
    """What the master and the trainer are told and asked of sessions. drop: forgets a session that cannot be stored."""

    def __init__(self, member: Membership, sampling: Sampling, drop: Callable[[UserSession], None]) -> None:
        self._member = member
        self._sampling = sampling
        self._drop = drop

    async def discard(self, name: str, reason: Any, group: str = "") -> SessionDiscarded:
        """Give up a group of this name, or all that are alive. Raises ApiError if a batch has one."""
        request = DiscardSession(session=name, group=group, reason=reason)
        try:
            return await self._member.ask_master(request, SessionDiscarded)
        except FencedError:
            raise
        except RefusedError as error:
            raise ApiError(f"it cannot be deleted any more: {error}", "in_training", 409) from None

    async def ask(self, name: str, opens: bool, mark: str = "") -> SessionAnswer:
        return await self._member.ask_master(AskSession(session=name, opens=opens, mark=mark), SessionAnswer)

    async def is_open(self, group: SessionGroup) -> bool:
        """Whether the session has neither expired nor been deleted meanwhile."""
        answer = await self.ask(group.session, opens=False)
        return answer.session is not None and answer.session.group == group.group

    def report_start(self, session: UserSession, version: int) -> None:
        if session.group is not None:
            session.sample.min_version = max(version, session.group.min_version)
            started = GroupStarted(group=session.group.group, start_version=version)
            self._member.spawn(self._member.ask_master(started, Done), "session started")

    async def save(self, session: UserSession, frame: bytes) -> None:
        assert session.group is not None
        request = StoreCalls(
            group=session.group.group,
            prompt_index=session.group.prompt_index,
            place=0,
            frame=np.frombuffer(frame, np.uint8),
            number=session.saves,
        )
        await self.store(session, request, Done)

    async def store(self, session: UserSession, request: Message, answer: type[M]) -> M:
        """Raises ApiError if the trainer refuses it. Then the session is forgotten here: it goes on from what is
        stored, where it is asked for again, or at another gateway already."""
        try:
            return await self._sampling.ask_trainer(request, answer)
        except FencedError:
            raise
        except RefusedError as error:
            self._drop(session)
            log.warning("a session cannot be stored", session=session.name, error=str(error))
            raise ApiError(NOT_STORED, "not_stored", 507) from None


class OpenSessions:
    """See the module. keys: of the users. `counts`: numbers of sessions, by what became of them. `policy`: as it is
    served."""

    def __init__(self, member: Membership, sampling: Sampling, keys: UserKeys) -> None:
        self._member = member
        self._config = member.config
        self._settings = member.config.gateway
        self._sampling = sampling
        self._keys = keys
        self._links = SessionLinks(member, sampling, self._drop)
        self.policy = ServedPolicy(member, sampling)
        self._sessions: dict[str, UserSession] = {}
        self._unnamed: dict[str, str] = {}  # the session of calls that name none, by key
        self._works: set[asyncio.Task[Any]] = set()
        self._opening: dict[str, asyncio.Lock] = {}
        self.counts = Counter[str]()
        self._first_tokens: deque[float] = deque(maxlen=FIRST_TOKENS)

    @property
    def busy(self) -> bool:
        """Whether a call or a reward is in progress."""
        return bool(self._works) or any(session.running for session in self._sessions.values())

    async def close(self) -> None:
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        await asyncio.gather(*(session.leave() for session in self._sessions.values()))

    def stats(self) -> dict[str, float]:
        names = ("opened", "rewarded", "expired", "deleted", "refused", "untrained", "adopted")
        numbers = {f"sessions_{name}": float(self.counts[name]) for name in names}
        numbers["sessions_open"] = float(sum(session.group is not None for session in self._sessions.values()))
        if self._first_tokens:
            numbers["first_token_seconds"] = sum(self._first_tokens) / len(self._first_tokens)
        return numbers

    def count(self, name: str) -> None:
        self.counts[name] += 1

    async def look(self) -> None:
        """End the sessions that are idle, and expire those that have no reward in time."""
        now = asyncio.get_running_loop().time()
        for session in list(self._sessions.values()):
            self._first_tokens.extend(session.first_tokens)
            session.first_tokens.clear()
            try:
                await self._look_at(session, now)
            except (ApiError, BusError) as error:
                log.warning("a session could not be ended", session=session.name, error=str(error))
        self._opening = {n: lock for n, lock in self._opening.items() if n in self._sessions or lock.locked()}

    async def _see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. It goes on if the client does not wait for it any more."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        task.add_done_callback(note_error)
        return await asyncio.shield(task)

    def untrained(self, key: str, request: SamplingFields) -> UserSession:
        """A session for one request alone, which may ask for other sampling than the run's. No table has it, and it
        never has a group: none of it can be trained. Raises ApiError."""
        self.policy.generators()
        name, links = f"{key}:{secrets.token_hex(8)}", self._links
        account = self._keys.accounts[key]
        session = UserSession(self._sampling.services, name, None, account, links.save, links.report_start)
        session.sample.sampling = request.changed(session.sample.sampling)
        self.count("untrained")
        return session

    def check_call(self, name: str, mark: str) -> None:
        """Raises ApiError if a session of this name that has ended has answered the call with this mark."""
        if mark and (name, mark) in self._keys.of_session(name).answered:
            why = "the session that answered this Idempotency-Key has ended: give the call a new one to begin another"
            raise ApiError(why, "session_over", 409)

    async def open_session(self, name: str, train: bool) -> UserSession:
        """The session of this name, which takes calls. Raises ApiError."""
        self.policy.generators()
        key = name.partition(":")[0]
        if name == f"{key}:{NO_SESSION}":
            name = self._unnamed.get(key, "")
            if (session := self._sessions.get(name)) is None or session.ended or session.full:
                name = self._unnamed[key] = f"{key}:{secrets.token_hex(8)}"
        async with self._opening.setdefault(name, asyncio.Lock()):
            if (session := self._sessions.get(name)) and session.is_over:
                async with session.rewarding:  # until it is stored: this is another one of that name
                    session = self._sessions.get(name)
            if session and session.group and not train:
                await self._discard(session, "opted out")
                session = None
            if session and session.full:
                why = "the session has all its tokens (gateway.max_session_tokens): end it, and begin another one"
                raise ApiError(why, "session_full", 409)
            with self._keys.accounts[key].opening(name):
                session = session or await self._begin(name, train)
            session.ended = False  # who comes back goes on
            return session

    async def give_back(self, session: UserSession) -> None:
        """Give up a session of which no call was answered: its permit is free for others."""
        used = session.sample.calls or session.running or session.rewarding.locked() or session.saves
        if session.group is not None and not session.group.resumed and not used:
            await self._discard(session, "unused")

    async def state(self, name: str) -> dict[str, Any]:
        session = await self._find(name)
        if isinstance(session, SessionAnswer):
            return {"id": name, "state": session.state or GONE}
        version = session.sample.newest_version
        state = "untrained" if session.group is None else "ended" if session.ended else "open"
        return {"id": name, "state": state, "version": version, "tokens": session.sample.tokens_sampled}

    async def reward(self, name: str, reward: UserReward) -> dict[str, Any]:
        """The reward of a session ends it: once its sample is ready, or given up, that is the answer. That of a call is
        stored with its session. A repeat with the same mark has the same answer."""
        session = await self._find(name, reward.mark)
        if isinstance(session, SessionAnswer):
            earlier = _known_reward(session, name, reward)
            return earlier or {"id": name, "state": session.state or GONE, "changed": False}
        return await self._see_through(self._reward(session, reward))

    async def _reward(self, session: UserSession, reward: UserReward) -> dict[str, Any]:
        name, mark, call = session.name, reward.mark, reward.call
        async with session.rewarding:
            earlier = None
            _check_gave(session.gave.get(mark, ""), reward)
            if mark and (session.rewarded or mark not in session.gave):
                earlier = _known_reward(await self._links.ask(name, False, mark), name, reward, session.admitted)
            if earlier or session.group is None or session.rewarded:  # its lease may have ended meanwhile
                return earlier or await self.state(name) | {"changed": False}
            if call is not None:
                session.give_reward(reward.value, call, mark)
                await session.save()
                return _taken(name, call)
            is_first = not (session.group.resumed or session.is_over)
            accepted = await self._finish(session, reward)
            if mark and not (is_first and accepted):  # what the trainer has may be of a request before
                answer = await self._links.ask(name, False, mark)
                accepted = bool(_known_reward(answer, name, reward, session.admitted))
            return _taken(name, call) if accepted else {"id": name, "state": GONE, "changed": False}

    async def end(self, name: str) -> dict[str, Any]:
        session = await self._find(name)
        if isinstance(session, SessionAnswer):
            return {"id": name, "state": session.state or GONE}
        await self._see_through(self._end(session))
        return await self.state(name)

    async def delete(self, name: str) -> dict[str, Any]:
        """Give up all sessions of this name that are not trained yet. Says how many, and which steps have trained
        earlier ones."""
        session, discarded = self._sessions.get(name), SessionDiscarded(count=0)
        if self._config.max_sessions:
            discarded = await self._links.discard(name, "deleted")
        if discarded.holder:
            raise _elsewhere()
        if session is not None:
            self._end_for_good(session)
        untrained = int(session is not None and session.group is None)
        deleted, steps = untrained + discarded.count, [*discarded.trained_in]
        self.counts["deleted"] += deleted
        state = "trained" if steps else "deleted" if deleted else GONE
        return {"id": name, "state": state, "deleted": deleted, "trained_in": steps}

    async def _begin(self, name: str, train: bool) -> UserSession:
        group = None
        if train and self._config.max_sessions:
            answer = await self._links.ask(name, opens=True)
            group = answer.session
            _check_holder(answer)
            if group is None and self._settings.without_permit == "wait":
                raise ApiError("as many sessions are open as may be: try again later", "no_permit", 429)
        if group is not None and group.resumed:  # if it turns out to be ready, this is another one
            return await self._adopt(group) or await self._begin(name, train)
        self.count("opened" if group else "untrained")
        return self._add(name, group)

    def _add(self, name: str, group: SessionGroup | None) -> UserSession:
        links, account = self._links, self._keys.of_session(name)
        session = UserSession(self._sampling.services, name, group, account, links.save, links.report_start)
        self._sessions[name] = session
        return session

    async def _adopt(self, group: SessionGroup) -> UserSession | None:
        """Go on with a session whose gateway was lost, with what the trainer has of it. None: it has its reward."""
        here = self._sessions.get(group.session)
        if here is not None and here.group is not None and here.group.group == group.group:
            return here
        session = self._add(group.session, group)
        stored = await self._sampling.ask_trainer(AskCalls(group=group.group, place=0), StoredCalls)
        self.count("adopted")
        session.account.prepay()
        if len(stored.frame):
            try:
                await session.restore(stored.frame.data)
            except (SampleFailed, ApiError, ValueError) as error:
                log.warning("a session cannot go on", session=group.session, error=str(error))
                await self._discard(session, "failed")
                return self._add(group.session, None)
        else:  # its gateway may have been lost before the master heard that the sample is stored
            question = AskSamples(group=group.group, prompt_index=group.prompt_index)
            if (await self._sampling.ask_trainer(question, StoredSamples)).places:
                self._drop(session)
                return None
        if not session.ended:
            session.account.open.add(session.name)
        log.info("a session goes on here", session=group.session, group=group.group)
        return session

    async def _find(self, name: str, mark: str = "") -> UserSession | SessionAnswer:
        """The session, if it is here or another gateway has left it; else what the master knows of it."""
        async with self._opening.setdefault(name, asyncio.Lock()):
            if name in self._sessions or not self._config.max_sessions:
                return self._sessions.get(name, SessionAnswer())
            answer = await self._links.ask(name, False, mark)
            if answer.session is not None:
                return await self._adopt(answer.session) or await self._links.ask(name, False, mark)
            _check_holder(answer)
            return answer

    async def _end(self, session: UserSession) -> None:
        """The session takes no calls any more. It is ready if it has rewards, or gateway.score gives it one."""
        async with session.rewarding:
            self._close(session)
            if session.rewarded:
                return
            if session.group is None:
                self._end_for_good(session)
            elif session.chat.rewards:
                await self._finish(session)
            elif self._settings.score and session.sample.calls:
                await self._score(session)
            else:
                await session.save()

    def _close(self, session: UserSession) -> None:
        """It takes no calls any more, and leaves room for another one in its key's account."""
        session.ended = True
        session.account.open.discard(session.name)

    async def _score(self, session: UserSession) -> None:
        try:
            score = await session.sample.score(session.chat.last_text)
        except SampleFailed as failure:
            self._sampling.report_failure(failure.cause, f"{failure}")
            await self._discard(session, "failed")
        else:
            if session.running or not session.ended:  # who came back meanwhile goes on
                session.ended = False
                session.account.open.add(session.name)
                return
            if session.group is None:  # it has expired meanwhile
                return self._end_for_good(session)
            await self._finish(session, UserReward(score, session.sample.reward_parts, None, ""))

    async def _finish(self, session: UserSession, reward: UserReward | None = None) -> bool:
        """Have the trainer store the sample. Returns False if it is not trained: it was deleted, or has expired."""
        group = session.group
        assert group is not None
        self._close(session)
        if not session.sample.calls:
            if not await self._links.is_open(group):  # its calls may have been at the gateway before
                self._end_for_good(session)
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
        accepted = (await self._links.store(session, request, GroupAccepted)).accepted
        session.rewarded = True
        self.count("rewarded" if accepted else "expired")
        self._sampling.services.succeeded += accepted
        self._end_for_good(session)
        return accepted

    async def _discard(self, session: UserSession, reason: Any) -> None:
        self._end_for_good(session)
        if session.group is not None:
            self.count(reason)
            await self._links.discard(session.name, reason, session.group.group)

    def _end_for_good(self, session: UserSession) -> None:
        """Drop a session that goes on nowhere. Its answered calls are not answered anew, in another session."""
        key, answered = session.account.name, session.account.answered
        name = f"{key}:{NO_SESSION}" if self._unnamed.get(key) == session.name else session.name
        answered |= dict.fromkeys((name, mark) for mark in session.answered)
        while len(answered) > ANSWERED:
            del answered[next(iter(answered))]
        self._drop(session)

    def _drop(self, session: UserSession) -> None:
        session.close()
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            session.account.open.discard(session.name)

    async def renew(self) -> None:
        """Keep the sessions here, and adopt those that were left."""
        groups = {s.group.group: s for s in self._sessions.values() if s.group is not None}
        if groups:
            renewed = await self._member.ask_master(RenewLeases(groups=tuple(groups)), LostLeases)
            for group in renewed.groups:
                await self._lose(groups[group])
        if self._config.max_sessions:
            orphans = await self._member.ask_master(AdoptSessions(count=ADOPTED), Sessions)
            for orphan in orphans.sessions:
                self._adopt_soon(orphan)

    async def _lose(self, session: UserSession) -> None:
        """The lease of a session has ended: it has expired, or another gateway may have gone on with it."""
        answer = await self._links.ask(session.name, opens=False)
        if answer.state == "open":
            self._drop(session)
            if answer.session:
                self._adopt_soon(answer.session)
            return
        if answer.state in REWARDED:  # at another gateway
            return self._end_for_good(session)
        self.count("expired")
        session.group = None  # its calls are served, and none of it is trained
        if session.ended:
            self._end_for_good(session)

    def _adopt_soon(self, orphan: SessionGroup) -> None:
        """Leases are renewed while the trainer is away."""

        async def adopt() -> None:
            async with self._opening.setdefault(orphan.session, asyncio.Lock()):
                await self._adopt(orphan)

        self._member.spawn(adopt(), "adopt session")

    async def _look_at(self, session: UserSession, now: float) -> None:
        """End or expire a session that is due."""
        if session.rewarding.locked():
            return
        if not session.ended and not session.running and now - session.used >= self._settings.idle_seconds:
            await self._end(session)
        elif session.group is not None and now - session.begun >= self._settings.session_seconds:
            await self._discard(session, "expired")


def _known_reward(
    answer: SessionAnswer, name: str, reward: UserReward, group: str | None = None
) -> dict[str, Any] | None:
    """The answer to a reward that came before with this mark; None: there is none. group: of the session that is here.
    Raises ApiError if another reward has ended the session, or if the mark is of another reward or session."""
    receipt = answer.receipt
    if receipt is None:
        if reward.mark and answer.state in REWARDED:
            raise ApiError(f"session {name} has its reward already: it came with another id", "rewarded", 409)
        return None
    _check_gave(receipt.gave, reward)
    if group not in (None, receipt.group):
        why = f"the reward with this id was taken for an earlier session {name}: give this one's an id of its own"
        raise ApiError(why, "id_in_use", 409)
    return _taken(name, reward.call)


def _check_gave(gave: str, reward: UserReward) -> None:
    """Raises ApiError if what came before with the mark gave something else. gave: empty if that is not known."""
    if gave not in ("", reward.gave):
        raise ApiError("another reward came with this id: give this one an id of its own", "id_in_use", 409)


def _taken(name: str, call: str | None) -> dict[str, Any]:
    """The answer to a reward that counts."""
    return {"id": name, "state": "ready" if call is None else "open", "changed": True}


def _clipped(trajectory: Trajectory, bounds: tuple[float, float]) -> Trajectory:
    """The sample with a reward within the bounds, which a sum of rewards of answers may leave."""
    changes: dict[str, Any] = {"reward": float(np.clip(trajectory.reward, *bounds))}
    if trajectory.returns is not None:
        changes["returns"] = trajectory.returns.clip(*bounds)
    return replace(trajectory, **changes)


def _check_holder(answer: SessionAnswer) -> None:
    """Raises ApiError if another gateway has the session."""
    if answer.session is None and answer.state == "open":
        raise _elsewhere()


def _elsewhere() -> ApiError:
    return ApiError("another gateway has this session: make its calls there", "elsewhere", 409)
