"""The base of all messages, the messages of the transport itself, and the messages on the way of a sample from its
permit to the step that trains it, as frozen pydantic models.

The other messages lie in a module for each subject: `attempt_messages`, `membership_messages`, `training_messages`,
`picture_messages`, `scorer_messages`, `evaluation_messages`, `session_messages`, `weight_messages`.

| from | to | request | answer |
|---|---|---|---|
| rollout_manager | master | AskPermits | Permits |
| rollout_manager, gateway | master | GroupStarted | Done |
| rollout_manager, evaluator, gateway | generator | OpenFlow | stream of TokenColumns |
| rollout_manager, evaluator, gateway | reward | OpenFlow | stream of CompletionsScored |
| rollout_manager, evaluator, gateway | generator | Generate | Done |
| rollout_manager, evaluator, gateway | reward, scorer | Score | Done |
| rollout_manager, evaluator, gateway | generator, reward, scorer | EndJobs | Done |
| rollout_manager, gateway | trainer | StoreSamples | GroupAccepted |
| trainer | master | GroupReady | GroupAccepted |
| trainer | master | AskBatch | BatchAnswer |
| trainer | master | CommitStep | Done |

The transport itself uses Failure, Credit, Cancel, KeepAlive and StreamEnd.
Arrays are numpy arrays and are sent as raw frames. Times are in seconds unless a name says otherwise.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, model_validator

from protocols.bus_errors import BusError, text_of

T = TypeVar("T")
Name = Annotated[str, Field(max_length=256)]
Address = Annotated[Name, Field(pattern=r"^tcp://[^\s;]+:[1-9]\d{0,4}$")]
# Sums of as many counts as a message holds stay within 64 bits.
Count = Annotated[int, Field(ge=0, le=1 << 48)]
# Prompts of sessions have negative indexes.
PromptIndex = Annotated[int, Field(ge=-(1 << 53), le=1 << 53)]
# Bounded, so that sums over very many numbers, and the squares of such sums, stay finite.
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
# Validation stops at the first wrong item: an error for each of a million items would take a gigabyte.
Several = Annotated[tuple[T, ...], Field(fail_fast=True)]
# Most entries in a collection that an actor reports and the master keeps.
MAX_STATS = 256
# The directory sends an actor's entry to all actors, and thousands of entries have to fit into one message.
MAX_SERVED = 32
KINDS: "dict[str, type[Message]]" = {}
Vector = np.ndarray[Any, Any]


class OfType(NamedTuple):
    """Accepts arrays [n] of `dtype` only. Another dtype would fail far inside an actor."""

    dtype: str

    def __call__(self, array: Vector) -> Vector:
        if array.dtype != self.dtype or array.ndim != 1:
            raise ValueError(f"an array of {array.dtype} with {array.ndim} dimensions, not of {self.dtype} with one")
        return array


Int32s = Annotated[InstanceOf[Vector], AfterValidator(OfType("int32"))]
Int64s = Annotated[InstanceOf[Vector], AfterValidator(OfType("int64"))]
Float32s = Annotated[InstanceOf[Vector], AfterValidator(OfType("float32"))]
Float64s = Annotated[InstanceOf[Vector], AfterValidator(OfType("float64"))]
Bytes = Annotated[InstanceOf[Vector], AfterValidator(OfType("uint8"))]
Columns = Annotated[dict[Name, InstanceOf[Vector]], Field(max_length=64)]
# The number of a sample in its group.
SampleIndex = Annotated[int, Field(ge=0, le=1 << 20)]


class Part(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Message(Part):
    """A message on the bus; `kind` is the class name in snake case."""

    kind: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[cls.kind] = cls


class Failure(Message):
    """The answer to a failed request: a typed error."""

    code: Name
    text: Annotated[str, Field(max_length=4096)]


class Credit(Message):
    """The receiver of a stream can take `parts` more parts."""

    parts: Annotated[int, Field(ge=1, le=1_000_000)]


class Cancel(Message):
    """The asker no longer wants the answer."""


class KeepAlive(Message):
    """The stream's server is alive but has nothing to send yet. The header has the number of parts sent so far."""


