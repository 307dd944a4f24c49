from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.cpu import processor
from areal.cpu.processor import avoid_broken_amx, mkl_library

COMPILE = """
import ctypes, sys
from pathlib import Path
from areal.cpu.processor import mkl_library
library = mkl_library([Path(sys.executable, "no folder"), Path(sys.argv[1])])
ctypes.CDLL(str(library)).mkl_serv_intel_cpu_true
print(library)
"""

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


def test_several_processes_compile_mkl_c_at_once_and_each_loads_a_whole_library(tmp_path) -> None:
    start = [sys.executable, "-c", COMPILE, str(tmp_path)]
    processes = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = {process.communicate()[0].strip() for process in processes}
    assert printed == {str(path) for path in tmp_path.iterdir()} and len(printed) == 1


def test_what_was_compiled_is_used_again_and_nothing_is_made_without_a_compiler(tmp_path, monkeypatch) -> None:
    there, library = [tmp_path], mkl_library([tmp_path])
    monkeypatch.setattr(processor, "COMPILERS", ())
    assert mkl_library(there) == library and mkl_library([tmp_path / "other"]) is None


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
