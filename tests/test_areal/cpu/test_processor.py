from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.cpu.processor import avoid_broken_amx

# The instruction set for which MKL chooses its kernels: 0 unknown, 5 AVX2, 7 AVX-512.
DETECT = """
import areal, ctypes, torch
from pathlib import Path
print(ctypes.CDLL(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").mkl_serv_cpu_detect())
"""


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="this processor has no AVX-512")
def test_matrix_products_use_avx512_whoever_made_the_processor() -> None:
    message = subprocess.run([sys.executable, "-c", DETECT], capture_output=True, text=True, check=True)
    assert int(message.stdout) >= 7


@pytest.mark.skipif("amx_bf16" not in Path("/proc/cpuinfo").read_text(), reason="this processor announces no AMX")
def test_amx_is_tried_once_and_not_again_by_each_child(monkeypatch) -> None:
    """Each call stands for another process, which has the variables of the first."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    del os.environ["ONEDNN_MAX_CPU_ISA"]
    commands: list[list[str]] = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **how: commands.append(command) or real(command, **how))
    avoid_broken_amx.__wrapped__()
    avoid_broken_amx.__wrapped__()
    assert len(commands) == 1
