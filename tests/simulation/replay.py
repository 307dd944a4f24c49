"""Compares the state that a master has restored from a snapshot with that of a replay of all events of the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from actors.master.run_state import RunState
from areal.data.prompt_sources import PromptSource
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_state import Groups, LedgerState, Lines, PromptQueue, Steps
from areal.staleness.run_ahead import RunAhead
from areal.storage.journal import Journal

Events = Sequence[tuple[str, dict[str, Any]]]
# What is not kept: where events go, what is chosen from, events for messages to people, and when leases end, since all
# are renewed.
NOT_KEPT = ("config", "journal", "room", "row_of_prompt", "source", "_unseen", "_story", "lease_expires")
PARTS = ("results", "tally", "sessions")
"""The parts of a `RunState`."""


class Replay(Journal):
    """A journal with these events and no snapshot, which takes no others."""

    def __init__(self, events: Events) -> None:
        self.file = Path("replay")
        self._all = json.loads(json.dumps(events))

    def read(self) -> tuple[None, Events]:  # type: ignore[override]
        return None, self._all


def differences(state: RunState, events: Events, source: PromptSource) -> list[str]:
    """The names of what differs from the state after these events. source: the rows."""
    replayed = RunState(state.config, Replay(events), source)
    restored, expected = _fields(state), _fields(replayed)
    return [name for name, value in expected.items() if restored[name] != value]


def _fields(state: RunState) -> dict[str, Any]:
    """The fields of the state, with the fields of its parts among them."""
    fields: dict[str, Any] = _plain(state)
    return {name: value for part in PARTS for name, value in fields.pop(part).items()} | fields


def _plain(value: Any) -> Any:
    """`value` as lists, dictionaries and numbers that can be compared."""
    match value:
        case Enum() | str() | int() | float() | None:
            return value
        case dict():
            return {f"{name}": _plain(item) for name, item in value.items()}
        case Ledger():
            return _plain(value.state)
        case BaseModel():
            return _plain(value.model_dump())
        case RunState() | LedgerState() | Groups() | Lines() | PromptQueue() | Steps() | RunAhead():
            return _kept(vars(value).items())
        case _ if is_dataclass(value):
            return _kept((field.name, getattr(value, field.name)) for field in fields(value))
        case set() | frozenset():
            return sorted(value)
        case Collection():
            return [_plain(item) for item in value]
    raise TypeError(f"{type(value)} cannot be compared")


def _kept(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: _plain(item) for name, item in items if name not in NOT_KEPT}
