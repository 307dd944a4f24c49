"""The library: configuration, data, ledger, algorithms, engines and reports; no actors and none of their messages."""

from areal.cpu.processor import use_avx512

use_avx512()  # here, so that it comes before any import of torch
