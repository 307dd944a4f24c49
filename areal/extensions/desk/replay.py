"""Replays a run: trains again on the run's rollouts, in the same order and batches, without generators.

A replay without changes gives the same weights, on CPUs in fp32 to the bit. A *variant* has changed trainer settings,
and shows off-policy how the settings learn from the data, since the variant did not sample it. Under torchrun every
rank reads the same files, and only rank 0 prints and writes.
"""

import gc
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from dataclasses import replace as altered
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import structlog
from rich.console import Console
from rich.table import Table

from areal.base.command_line import output as terminal
from areal.base.errors import UserError
from areal.base.processes import die_with_parent, torchrun
from areal.config import Config, dump_config, overridden, validated
from areal.config.grid import name_of, points, read_grid
from areal.config.named_objectives import OBJECTIVES
from areal.config.overrides import parsed
from areal.config.settings import differences, is_under
from areal.config.trainer_section import GuardConfig
from areal.devices import set_allocator, visible_devices
from areal.extensions.desk.metric_condition import Condition
from areal.extensions.desk.rollout_queries import Rollouts, sql_condition
from areal.models import is_wrapper
from areal.samples.trajectory import Group
from areal.staleness.ledger_state import oldest_in_loss
from areal.storage.disk import replace
from areal.storage.record import Record
from areal.storage.records import line_of
from areal.storage.run_files import CONFIG, METRICS, SUMMARY
from areal.training.guard import Guard
from areal.weights.chunks import Manifest
from areal.weights.folders import remove_folder

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

    from areal.training.training_engine import TrainingEngine

FOLDER = "replays"
UNCHANGED = "unchanged"
# Below this share of effective samples, fewer than two of a group of eight count: nothing is compared within the group.
# The share is a mean over WINDOW steps, since in a single step one sample with a large weight may decide.
WORTHLESS = 0.25
WINDOW = 10
FINAL_SHARE = 10
"""The figures of a replay are means over its last tenth of steps."""
# Unlike the guard of a run, this guard stops a variant only if its numbers are no longer finite.
_NUMBERS_ONLY = GuardConfig(
    effective_sample_size=0, entropy=0, logprob_gap=sys.float_info.max, advantage_max=sys.float_info.max
)
_LINES = 10


@dataclass(frozen=True)
class Replay:
    """A replay of the steps `first` + 1 to `last` of a run, with the settings `config`.

    changes: the changed settings, by key. off_policy: whether data or settings differ from the run's. all_steps:
    whether the steps are all steps of the run. output: folder for the trained model, or None. without: step and id of
    each group left out; a step without any group left is not trained. until: ends the replay with the first step that
    meets the condition.
    """

    run: Record
    config: Config
    changes: Mapping[str, Any]
    off_policy: bool
    first: int
    last: int
    all_steps: bool
    output: Path | None = None
    without: frozenset[tuple[int, str]] = frozenset()
    until: Condition | None = None

    @property
    def name(self) -> str:
        steps = {} if self.all_steps else {"steps": f"{self.first}-{self.last}"}
        without = {"without": f"{len(self.without)}-groups-{_digest(self.without)}"} if self.without else {}
        until = {"until": str(self.until)} if self.until else {}
        return name_of({**self.changes, **steps, **without, **until}) or UNCHANGED

    @property
    def folder(self) -> Path:
        return self.run.folder / FOLDER / self.name

    @property
    def checkpoint(self) -> Path:
        """The checkpoint at the beginning, unless `first` is 0."""
        return self.run.checkpoints.of(self.first)

    def batches(self) -> Iterator[tuple[int, list[Group]]]:
        batches = self.run.rollouts.batches(self.first + 1)
        for step, batch in itertools.takewhile(lambda pair: pair[0] <= self.last, batches):
            if remaining := [group for group in batch if (step, group.id) not in self.without]:
                yield step, remaining

    def config_at(self, step: int) -> Config:
        """Return the settings for a step: the run's settings at that step, with the changes of the replay."""
        settings = {
            key: value for key, value in self.run.configuration.changed_after(step).items() if key not in self.changes
        }
        if not settings:
            return self.config
        values = overridden(self.config.model_dump(mode="json"), settings=settings)
        config: Config = validated(values, self.run.folder / CONFIG)
        return config

    def what_matters(self) -> str:
        """Return the settings with an effect, as JSON. Two replays with equal texts learn the same."""
        from areal.training.algorithms.objectives import objective_of

        trainer = self.config.trainer
        settings = trainer.model_dump(mode="json")
        if trainer.objective in OBJECTIVES:
            settings["objective"] = objective_of(trainer.objective).__name__
            idle = {
                ("kl_estimator", "kl_in", "reference"): not trainer.kl_coef,
                ("loss_tokens",): trainer.loss_mean != "constant",
                ("behaviour_weight_bounds",): trainer.behaviour_weight in ("full", "none"),
                ("behaviour_weight_level",): trainer.behaviour_weight == "none",
                ("sequence_mask_bounds",): trainer.sequence_mask == "none",
                ("m2_threshold",): trainer.objective != "m2po",
                ("sapo_temperatures",): trainer.objective != "sapo",
                ("vespo_positive", "vespo_negative"): trainer.objective != "vespo",
            }
            for key in itertools.chain.from_iterable(keys for keys, has_none in idle.items() if has_none):
                del settings[key]
        return json.dumps(settings)


