"""Makes a state of the master at a checkpoint the present state, in the same run or in a fork. No I/O."""

from collections.abc import Collection
from typing import Any

from actors.master.run_state import RunState
from areal.staleness.invariants import check_invariants
from areal.staleness.ledger_state import (
    DELETED,
    LOST_WITH_THE_SPOOL,
    ROLLED_BACK,
    Discarded,
    Event,
    Requeued,
)
from areal.storage.run_folder import checkpoint_of
from protocols.membership_messages import Policy


def return_to(state: RunState, past: dict[str, Any], spooled: Collection[str]) -> None:
    """Make `state` the state `past`, an earlier result of `RunState.dump`, after the end of all actors. Groups alive in
    `past` remain if they were ready, are `spooled`, and were not deleted by users since. Other rows are generated anew,
    and other sessions are discarded. Numbers of lineages and masters go on, and evaluations of the remaining versions
    are kept."""
    now, config, version = state.dump(), state.config, past["ledger"]["version"]
    rows = [row | {"state": "ready"} if row["state"] == "batched" else row for row in past["ledger"]["groups"]]
    # The spooled samples of waiting prompts may be of undone versions.
    waiting = [prompt | {"resumed": False} for prompt in past["ledger"]["requeued"]]
    lost_holds = [m.held.version for m in state.members.values() if m.held and 0 < m.held.version < version]
    scored = now["partial"] is not None and now["partial"][0] <= version
    deleted = [row["group_id"] for row in rows if row["group_id"] in state.sessions.deleted_sessions]
    state.load(
        past
        | {name: now[name] for name in ("masters", "lineage", "partial", "row_scores", "tokens_sampled", "starts")}
        | {
            "ledger": past["ledger"] | {"steps": [], "batch": None, "groups": rows, "requeued": waiting},
            "policy": Policy(lineage=0, version=0, folder=config.model).model_dump(),
            "members": [],
            "trainer": "",
            "finished": None,
            "partial": now["partial"] if scored else None,
            "checkpoint_version": version,
            "checkpoint": str(checkpoint_of(config.folder, version)),
            "evaluations": [row for row in now["evaluations"] if row["version"] <= version],
            "not_evaluated": [row for row in now["not_evaluated"] if row[0] <= version]
            + [(held, ROLLED_BACK) for held in lost_holds],
            "deleted_sessions": dict.fromkeys([*past.get("deleted_sessions", ()), *deleted]),
            "rollbacks": now["rollbacks"] + 1,
            "abandoning": version,
        }
    )
    for row in rows:
        if row["state"] != "ready" or row["group_id"] not in spooled or row["group_id"] in deleted:
            lost = LOST_WITH_THE_SPOOL if row["state"] == "ready" else ROLLED_BACK
            reason = DELETED if row["group_id"] in deleted else lost
            of_row: Event = Requeued(row["group_id"], reason, failed=False)
            state.replay(Discarded(row["group_id"], reason) if row["session"] else of_row)
    check_invariants(state.ledger.state)


def become_fork(state: RunState, parent: RunState, past: dict[str, Any], *, keeps_history: bool) -> None:
    """Make the state of a new run the state `past` of another run with the newest state `parent`. keeps_history: the
    rows are the same, so their history counts."""
    history, run_ahead = state.history.dump(), state.run_ahead.dump()
    state.load(parent.dump())
    history = past.get("history", history) if keeps_history else history
    return_to(state, past | {"run_ahead": run_ahead, "history": history}, ())
    state.rollbacks, state.abandoning = parent.rollbacks, None
    state.tally.tokens_sampled = past.get("tokens_sampled", 0)
