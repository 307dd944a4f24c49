"""What a benchmark found, as ratios, as a table and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from areal.extensions.recipes.machine import machine


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, list[float]]:
    """Median over the rounds of above / below, and the least and the greatest."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return median(ratios), [min(ratios), max(ratios)]


def kept_runs(file: Path, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs that a benchmark which was stopped has written. Runs of another setting end the benchmark."""
    if not file.exists():
        return []
    stored = json.loads(file.read_text())
    if stored["setting"] != setting:
        sys.exit(f"{file} holds results of another setting: give another file, or remove it.")
    return list(stored["runs"])


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], remarks: Sequence[str]) -> None:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console(width=max(100, Console().width))
    console.print(table)
    for remark in remarks:
        console.print(remark)


def write(results: Mapping[str, Any], file: Path | None) -> None:
    """With the machine and the commit that they were made on."""
    if file:
        file.write_text(json.dumps({"made_on": machine()} | dict(results), indent=2) + "\n")
