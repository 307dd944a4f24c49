"""Makes a tiny Llama with random weights, and trains the model on games of a player who walks at random."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from walk import game

FOLDER, HELD_OUT = Path("build/lake"), 16
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{# No turn has thinking, whatever enable_thinking says. #}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
TEACHING = ["epochs=2", "trainer.dtype=float32", "trainer.lr=3e-3", "trainer.lr_schedule=cosine"]


def write_tokenizer(folder: Path, texts: list[str]) -> int:
    """Write a byte-level BPE of these texts, for which a line of the board is a token. Returns the number of tokens."""
    bpe, line = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "merged_with_previous"), line])
    bpe.decoder = decoders.ByteLevel()
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1024, special_tokens=SPECIAL, initial_alphabet=bytes_)
    )
    named = {"pad_token": "<pad>", "eos_token": "<end>", "additional_special_tokens": SPECIAL[2:]}
    PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=TEMPLATE, **named).save_pretrained(folder)
    return bpe.get_vocab_size()


def main(folder: Path, games: int = 4000) -> None:
    """Write a turn of each game, with all messages before the turn, and train the model on the turns."""
    random, folder = Random(0), folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prompt = json.loads((Path(__file__).parent / "rows.jsonl").read_text().splitlines()[0])["prompt"]
    played = [game(random, prompt) for _ in range(games)]
    turns = [(messages, random.randrange(1, len(messages), 2)) for messages in played]
    rows = [{"prompt": messages[:turn], "completion": messages[turn]["content"]} for messages, turn in turns]
    rows.sort(key=lambda row: len(row["prompt"]))  # the last rows are held out: a first turn has the prompt of many
    for name, part in {"taught": rows[:-HELD_OUT], "held_out": rows[-HELD_OUT:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    size = write_tokenizer(folder / "random", [message["content"] for messages in played for message in messages])
    torch.manual_seed(0)
    ends = {"vocab_size": size, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**SIZES, **ends, max_position_embeddings=512)).save_pretrained(folder / "random")
    inputs = {"model": folder / "random", "data": folder / "taught.jsonl", "output": folder / "model"}
    options = [f"--{name}={path}" for name, path in inputs.items()]
    held_out = [f"data.eval_source={folder / 'held_out.jsonl'}", f"data.eval_size={HELD_OUT}"]
    subprocess.run([sys.executable, "-m", "areal", "sft", *options, *held_out, *TEACHING], check=True)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main(FOLDER)
