"""Tokens generated per second through the actors, against bare vLLM given the same requests.

    python tests/benchmarks/generator_overhead.py --json generator_overhead.json

The system is the real one, in processes of its own: master, rollout manager, reward, generator, and a trainer that
stores groups and trains nothing. Bare vLLM is its `AsyncLLM` (one task a request) and its offline `LLMEngine` (what
`LLM.generate` drives), without tokenizer and text, told of finished sequences alone: the baseline is the faster one.
Engine settings, prompts, sampling and concurrency are the same, and so are the cores. Rates are taken between the times
at which a tenth and nine tenths of the groups are finished, so that neither start nor tail counts. Every round runs all
of them, one after the other, in fresh processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from results import ratio, show, write
from runs import QUICKSTART, ROOT, find_free_port

from areal.config import Config, load_config
from areal.data import quickstart
from areal.data.sources import open_source
from areal.samples.tokenizer import load_tokenizer
from areal.workflows.conversation import begin
from protocols.security import make_keys

WINDOW = (0.1, 0.9)

Finished = Callable[[int, int], None]
"""Told of a sequence that is finished: its group's number, and its sampled tokens."""


class Clock:
    """When which group was finished."""

    def __init__(self, group_size: int) -> None:
        self._missing = Counter[int]()
        self._tokens = Counter[int]()
        self._group_size = group_size
        self._finished: list[tuple[float, int]] = []

    def __call__(self, group: int, tokens: int) -> None:
        self._missing[group] += 1
        self._tokens[group] += tokens
        if self._missing[group] == self._group_size:
            self._finished.append((time.perf_counter(), self._tokens[group]))

    def rate(self) -> float:
        """Tokens a second within WINDOW."""
        first, last = (int(share * (len(self._finished) - 1)) for share in WINDOW)
        tokens = sum(tokens for _, tokens in self._finished[first + 1 : last + 1])
        return tokens / (self._finished[last][0] - self._finished[first][0])


def requests(config: Config) -> Iterator[tuple[int, list[int]]]:
    """Group and prompt of every sequence, in the order in which a manager begins them."""
    source = open_source(config.data, config.seed)
    tokenizer = load_tokenizer(config.model)
    for group in range(config.batch_size):
        talk, messages = begin(tokenizer, source.row(group).prompt)
        prompt = talk.prompt(messages)
        for _ in range(config.group_size):
            yield group, prompt


# --- the contestants, each in a process of its own


def system(config: Config, finished: Finished) -> None:
    roles = [word for role in ("generator", "rollout_manager", "reward") for word in ("--role", role)]
    file = config.run_dir / "config.json"  # which is YAML, too
    file.write_text(config.model_dump_json())
    started = []
    try:
        for arguments in (["--role", "master", "--config", str(file)], [*roles, "--master", config.master.address]):
            command = [sys.executable, str(ROOT / "run.py"), *arguments]
            with (config.run_dir / f"{len(started)}.txt").open("w") as output:
                started.append(subprocess.Popen(command, stdout=output, stderr=output))
        asyncio.run(store_all(config, finished))
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


async def store_all(config: Config, finished: Finished) -> None:
    """Be the trainer until there is a batch."""
    from actors.runtime.actor import Ending
    from actors.runtime.bound_addresses import new_bus, open_network
    from actors.runtime.membership import Membership
    from actors.trainer.trainer import Trainer
    from areal.storage.spool import Spool, SpoolPart, StoredGroup

    class NotingSpool(Spool):
        def put_all(self, parts: Mapping[int, SpoolPart], size: int) -> StoredGroup:
            for part, _ in parts.values():
                for trajectory in part.trajectories:
                    finished(part.prompt_index, int(trajectory.sampled.sum()))
            return super().put_all(parts, size)

    class IdleLearner:
        work_done = 0
        vocab_size = 1 << 31

        async def step(self, *_: Any, **__: Any) -> None:
            trainer.stop(Ending(True, "all groups are there"))
            await asyncio.Event().wait()  # it is cancelled

        def close(self) -> None:
            pass

    async def start_learner(*_: Any) -> Any:
        return IdleLearner()

    bus = new_bus("trainer/?", open_network("127.0.0.1"))
    trainer = Membership(Trainer, bus, config.master.address, start_learner=start_learner, open_spool=NotingSpool.open)
    ending = await trainer.run()
    if not ending.ok:
        sys.exit(ending.reason)


