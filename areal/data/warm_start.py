"""Makes the quickstart's model: a character tokenizer and a 0.8M-parameter Qwen3, pretrained on a flawed teacher.

After this warm start the model finds columns and adds reliably, but has also learned the teacher's slips. So most
groups of samples have mixed outcomes at every length, and one change improves all groups: fewer slips. Reinforcement
learning finds this change from the outcome alone. Single missing facts would be learned far more slowly.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from areal.data import addition

EOS, PAD = "<eos>", "<pad>"
MAX_LENGTH = 512
"""The number of positions. The longest prompt and completion take 121 + 201."""

_IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """The settings of the warm start. Lengths are in digits; `tokens` includes padding."""

    steps: int = 480
    short_steps: int = 140
    """The first steps use short additions: there the model learns the lookup by label several times sooner."""
    short_digits: int = 5
    short_batch: int = 24
    batch: int = 16
    tokens: int = 256
    """Tokens of one forward pass, unless an example has more. Examples are sorted by length: little is padding."""
    lr: float = 3e-3
    ramp_steps: int = 20
    slip: float = 0.1


RECIPE = Recipe()


def build(
    folder: Path,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    threads: int | None = None,
    recipe: Recipe = RECIPE,
) -> None:
    """Write a Hugging Face folder (tokenizer, model, generation config).

    The result depends only on the seed, the recipe and the machine. threads: by default as many as cores.
    """
    tokenizer = make_tokenizer()
    threads_before = torch.get_num_threads()
    # The tensors are small: a thread for each part of a batch is faster than several threads for each operation.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            torch.manual_seed(seed)
            model = make_model(tokenizer)
            warm_up(model, tokenizer, seed, recipe, pool, progress)
    finally:
        torch.set_num_threads(threads_before)
    disable_progress_bar()  # for the files
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character of the task. Encoding adds no tokens, and decoding is exact.

    Encoding a character outside the task's alphabet raises an error.
    """
    vocabulary = {token: index for index, token in enumerate([*addition.ALPHABET, EOS, PAD])}
    characters = Tokenizer(models.WordLevel(vocabulary))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random weights in fp32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        # Queries and keys are normalised. With scale 1, attention could not single out one of 300 positions.
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 1.5)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 1.5)
    return model


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    recipe: Recipe,
    pool: ThreadPoolExecutor,
    progress: Callable[[str], None] | None,
) -> None:
    """Train the model, supervised, on the demonstrations of the flawed teacher, short additions first."""
    optimizers = _optimizers(model, recipe.lr, pool)
    began = time.monotonic()
    drawn = 0
    for step in range(recipe.steps):
        short = step < recipe.short_steps
        size = recipe.short_batch if short else recipe.batch
        max_digits = recipe.short_digits if short else addition.MAX_DIGITS
        examples = [_example(tokenizer, seed, drawn + i, max_digits, recipe.slip) for i in range(size)]
        drawn += size
        parts = list(_parts(examples, recipe.tokens))
        loss = _accumulate(model, parts, pool, tokenizer.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = recipe.lr * _schedule(step, recipe)
            optimizer.step()
            optimizer.zero_grad()
        number = step + 1
        if progress and (number % 40 == 0 or number == recipe.steps):
            seconds = (time.monotonic() - began) / number * (recipe.steps - number)
            progress(f"the quickstart's model: step {number} of {recipe.steps}, loss {loss:.3f}, {seconds:.0f} s left")


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024), with AdamW's update size (Liu et al. 2025).

    On this task Muon finds the lookup by label several times sooner than AdamW. Muon is for matrices only. It computes
    in fp32; `torch.optim.Muon` computes in bf16, which some CPUs lack.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, pool: ThreadPoolExecutor) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": 0.95})
        self._pool = pool

    def step(self) -> None:
        """Update every matrix once, from its `grad`."""
        for group in self.param_groups:
            list(self._pool.map(partial(self._update, group), group["params"]))

    @torch.no_grad()
    def _update(self, group: dict[str, Any], matrix: torch.nn.Parameter) -> None:
        average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - group["momentum"])
        direction = _orthogonalised(matrix.grad.lerp(average, group["momentum"]))
        matrix.add_(direction, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def _orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest matrix with singular values around 1."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if wide is not matrix else x


def _optimizers(model: Qwen3ForCausalLM, lr: float, pool: ThreadPoolExecutor) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    adam_parameters: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else adam_parameters).append(parameter)
    return [Muon(matrices, lr, pool), torch.optim.AdamW(adam_parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def _schedule(step: int, recipe: Recipe) -> float:
    """Return the factor on the learning rate: a linear ramp, then a cosine down to a twentieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return min(1.0, (step + 1) / recipe.ramp_steps) * (0.05 + 0.95 * cosine)


def _example(
    tokenizer: PreTrainedTokenizerFast, seed: int, index: int, max_digits: int, slip: float
) -> tuple[list[int], list[int]]:
    """Return (tokens, labels) of the same length; labels are `_IGNORED` on the prompt."""
    row = addition.make_row(seed, index, max_digits=max_digits)
    prompt = tokenizer.encode(row["prompt"])
    completion = tokenizer.encode(addition.demonstration(row, Random(f"teacher/{seed}/{index}"), slip))
    completion.append(tokenizer.eos_token_id)
    return prompt + completion, [_IGNORED] * len(prompt) + completion


def _accumulate(
    model: Qwen3ForCausalLM, parts: list[list[tuple[list[int], list[int]]]], pool: ThreadPoolExecutor, pad: int
) -> float:
    """Set the gradient of the mean loss over the completion tokens of all parts, and return the loss. Threads of `pool`
    compute the parts, which are added in order."""
    count = sum(label != _IGNORED for part in parts for _, labels in part for label in labels)
    parameters = list(model.parameters())

    def gradient(part: list[tuple[list[int], list[int]]]) -> tuple[float, tuple[torch.Tensor, ...]]:
        # Padding is on the right, where causal attention never sees it, so no mask is needed.
        tokens = pad_sequence([torch.tensor(tokens[:-1]) for tokens, _ in part], True, pad)
        labels = pad_sequence([torch.tensor(labels[1:]) for _, labels in part], True, _IGNORED)
        judged = labels != _IGNORED
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[judged]
        loss = cross_entropy(model.lm_head(hidden), labels[judged], reduction="sum") / count
        return loss.item(), torch.autograd.grad(loss, parameters)

    losses, gradients = zip(*pool.map(gradient, parts), strict=True)
    for parameter, summands in zip(parameters, zip(*gradients, strict=True), strict=True):
        parameter.grad = sum(summands[1:], start=summands[0])
    return math.fsum(losses)


def _parts(examples: list[tuple[list[int], list[int]]], cap: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yield the examples, longest first, in parts of at most `cap` tokens with padding, or a single example."""
    part: list[tuple[list[int], list[int]]] = []
    for example in sorted(examples, key=lambda example: len(example[0]), reverse=True):
        if part and (len(part) + 1) * len(part[0][0]) > cap:
            yield part
            part = []
        part.append(example)
    yield part
