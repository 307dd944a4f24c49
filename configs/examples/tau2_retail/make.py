"""Makes the small sibling's rows, and a tiny Llama that `areal sft` trains on the turns of a careless clerk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from episodes import FOLDER
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARKS = ["<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
ARGUMENTS = "{{ a if a is string else a | tojson }}"
CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + "}</tool_call>"
CALLS = "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + CALL + "{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }} {% endfor %}"
TEMPLATE = (
    TOOLS
    + "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    + CALLS
    + "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3}
TEACHING = [
    "data.eval_size=16",
    "batch_size=8",
    "trainer.dtype=float32",
    "trainer.lr=2e-3",
    "trainer.lr_schedule=cosine",
]


def write_model(folder: Path, texts: list[str]) -> None:
    """Write the tokenizer, a byte-level BPE of the texts, and the model with random weights."""
    torch.manual_seed(0)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=768, special_tokens=MARKS, initial_alphabet=alphabet))
    bpe.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    tokens = {"pad_token": "<pad>", "eos_token": "<end>", "additional_special_tokens": MARKS[2:]}
    PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=TEMPLATE, **tokens).save_pretrained(folder)
    ends = {"vocab_size": bpe.get_vocab_size(), "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**SIZES, **ends, max_position_embeddings=1024)).save_pretrained(folder)


def main() -> None:
    subprocess.run([".venv-tau2/bin/python", Path(__file__).with_name("turns.py")], check=True)
    lines = (FOLDER / "taught.jsonl").read_text().splitlines()
    write_model(FOLDER / "random", [str(json.loads(line)) for line in lines[:200]])
    files = {"model": FOLDER / "random", "data": FOLDER / "taught.jsonl", "output": FOLDER / "model"}
    options = [f"--{name}={path}" for name, path in files.items()]
    subprocess.run([sys.executable, "-m", "areal", "sft", *options, *TEACHING], check=True)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main()
