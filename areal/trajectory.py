"""Trajectories and groups: the data that generation sends to training.

A token that the policy did not sample (the prompt, a tool's answer) has version -1 and takes no part in the loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

NOT_SAMPLED = -1
LARGEST_REWARD = 1e9
"""The largest absolute value of a reward. Beside a larger one, the others of a batch would teach nothing."""

ROUNDING = 1e-9
"""As a share of the larger of two rewards: a smaller difference is what sums leave in float64."""

LARGEST_FIELD = 16 << 10
"""The largest size of a value of a row in notes, as JSON."""

Finish = Literal["stop", "length"]
Tokens = Sequence[int] | np.ndarray


class Column(NamedTuple):
    """A column of numbers in which the samples of a group follow each other: how many it has, and of which type.
    required: False if it may be missing. unsampled: what it has for a token that was not sampled; None: anything.
    wide: whether it has several numbers for each, as many for all."""

    per: Literal["sample", "token", "branch"]
    dtype: type[np.generic]
    required: bool = True
    unsampled: float | None = None
    wide: bool = False


COLUMNS = {
    "lengths": Column("sample", np.int32),
    "rewards": Column("sample", np.float64),
    "cut": Column("sample", np.uint8),  # 1 for the finish "length"
    "tokens": Column("token", np.int32),
    "logprobs": Column("token", np.float32, unsampled=0.0),
    "versions": Column("token", np.int32, unsampled=NOT_SAMPLED),
    "returns": Column("token", np.float64, required=False),
    "teacher_logprobs": Column("token", np.float32, required=False, unsampled=0.0),
    "reference_logprobs": Column("token", np.float32, required=False, unsampled=0.0),
    "teacher_top_tokens": Column("token", np.int32, required=False, unsampled=0.0, wide=True),
    "teacher_top_logprobs": Column("token", np.float32, required=False, unsampled=0.0, wide=True),
    "branch_counts": Column("sample", np.int32, required=False),
    "branch_shared": Column("branch", np.int32, required=False),
    "branch_own": Column("branch", np.int32, required=False),
}
"""The samples of a group as they travel and as the spool has them. Those of tokens are fields of `Trajectory`, and
columns of the rollouts that a run keeps."""

TOKEN_COLUMNS = {name: column for name, column in COLUMNS.items() if column.per == "token"}
SCORED = ("teacher_logprobs", "reference_logprobs")
TOP = ("teacher_top_tokens", "teacher_top_logprobs")
"""The columns that scorers give: of the sampled tokens, and of those that are likeliest."""


class TokenScores(NamedTuple):
    """What a model gives all T tokens of a row but the first, each after those before it, at temperature 1.

    logprobs: float32 [T - 1]. top_tokens, top_logprobs: int32 and float32 [T - 1, k], the k likeliest tokens there and
    their log-probs. version: of the weights.
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray = np.zeros((0, 0), np.int32)
    top_logprobs: np.ndarray = np.zeros((0, 0), np.float32)
    version: int = 0


class Branch(NamedTuple):
    """A branch of a trajectory: the first `shared` tokens of the branch before it, then `new` tokens of its own."""

    shared: int
    new: int


