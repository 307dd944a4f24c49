"""The common part of the examples' make.py: tiny models with random weights, and their teaching by `areal sft`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_llama(
    folder: Path,
    texts: Sequence[str],
    *,
    template: str,
    special: Sequence[str],
    pieces: pre_tokenizers.PreTokenizer,
    sizes: dict[str, int],
    marks: Sequence[str] = (),
    most_tokens: int = 1024,
) -> None:
    """Write a Llama with random weights, and a byte-level BPE of `texts` as its tokenizer.

    special: the tokens of padding, of the end and of the roles. pieces: cuts a text into the largest possible tokens.
    sizes: settings of LlamaConfig. marks: further tokens, which are text. most_tokens: without the marks."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pieces, decoders.ByteLevel()
    alphabet, (pad, end, *roles) = pre_tokenizers.ByteLevel.alphabet(), special
    trainer = trainers.BpeTrainer(vocab_size=most_tokens, special_tokens=[*special], initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(mark, special=False) for mark in marks])
    tokens = {"pad_token": pad, "eos_token": end, "additional_special_tokens": roles}
    PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template, **tokens).save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"vocab_size": bpe.get_vocab_size(), "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**ids, **sizes)).save_pretrained(folder)


def teach(folder: Path, *settings: str) -> None:
    """Train folder/random on folder/taught.jsonl. The result is folder/model. settings: of `areal sft`."""
    files = {"model": folder / "random", "data": folder / "taught.jsonl", "output": folder / "model"}
    options = [f"--{name}={path}" for name, path in files.items()]
    subprocess.run([sys.executable, "-m", "areal", "sft", *options, *settings], check=True)
