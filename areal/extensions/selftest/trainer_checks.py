"""The checks that need a trainer: the start, log-probs, publishing, a checkpoint, the longest row, a direct transfer.

All ranks call the methods of `TrainingChecks` together; the findings of rank 0 count.
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from areal.config import Config
from areal.devices import CORES, settle, transfer_backend
from areal.extensions.desk.bare_models import count_parameters
from areal.extensions.selftest import disk_checks as disk
from areal.extensions.selftest import sequences
from areal.extensions.selftest.device_checks import DeviceChecks
from areal.extensions.selftest.findings import LAYERS, Finding, judged
from areal.extensions.selftest.longest_row import LongestRow
from areal.extensions.selftest.memory_peaks import free_memory, reserved_memory, resident
from areal.extensions.selftest.rank_checks import check_ranks
from areal.extensions.selftest.transfer_checks import Sending
from areal.samples.trajectory import Group
from areal.training.guard import GAP
from areal.training.model_checks import random_groups
from areal.training.training_engine import TrainingEngine

MOVE, LORA_MOVE = 6.0, 60.0
"""The learning rate of the published step, times the root of the number of parameters. In its first step Adam moves
each parameter by the learning rate, and log-probs change by the learning rate times the sum of the gradient's absolute
values. The sum grows as the root, so in models of any size log-probs change by about a nat."""
LENGTHS = [64, 48, 40, 32]
"""Tokens of the sequences trained before and after a checkpoint."""


class TrainingChecks(DeviceChecks):
    """The trainer of a self-test on a rank, with all checks of the trainer's process."""

    _engine: TrainingEngine  # set by `start`

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._longest_row = LongestRow(self._config, self._sizes)
        self._sending: Sending | None = None
        self._resident_at_start = 0
        self._free_at_start: float | None = None

    def start(self) -> list[Finding]:
        """Load the model, and check that the ranks reach each other."""
        self._resident_at_start, self._free_at_start = resident(), free_memory(self._device)
        started = time.perf_counter()
        config = self._config.trainer
        count = count_parameters(self._config.model)
        changes = {
            "minibatches": 1,
            "microbatches": None,
            "max_tokens_per_microbatch": self._longest_row.tokens,
            "lr": (LORA_MOVE if config.lora else MOVE) / count**0.5,
            "warmup_steps": 0,
            "lr_schedule": "constant",
            "weight_decay": 0.0,
            "adam_eps": 1e-5,  # MOVE was measured with this value
        }
        trainer, longest = config.model_copy(update=changes), self._config.generator.max_model_len
        self._engine = TrainingEngine(Path(self._config.model), trainer, seed=0, longest=longest)
        seconds = time.perf_counter() - started
        settle(CORES)
        ranks = self._engine.world_size
        measured = f"{ranks} ranks, {config.dtype}, started in {seconds:.0f} s"
        findings = [Finding("trainer", "ok", measured, values={"seconds": seconds, "ranks": ranks})]
        return [*findings, check_ranks(self._device)] if ranks > 1 else findings

    def start_again(self) -> dict[str, Any]:
        """Start a trainer that takes the place of a killed trainer."""
        return {"seconds": self.start()[0].values["seconds"]}

    def offload(self) -> dict[str, Any]:
        """Leave the GPU's memory to the generator, until `reload`."""
        had, started = reserved_memory(self._device), time.perf_counter()
        self._engine.offload()
        return {"offload_seconds": time.perf_counter() - started, "offloaded": [had, reserved_memory(self._device)]}

    def reload(self) -> dict[str, Any]:
        """Undo `offload`."""
        self._engine.reload()
        return {}

    def save(self, folder: str, file: str) -> dict[str, Any]:
        """Write a checkpoint. Write into `file` the log-probs at the checkpoint and after a further step."""
        self._step()  # gives the optimizer moments
        logprobs, started = self._logprobs(), time.perf_counter()
        self._engine.storage.save(Path(folder))
        seconds = time.perf_counter() - started
        self._step()
        next_logprobs = self._logprobs()
        if self._engine.rank == 0:
            np.savez(file, before=logprobs, after=next_logprobs)
        return {"seconds": seconds, "free_at_start": self._free_at_start}

    def resume(self, folder: str, file: str, seconds: float) -> list[Finding]:
        """Load the checkpoint of `save`, and compare the log-probs. seconds: the time for writing the checkpoint."""
        started = time.perf_counter()
        self._engine.storage.load(Path(folder))
        loading = time.perf_counter() - started
        logprobs = self._logprobs()
        self._step()
        with np.load(file) as saved:
            gaps = [
                float(np.abs(now - then).mean())
                for now, then in ((logprobs, saved["before"]), (self._logprobs(), saved["after"]))
            ]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return [
            judged(
                "checkpoint",
                gaps[0] <= GAP[self._config.trainer.dtype] / LAYERS and gaps[1] <= self._gap_limit,
                f"{size / 1e9:.3g} GB saved in {seconds:.2f} s, loaded by another trainer in {loading:.2f}; log-probs "
                f"differ by {gaps[0]:.1e} nats, after a step by {gaps[1]:.1e} (at most {self._gap_limit:g})",
                "A trainer that goes on from a checkpoint differs from the trainer that wrote it: report it.",
                bytes=size,
                save_seconds=seconds,
                load_seconds=loading,
                gap=gaps[0],
                gap_after_step=gaps[1],
            )
        ]

    def _sequences(self) -> list[Group] | None:
        return random_groups(self._sizes.vocab_size, [LENGTHS]) if self._engine.rank == 0 else None

    def _logprobs(self) -> np.ndarray:
        return self._engine.logprobs(self._sequences(), temperature=self._config.sampling.temperature)

    def _step(self) -> None:
        self._engine.step(self._sequences(), version=0, temperature=self._config.sampling.temperature)

    def logprobs(self, sampled: str, published: str) -> list[Finding]:
        """Compare the generator's log-probs of version 0 with the trainer's in a training step, and publish weights.

        sampled: a file of `sequences`. published: the folder for version 1.
        """
        batch = [sequences.as_group(sequences.read(Path(sampled)))] if self._engine.rank == 0 else None
        temperature = self._config.sampling.temperature
        result = self._engine.step(batch, version=0, temperature=temperature)
        started = time.perf_counter()
        folder = self._engine.storage.publish(Path(published))
        seconds = time.perf_counter() - started
        gap = math.inf if result.logprob_gap is None else result.logprob_gap
        limit = self._gap_limit
        size = disk.size_of(folder) if self._engine.rank == 0 else 0
        return [
            judged(
                "log-probs",
                gap <= limit,
                f"trainer and generator differ by {gap:.1e} nats (at most {limit:g})",
                "Trainer and generator compute different log-probs on the same weights: look which of `gradient` and "
                "`engine` failed; if neither did, compare trainer.dtype with generator.dtype.",
                gap=gap,
                loss=result.loss,
                grad_norm=result.grad_norm,
                tokens=result.tokens_trained,
            ),
            judged(
                "publish",
                any(folder.glob("*.safetensors")),
                f"{size / 1e9:.3g} GB in {seconds:.2f} s, {size / 1e9 / seconds:.3g} GB/s",
                "The trainer published no weights.",
                bytes=size,
                seconds=seconds,
            ),
        ]

    def longest(self) -> list[Finding]:
        """Train the longest row on every rank, and judge the memory and the speed."""
        return self._longest_row.train(self._engine, self._device, self._resident_at_start)

    def send(self, folder: str, workers: int) -> dict[str, Any] | None:
        """Publish the trainer's present weights, and begin to send them to an engine of `workers` processes. Returns
        the first call for the engine."""
        published = self._engine.storage.publish(Path(folder))
        if self._engine.rank != 0:
            return None
        self._sending = Sending(transfer_backend(), workers, published)
        return self._sending.next_call()

    def sent(self) -> dict[str, Any] | None:
        """Note that the engine has made a call. Returns the next call, or the number of bytes sent."""
        if self._sending is None:
            return None
        self._sending.acknowledge()
        return self._sending.next_call()

    @property
    def _gap_limit(self) -> float:
        """Largest mean difference of log-probs in the coarser of the two dtypes."""
        return LAYERS * max(GAP[self._config.trainer.dtype], GAP[self._config.generator.dtype])
