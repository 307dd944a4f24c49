"""`areal bisect`: the first step of a run at which a condition on a metric holds, and the groups that bring it.

From a checkpoint before that step, replays train the same batches without some groups. Halving finds few groups without
which the condition does not hold. Further replays verify them: with them alone, and without as many others.
"""

from __future__ import annotations

import json
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as altered
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rich.console import Console

from areal.command_line import output as terminal
from areal.config import UserError
from areal.desk.metric_condition import Condition
from areal.desk.replay import FOLDER, Training, condition_of, plan, start_ranks
from areal.desk.rollouts import Rollouts
from areal.devices import set_allocator
from areal.storage.disk import replace
from areal.storage.records import read_records
from areal.storage.run_folder import config_of_run, first_version, known_versions
from areal.text import shown

if TYPE_CHECKING:
    from areal.trajectory import Group

WINDOW = 8
"""Replays begin so many steps before the one in question; if the cause is earlier, WIDER times as many, and so on."""
WIDER = 4
CONTROLS = 2
LEAST_REPLAYS = 8
NAMED = 10
"""So many groups are printed, and of a text the first EXCERPT characters."""
EXCERPT = 300

Suspect = tuple[int, str]
"""Step and id of a trained group."""


def run(options: Namespace) -> int:
    """`areal bisect`."""
    set_allocator()
    console = terminal(160)
    start_ranks(config_of_run(options.run), console)
    result = search(options.run, condition_of(options.metric), options.replays)
    report = result.report()
    _print(result, report, console)
    if options.json and not console.quiet:
        replace(options.json, json.dumps(report, indent=2) + "\n")
    return 0 if result.groups else 1


def smallest(suspects: Sequence[Suspect], goes: Callable[[frozenset[Suspect]], bool]) -> list[Suspect]:
    """A part of the suspects, of which none can be spared, without which the effect goes. suspects: the likely ones
    first. goes: whether it goes without a set; it does without all of them and, if any part of a set suffices, without
    the set.

    Halving finds how many of the first ones it takes. The last of those is needed. With it left out, this is repeated.
    """
    needed: list[Suspect] = []
    remaining = list(suspects)
    while remaining and not goes(frozenset(needed)):
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
    """What was found. groups: those that bring it, none if none was found, and then `reason` says why. The values are
    those of the metric at `step`: recorded, and by replays from `start` on without the groups, with them alone of all
    since then, and without as many others."""

    run: Path
    condition: Condition
    step: int
    recorded: float
    start: int
    groups: list[Suspect] = field(default_factory=list)
    reason: str = ""
    suspects: int = 0
    without: float | None = None
    alone: float | None = None
    controls: list[float | None] = field(default_factory=list)
    replays: int = 0
    steps_replayed: int = 0
    is_smallest: bool = True
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """How sure it is."""
        if not self.groups:
            return f"Not found: {self.reason}."
        comes = self.condition.met_by(self.alone)
        stays = bool(self.controls) and all(map(self.condition.met_by, self.controls))
        control = f"without as many others it {'stays' if stays else 'does not always stay'}" if self.controls else ""
        facts = f"it goes without them, and {'comes' if comes else 'does not come'} with them alone"
        sure = "Sure" if comes and stays else "Likely" if stays or (comes and not self.controls) else "Unsure"
        few = "" if self.is_smallest else "; the replays were used up, so not all of them may matter"
        return f"{sure}: {facts}{'; ' * bool(control)}{control}{few}."

    def report(self) -> dict[str, Any]:
        """What the JSON file has: the above, and of each group its prompt, row and samples."""
        rows = _samples(self.run, self.groups)
        groups = []
        for step, group in self.groups:
            samples = [row for row in rows if (row["step"], row["group"]) == (step, group)]
            of_sample = ("sample", "reward", "reward_parts", "advantage", "finish", "completion")
            groups.append(
                {name: samples[0][name] for name in ("step", "group", "prompt_index", "row", "prompt")}
                | {"samples": [{name: row[name] for name in of_sample} for row in samples]}
            )
        about = asdict(altered(self, groups=[])) | {"run": str(self.run), "condition": str(self.condition)}
        return about | {"verdict": self.verdict, "groups": groups}


