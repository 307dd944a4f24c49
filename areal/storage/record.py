"""The record of a run, read from its folder without any change. Tools and pages that show runs use `Record` alone."""

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.config import Config
from areal.config.reading import read_values
from areal.data.files import read_object
from areal.models import QUICKSTART_FOLDER
from areal.samples.tokenizer import tokenizer_in
from areal.samples.trajectory import Group
from areal.storage import rollout_files, stored_groups
from areal.storage.disk import leaves, within
from areal.storage.journal import Journal, journal_copy
from areal.storage.records import NewRecords, read_records
from areal.storage.run_files import (
    CHANGES,
    CONFIG,
    EVALUATIONS,
    EVENTS,
    JOURNAL,
    METRICS,
    OLDER,
    ROLLOUTS,
    SUMMARY,
)
from areal.storage.run_folder import (
    STEADY,
    Origin,
    changed_back,
    checkpoint_of,
    checkpoints_in,
    compare_record,
    config_of_run,
    config_with,
    facts_of,
    first_version,
    origins_of,
    read_summary,
    version_of,
)
from areal.storage.selection import read_rows

ROLLOUT_COLUMNS = tuple(rollout_files.SCHEMA.names)
NO_ROLLOUTS = rollout_files.SCHEMA.empty_table()


class Record:
    """The record of the run in `folder`. Parts that the run did not write, because it ended early, are empty.

    without: keys of the steps' metrics to leave out of memory. Raises UserError if the folder is not that of a run.
    """

    def __init__(self, folder: Path, without: Sequence[str] = ()) -> None:
        if not any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY, ROLLOUTS)):
            raise UserError(f"{folder} is not the folder of a run: it has no {CONFIG}, {METRICS} or {SUMMARY}.")
        self.folder = folder
        self.name = folder.resolve().name
        self.new_events = NewRecords(folder / EVENTS).read
        """Return the events since the last call, in the order of writing."""
        self.configuration, self.metrics = KeptConfiguration(folder), KeptMetrics(folder, without)
        self.rollouts, self.checkpoints = KeptRollouts(folder / ROLLOUTS), KeptCheckpoints(folder)

    @property
    def ending(self) -> dict[str, Any] | None:
        """The summary; None if the run goes on, or if the file is damaged."""
        return read_summary(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """The summary; empty if the run goes on. Raises UserError if the file is damaged, or a link."""
        file = within(self.folder / SUMMARY, self.folder)
        text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
        return read_object(text, f"{file}", "remove it to get a report without it.")

    def sample_pairs(self) -> list[dict[str, Any]]:
        """Return samples of the same held-out prompt side by side: prompt, answer, before, after (None without a
        sample). The prompts with the largest changes of score come first."""
        pairs: dict[str, dict[str, Any]] = {}
        for when in ("before", "after"):
            for sample in self.summary.get(f"samples_{when}") or ():
                row = {"prompt": sample["prompt"], "answer": sample.get("answer"), "before": None, "after": None}
                pairs.setdefault(sample["prompt"], row)[when] = sample
        changes = [[pair[when]["score"] for when in ("before", "after") if pair[when]] for pair in pairs.values()]
        ordered = sorted(zip(changes, pairs.values(), strict=True), key=lambda item: min(item[0]) - max(item[0]))
        return [pair for _, pair in ordered]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events, in the order of time."""
        records = chain.from_iterable(read_records(self.folder / file) for file in (OLDER[EVENTS], EVENTS))
        return sorted(records, key=lambda event: event["time"])

    @property
    def last_written(self) -> float | None:
        """The time of the newest event's writing, in seconds since 1970; None without events."""
        file = self.folder / EVENTS
        return file.stat().st_mtime if file.is_file() else None

    @property
    def versions(self) -> list[int]:
        """The versions with kept weights: the first version and the checkpoints."""
        return sorted({self.configuration.first_version, *map(version_of, self.checkpoints.folders)})

    def journal(self) -> AbstractContextManager[Journal]:
        """A copy of the journal. Raises UserError if the journal is missing or damaged."""
        if not (file := self.folder / JOURNAL).is_file():
            raise UserError(f"{file} is missing: put it back.")
        return journal_copy(file)

    def compare(self, run: str, version: int) -> None:
        """Compare the parts of the record with the journal, of the run `run` at `version`. Raises UserError."""
        compare_record(self.folder, run, version)


class KeptConfiguration:
    """The configuration of the run in `folder`, and the changes at each resumption."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def text(self) -> str:
        """The contents of the file; empty without a file."""
        file = self._folder / CONFIG
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    @property
    def settings(self) -> dict[str, Any]:
        """The values of the configuration, unchecked; empty without a file. The quickstart's model, another folder for
        each seed, has its name in place of the folder."""
        named = {"model": "quickstart"} if QUICKSTART_FOLDER.fullmatch(Path(self.model).name) else {}
        return _settings_in(self._folder) | named

    @property
    def model(self) -> str:
        """The folder or the name of the model; empty without a configuration."""
        return str(_settings_in(self._folder).get("model", ""))

    def tokenizer(self) -> Any | None:
        """Return the tokenizer of the model; None if the folder of the model is missing, or has no tokenizer."""
        return tokenizer_in(self.model)

    def load(self, overrides: Sequence[str] = ()) -> Config:
        """Return the configuration, with overrides such as `key=value`. Raises UserError, also without a file."""
        return config_of_run(self._folder, overrides)

    def with_settings(self, settings: Mapping[str, Any]) -> Config:
        """Return the configuration with other settings, by key. Raises UserError."""
        return config_with(self._folder, settings)

    def changed_after(self, step: int) -> dict[str, Any]:
        """Return the settings by which the run trained `step`, by key, as far as they have changed since."""
        return changed_back(self._folder, step)

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The changes at each resumption: step, key, before, now."""
        return list(read_records(self._folder / CHANGES))

    @property
    def origins(self) -> list[Origin]:
        """The runs that a fork goes on from, oldest first."""
        return origins_of(self._folder)

    @property
    def first_version(self) -> int:
        """The version at the begin of the run: of a fork's checkpoint, or else 0, the model."""
        return first_version(self._folder)


class KeptMetrics:
    """The metrics of the steps and the evaluations of the run in `folder`, read at first use and by `update`.

    without: keys to leave out of memory.
    """

    def __init__(self, folder: Path, without: Sequence[str] = ()) -> None:
        self._folder = folder
        self._new_steps, self._new_evaluations = NewRecords(folder / METRICS), NewRecords(folder / EVALUATIONS)
        self._without = frozenset(without)
        self._read: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """The metrics of each step."""
        return (self._read or self.update())[0]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The results of each evaluated version."""
        return (self._read or self.update())[1]

    def update(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read the steps and evaluations since the last call, and return all of them."""
        new = _in_short(self._new_steps.read(), self._without)
        if self._read is None:  # a crash may have left a step in both files
            first = new[0]["step"] if new else math.inf
            older = _in_short(read_records(self._folder / OLDER[METRICS]), self._without)
            new = [*(record for record in older if record["step"] < first), *new]
        steps, evaluations = self._read = self._read or ([], [])
        steps += new
        evaluations += self._new_evaluations.read()
        return self._read

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.records]

    @property
    def trained(self) -> int:
        """The number of trained steps."""
        return max(self.steps, default=0)

    @property
    def steady(self) -> list[dict[str, Any]]:
        """The records from step STEADY on."""
        return [record for record in self.records if record["step"] >= STEADY]

    @property
    def filters(self) -> bool:
        """Whether groups were filtered, so that the trained groups are not all groups."""
        return any(record.get("groups_filtered") for record in self.records)

    @property
    def times(self) -> list[float]:
        """The time of each step's commit, in seconds since 1970; in records without a time, in seconds of training."""
        times: list[float] = []
        for record in self.records:
            previous = times[-1] if times else 0.0
            times.append(record.get("time", previous + record.get("step_seconds", 0.0)))
        return times

    def series(self, key: str) -> list[float]:
        """Return a metric at every step; nan for a missing value or null."""
        return [number_or_nan(record.get(key)) for record in self.records]

    @property
    def files(self) -> list[Path]:
        """The existing files of metrics and evaluations, except links out of the folder."""
        files = [self._folder / name for name in (OLDER[METRICS], METRICS, EVALUATIONS)]
        return [file for file in files if file.is_file() and not leaves(file, self._folder)]


