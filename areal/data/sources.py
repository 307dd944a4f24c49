"""Opens sources of prompts: files, data sets, generated tasks, benchmarks, and mixtures of sources."""

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.base.hub import reach_hub
from areal.config.data_section import BenchmarkConfig, RowsConfig, SourceConfig
from areal.data import addition
from areal.data.files import KINDS, kind_of, open_parquet, read_file, read_object, read_text, unit_of, with_files
from areal.data.prompt_sources import Draw, OneSource, PromptSource, Table, make_row, problem_of
from areal.data.rows import Row

# The number of rows after which a mixture with weights has exactly the given proportions.
BLOCK_ROWS = 1000
# The number of rows that are compared with the rows at the beginning of a run.
DIGESTED_ROWS = 1000


def open_source(config: RowsConfig, seed: int) -> PromptSource:
    """Return the prompts that `config` describes, in an order that depends on `seed`.

    Every row of a file is checked here. The columns of a Hugging Face data set or a Parquet file are checked here, too;
    rows are checked when they are looked up. Raises UserError, with the fault, the place, and a remedy.
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
    apart = frozenset(problem_of(row.prompt) for rows in held_out for row in rows)
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
    """Return the problems of the benchmark `name`, in the order of the source. `index` is the number of a row in the
    source, for any `size` and `dates`. Raises UserError, also if a row is not usable."""
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
    """Return the shares of the sources in rows and held-out rows: the weights, or else the numbers of rows."""
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
    """Divide `count` in proportion to the shares, by largest remainder."""
    exact = [count * share / sum(shares) for share in shares]
    parts = [int(quota) for quota in exact]
    for k in sorted(range(len(parts)), key=lambda k: parts[k] - exact[k])[: count - sum(parts)]:
        parts[k] += 1
    return parts


def _held_out(config: SourceConfig, source: Table | Draw, count: int, seed: int, what: str) -> list[Row]:
    if config.eval_source is not None and count:
        what = f"data.eval_source {config.eval_source!r}"
        # The options belong to `source`. The options fit `eval_source` only if it is the same task or data set.
        options = config.options if _dataset(config.eval_source) == _dataset(str(config.source)) else {}
        source = _open(config, config.eval_source, options, seed, what)
    if not isinstance(source, Table):
        return [dataclasses.replace(source("held_out", i, 0), index=i) for i in range(count)]
    spare = 0 if config.eval_source is not None else 1
    if count > len(source) - spare:
        raise UserError(f"{what} has {len(source)} rows, too few for data.eval_size {count}: lower data.eval_size")
    positions = Random(f"{seed}/held_out").sample(range(len(source)), count)
    return [dataclasses.replace(source.row(position), index=i) for i, position in enumerate(positions)]


def _open(config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str) -> Table | Draw:
    prefix, colon, name_there = name.partition(":")
    if entry := extensions.entry("source", prefix + colon):
        return _opened(entry.load("data.source"), config, name_there, options, seed, what)
    if not name.startswith("hf:") and (kind := kind_of(name)):
        if options:
            raise UserError(f"{what} is a file, which takes no data.options: remove {', '.join(options)}")
        if config.split != "train" and name == config.source:
            raise UserError(
                f"{what} is a file, which has no data.split: remove it, or name a file with the rows of the split"
            )
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
    """Open a source by an entry of the kind `source`: a table, a `Draw`, a list of rows or a Hugging Face data set."""
    opened = opener(config, name, options, seed, what)
    return opened if isinstance(opened, Table) or callable(opened) else table(config, opened, what)


def _folder(name: str) -> tuple[Path, str | None]:
    """Return the folder `name`, or FOLDER and SPLIT of FOLDER:SPLIT."""
    whole, (folder, _, split) = Path(name).expanduser(), name.rpartition(":")
    return (whole, None) if whole.is_dir() or not folder else (Path(folder).expanduser(), split)


def _dataset(name: str) -> str:
    return ":".join(name.split(":")[:2])


def derived_seed(*parts: object) -> int:
    """Return a seed that depends on all parts. The seed is below 2**32, the limit of reasoning_gym."""
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
    """Return the source if it makes a first row. Raises UserError otherwise, for example for bad options."""
    with explain(mistakes, f"{what}: {{why}}: correct data.options or data.size"):
        draw("train", 0, 0)
    return draw


def _open_file(config: SourceConfig, path: Path, what: str) -> Table:
    """Open a file of rows, but Parquet. Blank lines are skipped. The whole file is read and checked at once."""
    numbered = list(read_file(path, what))
    if not numbered:
        raise UserError(f"{what}: the file has no rows: name another file")
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
            raise UserError(f"{what} has no row {number}, counted from 0: name another row")
        return make_row(entry[1], config, f"{path}, {unit_of(path)} {entry[0]},")
    return make_row(read_object(read_text(path, what), str(path), "correct it"), config, str(path))


def table(config: SourceConfig, dataset: Any, what: str) -> Table:
    """Open a Hugging Face data set. Columns and first row are checked at once, other rows when they are looked up."""
    if not len(dataset):
        raise UserError(f"{what}: the data set has no rows: name another data set")
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


class Mixture(PromptSource):
    """The rows of several sources, in blocks. A block has counts[k] rows of sources[k], in a shuffled order. If
    `by_epoch`, a block is an epoch with every row of every source once; otherwise the mixture is endless."""

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
        # A sampler may use several blocks at a time, as many as there are sources.
        self._block = functools.lru_cache(maxsize=2 + len(sources))(self._mixed)

    def key(self, index: int) -> int:
        which, number = self._place(index)
        return self._sources[which].key(number) * len(self._sources) + which

    def _row(self, index: int) -> Row:
        which, number = self._place(index)
        return self._sources[which].row(number)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the source of a training index, and the training index within the source."""
        block, position = divmod(index, sum(self._counts))
        which, number = self._block(block)[position]
        return which, block * self._counts[which] + number

    def _mixed(self, block: int) -> list[tuple[int, int]]:
        """For each row of the block, return the source, and the number among the source's rows in the block."""
        places = [(which, number) for which, count in enumerate(self._counts) for number in range(count)]
        Random(f"{self._seed}/block/{block}").shuffle(places)
        return places


def summary_of(source: PromptSource) -> str:
    """Return the number of rows of an epoch and a digest of some rows; empty if the source is endless."""
    if not source.size:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for index in range(0, source.size, -(-source.size // DIGESTED_ROWS)):
        with suppress(UserError):  # the row is discarded when it is used
            row = source.row(index)
            digest.update(json.dumps([problem_of(row.prompt), row.answer], default=lambda value: "").encode())
    return f"{source.size} {digest.hexdigest()}"