class Trials:
    """Replays of the steps after `start` up to `step` of a run, each without some groups. budget: how many may be
    done."""

    def __init__(self, run: Path, condition: Condition, start: int, step: int, budget: int) -> None:
        first = max(version for version in known_versions(run) if version <= start)
        (variant,) = plan(run, [], steps=f"{first}:{step}")
        self.condition, self.budget = condition, budget
        self.start, self.step, self.replays, self.steps = start, step, 0, 0
        self._values: dict[frozenset[Suspect], float | None] = {}
        self._training = Training(variant)
        batches = list(variant.batches())
        for number, batch in batches[: start - first]:
            self._training.step(number, batch)
            self.steps += 1
        self._place = run / FOLDER / "bisect"
        self._training.engine.save(self._place)
        self._batches = batches[start - first :]
        self.groups = frozenset((number, group.id) for number, batch in self._batches for group in batch)
        self.own = frozenset(suspect for suspect in self.groups if suspect[0] == step)
        self.before = self.groups - self.own

    def goes(self, left_out: frozenset[Suspect]) -> bool:
        """Whether the condition does not hold without these groups; False if no replay is left."""
        return not self.is_used_up(left_out) and not self.condition.met_by(self.value(left_out))

    def is_used_up(self, left_out: frozenset[Suspect] = frozenset()) -> bool:
        return self.replays >= self.budget and self._measurable(left_out) not in self._values

    def value(self, left_out: frozenset[Suspect]) -> float | None:
        """The metric at the last step without these groups, by a replay."""
        left_out = self._measurable(left_out)
        if left_out not in self._values:
            batches = [(step, [g for g in batch if (step, g.id) not in left_out]) for step, batch in self._batches]
            self._values[left_out] = self._replay([(step, batch) for step, batch in batches if batch])
        return self._values[left_out]

    def _measurable(self, left_out: frozenset[Suspect]) -> frozenset[Suspect]:
        """A last batch of which no group would remain is whole: the metric is measured on it."""
        return left_out - self.own if left_out >= self.own else left_out

    def _replay(self, batches: Sequence[tuple[int, list[Group]]]) -> float | None:
        self.replays, self.steps = self.replays + 1, self.steps + len(batches)
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


def search(run: Path, condition: Condition, replays: int) -> BisectionResult:
    """Find the first step at which the condition holds, and the groups that bring it, with at most so many replays
    (all ranks). Raises UserError if it holds at no step, or if the steps before cannot be replayed."""
    began, first = time.monotonic(), first_version(run)
    records = [record for record in read_records(run / "metrics.jsonl") if record["step"] > first]
    measured = [(value, record["step"]) for record in records if (value := condition.value(record)) is not None]
    value, step = next(((value, step) for value, step in measured if condition.met_by(value)), (None, 0))
    if value is None:
        seen = f"which is from {min(measured)[0]:.4g} to {max(measured)[0]:.4g}" if measured else "which it has not"
        raise UserError(f"{condition} holds at no step of {run}, {seen}: choose another limit.")
    if replays < LEAST_REPLAYS:
        raise UserError(f"--replays {replays} is too few to find and to verify anything: give {LEAST_REPLAYS} or more.")
    result = BisectionResult(run, condition, step, value, step)
    window, budget = WINDOW, replays
    while not result.groups and not result.reason:
        start = max(first, step - 1 - window)
        trials = Trials(run, condition, start, step, budget - CONTROLS - 1)
        try:
            _search_from(trials, result)
        finally:
            trials.close()
        result.start, budget = start, budget - trials.replays
        result.replays, result.steps_replayed = replays - budget, result.steps_replayed + trials.steps
        if not result.groups and not result.reason and (start == first or budget < LEAST_REPLAYS):
            result.reason = f"the weights after step {start} give it with each half of the groups of step {step}"
        window *= WIDER
    result.seconds = time.monotonic() - began
    return result


