"""The checks of a trainer's process without an engine: devices, kernels, folders, free memory."""

import gc
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from areal.config import Config
from areal.cpu import deepspeed_on_cpu as cpu
from areal.devices import ASK_SECONDS, visible_devices
from areal.extensions.desk.bare_models import count_parameters, read_modules
from areal.extensions.desk.split import GIB
from areal.extensions.selftest import disk_checks as disk
from areal.extensions.selftest import kernel_checks as kernels
from areal.extensions.selftest.findings import Finding, guarded, judged
from areal.extensions.selftest.memory_peaks import free_memory, wait_for
from areal.extensions.selftest.synthetic import sizes_of
from areal.training.flops import Operations, peak_tflops
from areal.training.model_checks import random_groups
from areal.training.packed import FlatBatch, pack
from areal.weights.model_files import model_files

GONE_SECONDS = 30.0
"""Seconds in which a GPU's driver has to free the memory of a killed process."""


class DeviceChecks:
    """The devices of one rank of a trainer. config: the run's configuration, with a folder as its model."""

    def __init__(self, config: Config) -> None:
        self._config = config.for_device(cuda=torch.cuda.is_available())
        self._sizes = sizes_of(config.model)
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        else:
            cpu.set_environment(self._config.trainer.dtype)

    def devices(self) -> list[Finding]:
        """Check that torch sees the GPUs listed by the driver, and that the GPUs can compute in the run's dtype."""
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
        """Check the kernels `names`, of attention, head and gradient, on rank 0."""
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
        """Check the folder for published weights, and /dev/shm, on rank 0."""
        if os.environ.get("RANK", "0") != "0":
            return []
        size = model_files(Path(self._config.model)).size
        return [
            guarded("folder", lambda: disk.check_folder("folder", Path(folder), size)),
            guarded("/dev/shm", lambda: disk.check_memory_folder(size, gpus=self._device.type == "cuda")),
        ]

    def free_memory(self) -> dict[str, Any]:
        """Return the free bytes of this rank's GPU, or None on a CPU."""
        return {"bytes": free_memory(self._device)}

    def wait_for_memory(self, needed: float | None) -> list[Finding]:
        """Wait until a killed trainer's memory is free. needed: the bytes free before its start; None on a CPU."""
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

    def checkpoint_bytes(self) -> dict[str, Any]:
        """Return the bytes of a checkpoint: the model, and, except for adapters, fp32 weights and two moments."""
        size = model_files(Path(self._config.model)).size
        return {"bytes": size + (0 if self._config.trainer.lora else 12 * count_parameters(self._config.model))}

    def operations(self) -> dict[str, Any]:
        """Return the operations a token, and a device's peak TFLOP/s: with both, `speed` computes a generator's MFU."""
        _, module = read_modules(self._config.model)
        groups = random_groups(self._sizes.vocab_size, [[128]])
        flat = FlatBatch.of(groups, minibatches=1)
        row = pack(flat, flat.trained(None), [0], torch.device("cpu"))
        of_token = Operations(module).of(row, backward=False) / 128
        return {"of_token": of_token, "peak_tflops": peak_tflops(self._device, self._config.generator.dtype)}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (output.splitlines() or ["unknown"])[0]
