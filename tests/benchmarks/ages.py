"""What a step on a batch of an exact age does for the expected reward, by objective.

The quickstart's model is trained for AGES[-1] steps, each on a batch of its own, by decoupled PPO. The batches that
earlier versions would sample for other prompts are recorded. Then each objective makes one optimizer step from the last
version on such a batch, all from the same weights and moments of Adam, with the same rate, advantages (reward less
group mean) and mean over tokens. On fresh samples of the last version, weighted by the ratio of their sequences, the
step's gain is estimated: the change of the expected reward. Samples are the same for all objectives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from contextlib import aclosing
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import areal  # noqa: F401  # before torch, as in a run

# isort: split
import numpy as np
from results import show

from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.config.trainer_section import TrainerConfig
from areal.data import addition, quickstart
from areal.generation.generation_engine import GenerationEngine
from areal.samples.table import TokenTable, unsampled
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import Group, Trajectory
from areal.training.algorithms.algorithm import policy_gradient
from areal.training.algorithms.assembly import algorithm_of
from areal.training.training_engine import TrainingEngine

AGES = (1, 4, 8)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "decoupled_ppo": {},
    "interpolate": {"objective": "decoupled_ppo", "proximal": "interpolate"},
    "vespo": {},
    "flash_reinforce": {},
    "sao": {},
    "score_centring": {},
}
SAME = {"minibatches": 1, "advantage_mean": "group", "advantage_std": "none", "loss_mean": "token"}
WORDS = 64  # the model has fewer
LARGEST_RATIO = 10.0


def settings(rate: float, **changes: Any) -> TrainerConfig:
    base = {"lr": rate, "dtype": "float32", "weight_decay": 0.0, "max_tokens_per_microbatch": 2048}
    return TrainerConfig(**base | SAME | changes)


class Sampler:
    """Samples of the engine's version, with rewards; each call takes other prompts."""

    def __init__(self, engine: GenerationEngine, model: Path, seed: int) -> None:
        self._engine, self._tokenizer, self._seed, self._next = engine, load_tokenizer(str(model)), seed, 0

    async def batch(self, groups: int, size: int) -> list[Group]:
        rows = [addition.make_row(self._seed, self._next + number) for number in range(groups)]
        self._next += groups
        samples = await asyncio.gather(*(self._sample(row, n, k) for n, row in enumerate(rows) for k in range(size)))
        return [Group(str(n), n, tuple(samples[n * size : (n + 1) * size])) for n in range(groups)]

    async def _sample(self, row: dict[str, str], number: int, place: int) -> Trajectory:
        prompt = self._tokenizer.encode(row["prompt"])
        table = TokenTable()
        table.append(unsampled(prompt))
        sampling, name = SamplingConfig(max_new_tokens=210), f"{self._next}-{number}-{place}"
        async with aclosing(self._engine.generate(name, prompt, sampling)) as parts:
            async for part in parts:
                table.append(part)
        text = self._tokenizer.decode(table.tokens[len(prompt) :].tolist(), skip_special_tokens=True)
        return Trajectory(**table.columns, reward=addition.reward(row["prompt"], text, row), finish="stop")


def gain(learner: TrainingEngine, fresh: list[Group], before: np.ndarray) -> float:
    """The estimated change of the expected reward since the fresh samples' log-probs were `before`."""
    moved, start, changes = learner.logprobs(fresh, temperature=1.0) - before, 0, []
    for group in fresh:
        base = mean(sample.reward for sample in group.trajectories)
        for sample in group.trajectories:
            ratio = min(float(np.exp(moved[start : start + len(sample)].sum(dtype=np.float64))), LARGEST_RATIO)
            changes.append((sample.reward - base) * ratio)
            start += len(sample)
    return mean(changes)


async def measure(model: Path, seed: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    config = GeneratorConfig(dtype="float32", max_concurrent_rollouts=64, kv_cache_gib=0.25)
    kept = {"kept_words": WORDS, "kept_logprobs": True}
    engine = await GenerationEngine.start(model, config, version=0, seed=seed, **kept)
    learner = TrainingEngine(model, settings(options.rate, minibatches=4), seed=seed)
    sampler, recorded = Sampler(engine, model, seed), {}
    for version in range(AGES[-1]):
        if AGES[-1] - version in AGES:
            recorded[AGES[-1] - version] = [await sampler.batch(options.groups, 8) for _ in range(options.batches)]
        learner.step(await sampler.batch(options.groups, 8), version=version, temperature=1.0)
        await engine.load(learner.storage.publish(folder / f"{version}"), version + 1)
    fresh = await sampler.batch(3 * options.groups, 8)
    await engine.close()
    saved, before, results = learner.storage.save(folder / "last"), learner.logprobs(fresh, temperature=1.0), []
    for age, batches in recorded.items():
        for name, changes in OBJECTIVES.items():
            learner.config = settings(options.rate, **{"objective": name} | changes)
            learner.algorithm = algorithm_of(policy_gradient(learner.config), learner.config, learner.model.vocab_size)
            for batch in batches:
                learner.storage.load(saved)
                step = learner.step(batch, version=AGES[-1], temperature=1.0)
                row = {"seed": seed, "age": age, "objective": name, "gain": gain(learner, fresh, before)}
                results.append(row | {"clipped": step.clip_fraction, "effective": step.effective_sample_size})
    learner.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the quickstart's model (default: it is built, 80 s on two cores)")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: the table of --json alone")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--groups", type=int, default=16, help="of a batch, each of 8 samples")
    parser.add_argument("--batches", type=int, default=1, help="recorded for each age and seed")
    parser.add_argument("--json", type=Path, help="results are added to this file")
    parser.add_argument("--quick", action="store_true", help="two seeds of the smallest size: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.groups = [0, 1], 2
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    with tempfile.TemporaryDirectory() as parent:
        model = options.model or quickstart.ensure(Path(parent))
        for seed in options.seeds:
            results += asyncio.run(measure(model, seed, options, Path(parent) / f"{seed}"))
            if options.json:
                options.json.write_text(json.dumps(results))
    table(results)


def table(results: list[dict[str, Any]]) -> None:
    """The gains of the first objective, and how much more the others gain on the same samples."""
    seeds, (first, *later), rows = sorted({result["seed"] for result in results}), OBJECTIVES, []

    def of(name: str, age: int, value: str) -> list[float]:
        chosen = [r for r in results if (r["objective"], r["age"]) == (name, age)]
        return [mean(r[value] for r in chosen if r["seed"] == seed) for seed in seeds]

    for name in OBJECTIVES:
        cells = []
        for age in AGES:
            gains = of(name, age, "gain")
            if name in later:
                gains = [gain - base for gain, base in zip(gains, of(first, age, "gain"), strict=True)]
            error = stdev(gains) / len(gains) ** 0.5
            cells.append(f"{1000 * mean(gains):+.1f} +- {1000 * error:.1f} ({mean(of(name, age, 'clipped')):.2f})")
        rows.append((name, *cells))
    remarks = [f"Rows below the first: more than {first} on the same samples. Errors are standard errors over seeds."]
    show("Gain of a step, in 0.001 of reward (clipped)", ("objective", *(f"age {age}" for age in AGES)), rows, remarks)


if __name__ == "__main__":
    main()
