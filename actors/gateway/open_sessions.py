"""The sessions of a gateway as its endpoint uses them: a call opens a session, and a client may delete it.

A session holds a permit from its first call until its reward is stored, or until it expires; no step waits for a
session. A session without a permit is served and not trained.
"""

import asyncio
import secrets
from collections import deque
from typing import Any

from actors.gateway.keys import UserKeys
from actors.gateway.served_policy import ServedPolicy
from actors.gateway.session_ends import SessionEnds
from actors.gateway.session_table import GONE, NO_SESSION, SessionTable, check_holder, elsewhere
from actors.gateway.user_sessions import UserSession
from actors.runtime.membership import Membership
from actors.sampling.sampling import Sampling
from areal.extensions.agents.openai_api import ApiError, SamplingFields
from protocols.session_messages import SessionDiscarded

# The seconds to the first token are averaged over this many calls.
FIRST_TOKENS = 256


class OpenSessions:
    """See the module. `table`: the sessions here. `ends`: the ends of sessions. `policy`: as users get it."""

    def __init__(self, member: Membership, sampling: Sampling, keys: UserKeys) -> None:
        self._config = member.config
        self._services = sampling.services
        self._keys = keys
        self.policy = ServedPolicy(member, sampling)
        self.table = SessionTable(member, sampling, keys)
        self.ends = SessionEnds(member.config, sampling, self.table)
        self._first_tokens: deque[float] = deque(maxlen=FIRST_TOKENS)

    @property
    def busy(self) -> bool:
        """Whether a call or a reward is in progress."""
        return self.ends.busy or any(session.running for session in self.table.sessions.values())

    async def close(self) -> None:
        await self.ends.close()
        await asyncio.gather(*(session.leave() for session in self.table.sessions.values()))

    def stats(self) -> dict[str, float]:
        names = ("opened", "rewarded", "expired", "deleted", "refused", "untrained", "adopted")
        numbers = {f"sessions_{name}": float(self.table.counts[name]) for name in names}
        numbers["sessions_open"] = float(sum(session.group is not None for session in self.table.sessions.values()))
        if self._first_tokens:
            numbers["first_token_seconds"] = sum(self._first_tokens) / len(self._first_tokens)
        return numbers

    def count(self, name: str) -> None:
        self.table.counts[name] += 1

    async def look(self) -> None:
        """End the sessions that are due."""
        for session in self.table.sessions.values():
            self._first_tokens.extend(session.first_tokens)
            session.first_tokens.clear()
        await self.ends.look()
        self.table.forget_locks()

    def untrained(self, key: str, request: SamplingFields) -> UserSession:
        """A session for a single request with other sampling settings than the run's. The session is not in the table
        and never has a group, so none of it is trained. Raises ApiError."""
        self.policy.generators()
        name, links = f"{key}:{secrets.token_hex(8)}", self.table.links
        account = self._keys.accounts[key]
        session = UserSession(self._services, name, None, account, links.save, links.report_start)
        session.sample.sampling = request.changed(session.sample.sampling)
        self.count("untrained")
        return session

    def check_call(self, name: str, mark: str) -> None:
        """Raises ApiError if an ended session of this name has answered the call with this mark."""
        if mark and (name, mark) in self._keys.of_session(name).answered:
            why = "the session that answered this Idempotency-Key has ended: give the call a new key"
            raise ApiError(why, "session_over", 409)

    async def open_session(self, name: str, train: bool) -> UserSession:
        """The session of this name, which takes calls. Raises ApiError."""
        self.policy.generators()
        sessions, unnamed, key = self.table.sessions, self.table.unnamed, name.partition(":")[0]
        if name == f"{key}:{NO_SESSION}":
            name = unnamed.get(key, "")
            if (session := sessions.get(name)) is None or session.ended or session.full:
                name = unnamed[key] = f"{key}:{secrets.token_hex(8)}"
        async with self.table.opening(name):
            if (session := sessions.get(name)) and session.is_over:
                async with session.rewarding:  # until its sample is stored; then this call opens a new session
                    session = sessions.get(name)
            if session and session.group and not train:
                await self.table.discard(session, "opted out")
                session = None
            if session and session.full:
                why = "the session has all its tokens (gateway.max_session_tokens): end it, and begin another session"
                raise ApiError(why, "session_full", 409)
            with self._keys.accounts[key].opening(name):
                session = session or await self._begin(name, train)
            session.ended = False  # a client that comes back continues the session
            return session

    async def _begin(self, name: str, train: bool) -> UserSession:
        group = None
        if train and self._config.max_sessions:
            answer = await self.table.links.ask(name, opens=True)
            group = answer.session
            check_holder(answer)
            if group is None and self._config.gateway.without_permit == "wait":
                raise ApiError("as many sessions are open as may be: try again later", "no_permit", 429)
        if group is not None and group.resumed:  # if the adopted session has its reward, a new session begins
            return await self.table.adopt(group) or await self._begin(name, train)
        self.count("opened" if group else "untrained")
        return self.table.add(name, group)

    async def give_back(self, session: UserSession) -> None:
        """Give up a session without an answered call, so that another session can have its permit."""
        used = session.sample.calls or session.running or session.rewarding.locked() or session.saves
        if session.group is not None and not session.group.resumed and not used:
            await self.table.discard(session, "unused")

    async def delete(self, name: str) -> dict[str, Any]:
        """Give up all sessions of this name that are not trained yet. Returns the number, and the steps that have
        trained earlier sessions of the name. Raises ApiError."""
        session, discarded = self.table.sessions.get(name), SessionDiscarded(count=0)
        if self._config.max_sessions:
            discarded = await self.table.links.discard(name, "deleted")
        if discarded.holder:
            raise elsewhere()
        if session is not None:
            self.table.end_for_good(session)
        untrained = int(session is not None and session.group is None)
        deleted, steps = untrained + discarded.count, [*discarded.trained_in]
        self.table.counts["deleted"] += deleted
        state = "trained" if steps else "deleted" if deleted else GONE
        return {"id": name, "state": state, "deleted": deleted, "trained_in": steps}
