"""The phases of a training step, and their durations."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.runtime.works import Evidence, Works
from areal.storage.disk import DiskRetry

# The phases of a step with reported seconds, and the trainer's work on a version in a phase; None: the trainer waits
# for other actors, or for its own work in another phase. `write` ran in parallel to the step, for the version before.
PHASES = {
    "trainer_wait": None,
    "publish_wait": None,
    "save_wait": None,
    "fetch": "reading the batch of",
    "train": "training on",
    "snapshot": "copying the weights of",
    "write": "writing the weights of",
    "save": "copying a checkpoint of",
    "offload": "moving to or from host memory",
}


class Phases:
    """took: gets every phase, with the start and the seconds."""

    def __init__(self, works: Works, took: Callable[[str, float, float], None]) -> None:
        self._works = works
        self._took = took
        self._seconds: defaultdict[str, float] = defaultdict(float)  # since the last commit

    @contextmanager
    def timed(self, phase: str, version: int, computed: Evidence) -> Iterator[None]:
        """Mark the block as a phase. computed: evidence that the model computes or is moved."""
        began, work = asyncio.get_running_loop().time(), PHASES[phase]
        moves = refusals if phase in ("fetch", "write") else computed
        marked = self._works.working(f"{work} version {version}", phase, moves) if work else self._works.waiting()
        with marked:
            yield
        seconds = asyncio.get_running_loop().time() - began
        self._seconds[phase] += seconds
        self._took(phase, began, seconds)

    def take_seconds(self) -> dict[str, float]:
        """Return the metrics of the time since the last call."""
        spent = {f"{phase}_seconds": self._seconds[phase] for phase in PHASES}
        self._seconds.clear()
        return spent


def refusals() -> float:
    """Evidence of a write: a number that grows while the disk refuses writes, which are repeated."""
    return DiskRetry.refusals
