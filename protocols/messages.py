"""The messages of the protocol, as frozen pydantic models. `evaluation_messages`, `session_messages` and
`weight_messages` have the messages about these subjects.

| from | to | request | answer |
|---|---|---|---|
| any | master | Join | Welcome |
| any | master | Heartbeat | HeartbeatAnswer |
| any | master | Leave | Done |
| any | master | AskSnapshot | Snapshot |
| any | master | AskConfig | Configuration |
| rollout_manager | master | AskPermits | Permits |
| rollout_manager, gateway | master | RenewLeases | LostLeases |
| rollout_manager, gateway | master | GroupStarted | Done |
| rollout_manager | master | GroupFailed | Done |
| rollout_manager, evaluator, gateway | generator | OpenFlow | stream of TokenColumns |
| rollout_manager, evaluator, gateway | reward | OpenFlow | stream of CompletionsScored |
| rollout_manager, evaluator, gateway | scorer | OpenFlow | stream of TokensScored, CompletionsScored |
| rollout_manager, evaluator, gateway | generator | Generate | Done |
| rollout_manager, evaluator, gateway | generator | GeneratePictured | Done, LackingPictures |
| rollout_manager, evaluator, gateway | reward, scorer | Score | Done |
| rollout_manager | scorer | ScoreTokens | Done |
| rollout_manager, evaluator, gateway | generator, reward, scorer | EndJobs | Done |
| rollout_manager, gateway | trainer | AskSamples | StoredSamples |
| rollout_manager, gateway | trainer | StoreSamples | GroupAccepted |
| rollout_manager | trainer | OfferPictures | LackingPictures |
| rollout_manager | trainer | StorePictures | Done |
| rollout_manager, gateway | trainer | StoreCalls | Done |
| rollout_manager, gateway | trainer | AskCalls | StoredCalls |
| generator | trainer | TakeDevices | Done |
| trainer | generator | YieldDevices | Done |
| trainer | generator | AskLogprobs | Logprobs |
| trainer | master | AskRecovery | Recovery |
| trainer | master | GroupReady | GroupAccepted |
| trainer | master | AskReuse | ReuseAnswer |
| trainer | master | AskBatch | BatchAnswer |
| trainer | master | CommitStep | Done |
| trainer | master | PublishPolicy | Done |
| trainer | master | CheckpointSaved | CheckpointAnswer |
| trainer | master | TrainingFinished, TrainingFailed, StepFailed | Done |
| rollout_manager, evaluator, gateway | master | ScoringFailed | Done |
| rollout_manager, evaluator, gateway | master | ConnectionLost | Done |
| monitor | master | AskStatus | Status |
| any | master | AddReward | Done |

The master publishes PolicyPublished, MembersChanged and Shutdown.
The transport itself uses Failure, Credit, Cancel, KeepAlive and StreamEnd.
Arrays are numpy arrays and are sent as raw frames. Times are in seconds unless a name says otherwise.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, Json, model_validator

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


# --- membership

State = Literal["starting", "stale", "healthy", "draining"]
"""`starting`: not ready yet. `stale`: cannot load new weights. `draining`: takes no new work and is about to leave."""


class Policy(Part):
    """A policy, identified by (lineage, version). `folder` holds its model.safetensors, at least on the trainer's
    machine. `stamp` is the digest of areal.weights.chunks. It is empty if nothing is to be checked, as for version 0,
    which is the run's model."""

    lineage: int
    version: int
    folder: Annotated[str, Field(max_length=4096)]
    stamp: Name = ""

    @property
    def identity(self) -> tuple[int, int]:
        return self.lineage, self.version


def actor_name(identity: str) -> str:
    """The role/index of an identity role/index#incarnation."""
    return identity.partition("#")[0]


class Member(Part):
    """An actor as the directory lists it. `identity` is role/index#incarnation. A generator with `held` loads no policy
    newer than `held`, which is being evaluated on it or, if it is `serving`, is what users get (gateway.serve)."""

    identity: Name
    role: Name
    index: int
    address: Name
    state: State
    serves: Several[Name] = ()
    held: Policy | None = None
    serving: bool = False


class Join(Message):
    role: Name
    index: Annotated[int, Field(ge=0, le=1 << 20)] | None
    address: Address


class Snapshot(Message):
    """The current policy and members, for actors that join late. Events with numbers after `sequence` change them and
    are published at the address `events`. Sequence numbers continue after those of an earlier master of the run. The
    master sends the JSON of each member, which it makes once, not for each of those who ask."""

    policy: Policy
    members: Several[Annotated[Json[Member] | Member, Field(union_mode="left_to_right")]]
    sequence: int
    events: Name


class Welcome(Message):
    """The answer to Join: the actor's identity, the run's configuration and a snapshot. start: no earlier start of an
    actor with this role and index had the same."""

    identity: Name
    start: Name
    config: dict[str, Any]
    snapshot: Snapshot


