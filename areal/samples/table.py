"""The table of tokens: the columns of a sample, with a number or several for every token, from the engine to the disk.

`COLUMNS` declares the columns. The engine's sequences, the calls of a sample and the branches of a forest are tables;
messages and the spool carry the columns unchanged.
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
    """A column of numbers for the tokens of a sample. engine: whether the engine gives a value with every sampled
    token. unsampled: the value for an unsampled token; None: any value. wide: whether a token has several numbers, as
    many for all tokens. missing: the value in a batch for samples without the column: a number, or a field of the
    sample; None: a mixed batch is refused. of_pass: whether the model's layers take the column; other columns go to the
    loss."""

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
"""The columns of a sample: of `Trajectory`, of the rollouts of a run, and of the batch for the trainer's loss.

tokens: prompt and completion as the engine saw them (never re-tokenised). logprobs: log pi_behav of a sampled token
after temperature, in the distribution after top-p and the like. versions: the policy version that sampled a token.
kept_words: [T, k], the words that a sampled token was drawn from, likeliest first, if `sampling.top_p` or the like
leaves words out and the loss compares policies; `NO_WORD` fills a row. kept_logprobs: [T, k], log pi_behav of
`kept_words`, for `score_centring`; 0 for `NO_WORD`.
returns: the credit of a sampled token, in place of the reward of the sample.
agents: the agent that the policy played when it sampled a token, a number made from the agent's name; 0: no agent.
teacher_logprobs, reference_logprobs: the log-prob of a sampled token, given the tokens before in the branch, under the
model of a scorer (`trainer.teacher`, `trainer.reference`). teacher_top_tokens, teacher_top_logprobs: [T, k], the
teacher's likeliest tokens at the place of a sampled token, and their log-probs (`trainer.teacher_top_k`).
routes: [T, width], experts of the pass that sampled a token, as `expert_routing.Routing` says (`trainer.routing`); 0
at unsampled tokens. pictures: [T, 16], the digest of the picture behind a placeholder token; 0 at other tokens."""

ENGINE_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.engine)
SCORED = ("teacher_logprobs", "reference_logprobs")
TOP = ("teacher_top_tokens", "teacher_top_logprobs")
"""The columns of scorers: for sampled tokens, and for the likeliest tokens."""

KEPT = ("kept_words", "kept_logprobs")
"""The columns of the words that a token was drawn from. The width differs between samples."""

SPARE = 64
"""The least number of free rows in a table after it has grown."""


class TokenTable:
    """Tokens in order, as rows, with the columns of `COLUMNS`. A table grows at the end.

    >>> table = TokenTable()
    >>> table.append(unsampled([1, 2]))
    >>> table.extend(2, {"tokens": [5, 6], "logprobs": [-0.1, -0.7], "versions": 3})
    >>> table.view(2).tokens.tolist(), table.versions.tolist()
    ([5, 6], [-1, -1, 3, 3])

    Rows without a value in a given column get the value of unsampled tokens. Returned arrays never change.
    """

    __slots__ = ("_columns", "_length")

    def __init__(self, columns: Mapping[str, np.ndarray] | None = None) -> None:
        """columns: arrays of one length and the declared types, the engine's among them. The arrays are not copied."""
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
        """float32 [n], in the distribution that a token was drawn from (after temperature); 0 if not sampled."""
        return self._columns["logprobs"][: self._length]

    @property
    def versions(self) -> np.ndarray:
        """int32 [n], the policy version that sampled a token; -1 if not sampled."""
        return self._columns["versions"][: self._length]

    @property
    def pictures(self) -> np.ndarray | None:
        """uint8 [n, 16], as in `areal.samples.trajectory.Trajectory`."""
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
        """The rows from `begin` to `end` - 1, not copied."""
        stop = self._length if end is None else min(end, self._length)
        return TokenTable({name: array[begin:stop] for name, array in self._columns.items()})

    def append(self, rows: "TokenTable") -> None:
        """Add copies of the rows of another table."""
        self.extend(len(rows), rows.columns)

    def extend(self, count: int, columns: Mapping[str, Any]) -> None:
        """Add `count` rows. columns: by name, an array [count], or one number for all rows."""
        begin, end = self._length, self._length + count
        arrays, capacity = self._columns, len(self._columns["tokens"])
        for name, values in columns.items():
            if name not in arrays:
                arrays[name] = _filled(name, capacity, np.shape(values)[1:])
        if end > capacity:  # twice as long, so that a row is copied a few times at most
            for name, array in arrays.items():
                grown = np.empty((2 * end + SPARE, *array.shape[1:]), array.dtype)
                grown[:begin] = array[:begin]
                arrays[name] = grown
        for name, array in arrays.items():
            array[begin:end] = columns[name] if name in columns else (COLUMNS[name].unsampled or 0)
        self._length = end


