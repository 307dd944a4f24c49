"""Makes a tiny Llama with random weights, and trains the model on the turns of the careless clerk of clerk.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import torch
from clerk import baskets, demonstrations, row
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER, HELD_OUT = Path("build/shop"), 54
SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
CALL = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}</tool_call>'
MESSAGE = "<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}<end>"
TEMPLATE = (
    "{# No turn has thinking, whatever enable_thinking says. #}"
    "{% if tools %}Tools: {{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}{% endif %}"
    "{% for m in messages %}" + MESSAGE + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
TEACHING = ["epochs=3", "data.eval_size=16", "trainer.dtype=float32", "trainer.lr=3e-3", "trainer.lr_schedule=cosine"]


def write_tokenizer(folder: Path, texts: list[str]) -> int:
    """Write a byte-level BPE of these texts, which keeps numbers apart from words. Returns the number of tokens."""
    bpe, parts = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d+"), "isolated"), parts])
    bpe.decoder = decoders.ByteLevel()
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1024, special_tokens=SPECIAL, initial_alphabet=bytes_)
    )
    bpe.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    named = {"pad_token": "<pad>", "eos_token": "<end>", "additional_special_tokens": SPECIAL[2:]}
    PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=TEMPLATE, **named).save_pretrained(folder)
    return bpe.get_vocab_size()


def main(folder: Path, conversations: int = 6000) -> None:
    """Write rows, held-out rows and the clerk's turns, and train the model on the turns."""
    random, folder = Random(0), folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    held_out, trained = (every := baskets(random))[:HELD_OUT], every[HELD_OUT:]
    taught = [turn for _ in range(conversations) for turn in demonstrations(random, random.choice(trained))]
    files = {"rows": [*map(row, trained)], "held_out": [*map(row, held_out)], "taught": taught}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [text for turn in taught for text in (turn["completion"], *(part["content"] for part in turn["prompt"]))]
    size = write_tokenizer(folder / "random", texts)
    torch.manual_seed(0)
    ends = {"vocab_size": size, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**SIZES, **ends, max_position_embeddings=512)).save_pretrained(folder / "random")
    inputs = {"model": folder / "random", "data": folder / "taught.jsonl", "output": folder / "model"}
    options = [f"--{name}={path}" for name, path in inputs.items()]
    subprocess.run([sys.executable, "-m", "areal", "sft", *options, *TEACHING], check=True)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main(FOLDER)
