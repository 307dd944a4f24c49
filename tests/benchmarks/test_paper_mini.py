import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from paper_mini import FILES, SMALL, TABLES, file_of, grid_of

from areal.extensions.desk.sweep import read_sweep


@pytest.mark.parametrize("name", FILES)
def test_each_experiment_has_a_miniature_in_which_only_sizes_differ(name):
    runs = read_sweep(file_of(name), [*SMALL, *grid_of(name)])
    assert 1 <= len(runs) <= 4
    (complete, *_) = read_sweep(file_of(name), grid_of(name))
    for key in ("model", "max_staleness", "run_ahead", "rewards", "trainer.objective", "trainer.dtype"):
        assert attrgetter(key)(runs[0].config) == attrgetter(key)(complete.config), key
    mini, full = (
        [(part.source, part.prompt_template) for part in run.config.data.parts] for run in (runs[0], complete)
    )
    assert mini == full


def test_each_experiment_but_that_which_the_paper_lacks_is_in_a_table():
    assert {name for names in TABLES.values() for name in names} == {*FILES} - {"gsm8k-llama3"}


@pytest.mark.slow
def test_a_miniature_runs_and_its_table_is_printed(tmp_path):
    script = Path(__file__).with_name("paper_mini.py")
    process = subprocess.run(
        [sys.executable, script, "--folder", tmp_path, "--only", "table8"], capture_output=True, text=True, timeout=280
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert "1 of 1 runs are finished" in process.stdout
    assert "Table 8" in process.stdout
    assert (
        "Scores cannot be compared with the paper's, since these differ: parameters of the model, steps"
        in process.stdout
    )
    (summary,) = tmp_path.glob("runs/paper-table8/*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 2
