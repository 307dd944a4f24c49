"""Reads and writes the run folder.

The folder has the files of areal.storage.run_files (fork.json in a fork, secrets.json for a configuration with
secrets), tensorboard/, logs/, rollouts/, checkpoints/, abandoned/ and weights/, and, while the run goes on, address and
keys/ (areal.storage.claim) and reserve (areal.storage.disk).
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from areal.base.errors import UserError
from areal.base.secrets import hidden_in, secrets_in, without_secrets
from areal.config import Config, dump_config, load_config, overridden, stored_config, validated
from areal.config.named_objectives import OBJECTIVES, settings_of
from areal.config.settings import MAY_CHANGE, REDONE, differences, is_under
from areal.config.trainer_section import TrainerConfig
from areal.models import with_folders
from areal.storage.disk import STEPS_LOOKED_AT, Reserve, append, free_bytes, replace, running_out
from areal.storage.events import EventLog
from areal.storage.records import line_of, read_records, record_of, set_aside, whole_records
from areal.storage.run_files import (
    CHANGES,
    CONFIG,
    EVALUATIONS,
    FORK,
    JOURNAL,
    METRICS,
    OLDER,
    REPORT,
    SECRETS,
    SUMMARY,
)

log = structlog.get_logger()

# The file in a checkpoint with facts about its training.
STATE_FILE = "training/state.json"

# The first step with counted waits. In earlier steps the trainer waits for the first groups in any case.
STEADY = 3


class Origin(NamedTuple):
    """A run that a fork goes on from: name, folder, identity, and the step of the checkpoint."""

    name: str
    folder: str
    run: str
    step: int


class RunFolder:
    """The folder of a run's results. The master writes the folder. On resumption, summary.json and report.html are
    removed, an incomplete last record of metrics.jsonl and evaluations.jsonl is cut off, and damaged records are moved
    to metrics.damaged.jsonl and evaluations.damaged.jsonl.

    run: the identity of the run, for each record. `filling`: a sentence about a disk that fills, else ""."""

    def __init__(self, config: Config, run: str = "") -> None:
        self.path = config.folder
        self._run = run
        self._step = 0
        self._staleness_max = 0
        self._logprob_gap_max: float | None = None
        self._seconds = self._idle = 0.0  # the trainer's seconds from step STEADY on
        for name in (SUMMARY, REPORT):
            (self.path / name).unlink(missing_ok=True)
        store_configuration(config)
        self._metrics = self.path / METRICS
        self._most_metrics = (config.observe.metrics_mib or math.inf) * (1 << 20)
        for path in (self.path / OLDER[METRICS], self._metrics):
            for record in whole_records(path):
                self._update_totals(record)
        self._metrics.touch()  # now a run has begun here
        self._evaluations = self.path / EVALUATIONS
        self._evaluated = {record["version"] for record in whole_records(self._evaluations)}
        self._free: deque[int] = deque(maxlen=STEPS_LOOKED_AT)  # bytes on the disk after each of the newest steps
        self.filling = ""
        self.free_reserve = Reserve(self.path).free
        events = EventLog(self.path, int(config.observe.events_mib * (1 << 20)))
        self.record_heartbeat = events.record_heartbeat
        self._flush_events = events.flush

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a step's record, with the time. It is on disk on return. A step that is already there is skipped."""
        if metrics["step"] <= self._step:
            return
        # A restarted master repeats only the last record: earlier records have to survive a crash of the machine.
        free = free_bytes(self.path)
        if self._metrics.stat().st_size > self._most_metrics:
            set_aside(self._metrics, self.path / OLDER[METRICS])
        append(self._metrics, self._line(metrics | {"disk_free": free}))
        self._update_totals(metrics)
        self._free.append(free)
        warning = running_out(list(self._free)) or ""
        if warning and not self.filling:
            log.warning(warning)
        self.filling = warning and (self.filling or warning)

    def append_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Append a version's result, with the time. It is on disk on return. A known version is skipped."""
        if evaluation["version"] in self._evaluated:
            return
        append(self._evaluations, self._line(evaluation))
        self._evaluated.add(evaluation["version"])

    def _line(self, record: dict[str, Any]) -> str:
        return line_of(record | {"run": self._run, "time": time.time()})

    def _update_totals(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] <= self._step:  # a crash has left the step in both files
            return
        self._step = metrics["step"]
        self._staleness_max = max(self._staleness_max, metrics["staleness_max"])
        gap = metrics.get("logprob_gap")
        if gap is not None:
            self._logprob_gap_max = max(gap, self._logprob_gap_max or 0.0)
        if self._step >= STEADY:
            self._seconds += metrics["step_seconds"]
            self._idle += metrics["trainer_wait_seconds"] + metrics["publish_wait_seconds"]

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json atomically, and add the figures over all steps. The file marks the run as over."""
        over_steps = {
            "staleness_max": self._staleness_max,
            "logprob_gap_max": self._logprob_gap_max,
            "trainer_idle": self._idle / self._seconds if self._seconds else None,
        }
        self._flush_events()
        replace(self.path / SUMMARY, json.dumps(summary | over_steps, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the contents of summary.json in `folder`; None if the run is not over, or the file is damaged."""
    return _object_in(folder / SUMMARY)


