"""The quickstart's model folder: complete, loadable, deterministic, and built whole or not at all."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.data import addition, quickstart

SHORT = replace(quickstart.RECIPE, steps=20, short_steps=18)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("models") / "model"
    lines: list[str] = []
    quickstart.build(folder, seed=1, progress=lines.append, threads=1, recipe=SHORT)
    return folder, lines


def test_the_folder_loads_as_any_hugging_face_model(built):
    folder, _ = built
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert 0.5e6 < model.num_parameters() < 1.5e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_text_survives_the_tokenizer_one_token_a_character(built):
    tokenizer = AutoTokenizer.from_pretrained(built[0])
    for row in (addition.make_row(0, index) for index in range(50)):
        text = row["prompt"] + addition.demonstration(row, Random(0))
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_tokenizer_refuses_what_the_task_does_not_know(built):
    tokenizer = AutoTokenizer.from_pretrained(built[0])
    with pytest.raises(Exception, match="Missing"):
        tokenizer.encode("1 + 2")


def test_the_loss_falls_and_progress_tells_so(built):
    _, lines = built
    assert len(lines) == 1
    assert lines[0].startswith("warm start: step 20 of 20, loss ")
    assert float(lines[0].split()[-1]) < math.log(len(addition.ALPHABET)) - 0.5


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_randomness_alone(tmp_path: Path):
    recipe = replace(SHORT, steps=3)
    random_before, threads_before = torch.get_rng_state(), torch.get_num_threads()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        quickstart.build(tmp_path / name, seed, threads=1, recipe=recipe)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert torch.get_num_threads() == threads_before
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart.Qwen3ForCausalLM, "save_pretrained", _fail)
    with pytest.raises(OSError, match="no space"):
        quickstart.build(tmp_path / "model", threads=1, recipe=replace(SHORT, steps=1))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a user with an empty cache has had a model built in."""
    folders: list[Path] = []

    def build(folder: Path, *_: object) -> None:
        folders.append(folder)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(folder.name)

    monkeypatch.setattr(quickstart, "build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folders


def test_a_model_is_built_once_for_a_user_and_a_seed(tmp_path: Path, places: list[Path]):
    first = quickstart.ensure(tmp_path / "a", 0)
    assert quickstart.ensure(tmp_path / "a", 0) == first
    again = quickstart.ensure(tmp_path / "b", 0)
    assert (again.parent, again.name) == (tmp_path / "b", first.name)
    assert (again / "model.safetensors").read_text() == first.name
    assert quickstart.ensure(tmp_path / "a", 1) != first
    assert len(places) == 2 and {folder.parent for folder in places} == {tmp_path / "cache" / "areal"}


def test_whoever_needs_a_model_that_is_being_built_waits_for_it(tmp_path: Path, places: list[Path]):
    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(quickstart.ensure, [tmp_path / name for name in "aabb"]))
    assert len(places) == 1 and all((folder / "model.safetensors").exists() for folder in folders)
    assert [file.name for file in (tmp_path / "a").iterdir()] == [places[0].name]


def test_a_cache_that_takes_no_files_costs_nothing_but_the_time(tmp_path: Path, places: list[Path]):
    (tmp_path / "cache").write_text("no folder")
    said: list[str] = []
    folder = quickstart.ensure(tmp_path / "a", 0, said.append)
    assert places == [folder] and "is not kept for other runs" in said[0]


def test_the_longest_problem_fits_the_model():
    row = addition.make_row(0, 0, min_digits=addition.MAX_DIGITS)
    assert len(row["prompt"] + addition.demonstration(row, Random(0))) + 1 <= quickstart.MAX_LENGTH


def _fail(*_: object) -> None:
    raise OSError("no space left")