class StreamEnd(Message):
    """The stream is complete."""


class Done(Message):
    """The request was carried out, and the effect is committed."""


class Permit(Part):
    """The right to start a group of the row with the training index `row`; the group's samples need weights of
    `min_version` or newer. `resumed`: the trainer may have samples of an earlier attempt that lost its lease.
    `rewards`: the weights that AddReward has set since the run began, beside the weights in the configuration."""

    group: Name
    prompt_index: int
    row: Annotated[int, Field(ge=0)]
    min_version: int
    resumed: bool = False
    rewards: Annotated[dict[Name, Number], Field(max_length=MAX_SERVED)] = {}


class AskPermits(Message):
    """Answered once a permit is free, or without permits when the remaining time is nearly over."""

    count: Annotated[int, Field(ge=1, le=65536)]


class Permits(Message):
    permits: Several[Permit]


class GroupStarted(Message):
    group: Name
    start_version: int


class OpenFlow(Message):
    """A request for the results of the jobs that the sender will begin on its flow with the number `flow`: sequences at
    a generator, completions at a reward actor, rows of tokens at a scorer. The answer is a stream without an end. Jobs
    end with their stream."""

    flow: int


class EndJobs(Message):
    """Ends jobs of a flow (int64 [n]) at once. The tokens that a sequence has sampled so far are still sent."""

    flow: int
    jobs: Int64s


class JobFailed(Part):
    """A job of a flow has ended with an error."""

    job: int
    code: Name
    text: Annotated[str, Field(max_length=4096)]

    @classmethod
    def of(cls, job: int, error: BusError) -> Self:
        return cls(job=job, code=error.code, text=text_of(error))


class NewSequence(Part):
    """A sequence to sample. `job`: the asker's number for the sequence. `prompt`: index into the message's prompts.
    `first_version`: the version of the sample's first token; None before that token. `cache_salt`: sequences with equal
    salts share the KV cache of a prefix. `whole`: the asker reads no token before the last. `seed`: for random numbers
    of the sequence's own; None: the engine's random numbers."""

    job: int
    prompt: int
    temperature: Annotated[Number, Field(ge=0)]
    top_p: Annotated[Number, Field(gt=0, le=1)]
    top_k: Count = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    max_new_tokens: Annotated[int, Field(ge=1)]
    min_new_tokens: Count = 0
    min_version: int
    first_version: int | None = None
    cache_salt: Name = ""
    whole: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens")
"""The fields that NewSequence shares with areal.config.engine_sections.SamplingConfig."""


class Generate(Message):
    """Sample sequences, each a continuation of one of `prompts` (int32 [T]). Answers: TokenColumns on the flow."""

    flow: int
    prompts: Several[Int32s]
    sequences: Several[NewSequence]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not all(0 <= sequence.prompt < len(self.prompts) for sequence in self.sequences):
            raise ValueError("a sequence names a prompt that is not there")
        return self


FINISHES: tuple[Literal["stop", "length"] | None, ...] = (None, "stop", "length")


class TokenColumns(Message):
    """New tokens of several sequences: the columns hold `counts[0]` tokens of sequence `jobs[0]`, then `counts[1]`
    tokens of sequence `jobs[1]`, and so on. `finishes[i]`: index into FINISHES: how the sequence ended.

    jobs int64, counts and finishes int32, all [sequences]; columns: areal.samples.table.COLUMNS, [tokens, ...].
    """

    jobs: Int64s
    counts: Int32s
    finishes: Int32s
    columns: Columns
    failed: Several[JobFailed] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for column in self.columns.values():
            check_rows(self.jobs, self.counts, column)
        if len(self.finishes) != len(self.jobs):
            raise ValueError(f"{len(self.finishes)} finishes and {len(self.jobs)} jobs")
        if (self.finishes < 0).any() or (self.finishes >= len(FINISHES)).any():
            raise ValueError("a finish is out of range")
        return self


def slices(counts: Vector) -> Iterator[slice]:
    """The places of consecutive parts with these lengths in a column.

    >>> [*slices(np.array([2, 1]))]
    [slice(0, 2, None), slice(2, 3, None)]
    """
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return map(slice, [0, *ends], ends)


