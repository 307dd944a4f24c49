from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# The instruction set for which MKL chooses its kernels: 0 unknown, 5 AVX2, 7 AVX-512.
DETECT = """
import areal, ctypes, torch
from pathlib import Path
print(ctypes.CDLL(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").mkl_serv_cpu_detect())
"""


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="this processor has no AVX-512")
def test_matrix_products_use_avx512_whoever_made_the_processor() -> None:
    told = subprocess.run([sys.executable, "-c", DETECT], capture_output=True, text=True, check=True)
    assert int(told.stdout) >= 7