class Piece(NamedTuple):
    """Tokens from `start` to `end` - 1 of a row that were all sampled, or all not."""

    sampled: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample of a group. All arrays have the same length T.

    The arrays are declared in `COLUMNS`, too.

    tokens: int32, prompt and completion as the engine saw them (never re-tokenised).
    logprobs: float32, log pi_behav of each sampled token after temperature; 0 where not sampled.
    versions: int32, the policy version that sampled each token; -1 where not sampled.
    reward: the score of the whole trajectory.
    finish: "stop" (the policy ended it) or "length" (cut at `max_new_tokens`).
    branches: empty for one conversation that only grew. Otherwise the sample is a prefix tree, or several, written
    branch by branch: the arrays hold the own tokens of one branch after another, so each sampled token once.
    returns: float64, what each sampled token is credited with; None: all of them with `reward`.
    teacher_logprobs, reference_logprobs: float32, the log-prob of each sampled token, given those before it in its
    branch, under the model of a scorer (`trainer.teacher`, `trainer.reference`); 0 where not sampled.
    teacher_top_tokens, teacher_top_logprobs: int32 and float32 [T, k], the tokens that are likeliest there for the
    teacher, and their log-probs (`trainer.teacher_top_k`); 0 where not sampled.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    finish: Finish
    branches: tuple[Branch, ...] = ()
    returns: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    teacher_top_tokens: np.ndarray | None = None
    teacher_top_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(array) for name, array in self.token_columns.items()}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"the columns of a sample differ in length: {lengths}")
        if self.branches:
            _check_branches(self.branches, len(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def checked(self) -> Trajectory:
        """Return the same trajectory with all fields of the types above.

        Raises ValueError for a trajectory that no policy can have sampled, or from which nothing can be learned. A
        message could not carry it, or a training step would fail on it, again after each restart.
        """
        arrays: dict[str, Any] = {
            name: np.asarray(array, COLUMNS[name].dtype) for name, array in self.token_columns.items()
        }
        same = replace(self, reward=float(self.reward), **arrays)
        for name, array in arrays.items():
            if array.ndim != 1 + COLUMNS[name].wide:
                raise ValueError(f"the column {name} of a sample has {array.ndim} dimensions")
        if not same.sampled.any():
            raise ValueError("nothing was sampled")
        if not np.isfinite(same.logprobs).all() or same.versions.min() < NOT_SAMPLED:
            raise ValueError("a log-prob is not finite, or a version is below that of a token that was not sampled")
        for name in (*SCORED, *TOP):
            if name in arrays and not np.isfinite(arrays[name]).all():
                raise ValueError(f"one of the {name} is not finite")
        if same.teacher_top_tokens is not None and (same.teacher_top_tokens < 0).any():
            raise ValueError("one of the teacher_top_tokens is below 0")
        if any(same.sampled[path[0]] for path in paths(same.branches or [Branch(0, len(same))])):
            raise ValueError("a conversation begins with a sampled token: without a prompt it cannot be trained")
        if not abs(same.reward) <= LARGEST_REWARD:
            raise ValueError(f"a reward of {same.reward} is no score")
        if same.returns is not None and not (np.abs(same.returns) <= LARGEST_REWARD).all():
            raise ValueError("the return of a token is no score")
        if same.finish not in ("stop", "length"):
            raise ValueError(f"a finish of {same.finish!r} is neither 'stop' nor 'length'")
        return same

    @property
    def token_columns(self) -> dict[str, np.ndarray]:
        """Its arrays by name, without those that it does not have."""
        return {name: array for name in TOKEN_COLUMNS if (array := getattr(self, name)) is not None}

    @property
    def unrolled(self) -> int:
        """The number of tokens of all `sequences`, which count shared ones again."""
        return sum(map(sum, self.branches)) or len(self)

    @property
    def sampled(self) -> np.ndarray:
        """bool [T]: the tokens that the policy sampled."""
        return self.versions != NOT_SAMPLED

    def filled(self, name: str, width: tuple[int, ...] = ()) -> np.ndarray:
        """An array of it. If it does not have this one: its reward at each token for the returns, else 0. width: of a
        wide column."""
        array: np.ndarray | None = getattr(self, name)
        return np.full((len(self), *width), self.reward if name == "returns" else 0) if array is None else array

    def sequences(self) -> Iterator[Trajectory]:
        """Each branch as a trajectory without branches, from its first token on. Only the branch that owns a sampled
        token has it as sampled."""
        if not self.branches:
            yield self
            return
        for branch, path in zip(self.branches, paths(self.branches), strict=True):
            arrays = {name: array[path] for name, array in self.token_columns.items()}
            for name, array in arrays.items():
                if (unsampled := COLUMNS[name].unsampled) is not None:
                    array[: branch.shared] = unsampled
            yield replace(self, branches=(), **arrays)

    def with_scores(self, name: str, branches: Sequence[np.ndarray]) -> Trajectory:
        """The same trajectory with the column `name`, of SCORED or TOP. branches: [T - 1] or [T - 1, k] for each of
        `sequences`, what all its tokens but the first get."""
        lengths = self.branches or (Branch(0, len(self)),)
        parts = [np.insert(row, 0, 0, axis=0)[shared:] for (shared, _), row in zip(lengths, branches, strict=True)]
        column = np.concatenate(parts)
        column[~self.sampled] = 0
        arrays: dict[str, Any] = {name: column}
        return replace(self, **arrays)

    def lowered(self, penalty: float) -> Trajectory:
        """The same trajectory with a lower reward."""
        returns = None if self.returns is None else self.returns - penalty
        return replace(self, reward=self.reward - penalty, returns=returns)

    @property
    def start_version(self) -> int:
        """The oldest version among the sampled tokens. This is the version of the first one, unless a generator that
        continued the sequence had older weights. Raises ValueError if nothing was sampled."""
        return int(self.versions[self.sampled].min())


def paths(branches: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
    """The places of all tokens of each branch, int64 [shared + new], in arrays that hold their own tokens one branch
    after another."""
    path, end = np.zeros(0, np.int64), 0
    for shared, new in branches:
        path = np.concatenate([path[:shared], np.arange(end, end + new)])
        end += new
        yield path


def pieces(versions: Sequence[int]) -> list[Piece]:
    """The tokens of a row with these versions [T], as turns: what the policy sampled, and what it was given."""
    sampled = np.asarray(versions) != NOT_SAMPLED
    ends = np.flatnonzero(np.diff(sampled)) + 1
    return [Piece(bool(sampled[a]), a, b) for a, b in pairwise([0, *ends.tolist(), len(sampled)])]


def common(first: np.ndarray, second: np.ndarray) -> int:
    """The number of first tokens that two sequences have in common."""
    length = min(len(first), len(second))
    return int(np.append(first[:length] != second[:length], True).argmax())


def columns(samples: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """The samples as the arrays of COLUMNS. `trajectories` is the inverse. There is a column of tokens if a sample has
    it, and there are those of branches if one has branches."""
    of_tokens = {name: array for t in samples for name, array in t.token_columns.items()}
    table = {
        "lengths": [len(t) for t in samples],
        "rewards": [t.reward for t in samples],
        "cut": [t.finish == "length" for t in samples],
        **{
            name: np.concatenate([t.filled(name, array.shape[1:]) for t in samples])
            for name, array in of_tokens.items()
        },
    }
    if any(t.branches for t in samples):
        branches = [branch for t in samples for branch in t.branches]
        table["branch_counts"] = [len(t.branches) for t in samples]
        table["branch_shared"] = [branch.shared for branch in branches]
        table["branch_own"] = [branch.new for branch in branches]
    return {name: np.asarray(values, COLUMNS[name].dtype) for name, values in table.items()}


def trajectories(table: Mapping[str, np.ndarray]) -> Iterator[Trajectory]:
    """The samples of `columns`. Raises ValueError if these are not the declared columns, or do not fit each other."""
    _check_table(table)
    ends = np.cumsum(table["lengths"], dtype=np.int64)[:-1]
    arrays = {name: np.split(table[name], ends) for name in TOKEN_COLUMNS if name in table}
    branches: Sequence[tuple[Branch, ...]] = [()] * len(table["lengths"])
    if "branch_counts" in table:
        every = list(map(Branch, table["branch_shared"].tolist(), table["branch_own"].tolist()))
        stops = np.cumsum(table["branch_counts"], dtype=np.int64).tolist()
        branches = [tuple(every[start:stop]) for start, stop in pairwise([0, *stops])]
    for number, (reward, cut) in enumerate(zip(table["rewards"].tolist(), table["cut"].tolist(), strict=True)):
        yield Trajectory(
            **{name: parts[number] for name, parts in arrays.items()},
            reward=reward,
            finish="length" if cut else "stop",
            branches=branches[number],
        )


def _check_table(table: Mapping[str, np.ndarray]) -> None:
    missing = {name for name, column in COLUMNS.items() if column.required} - table.keys()
    if wrong := missing or table.keys() - COLUMNS.keys():
        raise ValueError(f"a group has other columns than it should: {', '.join(sorted(wrong))}")
    if len(table.keys() & {"branch_counts", "branch_shared", "branch_own"}) not in (0, 3):
        raise ValueError("the branches are not complete")
    lengths, branch_counts = table["lengths"], table.get("branch_counts", np.zeros(0, np.int32))
    counts = {
        "sample": len(lengths), "token": lengths.sum(dtype=np.int64), "branch": branch_counts.sum(dtype=np.int64),
    }  # fmt: skip
    if (lengths < 0).any() or (branch_counts < 0).any():
        raise ValueError("a length or a number of branches is negative")
    for name, array in table.items():
        column = COLUMNS[name]
        if array.dtype != column.dtype or array.ndim != 1 + column.wide or len(array) != counts[column.per]:
            raise ValueError(
                f"{name} is {array.dtype} {array.shape}, but should have {counts[column.per]} {column.dtype.__name__}, "
                f"one for each {column.per}"
            )


def _check_branches(branches: Sequence[Branch], tokens: int) -> None:
    length = 0
    for shared, new in branches:
        if not 0 <= shared <= length or new < 1:
            raise ValueError(f"a branch cannot share {shared} of {length} tokens and have {new} of its own")
        length = shared + new
    if sum(branch.new for branch in branches) != tokens:
        raise ValueError(f"the branches do not have {tokens} tokens together")


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G samples: the unit of admission, readiness and training. `notes`: of `notes_of`, or empty."""

    id: str
    prompt_index: int
    trajectories: tuple[Trajectory, ...]
    notes: str = ""

    @property
    def start_version(self) -> int:
        """The oldest version among all sampled tokens of the group."""
        return min(t.start_version for t in self.trajectories)

    @property
    def about(self) -> list[dict[str, Any]]:
        """What is noted of each sample."""
        return json.loads(self.notes or "{}").get("samples") or [{} for _ in self.trajectories]

    @property
    def has_signal(self) -> bool:
        """True if the rewards differ, or the returns of tokens. If they are all the same, nothing distinguishes good
        samples from bad ones."""
        credits = np.concatenate([[t.reward] if t.returns is None else t.returns[t.sampled] for t in self.trajectories])
        return bool(differ(credits.max(), credits.min()))


def differ(first: Any, second: Any) -> Any:
    """Whether two rewards, or each two of arrays, differ by more than rounding."""
    return np.abs(first - second) > ROUNDING * np.maximum(np.abs(first), np.abs(second))


def joined(parts: Sequence[Group]) -> Group:
    """The group with the samples of these parts of it, in order."""
    samples = tuple(sample for part in parts for sample in part.trajectories)
    about = {"samples": [about for part in parts for about in part.about]}
    notes = parts[0].notes and json.dumps(json.loads(parts[0].notes) | about)
    return replace(parts[0], trajectories=samples, notes=notes)


def notes_of(fields: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """The `notes` of a group. fields: the row's; long ones are left out. samples: for each, `parts` of its reward,
    `discarded`, the number of tokens that were sampled for it and are not in it, and for the rollouts that the run
    keeps `generators`, `began` and `seconds`."""
    row = {name: text for name, value in fields.items() if len(text := json.dumps(value)) <= LARGEST_FIELD}
    return json.dumps(
        {"row": "{" + ", ".join(f"{json.dumps(k)}: {v}" for k, v in row.items()) + "}", "samples": samples}
    )


class TokenValues(NamedTuple):
    """What a training step found for each token: float32 [T], over all branches of all samples of all groups in order,
    each branch from its first token on. 0 for tokens that are not in the loss."""

    proximal_logprobs: np.ndarray
    advantages: np.ndarray


def random_groups(
    vocabulary: int, lengths: Sequence[Sequence[int]], *, shared: int = 0, version: int = 0
) -> list[Group]:
    """A group for each item of `lengths`, which has the lengths of its samples in tokens. All tokens but a sample's
    first are sampled, by `version`. shared: number of first tokens that the samples of a group have in common."""
    random = np.random.default_rng(0)
    groups = []
    for number, of_group in enumerate(lengths):
        prefix = random.integers(0, vocabulary, shared)
        samples = []
        for index, length in enumerate(of_group):
            tokens = random.integers(0, vocabulary, length)
            tokens[: min(shared, length)] = prefix[:length]
            versions = np.repeat([NOT_SAMPLED, version], [1, length - 1]).astype(np.int32)
            logprobs = np.where(versions == NOT_SAMPLED, 0, -np.log(vocabulary)).astype(np.float32)
            samples.append(Trajectory(tokens.astype(np.int32), logprobs, versions, float(index % 2), "stop"))
        groups.append(Group(f"{number}", number, tuple(samples)))
    return groups
