"""A sweep: the runs of a grid of settings, each by `run.py`.

The file of a sweep is a configuration with a further key, `grid`: some keys, each with several values. Each combination
is a run. The run's configuration is written to RUN_DIR/SWEEP/RUN.yaml, and its folder is RUN_DIR/SWEEP/RUN.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from areal.base.command_line import typed
from areal.base.errors import UserError
from areal.base.processes import START, SUPERVISED, stop_signals
from areal.base.secrets import without_secrets
from areal.config import Config, load_config, overridden, validated
from areal.config.grid import name_of, points
from areal.config.reading import read_values, write_yaml
from areal.config.settings import MAY_CHANGE, differences, is_under
from areal.storage.disk import replace
from areal.storage.record import has_begun, has_finished

# Configuration keys without influence on a run's results.
OPERATION = ("master", "network", "observe")


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep. values: the run's whole configuration, as in a file."""

    config: Config
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def file(self) -> Path:
        """The file of the run's configuration."""
        return self.config.run_dir / f"{self.name}.yaml"

    @property
    def finished(self) -> bool:
        return has_finished(self.config.folder)

    @property
    def begun(self) -> bool:
        return has_begun(self.config.folder)

    @property
    def state(self) -> str:
        return "finished" if self.finished else "begun" if self.begun else "new"

    def arguments(self) -> list[str]:
        """Return the arguments of run.py. A run that has begun is resumed."""
        return [*(["--resume", str(self.config.folder)] if self.begun else []), "--config", str(self.file)]

    def write(self) -> None:
        """Write the run's configuration."""
        self.config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(self.file, write_yaml(self.values), mode=0o600)  # the file may hold secrets


def read_sweep(file: Path, overrides: Sequence[str] = ()) -> list[SweptRun]:
    """Return the runs of the sweep in `file`, in the order of its grid: the last key changes fastest.

    overrides: changes to all runs; `name` replaces the file's name as the sweep's name. Raises UserError if a run is
    not possible, or has begun with different settings.
    """
    values = overridden(read_values(file), overrides)
    grid = values.pop("grid", None)
    if not isinstance(grid, dict) or not grid or not all(isinstance(axis, list) and axis for axis in grid.values()):
        raise UserError(f"{file} has no grid: name keys with values, such as `grid: {{max_staleness: [0, 4]}}`.")
    combinations = points(grid, f"The grid of {file}")
    sweep = {"name": overridden({}, overrides).get("name", file.stem)}
    folder = str(validated(overridden(values, settings=combinations[0] | sweep), file).folder)
    runs = []
    for point in combinations:
        run_values = overridden(values, settings=point | {"run_dir": folder, "name": name_of(point)})
        run = SweptRun(validated(run_values, file), run_values)
        _check_begun(run)
        runs.append(run)
    return runs


def _check_begun(run: SweptRun) -> None:
    """Refuse a run that has begun with different settings, if it is over or could not resume with the new settings."""
    if not run.begun or not run.file.is_file():
        return
    free = OPERATION if run.finished else MAY_CHANGE
    previous: Config = load_config(run.file)
    for key, old, new in differences(previous.model_dump(mode="json"), run.config.model_dump(mode="json")):
        if not is_under(key, free):
            old, new = (without_secrets(value, key.rpartition(".")[2]) for value in (old, new))
            raise UserError(
                f"{key} was {old!r} in the run {run.config.folder} and is {new!r} now: give the sweep another name, "
                f"name=NAME, or remove that folder."
            )


def print_commands(runs: Sequence[SweptRun]) -> None:
    """Write the configurations of all runs, and print a command line for each unfinished run."""
    for run in runs:
        run.write()
        if not run.finished:
            print(typed(shlex.join(["run", *run.arguments()])))


class Sweep:
    """Does the runs in turn. A signal ends the current run as it would end `run.py`, and then the sweep."""

    def __init__(self, runs: Sequence[SweptRun]) -> None:
        self.runs = runs
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Do all unfinished runs. A run that has begun is resumed. A failure is reported, and the next run follows.

        Returns the exit code: 0 if all runs are finished, 1 if a run has failed, 128 + N after the signal N.
        """
        for sign in stop_signals():
            signal.signal(sign, self._stop)
        failed = []
        for number, run in enumerate(self.runs, 1):
            if run.finished:
                print(f"[{number}/{len(self.runs)}] {run.name} is finished", flush=True)
                continue
            print(f"[{number}/{len(self.runs)}] {run.name}{' is resumed' * run.begun}", flush=True)
            run.write()
            code = self._run_process(run)
            if self._signal:
                print(f"Stopped in {run.name}: the same command goes on with it.", file=sys.stderr)
                return 128 + self._signal
            if code:
                failed.append(run.name)
                print(f"{run.name} failed with exit code {code}: the sweep goes on without it.", file=sys.stderr)
        finished = len(self.runs) - len(failed)
        print(f"{finished} of {len(self.runs)} runs are finished" + f"; failed: {', '.join(failed)}" * bool(failed))
        return 1 if failed else 0

    def _run_process(self, run: SweptRun) -> int:
        if self._signal:
            return 0
        # SUPERVISED ends run.py with this process. The new session hides a Ctrl-C from run.py: `_stop` passes it on.
        self._process = subprocess.Popen(
            [sys.executable, START, *run.arguments()],
            env=os.environ | {SUPERVISED: str(os.getpid())},
            start_new_session=True,
        )
        if self._signal:  # the signal came before the process
            self._process.send_signal(self._signal)
        return self._process.wait()

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        if self._process is not None:
            self._process.send_signal(number)
