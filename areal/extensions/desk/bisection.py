"""`areal replay RUN --bisect CONDITION`: the first step at which a condition on a metric holds, and its causes.

From a version before that step, replays train the same batches without some groups. Halving finds few groups without
which the condition does not hold; it has to hold with them alone, too.
"""

import shlex
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from areal.base.command_line import output as terminal
from areal.base.errors import UserError
from areal.devices import set_allocator
from areal.extensions.desk.metric_condition import Condition
from areal.extensions.desk.replay import FOLDER, Training, condition_of, plan, start_ranks
from areal.extensions.desk.rollout_queries import Rollouts
from areal.storage.record import Record

if TYPE_CHECKING:
    from areal.samples.trajectory import Group

WINDOW = 8
"""Replays begin so many steps before the one in question."""
MOST = 8
"""If it takes more groups than these together, they are not named: a slow change has no few causes."""
EXCERPT = 300
"""So many characters of a text are printed."""

Suspect = tuple[int, str]
"""Step and id of a trained group."""


def run(record: Record, options: Namespace) -> int:
    """`areal replay --bisect`."""
    if options.overrides or any((options.sweep, options.without, options.until, options.output)):
        raise UserError("--bisect searches in a run as it was trained: leave out the other options.")
    set_allocator()
    console = terminal(160)
    start_ranks(record.config, console)
    result = search(record, condition_of(options.bisect))
    _print(record, result, console)
    return 0 if result.groups else 1


def smallest(suspects: Sequence[Suspect], goes: Callable[[frozenset[Suspect]], bool]) -> list[Suspect]:
    """A part of the suspects, of which none can be spared, without which the effect goes; more than MOST are not told
    apart any further. goes: whether it goes without a set; it does without all of them and, if any part of a set
    suffices, without the set.

    Halving finds how many of the first ones it takes. The last of those is needed. With it left out, this is repeated.
    """
    needed: list[Suspect] = []
    remaining = list(suspects)
    while remaining and len(needed) <= MOST and not goes(frozenset(needed)):
        low, high = 1, len(remaining)
        while low < high:
            middle = (low + high) // 2
            if goes(frozenset([*needed, *remaining[:middle]])):
                high = middle
            else:
                low = middle + 1
        needed.append(remaining[high - 1])
        del remaining[high - 1 :]
    return needed


@dataclass
class BisectionResult:
    """What was found. groups: those that bring it, none if none were found, and then `reason` says why. The values are
    those of the metric at `step`: recorded, and by replays from `start` on without the groups, and with them alone."""

    condition: Condition
    step: int
    recorded: float
    start: int
    groups: list[Suspect] = field(default_factory=list)
    reason: str = ""
    without: float | None = None
    alone: float | None = None
    suspects: int = 0
    replays: int = 0


class Trials:
    """Replays of the steps after `start` up to `step` of a run, each without some groups. `replays`: how many."""

    def __init__(self, record: Record, condition: Condition, start: int, step: int) -> None:
        first = max(version for version in record.versions if version <= start)
        (variant,) = plan(record, [], steps=f"{first}:{step}")
        self.condition, self.start, self.step, self.replays = condition, start, step, 0
        self._values: dict[frozenset[Suspect], float | None] = {}
        self._training = Training(variant)
        batches = list(variant.batches())
        for number, batch in batches[: start - first]:
            self._training.step(number, batch)
        self._place = record.folder / FOLDER / "bisect"
        self._training.engine.save(self._place)
        self._batches = batches[start - first :]
        self.groups = frozenset((number, group.id) for number, batch in self._batches for group in batch)
        self.last_batch = frozenset(suspect for suspect in self.groups if suspect[0] == step)
        self.earlier = self.groups - self.last_batch

    def goes(self, left_out: frozenset[Suspect]) -> bool:
        """Whether the condition does not hold without these groups."""
        return not self.condition.met_by(self.value(left_out))

    def value(self, left_out: frozenset[Suspect]) -> float | None:
        """The metric at the last step without these groups, by a replay. A last batch is whole if none would remain."""
        left_out = left_out - self.last_batch if left_out >= self.last_batch else left_out
        if left_out not in self._values:
            batches = [(step, [g for g in batch if (step, g.id) not in left_out]) for step, batch in self._batches]
            self._values[left_out] = self._replay([(step, batch) for step, batch in batches if batch])
        return self._values[left_out]

    def _replay(self, batches: "Sequence[tuple[int, list[Group]]]") -> float | None:
        self.replays += 1
        self._training.prepare(self.start + 1)
        self._training.engine.load(self._place)
        record: dict[str, Any] = {}
        for step, batch in batches:
            record = self._training.step(step, batch)
        return self.condition.value(record)

    def close(self) -> None:
        if self._training.engine.rank == 0:
            shutil.rmtree(self._place)
        self._training.engine.close()


