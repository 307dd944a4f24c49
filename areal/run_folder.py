"""The run folder: config.yaml, metrics.jsonl, summary.json, report.html, logs/, checkpoints/, weights/."""

from __future__ import annotations

import json
import os
from typing import Any

from areal.config import Config, dump_config


class RunFolder:
    """Where a run leaves what it made. Opening it starts a new run there; one that has steps already is not
    overwritten: it moves aside as NAME.1, NAME.2, ..."""

    def __init__(self, config: Config) -> None:
        self.path = config.folder
        self._staleness_max = 0
        self._logprob_gap_max: float | None = None
        self._move_old_run_aside()
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(dump_config(config))
        self._metrics = (self.path / "metrics.jsonl").open("w", buffering=1)

    def _move_old_run_aside(self) -> None:
        if not (self.path / "config.yaml").exists():
            return
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(aside)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """One step's record, as a line of JSON."""
        self._metrics.write(json.dumps(metrics) + "\n")
        self._staleness_max = max(self._staleness_max, metrics["staleness_max"])
        gap = metrics.get("logprob_gap")
        if gap is not None:
            self._logprob_gap_max = max(gap, self._logprob_gap_max or 0.0)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """summary.json, atomically, with the extremes over all steps."""
        summary |= {"staleness_max": self._staleness_max, "logprob_gap_max": self._logprob_gap_max}
        temporary = self.path / "summary.json.tmp"
        temporary.write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(temporary, self.path / "summary.json")
