"""Takes secrets and the places of files out of a record that leaves this machine."""

import json
import os
import re
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from areal.base.processes import ROOT
from areal.base.secrets import without_secrets

T = TypeVar("T")
RECORD, ELSEWHERE = "{record}", "{elsewhere}"
"""Stand-ins for the run folder, and for any other folder of the machine."""


class Redaction:
    """Replaces paths in texts. folder: the run's folder, replaced by RECORD; `model`: its model, a folder in RECORD.
    Paths in the clone become relative. Any other path below a root folder of this machine keeps only its last name."""

    def __init__(self, folder: Path, model: str) -> None:
        names = {str(folder.resolve()): RECORD, str(folder.absolute()): RECORD, f"{ROOT}/": "", str(ROOT): "."}
        if os.path.isabs(model):
            names[model] = f"{RECORD}/models/{Path(model).name}"
        private = Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix), folder.resolve().parent
        names |= {str(place): ELSEWHERE for place in private if place != Path("/") and str(place) not in names}
        self._names = dict(sorted(names.items(), key=lambda item: -len(item[0])))
        roots = "|".join(re.escape(entry.name) for entry in os.scandir("/") if entry.is_dir())
        self._path = re.compile(rf"(?<![\w.}}])(?<!:/)/(?:{roots})(?:/+[^\s/\"'\\:,;|<>(){{}}\[\]]+)+")

    def names_place(self, text: str | bytes) -> bool:
        """Return whether a text has the path of the run, of the clone, or of a user's folder."""
        content = text.encode() if isinstance(text, str) else text
        return any(name.encode() in content for name in self._names)

    def text(self, text: str) -> str:
        for name, instead in self._names.items():
            text = re.sub(rf"(?<![\w.]){re.escape(name)}" + r"(?![\w.-])" * (not name.endswith("/")), instead, text)
        return self._path.sub(lambda path: f"{ELSEWHERE}/{path[0].rpartition('/')[2]}", text)

    def values(self, value: T) -> T:
        """Return a value of JSON or YAML without secrets and paths, in values and in keys."""
        return mapped(without_secrets(value), self.text)

    def database(self, file: Path, checksum: Callable[[str, str], int]) -> None:
        """Rewrite the bodies in a copy of a journal, and remove SQLite's remains of earlier bodies."""
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            for table, key, kind in (("states", "version", "'state'"), ("events", "seq", "kind"), _SNAPSHOT):
                rows = connection.execute(f"SELECT {key}, {kind}, body FROM {table}").fetchall()
                changed = [
                    (number, name, json.dumps(self.values(json.loads(body))), body) for number, name, body in rows
                ]
                connection.execute("BEGIN")
                connection.executemany(
                    f"UPDATE {table} SET body = ?, crc = ? WHERE {key} = ?",
                    [(new, checksum(name, new), number) for number, name, new, body in changed if new != body],
                )
                connection.execute("COMMIT")
            connection.execute("VACUUM")


_SNAPSHOT = ("snapshot", "id", "'snapshot'")


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with all texts changed."""
    match value:
        case dict():
            return {change(key): mapped(inner, change) for key, inner in value.items()}
        case list():
            return [mapped(inner, change) for inner in value]
        case str():
            return change(value)
    return value
