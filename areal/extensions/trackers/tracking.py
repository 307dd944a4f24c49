"""Sends the numbers of a run to TensorBoard, to W&B, trackio and MLflow if the configuration names a project, and to
further trackers in the configuration (`observe.trackers`).

A separate process (`areal track RUN_FOLDER`, started by the master) follows metrics.jsonl and evaluations.jsonl and
passes every record to each sink. Its failure does not fail the run. `tracked.json` holds the last record sent from each
file, so that a resumed run sends nothing twice.
"""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from areal.base import extensions
from areal.base.errors import UserError
from areal.base.processes import ROOT, LenientOutput, tied
from areal.config import Config
from areal.config.role_sections import ObserveConfig
from areal.storage.disk import DiskRetry, refusal, replace, within
from areal.storage.records import NewRecords, flat
from areal.storage.run_files import EVALUATIONS, METRICS
from areal.storage.run_folder import config_of_run, read_summary

POLL_SECONDS = 1.0
# Seconds for the process to end after the run.
LAST_WORDS_SECONDS = 5.0
RESTART_SECONDS = 10.0
NICENESS = 10
# Limits of MLflow: characters of a name, settings in a request, characters of a setting.
NOT_MLFLOW = re.compile(r"[^\w ./-]")
MLFLOW_PARAMS, LONGEST_PARAM = 100, 500
# The followed files, and the key that numbers their records.
FILES = {METRICS: "step", EVALUATIONS: "version"}

Sink = Callable[[int, dict[str, float], float], None]
"""Takes the step (or version), numbers by name such as `step/reward_mean`, and the time, seconds since 1970. A tracker
is a function of the configuration, the run's folder and the options in `observe.tracker_options`; it returns a sink."""

log = structlog.get_logger()


class TrackingProcess:
    """`areal track` as a child process, started again when it ends before `finish`."""

    @staticmethod
    def check(config: ObserveConfig) -> None:
        """Raise UserError if a configured tracker is not installed."""
        for name in config.trackers:
            extensions.find("tracker", name, "The tracker")
        for name in ("wandb", "trackio", "mlflow"):
            if getattr(config, name) and importlib.util.find_spec(name) is None:
                raise UserError(
                    f"observe.{name} is set, but {name} is not installed: pip install {name}, or leave it out."
                )

    @classmethod
    def begin(cls, config: Config) -> "TrackingProcess | None":
        """Start the process that follows the run in `config.folder`. Returns None if no tracker is configured, or if
        the start fails, which does not fail the run."""
        observe = config.observe
        if not (observe.tensorboard or observe.wandb or observe.trackio or observe.mlflow or observe.trackers):
            return None
        try:
            return cls(config.folder)
        except OSError as error:
            log.warning("nothing is tracked", error=str(error))
            return None

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the process cannot be started."""
        self._folder = folder
        self._over = threading.Event()
        self._process = self._open()
        self._thread = threading.Thread(target=self._keep_up, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Give the process of an ended run the time to send the remaining records. Then kill the process."""
        self._over.set()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WORDS_SECONDS if read_summary(self._folder) else 0.0)
        self._process.kill()
        self._thread.join()

    def _open(self) -> subprocess.Popen[bytes]:
        with (self._folder / "logs" / "track.out").open("a") as out:
            return subprocess.Popen(
                tied(sys.executable, "-m", "areal", "track", str(self._folder)),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _keep_up(self) -> None:
        # A process that ends with 0 has no sink left.
        while self._process.wait() and not self._over.wait(RESTART_SECONDS):
            log.warning("the tracking process has ended and starts again", code=self._process.returncode)
            try:
                self._process = self._open()
            except OSError as error:  # a full disk, for instance
                log.warning("the tracking process does not start", error=str(error))
            if self._over.is_set():  # `finish` may have killed the process before
                self._process.kill()


def track(options: Namespace) -> None:
    """`areal track`: follow the run in a folder until its summary is written."""
    # The output goes into the run folder, and its disk may be full.
    sys.stdout, sys.stderr = cast(TextIO, LenientOutput(sys.stdout)), cast(TextIO, LenientOutput(sys.stderr))
    within(options.folder / "tensorboard", options.folder)
    tracker = Tracker(options.folder, open_sinks(config_of_run(options.folder), options.folder))
    os.nice(NICENESS)
    tracker.run()


class Tracker:
    """Passes new records to the sinks. A sink that raises an exception gets no more records. If the sink's disk takes
    no writes, the sink gets the record again."""

    def __init__(self, folder: Path, sinks: dict[str, Sink]) -> None:
        self._folder = folder
        self._disk_retry = DiskRetry(folder, "the tracker")
        self._sinks = sinks
        self._new = {file: NewRecords(folder / file) for file in FILES}
        self._state = folder / "tracked.json"
        newest = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._newest = {file: value if isinstance(value := newest.get(file), int) else -1 for file in FILES}

    def run(self) -> None:
        while self._sinks:
            over = read_summary(self._folder) is not None  # all records are written before the summary
            self.look()
            if over:
                return
            time.sleep(POLL_SECONDS)

    def look(self) -> None:
        """Pass on the new records."""
        newest = dict(self._newest)
        for file, key in FILES.items():
            for record in self._new[file].read():
                if record[key] > newest[file]:
                    self._send(key, record)
                    newest[file] = record[key]
        if newest != self._newest:
            self._newest = newest
            self._disk_retry.write_in_thread(lambda: replace(self._state, json.dumps(newest)), self._state.name)

    def _send(self, key: str, record: dict[str, Any]) -> None:
        prefix = "step" if key == "step" else "evaluation"
        # Each benchmark is named eval/NAME, and its other numbers eval/NAME/KEY.
        benchmarks = record.get("benchmarks", {})
        values = {name: value for name, value in record.items() if name not in (key, "time", "benchmarks")}
        numbers = {f"{prefix}/{name}": value for name, value in flat(values).items()}
        numbers |= {f"eval/{name}": value for name, value in flat(benchmarks).items()}
        numbers |= flat({f"eval/{name}": scores["accuracy"] for name, scores in benchmarks.items()})
        for name, sink in list(self._sinks.items()):
            send = partial(sink, record[key], numbers, record.get("time", time.time()))
            try:
                self._disk_retry.write_in_thread(send, name)
            except Exception as error:  # third-party code, which may raise anything
                log.warning("a sink failed and gets no more records", sink=name, error=repr(error))
                del self._sinks[name]


def open_sinks(config: Config, folder: Path) -> dict[str, Sink]:
    """Open the configured sinks, and leave out sinks that fail to open."""
    openers = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
    named = {name: opener for name, opener in openers.items() if getattr(config.observe, name)}
    named |= {name: partial(_open_tracker, name) for name in config.observe.trackers}
    sinks = {}
    for name, opener in named.items():
        try:
            sinks[name] = opener(config, folder)
        except Exception as error:  # no network, no key, no room
            log.warning("a sink cannot be opened", sink=name, error=repr(error))
    return sinks


def _open_tracker(name: str, config: Config, folder: Path) -> Sink:
    opener = extensions.find("tracker", name, "The tracker")
    sink: Sink = opener(config, folder, **config.observe.tracker_options.get(name, {}))
    return sink


def _tensorboard(config: Config, folder: Path) -> Sink:
    from tensorboard.summary import Writer

    writer: Writer | None = None
    earlier: set[Path] = set()  # files from before this writer
    limit = (config.observe.metrics_mib or math.inf) * (1 << 20)

    def send(step: int, numbers: dict[str, float], at: float) -> None:
        nonlocal writer, earlier
        if writer is None:
            if error := refusal(folder):  # otherwise each attempt would leave a file
                raise error
            earlier = set((folder / "tensorboard").glob("*"))
            writer = Writer(str(folder / "tensorboard"))
        try:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step, wall_time=at)
            writer.flush()
        except OSError:
            writer = None  # the writer takes no more
            raise
        if sum(file.stat().st_size for file in {*(folder / "tensorboard").iterdir()} - earlier) > limit:
            writer.close()
            writer = None
            for file in earlier:
                file.unlink()

    return send


