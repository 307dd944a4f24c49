"""Machines of a run whose memory runs out: what its user is told before their kernels kill processes."""

from __future__ import annotations

import structlog

from actors.mastering.members import Members
from protocols.addresses import host_of
from protocols.messages import actor_name

LITTLE_BYTES, ENOUGH_BYTES = 1 << 30, 2 << 30

log = structlog.get_logger()


class Memory:
    """`alerts`: of each host that has had less than LITTLE_BYTES since it last had ENOUGH_BYTES, one sentence that does
    not change."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.alerts: dict[str, str] = {}

    def look(self) -> None:
        """To be called once a second."""
        hosts: dict[str, dict[str, dict[str, float]]] = {}
        for member, last in self._members.heard():
            if "free_memory" in last.beat.stats:
                actors = hosts.setdefault(host_of(member.address), {})
                actors[actor_name(member.identity)] = last.beat.stats
        self.alerts = {host: alert for host, alert in self.alerts.items() if host in hosts}
        for host, actors in hosts.items():
            free = min(stats["free_memory"] for stats in actors.values())
            if free > ENOUGH_BYTES:
                self.alerts.pop(host, None)
            elif free < LITTLE_BYTES and host not in self.alerts:
                largest = max(actors, key=lambda actor: actors[actor]["memory"])
                self.alerts[host] = alert = (
                    f"{host} has {free / (1 << 30):.2f} GiB of memory left, and will kill processes when it has none. "
                    f"The largest of the actors' own is that of {largest} ({actors[largest]['memory'] / (1 << 30):.2f} "
                    f"GiB)."
                )
                log.warning(alert)