def run(record: Record, options: Namespace) -> int:
    """`areal replay`."""
    set_allocator()
    settings = options.overrides, options.sweep, options.steps, options.output, options.without, options.until
    replays = plan(record, *settings)
    return 0 if replay(replays, terminal(160)) else 1


def plan(
    run: Record,
    overrides: Sequence[str],
    sweep: Sequence[str] = (),
    steps: str = ":",
    output: Path | None = None,
    without: str | None = None,
    until: str | None = None,
) -> list[Replay]:
    """Return a replay for each combination of the values in `sweep`; the last key changes fastest.

    overrides: `key=value`, changes to all replays. sweep: each `key=value,value,...`. steps: `A:B`, the steps after A
    up to B; by default all. output: folder for the trained model, or with `sweep` for a folder a model. without: an SQL
    condition on rollouts; groups with such a row are left out. until: a condition on metrics of the replay. Raises
    UserError if a replay is not possible.
    """
    config = run.configuration.load()
    first, last = _range(run, steps)
    _check_rollouts(run, config, first, last)
    if output and output.exists():
        raise UserError(f"{output} already exists: name another folder for the trained model.")
    left_out = _left_out(run, config, without, first, last) if without else frozenset()
    end = _condition_of(until) if until else None
    common = dict(parsed(override, Config) for override in overrides)
    changed_since = run.configuration.changed_after(first + 1)
    all_steps = (first, last) == (run.configuration.first_version, run.metrics.trained)
    replays = []
    for point in points(read_grid(sweep), "The sweep"):
        changes = common | point
        changed = _changed(run, config, changes)
        off_policy = bool(left_out) or changed != config or any(key in changed_since for key in changes)
        variant = Replay(run, changed, changes, off_policy, first, last, all_steps, without=left_out, until=end)
        replays.append(altered(variant, output=output / variant.name if output and sweep else output))
    if len({variant.config.trainer.ranks for variant in replays}) > 1:
        raise UserError("trainer.ranks differs in the sweep, but its replays share their ranks: leave it out.")
    return replays


def _range(run: Record, steps: str) -> tuple[int, int]:
    """Return the step before a replay of `steps`, and its last step."""
    match, trained, begin = re.fullmatch(r"(\d*):(\d*)", steps), run.metrics.trained, run.configuration.first_version
    first, last = (int(match[1] or begin), int(match[2] or trained)) if match else (0, 0)
    if not first < last <= trained:
        raise UserError(f"--steps {steps} is not in the {trained} steps of {run.folder}: write A:B, after A up to B.")
    if (first or begin) and not run.checkpoints.of(first).is_dir():
        there = [f"{version}" for version in run.versions if version or begin] + ["0, the run's model"] * (not begin)
        raise UserError(f"No checkpoint of step {first} is in {run.folder}: begin --steps at {' or '.join(there)}.")
    if not first and os.path.isabs(run.configuration.model) and not Path(run.configuration.model).is_dir():
        raise UserError(f"The model that {run.folder} began with is not here, {run.configuration.model}: put it back.")
    return first, last


