"""The quickstart's model: loadable and deterministic."""

import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal.data import addition
from areal.data.warm_start import MAX_LENGTH, RECIPE, build

SHORT = replace(RECIPE, steps=20, short_steps=18)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("models") / "model"
    lines: list[str] = []
    build(folder, seed=1, progress=lines.append, threads=1, recipe=SHORT)
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
    loss = re.fullmatch(r"the quickstart's model: step 20 of 20, loss (.*), 0 s left", lines[0])
    assert loss and float(loss[1]) < math.log(len(addition.ALPHABET)) - 0.5


def test_a_seed_gives_the_same_weights_by_any_number_of_threads_and_the_callers_randomness_stays(tmp_path: Path):
    recipe = replace(SHORT, steps=3)
    random_before, threads_before = torch.get_rng_state(), torch.get_num_threads()
    for name, seed, threads in (("a", 0, 1), ("b", 0, 3), ("c", 1, 1)):
        build(tmp_path / name, seed, threads=threads, recipe=recipe)
    assert torch.equal(torch.get_rng_state(), random_before)
    assert torch.get_num_threads() == threads_before
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_the_longest_problem_fits_the_model():
    row = addition.make_row(0, 0, min_digits=addition.MAX_DIGITS)
    assert len(row["prompt"] + addition.demonstration(row, Random(0))) + 1 <= MAX_LENGTH
