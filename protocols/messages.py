"""The base of all messages, the messages of the transport itself, and the messages on the way of a sample from its
permit to the step that trains it, as frozen pydantic models.

The other messages lie in a module for each subject: `membership_messages`, `training_messages`, `picture_messages`,
`scorer_messages`, `evaluation_messages`, `session_messages`, `weight_messages`.

| from | to | request | answer |
|---|---|---|---|
| rollout_manager | master | AskPermits | Permits |
| any | master | AddReward | Done |
| rollout_manager, gateway | master | RenewLeases | LostLeases |
| rollout_manager, gateway | master | GroupStarted | Done |
| rollout_manager | master | GroupFailed | Done |
| rollout_manager, evaluator, gateway | master | ScoringFailed | Done |
| rollout_manager, evaluator, gateway | generator | OpenFlow | stream of TokenColumns |
| rollout_manager, evaluator, gateway | reward | OpenFlow | stream of CompletionsScored |
| rollout_manager, evaluator, gateway | generator | Generate | Done |
| rollout_manager, evaluator, gateway | reward, scorer | Score | Done |
| rollout_manager, evaluator, gateway | generator, reward, scorer | EndJobs | Done |
| rollout_manager, gateway | trainer | AskSamples | StoredSamples |
| rollout_manager, gateway | trainer | StoreSamples | GroupAccepted |
| rollout_manager, gateway | trainer | StoreCalls | Done |
| rollout_manager, gateway | trainer | AskCalls | StoredCalls |
| trainer | master | GroupReady | GroupAccepted |
| trainer | master | AskReuse | ReuseAnswer |
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
Index = Annotated[int, Field(ge=0, le=1 << 53)]
# Those of sessions are negative.
PromptIndex = Annotated[int, Field(ge=-(1 << 53), le=1 << 53)]
# Bounded, so that sums over very many numbers, and the squares of these sums, stay finite.
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
# Validation stops at the first wrong item: an error for each of a million items would take a gigabyte.
Several = Annotated[tuple[T, ...], Field(fail_fast=True)]
# Most entries in a collection that an actor reports about itself and that the master has to keep.
MAX_STATS = 256
# An actor's entry in the directory goes to all others, and thousands of entries have to fit into one message.
MAX_SERVED = 32
KINDS: "dict[str, type[Message]]" = {}
Vector = np.ndarray[Any, Any]


class OfType(NamedTuple):
    """Accepts arrays [n] of this dtype only: others would fail far inside an actor."""

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
    """A message on the bus; `kind` is its class name in snake case."""

    kind: ClassVar[str]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[cls.kind] = cls


# --- messages of the transport itself


class Failure(Message):
    """The typed error that answers a request."""

    code: Name
    text: Annotated[str, Field(max_length=4096)]


class Credit(Message):
    """The receiver of a stream can take `parts` more parts."""

    parts: Annotated[int, Field(ge=1, le=1_000_000)]


class Cancel(Message):
    """The asker no longer wants the answer."""


class KeepAlive(Message):
    """The stream's server is alive but has nothing to send yet. Its header has the number of parts sent so far."""


class StreamEnd(Message):
    """The stream is complete."""


class Done(Message):
    """The request was carried out and its effect is committed."""


# --- rollouts


class Permit(Part):
    """The right to start a group of the row with the training index `row`; its samples need weights of `min_version` or
    newer. `resumed`: the trainer may have samples of an earlier attempt, whose lease was lost. `rewards`: the weights
    that were given since the run began, beside those of the configuration (AddReward)."""

    group: Name
    prompt_index: int
    row: Annotated[int, Field(ge=0)]
    min_version: int
    resumed: bool = False
    rewards: Annotated[dict[Name, Number], Field(max_length=MAX_SERVED)] = {}


class AddReward(Message):
    """From the next new prompt on, the reward `name` counts with `weight`, whether or not it did before. Rows that name
    their own rewards are not affected."""

    name: Name
    weight: Number


class AskPermits(Message):
    """Answered as soon as at least one permit is free, or without permits when the remaining time is nearly over."""

    count: Annotated[int, Field(ge=1, le=65536)]


class Permits(Message):
    permits: Several[Permit]


class RenewLeases(Message):
    groups: Several[Name]


class LostLeases(Message):
    """Groups whose leases the asker no longer holds; it aborts them."""

    groups: Several[Name]


class GroupStarted(Message):
    group: Name
    start_version: int


Cause = Literal["row", "long", "prompt", "reward", "scorer", "sandbox", "workflow", "trainer"]
"""What made a group fail: its row of the data, a prompt longer than data.max_prompt_tokens, a prompt that the generator
refused, its reward, a scorer, the sandbox, the workflow's own code, or the trainer, which refused it."""


class GroupFailed(Message):
    """`discarded`: number of tokens that were sampled for the group."""

    group: Name
    cause: Cause
    reason: Annotated[str, Field(max_length=4096)]
    discarded: Count = 0


class ScoringFailed(Message):
    """A sample of the sender failed or was refused, first of its cause, or before the sender's first success."""

    cause: Cause
    reason: Annotated[str, Field(max_length=4096)]


