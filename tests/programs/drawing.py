"""Programs that are run in sandboxes: each `make test` draws another eighth of them."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import TypeVar

import pytest

T = TypeVar("T")

an_eighth_or_all = pytest.mark.parametrize(
    "share", [pytest.param(1 / 8, id="an eighth"), pytest.param(1.0, id="all", marks=pytest.mark.slow)]
)


def drawn(programs: dict[str, T], share: float) -> dict[str, T]:
    """A share of the programs, drawn from each kind of them; the kind of a program is the first word of its name, and
    kinds of fewer than four are one. Where a test fails with one, it says its name."""
    sizes = Counter(name.split()[0] for name in programs)
    kinds: dict[str, list[str]] = {}
    for name in programs:
        kind = name.split()[0]
        kinds.setdefault(kind if sizes[kind] >= 4 else "", []).append(name)
    names = (random.sample(names, math.ceil(share * len(names))) for names in kinds.values())
    return {name: programs[name] for name in itertools.chain.from_iterable(names)}