def _object_in(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is unreadable or damaged."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def checkpoint_of(folder: Path, version: int) -> Path:
    """Return the folder for the checkpoint of a version of the run in `folder`."""
    return folder / "checkpoints" / f"step_{version:06}"


def version_of(checkpoint: Path) -> int:
    """Return the version of a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def metrics_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the kept metrics of each step of the run in `folder`."""
    step = 0
    for record in chain(read_records(folder / OLDER[METRICS]), read_records(folder / METRICS)):
        if record["step"] > step:  # a crash may have left the step in both files
            step = record["step"]
            yield record


def lost_metrics(folder: Path, version: int) -> list[str]:
    """Return a sentence about the steps before `version` with lost metrics in `folder`; empty if no metrics are lost. A
    restart writes the metrics of the newest step again. Metrics beyond a limit of size are not lost."""
    steps = [record["step"] for record in metrics_of(folder)]
    first = steps[0] if steps and (folder / OLDER[METRICS]).exists() else first_version(folder) + 1
    if not (lost := sorted({*range(first, version)} - {*steps})):
        return []
    which = f"steps {lost[0]} to {lost[-1]}" if len(lost) > 1 else f"step {lost[0]}"
    return [
        f"{folder / METRICS} has lost the metrics of {len(lost)} of the run's steps ({which}): its curves lack them."
    ]


def steps_trained(folder: Path) -> int:
    """Return the number of trained steps of the run in `folder`."""
    return max((record["step"] for record in metrics_of(folder)), default=0)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of the run in `folder`, model folders, oldest first. Other names are a user's copies."""
    return sorted(path for path in folder.glob("checkpoints/step_*") if path.name.removeprefix("step_").isdecimal())


def facts_of(checkpoint: Path) -> dict[str, Any] | None:
    """Return the facts about a checkpoint's training; None if the file is missing or damaged."""
    file = checkpoint / STATE_FILE
    return record_of(file.read_bytes()) if file.is_file() else None


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of the run in `folder`, a model folder; None without a checkpoint."""
    return next(reversed(checkpoints_in(folder)), None)


def ways_out(folder: Path) -> str:
    """Return the remedies for a damaged record of the run in `folder`, for the end of a sentence."""
    newest = last_checkpoint(folder)
    weights = f" from its weights with model={newest}" if newest else ""
    return f"put back a backup of {folder} (areal backup), or start a new run{weights}."


def ways_on(folder: Path, without: Path | None = None) -> str:
    """Return the remedies for a damaged spool, or for the damaged checkpoint `without`, for the end of a sentence."""
    checkpoints = [path for path in checkpoints_in(folder) if path != without]
    if not checkpoints:
        return ways_out(folder)
    return f"put it back, or go on without it with --resume {folder} --from-step {version_of(checkpoints[-1])}."


def compare_record(folder: Path, run: str, version: int) -> None:
    """Compare the parts of the run in `folder` with its journal, by the journal's run identity `run` and trained
    `version`. Raises UserError if the journal is older than a part, or if a part is of another run."""
    journal, metrics, newest = folder / JOURNAL, folder / METRICS, last_checkpoint(folder)
    # The checkpoint of a step may be on disk before the step is in the journal.
    steps = {str(newest): version_of(newest) - 1} if newest else {}
    runs = set()
    for record in metrics_of(folder):
        steps[str(metrics)] = record["step"]
        runs.add(record.get("run"))
    for name, step in steps.items():
        if step > version:
            raise UserError(
                f"{journal} is not whole: it ends at step {version}, and {name} is of a later one. Put back the newer "
                f"{journal.name} with its {journal.name}-wal, or {ways_out(folder)}"
            )
    if runs - {run}:
        raise UserError(f"{metrics} has records of another run than {journal}: {ways_out(folder)}")


def store_configuration(config: Config) -> None:
    """Write config.yaml into the folder of a run, which is made if it is missing. Hidden values are written into a file
    for the user's eyes alone; a master reads the file at its start."""
    config.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if secrets := secrets_in(config.model_dump(mode="json")):
        replace(config.folder / SECRETS, json.dumps(secrets), mode=0o600)
    else:
        (config.folder / SECRETS).unlink(missing_ok=True)
    replace(config.folder / CONFIG, dump_config(config))


def config_of_run(folder: Path, overrides: Sequence[str] = (), *, secrets: bool = False) -> Config:
    """Return the configuration of the run in `folder`, with `overrides`. secrets: with secrets. Raises UserError."""
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"There is no run in {folder}, it has no config.yaml: give its folder, runs/NAME.")
    return stored_config(file, overrides, _object_in(folder / SECRETS) if secrets else {})


