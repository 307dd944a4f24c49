"""What each member of a run has said last, and the load that generators report with it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from actors.runtime.membership import HEARTBEAT_SECONDS
from protocols.membership_messages import Engagement, Heartbeat, LoadColumns, Member

# An asker gets the loads of n generators at most once in n times this, after 500 of them no longer with each heartbeat:
# askers and loads both grow with a cluster, and their product would take the master's core at 8,000 devices.
LOAD_SECONDS = 0.002

NO_BEAT = Heartbeat(state="starting", serves=(), activity="starting", stats={})


@dataclass(slots=True)
class LastHeartbeat:
    """The last heartbeat of a member, and its time by the master's clock. `restored`: the member joined an earlier
    master, and this one has not heard from it yet. `sequences`: all those in the engagement."""

    time: float
    beat: Heartbeat = NO_BEAT
    restored: bool = False
    sequences: int = 0


class Heartbeats:
    """`last`: the last heartbeat of each member. clock: the master's, in seconds. Members of an earlier master count as
    heard from now."""

    def __init__(self, members: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = {identity: LastHeartbeat(clock(), restored=True) for identity in members}
        self._engagements: dict[str, Engagement] = {}  # of the generators, in their last heartbeats
        self._loads_due: dict[str, float] = {}  # when an asker gets loads again

    def add(self, identity: str) -> None:
        self.last[identity] = LastHeartbeat(self._clock())

    def remove(self, identity: str) -> None:
        del self.last[identity]
        self._engagements.pop(identity, None)
        self._loads_due.pop(identity, None)

    def silent(self, seconds: float) -> list[tuple[str, float]]:
        """The members that were silent for longer than `seconds`, and for how long."""
        silences = [(identity, self._clock() - last.time) for identity, last in self.last.items()]
        return [(identity, silence) for identity, silence in silences if silence > seconds]

    def record(self, identity: str, beat: Heartbeat) -> None:
        sequences = 0
        if beat.engagement:
            self._engagements[identity] = beat.engagement
            sequences = sum(beat.engagement.sequences.values())
        self.last[identity] = LastHeartbeat(self._clock(), beat, sequences=sequences)

    def answers_users(self, generator: Member) -> bool:
        """Whether it has sequences of gateways. Those of others may wait for newer weights."""
        load = self.last[generator.identity].beat.engagement
        return load is not None and any(n and asker.startswith("gateway/") for asker, n in load.sequences.items())

    def loads_for(self, asker: str) -> LoadColumns | None:
        """The load of each generator, and how much of it is the asker's; None: it has had them not long ago."""
        now = self._clock()
        if now < self._loads_due.get(asker, now):
            return None
        loads = self._engagements
        self._loads_due[asker] = now + len(loads) * LOAD_SECONDS - HEARTBEAT_SECONDS
        return LoadColumns(
            names=tuple(loads),
            sequences=np.array([self.last[name].sequences for name in loads], np.int64),
            asker_sequences=np.array([load.sequences.get(asker, 0) for load in loads.values()], np.int64),
            limits=np.array([load.limit for load in loads.values()], np.int64),
            versions=np.array([load.version for load in loads.values()], np.int64),
        )
