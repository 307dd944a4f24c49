"""Supervised fine-tuning, by the command a user types."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny_training import weights_of

from areal.__main__ import main
from areal.data import addition
from areal.extensions.fine_tuning.sft import SftConfig, SftData, _demonstrations, sampled
from areal.extensions.pictures.picture_store import PictureStore
from areal.extensions.pictures.vision import sight_of
from areal.samples.pictures import pictures_of
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import Branch, Group, Trajectory
from areal.storage.rollouts import RolloutWriter

ROOT = Path(__file__).parents[4]
SETTINGS = ["epochs=2", "batch_size=8", "trainer.lr=2e-3", "trainer.warmup_steps=4", "trainer.lr_schedule=cosine"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    raw = [addition.make_row(0, i, max_digits=4) for i in range(80)]
    write(file, [{"prompt": r["prompt"], "completion": addition.demonstration(r, Random(0), 0.0)} for r in raw])
    return file


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(model: Path, data: Path, output: Path, *overrides: str) -> list[str]:
    return ["sft", "--model", str(model), "--data", str(data), "--output", str(output), *overrides]


def fine_tune_on_two_ranks(model: Path, data: Path, output: Path, *overrides: str) -> str:
    """What the command prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "areal"]
    process = subprocess.run(
        [sys.executable, *launcher, *arguments(model, data, output, *SETTINGS, *overrides)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def held_out_losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held.out.*?loss (\d+\.\d+)", printed)]


def test_the_held_out_loss_falls_and_the_result_loads(tiny_model, rows, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert not main(arguments(tiny_model, rows, tmp_path / "tuned", *SETTINGS))
    printed = capsys.readouterr().out
    losses = held_out_losses(printed)
    assert len(losses) == 3
    assert max(losses[1:]) < losses[0] - 0.3
    assert "76 rows to train on, 4 held out" in printed
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").eos_token_id is not None
    assert not [path for path in (tmp_path / "tuned").iterdir() if path.is_dir()]


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tiny_model, rows, tmp_path, capsys):
    assert not main(arguments(tiny_model, rows, tmp_path / "one", *SETTINGS))
    losses = held_out_losses(capsys.readouterr().out)
    again = fine_tune_on_two_ranks(tiny_model, rows, tmp_path / "two", "trainer.zero_stage=2")
    assert held_out_losses(again) == pytest.approx(losses, abs=2e-4)
    first, two = (weights_of(tmp_path / name) for name in ("one", "two"))
    for name in first:
        torch.testing.assert_close(two[name], first[name], rtol=0, atol=1e-4)  # weights move by up to 2e-3 a step


def test_adapters_are_merged_and_long_rows_counted(tiny_model, rows, tmp_path, capsys):
    changes = ["trainer.lora.rank=4", "max_length=25", "epochs=1"]
    assert not main(arguments(tiny_model, rows, tmp_path / "tuned", *SETTINGS, *changes))
    printed = capsys.readouterr().out
    assert int(re.search(r"(\d+) rows are left out", printed)[1]) > 0
    losses = held_out_losses(printed)
    assert losses[1] < losses[0]
    tuned, weights_before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "tuned", tiny_model))
    assert tuned.keys() == weights_before.keys()
    changed = {name for name in weights_before if not torch.equal(tuned[name], weights_before[name])}
    assert changed
    assert all("proj" in name for name in changed)


def test_rows_that_are_longer_than_the_model_takes_are_left_out(tiny_model, rows, tmp_path, capsys):
    """One with learned positions, such as GPT-2, cannot compute them."""
    shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 25}))
    assert not main(arguments(tmp_path / "model", rows, tmp_path / "tuned"))
    assert re.search(r"\d+ rows are left out: they have more than max_length=25 tokens", capsys.readouterr().out)


def test_no_model_is_written_whose_loss_is_no_number(tiny_model, rows, tmp_path, capsys):
    assert main(arguments(tiny_model, rows, tmp_path / "tuned", *SETTINGS, "trainer.lr=1e30")) == 2
    assert re.search(r"^(loss|grad_norm) is (nan|inf) .*: set a lower trainer\.lr", capsys.readouterr().err)
    assert not (tmp_path / "tuned").exists()


def test_keys_of_reinforcement_learning_have_no_effect(tiny_model, rows, tmp_path):
    keys = {"sequence_mask": "product", "entropy_coef": 1, "teacher": "wise", "kl_coef": 0.1, "critic.lam": 0.9}
    changes = [f"trainer.{key}={value}" for key, value in keys.items()]
    for name, overrides in (("plain", []), ("changed", changes)):
        assert not main(arguments(tiny_model, rows, tmp_path / name, "trainer.lr=2e-3", *overrides))
    plain, changed = (weights_of(tmp_path / name) for name in ("plain", "changed"))
    assert [name for name in plain if not torch.equal(plain[name], changed[name])] == []