def config_with(folder: Path, settings: Mapping[str, Any], *, secrets: bool = False) -> Config:
    """Return the configuration of the run in `folder` with other settings, by key. A new objective brings its own
    settings, and the settings of the run's objective go. Raises UserError."""
    stored = config_of_run(folder, secrets=secrets)
    values = stored.model_dump(mode="json")
    if "trainer.objective" in settings:
        brought = settings_of(stored.trainer.objective)
        for key in set().union(*map(settings_of, OBJECTIVES)):
            if getattr(stored.trainer, key) == brought.get(key, TrainerConfig.model_fields[key].default):
                del values["trainer"][key]
    return validated(overridden(values, settings=settings), folder / CONFIG)


def origins_of(folder: Path) -> list[Origin]:
    """Return the runs that the run in `folder` goes on from, oldest first; empty unless the run is a fork."""
    file = folder / FORK
    return [Origin(**row) for row in json.loads(file.read_text())] if file.is_file() else []


def first_version(folder: Path) -> int:
    """Return the first version of the run in `folder`: the version of a fork's checkpoint, else 0, the model."""
    return origins[-1].step if (origins := origins_of(folder)) else 0


def configuration_to_resume(
    folder: Path, file: Path | None, overrides: Sequence[str], from_step: int | None = None
) -> Config:
    """Return the configuration for resuming the run in `folder`: the stored configuration, or the configuration in
    `file`, with `overrides`. from_step: the step that the run goes back to.

    The run goes on in `folder`, even if the folder was moved. Raises UserError if there is no run, if the run has
    reached its end or has trained more than `steps`, or if the configuration differs in a key that may not change.
    """
    begun = from_step is not None or (folder / METRICS).exists()  # else the run was stopped while its model was made
    if not (folder / CONFIG).is_file() or (begun and not (folder / JOURNAL).is_file()):
        raise UserError(f"There is no run in {folder} that could be continued: give its folder, runs/NAME.")
    stored = config_of_run(folder, secrets=True)
    place = {"run_dir": folder.resolve().parent, "name": folder.resolve().name}
    config: Config
    if file is None:
        here = [f"{key}={value}" for key, value in place.items()]
        config = config_of_run(folder, [*here, *overrides], secrets=True)
    else:
        config = load_config(file, overrides)
        if config.folder.resolve() == stored.folder.resolve():
            config = config.model_copy(update=place)
    stored = stored.model_copy(update=place)
    summary = read_summary(folder)
    if from_step is None and summary and summary["ok"] and config.steps <= summary["steps"]:
        raise UserError(
            f"The run in {folder} is complete: it has reached the end of its {summary['steps']} steps. Resume it with "
            f"more to extend it, steps=N."
        )
    if hidden := hidden_in(config.model_dump(mode="json")):
        raise UserError(
            f"{hidden} is hidden in {file or folder / 'config.yaml'}, and {folder / SECRETS} does not have it: give it "
            f"again, {hidden}=VALUE."
        )
    trained = steps_trained(folder) if from_step is None else from_step
    if config.steps < trained:
        raise UserError(f"The run in {folder} has trained {trained} steps: set steps to at least {trained}.")
    config = config.model_copy(update={"run_dir": config.run_dir.resolve()})
    if config.trainer.dtype == "auto":  # resolved when the run began, perhaps on another machine
        trainer = config.trainer.model_copy(update={"dtype": stored.trainer.dtype})
        config = config.model_copy(update={"trainer": trainer})
    models = [[c.model, c.trainer.reference, *(s.model for s in c.scorers.values())] for c in (config, stored)]
    if models[0] != models[1]:
        config = with_folders(config)
    for key, old, new in differences(stored.model_dump(mode="json"), config.model_dump(mode="json")):
        again = hidden_in(old) is not None  # a secret that is given again
        if not again and not is_under(key, MAY_CHANGE) and not is_elsewhere(old, new):
            old, new = (without_secrets(value, key.rpartition(".")[2]) for value in (old, new))
            raise UserError(f"{key} was {old!r} when the run in {folder} began and cannot become {new!r}: keep it.")
    return config


