"""Runs the actors on virtual time, with injected faults. The exit status is 1 if an invariant is broken.

.venv/bin/python tests/simulate.py --seeds 0:1000     # many seeds, on all cores
.venv/bin/python tests/simulate.py --seed 17          # one seed, and everything that happens in it
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from areal.base.errors import UserError
from simulation.faults import HANDLERS, POINTS, SESSION_HANDLERS
from simulation.mutants import MUTANTS
from simulation.world import Result, simulate

SEEDS_A_TASK = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", metavar="A:B", help="seeds from A to B - 1 (default: 0:200)")
    parser.add_argument("--seed", type=int, metavar="N", help="run only this seed, and print all its events")
    parser.add_argument("--mutant", metavar="NAME", help="run with this known bug in the code")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="number of processes (default: number of cores)"
    )
    parser.add_argument("--quick", action="store_true", help="the first two of the seeds, in this process")
    options, console = parser.parse_args(), Console()
    try:
        if options.seed is not None:
            sound = run_one(options.seed, options.mutant, console)
        else:
            seeds, jobs = parse_seeds(options.seeds), options.jobs
            seeds, jobs = (seeds[:2], 1) if options.quick else (seeds, jobs)
            sound = run_seeds(seeds, jobs, options.mutant, console)
    except UserError as error:
        parser.error(str(error))
    return 0 if sound else 1


@dataclass(slots=True)
class Tally:
    """The results of many seeds. `failed`: the seeds with a violation. `first`: the result of the smallest of these."""

    seeds: int = 0
    seconds: float = 0.0
    failed: list[int] = field(default_factory=list)
    first: Result | None = None
    counters: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.seconds += result.seconds
        self.counters.update(result.counters)
        if not result.ok:
            self.failed.append(result.seed)
            if self.first is None or result.seed < self.first.seed:
                self.first = result


def run_seeds(seeds: range, jobs: int, mutant: str | None, console: Console) -> bool:
    """Simulate all seeds and print a report. Returns True if no seed violates an invariant."""
    tally, begun = Tally(), time.monotonic()
    with Progress(
        TextColumn("simulating"),
        MofNCompleteColumn(),
        TextColumn("seeds, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        bar = progress.add_task("", total=len(seeds), failed=0)
        for results in _on_cores(seeds, jobs, mutant):
            for result in results:
                tally.add(result)
            progress.update(bar, completed=tally.seeds, failed=len(tally.failed))
    _report(tally, time.monotonic() - begun, jobs, mutant, console)
    return not tally.failed


def run_one(seed: int, mutant: str | None, console: Console) -> bool:
    """Simulate one seed and print everything that happens. Returns True if it violates no invariant."""
    with _mutated(mutant), _without_noise():
        result = simulate(seed, traced=True)
    for line in result.trace:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    outcome = "no violation" if result.ok else result.story.splitlines()[0]
    console.print(f"seed {seed}: {outcome}, {result.seconds:.1f} s, digest {result.digest:08x}", highlight=False)
    return result.ok


def parse_seeds(text: str) -> range:
    """The seeds of `A:B` (B not included) or `N`. Raises UserError."""
    first, colon, last = text.partition(":")
    try:
        seeds = range(int(first), int(last)) if colon else range(int(first), int(first) + 1)
    except ValueError:
        raise UserError(f"--seeds {text!r} is not of the form A:B, such as 0:10000.") from None
    if not seeds:
        raise UserError(f"--seeds {text!r} contains no seed: write A:B with A smaller than B.")
    return seeds


def _on_cores(seeds: range, jobs: int, mutant: str | None) -> Iterator[list[Result]]:
    tasks = [(seeds[i : i + SEEDS_A_TASK], mutant) for i in range(0, len(seeds), SEEDS_A_TASK)]
    if jobs == 1:
        yield from map(_simulate_some, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_simulate_some, tasks)


def _simulate_some(task: tuple[range, str | None]) -> list[Result]:
    seeds, mutant = task
    with _mutated(mutant), _without_noise(), _garbage_kept():
        return [simulate(seed) for seed in seeds]


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect garbage only at the end. A simulation leaves about 10 MB, and collecting it meanwhile takes longer."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _mutated(mutant: str | None) -> contextlib.AbstractContextManager[None]:
    if mutant is None:
        return contextlib.nullcontext()
    if mutant not in MUTANTS:
        raise UserError(f"There is no mutant {mutant!r}: choose from {', '.join(MUTANTS)}.")
    return MUTANTS[mutant]()


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        # These warnings are about coroutines that never began because their process was killed.
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _handlers_interrupted(counters: Counter[str]) -> Table:
    """A table of how often the process died at each point of each handler."""
    table = Table("a handler's process died", *POINTS, box=None)
    for kinds in (*HANDLERS.values(), SESSION_HANDLERS):
        for kind in kinds:
            table.add_row(kind, *(str(counters[f"{point} {kind}"] or "-") for point in POINTS))
    return table


def _pairs_missing(counters: Counter[str]) -> str:
    """How many pairs of an event in the journal and a fault before it there were, and which there were not."""
    names = [name.removeprefix("near ").split("/") for name in counters if name.startswith("near ")]
    events, kinds = sorted({event for event, _ in names}), sorted({fault for _, fault in names})
    missing = [f"{event} after {fault}" for event in events for fault in kinds if [event, fault] not in names]
    share = f"{len(names)} of {len(events) * len(kinds)} pairs of an event and a fault right before it"
    return f"{share}; missing: {', '.join(missing) or 'none'}"


def _report(tally: Tally, seconds: float, jobs: int, mutant: str | None, console: Console) -> None:
    console.print(_handlers_interrupted(tally.counters))
    console.print(", ".join(f"{name} {n}" for name, n in sorted(tally.counters.items()) if " " not in name))
    console.print(_pairs_missing(tally.counters), highlight=False)
    if tally.first is not None:
        console.print(tally.first.story, highlight=False, markup=False, soft_wrap=True)
        extra = f"--mutant '{mutant}' " if mutant else ""
        console.print(f"Replay it with: python tests/simulate.py {extra}--seed {tally.first.seed}", highlight=False)
        console.print(f"failed seeds: {', '.join(map(str, sorted(tally.failed)[:20]))}", highlight=False)
    console.print(
        f"{tally.seeds} seeds, {len(tally.failed)} with a violation, {tally.seconds:.0f} simulated seconds, "
        f"{tally.seeds / seconds:.0f} seeds/s on {jobs} of {os.cpu_count()} cores",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
