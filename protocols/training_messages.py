"""The messages of the trainer that carry no sample: recovery, publication, checkpoints, the end, and shared devices.

| from | to | request | answer |
|---|---|---|---|
| trainer | master | AskRecovery | Recovery |
| trainer | master | PublishPolicy | Done |
| trainer | master | CheckpointSaved | CheckpointAnswer |
| trainer | master | TrainingFinished, TrainingFailed, StepFailed | Done |
| trainer | generator | AskLogprobs | Logprobs |
| trainer | generator | YieldDevices | Done |
| generator | trainer | TakeDevices | Done |
"""

from typing import Annotated

from pydantic import Field

from protocols.membership_messages import Policy
from protocols.messages import Count, Float32s, Int32s, Message


class TakeDevices(Message):
    """A generator asks for the devices that it shares with the trainer. The answer comes while no step is trained."""


class YieldDevices(Message):
    """The trainer needs the devices. Answered when the engine sleeps (until TakeDevices), or is not started."""


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
