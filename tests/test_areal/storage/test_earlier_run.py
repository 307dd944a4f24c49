"""A run that an earlier commit has written is read by this one, also after a new column.

`earlier_run.tar.xz` has the record of a quickstart with a tiny model that was stopped after 31 steps: configuration,
journal, spool, rollouts and metrics of version 0.2.0. The model is named MODEL.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from actors.record.completeness import check_record
from areal.base.errors import UserError
from areal.base.processes import ROOT
from areal.storage.run_folder import config_of_run, configuration_to_resume

STEPS = 31
NEW_COLUMN = """
import sys
import numpy as np
from areal.samples import table
from areal.samples.trajectory import Trajectory

table.COLUMNS["novelty"] = table.Column(np.float32)
Trajectory.novelty = None
"""
RESUMED = """
import json
from pathlib import Path
from actors.master.run_state import RunState
from areal.__main__ import main
from areal.storage.journal import Journal
from areal.storage.rollouts import RolloutWriter
from areal.storage.stored_groups import batches
from areal.storage.run_folder import configuration_to_resume
from areal.storage.spool import Spool

folder = Path(sys.argv[1])
main(["audit", str(folder), "--json", str(folder / "audit.json")])
config = configuration_to_resume(folder, None, [])
state, spool = RunState(config, Journal.open(folder / "journal.db")), Spool.open(folder / "spool.db")
groups = spool.get(spool.ids())
writer = RolloutWriter(folder / "rollouts", "all", 1 << 30, lambda sequences: ["" for _ in sequences])
step = writer.step
writer.add_trained(step + 1, groups[:2], None)
writer.write()
assert main(["report", str(folder)]) == 0
assert main(["rollouts", str(folder), "--where", "novelty is null", "--show", "1"]) == 0
values = {
    "version": state.ledger.state.version,
    "samples": [len(group.trajectories) for group in groups],
    "step": step,
    "batches": [step for step, _ in batches(folder / "rollouts")],
}
(folder / "values.json").write_text(json.dumps(values))
"""


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("earlier_run.tar.xz")) as archive:
        # Python has the filter since 3.11.4, and asks for it since 3.12.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    folder = tmp_path / "earlier"
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("MODEL", str(tiny_model)))
    return folder


def test_a_run_of_an_earlier_commit_is_read_and_resumed_after_a_new_column(run):
    command = [sys.executable, "-c", NEW_COLUMN + RESUMED, str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "values.json").read_text()) == {
        "version": STEPS,
        "samples": [2] * 65,
        "step": STEPS,
        "batches": [*range(1, STEPS + 2)],  # the newest file has the column
    }
    assert f"of {STEPS + 1} steps" in done.stdout
    findings = json.loads((run / "audit.json").read_text())["findings"]
    # A processor of another kind trains to other weights.
    results = [finding["result"] for finding in findings if finding["check"] != "the record gives these weights"]
    assert results.count("holds") >= 5 and "fails" not in results
    assert (run / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("setting", [False, None, [], 0.0, ""], ids=repr)
def test_a_setting_that_is_no_longer_there_is_no_matter_if_it_was_off(run, setting):
    before = config_of_run(run)
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["trainer"]["novelty"] = values["novelty"] = setting
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert config_of_run(run, ["steps=120"]) == before.model_copy(update={"steps": 120})


def test_a_setting_that_is_no_longer_there_is_named_if_it_was_on(run):
    with (run / "config.yaml").open("a") as file:
        file.write("novelty: true\n")
    with pytest.raises(UserError, match=f"Unknown key 'novelty' in {run}/config.yaml"):
        config_of_run(run)


@pytest.mark.parametrize(
    ("kept", "lost"),
    [
        (slice(None), None),
        (slice(0, 30), None),  # a master that was killed may not have written the last one
        (slice(0, 20), "10 of the run's steps (steps 21 to 30)"),
        (slice(3, None), "3 of the run's steps (steps 1 to 3)"),
        (slice(0, 0), "30 of the run's steps (steps 1 to 30)"),
    ],
)
def test_metrics_that_are_cut_by_whole_lines_are_told_when_a_run_goes_on(run, kept, lost):
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[kept]))
    sentences = [line for line in check_record(configuration_to_resume(run, None, [])) if "lost the metrics" in line]
    assert sentences == ([f"{metrics} has lost the metrics of {lost}: its curves lack them."] if lost else [])
