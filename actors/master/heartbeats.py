"""The last heartbeat of every member of a run, and the loads of generators in the heartbeats."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from actors.runtime.membership import HEARTBEAT_SECONDS
from protocols.membership_messages import Engagement, Heartbeat, LoadColumns, Member

# An asker gets the loads of n generators at most once in n times this period, beyond 500 generators not with every
# heartbeat: askers and loads both grow with a cluster, and all loads for all askers would take the master's core.
LOAD_SECONDS = 0.002

NO_BEAT = Heartbeat(state="starting", serves=(), activity="starting", stats={})


@dataclass(slots=True)
class LastHeartbeat:
    """The last heartbeat of a member, and the time by the master's clock. `restored`: the member joined an earlier
    master, and this master has not heard the member yet. `sequences`: the sum over the engagement."""

    time: float
    beat: Heartbeat = NO_BEAT
    restored: bool = False
    sequences: int = 0


class Heartbeats:
    """`last`: the last heartbeat of every member. clock: the master's, in seconds. Members of an earlier master count
    as heard from now."""

    def __init__(self, members: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = {identity: LastHeartbeat(clock(), restored=True) for identity in members}
        self._engagements: dict[str, Engagement] = {}  # by generator, from the last heartbeat
        self._loads_due: dict[str, float] = {}  # by asker, the time of the next loads

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
        """True if the generator has sequences of gateways. Other askers' sequences may wait for newer weights."""
        load = self.last[generator.identity].beat.engagement
        return load is not None and any(n and asker.startswith("gateway/") for asker, n in load.sequences.items())

    def loads_for(self, asker: str) -> LoadColumns | None:
        """The load of every generator, with the asker's share; None if the asker has had the loads recently."""
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
