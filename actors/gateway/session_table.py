"""The sessions of users at a gateway: sessions opened here, and sessions adopted from lost gateways."""

import asyncio
from collections import Counter
from typing import Any

import structlog

from actors.gateway.keys import UserKeys
from actors.gateway.session_links import SessionLinks
from actors.gateway.user_sessions import UserSession
from actors.runtime.membership import Membership
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Sampling
from areal.extensions.agents.openai_api import ApiError
from protocols.attempt_messages import AskCalls, AskSamples, LostLeases, RenewLeases, StoredCalls, StoredSamples
from protocols.session_messages import AdoptSessions, SessionAnswer, SessionGroup, Sessions

NO_SESSION = "-"
"""The id of calls without a session id, which no client can choose: calls of a key share a session until it is idle."""
# Sessions that a gateway adopts at a time.
ADOPTED = 64
# The states of a session that has its reward.
REWARDED = ("ready", "batched", "trained")
# The state of a session that nobody knows.
GONE = "gone"
# The most answered calls of ended sessions that the account of a key remembers.
ANSWERED = 10_000

log = structlog.get_logger()


class SessionTable:
    """See the module. `counts`: numbers of sessions, by fate. `unnamed`: by key, the name of the session for calls
    without a session id."""

    def __init__(self, member: Membership, sampling: Sampling, keys: UserKeys) -> None:
        self._member = member
        self._config = member.config
        self._sampling = sampling
        self._keys = keys
        self.links = SessionLinks(member, sampling, self.drop)
        self.sessions: dict[str, UserSession] = {}
        self.unnamed: dict[str, str] = {}
        self.counts = Counter[str]()
        self._opening: dict[str, asyncio.Lock] = {}

    def opening(self, name: str) -> asyncio.Lock:
        """The lock to hold while the session of this name is opened, adopted or looked up."""
        return self._opening.setdefault(name, asyncio.Lock())

    def forget_locks(self) -> None:
        """Forget the locks of sessions that are not here."""
        self._opening = {n: lock for n, lock in self._opening.items() if n in self.sessions or lock.locked()}

    def add(self, name: str, group: SessionGroup | None) -> UserSession:
        links, account = self.links, self._keys.of_session(name)
        session = UserSession(self._sampling.services, name, group, account, links.save, links.report_start)
        self.sessions[name] = session
        return session

    async def adopt(self, group: SessionGroup) -> UserSession | None:
        """Continue a session of a lost gateway, from the calls that the trainer has. Return None if the session
        has its reward."""
        here = self.sessions.get(group.session)
        if here is not None and here.group is not None and here.group.group == group.group:
            return here
        session = self.add(group.session, group)
        stored = await self._sampling.ask_trainer(AskCalls(group=group.group, place=0), StoredCalls)
        self.counts["adopted"] += 1
        session.account.prepay()
        if len(stored.frame):
            try:
                await session.restore(stored.frame.data)
            except (SampleFailed, ApiError, ValueError) as error:
                log.warning("a session cannot go on", session=group.session, error=str(error))
                await self.discard(session, "failed")
                return self.add(group.session, None)
        else:  # its gateway may have been lost before the master heard that the sample is stored
            question = AskSamples(group=group.group, prompt_index=group.prompt_index)
            if (await self._sampling.ask_trainer(question, StoredSamples)).places:
                self.drop(session)
                return None
        if not session.ended:
            session.account.open.add(session.name)
        log.info("a session goes on here", session=group.session, group=group.group)
        return session

    async def find(self, name: str, mark: str = "") -> UserSession | SessionAnswer:
        """The session, if it is here or has lost its gateway; otherwise the master's answer about the session."""
        async with self.opening(name):
            if name in self.sessions or not self._config.max_sessions:
                return self.sessions.get(name, SessionAnswer())
            answer = await self.links.ask(name, False, mark)
            if answer.session is not None:
                return await self.adopt(answer.session) or await self.links.ask(name, False, mark)
            check_holder(answer)
            return answer

    async def state(self, name: str) -> dict[str, Any]:
        session = await self.find(name)
        if isinstance(session, SessionAnswer):
            return {"id": name, "state": session.state or GONE}
        version = session.sample.newest_version
        state = "untrained" if session.group is None else "ended" if session.ended else "open"
        return {"id": name, "state": state, "version": version, "tokens": session.sample.tokens_sampled}

    async def discard(self, session: UserSession, reason: Any) -> None:
        """Drop a session for good, and give up its group."""
        self.end_for_good(session)
        if session.group is not None:
            self.counts[reason] += 1
            await self.links.discard(session.name, reason, session.group.group)

    def end_for_good(self, session: UserSession) -> None:
        """Drop a session that no gateway continues. A repeat of an answered call opens no new session."""
        key, answered = session.account.name, session.account.answered
        name = f"{key}:{NO_SESSION}" if self.unnamed.get(key) == session.name else session.name
        answered |= dict.fromkeys((name, mark) for mark in session.answered)
        while len(answered) > ANSWERED:
            del answered[next(iter(answered))]
        self.drop(session)

    def drop(self, session: UserSession) -> None:
        session.close()
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]
            session.account.open.discard(session.name)

    async def renew(self) -> None:
        """Renew the leases of the sessions here, and adopt sessions that have lost their gateway."""
        groups = {s.group.group: s for s in self.sessions.values() if s.group is not None}
        if groups:
            renewed = await self._member.ask_master(RenewLeases(groups=tuple(groups)), LostLeases)
            for group in renewed.groups:
                await self._lose(groups[group])
        if self._config.max_sessions:
            orphans = await self._member.ask_master(AdoptSessions(count=ADOPTED), Sessions)
            for orphan in orphans.sessions:
                self._adopt_soon(orphan)

    async def _lose(self, session: UserSession) -> None:
        """The lease of a session has ended: the session has expired, or another gateway may have adopted it."""
        answer = await self.links.ask(session.name, opens=False)
        if answer.state == "open":
            self.drop(session)
            if answer.session:
                self._adopt_soon(answer.session)
            return
        if answer.state in REWARDED:  # at another gateway
            return self.end_for_good(session)
        self.counts["expired"] += 1
        session.group = None  # its calls are served, and none of it is trained
        if session.ended:
            self.end_for_good(session)

    def _adopt_soon(self, orphan: SessionGroup) -> None:
        """Adopt a session in a task of its own: leases are renewed also while the trainer is away."""

        async def adopt() -> None:
            async with self.opening(orphan.session):
                await self.adopt(orphan)

        self._member.spawn(adopt(), "adopt session")


def check_holder(answer: SessionAnswer) -> None:
    """Raises ApiError if another gateway has the session."""
    if answer.session is None and answer.state == "open":
        raise elsewhere()


def elsewhere() -> ApiError:
    return ApiError("another gateway has this session: make its calls there", "elsewhere", 409)
