"""Alerts about machines of a run that run out of memory, before a kernel kills processes."""

import structlog

from actors.master.members import Members
from actors.master.run_state import RunState
from actors.runtime.vitals import ENOUGH_BYTES
from protocols.addresses import host_of
from protocols.membership_messages import actor_name

LITTLE_BYTES = 1 << 30

log = structlog.get_logger()


class Memory:
    """`alerts`: a lasting sentence for every host below LITTLE_BYTES, until it has ENOUGH_BYTES again."""

    def __init__(self, state: RunState, members: Members) -> None:
        self._state, self._members = state, members
        self.alerts: dict[str, str] = {}

    def look(self) -> None:
        """Call once a second."""
        hosts: dict[str, dict[str, dict[str, float]]] = {}
        for identity, member in self._state.members.items():
            if "free_memory" in (stats := self._members.heartbeats.last[identity].beat.stats):
                hosts.setdefault(host_of(member.address), {})[actor_name(identity)] = stats
        earlier, self.alerts = self.alerts, {}
        for host, actors in hosts.items():
            free = min(stats["free_memory"] for stats in actors.values())
            if free < (ENOUGH_BYTES if host in earlier else LITTLE_BYTES):
                size, largest = max((stats["memory"], actor) for actor, stats in actors.items())
                self.alerts[host] = earlier.get(host) or (
                    f"{host} has {free / (1 << 30):.2f} GiB of memory left, and will kill processes when it has none. "
                    f"The largest actor is {largest} ({size / (1 << 30):.2f} GiB, with the processes that it started)."
                )
        for host in self.alerts.keys() - earlier.keys():
            log.warning(self.alerts[host])
