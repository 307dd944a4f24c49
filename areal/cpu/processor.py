"""What libraries get wrong about the processor: AMX that is announced but broken, and AVX-512 of AMD.

Some virtual machines announce Intel's AMX but kill what uses it (SIGILL). A child process tries a bf16 operation.
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
# It takes a twentieth of a second.
COMPILE_SECONDS = 60.0

_TRY = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
# oneDNN's limit on the instruction set, and its value without AMX. For other libraries: `without_amx`.
_ISA, _WITHOUT_AMX, _WITH_ALL = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "DEFAULT"


def use_avx512() -> None:
    """Have PyTorch's matrix products use AVX-512 also on AMD (`mkl.c`). Has an effect before torch is imported."""
    if hides_avx512() and (library := mkl_library()):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def hides_avx512() -> bool:
    """Whether MKL takes this processor for one without AVX-512, which it has: it trusts Intel's alone."""
    return "avx512f" in _cpu_flags() and of_first_core("vendor_id") != "GenuineIntel"


def mkl_library(folders: Sequence[Path] = ()) -> Path | None:
    """`mkl.c`, compiled at its first use, beside the source or else in the user's cache, or in the first of `folders`
    that takes files. None: there is no C compiler, or no folder for the result.

    Several processes may do this at once: each renames a whole file of its own to the name that all use.
    """
    source = Path(__file__).with_name("mkl.c")
    digest = hashlib.blake2b(source.read_bytes(), digest_size=4).hexdigest()
    places = [folder / f"mkl-{digest}-{platform.machine()}.so" for folder in folders or own_folders()]
    library = next((place for place in places if place.is_file()), None)
    if library or not (compiler := c_compiler()):
        return library
    return next((place for place in places if _compile(compiler, source, place)), None)


def own_folders() -> list[Path]:
    """Where a compiled file may lie: beside this one, and in the user's cache."""
    return [Path(__file__).parent, cache_folder() / "areal"]


def c_compiler() -> str | None:
    """The program that compiles C; None if there is none."""
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
    return of_first_core("flags") or of_first_core("Features")  # the latter on Arm


@functools.cache
def of_first_core(name: str) -> str:
    """What /proc/cpuinfo says of the first core; of all cores it takes long on large machines."""
    with suppress(OSError), CPU.open() as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
    return ""
