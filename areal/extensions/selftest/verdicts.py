"""Verdicts on a generator's samples and times: log-probs, versions, loads, turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal.extensions.desk.split import GIB
from areal.extensions.selftest.findings import LAYERS, Finding, judged
from areal.extensions.selftest.sequences import Sampled
from areal.generation.engine_weights import LoadTimes
from areal.training.guard import GAP

APART = 4
"""The least distance between log-probs of the same tokens under both versions, as a multiple of the tolerance."""
EDGE = 2
"""The largest mean error of the few tokens beside an interruption, as a multiple of the tolerance."""
RECOVERY_SECONDS = 60.0
"""Seconds in which the sequences of a full engine have to go on after a load."""
RESIDUE, RESIDUE_BYTES = 0.25, 4 * GIB
"""The GPU memory that an engine or a trainer may keep while the other engine has the turn: a share of its memory, or a
number of bytes. Contexts, kernels and graphs stay."""


@dataclass(frozen=True, slots=True)
class BusyLoad:
    """A load by a full engine: the load's times, and the seconds until the running sequences had new tokens."""

    times: LoadTimes
    recovery_seconds: float


def check_busy_load(load: BusyLoad | None, size: int) -> Finding:
    """Check that the sequences of a full engine go on after a load. size: bytes of the weights."""
    if load is None:
        return Finding("busy load", "skipped", "an engine with adapters cannot load the model's own weights")
    measured, values = load_cost(load.times, size)
    return judged(
        "busy load",
        load.recovery_seconds < RECOVERY_SECONDS,
        f"{load.times.sequences_interrupted} sequences: {measured}; they went on within {load.recovery_seconds:.2f} s",
        f"The sequences of a full engine do not go on within {RECOVERY_SECONDS:.0f} s after a load: lower "
        "generator.max_concurrent_rollouts, and report it.",
        sequences=load.times.sequences_interrupted,
        recovery_seconds=load.recovery_seconds,
        **values,
    )


def check_kept(
    sequences: Sequence[Sampled], exact: Sequence[np.ndarray], recomputed: Sequence[np.ndarray], dtype: str
) -> Finding:
    """Check that tokens of version 2 have the log-probs under the KV cache of version 1. exact: log-probs under the
    kept cache, of tokens of version 2. recomputed: log-probs under a cache of version 2, of all tokens."""
    limit = LAYERS * GAP[dtype]
    new = [s.versions == 2 for s in sequences]
    crossing = [n for n, s in enumerate(sequences) if set(s.versions.tolist()) == {1, 2}]
    if len(crossing) < len(sequences) // 4:
        return Finding("kept cache", "skipped", f"only {len(crossing)} of {len(sequences)} sequences were interrupted")
    sampled = np.concatenate([sequences[n].logprobs[new[n]] for n in crossing])
    gap = mean(np.abs(sampled - np.concatenate([exact[n] for n in crossing])))
    recomputed_gap = mean(np.abs(sampled - np.concatenate([recomputed[n][new[n]] for n in crossing])))
    return judged(
        "kept cache",
        gap <= limit,
        f"{len(crossing)} sequences: {gap:.1e} nats from new weights on the old KV cache (at most {limit:g}), "
        f"{recomputed_gap:.1e} from a recomputed one",
        "With generator.kv_on_update=keep the engine does not go on from the KV cache that it had: set it to "
        "recompute, and report it.",
        gap=gap,
        gap_to_recomputed=recomputed_gap,
        crossing=len(crossing),
    )


def check_turns(facts: dict[str, Any], gap: float | None, dtype: str) -> Finding:
    """Check that trainer and generator leave each other the devices. gap: of log-probs around a sleep, or None.

    facts: `sleep_seconds`, `wake_seconds`, `offload_seconds`; on a GPU the free bytes `before` the engine started, of
    the engine `running` and `asleep`; `offloaded`: the trainer's bytes before and after."""
    limit = LAYERS * GAP[dtype]
    at_first, running, asleep = ((facts.get(name) or {}).get("bytes") for name in ("before", "running", "asleep"))
    had, has = facts.get("offloaded") or (0.0, 0.0)
    parts, leaves = [], True
    if at_first is not None and running is not None and asleep is not None:
        leaves = at_first - asleep <= max(RESIDUE * (at_first - running), RESIDUE_BYTES) and has <= max(
            RESIDUE * had, RESIDUE_BYTES
        )
        parts.append(
            f"the engine asleep keeps {(at_first - asleep) / GIB:.1f} of {(at_first - running) / GIB:.1f} GiB, the "
            f"trainer away {has / GIB:.1f} of {had / GIB:.1f}"
        )
    parts.append(
        ", ".join(
            f"{name} {facts[f'{name}_seconds']:.2f} s"
            for name in ("sleep", "wake", "offload")
            if f"{name}_seconds" in facts
        )
    )
    parts.append("log-probs not compared" if gap is None else f"after it {gap:.1e} nats (at most {limit:g})")
    return judged(
        "turns",
        leaves and (gap is None or gap <= limit),
        "; ".join(part for part in parts if part),
        "Trainer and generator do not leave each other the GPU, or sequences go on wrongly after it: report it."
        if leaves or gap is None
        else "With colocate=true memory stays taken: report it, and set generator.memory_share lower.",
        gap=gap,
        **facts,
    )


