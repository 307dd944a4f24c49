"""Chooses samples of kept rollouts as data to train on: the best of each group, or pairs of a good and a bad one."""

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
"""What choosing needs of each row."""
ROWS_AT_ONCE = 256


class RolloutSample(NamedTuple):
    """A sample of a group. rows: its branches, with the columns that were asked for."""

    reward: float
    finish: str
    rows: Sequence[dict[str, Any]]


def rollouts_in(folder: Path) -> Path | None:
    """The folder of rollouts: `folder` itself, or the one in the run folder `folder`; None if there is none."""
    return next((place for place in (folder, folder / ROLLOUTS) if files(place)), None)


def read_rows(folder: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of the rollouts in `folder` in the order of the files, some at a time; lists of numbers are arrays.

    Raises UserError if a file cannot be read.
    """
    for path in files(folder):
        with opened(path) as file:
            for batch in file.batches(ROWS_AT_ONCE, columns):
                yield from rows_of(batch)


def groups_of(rows: Iterable[dict[str, Any]]) -> Iterator[list[RolloutSample]]:
    """The samples of each group. rows: with COLUMNS; those of a group follow each other, those of a sample too."""
    for _, of_group in groupby(rows, key=itemgetter("group")):
        samples = [list(of_sample) for _, of_sample in groupby(of_group, key=itemgetter("sample"))]
        yield [RolloutSample(branches[0]["reward"], branches[0]["finish"], branches) for branches in samples]


def chosen(group: Sequence[RolloutSample], *, best: bool = True, least: float | None = None) -> list[RolloutSample]:
    """The samples to imitate: of those that the policy ended itself, with a reward of at least `least` (None: above 0),
    the one with the highest reward (the first of equals) or, if not `best`, all."""
    good = [s for s in group if s.finish == "stop" and (s.reward > 0 if least is None else s.reward >= least)]
    return [max(good, key=lambda s: s.reward)] if good and best else good


def pair(group: Sequence[RolloutSample], *, least: float | None = None) -> tuple[RolloutSample, RolloutSample] | None:
    """The best sample that the policy ended itself, if its reward is at least `least`, and the worst sample; of equals
    the first. None if their rewards differ by no more than rounding."""
    good = [s for s in group if s.finish == "stop" and (least is None or s.reward >= least)]
    if not good:
        return None
    best, worst = max(good, key=lambda s: s.reward), min(group, key=lambda s: s.reward)
    return (best, worst) if best.reward > worst.reward and differ(best.reward, worst.reward) else None