class Engagement(Part):
    """The load of a generator: `sequences` that run or wait, by asker, and the `limit` on all of them together."""

    sequences: Annotated[dict[Name, Count], Field(max_length=4096)]
    limit: Annotated[int, Field(ge=1, le=1 << 31)]
    version: Annotated[int, Field(ge=0, le=1 << 53)]


class LoadColumns(Part):
    """The loads of generators (areal.generation.routing.GeneratorLoad), as the master passes them on: `names` are
    identities, and entry i of the columns, int64 [generators], is about generator i. `asker_sequences`: those of
    `sequences` that the receiver began."""

    names: Several[Name]
    sequences: Int64s
    asker_sequences: Int64s
    limits: Int64s
    versions: Int64s

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if {len(self.sequences), len(self.asker_sequences), len(self.limits), len(self.versions)} != {len(self.names)}:
            raise ValueError("the columns are not as long as the names")
        if (self.limits < 1).any():
            raise ValueError("a limit is below 1")
        return self


class Span(Part):
    """Something an actor did for `seconds`, starting at `began` on its own clock."""

    name: Name
    began: Number
    seconds: Number


class Work(Part):
    """What an actor is working on itself, and for how many seconds. Waiting for other actors is not work. `still`: for
    how many of them nothing has moved. `kind`: of what it is compared with; empty if it has deadlines of its own."""

    kind: Annotated[str, Field(max_length=64)] = ""
    what: Annotated[str, Field(max_length=256)]
    seconds: Number
    still: Number = 0.0


class DiskShortage(Part):
    """A disk takes no writes for now (areal.storage.disk.Shortage)."""

    folder: Annotated[str, Field(max_length=4096)]
    cause: Name
    free: Annotated[int, Field(ge=0)]
    waits: Annotated[str, Field(max_length=512)]


class Heartbeat(Message):
    """Sent every second. `serves`: names of what the actor offers. `stats`: gauges and counters by name. `spans`: what
    the actor did since its last heartbeat. `clock`: the time of sending, on the same clock as the spans. `engagement`:
    a generator's load. `works`: of the actor's operations in progress one of each kind, the oldest first; none while it
    only waits. `ended`: by kind, for how long those have stood still that have ended since the last heartbeat. A
    generator is healthy once it has loaded the policy that was current when it joined. `shortage`: while it waits for a
    disk. `alert`: a sentence for the user of the run, if any."""

    state: State
    serves: Annotated[Several[Name], Field(max_length=MAX_SERVED)]
    activity: Annotated[str, Field(max_length=512)]
    stats: Annotated[dict[Name, Number], Field(max_length=MAX_STATS)]
    engagement: Engagement | None = None
    works: Annotated[Several[Work], Field(max_length=MAX_STATS)] = ()
    ended: Annotated[dict[Name, Number], Field(max_length=MAX_STATS)] = Field(default_factory=dict)
    spans: Annotated[Several[Span], Field(max_length=MAX_STATS)] = ()
    clock: Number = 0.0
    shortage: DiskShortage | None = None
    alert: Annotated[str, Field(max_length=1024)] = ""


class Shutdown(Message):
    """The run is over. `ok`: at its end. `stopped`: the master was told to stop, and the trainer hands over first."""

    ok: bool
    reason: Annotated[str, Field(max_length=4096)]
    stopped: bool = False


class HeartbeatAnswer(Message):
    """`ended`: once the run is over. `loads`: only for rollout managers and gateways."""

    policy: Policy
    sequence: int
    ended: Shutdown | None = None
    loads: LoadColumns | None = None


class Leave(Message):
    reason: Annotated[str, Field(max_length=4096)]


class AskSnapshot(Message):
    pass


class AskConfig(Message):
    """Sent by a process that needs the configuration without being a member, such as one that is about to join."""


class Configuration(Message):
    """model: digests of the parts of the run's model, by name."""

    values: dict[str, Any]
    model: dict[str, str]


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


class ConnectionLost(Message):
    """The sender cannot reach a member: a connection was refused, or broke. Answered once the master has tried it."""

    identity: Name


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


class GeneratePictured(Generate):
    """Generate with `pictures`: of each prompt the digests of its own, in order. Nothing is begun if the generator
    lacks one: then the same is sent with the `files` of those that it lacks."""

    pictures: Several[Several[Name]]
    files: Several[Bytes] = ()

    @model_validator(mode="after")
    def _has_pictures(self) -> Self:
        if len(self.pictures) != len(self.prompts):
            raise ValueError("there are not as many lists of pictures as prompts")
        return self


class LackingPictures(Message):
    """Digests of pictures that the one who was asked does not have."""

    names: Several[Name]


FINISHES: tuple[Literal["stop", "length"] | None, ...] = (None, "stop", "length")


class AskLogprobs(Message):
    """Asks a generator for the log-probs of given tokens (int32 [T]), and of the `top_k` likeliest ones at each place,
    once it has this policy or a newer one."""

    lineage: int
    version: int
    tokens: Int32s
    top_k: int = 0


