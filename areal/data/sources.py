"""Sources of prompts. A row is a pure function of its index.

The master hands out training indices, 0, 1, 2, ... unless `data.sampler` chooses others, and any rollout manager can
look up any of them, in any order and after any restart: the same configuration and seed give the same row. A source has
no position, so there is nothing to resume.

A finite source is used epoch by epoch, and each epoch has its own shuffled order. No training row has the prompt of a
held-out row: such rows of a table are left out, and such generated rows are drawn again.
"""

import dataclasses
import functools
import hashlib
import inspect
import itertools
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
from areal.base.hub import reach_hub
from areal.config.data_section import BenchmarkConfig, RowsConfig, SourceConfig, reward_weights
from areal.data import addition
from areal.data.files import KINDS, kind_of, open_parquet, read_file, read_object, read_text, unit_of, with_files
from areal.data.offered_tools import read_tools
from areal.data.rows import Prompt, Row, has_parts, prompt_or_none, read_prompt
from areal.samples.pictures import DIGESTS, FIELDS, digest_of, find

# If a generated task still repeats held-out prompts after this many draws, it has too few problems to hold some out.
MAX_DRAWS = 100
# Rows in which a mixture with weights has its proportions exactly.
BLOCK_ROWS = 1000
# So many rows are looked at to see whether the rows are still those with which a run began.
DIGESTED_ROWS = 1000


@dataclass(frozen=True)
class Table:
    """A finite source of at least one row. rows: as they are in the source, a list or a Hugging Face data set. place:
    says in messages where the row of a position is."""

    config: SourceConfig
    rows: Any
    place: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, position: int) -> Row:
        return make_row(self.rows[position], self.config, self.place(position), not isinstance(self.rows, list))

    def prompts(self) -> Iterable[Any]:
        """The prompts of all rows, as the source or the template writes them; None for a row to be discarded."""
        key, columns = self.config.prompt_key, [] if isinstance(self.rows, list) else self.rows.column_names
        is_plain = key in columns and not {*FIELDS} & {*columns}
        if self.config.prompt_template is None and is_plain and not has_parts(prompt_or_none(self.rows[0][key]) or ""):
            return self.rows[key][:]  # a column, without the others
        return map(self._prompt, self.rows)

    def _prompt(self, raw: Mapping[str, Any]) -> Any:
        with suppress(UserError):
            written = _prompt(raw, self.config, "")
            read = prompt_or_none(written)
            return written if read is None else _with_pictures(read, raw, self.config, "")[0]
        return None


Draw = Callable[[str, int, int], Row]
"""An endless source: called with a side, a number and an attempt, it makes one row; the same arguments give the same
row. The side is `train` or `held_out`. Another attempt at the same number gives another row."""


