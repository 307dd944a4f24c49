"""docs/results.md is what the files of docs/records give, and these are what runs of this project have written."""

from __future__ import annotations

import json

import pytest
import results_page as results

from areal.extensions.recipes.recipe import RunRecipe, figures
from areal.extensions.recipes.run_archive import unpack
from areal.storage.record import Record

FILES = sorted(results.RECORDS.glob("*.json"))
MOST_BYTES = 12_000_000


def test_the_page_is_what_the_records_give():
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "run python docs/site/results_page.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_figures_of_a_recipe_are_those_of_its_record(file, tmp_path):
    written = json.loads(file.read_text())
    if not (written["record"] and (results.RECORDS / written["record"]).exists()):
        pytest.skip("the record is not in the repository")
    facts = unpack(results.RECORDS / written["record"], tmp_path)
    first = written["seeds"][0]
    ending = json.loads(json.dumps(figures(Record(tmp_path / "run"))))
    assert {name: first[name] for name in ending if name != "alerts"} == {
        k: v for k, v in ending.items() if k != "alerts"
    }
    assert facts["steps"] == written["steps"]


@pytest.mark.parametrize("path", results.RECIPES, ids=lambda path: path.name)
def test_the_bands_of_a_recipe_hold_for_its_own_runs(path):
    recipe = RunRecipe.of(path)
    file = results.RECORDS / f"{recipe.name}.json"
    seeds = json.loads(file.read_text())["seeds"] if file.exists() else []
    assert [
        line for seed in seeds for line in recipe.faults(seed) if recipe.bands and not line.startswith("alert")
    ] == []


def test_the_records_are_small():
    assert sum(file.stat().st_size for file in results.RECORDS.rglob("*") if file.is_file()) < MOST_BYTES


def test_a_curve_and_a_mean_are_short_texts():
    assert results.curve([0.0, 0.5, 1.0]) == "▁▅█" and results.curve([1.0, 1.0]) == "–"
    assert results.mean_text([0.5, 0.7, None]) == "0.600±0.100" and results.mean_text([None]) == "–"
