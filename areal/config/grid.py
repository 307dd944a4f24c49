"""A grid of settings: keys, each with several values. Each combination of them is a run of a sweep, or a replay."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal.base.errors import UserError
from areal.config.overrides import parsed_values


def read_grid(texts: Iterable[str]) -> dict[str, list[Any]]:
    """The grid that texts such as `seed=0,1` describe, one for each key. Raises UserError."""
    return dict(parsed_values(text) for text in texts)


def points(grid: Mapping[str, Sequence[Any]], what: str) -> list[dict[str, Any]]:
    """The combinations of the values in a grid; the last key changes fastest. Raises UserError if two have one name."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    names = list(map(name_of, combinations))
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(f"{what} has {name} twice: write each value once.")
    return combinations


def name_of(settings: Mapping[str, Any]) -> str:
    """A name for what has these settings, such as `trainer.objective-ppo_seed-0`."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    texts = {key: re.sub(r"(?<=\d)e\+", "e", text) for key, text in texts.items()}  # 1e+30 is not 1e-30
    return "_".join(re.sub(r"[^\w.-]+", "-", f"{key}-{text}").strip("-") for key, text in texts.items())
