"""Corrects what libraries assume about the processor: AMX that is announced but broken, and AVX-512 of AMD.

Some virtual machines announce Intel's AMX but kill its users (SIGILL). A child process tries a bf16 operation.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from areal.base.processes import cache_folder

CPU = Path("/proc/cpuinfo")
COMPILERS = ("cc", "gcc", "clang", "c++", "g++")
# A compilation takes a twentieth of a second.
COMPILE_SECONDS = 60.0

_TRY = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
# oneDNN's limit on the instruction set, and the values without and with AMX. For other libraries: `without_amx`.
_ISA, _WITHOUT_AMX, _WITH_ALL = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "DEFAULT"


def use_avx512() -> None:
    """Have PyTorch's matrix products use AVX-512 also on AMD (`mkl.c`). Has an effect before torch is imported."""
    if hides_avx512() and (library := mkl_library()):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def hides_avx512() -> bool:
    """Return whether MKL ignores AVX-512 on this processor: MKL trusts Intel's processors alone."""
    return "avx512f" in _cpu_flags() and of_first_core("vendor_id") != "GenuineIntel"


def mkl_library(folders: Sequence[Path] = ()) -> Path | None:
    """Return the library of `mkl.c`, compiled at the first use, beside the source or else in the user's cache, or in
    the first writable one of `folders`. None without a C compiler or a folder for the result.

    Several processes may compile at once: each renames a whole file to the common name.
    """
    source = Path(__file__).with_name("mkl.c")
    digest = hashlib.blake2b(source.read_bytes(), digest_size=4).hexdigest()
    places = [folder / f"mkl-{digest}-{platform.machine()}.so" for folder in folders or own_folders()]
    library = next((place for place in places if place.is_file()), None)
    if library or not (compiler := c_compiler()):
        return library
    return next((place for place in places if _compile(compiler, source, place)), None)


def own_folders() -> list[Path]:
    """Return the folders for a compiled file: beside this file, and in the user's cache."""
    return [Path(__file__).parent, cache_folder() / "areal"]


def c_compiler() -> str | None:
    """Return the program that compiles C, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _compile(compiler: str, source: Path, target: Path) -> bool:
    """Whether the library `target` was made."""
    with suppress(OSError, subprocess.SubprocessError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".mkl-") as folder:
            library = Path(folder, target.name)
            command = [compiler, "-x", "c", "-O2", "-fPIC", "-shared", str(source), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            library.replace(target)
            return True
    return False


@functools.cache
def avoid_broken_amx() -> None:
    """Keep this process and its children from using broken AMX. Call it before bf16 is used on a CPU.

    Sets oneDNN's environment variable, unless the user has. The check takes as long as importing torch, once.
    """
    if _ISA in os.environ or "amx_bf16" not in _cpu_flags():
        return
    failed = subprocess.run([sys.executable, "-c", _TRY], stderr=subprocess.DEVNULL).returncode
    os.environ[_ISA] = _WITHOUT_AMX if failed else _WITH_ALL


def lacks_bf16() -> bool:
    """True if this processor has no instructions for bfloat16. On such a processor (one core of an AMD EPYC with AVX2)
    matrix products in bf16 were 6 to 9 times as slow as in float32."""
    return not {"avx512_bf16", "amx_bf16", "bf16"} & set(_cpu_flags().split())


def without_amx() -> bool:
    """True if AMX is forbidden in this process."""
    return os.environ.get(_ISA) == _WITHOUT_AMX


def _cpu_flags() -> str:
    return of_first_core("flags") or of_first_core("Features")  # the latter on Arm


@functools.cache
def of_first_core(name: str) -> str:
    """Return a field of the first core in /proc/cpuinfo: reading all cores takes long on large machines."""
    with suppress(OSError), CPU.open() as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
    return ""
