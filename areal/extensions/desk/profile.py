"""`areal profile`: where the CPU time of a run's processes goes, of a run with `observe.profile`."""

from argparse import Namespace
from collections import Counter
from pathlib import Path

from rich.table import Table

from areal.base.command_line import output
from areal.base.errors import UserError
from areal.observe.cpu_profile import FOLDER, SUFFIX
from areal.storage.record import Record


def print_profile(options: Namespace) -> None:
    """`areal profile`: the CPU seconds of each process, for each sample that was trained, and its first functions."""
    record, folder = Record(options.folder), options.folder / FOLDER
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise UserError(f"{folder} has no profiles: run or resume it with observe.profile=true, for at least a minute.")
    samples = len(record.records) * record.config.batch_size * record.config.group_size
    table = Table("process", "CPU, s", "ms a sample", "share", "function", title=f"{samples:,} samples trained")
    for file in files:
        functions = _functions(file)
        seconds = functions.total() / 1e6
        a_sample = f"{1000 * seconds / samples:.2f}" if samples else ""
        cells = file.name.removesuffix(SUFFIX), f"{seconds:.1f}", a_sample
        for name, part in functions.most_common(options.top):
            table.add_row(*cells, f"{part / max(1, functions.total()):.0%}", name)
            cells = "", "", ""
    output(160).print(table)
    print(f"Callers: load {files[0]} into https://speedscope.app. What waits for what: areal trace {record.folder}")


def _functions(file: Path) -> Counter[str]:
    """CPU microseconds of each function itself. Raises UserError for what is no profile."""
    functions = Counter[str]()
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        stack, _, microseconds = line.rpartition(" ")
        if not microseconds.isdecimal():
            raise UserError(f"{file} is not a profile: it has the line {line!r:.80}.")
        name, _, place = stack.rpartition(";")[2].partition(" (")
        functions[f"{name} ({'/'.join(place.split('/')[-3:])}" if place else name] += int(microseconds)
    return functions
