"""The ledger as JSON, for the journal: events as records, and a snapshot of the state without the story of groups."""

import re
from collections import Counter
from typing import Any, cast, get_args

from areal.base.fields import with_defaults
from areal.staleness import ledger_state
from areal.staleness.ledger_state import Event, LedgerState

_KINDS: dict[type, str] = {
    event: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event.__name__).lower() for event in get_args(Event)
}
_EVENTS: dict[str, type] = {kind: event for event, kind in _KINDS.items()}


def event_record(event: Event) -> tuple[str, dict[str, Any]]:
    """Return the event as a kind (its class name in snake case) and a body fit for JSON."""
    return _KINDS[type(event)], fields_of(event)


def event_of(kind: str, body: dict[str, Any]) -> Event | None:
    """Return the event of a record, perhaps after JSON; None if the record is no event of the ledger."""
    return cast(Event, _EVENTS[kind](**with_tuples(body))) if kind in _EVENTS else None


def fields_of(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def with_tuples(body: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in body.items()}


def snapshot_of(state: LedgerState) -> dict[str, Any]:
    """Return the snapshot of a state. `state_of` restores the state without the events so far."""
    batch = state.steps.batch
    return {
        "settings": fields_of(state.settings),
        "version": state.version,
        "next_prompt": state.prompts.next_prompt,
        "next_session": state.prompts.next_session,
        "counters": fields_of(state.counters)
        | {"discarded": dict(state.counters.discarded), "requeued": dict(state.counters.requeued)},
        "groups": [fields_of(group) for group in state.groups],
        "requeued": [fields_of(prompt) for prompt in state.prompts.requeued],
        "batch": None if batch is None else fields_of(batch),
        "steps": [fields_of(step) | {"batch": fields_of(step.batch)} for step in state.steps],
    }


def state_of(snapshot: dict[str, Any]) -> LedgerState:
    """Return the state of a snapshot, which may have been through JSON. The story starts empty. Missing fields are as
    in a new ledger. Raises TypeError or ValueError for fields that this version does not know."""
    state = LedgerState(ledger_state.LedgerSettings(**snapshot["settings"]))
    snapshot = with_defaults(snapshot, snapshot_of(state))
    state.version = snapshot["version"]
    state.prompts.next_prompt, state.prompts.next_session = snapshot["next_prompt"], snapshot["next_session"]
    counts = snapshot["counters"]
    state.counters = ledger_state.Counters(
        **counts | {name: Counter(counts.get(name)) for name in ("discarded", "requeued")}
    )
    for row in snapshot["groups"]:
        state.groups.add(ledger_state.LedgerGroup(**row | {"state": ledger_state.GroupState(row["state"])}))
    state.prompts.requeued.extend(ledger_state.QueuedPrompt(**prompt) for prompt in snapshot["requeued"])
    state.steps.batch = None if snapshot["batch"] is None else ledger_state.Batch(**with_tuples(snapshot["batch"]))
    for step in snapshot["steps"]:
        batch = ledger_state.Batch(**with_tuples(step["batch"]))
        state.steps.keep(ledger_state.StepRecord(batch, tuple(step["staleness"]), tuple(step["prompts"])))
    return state
