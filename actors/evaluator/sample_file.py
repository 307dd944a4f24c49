"""The samples of a benchmark at a version, with completions: benchmarks/NAME-VERSION.jsonl in the run folder.

A sample is appended once it is scored, so that a killed evaluation continues with the remaining samples.
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
    """A file with a line of JSON for each sample. settings: samples are comparable if they have equal settings. Samples
    with other settings stay in the file, but are not read."""

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
