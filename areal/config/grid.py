"""A grid of settings: keys with several values each. Each combination of values is a run of a sweep, or a replay."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal.base.errors import UserError
from areal.config.overrides import parsed_values


def read_grid(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Return the grid of texts such as `seed=0,1`, a text for each key. Raises UserError."""
    return dict(parsed_values(text) for text in texts)


def points(grid: Mapping[str, Sequence[Any]], what: str) -> list[dict[str, Any]]:
    """Return the combinations of values in a grid; the last key changes fastest. Raises UserError for equal names."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    names = list(map(name_of, combinations))
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(f"{what} has {name} twice: write each value once.")
    return combinations


def name_of(settings: Mapping[str, Any]) -> str:
    """Return a name for a run with these settings.

    >>> name_of({"trainer.objective": "ppo", "seed": 0})
    'trainer.objective-ppo_seed-0'"""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    texts = {key: re.sub(r"(?<=\d)e\+", "e", text) for key, text in texts.items()}  # 1e+30 is not 1e-30
    return "_".join(re.sub(r"[^\w.-]+", "-", f"{key}-{text}").strip("-") for key, text in texts.items())
