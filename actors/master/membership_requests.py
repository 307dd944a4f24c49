"""Every actor's requests to the master: to join, to beat, to leave, and for a snapshot; and the removal of members."""

import asyncio
from typing import Any

import structlog

from actors.master.farewell import Farewell
from actors.master.hangs import Hangs
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.storage.events import GONE
from protocols.addresses import host_of, is_loopback
from protocols.membership_messages import (
    AskSnapshot,
    ConnectionLost,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Leave,
    Member,
    Snapshot,
    Welcome,
    actor_name,
)
from protocols.messages import Done
from protocols.network import Network
from protocols.transport import Request, fingerprint

# A member has missed some heartbeats, perhaps suspended. Before the member is heard or fenced, nothing stalls.
SILENT_SECONDS = 5.0

log = structlog.get_logger()


class MembershipRequests(HandlesRequests):
    """Answers every actor. `network` says whether an address refuses connections."""

    def __init__(self, run: RunControl, hangs: Hangs, farewell: Farewell, network: Network) -> None:
        self._run, self._members = run, run.members
        self._hangs = hangs
        self._farewell = farewell
        self._network = network

    @handles(Join)
    async def join(self, request: Request[Join]) -> Welcome:
        join, mark = request.message, fingerprint(request.token)
        member = self._members.find_joined(join, mark) or self._admit(self._members.new_entry(join, mark))
        start = f"{self._run.state.masters}/{self._members.starts[actor_name(member.identity)]}"
        config: dict[str, Any] = self._run.config.model_dump(mode="json")
        return Welcome(identity=member.identity, start=start, config=config, snapshot=self._snapshot())

    def _admit(self, member: Member) -> Member:
        place = f"{actor_name(member.identity)}#"
        for occupant in [identity for identity in self._run.state.members if identity.startswith(place)]:
            self.remove(occupant, f"replaced by {member.identity}")
        self._members.add(member)
        log.info("joined", actor=member.identity, address=member.address)
        if member.role == "generator" and not self._run.end.done():
            self._run.evaluations.hold_version_0(member)
        first = next(iter(self._run.state.members.values()))
        if is_loopback(host_of(first.address)) != is_loopback(host_of(member.address)):
            log.warning("some actors listen where no other host reaches them: use --host", joined=member.identity)
        return member

    @handles(Heartbeat)
    async def heartbeat(self, request: Request[Heartbeat]) -> HeartbeatAnswer:
        member, beat, run = self._run.member(request), request.message, self._run
        last = self._members.heartbeats.last[member.identity]
        changed = self._members.update(member, beat)
        self._members.heartbeats.record(member.identity, beat)
        self._hangs.hear(member, beat)
        fresh = run.meter.count(beat.stats, None if last.restored else last.beat.stats)
        if beat.stats.get("samples_scored", 0.0) > 0:
            run.failures.any_succeeded = True
        worked = beat.stats.get("work_done", 0.0) > last.beat.stats.get("work_done", 0.0)
        if changed or worked or fresh["tokens_generated"] > 0:
            run.progress.note_progress()
        name, spans = actor_name(member.identity), [(span.name, span.began, span.seconds) for span in beat.spans]
        run.folder.record_heartbeat(name, beat.state, beat.activity, beat.stats, beat.clock, spans)
        routes = member.role in ("rollout_manager", "gateway")
        return HeartbeatAnswer(
            policy=run.state.policy,
            sequence=run.announcements.publisher.sequence,
            ended=self._farewell.shutdown,
            loads=self._members.heartbeats.loads_for(member.identity) if routes else None,
        )

    @handles(Leave)
    async def leave(self, request: Request[Leave]) -> Done:
        if request.sender in self._run.state.members:
            self.remove(request.sender, request.message.reason)
        return Done()

    @handles(AskSnapshot)
    async def ask_snapshot(self, request: Request[AskSnapshot]) -> Snapshot:
        return self._snapshot()

    def _snapshot(self) -> Snapshot:
        events = self._run.announcements.publisher
        return self._members.snapshot(events.sequence, events.address)

    @handles(ConnectionLost)
    async def connection_lost(self, request: Request[ConnectionLost]) -> Done:
        """Remove a member at once, before its lease ends, if nobody listens at the member's address and no heartbeat
        comes."""
        self._run.member(request)
        await self._remove_if_dead(request.message.identity, SILENT_SECONDS)
        return Done()

    async def look_for_the_dead(self) -> None:
        """Look for dead members without connections, such as a rollout manager: nobody notices their death."""
        while True:
            await asyncio.sleep(SILENT_SECONDS)
            silent = self._members.heartbeats.silent(2 * SILENT_SECONDS)
            await asyncio.gather(*(self._remove_if_dead(identity, 0.0) for identity, _ in silent))

    async def _remove_if_dead(self, identity: str, seconds: float) -> None:
        """Remove a member if nobody listens at the member's address, and no heartbeat comes for `seconds`."""
        member, last = self._run.state.members.get(identity), self._members.heartbeats.last.get(identity)
        if member and await self._network.refuses(member.address):
            await asyncio.sleep(seconds)
            if self._members.heartbeats.last.get(identity) is last:
                self.remove(identity, f"nobody listens at {member.address}")

    def remove(self, identity: str, reason: str) -> None:
        """Remove a member. The member's leases return, and its requests are refused from now on."""
        self._run.progress.await_successor()
        self._run.evaluations.lose_member(self._run.state.members[identity])
        self._members.remove(identity, reason)
        self._run.folder.record_heartbeat(actor_name(identity), GONE, reason, {})
        released = self._run.ledger.leases.release(identity)
        if not self._run.end.done():
            self._run.evaluations.hold_version_0()
            log.warning("left", actor=identity, reason=reason, released=released)
