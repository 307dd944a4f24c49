"""The master's answers to gateways about sessions and keys."""

import structlog

from actors.gateway.ledger_sessions import LedgerSessions
from actors.master.changes import SessionsDeleted
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.staleness.ledger_state import DELETED, GroupState, LedgerGroup
from protocols.bus_errors import RefusedError
from protocols.session_messages import (
    AdoptSessions,
    AskSession,
    DiscardSession,
    KeysElsewhere,
    ReportKeys,
    SessionAnswer,
    SessionDiscarded,
    SessionGroup,
    Sessions,
)
from protocols.transport import Request

log = structlog.get_logger()


class SessionRequests(HandlesRequests):
    """Answers gateways. A session has one holder at a time; without a holder, any gateway may have the session."""

    def __init__(self, run: RunControl) -> None:
        self._run = run

    @handles(AskSession)
    async def ask_session(self, request: Request[AskSession]) -> SessionAnswer:
        owner, name, ledger = self._run.member(request, "gateway").identity, request.message.session, self._run.ledger
        group = next(reversed(ledger.state.groups.of_session(name)), None)
        resumed = group is not None and group.state is GroupState.OPEN  # also if the holder asks again
        if group is not None and resumed and not group.owner:
            (group,) = self._adopt(owner, [group.group_id])
        elif request.message.opens and not resumed:
            self._run.meter.begin()
            seconds = self._run.config.master.lease_seconds
            if self._run.admission.free_sessions():
                served = self._run.evaluations.served.version
                group = LedgerSessions(ledger.state).open(name, owner, self._run.now(), seconds, served) or group
        receipt = self._run.state.sessions.receipt(name, request.message.mark)
        if group is None:
            return SessionAnswer(state="trained" if name in self._run.state.sessions.receipts else "", receipt=receipt)
        mine = group.state is GroupState.OPEN and group.owner == owner
        session = _described(group, resumed) if mine else None
        return SessionAnswer(session=session, state=group.state.value, holder=group.owner, receipt=receipt)

    def _adopt(self, owner: str, groups: list[str]) -> list[LedgerGroup]:
        return LedgerSessions(self._run.ledger.state).adopt(
            groups, owner, self._run.now(), self._run.config.master.lease_seconds
        )

    @handles(AdoptSessions)
    async def adopt_sessions(self, request: Request[AdoptSessions]) -> Sessions:
        owner = self._run.member(request, "gateway").identity
        orphans = LedgerSessions(self._run.ledger.state).ownerless()[: request.message.count]
        return Sessions(sessions=tuple(_described(group, resumed=True) for group in self._adopt(owner, orphans)))

    @handles(DiscardSession)
    async def discard_session(self, request: Request[DiscardSession]) -> SessionDiscarded:
        owner = self._run.member(request, "gateway").identity
        name, reason = request.message.session, request.message.reason
        groups = [
            g for g in self._run.ledger.state.groups.of_session(name) if request.message.group in ("", g.group_id)
        ]
        if reason != DELETED:  # the session may have become ready meanwhile, for its last holder
            groups = [group for group in groups if group.state is GroupState.OPEN]
        held = [group.owner for group in groups if group.state is GroupState.OPEN and group.owner not in ("", owner)]
        if held and reason == "deleted":
            return SessionDiscarded(holder=held[0])
        if any(group.state is GroupState.BATCHED for group in groups):
            raise RefusedError(f"session {name} is in the batch that is trained now")
        for group in groups:
            self._run.ledger.discard(group.group_id, reason)
            log.info("session discarded", session=name, group=group.group_id, reason=reason)
        trained = {group: step for group, (of, step) in self._run.state.sessions.trained_sessions.items() if of == name}
        if reason == DELETED and trained:
            self._run.state.emit(SessionsDeleted(groups=tuple(trained)))
        self._run.changed.notify()
        return SessionDiscarded(count=len(groups), trained_in=tuple(sorted({*trained.values()})))

    @handles(ReportKeys)
    async def report_keys(self, request: Request[ReportKeys]) -> KeysElsewhere:
        identity, records, now = self._run.member(request, "gateway").identity, self._run.meter.keys, self._run.now()
        records.note(identity, request.message.keys, now)
        return KeysElsewhere(keys=records.total(now, apart=identity))


def _described(group: LedgerGroup, resumed: bool) -> SessionGroup:
    return SessionGroup(
        session=group.session,
        group=group.group_id,
        prompt_index=group.prompt_index,
        min_version=group.admission_version if group.start_version is None else group.start_version,
        resumed=resumed,
    )