def engine_arguments(config: Config) -> tuple[Any, Any]:
    """Those of the generator, and the sampling parameters."""
    from areal.generation import engine_start

    engine_start.set_environment(config.generator)
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind

    arguments = engine_start.engine_arguments(
        Path(config.model), config.generator, engine_start.EngineUse(config.seed), current_platform.is_cpu()
    )
    stop = arguments.create_engine_config().model_config.try_get_generation_config().get("eos_token_id")
    sampling = SamplingParams(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        max_tokens=config.sampling.max_new_tokens,
        logprobs=0,
        stop_token_ids=[stop] if isinstance(stop, int) else stop,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return arguments, sampling


def async_llm(config: Config, finished: Finished) -> None:
    arguments, sampling = engine_arguments(config)

    async def run() -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(arguments)

        async def generate(number: int, group: int, prompt: list[int]) -> None:
            async for output in engine.generate({"prompt_token_ids": prompt}, sampling, f"{number}"):
                if output.finished:
                    finished(group, len(output.outputs[0].token_ids))

        async with asyncio.TaskGroup() as tasks:
            for number, (group, prompt) in enumerate(requests(config)):
                tasks.create_task(generate(number, group, prompt))
        engine.shutdown()

    asyncio.run(run())


def offline(config: Config, finished: Finished) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments, sampling = engine_arguments(config)
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=True)
    groups = {}
    for number, (group, prompt) in enumerate(requests(config)):
        groups[f"{number}"] = group
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished(groups[output.request_id], len(output.outputs[0].token_ids))
    engine.engine_core.shutdown()


CONTESTANTS = {"system": system, "AsyncLLM": async_llm, "offline": offline}


# --- the benchmark


def main() -> None:
    options = parse()
    if options.contestant:
        config = Config.model_validate_json(sys.stdin.read())
        clock = Clock(config.group_size)
        CONTESTANTS[options.contestant](config, clock)
        options.json.write_text(json.dumps(clock.rate()))
        return
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or quickstart.ensure(Path(folder) / "models")
        for name in [*CONTESTANTS] * options.rounds:
            rates[name].append(measure(name, settings(options, model, Path(folder))))
    baseline = max(("AsyncLLM", "offline"), key=lambda name: median(rates[name]))
    share, spread = ratio(rates["system"], rates[baseline])
    show(
        f"{options.groups} groups, {options.rounds} rounds",
        ["", "tokens / s (median)", "least", "greatest"],
        [[name, median(results), min(results), max(results)] for name, results in rates.items()],
        [f"system / {baseline} {share:.3f} ({spread[0]:.3f} to {spread[1]:.3f})"],
    )
    results = {"ratio": share, "spread": spread, "rounds": options.rounds, "baseline": baseline}
    write(results | {"tokens_per_second": rates}, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--model", type=Path, help="the quickstart's model, if it is there already")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=256, help="prompts, with 8 samples each")
    parser.add_argument("--quick", action="store_true", help="one round of few groups: does it run?")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.quick:
        options.rounds, options.groups = 1, 16
    return options


def settings(options: argparse.Namespace, model: Path, folder: Path) -> Config:
    """The quickstart's, with a batch of all groups."""
    return load_config(
        QUICKSTART,
        [
            f"run_dir={folder}",
            f"model={model.resolve()}",
            f"master.address=tcp://127.0.0.1:{find_free_port()}",
            f"batch_size={options.groups}",
            "steps=1",
            "max_staleness=0",
            "run_ahead=max",
            "data.eval_size=0",
        ],
    )


def measure(name: str, config: Config) -> float:
    file = config.run_dir / "rate.json"
    command = [sys.executable, __file__, "--contestant", name, "--json", str(file)]
    keys = config.run_dir / "keys"
    if not keys.exists():
        make_keys(keys)
    environment = os.environ | {"AREAL_KEYS": str(keys)}
    subprocess.run(command, input=config.model_dump_json(), text=True, check=True, env=environment)
    return json.loads(file.read_text())


if __name__ == "__main__":
    main()