class OpenFlow(Message):
    """Asks for the results of the jobs that the sender will begin on its flow with this number: sequences at a
    generator, completions at a reward actor, rows of tokens at a scorer. The answer is a stream without an end; the
    jobs end with it."""

    flow: int


class EndJobs(Message):
    """Ends jobs of a flow (int64 [n]) where they are. Of a sequence, the tokens sampled so far still come."""

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
    """A sequence to sample. `job`: the asker's name for it. `prompt`: the number of its prompt in the message.
    `first_version`: of the first token of its sample; None: nothing of it is sampled yet. `cache_salt`: it shares the
    KV cache of a prefix with sequences of the same one alone. `whole`: the asker reads no token before the last.
    `seed`: of its own random numbers; None: it shares the engine's."""

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
"""The fields of NewSequence that are those of areal.config.engine_sections.SamplingConfig."""


class Generate(Message):
    """Sample sequences, each continuing one of `prompts` (int32 [T]). Tokens come on the flow, as TokenColumns."""

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
    """New tokens of several sequences: of sequence `jobs[i]` the next `counts[i]` tokens, which follow those of
    `jobs[i - 1]` in the columns. `finishes[i]`: the number in FINISHES of how the sequence ended with them.

    jobs int64, counts and finishes int32, all [sequences]; columns: of areal.samples.table.COLUMNS, each [tokens, ...].
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
    """The places of parts of these lengths in columns, in which they follow each other."""
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return map(slice, [0, *ends], ends)


class Completion(Part):
    """A completion to score, or for a reward of groups all those of a group. `job`: the asker's name for it. `row`: the
    number of its row in the message. `tokens`: those of the completion, int32 [n], if the workflow passes them."""

    job: int
    function: Name
    prompt: str
    completions: Several[str]
    row: int
    tokens: Int32s | None = None


class Score(Message):
    """Score completions of `rows`. The scores come on the flow, as CompletionsScored."""

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
    """`place`: its number in its group, which may have no other sample there. `frame`: of
    areal.samples.trajectory.Trajectory.frame. The others: as in areal.samples.trajectory.Note."""

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
    """Scored samples of a group for the spool of trainer rank 0; the answer says that all are on disk, and the group
    ready if it is complete, or that it is not accepted. `row`: of `trajectory.row_text`, or empty. The pictures
    that samples name are stored already."""

    group: Name
    prompt_index: PromptIndex
    row: str
    samples: Annotated[Several[ScoredSample], Field(min_length=1)]


class AskSamples(Message):
    """Asks which samples of earlier attempts the trainer has, and makes them those of `group`, which is resumed.
    `all_or_none`: they are of use only if it has all of an attempt, since their scores depend on each other."""

    group: Name
    prompt_index: PromptIndex
    all_or_none: bool = False


class StoredSamples(Message):
    """The places of the samples that are stored, and of those of which calls are. Their oldest version; None: none."""

    places: Several[int]
    unfinished: Several[int] = ()
    start_version: int | None


class StoreCalls(Message):
    """The calls so far of a sample that is not finished, for the spool; the answer says that they are on disk.
    `frame`: of areal.storage.saved_calls.packed. `number`: a frame replaces frames with a lower number. Other
    fields: as in StoreSamples."""

    group: Name
    prompt_index: PromptIndex
    place: SampleIndex
    frame: Bytes
    number: Count = 0


class AskCalls(Message):
    """Asks for the calls that are stored of a sample."""

    group: Name
    place: SampleIndex


class StoredCalls(Message):
    """As in StoreCalls; empty if there are none any more."""

    frame: Bytes


# --- training


class GroupReady(Message):
    """The group's payload is on the trainer's disk. `reward_mean`, `reward_spread`: of the rewards of its samples, the
    mean and the standard deviation. `signal`: these rewards, or those of tokens, differ. `tokens`: number of sampled
    tokens in it. `discarded`: number of tokens that were sampled for the group and are in none of its
    trajectories. `reward_parts`: the mean of each part of the rewards. `marks`, `gave`: as in
    areal.samples.trajectory.Note."""

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


class AskReuse(Message):
    """Asks which samples of earlier attempts may be in the group. `versions`: the oldest version in each of them."""

    group: Name
    versions: Several[Index]


class ReuseAnswer(Message):
    """The oldest version that may be in the group; None: nothing of an earlier attempt may be."""

    oldest: int | None


class AskBatch(Message):
    """Asks for the batch of the step from `version` to `version + 1`. Answered once it may start, after the commit."""

    version: int


class BatchAnswer(Message):
    """`ready`: train `groups`, which have no token of a version before `oldest`, and leave tokens of versions before
    `mask_older_than` out of the loss. `waiting`: ask again. `ended`: the run has reached its end, no batch comes."""

    status: Literal["ready", "waiting", "ended"]
    groups: Several[Name] = ()
    mask_older_than: int | None = None
    oldest: int | None = None


class CommitStep(Message):
    """The step that leads to `version` is done. The version before it has to be published already. A metric may be
    infinite or NaN: the trainer decides whether that is a fault."""

    lineage: int
    version: int
    metrics: Annotated[dict[Name, Annotated[float, Field(allow_inf_nan=True)] | None], Field(max_length=MAX_STATS)]
