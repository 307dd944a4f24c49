"""What libraries get wrong about the processor: AMX that is announced but broken, and AVX-512 of AMD.

Some virtual machines announce Intel's AMX but kill what uses it (SIGILL). A child process tries a bf16 operation.
"""

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

_TRY = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
# oneDNN's limit on the instruction set, and its value without AMX. For other libraries: `without_amx`.
_ISA, _WITHOUT_AMX, _WITH_ALL = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "DEFAULT"


def use_avx512() -> None:
    """Have PyTorch's matrix products use AVX-512 also on AMD (`mkl.c`). Has an effect before torch is imported.

    Without a C compiler at installation that file was not compiled, and this does nothing.
    """
    if (compiled := importlib.util.find_spec("areal.cpu._mkl")) and compiled.origin:
        ctypes.CDLL(compiled.origin, ctypes.RTLD_GLOBAL)


@functools.cache
def avoid_broken_amx() -> None:
    """Keep this process and its children from using broken AMX. Call it before bf16 is used on a CPU.

    It sets oneDNN's own environment variable, unless the user has. The check takes as long as importing torch, once.
    """
    if _ISA in os.environ or "amx_bf16" not in _cpu_flags():
        return
    failed = subprocess.run([sys.executable, "-c", _TRY], stderr=subprocess.DEVNULL).returncode
    os.environ[_ISA] = _WITHOUT_AMX if failed else _WITH_ALL


def lacks_bf16() -> bool:
    """True if this processor has no instructions for bfloat16. Matrix products in it were then 6 to 9 times as slow as
    in float32 (one core of an AMD EPYC with AVX2)."""
    return not {"avx512_bf16", "amx_bf16", "bf16"} & set(_cpu_flags().split())


def without_amx() -> bool:
    """True if this process must not use AMX."""
    return os.environ.get(_ISA) == _WITHOUT_AMX


def _cpu_flags() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.is_file() else ""
