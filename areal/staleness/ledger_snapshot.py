"""The snapshot of the ledger's state, fit for JSON: the whole state except the story of the groups."""

from collections import Counter
from typing import Any

from areal.base.fields import with_defaults
from areal.staleness import ledger_state
from areal.staleness.ledger_state import LedgerState, fields_of, with_tuples


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
