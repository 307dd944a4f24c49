"""The checks that need a trainer: kernels, log-probs, publishing, the longest row, a checkpoint.

All ranks call the methods of `TrainingChecks` together; the findings of rank 0 count.
"""

import gc
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.base.errors import UserError
from areal.config import Config
from areal.cpu import deepspeed_on_cpu as cpu
from areal.devices import ASK_SECONDS, CORES, settle, transfer_backend, visible_devices
from areal.extensions.desk.plan import count_parameters, read_model, read_modules
from areal.extensions.desk.split import GIB, row_tokens, training_memory
from areal.extensions.selftest import disk_checks as disk
from areal.extensions.selftest import kernel_checks as kernels
from areal.extensions.selftest import sequences
from areal.extensions.selftest.findings import LAYERS, Finding, judged
from areal.extensions.selftest.memory_peaks import free_memory, peak, resident, wait_for
from areal.extensions.selftest.rank_checks import check_ranks
from areal.extensions.selftest.synthetic import sizes_of
from areal.extensions.selftest.transfer_checks import Sending
from areal.samples.trajectory import Group, random_groups
from areal.training.flops import Operations, peak_tflops
from areal.training.guard import GAP
from areal.training.packed import FlatBatch, pack
from areal.training.step_metrics import StepResult
from areal.training.training_engine import TrainingEngine
from areal.weights.model_files import model_files

MOVE, LORA_MOVE = 6.0, 60.0
"""Learning rate of the step whose weights are published, times the root of the number of parameters. In its first step
Adam moves each parameter by the learning rate, which changes log-probs by its product with the sum of the gradient's
absolute values. That sum grows as the root. So models of any size are changed by about one nat."""
PROMPT_TOKENS = 1024
"""Tokens of the longest prompt, where the configuration does not limit them; as in `areal plan`."""
BEYOND_PLAN = 1.1
"""Most that a step may take of the memory that was planned for it."""
LENGTHS = [64, 48, 40, 32]
"""Tokens of the sequences that are trained on before and after a checkpoint."""
GONE_SECONDS = 30.0
"""Time in which a GPU's driver has to free the memory of a process that was killed."""


