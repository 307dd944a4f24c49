"""Seconds of training until the quickstart reaches a held-out accuracy, by how stale its samples may be.

    python tests/benchmarks/time_to_accuracy.py --json time_to_accuracy.json

All runs start from the same model. Their checkpoints are evaluated after the run, as the quickstart's evaluator would
(the same held-out rows for all), so that evaluation takes none of its time. Seconds count from the beginning of the
first step, in which the first samples are generated. Between two checkpoints, accuracy is taken to rise evenly. The
headline `ratio` compares the times to the first of ACCURACIES at `max_staleness` 0 and 4.

The file is written after every run, and a run that is in it is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from results import kept_runs, ratio, show, write
from runs import QUICKSTART, run

from areal.config import Config, load_config
from areal.data import quickstart
from areal.data.addition import reward
from areal.data.rows import Row, prompt_text
from areal.data.sources import open_source
from areal.generation.engine import GenerationEngine
from areal.storage.run_folder import checkpoint_of
from areal.tokens import load_tokenizer
from areal.workflows.conversation import begin

ACCURACIES = (0.65, 0.72)
SETTINGS = {
    "0": ("max_staleness=0",),
    "4": ("max_staleness=4",),
    "1": ("max_staleness=1",),
    "4, run_ahead max": ("max_staleness=4", "run_ahead=max"),
    "2": ("max_staleness=2",),
}
CHECKPOINT_EVERY = 16

Curve = Sequence[tuple[float, float]]
"""Seconds and accuracy, at the beginning and at each checkpoint."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        runs = asyncio.run(measure(options, Path(folder)))
    show(
        f"held-out accuracy over {options.eval_size} rows, and seconds until it is reached (one per seed)",
        ["max_staleness", "samples/s", f"after {options.steps} steps", *(f"seconds to {a}" for a in ACCURACIES)],
        [row(setting, [one for one in runs if one["setting"] == setting]) for setting in SETTINGS],
        [],
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--rounds", type=int, default=3, help="seeds")
    parser.add_argument("--steps", type=int, default=5 * CHECKPOINT_EVERY)
    parser.add_argument("--eval-size", type=int, default=1024, help="held-out problems")
    parser.add_argument("--model", type=Path, help="the quickstart's model, if it is there already")
    return parser.parse_args()


async def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    model = options.model or quickstart.ensure(folder / "models")
    config = load_config(QUICKSTART, [f"model={model}", f"data.eval_size={options.eval_size}"])
    what = {"steps": options.steps, "eval_size": options.eval_size}
    runs = kept_runs(options.json, what)
    engine = await GenerationEngine.start(model, config.generator, version=0)
    solved = Heldout(engine, config)
    start = await solved.share()
    for seed in range(options.rounds):
        for setting, overrides in SETTINGS.items():
            key = {"setting": setting, "seed": seed}
            if any(key.items() <= known.items() for known in runs):
                continue
            curve = [(0.0, start)]
            words = [f"seed={seed}", f"steps={options.steps}", "data.eval_size=0", *overrides]
            words += [f"trainer.checkpoint_every={CHECKPOINT_EVERY}", f"trainer.checkpoints_kept={options.steps}"]
            done = await asyncio.to_thread(run, model, folder, "run", words, keep=True)
            began = done.steps[0]["time"] - done.steps[0]["step_seconds"]
            for version in range(CHECKPOINT_EVERY, options.steps + 1, CHECKPOINT_EVERY):
                await engine.load(checkpoint_of(folder / "run", version), version)
                curve.append((done.steps[version - 1]["time"] - began, await solved.share()))
            shutil.rmtree(folder / "run")
            one = key | {"samples_per_second": done.samples_per_second, "curve": curve}
            one["seconds"] = [seconds_to(wanted, curve) for wanted in ACCURACIES]
            runs.append(one)
            write({"setting": what, **headline(runs), "runs": runs}, options.json)
            print(one, flush=True)
    await engine.close()
    return runs


class Heldout:
    """The held-out rows, for the policy of `engine`."""

    def __init__(self, engine: GenerationEngine, config: Config) -> None:
        self._engine = engine
        self._tokenizer = load_tokenizer(config.model)
        source, own = open_source(config.data, config.seed), config.evaluator
        self._rows = [source.heldout(i) for i in range(config.data.eval_size)]
        self._sampling = config.sampling.model_copy(update={"temperature": own.temperature, "top_p": own.top_p})

    async def share(self) -> float:
        """The share of the rows that the policy solves."""
        return statistics.fmean(await asyncio.gather(*map(self._score, self._rows)))

    async def _score(self, row: Row) -> float:
        talk, messages = begin(self._tokenizer, row.prompt)
        chunks = self._engine.generate(f"{row.index}", talk.prompt(messages), self._sampling)
        tokens = [token async for chunk in chunks for token in chunk.tokens]
        completion = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return reward(prompt_text(row.prompt), completion, dict(row.fields))


def seconds_to(wanted: float, curve: Curve) -> float | None:
    """When the curve first reaches an accuracy; None: not in this run."""
    for (before, low), (after, high) in pairwise(curve):
        if high >= wanted > low:
            return before + (after - before) * (wanted - low) / (high - low)
    return None


def headline(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratio over the seeds of which both runs are there and get so far."""
    times = {(one["setting"], one["seed"]): one["seconds"][0] for one in runs}
    pairs = [(times["0", s], times["4", s]) for s in range(len(runs)) if times.get(("0", s)) and times.get(("4", s))]
    if not pairs:
        return {"ratio": None, "spread": None}
    middle, spread = ratio(*zip(*pairs, strict=True))
    return {"ratio": middle, "spread": spread}


def row(setting: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    def listed(values: list[float | None], digits: int) -> str:
        return ", ".join("-" if value is None else f"{value:.{digits}f}" for value in values)

    return [
        setting,
        listed([one["samples_per_second"] for one in runs], 0),
        listed([one["curve"][-1][1] for one in runs], 3),
        *(listed([one["seconds"][i] for one in runs], 0) for i in range(len(ACCURACIES))),
    ]


if __name__ == "__main__":
    main()
