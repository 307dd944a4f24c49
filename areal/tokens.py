"""Loading a model's tokenizer."""

from __future__ import annotations

from typing import Any

from areal.config import UserError


def load_tokenizer(model: str) -> Any:
    """The tokenizer in a model's folder. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The model folder {model} holds no tokenizer that loads ({first}).") from None
