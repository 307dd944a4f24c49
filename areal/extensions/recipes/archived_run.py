"""`areal audit FILE` and `areal replay FILE`: unpack a record, and repeat the command on the unpacked folder."""

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal.base.plugins import announce_code
from areal.config.reading import read_yaml, write_yaml
from areal.extensions.recipes.machine import differences, machine
from areal.extensions.recipes.redaction import RECORD, mapped
from areal.extensions.recipes.run_archive import unpack
from areal.storage.records import read_records
from areal.storage.run_files import CONFIG, METRICS

ROUNDING = 1e-3
"""Losses of a step with a smaller relative difference differ by rounding in a sum of thousands of tokens, in fp32."""


def repeat(file: Path, trust: bool) -> int:
    """Repeat this command with the folder of the record in place of the file. Returns its exit code. At 1, print how
    this machine differs from the run's machine. Raises UserError if the file is refused, or if the run's configuration
    names code and the user does not allow it."""
    with tempfile.TemporaryDirectory(prefix="areal-record-") as place:
        facts, run = unpack(file, Path(place)), Path(place, "run")
        values = read_yaml((run / CONFIG).read_text())
        values = mapped(values, lambda text: text.replace(RECORD, str(run)))
        (run / CONFIG).write_text(write_yaml(values))
        announce_code(run, values, trust, stranger=True)
        words = [str(run) if Path(word) == file else word for word in sys.argv[1:]]
        code = subprocess.run([sys.executable, "-m", "areal", *words, "--trust"], env=os.environ).returncode
        if code == 1:
            _explain(facts, run)
    return code


def _explain(facts: dict[str, Any], run: Path) -> None:
    for part, why in facts["left_out"].items():
        print(f"The record lacks {part}: {why}.")
    if not (replayed := [*run.glob(f"replays/*/{METRICS}")]):
        return
    losses = {record["step"]: record["loss"] for record in read_records(run / METRICS)}
    again = {record["step"]: record["loss"] for file in replayed for record in read_records(file)}
    apart = [step for step, loss in sorted(again.items()) if not math.isclose(loss, losses[step], rel_tol=ROUNDING)]
    print(
        f"Of {len(again)} steps that were trained again, "
        + (
            f"the losses agree within {ROUNDING:g} up to step {apart[0] - 1}."
            if apart
            else f"all losses agree within {ROUNDING:g}."
        )
    )
    if lines := differences(facts["made_on"], machine()):
        print("Other weights are no fault of the record where this machine rounds otherwise:", *lines, sep="\n  ")
    else:
        print("This machine has the processor and the packages of the record: equal training gives equal weights here.")
