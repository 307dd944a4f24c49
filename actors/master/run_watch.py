"""The master's look at the run every second: silence, hangs, leases, late evaluations, disks, memory, and stalls."""

import asyncio
from collections.abc import Callable, Iterator

import structlog

from actors.master.disks import Disks
from actors.master.hangs import Hangs
from actors.master.membership_requests import SILENT_SECONDS
from actors.master.memory import Memory
from actors.master.run_control import RunControl
from actors.runtime import vitals
from areal.storage.disk import Shortage
from areal.storage.records import flat

WATCH_SECONDS = 1.0

log = structlog.get_logger()


class RunWatch:
    """Looks after a run. remove: removes a member for a reason. `numbers`: for Prometheus."""

    def __init__(self, run: RunControl, hangs: Hangs, remove: Callable[[str, str], None]) -> None:
        self._run, self._members = run, run.members
        self._remove = remove
        self._hangs = hangs
        self._disks = Disks()
        self._memory = Memory(run.state, run.members)
        self.numbers: dict[str, float] = {}

    async def repeat(self) -> None:
        """Look every second, until cancelled."""
        last = self._run.now()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (absent := self._run.now() - last - WATCH_SECONDS) > WATCH_SECONDS:
                log.warning("the master process was suspended", seconds=absent)
                self._run.suspended += absent
                self._run.ledger.leases.renew_all(self._run.now(), self._run.config.master.lease_seconds)
            last = self._run.now()
            self._look(last)

    def _look(self, now: float) -> None:
        """Remove silent or hanging actors, expire leases, abandon a late evaluation, react to a stall."""
        run, heartbeats = self._run, self._members.heartbeats
        for identity, silence in heartbeats.silent(run.config.master.lease_seconds):
            self._remove(identity, f"silent for {silence:.0f} s")
        for identity, hang in self._hangs.find():
            self._remove(identity, hang)
        if lost := run.ledger.leases.expire(now):
            log.warning("leases expired", groups=lost)
        run.evaluations.watch()
        run.progress.servers.look()
        run.changed.notify()
        self._disks.look([*self._shortages()], now)
        self._memory.look()
        if run.shortage or run.progress.longest_work() or heartbeats.silent(SILENT_SECONDS):
            run.progress.note_progress()
        run.end_if(run.failures.verdict(run.ledger.state.counters, now))
        run.state.compact_if_due()
        self._record()
        self._remedy_stall()

    def _shortages(self) -> Iterator[Shortage]:
        """The shortages of disks that actors wait for now."""
        yield from filter(None, (self._run.journal.shortage, self._run.disk_retry.shortage))
        for last in self._members.heartbeats.last.values():
            if short := last.beat.shortage:
                yield Shortage(**short.model_dump())

    def _record(self) -> None:
        """Record the master's activity, as a heartbeat of the master."""
        run = self._run
        counts, vital = run.admission.counts(), vitals.numbers()
        doing = "; ".join([str(run.shortage or run.progress.who_waits()), *self._hangs.alerts.values()])
        run.folder.record_heartbeat("master/0", "healthy", doing, counts | vital)
        self.numbers = {
            **{f"groups_{name}": float(n) for name, n in counts.items()},
            **{f"step_{name}": value for name, value in flat(run.state.last_step or {}).items() if name != "step"},
            "version": float(run.ledger.version),
            **vital,
        }

    def _remedy_stall(self) -> None:
        run = self._run
        match run.progress.remedy():
            case "end":
                run.end_if(run.progress.describe_stall())
            case "fence":
                suspects, stall = run.progress.suspects(), run.progress.describe_stall()
                log.warning("stalled: fencing the actors that the run waits for", waits=stall, members=suspects)
                for identity in suspects:
                    self._remove(identity, f"the run waits for it: {stall}")
            case "requeue":
                owners = [identity for identity, member in run.state.members.items() if member.role != "gateway"]
                released = [group for owner in owners for group in run.ledger.leases.release(owner)]
                log.warning("stalled: groups are re-queued", waits=run.progress.describe_stall(), groups=released)
                run.evaluations.abandon("the run made no progress")
                run.changed.notify()

    def alerts(self) -> list[str]:
        """The sentences for the user of the run on the console, in the order of their beginning within each kind."""
        disks = filter(None, (self._run.folder.filling, self._disks.alert))
        pauses = filter(None, [self._run.progress.servers.pause])
        return [
            *self._run.failures.firsts.values(),
            *self._hangs.alerts.values(),
            *self._memory.alerts.values(),
            *filter(None, (last.beat.alert for last in self._members.heartbeats.last.values())),
            *disks,
            *pauses,
        ]