class Completion(Part):
    """A completion to score, or all completions of a group for a reward of groups. `job`: the asker's number.
    `row`: index into the message's rows. `tokens`: int32 [n], of the completion, if the workflow passes tokens."""

    job: int
    function: Name
    prompt: str
    completions: Several[str]
    row: int
    tokens: Int32s | None = None


class Score(Message):
    """Score completions of `rows`. CompletionsScored on the flow bring the scores."""

    flow: int
    rows: Several[dict[str, Any]]
    completions: Several[Completion]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not all(0 <= completion.row < len(self.rows) for completion in self.completions):
            raise ValueError("a completion names a row that is not there")
        return self


class Scored(Part):
    """The score of each completion of a job. `parts`: the scores of parts of the reward, by name."""

    job: int
    scores: Several[Number]
    parts: Several[dict[str, Number]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.scores) != len(self.parts):
            raise ValueError(f"{len(self.scores)} scores have the parts of {len(self.parts)}")
        return self


class CompletionsScored(Message):
    scored: Several[Scored]
    failed: Several[JobFailed] = ()


def check_rows(jobs: Vector, counts: Vector, values: Vector) -> None:
    if len(jobs) != len(counts) or (counts < 0).any() or counts.sum(dtype=np.int64) != len(values):
        raise ValueError("the columns are not as long as the counts say")


class ScoredSample(Part):
    """`place`: the sample's number in its group. `frame`: see areal.samples.trajectory.Trajectory.frame. Further
    fields: see areal.samples.trajectory.Note."""

    place: SampleIndex
    frame: Bytes
    parts: dict[Name, Number] = {}
    discarded: Count = 0
    generators: Several[Name] = ()
    began: Number | None = None
    seconds: Number | None = None
    marks: Several[Name] = ()
    gave: Several[Name] = ()
    waited: Number | None = None
    scoring: Number | None = None


class StoreSamples(Message):
    """Scored samples of a group, for the spool of trainer rank 0. An accepting answer says that all samples are on
    disk, and that a complete group is ready. `row`: the text of `trajectory.row_text`, or empty. The trainer has the
    pictures of the samples already."""

    group: Name
    prompt_index: PromptIndex
    row: str
    samples: Annotated[Several[ScoredSample], Field(min_length=1)]


class GroupReady(Message):
    """The group's payload is on the trainer's disk. `reward_mean`, `reward_spread`: mean and standard deviation of the
    samples' rewards. `signal`: the rewards of samples or tokens differ. `tokens`: number of sampled tokens in the
    group. `discarded`: number of tokens sampled for the group but in none of its trajectories. `reward_parts`: the mean
    of every part of the rewards. `marks`, `gave`: see areal.samples.trajectory.Note."""

    group: Name
    start_version: int
    reward_mean: Number
    reward_spread: Number = 0.0
    signal: bool
    tokens: Count = 0
    discarded: Count = 0
    reward_parts: dict[str, Number] = {}
    marks: Several[Name] = ()
    gave: Several[Name] = ()


class GroupAccepted(Message):
    """`accepted` is false for a group that is no longer alive or is filtered; the trainer drops its payload."""

    accepted: bool


class AskBatch(Message):
    """A request for the batch of the step from `version` to `version + 1`. Answered once the step may start."""

    version: int


class BatchAnswer(Message):
    """`ready`: train `groups`. Their tokens are of version `oldest` or newer, and tokens older than `mask_older_than`
    stay out of the loss. `waiting`: ask again. `ended`: the run has reached its end, no batch comes."""

    status: Literal["ready", "waiting", "ended"]
    groups: Several[Name] = ()
    mask_older_than: int | None = None
    oldest: int | None = None


class CommitStep(Message):
    """The step that leads to `version` is done. The version before has to be published already. A metric may be
    infinite or NaN: the trainer decides whether such a value is a fault."""

    lineage: int
    version: int
    metrics: Annotated[dict[Name, Annotated[float, Field(allow_inf_nan=True)] | None], Field(max_length=MAX_STATS)]
