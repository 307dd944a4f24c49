"""A hundred thousand steps on the ledger and a real journal: memory, size of the file, and seconds of a restart.

    python tests/benchmarks/journal.py --steps 100000

Each step admits, starts, finishes and trains a batch, after some failures and lost leases, as the master records them.
Every tenth of the steps the script takes the resident memory of this process, the size of the file, and the seconds in
which a new process's state could continue from a copy of it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from results import show, write
from runs import QUICKSTART

from actors.master import changes
from actors.master.run_state import RunState
from areal.config import Config, load_config
from areal.staleness.ledger import ReportAnswer
from areal.staleness.ledger_records import snapshot_of
from areal.staleness.ledger_state import Batch
from areal.storage.journal import Journal

CHECKPOINT_EVERY = 50
FAILING_SHARE = 0.02
# A manager is lost once in so many steps.
LOSS_EVERY = 500
RESTARTS = 5
# A step of a run has about this many metrics.
METRICS = {f"metric_{i}": 0.123456789 for i in range(50)}


def main() -> None:
    options = parse()
    config = load_config(QUICKSTART, [f"steps={options.steps}", "batch_size=8"])
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(live(config, Path(folder)))
    show(
        f"{options.steps:,} steps of {config.batch_size} groups",
        ["steps", "resident MB", "journal MB", "events in it", "restart ms"],
        rows,
        [],
    )
    write({"rows": rows}, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--quick", action="store_true", help="a hundred steps: does it run?")
    options = parser.parse_args()
    options.steps = 100 if options.quick else options.steps
    return options


async def live(config: Config, folder: Path) -> list[list[object]]:
    """One row for every tenth of the steps."""
    chance, file, rows = random.Random(0), folder / "journal.db", list[list[object]]()
    state = RunState(config, journal := Journal.open(file))
    for step in range(1, config.steps + 1):
        until_trained(state, chance)
        if step % LOSS_EVERY == 0:
            state.ledger.leases.release("manager")
        if step % CHECKPOINT_EVERY == 0:
            state.ledger.checkpointed(step)
            state.emit(changes.CheckpointSavedChange(version=step, folder=f"checkpoints/step_{step}"))
        state.compact_if_due()
        await journal.durable()
        if step % (config.steps // 10) == 0:
            rows.append([f"{step:,}", *reading(config, file, state)])
            print(*rows[-1], flush=True)
    journal.close()
    return rows


def until_trained(state: RunState, chance: random.Random) -> None:
    """Admit, finish and fail groups until a batch is full, and commit it."""
    ledger = state.ledger
    while True:
        for permit in ledger.admit("manager", ledger.state.room.for_rows, 0.0, 60.0):
            if chance.random() < FAILING_SHARE:
                ledger.failed(permit.group_id, "manager", "reward")
            elif ledger.started(permit.group_id, "manager", ledger.version) is ReportAnswer.ACCEPTED:
                ledger.ready(permit.group_id, ledger.version)
                state.emit(
                    changes.Rewarded(
                        group=permit.group_id,
                        row=permit.row,
                        version=ledger.version,
                        mean=0.5,
                        spread=0.5,
                        signal=True,
                        parts={"addition": 0.5},
                        tokens=900,
                        discarded=0,
                    )
                )
        if isinstance(batch := ledger.next_batch(ledger.version), Batch):
            record = ledger.commit(batch.version)
            metrics = METRICS | {"step_seconds": 1.0, "starved_seconds": 0.0, "groups_left_over": 0}
            state.emit(changes.Stepped(metrics=metrics, groups=record.batch.group_ids))
            return


def reading(config: Config, file: Path, state: RunState) -> list[float]:
    """Resident MB, MB of the journal's files, events in it, and milliseconds of a restart."""
    size = sum(path.stat().st_size for path in file.parent.glob(f"{file.name}*"))
    seconds = median(restart(config, file, state) for _ in range(RESTARTS))
    return [psutil.Process().memory_info().rss / 1e6, size / 1e6, state.journal.size, 1000 * seconds]


def restart(config: Config, file: Path, state: RunState) -> float:
    """Seconds until a state has been read from a copy of the journal. It equals the state that wrote it."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        for path in file.parent.glob(f"{file.name}*"):
            if path.is_file():
                shutil.copy(path, folder)
        began = time.perf_counter()
        journal = Journal.open(Path(folder) / file.name)
        results = RunState(config, journal)
        seconds = time.perf_counter() - began
        journal.close()
    assert snapshot_of(results.ledger.state) == snapshot_of(state.ledger.state)
    return seconds


if __name__ == "__main__":
    main()
