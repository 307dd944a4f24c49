"""Requests of rollout managers to the master."""

import asyncio

import structlog

from actors.master import changes
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.staleness.ledger import ReportAnswer
from protocols.bus_errors import RefusedError
from protocols.membership_messages import actor_name
from protocols.messages import (
    MAX_SERVED,
    AddReward,
    AskPermits,
    Cause,
    Done,
    GroupFailed,
    GroupStarted,
    LostLeases,
    Permit,
    Permits,
    RenewLeases,
    ScoringFailed,
)
from protocols.transport import Request

log = structlog.get_logger()


class RolloutRequests(HandlesRequests):
    """Answers rollout managers, and requests to change the weight of a reward."""

    def __init__(self, run: RunControl) -> None:
        self._run = run
        self._turn = asyncio.Lock()  # after a change only the first waiting asker looks

    @handles(AskPermits)
    async def ask_permits(self, request: Request[AskPermits]) -> Permits:
        owner = self._run.member(request, "rollout_manager").identity
        if not await self._run.park(request, self._run.admission.free_groups, self._turn):
            return Permits(permits=())
        self._run.member(request)  # the sender may have been removed while its request was parked
        self._run.meter.begin()
        count = min(request.message.count, self._run.admission.free_groups())
        granted = self._run.ledger.admit(owner, count, self._run.now(), self._run.config.master.lease_seconds)
        return Permits(
            permits=tuple(
                Permit(
                    group=p.group_id,
                    prompt_index=p.prompt_index,
                    row=p.row,
                    min_version=p.min_version,
                    resumed=p.resumed,
                    rewards=self._run.state.rewards_of(p.prompt_index),
                )
                for p in granted
            )
        )

    @handles(AddReward)
    async def add_reward(self, request: Request[AddReward]) -> Done:
        name, weight = request.message.name, request.message.weight
        served = {name for m in self._run.state.members.values() if m.role == "reward" for name in m.serves}
        if name not in served | self._run.state.reward_names | {*self._run.config.judges}:
            names = ", ".join(sorted(served)) or "none"
            raise RefusedError(f"no actor serves {name!r} (served: {names}): start one, --role reward --reward {name}")
        prompt = self._run.ledger.state.prompts.next_prompt
        changed = self._run.state.rewards_of(prompt)
        if len({*changed, name}) > MAX_SERVED:
            raise RefusedError(f"the weights of at most {MAX_SERVED} rewards can be changed")
        if changed.get(name) != weight:
            self._run.state.emit(changes.RewardAdded(prompt=prompt, name=name, weight=weight))
            log.info("a reward has a new weight", reward=name, weight=weight, first_prompt=prompt)
        return Done()

    @handles(RenewLeases)
    async def renew_leases(self, request: Request[RenewLeases]) -> LostLeases:
        owner = self._run.member(request, "rollout_manager", "gateway").identity
        seconds = self._run.config.master.lease_seconds
        lost = self._run.ledger.leases.renew(owner, request.message.groups, self._run.now(), seconds)
        return LostLeases(groups=tuple(lost))

    @handles(GroupStarted)
    async def group_started(self, request: Request[GroupStarted]) -> Done:
        owner = self._run.member(request, "rollout_manager", "gateway").identity
        self._run.ledger.started(request.message.group, owner, request.message.start_version)
        self._run.changed.notify()
        return Done()

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
