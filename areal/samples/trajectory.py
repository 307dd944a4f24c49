"""Trajectories and groups: the data that generation sends to training.

A token that the policy did not sample (the prompt, a tool's answer) has version -1 and takes no part in the loss.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from areal.samples.table import (
    COLUMNS,
    ENGINE_COLUMNS,
    KEPT,
    NO_WORD,
    NOT_SAMPLED,
    Finish,
    TokenTable,
    check,
    pack,
    unpack,
)

LARGEST_REWARD = 1e9
"""The largest absolute value of a reward. Beside a larger reward, the rest of a batch would teach nothing."""

ROUNDING = 1e-5
"""Two rewards are equal if they differ by less than this share of the larger reward: rounding in float32, in which
reward models and rewards in torch compute. There the rewards 0.7 and 0.6 + 0.1 differ by a share of 1.7e-7."""

LARGEST_FIELD = 16 << 10
"""The largest size of a kept value of a row, as JSON."""

DIGEST_BYTES = 16
"""The size of the digest of a picture."""

FINISHES: tuple[Finish, ...] = ("stop", "length")
_OF_SAMPLE = {"reward": np.float64, "finish": np.uint8, "shared": np.int32, "own": np.int32}
"""The arrays of a sample's frame beside the columns: the reward, the index of the finish in FINISHES, and for each
branch, if any, the number of shared tokens and of own tokens."""


class TokenScores(NamedTuple):
    """The scores of a model for T tokens of a row but the first, given the tokens before, at temperature 1.

    logprobs: float32 [T - 1]. top_tokens, top_logprobs: int32 and float32 [T - 1, k], the k likeliest tokens at a place
    and their log-probs. version: the version of the weights.
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray = np.zeros((0, 0), np.int32)
    top_logprobs: np.ndarray = np.zeros((0, 0), np.float32)
    version: int = 0


class Branch(NamedTuple):
    """A branch of a trajectory: the first `shared` tokens of the branch before, then `new` tokens of its own."""

    shared: int
    new: int


_FURTHER: Any = make_dataclass(
    "_FURTHER",
    [(name, "np.ndarray | None", None) for name, column in COLUMNS.items() if not column.engine],
    frozen=True,
    slots=True,
    kw_only=True,
)
"""The optional columns of a trajectory."""


