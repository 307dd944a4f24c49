"""Models for the hub, by the command a user types."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from areal.__main__ import main
from areal.base.processes import ROOT
from areal.config import dump_config, load_config
from areal.storage.records import line_of

SECRET = "s3cr3t"


@pytest.fixture
def run(tiny_model, tmp_path) -> Path:
    """A run folder after 20 steps of the hub's model me/base, with everything that may not leave the machine."""
    folder = tmp_path / "runs" / "adder"
    checkpoint = folder / "checkpoints" / "step_000020"
    shutil.copytree(tiny_model, checkpoint)
    for private in (folder / "checkpoints" / "step_000010", checkpoint / "training", folder / "keys"):
        private.mkdir()
        (private / "private.safetensors").write_bytes(b"private")
    (checkpoint / "adapter").mkdir()
    described = {"base_model_name_or_path": str(tiny_model), "r": 4}
    (checkpoint / "adapter" / "adapter_config.json").write_text(json.dumps(described))
    (folder / "secrets.json").write_text(SECRET)
    model = tmp_path / "models--me--base" / "snapshots" / "0123"
    overrides = [
        "name=adder",
        f"run_dir={folder.parent}",
        f"model={model}",
        "data.source=hf:me/sums",
        f"observe.prometheus_token={SECRET}",
        f'reward.functions=["{tmp_path}/own.py:right"]',
    ]
    (folder / "config.yaml").write_text(
        dump_config(load_config(ROOT / "configs" / "quickstart.yaml", overrides)).replace("(hidden)", SECRET)
    )
    (folder / "metrics.jsonl").write_text(line_of({"step": 20, "reward_mean": 0.5, "staleness_max": 3}))
    evaluations = [
        {"version": 0, "accuracy": 0.25, "standard_error": 0.05, "pass_at": {"1": 0.25, "4": 0.5}, "rows": 64},
        {"version": 20, "accuracy": 0.75, "standard_error": 0.05, "pass_at": {"1": 0.75, "4": 0.875}, "rows": 64},
    ]
    (folder / "evaluations.jsonl").write_text("".join(map(line_of, evaluations)))
    (folder / "summary.json").write_text(json.dumps({"ok": True, "staleness_max": 3, "checkpoint": str(checkpoint)}))
    return folder


def test_the_folder_is_the_last_checkpoint_with_a_card_and_nothing_private(run, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    assert main(["export", str(run), "--format", "model", "--output", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "adapter/adapter_config.json",
        "config.json",
        "config.yaml",
        "evaluations.jsonl",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "summary.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for path in files - {"model.safetensors"}:
        assert SECRET not in (text := (folder / path).read_text())
        assert str(tmp_path) not in text
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None


def test_the_card_says_what_was_trained_and_how_well_it_did(run):
    assert main(["export", str(run), "--format", "model", "--output", str(run / "model")]) == 0
    card = ModelCard.load(run / "model" / "README.md")
    assert (card.data.base_model, card.data.datasets) == ("me/base", ["me/sums"])
    results = {(result.dataset_type, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert results == {("me/sums", "accuracy"): 0.75, ("me/sums", "pass@4"): 0.875}
    assert "| held-out rows | 64 | 25.0 ± 5.0, pass@4 50.0 | 75.0 ± 5.0, pass@4 87.5 |" in card.text
    assert "| staleness | at most 3 versions, under a bound of 4 |" in card.text
    assert "| rewards | own.py:right |" in card.text


def test_the_card_takes_no_markup_from_the_record_and_the_folder_no_held_out_rows(run):
    name = "<img src=x>|](http://evil)"
    scores = {"accuracy": 0.5, "standard_error": 0.1, "rows": 8}
    lines = [{"version": version, "benchmarks": {name: scores}, "rows": 8} for version in (0, 20)]
    (run / "evaluations.jsonl").write_text("".join(map(line_of, lines)))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"samples_after": [{"prompt": "held-out", "text": "x"}]}))
    assert main(["export", str(run), "--format", "model", "--output", str(run / "model")]) == 0
    card = ModelCard.load(run / "model" / "README.md")
    assert "| evil? | 8 |" in card.text and "<img" not in card.text
    assert "held-out" not in (run / "model" / "summary.json").read_text()


def test_a_mistake_gets_one_sentence(run, tmp_path, capsys):
    assert main(["export", str(run), "--format", "model", "--output", "."]) == 2
    assert "already exists" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["export", str(run), "--format", "model", "--output", str(tmp_path / "model")]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
