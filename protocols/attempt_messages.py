"""The messages about attempts at a group: leases, failures, and the stored work of earlier attempts.

An attempt begins with a permit or with a session. An attempt ends when the group is ready, fails, or loses its lease.

| from | to | request | answer |
|---|---|---|---|
| rollout_manager, gateway | master | RenewLeases | LostLeases |
| rollout_manager | master | GroupFailed | Done |
| rollout_manager, evaluator, gateway | master | ScoringFailed | Done |
| rollout_manager, gateway | trainer | AskSamples | StoredSamples |
| rollout_manager, gateway | trainer | StoreCalls | Done |
| rollout_manager, gateway | trainer | AskCalls | StoredCalls |
| trainer | master | AskReuse | ReuseAnswer |
"""

from typing import Annotated, Literal

from pydantic import Field

from protocols.messages import Bytes, Count, Message, Name, PromptIndex, SampleIndex, Several


class RenewLeases(Message):
    groups: Several[Name]


class LostLeases(Message):
    """Groups whose leases the asker no longer holds and therefore aborts."""

    groups: Several[Name]


Cause = Literal["row", "long", "prompt", "reward", "scorer", "sandbox", "workflow", "trainer"]
"""The cause of a group's failure: its row of the data, a prompt longer than data.max_prompt_tokens, a prompt refused by
the generator, a reward, a scorer, the sandbox, the workflow's own code, or a refusal by the trainer."""


class GroupFailed(Message):
    """`discarded`: number of tokens sampled for the group."""

    group: Name
    cause: Cause
    reason: Annotated[str, Field(max_length=4096)]
    discarded: Count = 0


class ScoringFailed(Message):
    """A sample of the sender failed or was refused: the first of its cause, or before any success."""

    cause: Cause
    reason: Annotated[str, Field(max_length=4096)]


class AskSamples(Message):
    """A request for the places of stored samples of earlier attempts. The trainer moves the samples into `group`, which
    is resumed. `all_or_none`: only a whole attempt is of use, since scores within an attempt depend on each other."""

    group: Name
    prompt_index: PromptIndex
    all_or_none: bool = False


class StoredSamples(Message):
    """`places`: of complete samples. `unfinished`: of samples with stored calls. `start_version`: oldest of both."""

    places: Several[int]
    unfinished: Several[int] = ()
    start_version: int | None


class StoreCalls(Message):
    """The calls so far of an unfinished sample, for the spool. The answer says that the calls are on disk. `frame`: see
    areal.storage.saved_calls.packed. `number`: a frame replaces frames with a lower number. Further fields: see
    StoreSamples."""

    group: Name
    prompt_index: PromptIndex
    place: SampleIndex
    frame: Bytes
    number: Count = 0


class AskCalls(Message):
    """A request for the stored calls of a sample."""

    group: Name
    place: SampleIndex


class StoredCalls(Message):
    """The frame of StoreCalls; empty if nothing is stored."""

    frame: Bytes


class AskReuse(Message):
    """A request: which samples of earlier attempts may be in the group? `versions`: the oldest version of each."""

    group: Name
    versions: Several[Annotated[int, Field(ge=0, le=1 << 53)]]


class ReuseAnswer(Message):
    """The oldest version that a sample of the group may have; None: no earlier attempt counts."""

    oldest: int | None
