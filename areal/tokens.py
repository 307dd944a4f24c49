"""Loading a model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.config import UserError


def load_tokenizer(folder: str) -> Any:
    """The tokenizer in a model's folder. Raises UserError.

    A tokenizer.json is read directly: `AutoTokenizer` imports torch, which costs every process that only needs text
    four seconds and 300 MB.
    """
    if (Path(folder) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    try:
        return Tokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The model folder {folder} holds no tokenizer that loads ({first}).") from None
