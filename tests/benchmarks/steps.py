"""What the benchmarks of training steps share: the quickstart's batches and a clock.

Batches are groups of 8 completions that the quickstart's model samples at temperature 1 for the quickstart's prompts,
with transformers and a seed: the lengths and the common prefixes are those of a run's first steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import QUICKSTART

from areal.config import load_config
from areal.config.trainer_section import TrainerConfig
from areal.data import addition, quickstart
from areal.samples.table import NOT_SAMPLED
from areal.samples.trajectory import Group, Trajectory
from areal.training.training_engine import TrainingEngine

GROUPS, GROUP_SIZE, MAX_NEW_TOKENS = 16, 8, 210
VERSION = 3


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the quickstart's model (default: it is built, 80 s on two cores)")
    parser.add_argument("--rounds", type=int, default=5, help="times that every contestant trains on all batches")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one round on one small batch: does it run?")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    options.rounds = 1 if options.quick else options.rounds
    return options


@contextmanager
def model_and_batches(options: argparse.Namespace, count: int) -> Iterator[tuple[Path, list[list[Group]]]]:
    """The model's folder, and `count` batches of the quickstart."""
    with tempfile.TemporaryDirectory() as parent:
        model = options.model or quickstart.ensure(Path(parent))
        sizes = (1, 2, 2, 8) if options.quick else (count, GROUPS, GROUP_SIZE, MAX_NEW_TOKENS)
        yield model, sample_batches(model, options.seed, *sizes)


@torch.no_grad()
def sample_batches(folder: Path, seed: int, count: int, groups: int, size: int, new: int) -> list[list[Group]]:
    """`count` batches of `groups` groups of `size` samples of at most `new` tokens each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [addition.make_row(seed, index) for index in range(count * groups)]
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    longest = max(map(len, prompts))
    padded = [[tokenizer.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    torch.manual_seed(seed)
    output = model.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(mask),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        num_return_sequences=size,
        return_dict_in_generate=True,
        output_logits=True,
    )
    completions = output.sequences[:, longest:]
    logps = torch.log_softmax(torch.stack(output.logits, 1), -1).gather(2, completions[..., None])[..., 0]
    batches: list[list[Group]] = [[] for _ in range(count)]
    for n, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        samples = []
        for completion, logp in zip(completions.split(size)[n].tolist(), logps.split(size)[n].numpy(), strict=True):
            ended = tokenizer.eos_token_id in completion
            length = completion.index(tokenizer.eos_token_id) + 1 if ended else new
            text = tokenizer.decode(completion[: length - ended])
            samples.append(
                Trajectory(
                    tokens=np.array(prompt + completion[:length], np.int32),
                    logprobs=np.concatenate([np.zeros(len(prompt), np.float32), logp[:length]]),
                    versions=np.repeat([NOT_SAMPLED, VERSION], [len(prompt), length]).astype(np.int32),
                    reward=addition.reward(row["prompt"], text, row),
                    finish="stop" if ended else "length",
                )
            )
        batches[n // groups].append(Group(f"g{n}", n, tuple(samples)))
    return batches


def settings(**changes: Any) -> TrainerConfig:
    """The quickstart's, changed; with one minibatch, so that a step is one pass over the batch."""
    quickstarts = load_config(QUICKSTART).trainer.model_dump()
    return TrainerConfig.model_validate(quickstarts | {"minibatches": 1} | changes)


def trainer(model: Path, batches: Sequence[list[Group]], **changes: Any) -> Callable[[], None]:
    """A function that trains an engine of its own on all batches."""
    engine = TrainingEngine(model, settings(**changes), seed=0)

    def train() -> None:
        for batch in batches:
            engine.step(batch, version=VERSION, temperature=1.0)

    return train


def tokens_of(batches: Sequence[list[Group]]) -> int:
    return sum(len(t) for batch in batches for group in batch for t in group.trajectories)


def interleaved(contestants: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contestant in each round, one after another in every round, after a round that warms up.

    CPU seconds of a single thread: what else runs on the machine lengthens them less than it does the time that passes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for name, run in [*contestants.items()] * (rounds + 1):
        started = time.process_time()
        run()
        seconds[name].append(time.process_time() - started)
    return {name: measured[1:] for name, measured in seconds.items()}