class PromptSource:
    """Training rows by index and held-out rows by number. Made by `open_source`.

    size: the number of rows of one epoch; None if the source is endless. rows: the number of different rows; None if
    they have no end. shares: the share of each source in the rows. held_out: all held-out rows.
    """

    size: int | None
    rows: int | None
    shares: Sequence[float] = (1.0,)

    def __init__(self, held_out: Sequence[Row]) -> None:
        self.held_out = held_out

    def __len__(self) -> int:
        """The number of rows of one epoch. Raises TypeError if the source is endless."""
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
        """Which row of the data `row(index)` is: modulo the number of sources it is the source."""
        raise NotImplementedError

    def summary(self) -> str:
        """The number of rows of one epoch, and a digest of some of them; empty if the source is endless."""
        if not self.size:
            return ""
        digest = hashlib.blake2b(digest_size=8)
        for index in range(0, self.size, -(-self.size // DIGESTED_ROWS)):
            with suppress(UserError):  # it is discarded when its turn comes
                row = self.row(index)
                digest.update(json.dumps([_key(row.prompt), row.answer], default=lambda value: "").encode())
        return f"{self.size} {digest.hexdigest()}"

    def heldout(self, i: int) -> Row:
        """Return held-out row i, for i in range(eval_size)."""
        return self.held_out[i]


class OneSource(PromptSource):
    """The rows of one source. held_out: its own held-out rows. apart: prompts that may not be trained on."""

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
            if _key(row.prompt) not in self._apart:
                return row
        raise UserError(
            f"{self._what} makes too few different problems to hold {len(self.held_out)} of them out of training: "
            f"lower data.eval_size or widen data.options"
        )

    def _training_positions(self, table: Table) -> Sequence[int]:
        if not self._apart:
            return range(len(table))
        positions = [i for i, prompt in enumerate(table.prompts()) if _key(prompt) not in self._apart]
        if not positions:
            raise UserError(
                f"{self._what}: every row has a prompt that is also held out, so none is left to train on: "
                f"lower data.eval_size or name another data.eval_source"
            )
        return positions

    def _shuffled(self, epoch: int) -> Sequence[int]:
        return Random(f"{self._seed}/epoch/{epoch}").sample(self._positions, len(self._positions))


class Mixture(PromptSource):
    """The rows of several sources, in blocks. Each block has counts[k] rows of sources[k], in an order of its own. If
    `by_epoch`, a block is an epoch, which has every row of every source once; else the mixture is endless."""

    def __init__(self, sources: Sequence[OneSource], counts: Sequence[int], by_epoch: bool, seed: int) -> None:
        held_out = [row for source in sources for row in source.held_out]
        super().__init__([dataclasses.replace(row, index=i) for i, row in enumerate(held_out)])
        self.size = sum(counts) if by_epoch else None
        sizes = [source.rows for source in sources]
        self.rows = None if None in sizes else sum(size or 0 for size in sizes)
        self.shares = [float(count) for count in counts]
        self._sources = sources
        self._counts = counts
        self._seed = seed
        # A sampler may be in another block with each source.
        self._block = functools.lru_cache(maxsize=2 + len(sources))(self._mixed)

    def key(self, index: int) -> int:
        which, number = self._place(index)
        return self._sources[which].key(number) * len(self._sources) + which

    def _row(self, index: int) -> Row:
        which, number = self._place(index)
        return self._sources[which].row(number)

    def _place(self, index: int) -> tuple[int, int]:
        """The source of a training index, and the training index there."""
        block, position = divmod(index, sum(self._counts))
        which, number = self._block(block)[position]
        return which, block * self._counts[which] + number

    def _mixed(self, block: int) -> list[tuple[int, int]]:
        """For each row of the block: which source, and which of the rows that the source has in the block."""
        places = [(which, number) for which, count in enumerate(self._counts) for number in range(count)]
        Random(f"{self._seed}/block/{block}").shuffle(places)
        return places


def open_source(config: RowsConfig, seed: int) -> PromptSource:
    """Return the prompts that `config` describes, in an order that depends on `seed`.

    Every row of a file is checked here. The columns of a Hugging Face data set or a Parquet file are checked here too,
    but its rows when they are looked up. Raises UserError, which says what is wrong, where, and what to do.
    """
    if not config.parts:
        return Mixture([], [], by_epoch=True, seed=seed)
    opened: list[tuple[SourceConfig, Table | Draw, str]] = []
    for part in config.parts:
        what = f"data.source {part.source!r}"
        source = _open(part, str(part.source), part.options, seed, what)
        if isinstance(source, Table) and part.size is not None:
            raise UserError(f"data.size is for generated tasks, but {what} has rows of its own: remove data.size")
        opened.append((part, source, what))
    shares = _shares(config, opened)
    held_out = [
        _held_out(part, source, count, seed, what)
        for (part, source, what), count in zip(opened, _divided(config.eval_size, shares), strict=True)
    ]
    apart = frozenset(_key(row.prompt) for rows in held_out for row in rows)
    sources = [
        OneSource(source, rows, apart, part.size, seed, what)
        for (part, source, what), rows in zip(opened, held_out, strict=True)
    ]
    if not config.sources:
        return sources[0]
    by_epoch = config.sources[0].weight is None
    counts = [len(source) for source in sources] if by_epoch else _divided(BLOCK_ROWS, shares)
    if 0 in counts:
        small = config.sources[counts.index(0)]
        raise UserError(f"the weight of data.source {small.source!r} is below 1/{BLOCK_ROWS} of all: raise it")
    return Mixture(sources, counts, by_epoch, seed)


def open_benchmark(name: str, config: BenchmarkConfig, seed: int) -> list[Row]:
    """Return the problems of the benchmark `name`, in the order of its source. `index` is the number of the row there,
    so it is the same for any `size` and `dates`. Raises UserError, also if a row is not usable."""
    if config.source is None:
        key = f"evaluator.benchmarks.{name}.source"
        raise UserError(f"The benchmark {name} names no source: set {key}=FILE.jsonl, or --source {name}=FILE.jsonl.")
    what = f"the source {config.source!r} of the benchmark {name}"
    # Without the size, on which the rows of a generated task would depend.
    source = _open(config.model_copy(update={"size": None}), config.source, config.options, seed, what)
    if isinstance(source, Table):
        rows: Iterable[Row] = map(source.row, range(len(source)))
    elif config.size is None:
        raise UserError(f"{what} has no end: set evaluator.benchmarks.{name}.size")
    else:
        rows = (source("held_out", i, 0) for i in range(config.size))
    numbered = (dataclasses.replace(row, index=i) for i, row in enumerate(rows))
    problems = list(itertools.islice((row for row in numbered if _in_window(row, config, what)), config.size))
    if not problems:
        raise UserError(f"{what} has no row of the days from {config.dates[0]} to {config.dates[1]}: correct dates")  # type: ignore[index]
    return problems


def _in_window(row: Row, config: BenchmarkConfig, what: str) -> bool:
    if config.dates is None:
        return True
    value = row.fields.get(config.date_key)
    with explain(
        ValueError,
        f"{what}, row {row.index}, has the {config.date_key!r} {value!r}, which is no date: set date_key, or dates "
        f"to null",
    ):
        day = date.fromisoformat(str(value)[:10])
    return config.dates[0] <= day <= config.dates[1]


def _shares(config: RowsConfig, opened: list[tuple[SourceConfig, Table | Draw, str]]) -> list[float]:
    """By which the rows and the held-out rows are divided among the sources: weights, or else numbers of rows."""
    if not config.sources:
        return [1.0]
    if config.sources[0].weight is not None:
        return [float(part.weight or 0) for part in config.sources]
    sizes = [len(source) if isinstance(source, Table) else part.size for part, source, _ in opened]
    if None in sizes:
        what = opened[sizes.index(None)][2]
        raise UserError(f"{what} has no end, so data.sources need weights: give each a weight, or this one a size")
    return [float(size or 0) for size in sizes]


def _divided(count: int, shares: Sequence[float]) -> list[int]:
    """`count` in proportion to the shares, by largest remainder."""
    exact = [count * share / sum(shares) for share in shares]
    parts = [int(quota) for quota in exact]
    for k in sorted(range(len(parts)), key=lambda k: parts[k] - exact[k])[: count - sum(parts)]:
        parts[k] += 1
    return parts


def _held_out(config: SourceConfig, source: Table | Draw, count: int, seed: int, what: str) -> list[Row]:
    if config.eval_source is not None and count:
        what = f"data.eval_source {config.eval_source!r}"
        # The options belong to `source`. They only fit `eval_source` if it is the same task or data set.
        options = config.options if _dataset(config.eval_source) == _dataset(str(config.source)) else {}
        source = _open(config, config.eval_source, options, seed, what)
    if not isinstance(source, Table):
        return [dataclasses.replace(source("held_out", i, 0), index=i) for i in range(count)]
    spare = 0 if config.eval_source is not None else 1
    if count > len(source) - spare:
        raise UserError(f"{what} has {len(source)} rows, too few for data.eval_size {count}: lower data.eval_size")
    positions = Random(f"{seed}/held_out").sample(range(len(source)), count)
    return [dataclasses.replace(source.row(position), index=i) for i, position in enumerate(positions)]


def _key(prompt: Any) -> str:
    """What prompts of the same problem share: the text, or the messages without those of the system."""
    read = prompt_or_none(prompt)
    if read is None:
        return json.dumps(prompt, sort_keys=True, default=str)
    messages = [{"role": "user", "content": read}] if isinstance(read, str) else read
    return json.dumps([[m["role"], m["content"]] for m in messages if m["role"] != "system"])


def _open(config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str) -> Table | Draw:
    prefix, colon, name_there = name.partition(":")
    if entry := extensions.entry("source", prefix + colon):
        return _opened(entry.load("data.source"), config, name_there, options, seed, what)
    if not name.startswith("hf:") and (kind := kind_of(name)):
        if options:
            raise UserError(f"{what} is a file, which takes no data.options: remove {', '.join(options)}")
        if config.split != "train" and name == config.source:
            raise UserError(f"{what} is a file, which has no data.split: remove it, or name a file with those rows")
        path = Path(name).expanduser()
        return table(config, open_parquet(path, what), what) if kind == ".parquet" else _open_file(config, path, what)
    if name.startswith("hf:") or _folder(name)[0].is_dir():
        return _open_hugging_face(config, name, options, what)
    raise UserError(
        f"{what} is none of {', '.join(extensions.names('source'))}, a path ending in {', '.join(KINDS)}, hf:NAME, or "
        f"the path of a folder that exists: correct it"
    )


def _opened(
    opener: Callable[..., Any], config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str
) -> Table | Draw:
    """What an entry of the kind `source` opens: a table, a `Draw`, or rows, a list or a Hugging Face data set."""
    opened = opener(config, name, options, seed, what)
    return opened if isinstance(opened, Table) or callable(opened) else table(config, opened, what)


def _folder(name: str) -> tuple[Path, str | None]:
    """The folder that `name` is, or FOLDER and SPLIT of FOLDER:SPLIT."""
    whole, (folder, _, split) = Path(name).expanduser(), name.rpartition(":")
    return (whole, None) if whole.is_dir() or not folder else (Path(folder).expanduser(), split)


def _dataset(name: str) -> str:
    return ":".join(name.split(":")[:2])


def make_row(raw: Mapping[str, Any], config: SourceConfig, where: str, of_table: bool = False) -> Row:
    """Return the Row of `raw`, which is at `where` in the source. of_table: as of `read_prompt`. Raises UserError if it
    is not usable."""
    prompt_key, answer_key = config.prompt_key, config.answer_key
    for key, setting in (prompt_key, "data.prompt_key"), (answer_key, "data.answer_key"):
        needed = key is not None and not (key == prompt_key and config.prompt_template)
        if needed and _field(raw, str(key)) is _MISSING:
            advice = "=reward_model.ground_truth" * (key == answer_key and "reward_model" in raw)  # a row of verl
            names = ", ".join(raw) or "nothing"
            raise UserError(f"{where} has no {key!r}, only {names}: add it or set {setting}{advice}")
    answer = _field(raw, answer_key) if answer_key else None
    written = _prompt(raw, config, where)
    if written in ("", []):
        raise UserError(f"{where} has an empty {prompt_key!r}: write one, or remove the row")
    with explain(ValueError, f"{where} has a {prompt_key!r} that cannot be read ({{why}}): correct it"):
        prompt = read_prompt(written, of_table=of_table)
    prompt, pictures = _with_pictures(prompt, raw, config, where)
    if pictures:
        raw = {name: value for name, value in raw.items() if name not in FIELDS}
        raw = raw | {DIGESTS: [digest_of(content) for content in pictures], prompt_key: prompt}
    elif DIGESTS in raw:
        raise UserError(f"{where} has {DIGESTS!r}, which name pictures that the row has: leave the field out")
    fields = {"prompt": prompt, **raw, "answer": answer}
    if config.prompt_template is None:
        fields["prompt"] = prompt
    # A data set of the hub has dates where its files have texts of JSON that look like them.
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
    """The tools of a row, which stand beside its prompt. Raises UserError if they cannot be read or shown."""
    if config.tools_key is None:
        return None
    beside, dot, _ = config.prompt_key.rpartition(".")
    value = _field(raw, f"{beside}{dot}{config.tools_key}")
    advice = f"correct {config.tools_key!r}, or set data.tools_key=null"
    with explain(ValueError, f"{where} has tools that cannot be read ({{why}}): {advice}"):
        tools = None if value is _MISSING else read_tools(value, of_table=of_table)
    if tools and not is_chat:
        raise UserError(
            f"{where} has tools, which a chat template shows, but its prompt is a text: write messages, set "
            f"data.system_prompt, or set data.tools_key=null"
        )
    return tools


def _with_pictures(
    prompt: Prompt, raw: Mapping[str, Any], config: SourceConfig, where: str
) -> tuple[Prompt, tuple[bytes, ...]]:
    """The prompt of a row with its pictures in their places, and these. Paths begin at the folder of the source."""
    if not any(raw.get(name) for name in FIELDS) and not has_parts(prompt):
        return prompt, ()
    source = Path(str(config.source)).expanduser()
    with explain(UserError, f"{where}: {{why}}"):
        place = find("place")
    placed: tuple[Prompt, tuple[bytes, ...]] = place(prompt, raw, source if source.is_dir() else source.parent, where)
    return placed


_MISSING = object()


def _field(raw: Mapping[str, Any], key: str) -> Any:
    """The field of a row, or that of an object in it: `reward_model.ground_truth`. _MISSING if it has none."""
    value: Any = raw
    for part in [key] if key in raw else key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _prompt(raw: Mapping[str, Any], config: SourceConfig, where: str) -> Any:
    """The prompt of `raw` as it is, or as the template writes it."""
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
    """Return chat messages with the system prompt first, unless they have one of their own. None: return the prompt as
    it is. An empty system prompt: return chat messages without one."""
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


def derived_seed(*parts: object) -> int:
    """Return a seed that depends on all parts. It is below 2**32, the limit of reasoning_gym."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest())


def open_addition(config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str) -> Draw:
    option_names = set(inspect.signature(addition.make_row).parameters) - {"seed", "index", "held_out"}
    unknown = [name for name in options if name not in option_names]
    if unknown:
        raise UserError(f"{what} has no option {unknown[0]!r}: choose from {', '.join(sorted(option_names))}")
    config = config.model_copy(update={"prompt_key": "prompt", "answer_key": "answer"})

    def draw(side: str, number: int, attempt: int) -> Row:
        raw = addition.make_row(derived_seed(seed, side, attempt), number, held_out=side == "held_out", **options)
        return make_row(raw, config, f"{what}, row {number},")

    return with_first_row(draw, (TypeError, ValueError), what)


def with_first_row(draw: Draw, mistakes: tuple[type[Exception], ...], what: str) -> Draw:
    """Return the source if it can make its first row. Bad options are detected there and raise UserError."""
    with explain(mistakes, f"{what}: {{why}}: correct data.options or data.size"):
        draw("train", 0, 0)
    return draw


def _open_file(config: SourceConfig, path: Path, what: str) -> Table:
    """A file of rows, but Parquet; blank lines are skipped. The whole file is read and checked at once."""
    numbered = list(read_file(path, what))
    if not numbered:
        raise UserError(f"{what}: the file has no rows: name another one")
    unit = unit_of(path)
    table = Table(config, [raw for _, raw in numbered], lambda position: f"{path}, {unit} {numbered[position][0]},")
    for position in range(len(table)):
        table.row(position)
    return table


def read_row(path: Path, config: SourceConfig, number: int = 0) -> Row:
    """Return the row of this number, from 0, in a file of rows; any other file is one row. Raises UserError."""
    what = f"the file of rows {path}"
    if kind_of(path.name) not in (None, ".json"):
        entry = next(itertools.islice(read_file(path, what), number, None), None)
        if entry is None:
            raise UserError(f"{what} has no row {number}, counted from 0: name another one")
        return make_row(entry[1], config, f"{path}, {unit_of(path)} {entry[0]},")
    return make_row(read_object(read_text(path, what), str(path), "correct it"), config, str(path))


def table(config: SourceConfig, dataset: Any, what: str) -> Table:
    """A Hugging Face data set. Its columns and first row are checked at once, other rows when they are looked up."""
    if not len(dataset):
        raise UserError(f"{what}: the data set has no rows: name another one")
    table = Table(config, dataset, lambda position: f"{what}, row {position},")
    table.row(0)
    return table


def _open_hugging_face(config: SourceConfig, name: str, options: Mapping[str, Any], what: str) -> Table:
    """Open `hf:NAME`, or a folder that `save_to_disk` has written or that has files as a repository of the hub.
    `hf:NAME:SPLIT` and `FOLDER:SPLIT`: SPLIT replaces data.split."""
    offline = reach_hub() if name.startswith("hf:") else ""
    import datasets  # takes seconds

    place, split = name, None
    if name.startswith("hf:"):
        place, _, split = name.removeprefix("hf:").partition(":")
    else:
        folder, split = _folder(name)
        place = str(folder)
        datasets.disable_progress_bars()
    split = split or config.split
    saved = any((Path(place) / file).is_file() for file in ("dataset_dict.json", "state.json"))
    with (
        explain(
            (OSError, TypeError, ValueError, datasets.exceptions.DatasetsError),
            f"{what} cannot be loaded ({{why}}): correct the name, data.split or data.options",
        ),
        explain(
            ConnectionError,
            f"{what} is not in this machine's cache, and the hub is not there ({offline or '{why}'}): connect, or name "
            f"a file of rows",
        ),
    ):
        dataset = datasets.load_from_disk(place) if saved else datasets.load_dataset(place, **options, split=split)
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UserError(f"{what} has no split {split!r}: set data.split to one of {', '.join(dataset)}")
        dataset = dataset[split]
    return table(config, with_files(dataset), what)
