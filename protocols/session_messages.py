"""The messages about sessions of users, between gateways and the master.

| from | to | request | answer |
|---|---|---|---|
| gateway | master | AskSession | SessionAnswer |
| gateway | master | AdoptSessions | Sessions |
| gateway | master | DiscardSession | SessionDiscarded |
| gateway | master | ReportKeys | KeysElsewhere |
"""

from typing import Annotated, Literal

from pydantic import Field

from protocols.messages import Count, Message, Name, Part, PromptIndex, Several


class SessionGroup(Part):
    """A session of a user: its name, and its group, which has one sample. Calls of the session need weights of
    `min_version` or newer. `resumed`: the trainer may have calls of the session."""

    session: Name
    group: Name
    prompt_index: PromptIndex
    min_version: int
    resumed: bool = False


class AskSession(Message):
    """A request for the open session of the name `session`. The sender then holds the session, unless another
    gateway does. `opens`: open a session if none is open and a permit is free. `mark`: id of a reward, or empty."""

    session: Name
    opens: bool
    mark: Name = ""


class Receipt(Part):
    """A reward of a user was taken. `group`: the group that became ready with the reward. `gave`: see
    areal.samples.trajectory.Note; empty if an earlier version of this program took the reward."""

    group: Name
    gave: Name = ""


class SessionAnswer(Message):
    """`session`: None if the sender does not hold the session. `state`: the ledger's state of the last session of the
    name; "trained" if a step has trained that session; else empty. `holder`: the gateway that holds the session.
    `receipt`: the receipt of the reward with the asked mark; None without such a reward."""

    session: SessionGroup | None = None
    state: Name = ""
    holder: Name = ""
    receipt: Receipt | None = None


class AdoptSessions(Message):
    """A request for sessions that their gateway has left. The sender holds the sessions from then on."""

    count: Annotated[int, Field(ge=1, le=65536)]


class Sessions(Message):
    sessions: Several[SessionGroup]


class DiscardSession(Message):
    """Discard a session, or all alive groups of the name, for a reason. Refused once a fixed batch has such a group."""

    session: Name
    group: Name = ""
    reason: Literal["expired", "deleted", "opted out", "failed", "unused"]


class SessionDiscarded(Message):
    """`count`: number of discarded groups. `trained_in`: the steps that trained earlier groups of the name. `holder`:
    another gateway that holds the session. The session is then not discarded, and its calls go on there."""

    count: Count = 0
    trained_in: Several[Count] = ()
    holder: Name = ""


class KeyUse(Part):
    """The use of a user's key: calls and sampled tokens in the last minute, sessions that take calls now, and the
    number of refused requests since the start of the gateway."""

    calls: Count = 0
    tokens: Count = 0
    sessions: Count = 0
    refused: Count = 0


KeyUses = Annotated[dict[Name, KeyUse], Field(max_length=4096)]


class ReportKeys(Message):
    """The use of users' keys at the sender, by name."""

    keys: KeyUses


class KeysElsewhere(Message):
    """The use of the keys at all other gateways."""

    keys: KeyUses
