"""The samples of a benchmark at one version, with their completions: benchmarks/NAME-VERSION.jsonl in the run folder.

A sample is appended once it is scored, so that an evaluation that was killed goes on with the others.
"""

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

from areal.storage.disk import append
from areal.storage.records import line_of, whole_records


class SampleFile:
    """One line of JSON for each sample. `settings`: those under which samples are comparable. Samples that were made
    under others are left in the file, but not read."""

    def __init__(self, folder: Path, name: str, version: int, settings: Mapping[str, Any]) -> None:
        self._lock = Lock()
        self._path = folder / "benchmarks" / f"{name}-{version}.jsonl"
        self._settings = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. An incomplete last line is cut off."""
        return (record for record in whole_records(self._path) if record["settings"] == self._settings)

    def append(self, sample: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            append(self._path, line_of(sample | {"settings": self._settings}))
