"""Rollouts as data sets, by the command a user types."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import DatasetCard
from support.small_runs import read_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.__main__ import main
from areal.base.processes import ROOT
from areal.config import dump_config, load_config
from areal.samples.trajectory import Branch, Group, Trajectory, row_text
from areal.storage.rollouts import RolloutWriter

CHAT = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n<think>{% endif %}"
)


@pytest.fixture
def load_dataset():
    from datasets import load_dataset  # takes seconds

    return load_dataset


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", additional_special_tokens=["<start>"]
    )
    fast_tokenizer.chat_template = template
    return fast_tokenizer


class Run:
    """A run folder with rollouts. `add` adds a group of samples: (prompt and answers in turn, reward, finish)."""

    def __init__(self, folder: Path, of: PreTrainedTokenizerFast, *overrides: str) -> None:
        self.folder, self.of, self.groups = folder, of, []
        folder.mkdir()
        config = load_config(ROOT / "configs" / "quickstart.yaml", [f"name={folder.name}", *overrides])
        (folder / "config.yaml").write_text(dump_config(config))
        of.save_pretrained(folder / "checkpoints" / "step_000002")

    def add(self, row: dict, *samples: tuple[list[str], float, str]) -> None:
        trajectories = tuple(self.sample(*sample) for sample in samples)
        self.groups.append(Group(f"g{len(self.groups)}.0", len(self.groups), trajectories, row_text(row)))

    def sample(self, texts: list[str], reward: float, finish: str, branches: tuple[Branch, ...] = ()) -> Trajectory:
        """texts: what was sampled is in every second one."""
        parts = [self.of.encode(text, add_special_tokens=False) for text in texts]
        versions = np.repeat([(n % 2) * 4 - 1 for n in range(len(parts))], [len(part) for part in parts])
        tokens = np.array(sum(parts, []), np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return Trajectory(tokens, zeros, versions.astype(np.int32), reward, finish, branches)

    def write(self) -> None:
        rollout_writer = RolloutWriter(
            self.folder / "rollouts", "all", 1 << 30, lambda s: [self.of.decode(t) for t in s]
        )
        rollout_writer.add_trained(1, self.groups, None)
        rollout_writer.write()


@pytest.fixture
def plain(tmp_path) -> Run:
    """Four groups: a best and a worst, none above 0, all cut, and a conversation."""
    run = Run(tmp_path / "plain", tokenizer())
    run.add({"prompt": "1+1="}, (["1+1=", "3<end>"], 0, "stop"), (["1+1=", "2<end>"], 1, "stop"))
    run.add({"prompt": "1+2="}, (["1+2=", "4<end>"], 0, "stop"), (["1+2=", "5<end>"], 0, "stop"))
    run.add({"prompt": "1+3="}, (["1+3=", "4444"], 1, "length"), (["1+3=", "3333"], 0, "length"))
    run.add({"prompt": "2+2="}, (["2+2=", "?<end>", "go on", "4<end>"], 1, "stop"), (["2+2=", "5<end>"], 0, "stop"))
    run.write()
    return run


def export(run: Run, output: Path, *options: str) -> Path:
    assert main(["export", str(run.folder), "--output", str(output), *options]) == 0
    return output


def test_each_sampled_turn_of_the_best_samples_is_a_row(plain, tmp_path, capsys):
    rows = read_jsonl(export(plain, tmp_path / "rows.jsonl"))
    assert [(row["prompt"], row["completion"], row["reward"]) for row in rows] == [
        ("1+1=", "2", 1.0),
        ("2+2=", "?", 1.0),
        ("2+2=?<end>go on", "4", 1.0),
    ]
    assert "3 rows, from 8 samples in 4 groups" in capsys.readouterr().out
    assert read_jsonl(export(plain, tmp_path / "all.jsonl", "--all", "--min-reward", "0"))[0]["completion"] == "3"


def test_a_pair_has_the_best_and_the_worst_answer_to_one_prompt(plain, tmp_path, capsys):
    (row,) = read_jsonl(export(plain, tmp_path / "rows.jsonl", "--format", "preference"))
    assert row == {
        "prompt": "1+1=",
        "chosen": "2",
        "rejected": "3",
        "score_chosen": 1.0,
        "score_rejected": 0.0,
        "group": "g0.0",
    }
    assert "1 samples of several turns or branches left out" in capsys.readouterr().out


def test_the_rows_of_branches_begin_with_what_was_shared(tmp_path):
    run = Run(tmp_path / "run", tokenizer())
    branched = run.sample(["ab", "c<end>", "d", "e<end>"], 1, "stop", (Branch(0, 4), Branch(3, 3)))
    run.groups.append(Group("g0.0", 0, (branched,), ""))
    run.write()
    rows = read_jsonl(export(run, tmp_path / "rows.jsonl"))
    assert [(row["prompt"], row["completion"]) for row in rows] == [("ab", "c"), ("abcd", "e")]


def test_answers_to_chat_messages_are_messages_that_render_as_they_were_sampled(tmp_path, load_dataset):
    of = tokenizer(CHAT)
    run = Run(tmp_path / "run", of, "data.system_prompt=short")
    requests = [{"role": "system", "content": "short"}, {"role": "user", "content": "1+1="}]
    prompt = of.apply_chat_template(requests, add_generation_prompt=True, tokenize=False)
    run.add({"prompt": "1+1="}, ([prompt, "so</think>2<end>"], 1, "stop"), ([prompt, "</think>3<end>"], 0, "stop"))
    run.add({"prompt": "other"}, ([prompt, "</think>2<end>"], 1, "stop"))
    run.write()
    (row,) = load_dataset(
        "json", data_files=str(export(run, tmp_path / "rows.jsonl")), split="train", cache_dir=str(tmp_path)
    )
    assert row["prompt"] == requests
    rendered = of.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=False)
    assert rendered == prompt + "so</think>2<end>"
    (row,) = read_jsonl(export(run, tmp_path / "pairs.jsonl", "--format", "preference"))
    assert row["rejected"] == [{"role": "assistant", "content": "<think></think>3"}]


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_a_folder_is_a_data_set_of_the_hub_with_a_card(plain, tmp_path, kind, load_dataset):
    folder = export(plain, tmp_path / "set", "--format", kind)
    results = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache")).to_list()
    assert results == read_jsonl(export(plain, tmp_path / "rows.jsonl", "--format", kind))
    file = export(plain, tmp_path / "rows.parquet", "--format", kind)
    assert load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path)).to_list() == results
    card = DatasetCard.load(folder / "README.md")
    assert card.data.size_categories == "n<1K"
    assert f"| {len(results)}, of 8 samples in 4 groups |" in card.text
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--min-reward", "2"], "None of the 8 samples was chosen"),
        (["--all", "--format", "preference"], "a pair is the best and the worst"),
    ],
)
def test_a_mistake_gets_one_sentence_and_no_file(plain, tmp_path, capsys, options, sentence):
    assert main(["export", str(plain.folder), "--output", str(tmp_path / "rows.jsonl"), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}
    assert main(["export", str(plain.folder), "--output", str(tmp_path / "rows.txt")]) == 2
    assert "rows.txt is no kind of file to write: end it in .jsonl" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--output", str(tmp_path / "rows.jsonl")]) == 2
    assert "There are no rollouts in" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text(json.dumps({}))
    assert main(["export", str(plain.folder), "--output", str(tmp_path / "rows.jsonl")]) == 2
    assert "already exists" in capsys.readouterr().err