class KeptCheckpoints:
    """The checkpoints of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folders(self) -> list[Path]:
        """Model folders, oldest first."""
        return checkpoints_in(self._folder)

    def of(self, version: int) -> Path:
        """The folder for the checkpoint of a version, existing or not."""
        return checkpoint_of(self._folder, version)

    def facts(self, checkpoint: Path) -> dict[str, Any] | None:
        """Return the facts about a checkpoint's training; None if the file is missing or damaged."""
        return facts_of(checkpoint)


class KeptRollouts:
    """The rollouts in `folder`. Methods raise UserError if a file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lacking: dict[Path, list[str]] = {}  # by file: the missing columns

    def files(self) -> list[Path]:
        """Return the files, oldest first. Raises UserError for a file without rollouts."""
        files = rollout_files.files(self.folder)
        for file in files:
            if file not in self._lacking:
                self._lacking[file] = rollout_files.lacking(file)
        return files

    @property
    def lacks_columns(self) -> bool:
        """Whether an earlier version, with fewer columns, wrote some of `files`."""
        return any(self._lacking.values())

    def groups_by_step(self) -> Counter[int]:
        """The number of trained groups, by step."""
        return stored_groups.groups_by_step(self.folder)

    def batches(self, first: int = 1) -> Iterator[tuple[int, list[Group]]]:
        """The trained groups, by step, from `first` on."""
        return stored_groups.batches(self.folder, first)

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows in the order of the files."""
        return read_rows(self.folder, columns)


def _in_short(records: Iterable[dict[str, Any]], without: Collection[str]) -> list[dict[str, Any]]:
    """Return the records of steps, without the values of the keys `without`."""
    return [{key: value for key, value in record.items() if key not in without} for record in records]


def has_begun(folder: Path) -> bool:
    """Whether the run in a folder, which may be missing, can be resumed."""
    return (folder / JOURNAL).is_file()


def has_finished(folder: Path) -> bool:
    """Whether the run in a folder, which may be missing, has reached its end."""
    summary = read_summary(folder)
    return bool(summary and summary["ok"])


def number_or_nan(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _settings_in(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    return copy.deepcopy(_values(file, file.stat().st_mtime_ns)) if file.is_file() else {}


@lru_cache(maxsize=64)
def _values(file: Path, changed: int) -> dict[str, Any]:
    """Return the values of a configuration, cached until the file changes: each viewer of a page asks once a second."""
    return read_values(file)
