"""What supervised fine-tuning trains as the end of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.base.errors import UserError
from areal.data.sources import open_source
from areal.extensions.fine_tuning.sft import SftConfig, SftData, _demonstrations, _encode, _end_where_trained
from areal.samples.tokenizer import load_tokenizer

TURNS = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% else %}AFTER{% endif %}"
)


def folder_of(path: Path, template: str | None, stops: Any = None) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<start>", "<end>", "<close>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", additional_special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    if stops:
        ids = tokenizer.convert_tokens_to_ids(stops)
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


def trained(folder: Path, prompt: Any, completion: Any) -> str:
    """The text of the tokens in the loss."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "completion": completion}))
    data = SftData(source=str(folder / "rows.jsonl"))
    tokenizer = load_tokenizer(str(folder), data)
    row = open_source(data.model_copy(update={"eval_size": 0}), 0).row(0)
    sequence = _encode(tokenizer, row, data).trajectories[0]
    return tokenizer.decode(sequence.tokens[sequence.sampled])


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("end", "after", "stops", "expected"),
    [
        ("<end>\n", "", ["<end>", "<eos>"], "yes<end>"),  # Gemma, Llama 3
        ("<end>\n", "", None, "yes<end>"),  # base Qwen, whose configuration lists another end
        ("<close><end>", "", "<end>", "yes<close><end>"),  # Cohere
        ("<end>\n", "<eos>", ["<end>", "<eos>"], "yes<end>"),  # Phi 3
        (" <eos>", "", None, "yes <eos>"),  # Llama 2
        ("\n", "", None, "yes<eos>"),  # no end of its own
    ],
)
def test_a_chat_learns_to_end_its_turn_as_the_template_does_and_once(tmp_path, end, after, stops, expected):
    folder = folder_of(tmp_path, TURNS.replace("END", end).replace("AFTER", after), stops)
    assert trained(folder, CHAT, "yes") == expected
    assert trained(folder, CHAT, [{"role": "assistant", "content": "yes"}]) == expected
    own_end = expected.removeprefix("yes")
    for spelled in (own_end, f"{own_end}\n", "<eos>", f"{own_end}<eos>"):
        assert trained(folder, CHAT, f"yes{spelled}") == expected, spelled


def test_a_text_ends_with_the_end_of_sequence_once(tmp_path):
    folder = folder_of(tmp_path, None)
    assert trained(folder, "hi", "yes\n") == "yes\n<eos>"
    assert trained(folder, "hi", "yes<eos>") == "yes<eos>"


def test_completions_that_spell_special_tokens_are_reported(tmp_path):
    folder = folder_of(tmp_path, TURNS.replace("END", "<end>\n").replace("AFTER", ""))
    texts = ["yes", "no<start>user", "a < b"]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"hi {t}", "completion": t}) + "\n" for t in texts)
    )
    data = SftData(source=str(folder / "rows.jsonl"), eval_size=1)
    config = SftConfig(model=str(folder), output=tmp_path / "out", data=data)
    _, notes = _demonstrations(load_tokenizer(str(folder), data), config, folder)
    assert notes == ["1 completions spell special tokens, such as <start>, and train these"]


@pytest.mark.parametrize(
    "completion",
    [
        [
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
        ],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ],
)
def test_a_completion_of_several_messages_or_of_calls_is_not_trained_as_its_json(tmp_path, completion):
    folder = folder_of(tmp_path, TURNS.replace("END", "<end>").replace("AFTER", ""))
    with pytest.raises(UserError, match="neither text nor a single message of the assistant"):
        trained(folder, CHAT, completion)


def test_the_written_model_ends_sequences_where_its_chats_were_trained_to_end(tmp_path):
    tokenizer = load_tokenizer(str(folder_of(tmp_path / "model", None, "<eos>")))
    eos, end, letter = tokenizer.convert_tokens_to_ids(["<eos>", "<end>", "a"])
    out = tmp_path / "out"
    out.mkdir()
    _end_where_trained(out, tokenizer, {eos, letter})
    assert not list(out.iterdir())
    (out / "generation_config.json").write_text('{"eos_token_id": 1, "top_k": 20}')
    _end_where_trained(out, tokenizer, {end})
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings == {"eos_token_id": sorted([eos, end]), "top_k": 20}
