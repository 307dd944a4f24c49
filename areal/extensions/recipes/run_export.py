"""`areal export-record`: the record of a finished run in one file (run_archive.py), without secrets and without paths.

Parts are added in order, each if it fits into the limit: the account of the run, the first model, the rollouts, the
last checkpoint, the earlier checkpoints. record.json names the parts left out. With the model, all rollouts and the
stamp of the last weights in summary.json an audit trains the whole run again.
"""

import io
import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.config.reading import read_yaml, write_yaml
from areal.extensions.recipes.machine import machine
from areal.extensions.recipes.redaction import Redaction
from areal.extensions.recipes.run_archive import compressed, write_archive
from areal.storage.database import copy_store
from areal.storage.disk import mebibytes, within
from areal.storage.journal import event_checksum
from areal.storage.record import Record
from areal.storage.records import COMMON, line_of, read_records, record_of
from areal.storage.run_files import CONFIG, FORK, JOURNAL, ROLLOUTS, SUMMARY

FORMAT_VERSION = 1
_OF_MODEL = (".json", ".safetensors", ".txt")
_COLUMNS = ("row", "reason", "reward_parts", "generators")
"""Columns of rollouts with replaced paths. Texts of further columns were read or written by the policy."""
Part = dict[str, bytes]


class LeftOutError(Exception):
    """A part does not fit, or has a path of this machine that cannot be replaced."""


def export(options: Namespace) -> None:
    """`areal export-record`."""
    if not options.out.name.endswith(".tar.zst"):
        raise UserError(f"--out {options.out}: a record is named FILE.tar.zst.")
    left_out = export_run(options.run, options.out, options.most_mb, options.audit)
    print(f"{options.out} has {mebibytes(options.out.stat().st_size)}.")
    for part, why in left_out.items():
        print(f"Left out: {part}, {why}.")


def export_run(folder: Path, out: Path, most_mb: float, audit: Path | None = None) -> dict[str, str]:
    """Write the record of a run in at most `most_mb` MB. audit: the file of `areal audit --json`. Returns the parts
    left out, and the reasons. Raises UserError if the run is not over, or if the account of the run does not fit."""
    record = Record(folder)
    if not record.ending:
        raise UserError(f"The run in {folder} is not over, it has no {SUMMARY}: export it once it is.")
    exported = _Exported(record, most_mb * 1e6, Redaction(folder, record.configuration.model))
    exported.add("the account", lambda: dict(exported.account(audit)), required=True)
    exported.add("the model", exported.model)
    exported.add("the rollouts", lambda: dict(exported.rollouts()))
    checkpoints = record.checkpoints.folders
    for checkpoint in [*checkpoints[-1:], *checkpoints[:-1]]:
        exported.add_checkpoint(checkpoint, is_end=checkpoint == record.checkpoints.of(record.metrics.trained))
    facts = {"format": FORMAT_VERSION, "name": record.name, "steps": record.metrics.trained, "made_on": machine()}
    write_archive(out, facts | {"left_out": exported.left_out}, exported.files)
    return exported.left_out