def check_engine(sequences: Sequence[Sampled], exact: Sequence[np.ndarray], dtype: str) -> Finding:
    """Check the log-probs against the reference, `exact`, on weights that were never exchanged."""
    gap, limit = gap_of(sequences, exact), LAYERS * GAP[dtype]
    return judged(
        "engine",
        gap <= limit,
        f"log-probs of the generator, {dtype}: {gap:.1e} nats from transformers in fp32 (at most {limit:g})",
        "vLLM computes other log-probs than transformers: set generator.enforce_eager=true and try again; report it.",
        gap=gap,
        dtype=dtype,
    )


def check_received(
    sequences: Sequence[Sampled], exact: Sequence[np.ndarray], dtype: str, measured: str, values: dict[str, Any]
) -> Finding:
    """Check the log-probs against the reference, `exact`, on the sent weights. measured, values: the cost."""
    gap, limit = gap_of(sequences, exact), LAYERS * GAP[dtype]
    return judged(
        "transport",
        gap <= limit,
        f"{measured}; log-probs after it: {gap:.1e} nats from the reference (at most {limit:g})",
        "After a direct transfer the engine does not have the trainer's weights: set weights.transport=folder, and "
        "report it.",
        gap=gap,
        **values,
    )


def check_versions(
    sequences: Sequence[Sampled], old: Sequence[np.ndarray], new: Sequence[np.ndarray], dtype: str
) -> Finding:
    """Check that each token of interrupted sequences has the log-prob of the token's version.

    old, new: log-probs of all tokens under versions 0 and 1. Tokens beside the interruption are also judged alone,
    since a version that changes a token too early or too late is wrong for only one token of each sequence.
    """
    limit = LAYERS * GAP[dtype]
    named = np.concatenate([s.versions for s in sequences])
    logprobs, under = np.concatenate([s.logprobs for s in sequences]), (np.concatenate(old), np.concatenate(new))
    ends = np.cumsum([len(s.versions) for s in sequences])
    changes = np.flatnonzero(np.diff(named) == 1) + 1
    changes = np.setdiff1d(changes, ends)  # a new sequence begins at each end
    beside = np.concatenate([changes - 1, changes])
    right = np.where(named == 1, under[1], under[0])
    gap = {version: mean(np.abs(logprobs - right)[named == version]) for version in (0, 1)}
    other_gap = {version: mean(np.abs(logprobs - under[1 - version])[named == version]) for version in (0, 1)}
    edge = mean(np.abs(logprobs - right)[beside])
    exact = bool(np.isin(named, (0, 1)).all()) and all((np.diff(s.versions) >= 0).all() for s in sequences)
    values = {"gap": gap, "gap_to_other_version": other_gap, "gap_beside": edge, "crossing": len(changes)}
    if not exact:
        kinds = sorted(set(named.tolist()))
        measured = f"tokens of the versions {kinds}, where only 0 and 1 in this order can be"
        advice = "The engine names wrong versions: take the version of vLLM that pyproject.toml names, and report it."
        return Finding("interruption", "FAILED", measured, advice, values)
    if len(changes) < len(sequences) // 4:
        measured = f"only {len(changes)} of {len(sequences)} sequences were interrupted"
        advice = (
            "Too few sequences were long enough to be interrupted: try again, and with --config and a model that "
            "answers at length."
        )
        return Finding("interruption", "FAILED", measured, advice, values)
    measured = f"{gap[0]:.1e} nats before, {gap[1]:.1e} after, {edge:.1e} beside it (at most {limit:g})"
    right_ones = gap[0] <= limit and gap[1] <= limit and edge <= EDGE * limit
    if right_ones and not min(other_gap.values()) >= APART * limit:
        away = min(other_gap.values())
        return Finding("interruption", "skipped", f"{measured}; the other version is only {away:.1e} away", "", values)
    return judged(
        "interruption",
        right_ones,
        f"{len(changes)} sequences: {measured}; under the other version {other_gap[0]:.1f}, {other_gap[1]:.1f}",
        "After new weights are loaded, tokens do not have the log-probs of the version that they name: if `engine` is "
        "ok, loading leaves old weights in place (such as a head that is not packed again) or versions are told one "
        "off; take the version of vLLM that pyproject.toml names, and report it.",
        **values,
    )


def gap_of(sequences: Sequence[Sampled], exact: Sequence[np.ndarray]) -> float:
    """Return the mean difference of log-probs, in nats."""
    return float(np.abs(np.concatenate([s.logprobs - e for s, e in zip(sequences, exact, strict=True)])).mean())


def load_cost(times: LoadTimes, size: int) -> tuple[str, dict[str, Any]]:
    """Return the cost of loading `size` bytes, as text and as values."""
    seconds = times.load_seconds
    rate, pause = size / 1e9 / seconds, times.pause_seconds
    measured = f"{size / 1e9:.3g} GB in {seconds:.2f} s, {rate:.3g} GB/s; paused {pause:.3f} s"
    return measured, {"bytes": size, "pause_seconds": times.pause_seconds, "load_seconds": seconds}


def mean(values: np.ndarray) -> Any:
    return float(values.mean()) if len(values) else 0.0
