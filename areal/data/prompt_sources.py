"""Sources of prompts, and how a row is read: prompt, answer, pictures and tools. A row is a pure function of its index.

The master hands out training indices: 0, 1, 2, ... or the choices of `data.sampler`. Any rollout manager can look up
any index, in any order and after any restart: the same configuration and seed give the same row. A source has no
position, so there is nothing to resume.

A finite source is used epoch by epoch, in a new shuffled order in every epoch. No training row has the prompt of a
held-out row: rows of a table with such a prompt are left out, and generated rows are drawn again.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import msgpack
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.data_section import SourceConfig, reward_weights
from areal.data.prompt_forms import prompt_or_none, read_prompt
from areal.data.rows import Prompt, Row, has_parts
from areal.samples.pictures import DIGESTS, FIELDS, digest_of, find

# A generated task that still repeats held-out prompts after this many draws has too few problems to hold some out.
MAX_DRAWS = 100


@dataclass(frozen=True)
class Table:
    """A finite source of at least one row. rows: the source's raw rows, a list or a Hugging Face data set. place:
    returns the place of a row for messages."""

    config: SourceConfig
    rows: Any
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, position: int) -> Row:
        return make_row(self.rows[position], self.config, self.place(position), not isinstance(self.rows, list))

    def prompts(self) -> Iterable[Any]:
        """Return the prompts of all rows, as the source or the template writes them; None for an unusable row."""
        key, columns = self.config.prompt_key, [] if isinstance(self.rows, list) else self.rows.column_names
        is_plain = key in columns and not {*FIELDS} & {*columns}
        if self.config.prompt_template is None and is_plain and not has_parts(prompt_or_none(self.rows[0][key]) or ""):
            return self.rows[key][:]  # a column, without loading the rows
        return map(self._prompt, self.rows)

    def _prompt(self, raw: Mapping[str, Any]) -> Any:
        with suppress(UserError):
            written = written_prompt(raw, self.config, "")
            read = prompt_or_none(written)
            return written if read is None else with_pictures(read, raw, self.config, "")[0]
        return None


Draw = Callable[[str, int, int], Row]
"""An endless source: a function of a side, a number and an attempt that returns a row; the same arguments give the same
row. The side is `train` or `held_out`. Another attempt at the same number gives another row."""


class PromptSource:
    """Training rows by index and held-out rows by number. Made by `open_source`.

    size: the number of rows of an epoch; None if the source is endless. rows: the number of different rows; None if
    there is no end. shares: the share of each source in the rows. held_out: all held-out rows.
    """

    size: int | None
    rows: int | None
    shares: Sequence[float] = (1.0,)

    def __init__(self, held_out: Sequence[Row]) -> None:
        self.held_out = held_out

    def __len__(self) -> int:
        """The number of rows of an epoch. Raises TypeError if the source is endless."""
        if self.size is None:
            raise TypeError("an endless source has no length")
        return self.size

    def row(self, index: int) -> Row:
        """Return the row of training index `index` >= 0: number index % size in the order of epoch index // size.

        Raises UserError if the row is not usable, and IndexError if index < 0.
        """
        if index < 0:
            raise IndexError(f"training index {index}")
        return dataclasses.replace(self._row(index), index=index)

    def _row(self, index: int) -> Row:
        raise NotImplementedError

    def key(self, index: int) -> int:
        """Return the key of the row `row(index)` in the data. The key modulo the number of sources is the source."""
        raise NotImplementedError

    def heldout(self, i: int) -> Row:
        """Return held-out row i, for i in range(eval_size)."""
        return self.held_out[i]


class OneSource(PromptSource):
    """The rows of a source. held_out: the source's held-out rows. apart: prompts that may not be trained on."""

    def __init__(
        self, source: Table | Draw, held_out: Sequence[Row], apart: Set[str], size: int | None, seed: int, what: str
    ) -> None:
        super().__init__(held_out)
        self._source = source
        self._apart = apart
        self._seed = seed
        self._what = what
        self._positions = self._training_positions(source) if isinstance(source, Table) else range(size or 0)
        self.size = self.rows = len(self._positions) if isinstance(source, Table) else size
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def key(self, index: int) -> int:
        if self.size is None:
            return index
        epoch, number = divmod(index, self.size)
        return self._order(epoch)[number]

    def _row(self, index: int) -> Row:
        position = self.key(index)
        if isinstance(self._source, Table):
            return self._source.row(position)
        for attempt in range(MAX_DRAWS):
            row = self._source("train", position, attempt)
            if problem_of(row.prompt) not in self._apart:
                return row
        raise UserError(
            f"{self._what} makes too few different problems to hold {len(self.held_out)} of them out of training: "
            f"lower data.eval_size or widen data.options"
        )

    def _training_positions(self, table: Table) -> Sequence[int]:
        if not self._apart:
            return range(len(table))
        positions = [i for i, prompt in enumerate(table.prompts()) if problem_of(prompt) not in self._apart]
        if not positions:
            raise UserError(
                f"{self._what}: every row has a prompt that is also held out, so none is left to train on: "
                f"lower data.eval_size or name another data.eval_source"
            )
        return positions

    def _shuffled(self, epoch: int) -> Sequence[int]:
        return Random(f"{self._seed}/epoch/{epoch}").sample(self._positions, len(self._positions))


def problem_of(prompt: Any) -> str:
    """Return the part of a prompt that names the problem: the text, or the messages without system messages."""
    read = prompt_or_none(prompt)
    if read is None:
        return json.dumps(prompt, sort_keys=True, default=str)
    messages = [{"role": "user", "content": read}] if isinstance(read, str) else read
    return json.dumps([[m["role"], m["content"]] for m in messages if m["role"] != "system"])


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
