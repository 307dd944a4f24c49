"""The changes of the master's state outside the ledger, in the form of the journal."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict

from protocols.evaluation_messages import EvaluationDone
from protocols.membership_messages import Member, Policy


class Change(BaseModel):
    """A change. `record` returns the kind and a body fit for JSON. The kind is the class name in snake case, without a
    final "Change", which some class names need to differ from a message's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def record(self) -> tuple[str, dict[str, Any]]:
        return _kind(type(self)), self.model_dump()


class MasterStarted(Change):
    pass


class Joined(Change):
    member: Member


class MemberChanged(Change):
    member: Member


class Left(Change):
    identity: str


class LineageOpened(Change):
    lineage: int
    trainer: str


class PublishedChange(Change):
    policy: Policy


class Rewarded(Change):
    """A group became ready at `version`. mean, spread: of the samples' rewards. tokens: number of sampled tokens in
    the samples. discarded: number of other sampled tokens. marks, gave: see areal.samples.trajectory.Note."""

    group: str
    row: int
    version: int
    mean: float
    spread: float
    signal: bool
    parts: dict[str, float]
    tokens: int
    discarded: int
    marks: tuple[str, ...] = ()
    gave: tuple[str, ...] = ()


class SessionsDeleted(Change):
    """Users deleted sessions that a step had trained. If the run goes back, no step trains these sessions again."""

    groups: tuple[str, ...]


class TokensDiscarded(Change):
    count: int


class Stepped(Change):
    """A step has trained `groups`."""

    metrics: dict[str, Any]
    groups: tuple[str, ...]


class CheckpointSavedChange(Change):
    version: int
    folder: str


class Evaluated(Change):
    evaluation: EvaluationDone


class EvaluationDropped(Change):
    version: int
    reason: str


class RowsScoredChange(Change):
    """rows: for every row the index, the number of tokens, and the scores."""

    version: int
    conditions: str
    rows: tuple[tuple[Any, ...], ...]


class RewardAdded(Change):
    """From the prompt `prompt` on, the reward has the weight `weight`."""

    prompt: int
    name: str
    weight: float


class Finished(Change):
    version: int


class Abandoned(Change):
    """The run went back to `version`, and the files of later steps have been moved away."""

    version: int


def change_of(kind: str, body: dict[str, Any]) -> Change:
    """The change of a record that JSON has encoded and decoded. Raises KeyError for an unknown kind."""
    return _KINDS[kind].model_validate(body, strict=False)


def _kind(change: type[Change]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", change.__name__.removesuffix("Change")).lower()


_KINDS = {_kind(change): change for change in Change.__subclasses__()}
