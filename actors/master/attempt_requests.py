"""Requests about attempts at a group: leases, failures, and the reuse of the samples of earlier attempts."""

import structlog

from actors.master import changes
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.staleness.ledger import ReportAnswer
from protocols.attempt_messages import (
    AskReuse,
    Cause,
    GroupFailed,
    LostLeases,
    RenewLeases,
    ReuseAnswer,
    ScoringFailed,
)
from protocols.membership_messages import actor_name
from protocols.messages import Done
from protocols.transport import Request

log = structlog.get_logger()


class AttemptRequests(HandlesRequests):
    """Answers rollout managers, evaluators and gateways, and the trainer that looks for samples to use again."""

    def __init__(self, run: RunControl) -> None:
        self._run = run

    @handles(RenewLeases)
    async def renew_leases(self, request: Request[RenewLeases]) -> LostLeases:
        owner = self._run.member(request, "rollout_manager", "gateway").identity
        seconds = self._run.config.master.lease_seconds
        lost = self._run.ledger.leases.renew(owner, request.message.groups, self._run.now(), seconds)
        return LostLeases(groups=tuple(lost))

    @handles(AskReuse)
    async def ask_reuse(self, request: Request[AskReuse]) -> ReuseAnswer:
        self._run.check_trainer(request)
        return ReuseAnswer(oldest=self._run.ledger.reuse(request.message.group, request.message.versions))

    @handles(GroupFailed)
    async def group_failed(self, request: Request[GroupFailed]) -> Done:
        owner, failed = self._run.member(request, "rollout_manager").identity, request.message
        if self._give_back(failed, owner) is ReportAnswer.ACCEPTED:
            if failed.cause == "long":
                self._run.end_if(self._run.failures.too_long(failed.reason))
            else:
                log.warning("group failed", group=failed.group, cause=failed.cause, reason=failed.reason)
                self._run.state.emit(changes.TokensDiscarded(count=failed.discarded))
                paused, now = self._run.failures.outage, self._run.now()
                self._run.failures.failed(failed.cause, failed.reason, now)
                if self._run.failures.outage and not paused:
                    log.error("admission pauses: no group can be finished", why=self._run.failures.describe_outage(now))
            self._log_first_failure(failed.cause, failed.reason, owner)
        self._run.changed.notify()
        return Done()

    def _give_back(self, failed: GroupFailed, owner: str) -> ReportAnswer:
        if failed.cause in ("row", "long"):  # another attempt would fail as well
            group = self._run.ledger.state.groups.get(failed.group)
            if group is None or group.owner != owner:
                return ReportAnswer.GONE
            return self._run.ledger.discard(failed.group, failed.cause)
        return self._run.ledger.failed(failed.group, owner, failed.cause, counts=not self._run.failures.in_a_row)

    @handles(ScoringFailed)
    async def scoring_failed(self, request: Request[ScoringFailed]) -> Done:
        sender, failed = self._run.member(request).identity, request.message
        self._log_first_failure(failed.cause, failed.reason, sender)
        self._run.end_if(self._run.failures.sample_failed(failed.reason, self._run.now()))
        return Done()

    def _log_first_failure(self, cause: Cause, reason: str, sender: str) -> None:
        if self._run.failures.is_first(cause, reason, actor_name(sender)):
            log.error(self._run.failures.firsts[cause])