_EMPTY = {name: np.empty(0, COLUMNS[name].dtype) for name in ENGINE_COLUMNS}


class Generation(TokenTable):
    """A part sampled by the policy after a prompt: tokens int32, logprobs float32, versions int32, all [n].

    finish: "stop" (the policy ended the turn, with a stop token), "length" (no room was left), or None (more follows).
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
        """The rows of a table, not copied."""
        rows = cls.__new__(cls)
        rows._columns, rows._length, rows.finish = table.columns, len(table), finish
        return rows


def unsampled(tokens: Tokens, pictures: np.ndarray | None = None) -> TokenTable:
    """Make a table of tokens that the policy did not sample. tokens: [n]. pictures: the column `pictures`."""
    column = np.asarray(tokens, np.int32)
    columns = {"tokens": column} | {name: _filled(name, len(column)) for name in ENGINE_COLUMNS[1:]}
    return TokenTable(columns if pictures is None else columns | {"pictures": pictures})


def _filled(name: str, count: int, width: tuple[int, ...] = ()) -> np.ndarray:
    return np.full((count, *width), COLUMNS[name].unsampled or 0, COLUMNS[name].dtype)


def joined(tables: Iterable[TokenTable]) -> dict[str, np.ndarray]:
    """Return the columns of several tables, one after another. `split` is the inverse."""
    parts = [_EMPTY, *(table.columns for table in tables)]
    widths = {name: array.shape[1:] for columns in parts for name, array in columns.items()}
    return {
        name: np.concatenate(
            [part[name] if name in part else _filled(name, len(part["tokens"]), width) for part in parts]
        )
        for name, width in widths.items()
    }


def split(columns: Mapping[str, np.ndarray], counts: Sequence[int]) -> list[TokenTable]:
    """Split received columns into tables of `counts` rows, without a copy. Raises ValueError if the columns are not the
    declared columns, or too long or too short."""
    check(columns, sum(counts))
    table, ends = TokenTable(columns), np.cumsum([0, *counts], dtype=np.int64).tolist()
    return [table.view(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]


def check(columns: Mapping[str, np.ndarray], count: int) -> None:
    """Raises ValueError if received columns do not have `count` rows, or not the types that `COLUMNS` declares."""
    if wrong := columns.keys() - COLUMNS.keys() or set(ENGINE_COLUMNS) - columns.keys():
        raise ValueError(f"tokens have other columns than they should: {', '.join(sorted(wrong))}")
    for name, array in columns.items():
        column = COLUMNS[name]
        if array.dtype != column.dtype or array.ndim != 1 + column.wide or len(array) != count:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, but should have {count} {column.dtype.__name__}")


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Pack arrays into a frame for messages and the spool: a header, such as `tokens <i4 300;rewards <f8 1`, and the
    arrays' bytes. `unpack` is the inverse."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)  # so that every array is aligned
    header = ";".join(f"{name} {a.dtype.str} {'x'.join(map(str, a.shape))}" for name, a in ordered)
    begin = f"{len(header):08}{header}".encode()
    return b"".join([begin, b" " * (-len(begin) % 8), *(array.tobytes() for _, array in ordered)])


def unpack(frame: bytes | memoryview) -> dict[str, np.ndarray]:
    """Return the arrays in a frame, not copied. Raises ValueError if the bytes are no frame."""
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
