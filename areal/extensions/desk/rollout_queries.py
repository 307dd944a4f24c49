"""Queries on the rollouts of a run (areal.storage.rollout_files), for the command line and the web page.

DuckDB answers the queries from the Parquet files. DuckDB may read only the folder of the rollouts, has no network, and
its settings are locked: a query may come from somebody's command line. Texts and tokens are read only for shown rows,
never for filtering or sorting.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import duckdb
import numpy as np

from areal.base.errors import UserError
from areal.samples.pictures import digests_in, find
from areal.samples.trajectory import DIGEST_BYTES
from areal.storage.record import NO_ROLLOUTS, ROLLOUT_COLUMNS, Record
from areal.storage.run_files import PICTURES

T = TypeVar("T")

COLUMNS = ROLLOUT_COLUMNS
SORTED_BY = tuple(
    name for name in COLUMNS[: COLUMNS.index("shared")] if name not in ("row", "prompt", "completion", "reward_parts")
)
"""Columns of the page's table. Each column can sort it."""
RANGES = (
    "step",
    "prompt_index",
    "reward",
    "advantage",
    "prompt_tokens",
    "completion_tokens",
    "turns",
    "staleness",
    "start_version",
    "seconds",
)
CHOICES = ("fate", "finish", "reason", "group")
THREADS = 2
MEMORY = "1GB"
SECONDS = 20.0
"""A query that takes longer is stopped."""
GRACE_SECONDS = 2.0
"""Seconds in which a query has to stop: inside a function of SQL, DuckDB does not look for interrupts."""
GLIMPSE = 300
"""Characters of a text in a list of rows."""
EXCERPT = 4000
"""Characters of the texts of a group, side by side."""
THUMBNAIL = 256
"""The longest side of a picture on the page, in pixels."""
_PICTURES = 16  # the most pictures shown of a sample
_ATTEMPTS = 3  # to read files, since the oldest file may just be removed
_FROM = "FROM read_parquet($files)"
# Files of an earlier version lack columns. `no_rollouts` has all columns and no row.
_PLACES = ("file_index", "file_row_number")
_FROM_EARLIER = f"""FROM (SELECT *, {", ".join(_PLACES)} FROM read_parquet($files, union_by_name = true)
    UNION ALL BY NAME SELECT * FROM no_rollouts)"""
_ANSWER = f"""CASE WHEN json_valid("row") THEN left("row"->>'$.answer', {GLIMPSE}) END AS answer"""
_CUT = f"left(prompt, {GLIMPSE}) AS prompt, left(completion, {GLIMPSE}) AS completion, {_ANSWER}"


class QueryStuck(UserError):
    """A query did not stop after its interrupt. The query's thread runs on, and would disturb this process's exit."""


class Where(NamedTuple):
    """A condition on rows: an SQL expression and the values of its parameters, by name."""

    sql: str = "true"
    values: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """The rows that meet a condition: their number by fate, the number of steps, and the rows of a page."""

    fates: dict[str, int]
    steps: int
    rows: list[dict[str, Any]]


def sql_condition(text: str) -> Where:
    """Return the condition of an SQL expression from a user. Raises UserError."""
    try:
        return Where(str(duckdb.SQLExpression(text)))
    except duckdb.Error as error:
        raise _mistake(error) from None


def condition(filters: Mapping[str, str]) -> Where:
    """Return the condition of the page's filters: NAME, NAME_min and NAME_max for the columns in RANGES, NAME for the
    columns in CHOICES, and `text`, contained in prompt or completion. Empty filters do not count. Raises UserError."""
    sql, values = [], {}
    for name, text in filters.items():
        column, _, end = name.rpartition("_")
        if not text:
            continue
        if name in CHOICES:
            sql.append(f'"{name}" = ${name}')
            values[name] = text
        elif name == "text":
            sql.append("(contains(prompt, $text) OR contains(completion, $text))")
            values[name] = text
        elif name in RANGES:
            sql.append(f'"{name}" = ${name}')
            values[name] = _number(name, text)
        elif column in RANGES and end in ("min", "max"):
            sql.append(f'"{column}" {">=" if end == "min" else "<="} ${name}')
            values[name] = _number(name, text)
        else:
            raise UserError(
                f"There is no filter {name!r}: use one of text, {', '.join(CHOICES)}, {', '.join(RANGES)}, "
                f"the numbers also with _min or _max."
            )
    return Where(" AND ".join(sql) or "true", values)


def _number(name: str, text: str) -> Any:
    value = math.nan
    with suppress(ValueError):
        value = float(text)
    if not math.isfinite(value):
        raise UserError(f"The filter {name} is {text!r}: give it a number.")
    return value