@pytest.mark.parametrize(
    ("row", "overrides", "sentence"),
    [
        ({"prompt": "a1b1="}, [], "line 2, has no 'completion', only prompt"),
        ({"prompt": "a1b1=", "completion": ""}, [], "with the prompt 'a1b1=' has no completion"),
        ({"prompt": "a1b1=", "completion": "2"}, ["max_length=2"], "too few rows of at most max_length=2 tokens"),
        ({"prompt": "a1b1=", "completion": "2"}, ["epoch=2"], "Unknown key 'epoch' in the overrides"),
        ({"prompt": "a1b1=", "completion": "2"}, ["trainer.lora.rnk=2"], "did you mean 'trainer.lora.rank'?"),
        ({"prompt": "a1b1=", "completion": "2"}, ["model=./nowhere"], "There is no model folder ./nowhere"),
        ({"prompt": "a1b1=", "completion": "2"}, ["output=."], "already exists"),
        ({"prompt": "a1b1=", "completion": "2"}, ["data.chat_template_kwargs.deep=1"], "has no chat template"),
    ],
)
def test_a_mistake_gets_one_sentence_before_anything_is_loaded(
    tiny_model, tmp_path, monkeypatch, capsys, row, overrides, sentence
):
    monkeypatch.setitem(sys.modules, "areal.training.training_engine", None)  # importing it would be an error
    write(tmp_path / "rows.jsonl", [{"prompt": "a1b2=", "completion": "3"}, row])
    assert main(arguments(tiny_model, tmp_path / "rows.jsonl", tmp_path / "out", *overrides)) == 2
    assert sentence in capsys.readouterr().err


def test_a_completion_may_be_a_message_of_the_assistant(tiny_model, rows, tmp_path, capsys):
    lines = [json.loads(line) for line in rows.read_text().splitlines()[:20]]
    chats = [row | {"completion": [{"role": "assistant", "content": row["completion"]}]} for row in lines]
    for name, some in {"texts": lines, "chats": chats}.items():
        write(tmp_path / f"{name}.jsonl", some)
        assert not main(arguments(tiny_model, tmp_path / f"{name}.jsonl", tmp_path / name, "batch_size=8"))
    losses = held_out_losses(capsys.readouterr().out)
    assert losses[:2] == losses[2:]


def write_rollouts(folder: Path, model: Path, samples: dict[str, list[tuple[str, float]]], seen: int = 0) -> Path:
    """Groups of single answers with their rewards, by prompt; the first has a sample of two branches, too."""
    of, groups = load_tokenizer(str(model)), []
    for prompt, answers in samples.items():
        item = []
        for answer, reward in answers:
            parts = [of.encode(prompt), [*of.encode(answer), of.eos_token_id]]
            tokens, versions = np.concatenate(parts), np.repeat([-1, 7], [len(part) for part in parts])
            item.append(trajectory(tokens, versions, reward))
        groups.append(Group(f"g{len(groups)}.0", len(groups), tuple(item)))
    branched = trajectory([1, 2, 3, 4, 5, 6, 7], [-1, -1, 7, 7, -1, 8, 8], 2.0, (Branch(0, 4), Branch(3, 3)))
    groups[0] = replace(groups[0], trajectories=(*groups[0].trajectories, branched))
    if seen:
        shown = [replace(t, pictures=np.eye(len(t), 16, dtype=np.uint8) * seen) for g in groups for t in g.trajectories]
        groups = [replace(g, trajectories=tuple(shown.pop(0) for _ in g.trajectories)) for g in groups]
    writer = RolloutWriter(folder, "all", 1 << 30, lambda sequences: [of.decode(tokens) for tokens in sequences])
    writer.add_trained(1, groups, None)
    writer.write()
    return folder


def trajectory(tokens, versions, reward: float, branches: tuple[Branch, ...] = ()) -> Trajectory:
    zeros = np.zeros(len(tokens), np.float32)
    return Trajectory(np.array(tokens, np.int32), zeros, np.array(versions, np.int32), reward, "stop", branches)