def _search_from(trials: Trials, result: BisectionResult) -> None:
    """Search in the steps after the first version of `trials`, and verify what is found."""
    again = trials.value(frozenset())
    if not trials.condition.met_by(again):
        result.reason = f"a replay does not repeat it ({_text(again)}), so the training is not the same here"
        return
    weights = _influence(result.run, trials.start + 1, trials.step)
    earlier, last = (sorted(s, key=lambda suspect: (-weights[suspect], suspect)) for s in (trials.before, trials.own))
    if earlier and trials.goes(trials.before):
        groups, always = smallest(earlier, trials.goes), frozenset[Suspect]()
    else:  # the weights before all these steps give it as well, at least with this batch
        always = trials.before
        halves = [last[: len(last) // 2], last[len(last) // 2 :]]
        half = next((half for half in halves if half and trials.goes(always | frozenset(half))), None)
        groups = smallest(half, lambda left_out: trials.goes(always | left_out)) if half else []
    result.suspects, result.is_smallest = len(trials.groups), not trials.is_used_up()
    if groups:
        trials.budget += CONTROLS + 1
        _verify(trials, result, sorted(groups))


def _verify(trials: Trials, result: BisectionResult, groups: list[Suspect]) -> None:
    cause = frozenset(groups)
    candidates = sorted((trials.own if cause <= trials.own else trials.before) - cause)
    result.groups, result.without = groups, trials.value(cause)
    # All others are left out; a last batch that has none of those found remains, to measure on.
    result.alone = trials.value(trials.groups - cause)
    random = Random(0)
    for _ in range(CONTROLS if len(candidates) >= len(cause) else 0):
        result.controls.append(trials.value(frozenset(random.sample(candidates, len(cause)))))


def _influence(run: Path, first: int, last: int) -> dict[Suspect, float]:
    """The sum of the sizes of the advantages of all tokens of each group."""
    rows = Rollouts(run).sql(
        'SELECT step, "group", coalesce(sum(abs(advantage) * completion_tokens), 0) AS influence FROM rollouts '
        f'WHERE step BETWEEN {first} AND {last} GROUP BY step, "group"'
    )
    return {(row["step"], row["group"]): row["influence"] for row in rows}


def _samples(run: Path, groups: Sequence[Suspect]) -> list[dict[str, Any]]:
    """The rows of these groups, in order. Of a sample with several branches, that of the first one."""
    names = ", ".join("'" + group.replace("'", "''") + "'" for _, group in groups)
    columns = 'step, "group", prompt_index, "row", prompt, sample, reward, reward_parts, advantage, finish, completion'
    return Rollouts(run).sql(
        f'SELECT {columns} FROM rollouts WHERE branch = 0 AND step IS NOT NULL AND "group" IN ({names}) '
        'ORDER BY step, "group", sample'
    ) if groups else []  # fmt: skip


def _text(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def _print(result: BisectionResult, report: dict[str, Any], console: Console) -> None:
    def line(text: str) -> None:
        console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    line(f"{result.condition} first at step {result.step} of {result.run}: {result.recorded:.4g}")
    if result.groups:
        values = {"without these groups": result.without, "with them alone": result.alone}
        values |= {f"without as many others, {n}": value for n, value in enumerate(result.controls, 1)}
        for name, value in values.items():
            line(f"    {name}, from step {result.start} on: {_text(value)}")
    line(result.verdict)
    line(f"{result.suspects} groups, {result.replays} replays, {result.steps_replayed} steps, {result.seconds:.0f} s")
    for group in report["groups"][:NAMED]:
        line(f"\nstep {group['step']} · group {group['group']} · prompt {group['prompt_index']} · row {group['row']}")
        line(f"prompt: {group['prompt'][:EXCERPT]}")
        for sample in group["samples"]:
            line(f"reward {sample['reward']:g}: {sample['completion'][:EXCERPT]}")
    if result.groups:
        ids = ", ".join(f"'{group}'" for _, group in result.groups)
        line(f"\nWithout them in all steps: areal replay {result.run} --without '\"group\" IN ({ids})'")
