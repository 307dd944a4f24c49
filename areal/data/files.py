"""Rows in files: lines of JSON, a list in JSON, CSV, Parquet. All but Parquet may be compressed by gzip or zstd.

Rows keep the order of the file. Values of CSV are texts.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

from areal.base.errors import UserError, explain

TEXT_KINDS = (".jsonl", ".json", ".csv", ".tsv")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
KINDS = (*TEXT_KINDS, *(kind + ending for kind in TEXT_KINDS for ending in COMPRESSED), ".parquet")
# The most bytes of an unpacked file: a multiple of the packed size, or this many. Text has a twentieth.
UNPACKED_TIMES, LEAST_UNPACKED = 200, 1 << 26
ONE_A_LINE = "write one object a line"


def kind_of(name: str) -> str | None:
    """Return the ending of a file of rows, without the ending of a compression; None for other names."""
    return next((f".{kind.split('.')[1]}" for kind in KINDS if name.lower().endswith(kind)), None)


def unit_of(path: Path) -> str:
    """Return the unit by which rows of the file are counted from 1: `line` or `row`."""
    return "row" if kind_of(path.name) in (".json", ".parquet") else "line"


def read_file(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every row with the number of its line, or of the row, from 1. what: the file's name. Raises UserError."""
    path = path.expanduser()
    match kind_of(path.name):
        case ".parquet":
            yield from enumerate(open_parquet(path, what), 1)
        case ".csv":
            yield from _read_csv(path, what, ",")
        case ".tsv":
            yield from _read_csv(path, what, "\t")
        case ".json" if (text := read_text(path, what)).lstrip().startswith("["):
            yield from _read_list(text, path)
        case _:  # also for lines in a file that ends in .json
            text = read_text(path, what)
            row = _whole_object(text)
            if row is not None:
                yield 1, row
            # Not splitlines(): JSON text may contain U+2028 and similar characters.
            for number, line in enumerate(text.split("\n") if row is None else (), 1):
                if line.strip():
                    yield number, read_object(line, f"{path}, line {number},", ONE_A_LINE)


def open_parquet(path: Path, what: str) -> Any:
    """Open the data set of a Parquet file. Raises UserError."""
    import datasets  # takes seconds

    try:
        datasets.disable_progress_bars()
        return with_files(datasets.Dataset.from_parquet(str(path)))
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"{what} cannot be read as Parquet ({reason}): correct the path or the file") from error


def read_text(path: Path, what: str) -> str:
    """Return the text of a file, which may be compressed. Raises UserError."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{what}: {path.resolve()} is no regular file: correct the path")
        content = path.read_bytes()
        if codec := COMPRESSED.get(path.suffix.lower()):
            import pyarrow  # takes time

            most_bytes = max(LEAST_UNPACKED, UNPACKED_TIMES * len(content))
            content = pyarrow.input_stream(io.BytesIO(content), codec).read(most_bytes + 1)
            if len(content) > most_bytes:
                why = f"unpacked it has more than {most_bytes} bytes, {UNPACKED_TIMES} times its size"
                raise UserError(f"{what}: {path.resolve()} is no file of rows ({why}): unpack it yourself")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 ({error.reason} at byte {error.start}): convert the file") from error
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what}: {path.resolve()} cannot be read ({reason}): correct the path") from error


def read_object(text: str, where: str, advice: str) -> dict[str, Any]:
    """Return the object of JSON in `text`. where: the place of the text, for messages. Raises UserError."""
    return _object(_parsed(text, where, advice), where, advice)


def _whole_object(text: str) -> dict[str, Any] | None:
    """Return the object if the text is a single object, perhaps on several lines; None for any other text."""
    with suppress(ValueError, RecursionError):
        return value if isinstance(value := json.loads(text), dict) else None
    return None


def _read_list(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, raw in enumerate(_parsed(text, str(path), "write a list of objects"), 1):
        yield number, _object(raw, f"{path}, row {number},", "write a list of objects")


def _read_csv(path: Path, what: str, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(read_text(path, what), newline=""), delimiter=delimiter)
    header: list[str] | None = None
    line = 1
    try:
        for fields in reader:
            where, line = f"{path}, line {line},", reader.line_num + 1
            if header is None:
                header = fields
                separator = next((c for c in ";\t|" if len(header) == 1 and c in header[0]), None)
                if separator and delimiter == ",":
                    raise UserError(f"{where} separates its fields by {separator!r}: separate them by commas")
            elif fields:
                if len(fields) != len(header):
                    mark = "a comma" if delimiter == "," else "a tab"
                    raise UserError(
                        f"{where} has {len(fields)} field{'s' * (len(fields) != 1)}, but the first line names "
                        f"{len(header)}: quote texts that have {mark} in them"
                    )
                yield line - 1, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}, is not CSV ({error}): correct it") from error


def _parsed(text: str, where: str, advice: str) -> Any:
    with explain((ValueError, RecursionError), f"{where} is not JSON ({{why}}): {advice}"):
        return json.loads(text)


def _object(raw: Any, where: str, advice: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UserError(f"{where} is of type {type(raw).__name__}, not an object: {advice}")
    return raw


def with_files(dataset: Any) -> Any:
    """Return the data set with files of pictures: otherwise the data set would decode pictures of any size."""
    import datasets

    def of(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(feature, dict):
            return {name: of(part) for name, part in feature.items()}
        listed = copy(feature)
        if hasattr(feature, "feature"):
            listed.feature = of(feature.feature)
        return listed

    dataset.info.features = datasets.Features(of(dict(dataset.features)))  # a cast would copy lists of pictures
    return dataset
