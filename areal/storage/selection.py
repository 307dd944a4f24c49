"""Chooses samples of kept rollouts as training data: the best of each group, or pairs of a good and a bad sample."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from areal.samples.trajectory import differ
from areal.storage.rollout_files import files, opened
from areal.storage.run_files import ROLLOUTS
from areal.storage.stored_groups import rows_of

COLUMNS = ("group", "sample", "reward", "finish")
"""The columns by which samples are chosen."""
ROWS_AT_ONCE = 256


class RolloutSample(NamedTuple):
    """A sample of a group. rows: the branches of the sample, with the requested columns."""

    reward: float
    finish: str
    rows: Sequence[dict[str, Any]]


def rollouts_in(folder: Path) -> Path | None:
    """Return the folder of rollouts: `folder` itself, or the one in the run folder `folder`; None without rollouts."""
    return next((place for place in (folder, folder / ROLLOUTS) if files(place)), None)


def read_rows(folder: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the rollouts in `folder` in the order of the files, ROWS_AT_ONCE at a time; lists of numbers
    are arrays. Raises UserError if a file cannot be read.
    """
    for path in files(folder):
        with opened(path) as file:
            for batch in file.batches(ROWS_AT_ONCE, columns):
                yield from rows_of(batch)


def groups_of(rows: Iterable[dict[str, Any]]) -> Iterator[list[RolloutSample]]:
    """Yield the samples of each group. rows: with COLUMNS; the rows of a group, and of a sample, follow each other."""
    for _, of_group in groupby(rows, key=itemgetter("group")):
        samples = [list(of_sample) for _, of_sample in groupby(of_group, key=itemgetter("sample"))]
        yield [RolloutSample(branches[0]["reward"], branches[0]["finish"], branches) for branches in samples]


def chosen(group: Sequence[RolloutSample], *, best: bool = True, least: float | None = None) -> list[RolloutSample]:
    """Return the samples to imitate. Candidates ended by themselves and have a reward of at least `least` (None: above
    0). The first candidate with the highest reward is returned or, if not `best`, all candidates."""
    good = [s for s in group if s.finish == "stop" and (s.reward > 0 if least is None else s.reward >= least)]
    return [max(good, key=lambda s: s.reward)] if good and best else good


def pair(group: Sequence[RolloutSample], *, least: float | None = None) -> tuple[RolloutSample, RolloutSample] | None:
    """Return the best sample that ended by itself, with a reward of at least `least`, and the worst sample; at equal
    rewards the first. None if the two rewards differ by no more than rounding."""
    good = [s for s in group if s.finish == "stop" and (least is None or s.reward >= least)]
    if not good:
        return None
    best, worst = max(good, key=lambda s: s.reward), min(group, key=lambda s: s.reward)
    return (best, worst) if best.reward > worst.reward and differ(best.reward, worst.reward) else None
