"""The changes of the master's state outside the ledger, as the journal has them."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict

from protocols.evaluation_messages import EvaluationDone
from protocols.membership_messages import Member, Policy


class Change(BaseModel):
    """A change. Its record is its kind, the name of the class in snake case (without
    "Change", which is there if something else has the name), and a body fit for JSON."""

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
    """A group became ready at `version`. mean, spread: of the rewards of its samples. tokens, discarded: how many were
    sampled for these, and for others. marks, gave: as in areal.samples.trajectory.Note."""

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
    """Users had sessions deleted that were trained: if the run goes back, they are not trained again."""

    groups: tuple[str, ...]


class TokensDiscarded(Change):
    count: int


class Stepped(Change):
    """These groups were trained."""

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
    """rows: the row, the number of its tokens, and its scores."""

    version: int
    conditions: str
    rows: tuple[tuple[Any, ...], ...]


class RewardAdded(Change):
    """From this prompt on the reward has this weight."""

    prompt: int
    name: str
    weight: float


class Finished(Change):
    version: int


class Abandoned(Change):
    """The files of the steps after this version have been moved away, to which the run went back."""

    version: int


def change_of(kind: str, body: dict[str, Any]) -> Change:
    """The change of a record that has been through JSON. Raises KeyError for an unknown kind."""
    return _KINDS[kind].model_validate(body, strict=False)


def _kind(change: type[Change]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", change.__name__.removesuffix("Change")).lower()


_KINDS = {_kind(change): change for change in Change.__subclasses__()}
