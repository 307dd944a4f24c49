"""What several tests look at."""

from __future__ import annotations

import json
from pathlib import Path


def processes_mentioning(word: str) -> list[str]:
    """Command lines of all processes that contain `word`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if word in line:
            found.append(line)
    return found


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
