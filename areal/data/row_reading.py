"""How a row of the data is read: prompt, answer, pictures and tools, from the row's fields."""

import functools
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import msgpack
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.data_section import SourceConfig, reward_weights
from areal.data.rows import Prompt, Row, has_parts, read_prompt
from areal.samples.pictures import DIGESTS, FIELDS, digest_of, find


def make_row(raw: Mapping[str, Any], config: SourceConfig, where: str, of_table: bool = False) -> Row:
    """Return the Row of `raw`. where: the place of the row in the source, for messages. of_table: as in `read_prompt`.
    Raises UserError if the row is not usable."""
    prompt_key, answer_key = config.prompt_key, config.answer_key
    for key, setting in (prompt_key, "data.prompt_key"), (answer_key, "data.answer_key"):
        needed = key is not None and not (key == prompt_key and config.prompt_template)
        if needed and _field(raw, str(key)) is _MISSING:
            advice = "=reward_model.ground_truth" * (key == answer_key and "reward_model" in raw)  # a row of verl
            names = ", ".join(raw) or "nothing"
            raise UserError(f"{where} has no {key!r}, only {names}: add it or set {setting}{advice}")
    answer = _field(raw, answer_key) if answer_key else None
    written = written_prompt(raw, config, where)
    if written in ("", []):
        raise UserError(f"{where} has an empty {prompt_key!r}: write one, or remove the row")
    with explain(ValueError, f"{where} has a {prompt_key!r} that cannot be read ({{why}}): correct it"):
        prompt = read_prompt(written, of_table=of_table)
    prompt, pictures = with_pictures(prompt, raw, config, where)
    if pictures:
        raw = {name: value for name, value in raw.items() if name not in FIELDS}
        raw = raw | {DIGESTS: [digest_of(content) for content in pictures], prompt_key: prompt}
    elif DIGESTS in raw:
        raise UserError(f"{where} has {DIGESTS!r}, which name pictures that the row has: leave the field out")
    fields = {"prompt": prompt, **raw, "answer": answer}
    if config.prompt_template is None:
        fields["prompt"] = prompt
    # A data set of the hub has dates in place of texts of JSON that look like dates.
    fields = {name: value.isoformat() if isinstance(value, date) else value for name, value in fields.items()}
    with explain(
        (TypeError, ValueError, OverflowError), f"{where} cannot be sent to rewards ({{why}}): keep to JSON values"
    ):
        msgpack.packb(fields)
        json.dumps(fields)  # bytes are no JSON, in which the rollouts keep the row
    prompt = with_system(prompt, config.system_prompt)
    return Row(
        index=0,
        prompt=prompt,
        answer=answer if answer is None or isinstance(answer, str) else json.dumps(fields["answer"]),
        reward=_rewards(raw.get("reward"), where) or config.reward,
        fields=fields,
        pictures=pictures,
        tools=_tools(raw, config, where, of_table, is_chat=not isinstance(prompt, str)),
    )


def _tools(
    raw: Mapping[str, Any], config: SourceConfig, where: str, of_table: bool, *, is_chat: bool
) -> list[dict[str, Any]] | None:
    """Return the tools of a row, which stand beside the prompt. Raises UserError if tools cannot be read or shown."""
    if config.tools_key is None:
        return None
    beside, dot, _ = config.prompt_key.rpartition(".")
    value = _field(raw, f"{beside}{dot}{config.tools_key}")
    if value is _MISSING or not value:
        return None
    read_tools = extensions.need("agents", "read_tools", f"{where} has tools, which").load()
    advice = f"correct {config.tools_key!r}, or set data.tools_key=null"
    with explain(ValueError, f"{where} has tools that cannot be read ({{why}}): {advice}"):
        tools: list[dict[str, Any]] | None = read_tools(value, of_table=of_table)
    if tools and not is_chat:
        raise UserError(
            f"{where} has tools, which a chat template shows, but its prompt is a text: write messages, set "
            f"data.system_prompt, or set data.tools_key=null"
        )
    return tools


def with_pictures(
    prompt: Prompt, raw: Mapping[str, Any], config: SourceConfig, where: str
) -> tuple[Prompt, tuple[bytes, ...]]:
    """Return the prompt with pictures in their places, and their files. Paths begin at the folder of the source."""
    if not any(raw.get(name) for name in FIELDS) and not has_parts(prompt):
        return prompt, ()
    source = Path(str(config.source)).expanduser()
    with explain(UserError, f"{where}: {{why}}"):
        place = find("place")
    placed: tuple[Prompt, tuple[bytes, ...]] = place(prompt, raw, source if source.is_dir() else source.parent, where)
    return placed


_MISSING = object()


def _field(raw: Mapping[str, Any], key: str) -> Any:
    """Return a field of a row, or of an object in the row: `reward_model.ground_truth`; _MISSING if absent."""
    value: Any = raw
    for part in [key] if key in raw else key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def written_prompt(raw: Mapping[str, Any], config: SourceConfig, where: str) -> Any:
    """Return the prompt of `raw` unchanged, or as the template writes it."""
    if config.prompt_template is None:
        return _field(raw, config.prompt_key)
    with explain(
        (jinja2.TemplateError, TypeError, ValueError),
        f"{where} does not fit data.prompt_template ({{why}}); its fields are {', '.join(raw)}: correct it",
    ):
        return _template(config.prompt_template).render(raw)


@functools.lru_cache(maxsize=32)
def _template(text: str) -> jinja2.Template:
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)


def with_system(prompt: Prompt, system: str | None) -> Prompt:
    """Return chat messages with the system prompt first, unless the messages have a system prompt already. None: return
    the prompt unchanged. An empty system prompt: return chat messages without a system prompt."""
    if system is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _rewards(value: Any, where: str) -> dict[str, float] | None:
    if value is None:
        return None
    with explain(ValueError, f"{where} has a 'reward' that {{why}}"):
        return reward_weights(value)