def _check_rollouts(run: Record, config: Config, first: int, last: int) -> None:
    counts = run.rollouts.groups_by_step()
    for step in range(first + 1, last + 1):
        if counts[step] == config.batch_size:
            continue
        if config.observe.rollouts != "all":
            why = f"observe.rollouts was {config.observe.rollouts}: replay a run that keeps all"
        elif counts and step < min(counts):
            why = f"the oldest files were removed (observe.rollouts_gib): begin later, --steps A:{last}"
        else:
            why = "they were not written, or are gone: choose other steps, --steps A:B"
        raise UserError(f"{run.folder} has {counts[step]} of {config.batch_size} groups of step {step}, since {why}.")


def _left_out(run: Record, config: Config, sql: str, first: int, last: int) -> frozenset[tuple[int, str]]:
    groups = Rollouts(run).trained(sql_condition(sql), first + 1, last)
    if len(groups) in (0, config.batch_size * (last - first)):
        number = "all groups" if groups else "no group"
        raise UserError(f"--without {sql!r} leaves out {number} of the steps {first + 1} to {last}: name some of them.")
    return frozenset(groups)


def _condition_of(text: str) -> Condition:
    """Parse a condition on a metric that a replay computes. Raises UserError."""
    from areal.training.step_metrics import StepResult

    condition = Condition.parsed(text)
    condition.check({*(field.name for field in fields(StepResult)), *_OF_BATCH}, "A replay")
    return condition


def _digest(groups: Iterable[tuple[int, str]]) -> str:
    return f"{crc32(json.dumps(sorted(groups)).encode()):08x}"


