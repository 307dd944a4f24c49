"""Loads a model's tokenizer, with the chat template of the configuration."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from areal.base.errors import UserError, explain
from areal.base.text import without_code
from areal.config.data_section import RowsConfig


def load_tokenizer(folder: str, data: RowsConfig | None = None) -> Any:
    """Return the tokenizer in a model's folder. Raises UserError.

    data: `chat_template` and `chat_template_kwargs` apply to every rendering by the tokenizer.

    A tokenizer.json is read directly: `AutoTokenizer` imports torch, which costs four seconds and 300 MB.
    """
    if (Path(folder) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    wrong = f"The model folder {folder} has no tokenizer that can be loaded ({{why}})."
    with explain(Exception, wrong), without_code():  # the tokenizers library raises this very class
        tokenizer = Tokenizer.from_pretrained(folder, trust_remote_code=False)
    if data is not None and data.sets_template:
        _set_template(tokenizer, folder, data)
    return tokenizer


def tokenizer_in(folder: str) -> Any | None:
    """Return the tokenizer in this folder, or None if the folder is missing or has no tokenizer that can be loaded."""
    with suppress(UserError):
        return load_tokenizer(folder) if any(Path(folder).glob("*token*")) else None  # else one would be made up
    return None


def _set_template(tokenizer: Any, folder: str, data: RowsConfig) -> None:
    """Raises UserError for a missing template, an unused variable, or a template that does not render a message."""
    if data.chat_template is not None:
        tokenizer.chat_template = read_template(data.chat_template)
    if not tokenizer.chat_template:
        raise UserError(
            f"data.chat_template_kwargs is set, but the model {folder} has no chat template: leave it out, or set "
            f"data.chat_template."
        )
    template = tokenizer.chat_template
    text = "\n".join(template.values()) if isinstance(template, dict) else template  # some models have several, by name
    for name in data.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise UserError(
                f"The chat template of {data.chat_template or folder} has no variable {name!r}: correct "
                f"data.chat_template_kwargs."
            )
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **data.chat_template_kwargs)
    messages = [{"role": "user", "content": "Hello"}]
    with explain(  # templates may raise anything
        Exception,
        f"The chat template of {data.chat_template or folder} does not render one message of the user ({{why}}): "
        f"correct it, or data.chat_template_kwargs.",
    ):
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def read_template(file: Path) -> str:
    """Return the text of a chat template. Raises UserError."""
    with explain(
        (OSError, ValueError), f"The chat template {file} cannot be read ({{why}}): correct data.chat_template."
    ):
        return file.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=64)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The special tokens, which are no text."""
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


@functools.lru_cache(maxsize=64)
def stop_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that end a sequence: the tokenizer's end of sequence, and the tokens listed in the model's folder."""
    files = (Path(tokenizer.name_or_path) / name for name in ("generation_config.json", "config.json"))
    file = next((file for file in files if file.is_file()), None)
    listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file else None
    return frozenset([*([listed] if isinstance(listed, int) else listed or ()), tokenizer.eos_token_id]) - {None}


def missing_character(tokenizer: Any, text: str) -> str | None:
    """Return the first character of `text` without a token, or None if the tokenizer can spell the whole text."""
    return None if _spells(tokenizer, text) else next((c for c in text if not _spells(tokenizer, c)), text)


def _spells(tokenizer: Any, text: str) -> bool:
    try:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # the tokenizers library raises this very class
        return False
    unknown = tokenizer.unk_token_id
    return unknown is None or unknown == tokenizer.eos_token_id or unknown not in tokens


def reads_as_kept(tokenizer: Any, row: Mapping[str, Any]) -> bool:
    """Whether the tokenizer decodes the tokens of a kept rollout to the kept texts."""
    start = row["prompt_tokens"]
    texts = [tokenizer.decode(part.tolist()) for part in (row["tokens"][:start], row["tokens"][start:])]
    return bool(texts == [row["prompt"], row["completion"]])


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that every token adds. A character's last token adds the character; earlier tokens add ""."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens]
