"""Packed against padded training, and prefix trees against plain packing.

Each contestant makes whole training steps (forward, backward, clipping, AdamW) on the same batches of the quickstart:

  padded      a plain PyTorch loop on transformers: sequences sorted by length, padded on the right, with an attention
              mask; logits of completion tokens only; at the best of several micro-batch sizes
  unmasked    the same without a mask: padding on the right is never seen by causal attention
  packed      the training engine, trainer.prefix_tree=false
  tree        the training engine, trainer.prefix_tree=true

Tokens are those of the batch, without padding, however many were computed. Last, the trainer's own loop around the
engine (read the batch from the spool, train, publish the weights) is timed, and how much of it is the model itself.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import areal  # noqa: F401  # before torch, as in a run, so that the same kernels multiply

# isort: split
import torch
from results import ratio, show, write
from steps import VERSION, arguments, interleaved, model_and_batches, settings, tokens_of, trainer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from actors.trainer.ranks import Ranks
from areal.samples.trajectory import Group, Trajectory
from areal.storage.spool import Spool, SpoolPart
from areal.training.training_engine import TrainingEngine

SIZES = (4, 8, 16, 32)


def padded_trainer(model: Path, batches: Sequence[list[Group]], size: int, *, masked: bool) -> Callable[[], None]:
    """A function that trains on all batches, `size` sequences at a time."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    config = settings()
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.lr, betas=config.betas, eps=config.adam_eps)

    def train() -> None:
        for batch in batches:
            members = sorted((t for group in batch for t in group.trajectories), key=len, reverse=True)
            count = sum(int(t.sampled.sum()) for t in members)
            for start in range(0, len(members), size):
                (padded_loss(module, members[start : start + size], masked) / count).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad()

    return train


def padded_loss(module: torch.nn.Module, members: Sequence[Trajectory], masked: bool) -> torch.Tensor:
    """A policy gradient's: sum of log-prob times reward."""
    tokens = pad_sequence([torch.from_numpy(t.tokens).long() for t in members], batch_first=True)
    sampled = pad_sequence([torch.from_numpy(t.sampled) for t in members], batch_first=True)[:, 1:]
    rewards = torch.tensor([t.reward for t in members])[:, None].expand(-1, tokens.shape[1] - 1)
    lengths = torch.tensor([len(t) for t in members])[:, None]
    mask = (torch.arange(tokens.shape[1]) < lengths).long() if masked else None
    hidden = module.model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1][sampled]
    logps = torch.log_softmax(module.lm_head(hidden), -1).gather(1, tokens[:, 1:][sampled][:, None])[:, 0]
    return -(logps * rewards[sampled]).sum()


def padding(batches: Sequence[list[Group]], size: int) -> float:
    """Tokens that are padding, of all that the padded contestant computes."""
    computed = 0
    for batch in batches:
        lengths = sorted((len(t) for group in batch for t in group.trajectories), reverse=True)
        computed += sum(lengths[start] * len(lengths[start : start + size]) for start in range(0, len(lengths), size))
    return 1 - tokens_of(batches) / computed


def best_size(model: Path, batches: Sequence[list[Group]], *, masked: bool) -> int:
    seconds = interleaved(
        {str(size): padded_trainer(model, batches[:1], size, masked=masked) for size in SIZES}, rounds=2
    )
    return int(min(seconds, key=lambda size: min(seconds[size])))


@contextmanager
def model_seconds(module: torch.nn.Module) -> Iterator[list[float]]:
    """A list that gets the seconds of each forward and of each backward pass."""
    seconds: list[float] = []
    started: list[float] = []
    backward = torch.Tensor.backward

    def timed(*args: object, **kwargs: object) -> None:
        begun = time.perf_counter()
        backward(*args, **kwargs)
        seconds.append(time.perf_counter() - begun)

    hooks = [
        module.register_forward_pre_hook(lambda *_: started.append(time.perf_counter())),
        module.register_forward_hook(lambda *_: seconds.append(time.perf_counter() - started.pop())),
    ]
    torch.Tensor.backward = timed
    yield seconds
    torch.Tensor.backward = backward
    for hook in hooks:
        hook.remove()


