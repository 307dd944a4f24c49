"""The works of an actor, and the seconds for which each work has stood still.

Evidence of life is a number of the engine that moves. Work without evidence stands still for its whole duration.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protocols.membership_messages import Work

LOOK_SECONDS = 1.0
# Two looks further apart: the process was suspended, perhaps with its engine and its machine.
SUSPENDED_SECONDS = 3.0

Evidence = Callable[[], float | None]
"""A number that changes whenever the work moves; None: the work need not move at present."""


def nothing() -> float:
    """A constant, for work without evidence."""
    return 0.0


@dataclass(slots=True, eq=False)
class Operation:
    """A work in progress. `still`: seconds, while this process ran, since the evidence moved. `longest`: the longest
    `still`. `looked`: the time of the last look."""

    kind: str
    what: str
    began: float
    evidence: Evidence
    looked: float
    value: float | None
    still: float = 0.0
    longest: float = 0.0

    def look(self, now: float, value: float | None) -> None:
        """value: the present value of the evidence."""
        moved = value is None or value != self.value
        self.value = value
        self.still = 0.0 if moved else self.still + min(now - self.looked, SUSPENDED_SECONDS)
        self.longest = max(self.longest, self.still)
        self.looked = now

    def message(self, now: float) -> Work:
        return Work(kind=self.kind, what=self.what[:256], seconds=now - self.began, still=self.still)


class Works:
    """The works of an actor. `clock`: the event loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._operations: dict[Operation, None] = {}  # the oldest first
        self._kinds = Counter[str]()  # number of operations
        self._given_up: dict[str, Operation] = {}  # by kind, the last operation given up
        self._ended: dict[str, float] = {}
        self._waits = 0

    @contextmanager
    def working(self, what: str, kind: str = "", evidence: Evidence = nothing) -> Iterator[None]:
        """Mark the block as work. kind: "" if the work has deadlines of its own."""
        now = self._clock()
        operation = Operation(kind, what, now, evidence, now, evidence())
        operation.still = self._still_before(operation)
        self._operations[operation] = None
        self._kinds[kind] += 1
        try:
            yield
        except BaseException:
            operation.look(self._clock(), evidence())
            self._given_up[kind] = operation
            raise
        finally:
            del self._operations[operation]
            self._kinds[kind] -= 1
        self._given_up.pop(kind, None)
        if kind:  # nobody knows whether a failed or cancelled work would have moved
            operation.look(self._clock(), evidence())
            self._ended[kind] = max(operation.longest, self._ended.get(kind, 0.0))

    def _still_before(self, operation: Operation) -> float:
        """The seconds for which the evidence of a new work has stood still already. So a hanging engine is found
        although every request to the engine is given up early."""
        if operation.evidence is nothing or operation.value is None:
            return 0.0
        works = [*self._operations, *filter(None, [self._given_up.get(operation.kind)])]
        same = (work for work in works if work.evidence is operation.evidence)
        return max((work.still for work in same if work.value == operation.value), default=0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block inside work as waiting for other actors."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1

    def unless_other(self, kind: str, value: Callable[[], float] = lambda: 0.0) -> Evidence:
        """The evidence `value` of work that need not move during work of another kind or in `waiting`."""

        def evidence() -> float | None:
            busy = self._waits or len(self._operations) > self._kinds[kind]
            return None if busy else value()

        return evidence

    def look(self) -> None:
        """See which works have moved. Call every LOOK_SECONDS."""
        now = self._clock()
        values = {evidence: evidence() for evidence in {operation.evidence for operation in self._operations}}
        for operation in self._operations:
            operation.look(now, values[operation.evidence])

    def report(self) -> tuple[Work, ...]:
        """The work of each kind that has stood still for longest, or else the oldest work; the oldest of all first."""
        now, chosen = self._clock(), dict[str, Operation]()
        for operation in self._operations:
            stillest = chosen.setdefault(operation.kind, operation)
            if operation.still > stillest.still:
                chosen[operation.kind] = operation
        return tuple(operation.message(now) for operation in sorted(chosen.values(), key=lambda o: o.began))

    def take_ended(self) -> dict[str, float]:
        """By kind, the longest standstill of the works that have ended well since the last call."""
        ended, self._ended = self._ended, {}
        return ended