def search(record: Record, condition: Condition) -> BisectionResult:
    """Find the first step at which the condition holds, and the groups that bring it (all ranks). Raises UserError if
    it holds at no step, or if the steps before cannot be replayed."""
    first = record.first_version
    steps = [metrics for metrics in record.records if metrics["step"] > first]
    measured = [(value, step["step"]) for step in steps if (value := condition.value(step)) is not None]
    value, step = next(((value, step) for value, step in measured if condition.met_by(value)), (None, 0))
    if value is None:
        seen = f"which is from {min(measured)[0]:.4g} to {max(measured)[0]:.4g}" if measured else "which it has not"
        raise UserError(f"{condition} holds at no step of {record.folder}, {seen}: choose another limit.")
    result = BisectionResult(condition, step, value, max(first, step - 1 - WINDOW))
    with closing(Trials(record, condition, result.start, step)) as trials:
        _search(trials, result)
    result.suspects, result.replays = len(trials.groups), trials.replays
    return result


def _search(trials: Trials, result: BisectionResult) -> None:
    if trials.goes(frozenset()):
        again = _text(trials.value(frozenset()))
        result.reason = f"a replay does not repeat it ({again}), so the training is not the same here"
        return
    earlier, batch, always = sorted(trials.earlier), sorted(trials.last_batch), frozenset[Suspect]()
    if earlier and trials.goes(trials.earlier):
        groups = smallest(earlier, trials.goes)
    else:  # the weights before all these steps give it as well, at least with this batch
        always, halves = trials.earlier, [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        half = next((half for half in halves if half and trials.goes(always | frozenset(half))), [])
        groups = smallest(half, lambda left_out: trials.goes(always | left_out))
    if not groups:
        result.reason = f"the weights after step {trials.start} give it with both halves of step {trials.step}"
    elif len(groups) > MOST:
        result.reason = f"it takes more than {MOST} groups together, as a slow change does"
    else:
        # All others are left out; a last batch that has none of those found remains, to measure on.
        result.without, result.alone = trials.value(frozenset(groups)), trials.value(trials.groups - frozenset(groups))
        if trials.condition.met_by(result.alone):
            result.groups = sorted(groups)
        else:
            result.reason = f"it goes without {len(groups)} groups, but does not come with them alone"


def _samples(record: Record, groups: Sequence[Suspect]) -> list[dict[str, Any]]:
    """The rows of these groups, in order. Of a sample with several branches, that of the first one."""
    return Rollouts(record).sql(
        'SELECT step, "group", prompt_index, "row", prompt, sample, reward, completion FROM rollouts '
        f'WHERE branch = 0 AND step IS NOT NULL AND "group" IN ({_names(groups)}) ORDER BY step, "group", sample'
    )


def _names(groups: Sequence[Suspect]) -> str:
    return ", ".join("'" + group.replace("'", "''") + "'" for _, group in groups)


def _text(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def _print(record: Record, result: BisectionResult, console: Console) -> None:
    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line(f"{result.condition} first at step {result.step} of {record.folder}: {result.recorded:.4g}")
    line(f"{result.suspects} groups of the steps after {result.start}, {result.replays} replays")
    if not result.groups:
        line(f"Not found: {result.reason}.")
        return
    line(f"It goes without these groups ({_text(result.without)}), and comes with them alone ({_text(result.alone)}).")
    for row in _samples(record, result.groups):
        if row["sample"] == 0:
            line(f"\nstep {row['step']} · group {row['group']} · prompt {row['prompt_index']} · row {row['row']}")
            line(f"prompt: {row['prompt'][:EXCERPT]}")
        line(f"reward {row['reward']:g}: {row['completion'][:EXCERPT]}")
    command = ["areal", "replay", str(record.folder), "--without", f'"group" IN ({_names(result.groups)})']
    line(f"\nWithout them in all steps: {shlex.join(command)}")
