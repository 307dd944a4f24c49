"""Rows given as objects, which are checked and written to a file in the run folder."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.base.errors import UserError, explain
from areal.config import Config
from areal.data.sources import open_source
from areal.storage.disk import replace

FILE = "rows.jsonl"
# The most rows that are checked.
CHECKED = 10_000


def write_rows(data: Any, folder: Path) -> tuple[Path, bool]:
    """Write rows into the folder of a run. data: mappings, a datasets.Dataset, or a pandas DataFrame. Returns the file,
    and whether the first row has an answer. Raises UserError if `data` has no rows."""
    lines = [_line(number, row) for number, row in enumerate(_rows(data))]
    if not lines:
        raise UserError("data has no rows: give at least one.")
    replace(folder / FILE, "\n".join(lines) + "\n", mode=0o600)
    return folder / FILE, "answer" in json.loads(lines[0])


def check(config: Config, file: Path) -> None:
    """Raises UserError if the configuration cannot use one of the first rows. file: has the rows."""
    try:
        source = open_source(config.data, config.seed)
        for index in range(min(source.size or 0, CHECKED)):
            source.row(index)
    except UserError as error:  # the user has never seen the lines of this file
        text = re.sub(rf"{re.escape(str(file))}, line (\d+),?", lambda m: f"Row {int(m[1]) - 1} of data", str(error))
        raise UserError(text.replace(f"data.source {str(file)!r}", "data").replace(str(file), "data")) from None


def _rows(data: Any) -> Iterator[Any]:
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        data = data.to_dict("records")
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise UserError(
            f"data is of type {type(data).__name__}: give a list of dicts, a datasets.Dataset, a DataFrame, or the "
            f"name of a source (areal docs configuration)."
        )
    yield from data


def _line(number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise UserError(f"Row {number} of data is of type {type(row).__name__}: write dicts, {{'prompt': ...}}.")
    with explain((TypeError, ValueError), f"Row {number} of data is not JSON ({{why}}): keep to JSON, without NaN."):
        return json.dumps(dict(row), default=_plain, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return the numbers and arrays of numpy as Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON")
