"""Compares the generators' log-probs of a few tokens of a batch with the trainer's. areal.training.engine_gap says why.

Generators are asked at the start of a step, and answer with the step's starting version, which they may still have to
load. An answer that comes after the step counts for the next step. A generator that goes straight to a newer version
gives no measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from actors.runtime.directory import Directory
from actors.runtime.membership import Ask, Spawn
from areal.config import Config
from areal.samples.pictures import pictures_of
from areal.samples.trajectory import Group
from areal.training.engine_gap import EngineGaps, Probe, probe_of
from protocols.bus_errors import BusError
from protocols.membership_messages import Member
from protocols.training_messages import AskLogprobs, Logprobs

ANSWER_SECONDS = 600.0  # while the trainer computes, an engine may sleep

log = structlog.get_logger()


def measures_gaps(config: Config) -> bool:
    """Whether the step has comparable log-probs: at an engine's temperature, of the weights before the step."""
    return (
        config.observe.rollouts != "none"
        and config.sampling.temperature == 1
        and config.trainer.proximal == "recompute"
        and config.trainer.routing == "own"  # with the experts chosen by the weights before the step
    )


class Probes:
    """The comparison with the engines of all generators."""

    def __init__(self, config: Config, directory: Directory, ask: Ask, spawn: Spawn) -> None:
        self._measures = measures_gaps(config)
        self._minibatches = config.trainer.minibatches
        self._directory = directory
        self._send = ask
        self._spawn = spawn
        self._gaps = EngineGaps()
        self._asking: set[str] = set()
        self._current: _Check | None = None
        self._answers: list[tuple[str, _Check, np.ndarray]] = []

    def begin(self, lineage: int, version: int, groups: Sequence[Group]) -> None:
        """Ask the generators, at the start of a step that trains this version on these groups."""
        asks = self._measures and not any(map(pictures_of, groups))  # an engine is asked with tokens alone
        probe = probe_of(groups, self._minibatches) if asks else None
        if probe is None:
            return
        self._current = check = _Check(lineage, version, probe)
        for generator in self._directory.with_role("generator"):
            if generator.identity not in self._asking:
                self._spawn(self._ask(generator, check), "compare an engine")

    async def _ask(self, generator: Member, check: "_Check") -> None:
        self._asking.add(generator.identity)
        try:
            ask = AskLogprobs(lineage=check.lineage, version=check.version, tokens=check.probe.tokens)
            answer = await self._send(generator.address, ask, Logprobs, ANSWER_SECONDS)
            if answer.version == check.version:
                self._answers.append((generator.identity, check, answer.logprobs))
        except BusError:  # the generator is busy, leaves or has died; the next step asks again
            pass
        finally:
            self._asking.remove(generator.identity)

    def result(self, logprobs: np.ndarray | None) -> float | None:
        """Return the largest gap of engines that have answered since the last step, or None. logprobs: float32, the
        trainer's for all tokens of the batch, in the order of TokenValues; 0 outside the loss."""
        current, self._current = self._current, None
        if current is not None and logprobs is not None:
            current.trainer_logprobs = logprobs[current.probe.start + current.probe.sampled]
        gaps = []
        for engine, check, sampled_logprobs in self._answers:
            trained = check.trainer_logprobs
            if trained is not None and trained.any() and len(sampled_logprobs) == len(check.probe.tokens) - 1:
                differences = np.abs(sampled_logprobs[check.probe.sampled - 1] - trained)
                gaps.append(float(differences[trained != 0].mean()))
                if sentence := self._gaps.add(engine, check.version, gaps[-1]):
                    log.error(sentence)
        self._answers.clear()
        return max(gaps, default=None)


@dataclass(slots=True)
class _Check:
    """A probe of a step. trainer_logprobs: for the sampled tokens, once computed."""

    lineage: int
    version: int
    probe: Probe
    trainer_logprobs: np.ndarray | None = None