class Logprobs(Message):
    """float32 [T - 1], of all tokens but the first, at temperature 1, under a version of that lineage. `top_tokens`,
    `top_logprobs`: [(T - 1) * k], the likeliest tokens at each of these places, one place after the other."""

    version: int
    logprobs: Float32s
    top_tokens: Int32s
    top_logprobs: Float32s


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
            _check_rows(self.jobs, self.counts, column)
        if len(self.finishes) != len(self.jobs):
            raise ValueError(f"{len(self.finishes)} finishes and {len(self.jobs)} jobs")
        if (self.finishes < 0).any() or (self.finishes >= len(FINISHES)).any():
            raise ValueError("a finish is out of range")
        return self


def slices(counts: Vector) -> Iterator[slice]:
    """The places of parts of these lengths in columns, in which they follow each other."""
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return map(slice, [0, *ends], ends)


class TakeDevices(Message):
    """A generator asks for the devices that it shares with the trainer. The answer comes while no step is trained."""


class YieldDevices(Message):
    """The trainer needs the devices. Answered when the engine sleeps (until TakeDevices), or is not started."""


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


class ScoreTokens(Message):
    """Give the log-probs of tokens: of the row `jobs[i]`, `counts[i]` tokens, which follow those of `jobs[i - 1]`.
    `scorer`: the name of the model. jobs int64 and counts int32, both [rows]; tokens int32 [sum of counts]. They come
    on the flow, as TokensScored."""

    flow: int
    scorer: Name
    jobs: Int64s
    counts: Int32s
    tokens: Int32s

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_rows(self.jobs, self.counts, self.tokens)
        return self


class TokensScored(Message):
    """Log-probs of the tokens of several rows, columns as in ScoreTokens: float32, of all tokens of a row but the
    first, each after those before it. `top_tokens`, `top_logprobs`: at each of these places the k likeliest tokens and
    their log-probs; k may be 0."""

    jobs: Int64s
    counts: Int32s
    logprobs: Float32s
    top_tokens: Int32s
    top_logprobs: Float32s
    failed: Several[JobFailed] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _check_rows(self.jobs, self.counts, self.logprobs)
        if self.top_tokens.shape != self.top_logprobs.shape or len(self.top_tokens) % max(1, len(self.logprobs)):
            raise ValueError("the columns of likely tokens are not as long as those of log-probs, or a multiple")
        return self


def _check_rows(jobs: Vector, counts: Vector, values: Vector) -> None:
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


class OfferPictures(Message):
    """Asks which of these pictures, by their digests, the trainer has not stored."""

    names: Several[Name]


class StorePictures(Message):
    """Files of pictures for the run's record; the answer says that all are on disk."""

    files: Several[Bytes]


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


class AskRecovery(Message):
    """Sent by a trainer that starts. `spooled`: the groups that it has on disk, one a line. There may be very many."""

    spooled: str


class Recovery(Message):
    """What a starting trainer has to do: load the checkpoint of `checkpoint_version` (0: the run's model); redo the
    logged batches up to `version`; publish that version under `lineage`. The payloads of the groups in `drop`, one a
    line, are no longer needed. `covered`: the steps from this version on can be redone; it is that of the checkpoint
    before, if there is one. `run`: the identity of the run."""

    run: str
    lineage: int
    version: int
    checkpoint_version: int
    covered: int
    drop: str


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


class PublishPolicy(Message):
    """The weights of the committed version are in `policy.folder`. Sent when they are first written, and again under
    the lineage of a trainer that took over."""

    policy: Policy


class CheckpointSaved(Message):
    """`folder` holds everything needed to resume from `version`. `covered`: the steps before this version, which the
    checkpoint before this one has, are never redone. `spooled`: as in AskRecovery."""

    version: int
    folder: str
    covered: int
    spooled: str


class CheckpointAnswer(Message):
    """`drop`: as in Recovery."""

    drop: str


class TrainingFinished(Message):
    """The last checkpoint is saved."""


class TrainingFailed(Message):
    """The trainer's guard ends the run: `reason` is a sentence for the user."""

    reason: Annotated[str, Field(max_length=4096)]


class StepFailed(Message):
    """A rank of the trainer dies of an error in the step after `version`. Any rank sends it, member or not."""

    version: Count
    reason: Annotated[str, Field(max_length=4096)]


# --- monitoring


class AskStatus(Message):
    """`since`: the answer includes the newest steps after this one; None: it includes no steps."""

    since: int | None = None


class Status(Message):
    """What a monitor shows: see `Master.ask_status` for the keys."""

    values: dict[str, Any]


# --- events


class PolicyPublished(Message):
    policy: Policy


class MembersChanged(Message):
    """`changed`: members that are new or have changed. `gone`: identities of members that have left."""

    changed: Several[Member] = ()
    gone: Several[Name] = ()
