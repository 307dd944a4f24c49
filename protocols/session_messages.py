"""The messages about sessions of users, of gateways.

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
    """A session of a user, a group of one sample: its name and its group, whose calls need weights of `min_version` or
    newer. `resumed`: the trainer may have calls of it."""

    session: Name
    group: Name
    prompt_index: PromptIndex
    min_version: int
    resumed: bool = False


class AskSession(Message):
    """Asks for the open session of this name, which the sender holds from then on if nobody else does. `opens`: open
    one if there is none and a permit is free. `mark`: a client's id for a reward, or empty."""

    session: Name
    opens: bool
    mark: Name = ""


class Receipt(Part):
    """A reward of a user was taken: the group that became ready with it, and what the reward `gave`
    (areal.samples.trajectory.Note), empty if an earlier version of this program took it."""

    group: Name
    gave: Name = ""


class SessionAnswer(Message):
    """`session`: None if the sender does not hold it. `state`: that in the ledger of the last session of this name,
    which another gateway may hold, the `holder`; "trained" if it was, or empty. `receipt`: of the reward of this mark,
    with which a session of this name became ready; None if there is none."""

    session: SessionGroup | None = None
    state: Name = ""
    holder: Name = ""
    receipt: Receipt | None = None


class AdoptSessions(Message):
    """Asks for sessions that their gateway has left; the sender holds them from then on."""

    count: Annotated[int, Field(ge=1, le=65536)]


class Sessions(Message):
    sessions: Several[SessionGroup]


class DiscardSession(Message):
    """A session, or all its alive groups, are not trained, for this reason. Refused once a batch with one is fixed."""

    session: Name
    group: Name = ""
    reason: Literal["expired", "deleted", "opted out", "failed", "unused"]


class SessionDiscarded(Message):
    """`count`: how many groups were discarded. `trained_in`: the steps that trained earlier groups of this name.
    `holder`: the other gateway that has the session, which is then not discarded: its calls go on there."""

    count: Count = 0
    trained_in: Several[Count] = ()
    holder: Name = ""


class KeyUse(Part):
    """What a key of users has used: calls and sampled tokens in the last minute, sessions that take calls now, and how
    many of its requests were refused since the gateway has started."""

    calls: Count = 0
    tokens: Count = 0
    sessions: Count = 0
    refused: Count = 0


KeyUses = Annotated[dict[Name, KeyUse], Field(max_length=4096)]


class ReportKeys(Message):
    """What the keys of users have used at the sender, by name."""

    keys: KeyUses


class KeysElsewhere(Message):
    """What the keys have used at all other gateways."""

    keys: KeyUses
