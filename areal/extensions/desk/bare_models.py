"""Models without weights: their configuration, as transformers has it, and their modules on the device `meta`."""

import copy
from itertools import cycle, islice
from typing import Any

from areal.base.errors import explain
from areal.base.text import without_code
from areal.weights.wrappers import text_config


def read_modules(model: str) -> tuple[Any, Any]:
    """Return the configuration and the modules of a model. Raises UserError."""
    import torch
    from transformers import AutoModelForCausalLM

    message = f"The model {model} cannot be read ({{why}}): set model=FOLDER."
    with explain((OSError, ValueError), message), without_code():
        sizes = text_config(model)
        with torch.device("meta"):
            return sizes, AutoModelForCausalLM.from_config(sizes, trust_remote_code=False)


def count_parameters(model: str) -> int:
    """Return the number of parameters of a model. Raises UserError."""
    return sum(parameter.numel() for parameter in read_modules(model)[1].parameters())


def of_layers(sizes: Any, per_kind: int) -> Any:
    """Return the configuration `sizes` with `per_kind` layers of each kind, in the order of the model."""
    sizes = copy.deepcopy(sizes)
    kinds = getattr(sizes, "layer_types", None) or [""]
    period = next(n for n in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False)))
    sizes.num_hidden_layers = per_kind * period
    if kinds != [""]:
        sizes.layer_types = [*islice(cycle(kinds[:period]), per_kind * period)]
    return sizes
