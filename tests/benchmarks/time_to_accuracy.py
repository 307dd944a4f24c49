"""Seconds of training until the quickstart reaches a held-out accuracy: with different bounds, and trained by TRL.

    python tests/benchmarks/time_to_accuracy.py --json time_to_accuracy.json

All runs start from the same model. Their checkpoints are evaluated after the run, as the quickstart's evaluator would
(the same held-out rows for all), so that evaluation takes none of its time. Seconds count from the end of the first
step, so that start-up is left out. Between two checkpoints, accuracy is taken to rise evenly. `vs_trl.py` describes
TRL's modes. Without TRL they are left out.

The headline `ratio` compares the times to the first of ACCURACIES at `max_staleness` 0 and 4; `ratio_trl` those of
TRL's asynchronous trainer and ours.

The file is written after every run, and a run that is in it is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import vs_trl
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
OURS = {
    "max_staleness 0": ("max_staleness=0",),
    "max_staleness 1": ("max_staleness=1",),
    "max_staleness 2": ("max_staleness=2",),
    "max_staleness 4": ("max_staleness=4",),
    "max_staleness 4, run_ahead max": ("max_staleness=4", "run_ahead=max"),
}
TRL = {
    "TRL async": "async",
    "TRL async-unbiased": "async-unbiased",
    "TRL colocate": "colocate",
}
# In the order of the runs: what a ratio compares follows closely, since the speed of a machine drifts.
CONTESTANTS = (
    "TRL async", "max_staleness 4", "max_staleness 0", "TRL async-unbiased", "max_staleness 2", "max_staleness 1",
    "max_staleness 4, run_ahead max", "TRL colocate",
)  # fmt: skip
CHECKPOINT_EVERY = 16

Curve = Sequence[tuple[float, float]]
"""Seconds and accuracy, of the model before training (taken for that after the first step) and of each checkpoint."""
Checkpoints = dict[int, tuple[float, Path]]
"""By version: seconds since the end of the first step, and the folder."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        runs = asyncio.run(measure(options, Path(folder)))
    show(
        f"held-out accuracy over {options.eval_size} rows, and seconds until it is reached (one per seed)",
        ["", "samples/s", f"after {options.steps} steps", *(f"seconds to {a}" for a in ACCURACIES)],
        [row(name, [one for one in runs if one["contestant"] == name]) for name in (*OURS, *TRL)],
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
    known = {(one["contestant"], one["seed"]) for one in runs}
    names = [name for name in CONTESTANTS if name in OURS or importlib.util.find_spec("trl")]
    for seed, name in ((s, n) for s in range(options.rounds) for n in names if (n, s) not in known):
        train = ours if name in OURS else trls
        speed, checkpoints = await asyncio.to_thread(train, name, seed, options.steps, model, folder)
        curve = [(0.0, start)]
        for version, (seconds, checkpoint) in checkpoints.items():
            await engine.load(checkpoint, version)
            curve.append((seconds, await solved.share()))
        shutil.rmtree(folder / "run")
        one = {"contestant": name, "seed": seed, "samples_per_second": speed, "curve": curve}
        one["seconds"] = [seconds_to(wanted, curve) for wanted in ACCURACIES]
        runs.append(one)
        write({"setting": what, **headlines(runs), "runs": runs}, options.json)
        print(one, flush=True)
    await engine.close()
    return runs


def ours(name: str, seed: int, steps: int, model: Path, folder: Path) -> tuple[float, Checkpoints]:
    """Trains. Returns samples per second, and the checkpoints, which are in `folder`/run."""
    words = [f"seed={seed}", f"steps={steps}", "data.eval_size=0", *OURS[name]]
    words += [f"trainer.checkpoint_every={CHECKPOINT_EVERY}", f"trainer.checkpoints_kept={steps}"]
    done = run(model, folder, "run", words, keep=True)
    began = done.steps[0]["time"]
    return done.samples_per_second, {
        version: (done.steps[version - 1]["time"] - began, checkpoint_of(folder / "run", version))
        for version in versions(steps)
    }


def trls(name: str, seed: int, steps: int, model: Path, folder: Path) -> tuple[float, Checkpoints]:
    """The same, by TRL."""
    out = folder / "run"
    vs_trl.start(
        TRL[name], seed, out, model, "--steps", steps, "--eval-size", 0, "--checkpoint-every", CHECKPOINT_EVERY
    )
    _, *ends = (record["time"] for record in vs_trl.records(out / "steps.jsonl"))
    minibatches = load_config(QUICKSTART).trainer.minibatches
    return vs_trl.trls(out)["samples_per_second"], {
        version: (ends[version - 1] - ends[0], out / f"checkpoint-{version * minibatches}")
        for version in versions(steps)
    }


def versions(steps: int) -> range:
    return range(CHECKPOINT_EVERY, steps + 1, CHECKPOINT_EVERY)


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


def headlines(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratios over the seeds of which both runs are there and get so far."""
    seconds = {(one["contestant"], one["seed"]): one["seconds"][0] for one in runs}
    found: dict[str, Any] = {}
    for suffix, slower in {"": "max_staleness 0", "_trl": "TRL async"}.items():
        pairs = [(seconds.get((slower, s)), seconds.get(("max_staleness 4", s))) for s in {s for _, s in seconds}]
        if pairs := [(above, below) for above, below in pairs if above and below]:
            found[f"ratio{suffix}"], found[f"spread{suffix}"] = ratio(*zip(*pairs, strict=True))
    return found


def row(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    def listed(values: list[float | None], digits: int) -> str:
        return ", ".join("-" if value is None else f"{value:.{digits}f}" for value in values)

    return [
        name,
        listed([one["samples_per_second"] for one in runs], 0),
        listed([one["curve"][-1][1] for one in runs], 3),
        *(listed([one["seconds"][i] for one in runs], 0) for i in range(len(ACCURACIES))),
    ]


if __name__ == "__main__":
    main()