def test_of_rollouts_exactly_the_sampled_tokens_of_the_best_are_trained(tiny_model, tmp_path):
    answers = {"a1=": [("2", 1.0)], "a2=": [("3", 1.0), ("4", 1.0), ("5", 0.0)], "a3=": [("5", 0.0)]}
    data = SftData(source=str(write_rollouts(tmp_path / "rollouts", tiny_model, answers, seen=10)), eval_size=1)
    of = load_tokenizer(str(tiny_model))
    rows, held_out = sampled(of, tiny_model, tmp_path / "rollouts", SftConfig(model="", output="", data=data))
    results = [row.trajectories[0] for row in sorted([*rows, *held_out], key=lambda row: row.prompt_index)]
    assert [item.tokens.tolist() for item in results] == [
        [1, 2, 3, 4],
        [1, 2, 3, 5, 6, 7],
        [*of.encode("a2=3"), of.eos_token_id],
    ]
    assert [item.versions.tolist() for item in results] == [[-1, -1, 0, 0], [-1, -1, -1, -1, 0, 0], [-1, -1, -1, 0, 0]]
    assert {len(rows), len(held_out)} == {1, 2}  # no prompt is in both
    assert {pictures_of(row)[0] for row in (*rows, *held_out)} == {"0a" + "00" * 15}, "they go on from what was shown"


@pytest.fixture
def dots(tmp_path, monkeypatch) -> Path:
    """The folder of a model that sees, and of rows that show it pictures."""
    monkeypatch.syspath_prepend(str(ROOT / "configs" / "examples" / "dots"))
    import make

    make.write_model(tmp_path / "dots")
    make.write_rows(tmp_path / "dots" / "rows.jsonl", 6)
    return tmp_path / "dots"


def test_rows_with_pictures_are_encoded_as_in_a_run_and_their_files_put_aside(dots, tmp_path):
    data = SftData(source=str(dots / "rows.jsonl"), eval_size=2)
    config = SftConfig(model=str(dots), output=tmp_path / "out", data=data)
    (pictures := tmp_path / "pictures").mkdir()
    (rows, held_out), _ = _demonstrations(load_tokenizer(str(dots), data), config, pictures)
    names = [name for row in (*rows, *held_out) for name in pictures_of(row)]
    assert len(rows) == 4 and sorted(names) == sorted(file.name for file in pictures.iterdir())
    store = PictureStore(pictures)
    for row in rows:
        (sequence,), (content,) = row.trajectories, map(store.get, pictures_of(row))
        assert (sequence.tokens == 2).sum() == sight_of(str(dots)).look(content).tokens == 4
        assert not sequence.sampled[sequence.tokens == 2].any()


def test_ranks_that_compute_rows_together_refuse_pictures(dots, tmp_path, capsys):
    settings = ["trainer.ranks=2", "trainer.sequence_parallel=2"]
    assert main(arguments(dots, dots / "rows.jsonl", tmp_path / "out", *settings)) == 2
    assert "have pictures, but trainer.sequence_parallel takes none" in capsys.readouterr().err


def test_a_model_learns_from_rows_with_pictures(dots, tmp_path, capsys):
    assert not main(arguments(dots, dots / "rows.jsonl", tmp_path / "tuned", *SETTINGS, "epochs=4"))
    losses = held_out_losses(capsys.readouterr().out)
    assert losses[-1] < losses[0] - 0.3


def test_a_model_learns_from_the_rollouts_of_a_run(tiny_model, tmp_path, capsys):
    raw = [addition.make_row(0, i, max_digits=4) for i in range(40)]
    right = {row["prompt"]: [("1", 0.0), (addition.demonstration(row, Random(0), 0.0), 1.0)] for row in raw}
    rollouts = write_rollouts(tmp_path / "rollouts", tiny_model, right)
    assert not main(arguments(tiny_model, rollouts, tmp_path / "tuned", *SETTINGS))
    losses = held_out_losses(capsys.readouterr().out)
    assert losses[2] < losses[0] - 0.3


def test_rollouts_without_rewards_or_of_another_tokenizer_are_told(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "areal.training.training_engine", None)  # importing it would be an error
    rollouts = write_rollouts(tmp_path / "rollouts", tiny_model, {"a1=": [("2", 0.0)], "a2=": [("2", -1.0)]})
    assert main(arguments(tiny_model, rollouts, tmp_path / "out")) == 2
    assert "Only 1 prompts of" in (error_text := capsys.readouterr().err)
    assert "the highest reward is 2: set data.min_reward" in error_text
    second = tmp_path / "other"
    shutil.copytree(tiny_model, second)
    vocabulary = (second / "tokenizer.json").read_text()
    (second / "tokenizer.json").write_text(vocabulary.replace('"a": 10', '"a": 11').replace('"b": 11', '"b": 10'))
    assert main(arguments(second, rollouts, tmp_path / "out", "data.min_reward=-1")) == 2
    assert "has another tokenizer than the run of these rollouts" in capsys.readouterr().err
