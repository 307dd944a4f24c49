"""The gateway: serves the policy to users while it learns. Their sessions are samples, each a group of one.

A session holds a permit from its first call until its reward is stored, or until it expires; nothing waits for it.
Without a permit it is served and not trained. A call is answered once the trainer has it on disk, and a reward once its
sample is ready, so that a kill loses nothing of which the user was told. Another gateway goes on with the sessions of
one that was lost.

| loop, besides those of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| endpoint | requests of users | their answers |
| renew leases | a quarter of a lease | keeps its sessions, adopts those that were left |
| watch | 1 s | ends what is idle, expires what has no reward in time |
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import structlog

from actors.gateway.endpoint import NO_SESSION, GatewayEndpoint
from actors.gateway.keys import UserKeys
from actors.gateway.user_sessions import UserSession, note_error
from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Sampling
from areal.base.errors import UserError, explain
from areal.extensions.agents.openai_api import ApiError
from areal.samples.trajectory import row_text
from protocols.bus_errors import BusError, RefusedError
from protocols.messages import (
    AdoptSessions,
    AskCalls,
    AskSamples,
    AskSession,
    DiscardSession,
    Done,
    GroupAccepted,
    GroupStarted,
    LoadColumns,
    LostLeases,
    Message,
    RenewLeases,
    ScoredSample,
    SessionAnswer,
    SessionGroup,
    Sessions,
    StoreCalls,
    StoredCalls,
    StoredSamples,
    StoreSamples,
    Work,
)

WATCH_SECONDS = 1.0
# Sessions that a gateway adopts at a time.
ADOPTED = 64
# Calls of which the seconds to the first token are averaged.
FIRST_TOKENS = 256
# Time for the calls in progress when the gateway leaves.
LEAVE_SECONDS = 20.0
# The states of a session that has its reward.
REWARDED = ("ready", "batched", "trained")
# The state of a session of which nothing is known here.
GONE = "gone"

T = TypeVar("T")
M = TypeVar("M", bound=Message)
log = structlog.get_logger()


class Gateway(Actor):
    role = "gateway"

    @classmethod
    async def start(cls, member: Membership, **options: Any) -> Self:
        settings = member.config.gateway
        if not settings.keys:
            raise UserError("The run has no gateway.keys, so that nobody could make a call: add one (docs/gateway.md).")
        return cls(member, await Sampling.start(member, users=settings.serve == "evaluated"))

    def __init__(self, member: Membership, sampling: Sampling) -> None:
        self.member = member
        self.config, self.directory = member.config, member.directory
        self.sampling = sampling
        self._settings = self.config.gateway
        self._sessions: dict[str, UserSession] = {}
        self._unnamed: dict[str, str] = {}  # the session of calls that name none, by key
        self._works: set[asyncio.Task[Any]] = set()
        self._opening: dict[str, asyncio.Lock] = {}
        self._counts = Counter[str]()
        self._first_tokens: deque[float] = deque(maxlen=FIRST_TOKENS)
        self._keys = UserKeys(self._settings.keys, asyncio.get_running_loop().time)
        port = self._settings.port and self._settings.port + (self.member.index or 0)
        self._endpoint = GatewayEndpoint(
            self.config.name, self._settings, port, self._keys, self, lambda refusal: self._count("refused")
        )
        self.member.used.push_async_callback(self._close_sessions)
        self.member.used.push_async_callback(self._endpoint.close)

    async def main(self) -> None:
        with explain(OSError, "the gateway cannot listen: {strerror}: choose another gateway.port"):
            port = await self._endpoint.listen()
        address = f"http{'s' if self._settings.certificate else ''}://{self._settings.host}:{port}/v1"
        self.member.activity = f"serving at {address}"
        log.info("gateway ready", address=address)
        await self.member.become_healthy()
        self.member.spawn(self._renew_leases(), "renew leases")
        self.member.spawn(self._watch(), "watch sessions")

    async def hand_over(self) -> None:
        """Let the calls in progress end. Other gateways go on with the sessions."""
        for _ in range(int(LEAVE_SECONDS / WATCH_SECONDS)):
            if not self._works and not any(session.running for session in self._sessions.values()):
                break
            await asyncio.sleep(WATCH_SECONDS)

    async def _close_sessions(self) -> None:
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        await asyncio.gather(*(session.leave() for session in self._sessions.values()))

    async def _see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. It goes on if the client does not wait for it any more."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        task.add_done_callback(note_error)
        return await asyncio.shield(task)

    def stats(self) -> dict[str, float]:
        names = ("opened", "rewarded", "expired", "deleted", "refused", "untrained", "adopted")
        numbers = {f"sessions_{name}": float(self._counts[name]) for name in names}
        numbers["sessions_open"] = float(sum(session.group is not None for session in self._sessions.values()))
        if self._first_tokens:
            numbers["first_token_seconds"] = sum(self._first_tokens) / len(self._first_tokens)
        return self.sampling.stats() | numbers

    def works(self) -> tuple[Work, ...]:
        return self.sampling.works()

    def note_loads(self, loads: LoadColumns) -> None:
        self.sampling.dispatch.loads.note(loads)

    def _count(self, name: str) -> None:
        self._counts[name] += 1

    # --- what the endpoint asks

    @property
    def tokenizer(self) -> Any:
        return self.sampling.services.tokenizer

    async def open_session(self, name: str, train: bool) -> UserSession:
        """The session of this name, which takes calls. Raises ApiError."""
        if self.member.state == "draining":
            raise ApiError("this gateway is leaving: ask another one", "leaving", 503)
        if self.sampling.dispatch.users and not any(m.serving for m in self.directory.with_role("generator")):
            raise ApiError("no evaluated version is served now: try again later", "no_version", 503)
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
            if session is None:
                limit = self._keys.configured[key].sessions
                if limit is not None and sum(s.key == key and not s.ended for s in self._sessions.values()) >= limit:
                    raise ApiError(f"this key may have {limit} sessions at a time: end one", "too_many_sessions", 429)
                session = await self._begin(name, train)
            session.ended = False  # who comes back goes on
            return session

    async def _begin(self, name: str, train: bool) -> UserSession:
        group = None
        if train and self.config.max_sessions:
            answer = await self._ask_session(name, opens=True)
            group = answer.session
            _check_holder(answer)
            if group is None and self._settings.without_permit == "wait":
                raise ApiError("as many sessions are open as may be: try again later", "no_permit", 429)
        if group is not None and group.resumed:  # if it turns out to be ready, this is another one
            return await self._adopt(group) or await self._begin(name, train)
        self._count("opened" if group else "untrained")
        return self._add(name, group)

    def _add(self, name: str, group: SessionGroup | None) -> UserSession:
        session = UserSession(self.sampling.services, name, group, self._save, self._report_start)
        self._sessions[name] = session
        return session

    async def _adopt(self, group: SessionGroup) -> UserSession | None:
        """Go on with a session whose gateway was lost, with what the trainer has of it. None: it has its reward."""
        here = self._sessions.get(group.session)
        if here is not None and here.group is not None and here.group.group == group.group:
            return here
        session = self._add(group.session, group)
        stored = await self.sampling.ask_trainer(AskCalls(group=group.group, place=0), StoredCalls)
        self._count("adopted")
        if len(stored.frame):
            try:
                await session.restore(stored.frame.data)
            except (SampleFailed, ApiError, ValueError) as error:
                log.warning("a session cannot go on", session=group.session, error=str(error))
                await self._discard(session, "failed")
                return self._add(group.session, None)
        else:  # its gateway may have been lost before the master heard that the sample is stored
            question = AskSamples(group=group.group, prompt_index=group.prompt_index)
            if (await self.sampling.ask_trainer(question, StoredSamples)).places:
                self._drop(session)
                return None
        log.info("a session goes on here", session=group.session, group=group.group)
        return session

    async def state(self, name: str) -> dict[str, Any]:
        session = await self._find(name)
        if isinstance(session, SessionAnswer):
            return {"id": name, "state": session.state or GONE}
        version = session.sample.newest_version
        state = "untrained" if session.group is None else "ended" if session.ended else "open"
        return {"id": name, "state": state, "version": version, "tokens": session.sample.tokens_sampled}

    async def reward(
        self, name: str, value: float, parts: dict[str, float], call: str | None, mark: str
    ) -> dict[str, Any]:
        """The reward of a session ends it: once its sample is ready, or given up, that is the answer. That of a call is
        stored with its session. mark: the client's id for it, or empty: a repeat has the same answer."""
        session = await self._find(name, mark)
        if isinstance(session, SessionAnswer):
            earlier = _known_reward(session, name, call, mark)
            return earlier or {"id": name, "state": session.state or GONE, "changed": False}
        return await self._see_through(self._reward(session, value, parts, call, mark))

    async def _reward(
        self, session: UserSession, value: float, parts: dict[str, float], call: str | None, mark: str
    ) -> dict[str, Any]:
        name = session.name
        async with session.rewarding:
            earlier = None
            if mark and (session.rewarded or mark not in session.marks):
                earlier = _known_reward(await self._ask_session(name, False, mark), name, call, mark)
            if earlier or session.group is None or session.rewarded:  # its lease may have ended meanwhile
                return earlier or await self.state(name) | {"changed": False}
            if call is not None:
                session.give_reward(value, call, mark)
                await session.save()
                return _taken(name, call)
            is_first = not (session.group.resumed or session.is_over)
            accepted = await self._finish(session, value, parts, mark)
            if mark and not (is_first and accepted):  # what the trainer has may be of a request before
                accepted = bool(_known_reward(await self._ask_session(name, False, mark), name, call, mark))
            return _taken(name, call) if accepted else {"id": name, "state": GONE, "changed": False}

    async def end(self, name: str) -> dict[str, Any]:
        session = await self._find(name)
        if isinstance(session, SessionAnswer):
            return {"id": name, "state": session.state or GONE}
        await self._see_through(self._end(session))
        return await self.state(name)

    async def delete(self, name: str) -> None:
        if session := self._sessions.pop(name, None):
            session.close()
        self._count("deleted")
        if self.config.max_sessions:
            in_training = partial(ApiError, code="in_training", status=409)
            with explain(RefusedError, "it cannot be deleted any more: {why}", in_training):
                await self.member.ask_master(DiscardSession(session=name, reason="deleted"), Done)

    async def _find(self, name: str, mark: str = "") -> UserSession | SessionAnswer:
        """The session, if it is here or another gateway has left it; else what the master knows of it."""
        async with self._opening.setdefault(name, asyncio.Lock()):
            if name in self._sessions or not self.config.max_sessions:
                return self._sessions.get(name, SessionAnswer())
            answer = await self._ask_session(name, False, mark)
            if answer.session is not None:
                return await self._adopt(answer.session) or await self._ask_session(name, False, mark)
            _check_holder(answer)
            return answer

    # --- the end of a session

    async def _end(self, session: UserSession) -> None:
        """The session takes no calls any more. It is ready if it has rewards, or gateway.score gives it one."""
        async with session.rewarding:
            session.ended = True
            if session.rewarded:
                return
            if session.group is None:
                self._drop(session)
            elif session.chat.rewards:
                await self._finish(session, None, {})
            elif self._settings.score and session.sample.calls:
                await self._score(session)
            else:
                await session.save()

    async def _score(self, session: UserSession) -> None:
        try:
            score = await session.sample.score(session.chat.last_text)
        except SampleFailed as failure:
            self.sampling.report_failure(failure.cause, f"{failure}")
            await self._discard(session, "failed")
        else:
            if session.running or not session.ended:  # who came back meanwhile goes on
                session.ended = False
                return
            if session.group is None:  # it has expired meanwhile
                return self._drop(session)
            await self._finish(session, score, session.sample.reward_parts)

    async def _finish(
        self, session: UserSession, reward: float | None, parts: dict[str, float], mark: str = ""
    ) -> bool:
        """Have the trainer store the sample. Returns False if it is not trained: it was deleted, or has expired."""
        group = session.group
        assert group is not None
        session.ended = True
        if not session.sample.calls:
            raise ApiError("nothing was sampled in this session", "no_calls")
        with explain(ValueError, "the session cannot be trained: {why}", partial(ApiError, code="bad_reward")):
            trajectory = session.sample.trajectory(reward)
        fields = {"session": session.name, "messages": session.sample.messages}
        sample = ScoredSample(
            place=0,
            frame=np.frombuffer(trajectory.frame(), np.uint8),
            parts=parts,
            discarded=max(0, session.sample.tokens_sampled - int(trajectory.sampled.sum())),
            generators=tuple(session.sample.generators),
            marks=(*session.marks, *filter(None, [mark])),
        )
        request = StoreSamples(
            group=group.group,
            prompt_index=group.prompt_index,
            row=row_text(fields) if self.config.observe.rollouts != "none" else "",
            samples=(sample,),
        )
        session.is_over = True
        accepted = (await self._store(session, request, GroupAccepted)).accepted
        session.rewarded = True
        self._count("rewarded" if accepted else "expired")
        self.sampling.services.succeeded += accepted
        self._drop(session)
        return accepted

    async def _discard(self, session: UserSession, reason: Any) -> None:
        self._drop(session)
        if session.group is not None:
            self._count(reason)
            discard = DiscardSession(session=session.name, group=session.group.group, reason=reason)
            await self.member.ask_master(discard, Done)

    def _drop(self, session: UserSession) -> None:
        session.close()
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    # --- the master and the trainer

    async def _ask_session(self, name: str, opens: bool, mark: str = "") -> SessionAnswer:
        return await self.member.ask_master(AskSession(session=name, opens=opens, mark=mark), SessionAnswer)

    def _report_start(self, session: UserSession, version: int) -> None:
        if session.group is not None:
            session.sample.min_version = max(version, session.group.min_version)
            started = GroupStarted(group=session.group.group, start_version=version)
            self.member.spawn(self.member.ask_master(started, Done), "session started")

    async def _save(self, session: UserSession, frame: bytes) -> None:
        assert session.group is not None
        request = StoreCalls(
            group=session.group.group,
            prompt_index=session.group.prompt_index,
            place=0,
            frame=np.frombuffer(frame, np.uint8),
            number=session.saves,
        )
        await self._store(session, request, Done)

    async def _store(self, session: UserSession, request: Message, answer: type[M]) -> M:
        """Raises ApiError if the trainer refuses it. Then the session is forgotten here: it goes on from what is
        stored, where it is asked for again, or at another gateway already."""
        try:
            return await self.sampling.ask_trainer(request, answer)
        except RefusedError as error:
            self._drop(session)
            raise ApiError(f"the session cannot be stored: {error}", "not_stored", 507) from None

    async def _renew_leases(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(self.config.master.lease_seconds / 4)

    async def _renew(self) -> None:
        """Keep the sessions here, and adopt those that were left."""
        groups = {s.group.group: s for s in self._sessions.values() if s.group is not None}
        if groups:
            renewed = await self.member.ask_master(RenewLeases(groups=tuple(groups)), LostLeases)
            for group in renewed.groups:
                await self._lose(groups[group])
        if self.config.max_sessions:
            orphans = await self.member.ask_master(AdoptSessions(count=ADOPTED), Sessions)
            for orphan in orphans.sessions:
                self._adopt_soon(orphan)

    async def _lose(self, session: UserSession) -> None:
        """The lease of a session has ended: it has expired, or another gateway may have gone on with it."""
        answer = await self._ask_session(session.name, opens=False)
        if answer.state == "open":
            self._drop(session)
            if answer.session:
                self._adopt_soon(answer.session)
            return
        self._count("expired")
        session.group = None  # its calls are served, and none of it is trained
        if session.ended:
            self._drop(session)

    def _adopt_soon(self, orphan: SessionGroup) -> None:
        """Leases are renewed while the trainer is away."""

        async def adopt() -> None:
            async with self._opening.setdefault(orphan.session, asyncio.Lock()):
                await self._adopt(orphan)

        self.member.spawn(adopt(), "adopt session")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = asyncio.get_running_loop().time()
            for session in list(self._sessions.values()):
                self._first_tokens.extend(session.first_tokens)
                session.first_tokens.clear()
                try:
                    await self._look_at(session, now)
                except (ApiError, BusError) as error:
                    log.warning("a session could not be ended", session=session.name, error=str(error))
            self._opening = {n: lock for n, lock in self._opening.items() if n in self._sessions or lock.locked()}

    async def _look_at(self, session: UserSession, now: float) -> None:
        """End or expire a session that is due."""
        if session.rewarding.locked():
            return
        if not session.ended and not session.running and now - session.used >= self._settings.idle_seconds:
            await self._end(session)
        elif session.group is not None and now - session.begun >= self._settings.session_seconds:
            await self._discard(session, "expired")


def _known_reward(answer: SessionAnswer, name: str, call: str | None, mark: str) -> dict[str, Any] | None:
    """The answer to a reward that came before with this mark; None: there is none. Raises ApiError if another one has
    ended the session."""
    if mark and not answer.taken and answer.state in REWARDED:
        raise ApiError(f"session {name} has its reward already: it came with another id", "rewarded", 409)
    return _taken(name, call) if answer.taken else None


def _taken(name: str, call: str | None) -> dict[str, Any]:
    """The answer to a reward that counts."""
    return {"id": name, "state": "ready" if call is None else "open", "changed": True}


def _check_holder(answer: SessionAnswer) -> None:
    """Raises ApiError if another gateway has the session."""
    if answer.session is None and answer.state == "open":
        why = f"another gateway has this session, {answer.holder}: make its calls there"
        raise ApiError(why, "elsewhere", 409)