@dataclass(frozen=True, slots=True)
class Trajectory(_FURTHER):
    """A sample of a group, with the columns of `table.COLUMNS`, all of one length T. A list becomes an array.

    reward: the score of the whole trajectory. finish: "stop" (the policy ended the sample) or "length" (cut at
    `max_new_tokens`). branches: empty for a conversation that only grew. Otherwise the sample is a prefix tree, or
    several, written branch by branch: the arrays hold the own tokens of branch after branch, so every sampled token
    once. Columns that the engine does not give are keyword arguments and attributes; None: the sample has no such
    column.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    finish: Finish
    branches: tuple[Branch, ...] = ()

    def __post_init__(self) -> None:
        lengths = {}
        for name, array in self.columns.items():
            column = np.asarray(array, COLUMNS[name].dtype)
            object.__setattr__(self, name, column)
            lengths[name] = len(column)
            if column.ndim != 1 + COLUMNS[name].wide:
                raise ValueError(f"the column {name} of a sample has {column.ndim} dimensions")
        if len({*lengths.values()}) > 1:
            raise ValueError(f"the columns of a sample differ in length: {lengths}")
        if self.branches:
            _check_branches(self.branches, len(self.tokens))
        object.__setattr__(self, "reward", float(self.reward))
        if not abs(self.reward) <= LARGEST_REWARD:
            raise ValueError(f"a reward of {self.reward} is no score")
        if self.finish not in FINISHES:
            raise ValueError(f"a finish of {self.finish!r} is neither 'stop' nor 'length'")

    def __len__(self) -> int:
        return len(self.tokens)

    def validate(self) -> None:
        """Raises ValueError for a trajectory that no policy can have sampled, or that teaches nothing: a training step
        would fail on it, again after each restart."""
        if not self.sampled.any():
            raise ValueError("nothing was sampled")
        if not np.isfinite(self.logprobs).all() or self.versions.min() < NOT_SAMPLED:
            raise ValueError("a log-prob is not finite, or a version is below that of a token that was not sampled")
        for name in self.columns.keys() - {*ENGINE_COLUMNS, "returns"}:
            check_scores(name, self.columns[name])
        if any(self.sampled[path[0]] for path in paths(self.branches or [Branch(0, len(self))])):
            raise ValueError("a conversation begins with a sampled token: without a prompt it cannot be trained")
        if self.returns is not None and not (np.abs(self.returns) <= LARGEST_REWARD).all():
            raise ValueError("the return of a token is no score")
        if self.pictures is not None and self.pictures.shape[1] != DIGEST_BYTES:
            raise ValueError("the pictures of a sample have other digests")

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by name, without missing columns."""
        return {name: array for name in COLUMNS if (array := getattr(self, name)) is not None}

    def frame(self) -> bytes:
        """Return the sample as bytes for messages and the spool. `of_frame` is the inverse."""
        branches = zip(*self.branches, strict=True) if self.branches else ((), ())
        values = ([self.reward], [FINISHES.index(self.finish)], *branches)
        of_sample = {name: np.array(value, _OF_SAMPLE[name]) for name, value in zip(_OF_SAMPLE, values, strict=True)}
        columns = self.columns
        if self.kept_words is not None:  # a column more than the widest row says that no word is missing
            width = 1 + int((self.kept_words != NO_WORD).sum(1).max(initial=0))
            columns |= {name: columns[name][:, :width] for name in KEPT if name in columns}
        return pack(columns | of_sample)

    @classmethod
    def of_frame(cls, frame: bytes | memoryview) -> "Trajectory":
        """Read a received sample; the arrays are not copied. Raises ValueError if the bytes are no sample."""
        arrays = unpack(frame)
        if missing := _OF_SAMPLE.keys() - arrays.keys():
            raise ValueError(f"a sample lacks {', '.join(sorted(missing))}")
        of_sample = {name: arrays.pop(name) for name in _OF_SAMPLE}
        for name, array in of_sample.items():
            if array.dtype != _OF_SAMPLE[name] or array.ndim != 1:
                raise ValueError(f"{name} of a sample is {array.dtype} {array.shape}")
        (reward,), (finish,), *lengths = (array.tolist() for array in of_sample.values())
        check(arrays, len(arrays.get("tokens", ())))
        if finish >= len(FINISHES):
            raise ValueError("a sample has an unknown finish")
        branches = tuple(Branch(*pair) for pair in zip(*lengths, strict=True))
        return cls(**arrays, reward=reward, finish=FINISHES[finish], branches=branches)

    @property
    def unrolled(self) -> int:
        """The number of tokens in all `sequences`; a shared token counts in every sequence."""
        return sum(map(sum, self.branches)) or len(self)

    @property
    def sampled(self) -> np.ndarray:
        """bool [T]: the tokens that the policy sampled."""
        return self.versions != NOT_SAMPLED

    def filled(self, name: str) -> np.ndarray:
        """Return a column, or for a missing column the declared default."""
        array: np.ndarray | None = getattr(self, name)
        if array is not None:
            return array
        missing = COLUMNS[name].missing
        return np.full(len(self), getattr(self, missing) if isinstance(missing, str) else missing)

    def sequences(self) -> "Iterator[Trajectory]":
        """Yield every branch from the first token on. A token is marked as sampled only in the branch that owns it."""
        if not self.branches:
            yield self
            return
        for branch, path in zip(self.branches, paths(self.branches), strict=True):
            arrays = {name: array[path] for name, array in self.columns.items()}
            for name, array in arrays.items():
                if (unsampled := COLUMNS[name].unsampled) is not None:
                    array[: branch.shared] = unsampled
            yield replace(self, branches=(), **arrays)

    def with_scores(self, name: str, branches: Sequence[np.ndarray]) -> "Trajectory":
        """Return the trajectory with the column `name` of SCORED or TOP. branches: [T - 1] or [T - 1, k] for every item
        of `sequences`, the scores of all tokens but the first. Raises ValueError for scores that no model gives."""
        lengths = self.branches or (Branch(0, len(self)),)
        parts = [np.insert(row, 0, 0, axis=0)[shared:] for (shared, _), row in zip(lengths, branches, strict=True)]
        column = np.concatenate(parts)
        column[~self.sampled] = 0
        check_scores(name, column)
        arrays: dict[str, Any] = {name: column}
        return replace(self, **arrays)

    def lowered(self, penalty: float) -> "Trajectory":
        """Return the trajectory with a lower reward."""
        returns = None if self.returns is None else self.returns - penalty
        changes: dict[str, Any] = {"reward": self.reward - penalty, "returns": returns}
        return replace(self, **changes)

    @property
    def start_version(self) -> int:
        """The oldest version among the sampled tokens: the version of the first sampled token, unless a generator with
        older weights continued the sequence. Raises ValueError if nothing was sampled."""
        return int(self.versions[self.sampled].min())


