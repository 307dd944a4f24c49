"""The check of `trainer.lora` before a run. It imports no torch."""

import difflib
from collections.abc import Iterable

from areal.base.errors import UserError
from areal.config.trainer_section import LoraConfig


def check_adapters(model: object, weights: Iterable[str], lora: LoraConfig) -> None:
    """Raise UserError if the weights of these names lack a layer of `lora`; peft refuses only if all layers are
    missing."""
    layers = {name.removesuffix(".weight").rpartition(".")[2] for name in weights if "." in name}
    names = [] if lora.target_modules == "all-linear" else lora.target_modules
    for name in names:
        last = name.rpartition(".")[2]
        if layers and last not in layers:
            close = difflib.get_close_matches(last, layers, 1)
            known = ", ".join(sorted(layer for layer in layers if layer.endswith("proj"))) or ", ".join(sorted(layers))
            raise UserError(
                f"trainer.lora.target_modules names {name!r}, but the model {model} has no such layer: "
                f"{f'did you mean {close[0]}?' if close else f'it has {known}.'}"
            )
