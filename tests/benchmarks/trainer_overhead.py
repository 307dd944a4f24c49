"""The training engine's step against a bare PyTorch loop, and what its settings cost.

The bare loop is a plain transformers model and torch's AdamW, without DeepSpeed, on rows that were packed beforehand:
same rows, attention, log-probabilities, loss and clipping. The engine's step also flattens, plans and packs the batch,
and computes advantages and metrics. Then the engine's step is timed at each ZeRO stage (one rank), and with four
minibatches whose proximal policy is recomputed or interpolated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import areal  # noqa: F401  # before torch, as in a run, so that the same kernels multiply

# isort: split
import torch
from results import ratio, show, write
from steps import VERSION, arguments, interleaved, model_and_batches, settings, tokens_of, trainer
from transformers import AutoModelForCausalLM

from areal.samples.trajectory import Group
from areal.training.algorithms.algorithm import RowOutputs, tokens_in
from areal.training.algorithms.decoupled_ppo import decoupled_ppo
from areal.training.attention import PACKED_SDPA, attention_kwargs
from areal.training.head import linear_logprobs
from areal.training.packed import PackedRow
from areal.training.training_engine import TrainingEngine


def packed_rows(model: Path, batches: Sequence[list[Group]]) -> list[list[PackedRow]]:
    """The rows of each batch, as the engine makes them."""
    engine = TrainingEngine(model, settings(), seed=0)
    results: list[list[PackedRow]] = []
    train = engine._train_minibatch
    engine._train_minibatch = lambda rows, *args, **kwargs: (results.append(rows), train(rows, *args, **kwargs))
    for batch in batches:
        engine.step(batch, version=VERSION, temperature=1.0)
    return results


def bare_trainer(model: Path, batches: list[list[PackedRow]]) -> Callable[[], None]:
    """A function that trains on all batches without the engine."""
    config = settings()
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=PACKED_SDPA).train()
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )

    def train() -> None:
        for rows in batches:
            for row in rows:
                hidden = module.model(
                    input_ids=row.tokens,
                    position_ids=row.positions,
                    use_cache=False,
                    **attention_kwargs(row, PACKED_SDPA),
                ).last_hidden_state[0, row.predicts]
                head = module.lm_head.weight
                logp, entropy = linear_logprobs(hidden, head, None, row.distribution, row.targets, 1.0)
                row.columns["proximal"] = logp.detach()
                loss = decoupled_ppo(tokens_in(RowOutputs(logp, entropy), row), config).loss
                (loss * row.columns["weights"]).sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad()

    return train


def compare(options: argparse.Namespace, model: Path, batches: list[list[Group]]) -> None:
    minibatches = 2 if options.quick else 4
    contestants = {
        "bare loop": bare_trainer(model, packed_rows(model, batches)),
        "engine": trainer(model, batches),
        "engine, prefix_tree=false": trainer(model, batches, prefix_tree=False),
        **{f"engine, zero_stage={stage}": trainer(model, batches, zero_stage=stage) for stage in (1, 2, 3)},
        **{
            f"engine, {minibatches} minibatches, {kind}": trainer(
                model, batches, minibatches=minibatches, proximal=kind
            )
            for kind in ("recompute", "interpolate")
        },
    }
    seconds = interleaved(contestants, options.rounds)
    a_step = {name: median(figures) / len(batches) for name, figures in seconds.items()}
    share, spread = ratio(seconds["bare loop"], seconds["engine"])
    recompute, interpolate = (seconds[name] for name in contestants if "minibatches" in name)
    proximal, proximal_spread = ratio(recompute, interpolate)
    of_bare = partial(ratio, seconds["bare loop"])
    results = {
        "ratio": share,
        "spread": spread,
        "zero_seconds_per_step": [a_step["engine"], *(a_step[f"engine, zero_stage={stage}"] for stage in (1, 2, 3))],
        "proximal_seconds_per_step": {
            "recompute": median(recompute) / len(batches),
            "interpolate": median(interpolate) / len(batches),
        },
        "recompute_over_interpolate": proximal,
        "recompute_over_interpolate_spread": proximal_spread,
        "tokens": tokens_of(batches),
        "cpu_seconds": seconds,
    }
    tokens = tokens_of(batches)
    show(
        f"{len(batches)} steps of {tokens:,} tokens in all, {options.rounds} rounds, one core",
        ["", "CPU s a step (median)", "tokens / CPU s", "against the bare loop"],
        [[name, a_step[name], tokens / median(figures), of_bare(figures)[0]] for name, figures in seconds.items()],
        [
            f"engine / bare loop {share:.3f} ({spread[0]:.3f} to {spread[1]:.3f})",
            f"a step with {minibatches} minibatches takes {proximal:.2f} ({proximal_spread[0]:.2f} to "
            f"{proximal_spread[1]:.2f}) times as long with recomputed as with interpolated proximal log-probs",
        ],
    )
    write(results, options.json)


if __name__ == "__main__":
    options = arguments(__doc__)
    with model_and_batches(options, count=2) as (model, batches):
        compare(options, model, batches)
