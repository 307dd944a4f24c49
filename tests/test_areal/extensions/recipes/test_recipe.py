"""What a recipe expects of its runs."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from areal.base.errors import UserError
from areal.base.processes import ROOT
from areal.extensions.recipes.machine import machine
from areal.extensions.recipes.recipe import RunRecipe, bands, figures
from areal.extensions.recipes.recipe_check import check
from areal.models import name_of
from areal.storage.record import Record
from areal.storage.records import line_of

EXAMPLES = sorted((ROOT / "configs" / "examples").iterdir())


def ended(seed: int, **figures: object) -> dict[str, object]:
    usual = {"ok": True, "accuracy": 0.7, "accuracy_before": 0.64, "standard_error": 0.01, "reward": 0.6}
    usual |= {"staleness": 4, "bound": 4}
    usual |= {"engine_gap": 1e-6, "minutes": 2.0, "alerts": [], "made_on": machine() | {"commit": "abc"}}
    return usual | {"seed": seed} | figures


@pytest.fixture
def recipe(tmp_path: Path) -> RunRecipe:
    (tmp_path / "run.yaml").write_text("model: m\n")
    (tmp_path / "expect.yaml").write_text("run: {before: [python make.py]}\n")
    runs = [ended(seed, accuracy=accuracy) for seed, accuracy in enumerate((0.68, 0.70, 0.72))]
    return RunRecipe.of(tmp_path).written(runs)


def test_a_band_is_where_one_more_seed_ends_and_is_no_narrower_than_what_was_evaluated(recipe):
    assert recipe.run["before"] == ["python make.py"] and recipe.runs["seeds"] == [0, 1, 2]
    # 4.303 * 0.02 * sqrt(1 + 1 / 3)
    assert recipe.bands["accuracy"] == {"mean": 0.7, "low": 0.601, "high": 0.799}
    assert recipe.bands["engine_gap"] == {"high": 1e-5} and recipe.bands["minutes"] == {"high": 4.0}
    same = bands([ended(seed) for seed in range(3)])["accuracy"]
    assert same["high"] - same["low"] == pytest.approx(2 * 4.303 * 0.01 * (4 / 3) ** 0.5, abs=2e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, ""),
        ({"accuracy": 0.5, "accuracy_before": 0.4}, "accuracy is 0.5, not 0.601 to 0.799"),
        ({"accuracy": 0.65, "accuracy_before": 0.66}, "gain is -0.01, not at least 0"),
        ({"engine_gap": 1e-3}, "engine_gap is 0.001, not at most 1e-05"),
        ({"staleness": 5}, "staleness 5 is over its bound 4"),
        ({"alerts": ["Collapse"]}, "alert: Collapse"),
        ({"ok": False}, "the run did not reach its end"),
        ({"minutes": 9.0}, "minutes is 9, not at most 4"),
        ({"minutes": 9.0, "made_on": {"processor": "another"}}, ""),
    ],
)
def test_a_run_that_ends_otherwise_is_told_apart(recipe, change, sentence):
    lines = recipe.faults(ended(7, **change))
    assert len(lines) == bool(sentence) and sentence in "".join(lines)


def test_a_recipe_whose_runs_all_rose_expects_a_rise_and_no_accuracy_outside_of_0_and_1():
    wide = bands([ended(seed, accuracy=accuracy) for seed, accuracy in enumerate((0.65, 0.9, 0.99))])
    assert (wide["accuracy"]["low"], wide["accuracy"]["high"], wide["gain"]) == (0.0, 1.0, {"low": 0.0})
    assert "gain" not in bands([ended(seed, accuracy=accuracy) for seed, accuracy in enumerate((0.6, 0.9, 0.99))])


def test_a_run_without_the_figures_of_a_recipe_is_told_apart(recipe):
    lines = recipe.faults(ended(7, accuracy=None))
    assert lines == ["accuracy is missing, not 0.601 to 0.799", "gain is missing, not at least 0"]


def test_bands_of_fewer_than_three_seeds_and_unknown_keys_are_refused(recipe, tmp_path):
    with pytest.raises(UserError, match="2 of 3 seeds have run"):
        recipe.written([ended(0), ended(1)])
    (tmp_path / "expect.yaml").write_text("run: {beside: x}\n")
    with pytest.raises(UserError, match="`run` has needs, overrides, quick, before, command, alerts, and nothing else"):
        RunRecipe.of(tmp_path)
    with pytest.raises(UserError, match="no recipe"):
        RunRecipe.of(tmp_path / "absent")


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_each_example_is_a_recipe_and_one_that_needs_gpus_says_so(folder):
    recipe = RunRecipe.of(folder)
    table = next(line for line in (ROOT / "docs/examples.md").read_text().splitlines() if f"/{folder.name}`" in line)
    assert bool(recipe.run["needs"]) == ("GPU" in table)


def test_a_recipe_that_this_machine_cannot_run_is_not_run_and_no_fault(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("areal.extensions.recipes.recipe_check.visible_devices", lambda: [])
    options = Namespace(recipes=[ROOT / "configs/examples/gsm8k_lora"], folder=tmp_path, records=None, quick=True)
    assert check(options) == 0 and "not run: it needs a GPU of 24 GB" in capsys.readouterr().out


def test_an_alert_that_a_recipe_expects_is_no_fault(tmp_path):
    (tmp_path / "run.yaml").write_text("model: m\n")
    (tmp_path / "expect.yaml").write_text("run: {alerts: [no signal]}\n")
    lines = RunRecipe.of(tmp_path).faults(ended(0, alerts=["no signal", "collapse"]))
    assert lines == ["alert: collapse"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/models/quickstart", "quickstart"),
        ("hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/1f2e", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_a_model_from_the_hub_has_its_name_there(folder, name):
    assert name_of(folder) == name


@pytest.mark.parametrize(("stopped", "minutes"), [(0.0, 48), (3600.0, 47)])
def test_the_figures_of_a_run_are_those_of_its_record(tmp_path, stopped, minutes):
    times = [60.0 * n + stopped * (n > 24) for n in range(1, 49)]
    steps = [
        {"step": n, "time": time, "reward_mean": n / 100, "engine_gap": 1e-6 * n} for n, time in enumerate(times, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(map(line_of, steps)))
    evaluation = {"version": 48, "accuracy": None, "benchmarks": {"sums": {"accuracy": 0.5, "standard_error": 0.1}}}
    (tmp_path / "evaluations.jsonl").write_text(line_of(evaluation))
    (tmp_path / "events.jsonl").write_text(line_of({"time": 0.0, "actor": "master/0"}))
    (tmp_path / "summary.json").write_text(json.dumps({"ok": True, "staleness_max": 1, "max_staleness": 2}))
    (tmp_path / "config.yaml").write_text("model: m\n")
    ending = figures(Record(tmp_path))
    assert ending["accuracy"] == 0.5 and ending["minutes"] == minutes and ending["engine_gap"] == 48e-6
    assert ending["curve"][:2] == [0.015, 0.035] and len(ending["curve"]) == 24
    assert ending["reward"] == pytest.approx(0.435)