class _Exported:
    """The files of a record, by their names in it. limit: bytes."""

    def __init__(self, record: Record, limit: float, redaction: Redaction) -> None:
        self._record, self._left, self._redaction = record, limit, redaction
        self.files: Part = {}
        self.left_out: dict[str, str] = {}

    def add(self, name: str, make: Callable[[], Part], required: bool = False) -> None:
        """Add a part, if it fits. Raises UserError if a required part does not fit."""
        try:
            part = make()
            size = sum(len(compressed(content)) for content in part.values())
            self._check_size(size)
        except LeftOutError as error:
            if required:
                raise UserError(f"The record of {self._record.folder} lacks {name}: {error}.") from error
            self.left_out[name] = str(error)
            return
        self._left -= size
        self.files |= part

    def _check_size(self, size: float) -> None:
        if size > self._left:
            raise LeftOutError(f"{size / 1e6:.1f} MB, and {self._left / 1e6:.1f} are left of the limit (--most-mb)")

    def account(self, audit: Path | None) -> Iterator[tuple[str, bytes]]:
        """Yield configuration, metrics, evaluations, events, changes, summary and journal. Raises UserError."""
        folder, values = self._record.folder, self._redaction.values
        yield f"run/{CONFIG}", write_yaml(values(read_yaml((folder / CONFIG).read_text()))).encode()
        for name in COMMON:
            lines = [line_of(values(record)) for record in read_records(within(folder / name, folder))]
            yield f"run/{name}", "".join(lines).encode()
        for file in (within(folder / name, folder) for name in (SUMMARY, FORK)):
            if file.is_file():
                yield f"run/{file.name}", _json(values(json.loads(file.read_bytes())))
        if audit:
            yield "audit.json", _json(values(json.loads(audit.read_bytes())))
        with tempfile.TemporaryDirectory() as place:
            copy = copy_store(folder / JOURNAL, Path(place))
            self._redaction.database(copy, event_checksum)
            yield f"run/{JOURNAL}", self._checked(JOURNAL, copy.read_bytes())

    def _checked(self, name: str, content: bytes) -> bytes:
        if self._redaction.names_place(content):
            raise LeftOutError(f"{name} has a path of this machine where it cannot be replaced")
        return content

    def model(self) -> Part:
        folder = Path(self._record.configuration.model)
        if not folder.is_dir():
            raise LeftOutError(f"it is not here: {self._redaction.text(str(folder))}")
        return self._folder(folder, f"run/models/{folder.name}")

    def add_checkpoint(self, folder: Path, is_end: bool) -> None:
        """Add a whole checkpoint, for the start of an audit, or only the weights of the run's end, for comparison."""
        name = f"run/checkpoints/{folder.name}"

        def weights() -> Part:
            state = record_of((folder / "training" / "state.json").read_bytes())
            state_file = (
                {f"{name}/training/state.json": line_of(self._redaction.values(state)).encode()} if state else {}
            )
            return self._folder(folder, name) | state_file

        if is_end:
            self.add(f"the weights of {folder.name}", weights)
        else:
            self.add(folder.name, lambda: self._folder(folder / "training", f"{name}/training") | weights())

    def _folder(self, folder: Path, name: str) -> Part:
        """Return the files of a model. Raises LeftOutError."""
        files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in _OF_MODEL)
        self._check_size(sum(file.stat().st_size for file in files) / 3)  # compression hardly shrinks weights
        part = {f"{name}/{file.name}": file.read_bytes() for file in files}
        if (config := f"{name}/config.json") in part:  # transformers writes the source folder into the file
            part[config] = _json(self._redaction.values(json.loads(part[config])))
        return {file: self._checked(file, content) for file, content in part.items()}

    def rollouts(self) -> Iterator[tuple[str, bytes]]:
        """Yield the files of rollouts: unchanged, or rewritten if a row has a path. Raises LeftOutError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for file in self._record.rollouts.files():
            table, buffer = pq.read_table(file), io.BytesIO()
            for place, name in enumerate(table.column_names):
                if table[name].type == pa.string():
                    texts = table[name].to_pylist()
                    redacted = {text: self._redaction.text(text) for text in {*texts} - {None}}
                    if name not in _COLUMNS and any(map(self._redaction.names_place, redacted)):
                        raise LeftOutError(f"the column {name} of {file.name} has a path of this machine")
                    if name in _COLUMNS and any(text != new for text, new in redacted.items()):
                        column = pa.array([*map(redacted.get, texts)], pa.string())
                        table = table.set_column(place, table.field(name), column)
                        buffer = io.BytesIO()
                        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
            yield f"run/{ROLLOUTS}/{file.name}", self._checked(file.name, buffer.getvalue() or file.read_bytes())


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
