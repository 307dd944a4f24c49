"""The table of tokens: what is known of each token of a sample, in columns that grow, from the engine to the disk.

`COLUMNS` declares them. The engine's sequences, the calls of a sample and the branches of its forest are such tables;
messages and the spool carry their columns as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, Self

import numpy as np

NOT_SAMPLED = -1
NO_WORD = -1
Finish = Literal["stop", "length"]
Tokens = Sequence[int] | np.ndarray


class Column(NamedTuple):
    """A column of numbers, one for each token. engine: whether the engine gives it with every token that it samples.
    unsampled: what it has for a token that was not sampled; None: anything. wide: whether it has several numbers for
    each token, as many for all. missing: what each token of a sample without the column has in a batch, if other
    samples have it: a number, or a field of the sample; None: such a batch is refused. of_pass: whether the model's
    layers take it; other columns go to the loss."""

    dtype: type[np.generic]
    engine: bool = False
    unsampled: float | None = 0.0
    wide: bool = False
    missing: float | str | None = None
    of_pass: bool = False


COLUMNS = {
    "tokens": Column(np.int32, engine=True, unsampled=None),
    "logprobs": Column(np.float32, engine=True),
    "versions": Column(np.int32, engine=True, unsampled=NOT_SAMPLED),
    "kept_words": Column(np.int32, unsampled=NO_WORD, wide=True),
    "kept_logprobs": Column(np.float32, wide=True),
    "returns": Column(np.float64, unsampled=None, missing="reward"),
    "agents": Column(np.int32, missing=0),
    "teacher_logprobs": Column(np.float32),
    "reference_logprobs": Column(np.float32),
    "teacher_top_tokens": Column(np.int32, wide=True),
    "teacher_top_logprobs": Column(np.float32, wide=True),
    "routes": Column(np.uint8, unsampled=None, wide=True, of_pass=True),
    "pictures": Column(np.uint8, unsampled=None, wide=True, missing=0, of_pass=True),
}
"""The columns of a sample: fields of `Trajectory`, columns of the rollouts that a run keeps, and of the batch that the
trainer's loss gets.

tokens: prompt and completion as the engine saw them (never re-tokenised). logprobs: log pi_behav of each sampled token
after temperature, of its distribution after top-p and the like. versions: the policy version that sampled each token.
kept_words: [T, k], the words that each sampled token was drawn from, likeliest first, where `sampling.top_p` or the
like leaves words out and the loss compares policies; `NO_WORD` fills a row. kept_logprobs: [T, k], log pi_behav of
these words, for `score_centring`; 0 for `NO_WORD`.
returns: what each sampled token is credited with, in place of the reward of its sample.
agents: which of several agents the policy played when it sampled a token, a number from the agent's name; 0: none.
teacher_logprobs, reference_logprobs: the log-prob of each sampled token, given those before it in its branch, under the
model of a scorer (`trainer.teacher`, `trainer.reference`). teacher_top_tokens, teacher_top_logprobs: [T, k], the tokens
that are likeliest there for the teacher, and their log-probs (`trainer.teacher_top_k`).
routes: [T, width], the experts that the pass which sampled a token took, as `areal.models.Routing` says
(`trainer.routing`); 0 where not sampled. pictures: [T, 16], the digest of the picture that a token is a placeholder of;
0 if of none."""

ENGINE_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.engine)
SCORED = ("teacher_logprobs", "reference_logprobs")
TOP = ("teacher_top_tokens", "teacher_top_logprobs")
"""The columns that scorers give: of the sampled tokens, and of those that are likeliest."""

KEPT = ("kept_words", "kept_logprobs")
"""The columns of the words that tokens were drawn from. Samples differ in how many they have of them."""

SPARE = 64
"""A table that grows has room for so many more tokens, at the least."""


class TokenTable:
    """Tokens in order, the rows, and what `COLUMNS` declares of each; it grows at its end.

        table = TokenTable()
        table.append(unsampled(prompt))
        table.extend(2, {"tokens": [5, 6], "logprobs": [-0.1, -0.7], "versions": 3})
        table.view(len(prompt)).tokens  # [5, 6]

    Its columns are the engine's and any others that it was given. A column that some rows lack has for them what it has
    for tokens that were not sampled. Arrays that it has given stay as they are, whatever is added.
    """

    __slots__ = ("_columns", "_length")

    def __init__(self, columns: Mapping[str, np.ndarray] | None = None) -> None:
        """columns: arrays of one length and the declared types, the engine's among them. They are not copied."""
        self._columns = dict(columns or _EMPTY)
        self._length = len(self._columns["tokens"])

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]."""
        return self._columns["tokens"][: self._length]

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n], under the distribution that each was drawn from (after temperature); 0 if not sampled."""
        return self._columns["logprobs"][: self._length]

    @property
    def versions(self) -> np.ndarray:
        """int32 [n], the policy version that sampled each; -1 if not sampled."""
        return self._columns["versions"][: self._length]

    @property
    def pictures(self) -> np.ndarray | None:
        """uint8 [n, 16], as `areal.samples.trajectory.Trajectory` has it."""
        return self._columns["pictures"][: self._length] if "pictures" in self._columns else None

    @property
    def nbytes(self) -> int:
        """The size of all columns."""
        return sum(array.nbytes for array in self.columns.values())

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """All columns, by name."""
        return {name: array[: self._length] for name, array in self._columns.items()}

    def view(self, begin: int = 0, end: int | None = None) -> "TokenTable":
        """The rows from `begin` to `end` - 1, which are not copied."""
        stop = self._length if end is None else min(end, self._length)
        return TokenTable({name: array[begin:stop] for name, array in self._columns.items()})

    def append(self, rows: "TokenTable") -> None:
        """Add copies of the rows of another table."""
        self.extend(len(rows), rows.columns)

    def extend(self, count: int, columns: Mapping[str, Any]) -> None:
        """Add `count` rows. columns: for each [count], or one number for all of them."""
        begin, end = self._length, self._length + count
        arrays, capacity = self._columns, len(self._columns["tokens"])
        for name, values in columns.items():
            if name not in arrays:
                arrays[name] = _filled(name, capacity, np.shape(values)[1:])
        if end > capacity:  # twice as long, so that each row is copied a few times at most
            for name, array in arrays.items():
                grown = np.empty((2 * end + SPARE, *array.shape[1:]), array.dtype)
                grown[:begin] = array[:begin]
                arrays[name] = grown
        for name, array in arrays.items():
            array[begin:end] = columns[name] if name in columns else (COLUMNS[name].unsampled or 0)
        self._length = end


