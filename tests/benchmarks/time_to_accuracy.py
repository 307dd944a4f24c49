"""Seconds of training until a run reaches a held-out accuracy: with different bounds, and trained by TRL.

    python tests/benchmarks/time_to_accuracy.py --json time_to_accuracy.json
    python tests/benchmarks/time_to_accuracy.py --json smollm2.json --config configs/smollm2.yaml --model FOLDER \
      --accuracies 0.5,0.6 --steps 40 --checkpoint-every 8 --only "ours,TRL async"

The run is the quickstart, or that of another configuration with one reward function.

All runs start from the same model. Their checkpoints are evaluated after the run, as the quickstart's evaluator would
(the same held-out rows for all), so that evaluation takes none of its time. Seconds count from the end of the first
step, so that start-up is left out. Between two checkpoints, accuracy is taken to rise evenly. `vs_trl.py` describes
TRL's modes. Without TRL they are left out.

The headline `ratio` compares the times to the first accuracy at `max_staleness` 0 and 4; `ratio_trl` those of TRL's
asynchronous trainer and ours.

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
from runs import QUICKSTART, SMALL, reward_of, run, score

from areal.config import Config, load_config
from areal.data import quickstart
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.generation.generation_engine import GenerationEngine
from areal.samples.tokenizer import load_tokenizer
from areal.storage.run_folder import checkpoint_of
from areal.workflows.conversation import begin

AS_CONFIGURED = "ours"
OURS = {
    AS_CONFIGURED: (),
    "max_staleness 0": ("max_staleness=0",),
    "max_staleness 1": ("max_staleness=1",),
    "max_staleness 2": ("max_staleness=2",),
    "max_staleness 4": ("max_staleness=4",),
    "max_staleness 4, run_ahead max": ("max_staleness=4", "run_ahead=max"),
}
TRL = {"TRL async": "async", "TRL async-unbiased": "async-unbiased", "TRL colocate": "colocate"}
# In the order of the runs: what a ratio compares follows closely, since the speed of a machine drifts.
CONTESTANTS = (
    "TRL async",
    "max_staleness 4",
    "max_staleness 0",
    "TRL async-unbiased",
    "max_staleness 2",
    "max_staleness 1",
    "max_staleness 4, run_ahead max",
    "TRL colocate",
)
TRL_ASYNC = CONTESTANTS[0]

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
        ["", "samples/s", "GB", f"after {options.steps} steps", *(f"seconds to {a}" for a in options.accuracies)],
        [
            row(name, runs_of_contestant)
            for name in (*OURS, *TRL)
            if (runs_of_contestant := [item for item in runs if item["contestant"] == name])
        ],
        [],
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--rounds", type=int, default=3, help="seeds")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--checkpoint-every", type=int, default=16, metavar="STEPS")
    parser.add_argument("--eval-size", type=int, default=1024, help="held-out problems")
    parser.add_argument("--accuracies", type=numbers, default=(0.65, 0.72), help="separated by commas")
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--model", type=Path, help="a folder; by default the quickstart's model")
    parser.add_argument(
        "--only",
        type=lambda words: words.split(","),
        default=CONTESTANTS,
        metavar="NAMES",
        help=f"of {', '.join(CONTESTANTS)}, and {AS_CONFIGURED}: the configuration as it stands",
    )
    parser.add_argument("--quick", action="store_true", help="one small run with each bound, no TRL: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.checkpoint_every, options.eval_size = 1, 4, 2, 8
        options.only = [name for name in options.only if name in OURS]
    return options


def numbers(words: str) -> tuple[float, ...]:
    return tuple(map(float, words.split(",")))


async def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    options.model = model = (options.model or quickstart.ensure(folder / "models")).resolve()
    config = load_config(options.config, [f"model={model}", f"data.eval_size={options.eval_size}"])
    what = {
        "config": options.config.name,
        "steps": options.steps,
        "checkpoint_every": options.checkpoint_every,
        "eval_size": options.eval_size,
        "accuracies": [*options.accuracies],
    }
    runs = kept_runs(options.json, what)
    engine = await GenerationEngine.start(model, config.generator, version=0)
    solved = Heldout(engine, config)
    start = await solved.share()
    measured = {(item["contestant"], item["seed"]) for item in runs}
    names = [name for name in options.only if name in OURS or importlib.util.find_spec("trl")]
    for seed, name in ((s, n) for s in range(options.rounds) for n in names if (n, s) not in measured):
        train = ours if name in OURS else trls
        measures, checkpoints = await asyncio.to_thread(train, name, seed, options, folder)
        curve = [(0.0, start)]
        for version, (seconds, checkpoint) in checkpoints.items():
            await engine.load(checkpoint, version)
            curve.append((seconds, await solved.share()))
        shutil.rmtree(folder / "run")
        reached = [seconds_to(expected, curve) for expected in options.accuracies]
        item = {"contestant": name, "seed": seed} | measures | {"curve": curve, "seconds": reached}
        runs.append(item)
        write({"setting": what, **headlines(runs), "runs": runs}, options.json)
        print(item, flush=True)
    await engine.close()
    return runs


def ours(name: str, seed: int, options: argparse.Namespace, folder: Path) -> tuple[dict[str, float], Checkpoints]:
    """Trains. Returns samples per second and memory, and the checkpoints, which are in `folder`/run."""
    words = [str(options.config), f"seed={seed}", f"steps={options.steps}", "data.eval_size=0", *OURS[name]]
    words += SMALL if options.quick else ()
    words += [f"trainer.checkpoint_every={options.checkpoint_every}", f"trainer.checkpoints_kept={options.steps}"]
    outcome = run(options.model, folder, "run", words, keep=True)
    began = outcome.steps[0]["time"]
    return {"samples_per_second": outcome.samples_per_second, "memory": outcome.memory}, {
        version: (outcome.steps[version - 1]["time"] - began, checkpoint_of(folder / "run", version))
        for version in versions(options)
    }


def trls(name: str, seed: int, options: argparse.Namespace, folder: Path) -> tuple[dict[str, float], Checkpoints]:
    """The same, by TRL."""
    out = folder / "run"
    memory = vs_trl.start(
        TRL[name],
        seed,
        out,
        options.model,
        "--config",
        options.config,
        "--steps",
        options.steps,
        "--eval-size",
        0,
        "--checkpoint-every",
        options.checkpoint_every,
    )
    _, *ends = (record["time"] for record in vs_trl.records(out / "steps.jsonl"))
    minibatches: int = load_config(options.config).trainer.minibatches
    return {"samples_per_second": vs_trl.trls(out)["samples_per_second"], "memory": memory}, {
        version: (ends[version - 1] - ends[0], out / f"checkpoint-{version * minibatches}")
        for version in versions(options)
    }


def versions(options: argparse.Namespace) -> range:
    return range(options.checkpoint_every, options.steps + 1, options.checkpoint_every)


class Heldout:
    """The held-out rows, for the policy of `engine`."""

    def __init__(self, engine: GenerationEngine, config: Config) -> None:
        self._engine = engine
        self._tokenizer = load_tokenizer(config.model)
        source, evaluator = open_source(config.data, config.seed), config.evaluator
        self._rows = [source.heldout(i) for i in range(config.data.eval_size)]
        self._reward = reward_of(config)
        self._sampling = config.sampling.model_copy(
            update={"temperature": evaluator.temperature, "top_p": evaluator.top_p}
        )

    async def share(self) -> float:
        """The share of the rows that the policy solves."""
        return statistics.fmean(await asyncio.gather(*map(self._score, self._rows)))

    async def _score(self, row: Row) -> float:
        talk, messages = begin(self._tokenizer, row.prompt)
        chunks = self._engine.generate(f"{row.index}", talk.prompt(messages), self._sampling)
        tokens = [token async for chunk in chunks for token in chunk.tokens]
        completion = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return score(self._reward, row.fields, row.prompt, completion)


def seconds_to(accuracy: float, curve: Curve) -> float | None:
    """When the curve first reaches an accuracy; None: not in this run."""
    for (earlier, low), (later, high) in pairwise(curve):
        if high >= accuracy > low:
            return earlier + (later - earlier) * (accuracy - low) / (high - low)
    return None


def headlines(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratios over the seeds of which both runs are there and get so far."""
    seconds = {(item["contestant"], item["seed"]): item["seconds"][0] for item in runs}
    results: dict[str, Any] = {}
    for suffix, slower, faster in (
        ("", "max_staleness 0", "max_staleness 4"),
        ("_trl", TRL_ASYNC, "max_staleness 4"),
        ("_trl", TRL_ASYNC, AS_CONFIGURED),
    ):
        pairs = [(seconds.get((slower, s)), seconds.get((faster, s))) for s in {s for _, s in seconds}]
        if pairs := [(above, below) for above, below in pairs if above and below]:
            results[f"ratio{suffix}"], results[f"spread{suffix}"] = ratio(*zip(*pairs, strict=True))
    return results


def row(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    def listed(values: list[float | None], digits: int) -> str:
        return ", ".join("-" if value is None else f"{value:.{digits}f}" for value in values)

    return [
        name,
        listed([item["samples_per_second"] for item in runs], 1),
        listed([item["memory"] for item in runs], 1),
        listed([item["curve"][-1][1] for item in runs], 3),
        *(listed([item["seconds"][i] for item in runs], 0) for i in range(len(runs[0]["seconds"]))),
    ]


if __name__ == "__main__":
    main()
