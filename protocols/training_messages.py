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
    """A request to a generator for the log-probs of tokens (int32 [T]), and of the `top_k` likeliest tokens at every
    place. Answered once the generator has this policy or a newer policy."""

    lineage: int
    version: int
    tokens: Int32s
    top_k: int = 0


class Logprobs(Message):
    """float32 [T - 1], of all tokens but the first, at temperature 1, under a version of the asked lineage.
    `top_tokens`, `top_logprobs`: [(T - 1) * k], the likeliest tokens at every place, place by place."""

    version: int
    logprobs: Float32s
    top_tokens: Int32s
    top_logprobs: Float32s


class AskRecovery(Message):
    """The first request of a trainer. `spooled`: the ids of the groups on the trainer's disk, a line each."""

    spooled: str


class Recovery(Message):
    """The tasks of a starting trainer: load the checkpoint of `checkpoint_version` (0: the run's model); redo the
    logged batches up to `version`; publish `version` under `lineage`. `drop`: ids of groups whose payloads are no
    longer needed, a line each. `covered`: steps from this version on can be redone; the version of the checkpoint
    before, if any. `run`: the identity of the run."""

    run: str
    lineage: int
    version: int
    checkpoint_version: int
    covered: int
    drop: str


class PublishPolicy(Message):
    """The weights of the committed version are in `policy.folder`. Sent after the first write, and again under the
    lineage of a trainer that took over."""

    policy: Policy


class CheckpointSaved(Message):
    """`folder` holds all files to resume from `version`. `covered`: the version of the checkpoint before; earlier steps
    are never redone. `spooled`: see AskRecovery."""

    version: int
    folder: str
    covered: int
    spooled: str


class CheckpointAnswer(Message):
    """`drop`: see Recovery."""

    drop: str


class TrainingFinished(Message):
    """The last checkpoint is saved."""


class TrainingFailed(Message):
    """The trainer's guard ends the run: `reason` is a sentence for the user."""

    reason: Annotated[str, Field(max_length=4096)]


class StepFailed(Message):
    """A rank of the trainer dies of an error in the step after `version`. Any rank sends the message, member or not."""

    version: Count
    reason: Annotated[str, Field(max_length=4096)]