def _changed(run: Record, config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the run's settings with `changes`. Raises UserError for a change outside the training."""
    settings = run.configuration.with_settings(changes)
    for key, _, _ in differences(config.model_dump(mode="json"), settings.model_dump(mode="json")):
        if not is_under(key, ["trainer"]) or is_under(key, ["trainer.checkpoint_every", "trainer.checkpoints_kept"]):
            raise UserError(
                f"{key} cannot be changed in a replay, which trains what the run has sampled: change how it trains, "
                f"trainer.KEY=VALUE."
            )
    return settings


def replay(replays: Sequence[Replay], console: Console) -> bool:
    """Do all `replays`, and print results (all ranks). Returns whether all ended, unchanged replays with equal weights.

    If the trainer has several ranks, this command starts again under torchrun. Only rank 0 prints to `console`.
    """
    ranks = replays[0].config.trainer.ranks
    if ranks > 1 and "WORLD_SIZE" not in os.environ:
        os.execv(sys.executable, [*torchrun(ranks), "-m", "areal", *sys.argv[1:]])
    console.quiet = os.environ.get("RANK", "0") != "0"
    if any(variant.off_policy for variant in replays):
        console.print("Off-policy: a variant trains on samples of the run's policies, not its own.", soft_wrap=True)
    alike: dict[str, Replay] = {}
    same = {variant.name: alike.setdefault(variant.what_matters(), variant) for variant in replays}
    todo = list(alike.values())
    if len(todo) == 1 or "WORLD_SIZE" in os.environ or visible_devices():
        summaries = {variant.name: run_variant(variant, console) for variant in todo}
    else:
        summaries = _run_in_processes(todo, console)
    if len(todo) > 1:
        console.print(_table(todo, summaries))
    for variant in replays:
        twin = same[variant.name]
        alone = f"as {twin.name}: no setting that has an effect differs"
        console.print(
            f"{variant.name}: {_verdict(variant, summaries[variant.name]) if twin is variant else alone}",
            soft_wrap=True,
        )
    return all(summary["ok"] and summary["same_weights"] is not False for summary in summaries.values())


def _run_in_processes(replays: Sequence[Replay], console: Console) -> dict[str, dict[str, Any]]:
    """Do the replays in parallel processes, as many as the cores allow. A fork of this process shares its imports."""
    from areal.cpu.deepspeed_on_cpu import load_libraries
    from areal.extensions.desk.bare_models import read_modules

    load_libraries()
    read_modules(replays[0].config.model)
    gc.freeze()
    at_once = max(1, len(os.sched_getaffinity(0)) // max(variant.config.trainer.threads for variant in replays))
    fork, waiting = multiprocessing.get_context("fork"), list(replays)
    running: list[tuple[ForkProcess, Replay]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            process = fork.Process(target=_run_in_process, args=(waiting[0], os.getpid()))
            process.start()
            running.append((process, waiting.pop(0)))
        wait([process.sentinel for process, _ in running])
        for process, variant in [pair for pair in running if pair[0].exitcode is not None]:
            running.remove((process, variant))
            console.print(f"{len(replays) - len(waiting) - len(running)}/{len(replays)} {variant.name}", soft_wrap=True)
    return {variant.name: Record(variant.folder).ending or _summary(variant, "its process died") for variant in replays}


def _run_in_process(variant: Replay, parent: int) -> None:
    die_with_parent(signal.SIGKILL, parent)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    try:
        run_variant(variant, Console(quiet=True))
    except UserError as error:
        replace(variant.folder / SUMMARY, json.dumps(_summary(variant, str(error)), indent=2) + "\n")


def run_variant(
    variant: Replay,
    console: Console,
    check: "Callable[[TrainingEngine, Config, int], None] | None" = None,
    run: str = "",
) -> dict[str, Any]:
    """Do a replay (all ranks). Returns the content of its summary.json. check: called before each step, with its
    number. run: the required identity of the checkpoint's run; "" allows any run."""
    began = time.monotonic()
    writes = os.environ.get("RANK", "0") == "0"
    if writes:
        shutil.rmtree(variant.folder, ignore_errors=True)
        variant.folder.mkdir(parents=True)
        replace(variant.folder / CONFIG, dump_config(variant.config))
    training = Training(variant, run)
    records, reason = [], ""
    guard = Guard(_NUMBERS_ONLY)
    with (variant.folder / METRICS).open("w") if writes else open(os.devnull, "w") as file:
        for step, batch in variant.batches():
            record = training.step(step, batch, check)
            file.write(line_of(record | {"time": time.time()}))
            records.append(record)
            _print_step(variant, record, console)
            if reason := guard.check(record) or "":
                reason = f"step {step}: {reason}"
            if reason or (variant.until and variant.until.holds(record)):
                break
    weights, engine = variant.folder / "weights", training.engine
    engine.storage.snapshot()
    manifest = engine.storage.begin_write(weights).result()
    if variant.output:
        engine.storage.export(variant.output)
    engine.close()
    summary = _summary(variant, reason, records, manifest) | {"seconds": time.monotonic() - began}
    if writes:
        remove_folder(weights)
        replace(variant.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


class Training:
    """The training of a replay, each step with its own settings (all ranks). run: the required identity of the first
    checkpoint's run; "" allows any run."""

    def __init__(self, variant: Replay, run: str = "") -> None:
        from areal.training.training_engine import TrainingEngine

        self._variant, self._config = variant, variant.config_at(variant.first + 1)
        self.engine: TrainingEngine = TrainingEngine.of_run(self._config, keep_values=True)
        if variant.first:
            self.engine.storage.load(variant.checkpoint, run)

    def _prepare(self, step: int) -> Config:
        """Take the settings of a step, and return them. Changed settings restart the engine, as a resumed run does."""
        config, folder = self._variant.config_at(step), self._variant.folder / "changing"
        if config != self._config:
            self.engine.storage.save(folder)
            self.engine.close()
            self.engine = type(self.engine).of_run(config, keep_values=True)
            self.engine.storage.load(folder)
            if self.engine.rank == 0:
                shutil.rmtree(folder)
            self._config = config
        return config

    def step(
        self, step: int, batch: list[Group], check: "Callable[[TrainingEngine, Config, int], None] | None" = None
    ) -> dict[str, Any]:
        """Train the batch of a step (all ranks). Returns a run's metrics of the step, and two figures about the policy
        pi before the step, from the weights pi / pi_behav of the batch's samples.

        effective_samples: the equivalent number of equally weighted samples, as a share. reward_weighted: the mean over
        groups of the weighted mean reward, an estimate of pi's reward on the prompts.
        """
        config, engine = self._prepare(step), self.engine
        if check:
            check(engine, config, step)
        trainer = config.trainer
        temperature = config.sampling.temperature
        mask = oldest_in_loss(config.on_straggler, config.max_staleness, step - 1)
        on_rank_0 = batch if engine.rank == 0 else None
        logp = None if trainer.proximal == "recompute" else engine.logprobs(on_rank_0, temperature=temperature)
        result = engine.step(on_rank_0, version=step - 1, temperature=temperature, mask_older_than=mask)
        if logp is None:
            assert engine.values is not None  # keep_values was set
            logp = engine.values.proximal_logprobs
        rewards = [sample.reward for group in batch for sample in group.trajectories]
        ages = [step - 1 - group.start_version for group in batch]
        return {
            "step": step,
            "reward_mean": float(np.mean(rewards)),
            "staleness_mean": float(np.mean(ages)),
            "staleness_max": max(ages),
            **asdict(result),
            **weight_metrics(batch, logp, mask, mask_cut=trainer.mask_cut),
        }


def weight_metrics(batch: Sequence[Group], logp: np.ndarray, mask: int | None, *, mask_cut: bool) -> dict[str, float]:
    """Return the figures of `Training.step` about pi. logp: [T], of all tokens of the batch, as in `TokenValues`."""
    from areal.training.packed import FlatBatch

    flat = FlatBatch.of(batch, minibatches=1)
    in_loss = flat.trained(mask, mask_cut=mask_cut)
    gaps = np.where(in_loss, logp - flat.columns["logprobs"].astype(np.float64), 0.0)
    log_weights = np.bincount(flat.of_sample, gaps)
    largest = np.full(len(batch), -np.inf)
    np.maximum.at(largest, flat.groups, log_weights)
    ratios = np.exp(log_weights - largest[flat.groups])  # the largest ratio of each group is 1
    of_groups = np.bincount(flat.groups, ratios * flat.rewards) / np.bincount(flat.groups, ratios)
    weights = np.exp(log_weights - log_weights.max())
    return {
        "effective_samples": float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())),
        "reward_weighted": float(of_groups.mean()),
    }


def _print_step(variant: Replay, record: Mapping[str, Any], console: Console) -> None:
    step = record["step"]
    if step == variant.last or (step - variant.first) % max(1, (variant.last - variant.first) // _LINES) == 0:
        console.print(
            f"step {step}/{variant.last}  reward {record['reward_mean']:.3f}  entropy {record['entropy']:.3f}  "
            f"grad norm {record['grad_norm']:.3f}  effective samples {record['effective_samples']:.2f}",
            soft_wrap=True,
        )


def _summary(
    variant: Replay, reason: str, records: Sequence[dict[str, Any]] = (), manifest: Manifest | None = None
) -> dict[str, Any]:
    stamp = manifest and manifest.stamp
    last = records[-1]["step"] if records else variant.first
    recorded = None if variant.off_policy or reason else _recorded_stamp(variant, last)
    return {
        "ok": not reason,
        "reason": reason,
        "replay_of": str(variant.run.folder),
        "off_policy": variant.off_policy,
        "changes": dict(variant.changes),
        "first_step": variant.first + 1,
        "groups_left_out": len(variant.without),
        "until": str(variant.until) if variant.until and records and variant.until.holds(records[-1]) else None,
        "steps": last,
        "weights": {"stamp": stamp},
        "same_weights": recorded and recorded == stamp,
        "worthless_from": _worthless_from(records),
        **_final(records),
    }


def keeps_weights(run: Record, step: int) -> bool:
    """Return whether a replay can compare its weights with the run's after a step. With adapters, or vision beside the
    text model, a checkpoint has more weights than are published."""
    if _final_stamp(run, step):
        return True
    checkpoint = run.checkpoints.of(step)
    return checkpoint.is_dir() and not (run.configuration.load().trainer.lora or is_wrapper(checkpoint))


def _final_stamp(run: Record, step: int) -> str | None:
    """Return the stamp of the run's last weights, or None if the last step is not `step`."""
    weights = (run.ending or {}).get("weights", {})
    return weights["stamp"] if weights.get("version") == step else None


def _recorded_stamp(variant: Replay, step: int) -> str | None:
    """Return the stamp of the run's weights after a step, or None if the stamp is not known."""
    if stamp := _final_stamp(variant.run, step):
        return stamp
    if not keeps_weights(variant.run, step):
        return None
    files = Manifest.of(variant.run.checkpoints.of(step)).files
    return Manifest(tuple(file for file in files if file.name.endswith(".safetensors"))).stamp


def _worthless_from(records: Sequence[dict[str, Any]]) -> int | None:
    """Return the first step from which on the mean of WINDOW steps has too few effective samples to the end."""
    shares = [record["effective_samples"] for record in records]
    means = [sum(shares[max(0, n - WINDOW) : n]) / min(n, WINDOW) for n in range(1, len(shares) + 1)]
    low = list(itertools.takewhile(lambda n: not means[n] >= WORTHLESS, reversed(range(len(means)))))
    return records[low[-1]]["step"] if low else None


_OF_BATCH = ("reward_mean", "staleness_mean", "staleness_max", "effective_samples", "reward_weighted")
_FIGURES = {
    "effective_samples": "effective samples",
    "reward_weighted": "reward, weighted",
    "weight_mean": "mean weight",
    "effective_sample_size": "ESS of tokens",
    "kl_behaviour": "KL to behaviour",
    "entropy": "entropy",
    "grad_norm": "grad norm",
    "clip_fraction": "clipped",
}


def _final(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each figure over the last steps."""
    last = records[-max(1, len(records) // FINAL_SHARE) :]
    return {name: sum(record[name] for record in last) / len(last) for name in _FIGURES} if last else {}


def _table(replays: Sequence[Replay], summaries: Mapping[str, dict[str, Any]]) -> Table:
    table = Table(title="means over the last tenth of the steps")
    table.add_column("variant", no_wrap=True)
    for heading in _FIGURES.values():
        table.add_column(heading, justify="right")
    for variant in replays:
        summary = summaries[variant.name]
        table.add_row(variant.name, *(f"{summary[name]:.4g}" if name in summary else "" for name in _FIGURES))
    return table


def _verdict(variant: Replay, summary: Mapping[str, Any]) -> str:
    if not summary["ok"]:
        return f"stopped, {summary['reason']}"
    if variant.until:
        met = f"{variant.until} " + (f"first at step {summary['steps']}" if summary["until"] else "at no step")
        return f"{met}; {_verdict(altered(variant, last=summary['steps'], until=None), summary)}"
    if summary["same_weights"] is not None:
        return "the same weights, bit by bit" if summary["same_weights"] else "other weights"
    if not variant.off_policy:
        return f"nothing is known of the run's weights after step {variant.last}"
    if step := summary["worthless_from"]:
        return (
            f"worthless from step {step} on, where the effective samples stay below {WORTHLESS:g}: the "
            f"variant is so far from the policies that sampled the data that a few samples decide"
        )
    return f"effective samples are {summary['effective_samples']:.2f} at the end"
