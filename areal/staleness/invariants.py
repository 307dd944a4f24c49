"""The invariants of the ledger's state machine, checked after a restart, by an audit, and by tests."""

from areal.staleness.ledger import Schedule
from areal.staleness.ledger_state import UNFINISHED, GroupState, LedgerGroup, LedgerState


def check_invariants(state: LedgerState) -> None:
    """Raise LedgerError with the names of the broken invariants."""
    groups, prompts, schedule = state.groups, state.prompts, Schedule(state)
    open_prompts = state.open_prompts()
    gone = state.counters.trained + state.counters.discarded.total()
    batched = {group.group_id for group in groups if group.state is GroupState.BATCHED}
    invariants = {
        "alive groups are within capacity": len(groups) <= max(state.room.most_alive, _most_admitted(state)),
        "a prompt is alive or re-queued at most once": len(open_prompts) == len(set(open_prompts)),
        "no prompt is lost": prompts.next_prompt + prompts.next_session == len(open_prompts) + gone,
        "sessions are counted": groups.sessions == sum(bool(group.session) for group in groups),
        "the batch equals the batched groups": batched == set(state.steps.batch.group_ids if state.steps.batch else ()),
        "rows are consistent": all(_is_sound(state, group) for group in groups),
        "the sorted lines match the rows": groups.lines.match(groups),
        "every group fits before its deadline": (not state.settings.bounds_groups or schedule.fits(groups.unbatched())),
    }
    broken = [name for name, holds in invariants.items() if not holds]
    if broken:
        problem = f"broken at version {state.version}: {'; '.join(broken)}"
        raise state.error(problem, *(group.group_id for group in groups))


def _most_admitted(state: LedgerState) -> int:
    """Return the most groups that can have been admitted under their bounds, perhaps by earlier settings."""
    bound = max((group.max_staleness for group in state.groups), default=0)
    return state.settings.batch_size * (bound + 1)


def _is_sound(state: LedgerState, group: LedgerGroup) -> bool:
    """True if exactly the unfinished groups have a lease, finished groups a start version, and versions are valid."""
    in_progress = group.state in UNFINISHED
    if (in_progress and group.owner != "") != (group.lease_expires is not None):
        return False
    if group.session == "" and group.state is GroupState.OPEN or group.session and group.state is GroupState.ADMITTED:
        return False
    if group.start_version is None:
        return in_progress
    is_new = group.resumed or group.session != "" or state.min_version(group) <= group.start_version
    return is_new and group.start_version <= state.version
