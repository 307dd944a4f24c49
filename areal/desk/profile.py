"""`areal profile`: where the CPU time of a run's processes goes, of a run with `observe.profile`."""

from __future__ import annotations

import pstats
from argparse import Namespace
from pathlib import Path
from typing import Any

from rich.table import Table

from areal.command_line import output
from areal.config import UserError
from areal.observe.cpu_profile import FOLDER, SUFFIX
from areal.processes import ROOT
from areal.record import Record


def print_profile(options: Namespace) -> None:
    """`areal profile`: the CPU seconds of each process, for each sample that was trained, and its first functions."""
    record, folder = Record(options.folder), options.folder / FOLDER
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise UserError(f"{folder} has no profiles: run or resume it with observe.profile=true, for at least a minute.")
    samples = len(record.records) * record.config.batch_size * record.config.group_size
    table = Table("process", "CPU, s", "ms a sample", "share", "function", "in", title=f"{samples:,} samples trained")
    for file in files:
        figures: Any = vars(pstats.Stats(str(file)))["stats"]
        seconds = sum(row[2] for row in figures.values())
        a_sample = f"{1000 * seconds / samples:.2f}" if samples else ""
        cells = file.name.removesuffix(SUFFIX), f"{seconds:.1f}", a_sample
        for (path, line, name), row in sorted(figures.items(), key=lambda item: -item[1][2])[: options.top]:
            table.add_row(*cells, f"{row[2] / max(seconds, 1e-9):.0%}", name, f"{_short(path)}:{line}")
            cells = "", "", ""
    output(160).print(table)
    print(
        f"Callers, and more functions: python -m pstats {files[0]}; the time line of steps: areal trace {record.folder}"
    )


def _short(path: str) -> str:
    return str(Path(path).relative_to(ROOT)) if path.startswith(f"{ROOT}/a") else "/".join(Path(path).parts[-3:])
