"""The check of the longest row of a run: the memory, compared with the plan, and the speed."""

import math
from typing import Any

import torch

from areal.config import Config
from areal.extensions.desk.plan import read_model
from areal.extensions.desk.split import GIB, row_tokens, training_memory
from areal.extensions.selftest.findings import Finding, judged
from areal.extensions.selftest.memory_peaks import peak, resident
from areal.training.model_checks import random_groups
from areal.training.step_metrics import StepResult
from areal.training.training_engine import TrainingEngine

PROMPT_TOKENS = 1024
"""Tokens of the longest prompt if the configuration has no limit, as in `areal plan`."""
BEYOND_PLAN = 1.1
"""The largest memory of a step, as a multiple of the planned memory."""


class LongestRow:
    """The longest row of a run. sizes: the model's sizes, from `sizes_of`."""

    def __init__(self, config: Config, sizes: Any) -> None:
        self._config, self._sizes = config, sizes

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, with its prompt."""
        config = self._config
        length = (config.data.max_prompt_tokens or PROMPT_TOKENS) + config.sampling.max_new_tokens
        limits = (config.generator.max_model_len, getattr(self._sizes, "max_position_embeddings", None))
        return min(length, *(limit for limit in limits if limit))

    @property
    def tokens(self) -> int:
        return row_tokens(self._config, self._config.trainer.ranks, self.length)

    def train(self, engine: TrainingEngine, device: torch.device, resident_at_start: int) -> list[Finding]:
        """Train two steps on rows of the greatest length, on every rank. The second step gives tokens/s and MFU.

        resident_at_start: bytes of this process in memory before the engine started."""
        ranks = engine.world_size
        together = ranks // self._config.trainer.sequence_parallel
        longest, tokens = self.length, self.tokens
        remainder = tokens % longest
        lengths = [longest] * (tokens // longest) + [remainder] * (remainder > 1)
        groups = random_groups(self._sizes.vocab_size, [lengths] * together, version=1)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # frees the memory of a checkpoint
            torch.cuda.reset_peak_memory_stats()
        took = 0.0
        for _ in range(2):  # the first step compiles kernels
            growth = resident() - resident_at_start
            try:
                with peak() as rise:
                    result = engine.step(
                        groups if engine.rank == 0 else None, version=1, temperature=self._config.sampling.temperature
                    )
            except torch.OutOfMemoryError as error:
                return [self._too_long(len(lengths), str(error))]
            took = max(took, growth + rise["bytes"])
        if device.type == "cuda":
            took = torch.cuda.max_memory_reserved()
        return [self._memory(lengths, took, ranks), self._speed(result)]

    def _memory(self, lengths: list[int], took: float, ranks: int) -> Finding:
        trainer = self._config.trainer
        stage = max(trainer.zero_stage, 1) if trainer.dtype == "bfloat16" else trainer.zero_stage
        plan = training_memory(
            self._config, read_model(self._config), ranks, stage, bool(trainer.gradient_checkpointing), self.length
        )
        return judged(
            "longest row",
            took <= BEYOND_PLAN * plan.total,
            f"{sum(lengths)} tokens: {took / GIB:.2f} GiB; the plan has {(plan.total - plan.overhead) / GIB:.2f}, "
            f"and {plan.overhead / GIB:.0f} for libraries",
            f"The step takes more memory than `areal plan` says: plan with a --device-memory smaller by "
            f"{max(0.0, took - plan.total) / GIB:.1f} GiB, and report it.",
            lengths=lengths,
            bytes=took,
            planned=plan.total,
            planned_other=plan.overhead,
        )

    def _speed(self, result: StepResult) -> Finding:
        seconds = result.forward_seconds + result.backward_seconds + result.optimizer_seconds
        rate = result.tokens_computed / seconds
        mfu = "" if result.mfu is None else f", MFU {result.mfu:.0%}"
        return judged(
            "training",
            math.isfinite(result.grad_norm),
            f"{rate:,.0f} tokens/s, {result.tflops:.3g} TFLOP/s a device{mfu}",
            "The gradient of a step on random tokens is not finite: if `gradient` failed too, begin with that.",
            tokens_per_second=rate,
            tflops=result.tflops,
            mfu=result.mfu,
            seconds=seconds,
            grad_norm=result.grad_norm,
        )

    def _too_long(self, count: int, error: str) -> Finding:
        return Finding(
            "longest row",
            "FAILED",
            f"{self.tokens} tokens in {count} sequences do not fit: {error.splitlines()[0]}",
            "Lower trainer.max_tokens_per_microbatch, set trainer.gradient_checkpointing=true, or take more "
            "trainer.ranks with trainer.zero_stage=3 or trainer.sequence_parallel; if a generator shares the GPU, "
            "lower generator.memory_share.",
        )
