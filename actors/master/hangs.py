"""Finds members that hang: a work of the member has stood still for far too long."""

from collections.abc import Iterator

import structlog

from actors.master.members import Members
from areal.staleness.standstills import UNKNOWN, Standstills
from protocols.membership_messages import Heartbeat, Member, Work, actor_name

log = structlog.get_logger()


class Hangs:
    """`seconds`: the least limit of a standstill. All members of a role share the history of a kind of work.

    `alerts`: by member and kind, a sentence about a work that stands still for more than half the limit."""

    def __init__(self, members: Members, seconds: float) -> None:
        self._members = members
        self._standstills = Standstills(seconds, UNKNOWN * seconds)
        self.alerts: dict[tuple[str, str], str] = {}

    def hear(self, member: Member, beat: Heartbeat) -> None:
        """Learn from works that have ended."""
        for kind, longest in beat.ended.items():
            self._standstills.end((member.role, kind), longest)

    def find(self) -> list[tuple[str, str]]:
        """The members that hang, each with the reason, in words. Call once a second; logs warnings."""
        hung, alerts = {}, {}
        for identity, work in self._works():
            kind = identity.partition("/")[0], work.kind
            limit = self._standstills.limit(kind)
            if work.still > limit:
                self._standstills.hang(kind)
                hung[identity] = (
                    f"it hangs: {work.what} has stood still for {work.still:.0f} s (limit {limit:.0f} s, "
                    f"master.hang_seconds)"
                )
            elif work.still > limit / 2:
                alerts[identity, work.kind] = alert = (
                    f"{actor_name(identity)} may hang: {work.what} has stood still for {limit / 2:.0f} s; it is "
                    f"started again after {limit:.0f} s"
                )
                if (identity, work.kind) not in self.alerts:
                    log.warning(alert)
        self.alerts = alerts
        return list(hung.items())

    def _works(self) -> Iterator[tuple[str, Work]]:
        for identity, last in self._members.heartbeats.last.items():
            yield from ((identity, work) for work in last.beat.works if work.kind)
