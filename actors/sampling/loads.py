"""The loads of actors: the requests of this actor, and the loads that generators report."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

from actors.runtime.actor import Notifier
from actors.runtime.directory import Directory
from areal.generation.routing import GeneratorLoad, fullness
from protocols.membership_messages import LoadColumns, Member


class Loads:
    """The load of every actor. limit: for a generator without a report. `requests`: number of this actor's requests at
    a server, by identity, with slots of samples before the first request. `room`: notified when a request ends.
    `reported`: the reported loads of generators, which the master passes on.
    """

    def __init__(self, directory: Directory, limit: int) -> None:
        self._directory = directory
        self._default_limit = limit
        self.requests: Counter[str] = Counter()
        self.room = Notifier()
        self.reported: dict[str, GeneratorLoad] = {}
        self._counted: tuple[list[Member], dict[str, GeneratorLoad], int] = [], {}, 0  # of `places`

    def note(self, loads: LoadColumns) -> None:
        columns = (loads.sequences, loads.asker_sequences, loads.limits, loads.versions)
        rows = map(GeneratorLoad, *(column.tolist() for column in columns))
        self.reported = dict(zip(loads.names, rows, strict=True))
        self.room.notify()

    @property
    def places(self) -> int:
        """Number of sequences that all healthy generators take. Every ended sample asks, and there may be thousands of
        generators, so generators are counted only after a change."""
        generators = self._directory.with_role("generator")
        if self._counted[0] is not generators or self._counted[1] is not self.reported:
            self._counted = generators, self.reported, sum(map(self._limit, generators))
        return self._counted[2]

    @property
    def sequences(self) -> int:
        """Number of this actor's sequences at healthy generators."""
        members = ((self._directory.members.get(identity), n) for identity, n in self.requests.items())
        return sum(n for m, n in members if m is not None and m.role == "generator" and m.state == "healthy")

    def of(self, m: Member, askers: int, min_version: int) -> float:
        """The fullness of a generator for a sequence with `min_version`, or the number of requests at another actor."""
        if m.role != "generator":
            return self.requests[m.identity]
        load = self.reported.get(m.identity) or GeneratorLoad(0, 0, self._default_limit, min_version)
        return fullness(load, self.requests[m.identity], askers, min_version)

    @contextlib.contextmanager
    def using(self, member: Member) -> Iterator[None]:
        """Count a request to this member, or a slot for a request, until the end of the block."""
        self.requests[member.identity] += 1
        try:
            yield
        finally:
            self.requests[member.identity] -= 1
            if not self.requests[member.identity]:
                del self.requests[member.identity]
            self.room.notify()

    def slot_at(self, generator: Member) -> ExitStack:
        """Return a slot in the load of a generator, held until it is closed."""
        slot = ExitStack()
        slot.enter_context(self.using(generator))
        return slot

    def _limit(self, generator: Member) -> int:
        """Number of sequences that the generator takes from all askers together."""
        load = self.reported.get(generator.identity)
        return load.limit if load else self._default_limit
