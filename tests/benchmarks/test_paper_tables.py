"""The paper's tables beside runs, on run folders as they would be."""

from __future__ import annotations

import json

import pytest
import yaml
from paper_tables import PUBLISHED, TableRow, main

from areal.base.processes import ROOT
from areal.config import dump_config, load_config
from areal.extensions.desk.sweep import read_sweep
from areal.storage.records import line_of

# Of DeepSeek-R1-Distill-Qwen-1.5B, from its config.json.
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
PUBLISHED_TABLES = yaml.safe_load(PUBLISHED.read_text())["tables"]


@pytest.fixture
def run_of(tmp_path):
    """Makes the folder of a run of a file of configs/paper, with changes; returns its path."""

    def make(file: str, *changes: str, accuracy=0.5, throughput=1000.0, layers=28) -> str:
        number = len(list(tmp_path.iterdir()))
        model = tmp_path / f"{number}" / "DeepSeek-R1-Distill-Qwen-1.5B"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": layers}))
        config = load_config(ROOT / "configs" / "paper" / f"{file}.yaml", [f"model={model}", *changes])
        folder = tmp_path / f"{number}" / "run"
        folder.mkdir()
        (folder / "config.yaml").write_text(dump_config(config))
        records = [{"step": step, "tflops": tflops} for step, tflops in ((1, 0.5), (3, 5.0), (4, 7.0))]
        (folder / "metrics.jsonl").write_text("".join(map(line_of, records)))
        summary = {"ok": True, "accuracy_before": 0.1, "accuracy_after": accuracy, "seconds": 1800}
        (folder / "summary.json").write_text(json.dumps(summary | {"effective_throughput": throughput}))
        return str(folder)

    return make


def shown(capsys, *arguments: str) -> tuple[list[list[str]], str]:
    """The cells of each line of tables that the script prints, and what it prints after them, as one line."""
    assert main([*arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines if line.startswith("│")]
    return cells, " ".join(" ".join(line for line in lines if line[:1] not in "│┃┏┡└").split())


def test_the_rows_of_runs_stand_beside_those_of_the_paper(run_of, capsys):
    runs = [
        run_of("table2", "max_staleness=0", accuracy=0.4, throughput=2000.0),
        run_of("table2", "max_staleness=4", "seed=1", accuracy=0.4, throughput=6000.0),
        run_of("table2", "max_staleness=4", "seed=2", accuracy=0.5, throughput=6000.0),
        run_of("table2", "max_staleness=4", "trainer.objective=ppo", accuracy=0.2),
    ]
    cells, remainder = shown(capsys, "table2", *runs)
    assert cells[1] == ["0", "decoupled_ppo", "1", "42.0", "40.0", "128.7", "2.0", "1.00", "1.00"]
    assert cells[6] == ["4", "ppo", "1", "23.3", "20.0", "356.6", "1.0", "2.77", "–"]
    assert cells[7] == ["4", "decoupled_ppo", "2", "42.2", "45.0 ± 5.0", "356.6", "6.0 ± 0.0", "2.77", "3.00"]
    assert cells[8] == ["8", "ppo", "0", "35.7", "–", "371.7", "–", "2.89", "–"]
    assert len(cells) == 14  # nothing differs
    assert "Scores can be compared with the paper's." in remainder
    assert "Speeds can be compared with the paper's on the same devices." in remainder
    assert "16 nodes of 8 H800" in remainder


def test_what_differs_from_the_paper_is_told_and_what_cannot_be_compared_therefore(run_of, capsys):
    run = run_of("figure6a", "steps=3", "trainer.ranks=4", "trainer.microbatches=null", layers=2)
    cells, remainder = shown(capsys, "figure6a", run)
    assert cells[1] == ["DeepSeek-R1-Distill-Qwen-1.5B", "null", "1", "427.0", "6.0", "1.06", "–"]
    assert [row for row in cells if row[0] in ("steps", "trainer.ranks")] == [
        ["steps", "10", "3"],
        ["trainer.ranks", "1", "4"],
    ]
    assert cells[6][:2] == ["parameters of the model", "1.78e+09"]
    assert (
        "Scores cannot be compared with the paper's, since these differ: parameters of the model, steps." in remainder
    )
    assert (
        "Speeds cannot be compared with the paper's, since these differ: parameters of the model, trainer.ranks."
        in remainder
    )


def test_a_run_that_is_in_no_row_is_told(run_of, capsys):
    run = run_of("table7", "max_staleness=3")
    cells, remainder = shown(capsys, "table7", run)
    assert [row[1] for row in cells] == ["0"] * 6
    assert "is in no row: it has the model DeepSeek-R1-Distill-Qwen-1.5B, max_staleness=3." in remainder
    assert "compared" not in remainder


def test_an_unknown_table_is_told(capsys, tmp_path):
    assert main(["table9", str(tmp_path)]) == 2
    assert "The paper has no table9: take one of table1" in capsys.readouterr().err


@pytest.mark.parametrize("name", PUBLISHED_TABLES)
def test_no_two_rows_of_a_table_are_for_the_same_runs(name):
    rows = [TableRow(row) for row in PUBLISHED_TABLES[name]["rows"]]
    assert len({(row.model, str(row.keys)) for row in rows}) == len(rows)
    assert {row.model for row in rows} <= yaml.safe_load(PUBLISHED.read_text())["parameters"].keys()


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "sweeps").glob("paper-*.yaml")), ids=lambda file: file.stem)
def test_each_run_of_the_papers_sweeps_has_a_row_and_each_row_of_its_model_a_run(file):
    rows = [TableRow(row) for row in PUBLISHED_TABLES[file.stem.removeprefix("paper-")]["rows"]]
    configs = [run.config for run in read_sweep(file)]
    rows = [row for row in rows if row.config.model == configs[0].model]
    for config in configs:
        assert sum(row.fits(config) for row in rows) == 1
    assert all(any(row.fits(config) for config in configs) for row in rows)