_EMPTY = {name: np.empty(0, COLUMNS[name].dtype) for name in ENGINE_COLUMNS}


class Generation(TokenTable):
    """What the policy sampled after a prompt: tokens int32, logprobs float32, versions int32, all [n].

    finish: "stop" (the policy ended the turn; with its stop token), "length" (no room was left), None: more follows.
    """

    __slots__ = ("finish",)

    def __init__(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        finish: Finish | None = None,
        **columns: np.ndarray,
    ) -> None:
        super().__init__({"tokens": tokens, "logprobs": logprobs, "versions": versions, **columns})
        self.finish = finish

    @classmethod
    def of(cls, table: TokenTable, finish: Finish | None) -> Self:
        """The rows of a table, which are not copied."""
        rows = cls.__new__(cls)
        rows._columns, rows._length, rows.finish = table.columns, len(table), finish
        return rows


def unsampled(tokens: Tokens, pictures: np.ndarray | None = None) -> TokenTable:
    """Tokens that are not the policy's. tokens: [n]. pictures: their column of this name."""
    column = np.asarray(tokens, np.int32)
    columns = {"tokens": column} | {name: _filled(name, len(column)) for name in ENGINE_COLUMNS[1:]}
    return TokenTable(columns if pictures is None else columns | {"pictures": pictures})


def _filled(name: str, count: int, width: tuple[int, ...] = ()) -> np.ndarray:
    return np.full((count, *width), COLUMNS[name].unsampled or 0, COLUMNS[name].dtype)


def joined(tables: Iterable[TokenTable]) -> dict[str, np.ndarray]:
    """The columns of several tables, one after another. `split` is the inverse."""
    parts = [_EMPTY, *(table.columns for table in tables)]
    widths = {name: array.shape[1:] for columns in parts for name, array in columns.items()}
    return {
        name: np.concatenate(
            [part[name] if name in part else _filled(name, len(part["tokens"]), width) for part in parts]
        )
        for name, width in widths.items()
    }


def split(columns: Mapping[str, np.ndarray], counts: Sequence[int]) -> list[TokenTable]:
    """Tables of `counts` rows, which follow each other in columns that came from outside, and are not copied. Raises
    ValueError if these are not the declared columns, or too long or short."""
    check(columns, sum(counts))
    table, ends = TokenTable(columns), np.cumsum([0, *counts], dtype=np.int64).tolist()
    return [table.view(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]


def check(columns: Mapping[str, np.ndarray], count: int) -> None:
    """Raises ValueError if columns that came from outside are not of `count` tokens, as `COLUMNS` declares them."""
    if wrong := columns.keys() - COLUMNS.keys() or set(ENGINE_COLUMNS) - columns.keys():
        raise ValueError(f"tokens have other columns than they should: {', '.join(sorted(wrong))}")
    for name, array in columns.items():
        column = COLUMNS[name]
        if array.dtype != column.dtype or array.ndim != 1 + column.wide or len(array) != count:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, but should have {count} {column.dtype.__name__}")


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as one frame, which a message carries and the spool stores as it came: a header, such as
    `tokens <i4 300;rewards <f8 1`, and their bytes. `unpack` is the inverse."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)  # so that each is aligned
    header = ";".join(f"{name} {a.dtype.str} {'x'.join(map(str, a.shape))}" for name, a in ordered)
    begin = f"{len(header):08}{header}".encode()
    return b"".join([begin, b" " * (-len(begin) % 8), *(array.tobytes() for _, array in ordered)])


def unpack(frame: bytes | memoryview) -> dict[str, np.ndarray]:
    """The arrays in a frame, which are not copied. Raises ValueError if it is none."""
    data = memoryview(frame)
    size = int(bytes(data[:8]))
    arrays, end = {}, 8 + size + -(8 + size) % 8
    for part in str(data[8 : 8 + size], "utf-8").split(";"):
        name, kind, shape = part.split(" ")
        if (dtype := _KINDS.get(kind)) is None:
            raise ValueError(f"{name} is of the unknown type {kind}")
        begin, sizes = end, [*map(int, shape.split("x"))]
        end += prod(sizes) * dtype.itemsize
        arrays[name] = np.frombuffer(data[begin:end], dtype).reshape(sizes)
    if end != len(data):
        raise ValueError(f"a frame of {len(data)} bytes has arrays of {end}")
    return arrays


_KINDS = {kind.str: kind for kind in map(np.dtype, ("int32", "int64", "float32", "float64", "uint8"))}
