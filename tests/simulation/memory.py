"""Checks that each actor's memory stays bounded, and that the policy it knows never goes back to an older one."""

from __future__ import annotations

from typing import Any

from areal.staleness.ledger_records import snapshot_of
from protocols.membership_messages import Policy
from simulation.book import Violation
from simulation.incarnation import Incarnation
from simulation.model import Model

# Extra links that are allowed, for actors that have just left or are just being restarted.
SPARE_LINKS = 6


def check_actor(life: Incarnation, model: Model, processes: int) -> None:
    """Check one actor. Raises Violation. `processes`: the number of processes in the cluster."""
    actor, bus = life.actor, life.bus
    links = processes + SPARE_LINKS
    bounds = {"links": (len(bus._peers), links), "publishers and subscribers": (len(bus._event_links), 2)}
    if life.role == "master":
        bounds |= _bounds_of_master(actor, model, links)
    else:
        directory = vars(actor).get("directory")
        if directory is not None:  # it has joined
            _check_policy(life, directory.policy)
            bounds["members"] = len(directory.members), links
    match life.role:
        case "rollout_manager" if actor.state != "starting":
            limit = (model.max_staleness + 1) * model.batch_size
            bounds["groups in hand"] = len(actor.role._groups), 2 * limit
            dispatch = actor.role.sampling.dispatch
            bounds["routes"] = len(dispatch.loads.requests) + len(dispatch.avoidance._avoided), links
            bounds["loads"] = len(dispatch.loads.reported), links
    for what, (number, limit) in bounds.items():
        if number > limit:
            raise Violation(
                f"{life.process.name} holds {number} {what}, but at most {limit} are allowed", life.process.name
            )


def _bounds_of_master(master: Any, model: Model, members: int) -> dict[str, tuple[int, int]]:
    ledger, state, dump = master.ledger, master.state, snapshot_of(master.ledger.state)
    limit = (model.max_staleness + 1) * model.batch_size
    return {
        "groups": (len(ledger.state.groups) + len(dump["requeued"]), limit),
        "steps that may be redone": (len(dump["steps"]), _steps_to_redo(model)),
        "rewards": (len(state.tally.rewards), len(ledger.state.groups)),
        "token counts": (len(state.tally.tokens), len(ledger.state.groups)),
        "members": (len(state.members), members),
        "last heartbeats": (len(master.members.heartbeats.last), len(state.members)),
        "events in the journal": (master.journal.size, model.compact_events + 40 * limit + 10 * members),
    }


def _steps_to_redo(model: Model) -> int:
    """Steps are trained while a checkpoint is written, but not beyond the next one, so after two intervals a trainer
    waits for it. If it is killed there, its successor saves one of both intervals. The steps since the checkpoint
    before are kept, too."""
    return model.steps if model.doubtful else 4 * model.checkpoint_every


def _check_policy(life: Incarnation, policy: Policy) -> None:
    now = (policy.lineage, policy.version)
    if now < life.policy:
        raise Violation(f"{life.process.name} goes back from policy {life.policy} to {now}", life.process.name)
    life.policy = now