def _wandb(config: Config, folder: Path) -> Sink:
    import wandb

    values = config.model_dump(mode="json")
    run = wandb.init(
        project=config.observe.wandb, name=config.name, id=run_id(folder), resume="allow", dir=folder, config=values
    )
    # Results of evaluations come late, and W&B's own step counter would not accept them.
    run.define_metric("*", step_metric="version")
    return lambda step, numbers, at: run.log(numbers | {"version": step})


def _trackio(config: Config, folder: Path) -> Sink:
    import trackio

    run = trackio.init(
        project=config.observe.trackio,
        name=f"{config.name}-{run_id(folder)}",
        resume="allow",
        config=config.model_dump(mode="json"),
    )
    return lambda step, numbers, at: run.log(numbers, step=step)


def _mlflow(config: Config, folder: Path) -> Sink:
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:  # by default MLflow writes into the folder of the code
        mlflow.set_tracking_uri(f"sqlite:///{folder.parent.absolute() / 'mlflow.db'}")
    mlflow.set_experiment(config.observe.mlflow)
    this_run = run_id(folder)
    runs = mlflow.search_runs(filter_string=f"tags.areal = '{this_run}'", output_format="list")
    mlflow.start_run(runs[0].info.run_id if runs else None, run_name=config.name, tags={"areal": this_run})
    params = [] if runs else list(_params(config.model_dump(mode="json")))  # MLflow cannot change params
    for begin in range(0, len(params), MLFLOW_PARAMS):
        mlflow.log_params(dict(params[begin : begin + MLFLOW_PARAMS]))

    def send(step: int, numbers: dict[str, float], at: float) -> None:
        mlflow.log_metrics({NOT_MLFLOW.sub("_", key): n for key, n in numbers.items()}, step, timestamp=int(1000 * at))

    return send


def _params(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a run for MLflow: flat, with short values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _params(value, f"{prefix}{name}.")
        else:
            yield NOT_MLFLOW.sub("_", prefix + name), str(value)[:LONGEST_PARAM]


def run_id(folder: Path) -> str:
    """Return an id that a resumed run keeps. A later run of the same name, or a run that went back, has a new id."""
    rollbacks = len(list((folder / "abandoned").glob("*")))
    return f"{(folder / 'journal.db').stat().st_ino:x}{f'-{rollbacks}' if rollbacks else ''}"