def paths(branches: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
    """Yield the places of all tokens of every branch, int64 [shared + new], in the arrays of the branches' own tokens.

    >>> [path.tolist() for path in paths([(0, 3), (1, 2)])]
    [[0, 1, 2], [0, 3, 4]]
    """
    path, end = np.zeros(0, np.int64), 0
    for shared, new in branches:
        path = np.concatenate([path[:shared], np.arange(end, end + new)])
        end += new
        yield path


def common(first: TokenTable | Trajectory, second: TokenTable | Trajectory) -> int:
    """Return the length of the longest common prefix of two sequences, pictures included."""
    length = min(len(first), len(second))
    differ = first.tokens[:length] != second.tokens[:length]
    if first.pictures is not None or second.pictures is not None:
        none = np.zeros((length, DIGEST_BYTES), np.uint8)
        columns = [none if s.pictures is None else s.pictures[:length] for s in (first, second)]
        differ |= (columns[0] != columns[1]).any(1)
    return int(np.append(differ, True).argmax())


def check_kept_words(sample: Trajectory, vocabulary: int) -> None:
    """Raises ValueError if a sampled token lacks words that it was drawn from. vocabulary: the number of words."""
    if sample.kept_words is None:
        raise ValueError("its tokens have no kept_words, which sampling.top_p and the like need")
    words, tokens = sample.kept_words[sample.sampled], sample.tokens[sample.sampled, None]
    if words.shape[1] < vocabulary and (words[:, -1] != NO_WORD).any():
        raise ValueError(f"a token was drawn from {words.shape[1]} words or more: lower sampling.top_k")
    if not (words == tokens).any(1).all() or words.min() < NO_WORD or words.max() >= vocabulary:
        raise ValueError("the kept_words of a token are not words among which it is")


def check_scores(name: str, column: np.ndarray) -> None:
    """Raises ValueError for a column of SCORED or TOP with values that no model gives."""
    if not np.isfinite(column).all():
        raise ValueError(f"one of the {name} is not finite")
    if name == "teacher_top_tokens" and (column < 0).any():
        raise ValueError("one of the teacher_top_tokens is below 0")


def _check_branches(branches: Sequence[Branch], tokens: int) -> None:
    length = 0
    for shared, new in branches:
        if not 0 <= shared <= length or new < 1:
            raise ValueError(f"a branch cannot share {shared} of {length} tokens and have {new} of its own")
        length = shared + new
    if sum(branch.new for branch in branches) != tokens:
        raise ValueError(f"the branches do not have {tokens} tokens together")


class Note(NamedTuple):
    """Facts about a sample beside the tokens. parts: the parts of the reward. discarded: the number of tokens sampled
    for the sample, but not in it. For the rollouts of a run: generators, the names of the generators that sampled;
    began, in seconds since 1970; seconds, the duration; waited, the seconds from the permit of the group to `began`;
    scoring, the part of `seconds` spent on scores. marks: a user's ids of the rewards of a session. gave: for every
    mark the value and, unless the reward is the session's, the id of the answer."""

    parts: Mapping[str, float] = {}
    discarded: int = 0
    generators: Sequence[str] = ()
    began: float | None = None
    seconds: float | None = None
    marks: Sequence[str] = ()
    gave: Sequence[str] = ()
    waited: float | None = None
    scoring: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G samples: the unit of admission, readiness and training. `row`: the row's fields as `row_text`
    writes them, or empty. `notes`: a note for every sample, or none at all."""

    id: str
    prompt_index: int
    trajectories: tuple[Trajectory, ...]
    row: str = ""
    notes: tuple[Note, ...] = ()

    @property
    def start_version(self) -> int:
        """The oldest version among all sampled tokens of the group."""
        return min(t.start_version for t in self.trajectories)

    @property
    def has_signal(self) -> bool:
        """Whether rewards, or returns of tokens, differ: otherwise nothing tells good samples from bad samples."""
        credits = np.concatenate([[t.reward] if t.returns is None else t.returns[t.sampled] for t in self.trajectories])
        return bool(differ(credits.max(), credits.min()))


def samples_of(prompt_index: int, group_size: int) -> int:
    """Return the number of samples of a group: G for the prompt of a row, 1 for a session, with a negative index."""
    return 1 if prompt_index < 0 else group_size


def differ(first: Any, second: Any) -> Any:
    """Whether two rewards, or rewards in two arrays, differ by more than rounding.

    >>> bool(differ(0.7, 0.6 + 0.1)), bool(differ(0.7, 0.70001))
    (False, True)
    """
    return np.abs(first - second) > ROUNDING * np.maximum(np.abs(first), np.abs(second))


def of_parts(parts: Sequence[Group]) -> Group:
    """Return the group with the samples of its parts, in order."""
    samples = tuple(sample for part in parts for sample in part.trajectories)
    return replace(parts[0], trajectories=samples, notes=tuple(note for part in parts for note in part.notes))


def row_text(fields: Mapping[str, Any]) -> str:
    """Return the fields of a row as JSON, without long fields."""
    texts = {name: text for name, value in fields.items() if len(text := json.dumps(value)) <= LARGEST_FIELD}
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items()) + "}"


class TokenValues(NamedTuple):
    """The values of a training step for every token: float32 [T], over all branches of all samples of all groups in
    order, from the first token of a branch on. 0 for tokens outside the loss."""

    proximal_logprobs: np.ndarray
    advantages: np.ndarray
