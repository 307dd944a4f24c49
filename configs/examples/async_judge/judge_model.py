"""Makes a tiny model with random weights, and teaches it to mark answers as `judge.py` asks.

The marks depend on the number of words alone: 10 for 8 to 12 words. All words outside the question are <unk>."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from judge import QUESTION
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parents[2]))
from tiny_models import teach

FOLDER, MOST_WORDS = Path("build/judge"), 48
FIXED = sorted({*QUESTION.format(question="", answer="").split()})
WORDS = list(dict.fromkeys(["<unk>", "<eos>", *map(str, range(11)), *FIXED]))
TEMPLATE = "{% for m in messages %}{{ m.content + ('<eos>' if m.role == 'assistant' else ' ') }}{% endfor %}"
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
TEACHING = ["trainer.dtype=float32", "trainer.lr=3e-3", "trainer.lr_schedule=cosine", "batch_size=32", "epochs=40"]


def mark(words: int) -> int:
    """Return the mark of an answer of so many words."""
    return max(0, 10 - max(0, words - 10) // 3) if words >= 8 else words


def row(asked: int, answered: int) -> dict[str, object]:
    """Return a question and an answer of so many words, with the mark as the completion."""
    text = QUESTION.format(question="word " * asked, answer="word " * answered)
    return {"prompt": [{"role": "user", "content": text}], "completion": str(mark(answered))}


def write_model(folder: Path) -> None:
    """Write the model and the tokenizer."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(WORDS), eos_token_id=1, **SIZES, **HEADS)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"unk_token": "<unk>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)


def main(folder: Path) -> None:
    """Write the rows and the model."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = itertools.starmap(row, itertools.product(range(3, 9), range(MOST_WORDS + 1)))
    (folder / "taught.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(folder / "random")
    teach(folder, *TEACHING)


if __name__ == "__main__" and not (FOLDER / "model").exists():
    main(FOLDER)