async def shares(model: Path, batches: Sequence[list[Group]], rounds: int, folder: Path) -> list[float]:
    """For each step of the trainer's loop, how much of the time that passes is the model's forward and backward."""
    spool = Spool.open(folder / "spool.db")
    for batch in batches:
        for group in batch:
            samples = enumerate(group.trajectories)
            parts = {n: SpoolPart(replace(group, trajectories=(sample,)), sample.frame()) for n, sample in samples}
            spool.put_all(parts, len(parts))
    engine = TrainingEngine(model, settings(), seed=0)
    ranks = Ranks(engine, ThreadPoolExecutor(max_workers=1))
    results = []
    for version, batch in enumerate([*batches] * (rounds + 1)):
        with model_seconds(engine.model.module) as seconds:
            begun = time.perf_counter()
            groups = await asyncio.to_thread(spool.get, [group.id for group in batch])
            await ranks.step(groups, version=VERSION, temperature=1.0, mask_older_than=None)
            await ranks.snapshot(folder / "weights" / str(version))
            await ranks.finish_snapshot()
            await ranks.forget(folder / "weights" / str(version - 4))
            results.append(sum(seconds) / (time.perf_counter() - begun))
    ranks.close()
    spool.close()
    return results[len(batches) :]


def compare(options: argparse.Namespace, model: Path, batches: list[list[Group]]) -> None:
    sizes = {
        masked: SIZES[0] if options.quick else best_size(model, batches, masked=masked) for masked in (True, False)
    }
    seconds = interleaved(
        {
            "padded": padded_trainer(model, batches, sizes[True], masked=True),
            "unmasked": padded_trainer(model, batches, sizes[False], masked=False),
            "packed": trainer(model, batches, prefix_tree=False),
            "tree": trainer(model, batches, prefix_tree=True),
        },
        options.rounds,
    )
    tokens = tokens_of(batches)
    engine = TrainingEngine(model, settings(), seed=0)
    computed = sum(engine.step(batch, version=VERSION, temperature=1.0).tokens_computed for batch in batches)
    with tempfile.TemporaryDirectory() as folder:
        share = asyncio.run(shares(model, batches, options.rounds, Path(folder)))
    # The headline is what a user gets: the engine as it is configured by default.
    results = {
        "ratio": ratio(seconds["padded"], seconds["tree"])[0],
        "spread": ratio(seconds["padded"], seconds["tree"])[1],
        "ratio_without_tree": ratio(seconds["padded"], seconds["packed"])[0],
        "spread_without_tree": ratio(seconds["padded"], seconds["packed"])[1],
        "ratio_unmasked": ratio(seconds["unmasked"], seconds["tree"])[0],
        "spread_unmasked": ratio(seconds["unmasked"], seconds["tree"])[1],
        "padding": padding(batches, sizes[True]),
        "prefix_tree_ratio": ratio(seconds["packed"], seconds["tree"])[0],
        "prefix_tree_spread": ratio(seconds["packed"], seconds["tree"])[1],
        "prefix_tree_tokens_saved": 1 - computed / tokens,
        "forward_backward_share": median(share),
        "forward_backward_share_spread": [min(share), max(share)],
        "tokens": tokens,
        "sequences_at_once": {"padded": sizes[True], "unmasked": sizes[False]},
        "cpu_seconds": seconds,
    }
    show(
        f"{len(batches)} steps of {tokens:,} tokens in all, {options.rounds} rounds, one core",
        ["", "CPU s (median)", "tokens / CPU s", "against padded"],
        [
            [name, median(figures), tokens / median(figures), ratio(seconds["padded"], figures)[0]]
            for name, figures in seconds.items()
        ],
        [
            f"tree / padded {results['ratio']:.2f} {span(results['spread'])}, "
            f"tree / unmasked {results['ratio_unmasked']:.2f} {span(results['spread_unmasked'])}",
            f"packed / padded {results['ratio_without_tree']:.2f} {span(results['spread_without_tree'])}; "
            f"padding is {results['padding']:.1%} of what is computed {sizes[True]} sequences at a time",
            f"tree / packed {results['prefix_tree_ratio']:.2f} {span(results['prefix_tree_spread'])}; "
            f"tokens saved {results['prefix_tree_tokens_saved']:.1%}",
            f"model forward and backward in the trainer's loop: {results['forward_backward_share']:.1%} "
            f"{span(results['forward_backward_share_spread'])} of the time that passes",
        ],
    )
    write(results, options.json)


def span(bounds: Sequence[float]) -> str:
    return f"({bounds[0]:.2f} to {bounds[1]:.2f})"


if __name__ == "__main__":
    options = arguments(__doc__)
    with model_and_batches(options, count=3) as (model, batches):
        compare(options, model, batches)