class Rollouts:
    """The rollouts of a run. Every method may be called from any thread, and raises UserError if there are no rollouts,
    if the files cannot be read, or if a condition is wrong or takes too long."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._folder = record.rollouts.folder.resolve()
        settings: dict[str, str | bool | int | float | list[str]] = {
            "threads": THREADS,
            "memory_limit": MEMORY,
            "temp_directory": "",
            "autoload_known_extensions": False,
            "autoinstall_known_extensions": False,
        }
        self._connection = duckdb.connect(":memory:", config=settings)
        self._connection.register("schema", NO_ROLLOUTS)
        self._connection.execute("CREATE TABLE no_rollouts AS SELECT * FROM schema")
        self._connection.unregister("schema")
        self._connection.execute("SET parquet_metadata_cache = true")  # a file never changes
        self._connection.execute("SET allowed_directories = [?]", [str(self._folder)])
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def page(
        self, where: Where, sort: str | None, descending: bool, limit: int, offset: int = 0, all_columns: bool = False
    ) -> RolloutPage:
        """Return the rows number `offset` to `offset` + `limit` - 1, ordered by a column; at random if `sort` is None.

        Rows with null come last; equal rows keep the order of the files. all_columns: the rows have all columns;
        otherwise the columns of SORTED_BY, and the first GLIMPSE characters of prompt, completion and the data row's
        `answer`, null if the row has none.
        """
        if sort not in (*SORTED_BY, None):
            raise UserError(f"Rows cannot be sorted by {sort!r}: use one of {', '.join(SORTED_BY)}.")
        key = f'"{sort}"' if sort else "random()"
        order = f"key {'DESC' if descending else 'ASC'} NULLS LAST, file, number"
        # First the places of the rows, then the rows: sorting all texts would take a hundred times as long.
        places = f"""
            WITH matches AS MATERIALIZED (
                SELECT file_index AS file, file_row_number AS number, {key} AS key, step, fate {_FROM}
                WHERE ({where.sql})
            ), fates AS (SELECT fate, count(*) AS rows FROM matches GROUP BY fate ORDER BY rows DESC),
            chosen AS (SELECT file, number, key FROM matches ORDER BY {order} LIMIT $limit OFFSET $offset)
            SELECT (SELECT list([fate, rows::VARCHAR]) FROM fates), (SELECT count(DISTINCT step) FROM matches),
                (SELECT list([file, number] ORDER BY {order}) FROM chosen)
        """
        columns = "*" if all_columns else ", ".join(f'"{name}"' for name in SORTED_BY) + f", {_CUT}"
        texts = f"""
            SELECT {columns}, file_row_number AS "row number" {_FROM}
            WHERE file_row_number IN $numbers
        """
        parameters = {**where.values, "limit": limit, "offset": offset}

        def read(ask: _Ask, paths: list[str]) -> RolloutPage:
            fates, steps, chosen = ask(places, {"files": paths, **parameters})[0].values()
            numbers_by_path: dict[str, list[int]] = {}
            for file, number in chosen or ():
                numbers_by_path.setdefault(paths[file], []).append(number)
            rows: dict[tuple[str, int], dict[str, Any]] = {}
            for name, numbers in numbers_by_path.items():  # file by file takes a fifth of the time of a single query
                values = {"files": [name], "numbers": numbers}
                rows |= {(name, row.pop("row number")): row for row in ask(texts, values)}
            ordered = [rows[paths[file], number] for file, number in chosen or ()]
            return RolloutPage({fate: int(count) for fate, count in fates or ()}, steps, ordered)

        return self._answer(read)

    def row(self, group: str, sample: int, branch: int) -> dict[str, Any]:
        """Return all columns of a row. Raises UserError if the row does not exist."""
        rows = self._select(
            "SELECT *",
            '"group" = $group AND sample = $sample AND branch = $branch LIMIT 1',
            {"group": group, "sample": sample, "branch": branch},
        )
        if not rows:
            raise UserError(f"There is no sample {sample} of group {group!r}, or no branch {branch} of it.")
        return rows[0]

    def group(self, group: str) -> list[dict[str, Any]]:
        """Return the rows of a group, in order: sample, branch, reward, advantage, completion_tokens, finish, and the
        first EXCERPT characters of the completion."""
        return self._select(
            f"SELECT sample, branch, reward, advantage, completion_tokens, finish, "
            f"left(completion, {EXCERPT}) AS completion",
            '"group" = $group ORDER BY sample, branch',
            {"group": group},
        )

    def prompt(self, group: str) -> list[dict[str, Any]]:
        """Return all groups with the prompt of a group, by start_version: the number of samples, and the mean, the
        lowest and the highest of their rewards.

        Groups have the same prompt if row and prompt text are equal: each epoch repeats the row with another index.
        """
        rows = self._select(
            'SELECT "row", prompt', '"group" = $group AND sample = 0 AND branch = 0 LIMIT 1', {"group": group}
        )
        return (
            self._select(
                'SELECT "group", min(start_version) AS start_version, count(*) AS samples, avg(reward) AS mean, '
                "min(reward) AS low, max(reward) AS high",
                'branch = 0 AND "row" = $row AND prompt = $prompt GROUP BY "group" ORDER BY start_version, "group"',
                rows[0],
            )
            if rows
            else []
        )

    def trained(self, where: Where, first: int, last: int) -> set[tuple[int, str]]:
        """Return step and id of each group with a row of the condition, trained in the steps `first` to `last`."""
        rows = self._select(
            'SELECT DISTINCT step, "group"',
            f"step BETWEEN $first AND $last AND ({where.sql})",
            {**where.values, "first": first, "last": last},
        )
        return {(row["step"], row["group"]) for row in rows}

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a query in SQL on the table `rollouts` with the columns COLUMNS."""
        rest = query.strip().rstrip(";")
        own_tables = rest[:5].lower() == "with "
        query = f"WITH rollouts AS (SELECT * {_FROM}){',' if own_tables else ''} {rest[5:] if own_tables else rest}"
        return self._answer(lambda ask, paths: ask(query, {"files": paths}))

    def _select(self, select: str, clauses: str, values: dict[str, Any]) -> list[dict[str, Any]]:
        return self._answer(lambda ask, paths: ask(f"{select} {_FROM} WHERE {clauses}", {"files": paths, **values}))

    def _answer(self, read: "Callable[[_Ask, list[str]], T]") -> T:
        """Return the result of `read`, a function that may ask several queries on a list of files."""
        cursor = self._connection.cursor()

        def ask(sql: str, values: dict[str, Any]) -> list[dict[str, Any]]:
            cursor.execute(sql.replace(_FROM, _FROM_EARLIER) if self._record.rollouts.lacks_columns else sql, values)
            names = [about[0] for about in cursor.description or ()]
            rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            return [{name: value for name, value in row.items() if name not in _PLACES} for row in rows]

        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(self._read(read, ask))
            except BaseException as error:  # the waiting caller gets the error
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        wait([answer], SECONDS)
        end = time.monotonic() + GRACE_SECONDS
        while not answer.done() and time.monotonic() < end:  # between two queries an interrupt is lost
            cursor.interrupt()
            wait([answer], 0.1)
        try:
            return answer.result(0)
        except (duckdb.InterruptException, TimeoutError) as error:
            kind = QueryStuck if isinstance(error, TimeoutError) else UserError
            raise kind(
                f"The query took longer than {SECONDS:g} s and was stopped: ask for less, for example for fewer steps."
            ) from None
        except duckdb.Error as error:
            raise _mistake(error) from None

    def _read(self, read: "Callable[[_Ask, list[str]], T]", ask: "_Ask") -> T:
        for attempt in range(_ATTEMPTS):
            paths = [str(path) for path in self._record.rollouts.files()]
            if not paths:
                break
            try:
                return read(ask, paths)
            except duckdb.IOException:
                if attempt == _ATTEMPTS - 1 or all(Path(path).exists() for path in paths):
                    raise
        raise UserError(f"{self._folder} has no rollouts: give the folder of a run that keeps them.")


_Ask = Callable[[str, dict[str, Any]], list[dict[str, Any]]]


def _mistake(error: duckdb.Error) -> UserError:
    message = " ".join(str(error).partition("\n\nLINE")[0].split()).rstrip(".!")
    return UserError(f"The rollouts cannot be queried ({message}): their columns are {', '.join(COLUMNS)}.")


def pictures_of(row: dict[str, Any]) -> list[str]:
    """Return the names of a sample's first pictures."""
    column = np.array(row["pictures"] or (), np.uint8).reshape(-1, DIGEST_BYTES)
    return digests_in(column)[:_PICTURES]


def picture_shown(record: Record, name: str) -> str:
    """Return the picture for the page as a data URL, or a sentence that says why there is none."""
    try:
        return str(find("thumbnail")(find("store")(record.folder / PICTURES).get(name), THUMBNAIL))
    except (UserError, ValueError) as error:
        return f"The picture {name} cannot be shown: {error}"
