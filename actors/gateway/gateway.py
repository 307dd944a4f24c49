"""The gateway: serves the policy to users while it learns. A user's session is a sample, alone in a group.

A session holds a permit from its first call until its reward is stored, or until it expires; no step waits for a
session. A session without a permit is served and not trained. A call is answered once the trainer has it on disk, and a
reward once the sample is ready, so that a kill loses nothing that a user was told. Another gateway continues the
sessions of a lost gateway.

| loop, besides the loops of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| endpoint | requests of users | answers |
| renew leases | a quarter of a lease | keeps the sessions here, adopts sessions of lost gateways |
| watch | 1 s | ends idle sessions, expires sessions without a reward in time |
| share accounts | 1 s | reports the use of keys here, and hears the use at other gateways |
"""

import asyncio
from typing import Any, Self

import structlog

from actors.gateway.endpoint import GatewayEndpoint
from actors.gateway.keys import UserKeys
from actors.gateway.open_sessions import OpenSessions
from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from actors.sampling.sampling import Sampling
from areal.base.errors import UserError, explain
from areal.extensions.agents.openai_api import most_characters
from protocols.membership_messages import LoadColumns, Work
from protocols.session_messages import KeysElsewhere, KeyUse, ReportKeys

WATCH_SECONDS = 1.0
# Time for the calls in progress when the gateway leaves.
LEAVE_SECONDS = 20.0

log = structlog.get_logger()


class Gateway(Actor):
    role = "gateway"

    @classmethod
    async def start(cls, member: Membership, **options: Any) -> Self:
        settings = member.config.gateway
        if not settings.keys:
            raise UserError(
                "The run has no gateway.keys, so that nobody could make a call: add one (areal docs gateway)."
            )
        return cls(member, await Sampling.start(member, users=settings.serve == "evaluated"))

    def __init__(self, member: Membership, sampling: Sampling) -> None:
        self.member = member
        self.config, self.directory = member.config, member.directory
        self.sampling = sampling
        self._settings = self.config.gateway
        self._keys = keys = UserKeys(self._settings.keys, asyncio.get_running_loop().time)
        self.sessions = OpenSessions(member, sampling, keys)
        port = self._settings.port and self._settings.port + (member.index or 0)
        sessions = self.sessions
        limit = most_characters(self.config, sampling.services.tokenizer)
        self._endpoint = GatewayEndpoint(
            self.config.name, self._settings, port, keys, sessions, lambda refusal: sessions.count("refused"), limit
        )
        member.used.push_async_callback(self.sessions.close)
        member.used.push_async_callback(self._endpoint.close)

    async def main(self) -> None:
        with explain(OSError, "the gateway cannot listen: {strerror}: choose another gateway.port"):
            port = await self._endpoint.listen()
        address = f"http{'s' if self._settings.certificate else ''}://{self._settings.host}:{port}/v1"
        self.member.activity = f"serving at {address}"
        log.info("gateway ready", address=address)
        await self.member.become_healthy()
        self.member.spawn(self._renew_leases(), "renew leases")
        self.member.spawn(self._watch(), "watch sessions")
        self.member.spawn(self._share_accounts(), "share accounts")

    async def hand_over(self) -> None:
        """Let the calls in progress end. Other gateways continue the sessions."""
        for _ in range(int(LEAVE_SECONDS / WATCH_SECONDS)):
            if not self.sessions.busy:
                break
            await asyncio.sleep(WATCH_SECONDS)

    def stats(self) -> dict[str, float]:
        return self.sampling.stats() | self.sessions.stats()

    def works(self) -> tuple[Work, ...]:
        return self.sampling.works()

    def note_loads(self, loads: LoadColumns) -> None:
        self.sampling.dispatch.loads.note(loads)

    async def _renew_leases(self) -> None:
        while True:
            await self.sessions.table.renew()
            await asyncio.sleep(self.config.master.lease_seconds / 4)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.sessions.look()

    async def _share_accounts(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.share_accounts()

    async def share_accounts(self) -> None:
        """Tell the master the use of keys here, and hear the use at other gateways."""
        answer = await self.member.ask_master(ReportKeys(keys=self._keys.report()), KeysElsewhere)
        for name, account in self._keys.accounts.items():
            account.elsewhere = answer.keys.get(name, KeyUse())