def is_elsewhere(old: Any, new: Any) -> bool:
    """Whether a file or folder that a key names was moved, or is at another path on this machine."""
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return Path(old).is_absolute() and not Path(old).exists() and Path(new).exists()


def keep_changes(config: Config, trained: int, checkpoint: int) -> list[str]:
    """Append to changes.jsonl the changes by `config` in the configuration of a resumed run, with the first step of
    each change. Return the changes in words. trained: the number of steps with fixed batches. checkpoint: the version
    from which the trainer redoes steps."""
    stored = config_of_run(config.folder, secrets=True)
    sentences, lines = [], ""
    for key, old, new in differences(stored.model_dump(mode="json"), config.model_dump(mode="json")):
        step = 1 + (checkpoint if is_under(key, REDONE) else trained)
        old, new = (without_secrets(value, key.rpartition(".")[2]) for value in (old, new))
        lines += line_of({"step": step, "key": key, "before": old, "now": new, "time": time.time()})
        sentences.append(f"{key} was {old!r} and is {new!r} from step {step} on")
    sentences += _jumps(stored, config, checkpoint)
    append(config.folder / CHANGES, lines)
    return sentences


def end_of(folder: Path, step: int) -> list[str]:
    """Return the overrides that end the run in `folder` at `step`. The learning rates stay: steps may be redone."""
    config = config_of_run(folder)
    return [f"steps={step}", f"trainer.lr_schedule_steps={config.trainer.lr_schedule_steps or config.steps or 'null'}"]


def _jumps(stored: Config, config: Config, checkpoint: int) -> list[str]:
    """Return a sentence if a longer schedule changes the learning rate from `checkpoint` on."""
    shares = [
        c.trainer.lr_share(checkpoint * c.trainer.minibatches, c.optimizer_steps) * c.trainer.lr / stored.trainer.lr
        for c in (stored, config)
    ]
    if stored.optimizer_steps == config.optimizer_steps or math.isclose(*shares, rel_tol=0.01):
        return []
    return [
        f"the decay of the learning rate ends later, so that the rate goes from {shares[0]:.2g} to {shares[1]:.2g} of "
        f"trainer.lr: resume with trainer.lr_schedule_steps={stored.optimizer_steps // stored.trainer.minibatches} to "
        f"keep the old end"
    ]


def hold_changes_from(folder: Path, step: int) -> None:
    """Make settings that were changed after `step`, the step that the run has gone back to, hold from `step` on."""
    changes = list(read_records(folder / CHANGES))
    if any(change["step"] > step for change in changes):
        lines = (line_of(change | {"step": min(step, change["step"])}) for change in changes)
        replace(folder / CHANGES, "".join(lines))


def changed_back(folder: Path, step: int) -> dict[str, Any]:
    """Return the settings by which the run in `folder` trained `step`, by key, as far as they have changed since."""
    changes = [change for change in read_records(folder / CHANGES) if is_under(change["key"], MAY_CHANGE)]
    return {change["key"]: change["before"] for change in reversed(changes) if change["step"] > step}