class TrainingChecks:
    """The trainer of a self-test, on one rank. config: of the run, with a folder as its model."""

    _engine: TrainingEngine  # set by `start`

    def __init__(self, config: Config) -> None:
        self._config = config.for_device(cuda=torch.cuda.is_available())
        self._sizes = sizes_of(config.model)
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        else:
            cpu.set_environment(self._config.trainer.dtype)
        self._sending: Sending | None = None
        self._resident_at_start = 0
        self._free_at_start: float | None = None

    def devices(self) -> list[Finding]:
        """What torch sees of this machine."""
        listed, trainer = visible_devices(), self._config.trainer
        facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "listed": listed}
        if not torch.cuda.is_available():
            measured = f"CPU, torch {torch.__version__}, {torch.get_num_threads()} threads"
            return [
                judged(
                    "devices",
                    not listed,
                    f"{measured}; the driver lists {len(listed)} GPUs" if listed else measured,
                    f"torch {torch.__version__} does not see the GPU that the driver lists: install the build for CUDA "
                    f"(`make setup EXTRA=cuda`), and a driver that is new enough for CUDA {torch.version.cuda}.",
                    **facts,
                )
            ]
        cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        facts |= {"names": [card.name for card in cards], "bytes": [card.total_memory for card in cards]}
        facts |= {"driver": _driver(), "capability": [f"{card.major}.{card.minor}" for card in cards]}
        bf16 = trainer.dtype != "bfloat16" or all(card.major >= 8 for card in cards)
        return [
            judged(
                "devices",
                bf16,
                f"{len(cards)} x {cards[0].name}, {cards[0].total_memory / GIB:.0f} GiB, driver {facts['driver']}, "
                f"torch {torch.__version__}",
                "bfloat16 needs GPUs of compute capability 8.0 (Ampere) or later: take other GPUs, or set "
                "trainer.dtype=float32 and generator.dtype=float32.",
                **facts,
            )
        ]

    def kernels(self, names: list[str]) -> list[Finding]:
        """Attention, head and gradient, or some of them, on rank 0."""
        if os.environ.get("RANK", "0") != "0":
            return []
        dtype, device = self._config.trainer.dtype, self._device
        checks = {
            "attention": lambda: kernels.check_attention(self._sizes, dtype, device),
            "head": lambda: kernels.check_head(self._sizes, dtype, device),
            "gradient": lambda: kernels.check_gradient(self._sizes, self._config.trainer, device),
        }
        findings = [guarded(name, check) for name, check in checks.items() if name in names]
        if device.type == "cuda":  # a generator may share this GPU
            gc.collect()
            torch.cuda.empty_cache()
        return findings

    def disk(self, folder: str) -> list[Finding]:
        """The folder that takes the weights of versions, and the one in memory, on rank 0."""
        if os.environ.get("RANK", "0") != "0":
            return []
        size = model_files(Path(self._config.model)).size
        return [
            guarded("folder", lambda: disk.check_folder("folder", Path(folder), size)),
            guarded("/dev/shm", lambda: disk.check_memory_folder(size, gpus=self._device.type == "cuda")),
        ]

    def start(self) -> list[Finding]:
        """Load the model, and see whether the ranks reach each other."""
        self._resident_at_start, self._free_at_start = resident(), free_memory(self._device)
        started = time.perf_counter()
        config = self._config.trainer
        count = count_parameters(self._config.model)
        changes = {
            "minibatches": 1,
            "microbatches": None,
            "max_tokens_per_microbatch": self._row_tokens,
            "lr": (LORA_MOVE if config.lora else MOVE) / count**0.5,
            "warmup_steps": 0,
            "lr_schedule": "constant",
            "weight_decay": 0.0,
            "adam_eps": 1e-5,  # with which MOVE was measured
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
        """As `start`, for a trainer that takes the place of another."""
        return {"seconds": self.start()[0].values["seconds"]}

    def free_memory(self) -> dict[str, Any]:
        """Bytes of this rank's GPU that nobody has; None on a CPU."""
        return {"bytes": free_memory(self._device)}

    def offload(self) -> dict[str, Any]:
        """Leave the GPU's memory to the generator, until `reload`."""
        had, started = self._reserved(), time.perf_counter()
        self._engine.offload()
        return {"offload_seconds": time.perf_counter() - started, "offloaded": [had, self._reserved()]}

    def reload(self) -> dict[str, Any]:
        """Undo `offload`."""
        self._engine.reload()
        return {}

    def _reserved(self) -> float:
        return float(torch.cuda.memory_reserved()) if self._device.type == "cuda" else 0.0

    def checkpoint_bytes(self) -> dict[str, Any]:
        """Bytes of a checkpoint: the model, and fp32 weights and two moments of what is trained. Adapters are small."""
        size = model_files(Path(self._config.model)).size
        return {"bytes": size + (0 if self._config.trainer.lora else 12 * count_parameters(self._config.model))}

    def save(self, folder: str, file: str) -> dict[str, Any]:
        """Write a checkpoint, and into `file` log-probs of it and of the step after it."""
        self._step()  # so that the optimizer has moments
        logprobs, started = self._logprobs(), time.perf_counter()
        self._engine.save(Path(folder))
        seconds = time.perf_counter() - started
        self._step()
        next_logprobs = self._logprobs()
        if self._engine.rank == 0:
            np.savez(file, before=logprobs, after=next_logprobs)
        return {"seconds": seconds, "free_at_start": self._free_at_start}

    def wait_for_memory(self, needed: float | None) -> list[Finding]:
        """The trainer before this one was killed. Wait until the memory is free again that was before it started."""
        seconds = wait_for(lambda: free_memory(self._device), needed, GONE_SECONDS)
        free = free_memory(self._device)
        measured = "" if free is None else f", and its GPU memory was free after {seconds or 0:.1f} s"
        return [
            judged(
                "restart",
                seconds is not None,
                f"a trainer was killed{measured}",
                f"{GONE_SECONDS:.0f} s after a trainer was killed, its GPU memory is not free again: look for the "
                f"processes that it has left (nvidia-smi), and report it.",
                seconds=seconds,
                free=free,
                needed=needed,
            )
        ]

    def resume(self, folder: str, file: str, seconds: float) -> list[Finding]:
        """Load the checkpoint that `save` has written, and compare. seconds: what writing took."""
        started = time.perf_counter()
        self._engine.load(Path(folder))
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
                "A trainer that goes on from a checkpoint is another than the one that wrote it: report it.",
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
        """Compare a generator's log-probs of version 0 with the trainer's, in a step on them, and publish the result.

        sampled: a file of `sequences`. published: the folder for version 1.
        """
        batch = [sequences.as_group(sequences.read(Path(sampled)))] if self._engine.rank == 0 else None
        temperature = self._config.sampling.temperature
        result = self._engine.step(batch, version=0, temperature=temperature)
        started = time.perf_counter()
        folder = self._engine.publish(Path(published))
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
        """Two steps on rows of the greatest length, on every rank: memory, tokens/s, and MFU in the second one."""
        engine = self._engine
        ranks = engine.world_size
        together = ranks // self._config.trainer.sequence_parallel
        longest, tokens = self._longest, self._row_tokens
        remainder = tokens % longest
        lengths = [longest] * (tokens // longest) + [remainder] * (remainder > 1)
        groups = random_groups(self._sizes.vocab_size, [lengths] * together, version=1)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what a checkpoint has needed
            torch.cuda.reset_peak_memory_stats()
        took = 0.0
        for _ in range(2):  # the first one compiles kernels
            growth = resident() - self._resident_at_start
            try:
                with peak() as rise:
                    result = engine.step(
                        groups if engine.rank == 0 else None, version=1, temperature=self._config.sampling.temperature
                    )
            except torch.OutOfMemoryError as error:
                return [self._too_long(len(lengths), str(error))]
            took = max(took, growth + rise["bytes"])
        if self._device.type == "cuda":
            took = torch.cuda.max_memory_reserved()
        return [self._longest_row(lengths, took, ranks), self._training(result)]

    def _longest_row(self, lengths: list[int], took: float, ranks: int) -> Finding:
        trainer = self._config.trainer
        stage = max(trainer.zero_stage, 1) if trainer.dtype == "bfloat16" else trainer.zero_stage
        plan = training_memory(
            self._config, read_model(self._config), ranks, stage, bool(trainer.gradient_checkpointing), self._longest
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

    def _training(self, result: StepResult) -> Finding:
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

    def send(self, folder: str, workers: int) -> dict[str, Any] | None:
        """Publish the weights that the trainer has now, and begin to send them to an engine of `workers` processes.
        Returns the first call that the engine has to do."""
        published = self._engine.publish(Path(folder))
        if self._engine.rank != 0:
            return None
        self._sending = Sending(transfer_backend(), workers, published)
        return self._sending.next_call()

    def sent(self) -> dict[str, Any] | None:
        """The engine has done a call. Returns the next one, or the bytes sent."""
        if self._sending is None:
            return None
        self._sending.acknowledge()
        return self._sending.next_call()

    def operations(self) -> dict[str, Any]:
        """What the tokens/s of a generator are made of: operations of a token, and what a device can do."""
        _, module = read_modules(self._config.model)
        groups = random_groups(self._sizes.vocab_size, [[128]])
        flat = FlatBatch.of(groups, minibatches=1)
        row = pack(flat, flat.trained(None), [0], torch.device("cpu"))
        of_token = Operations(module).of(row, backward=False) / 128
        return {"of_token": of_token, "peak_tflops": peak_tflops(self._device, self._config.generator.dtype)}

    @property
    def _gap_limit(self) -> float:
        """Largest mean difference of log-probs in the coarser of the two dtypes."""
        return LAYERS * max(GAP[self._config.trainer.dtype], GAP[self._config.generator.dtype])

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence, its prompt included."""
        config = self._config
        length = (config.data.max_prompt_tokens or PROMPT_TOKENS) + config.sampling.max_new_tokens
        limits = (config.generator.max_model_len, getattr(self._sizes, "max_position_embeddings", None))
        return min(length, *(limit for limit in limits if limit))

    @property
    def _row_tokens(self) -> int:
        return row_tokens(self._config, self._config.trainer.ranks, self._longest)

    def _too_long(self, count: int, error: str) -> Finding:
        return Finding(
            "longest row",
            "FAILED",
            f"{self._row_tokens} tokens in {count} sequences do not fit: {error.splitlines()[0]}",
            "Lower trainer.max_tokens_per_microbatch, set trainer.gradient_checkpointing=true, or take more "
            "trainer.ranks with trainer.zero_stage=3 or trainer.sequence_parallel; if a generator shares the GPU, "
            "lower generator.memory_share.",
        )


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What `check` finds. Whatever it raises is its failure, and not that of the checks after it."""
    try:
        return check()
    except UserError as error:
        return Finding(name, "FAILED", "", str(error))
    except Exception as error:  # of libraries that may not work here
        first = (str(error).strip().splitlines() or [""])[0]
        return Finding(name, "FAILED", f"{type(error).__name__}: {first}", "Report this, with selftest.json attached.")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (output.splitlines() or ["unknown"])[0]
