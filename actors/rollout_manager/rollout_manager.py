"""The rollout manager: asks for permits, runs workflows as coroutines, and sends scored samples to the trainer.

The prompt of a group is the row of the data source at the index in the permit. The source is a pure function of the
index. Scored samples are on the trainer's disk, and from time to time the calls of unfinished samples are stored there,
too: if a rollout manager dies, another manager samples the rest. A rollout manager never decides admission.

| loop, besides the loops of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| main | a healthy generator, room on the generators, permits | a task per group |
| group | stored samples, if resumed; the first G scored samples; the trainer | `GroupReady` |
| sample | tokens of calls, then the score; if an actor dies, another actor | the group |
| renew leases | a quarter of a lease | keeps groups; ends lost groups |
| balance | 2 s | moves sequences to emptier generators |
"""

import asyncio

import structlog

from actors.rollout_manager.group_run import GroupRun, TrainingRows, samples_of_group
from actors.rollout_manager.saved_groups import SavedGroups
from actors.rollout_manager.scorer_columns import with_scorer_columns
from actors.runtime.membership import Membership
from actors.sampling.sampling import Prompts, RowActor, Sampling
from actors.sampling.sessions import SampleSession
from areal.data.rows import Row
from areal.generation.moves import plan_moves
from areal.generation.routing import groups_that_fit
from areal.samples.trajectory import Trajectory
from areal.workflows.named_workflows import Workflow
from protocols.attempt_messages import LostLeases, RenewLeases
from protocols.membership_messages import LoadColumns
from protocols.messages import AskPermits, Permit, Permits

ASK_PERMITS_SECONDS = 20.0
BALANCE_SECONDS = 2.0
# The time to save the calls of all samples before another manager takes the groups over.
HAND_OVER_SECONDS = 0.8

log = structlog.get_logger()


class RolloutManager(RowActor):
    role = "rollout_manager"

    def __init__(self, member: Membership, sampling: Sampling, source: Prompts, workflow: Workflow) -> None:
        super().__init__(member, sampling, source, workflow)
        self._rows = TrainingRows(self.config, source, sampling.services)
        self._groups: dict[str, GroupRun] = {}
        self._samples_finished = 0  # in the groups that have ended
        self._moved = 0
        self._saved = SavedGroups(sampling, member.spawn)

    async def main(self) -> None:
        await self.member.become_healthy()
        self.member.spawn(self._renew_leases(), "renew leases")
        self.member.spawn(self._balance(), "balance")
        while self.member.state == "healthy":
            self.member.activity = "waiting for a healthy generator"
            await self.directory.until(lambda: self.directory.with_role("generator"))
            self.member.activity = f"the generators are full: no new group starts, {self._running} samples run"
            await self.sampling.dispatch.loads.room.until(lambda: self._free_groups() > 0)
            self.member.activity = "waiting for permits from the master"
            permits = await self.member.ask_master(AskPermits(count=self._free_groups()), Permits, ASK_PERMITS_SECONDS)
            for permit in permits.permits:
                if self.member.state == "healthy":  # otherwise it is free again once this manager has left
                    self._begin_group(permit)

    async def hand_over(self) -> None:
        """Leave the groups in progress to another manager, which continues from the saved work. Without another
        manager, finish the groups."""
        if any(m.identity != self.member.bus.identity.name for m in self.directory.with_role("rollout_manager")):
            groups = self._groups.values()
            saves = [save for group in groups for save in group.save_calls()]
            saves += [request for group in groups for request in group.flush()]
            if saves:
                await asyncio.wait(saves, timeout=HAND_OVER_SECONDS)
            for group in groups:
                group.task.cancel()
        await self.sampling.dispatch.loads.room.until(lambda: not self._groups)

    def stats(self) -> dict[str, float]:
        return self.sampling.stats() | {
            "groups_running": len(self._groups),
            "samples_running": self._running,
            "samples_finished": self._samples_finished + sum(group.finished for group in self._groups.values()),
            "moved": self._moved,
        }

    def note_loads(self, loads: LoadColumns) -> None:
        self.sampling.dispatch.loads.note(loads)

    def _free_groups(self) -> int:
        """Number of groups to start now; at least 1 if no group is in progress."""
        slots = self.sampling.dispatch.loads.places / self.sampling.dispatch.askers
        samples = samples_of_group(self.config)
        beginning = samples * sum(not group.sessions for group in self._groups.values())
        requests = self.sampling.dispatch.loads.sequences + beginning
        free = groups_that_fit(samples, slots, requests, self._running)
        if not self._groups:
            free = max(1, free)
        return min(free, self.config.rollout_manager.max_concurrent_groups - len(self._groups))

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.config.master.lease_seconds / 4)
            if self._groups:
                renewed = await self.member.ask_master(RenewLeases(groups=tuple(self._groups)), LostLeases)
                for group in renewed.groups:
                    if running := self._groups.get(group):
                        log.warning("lease lost", group=group)
                        running.task.cancel()

    async def _balance(self) -> None:
        """Every BALANCE_SECONDS, move sequences to generators where they finish sooner."""
        while True:
            await asyncio.sleep(BALANCE_SECONDS)
            dispatch = self.sampling.dispatch
            loads = {
                m.identity: load
                for m in self.directory.with_role("generator")
                if (load := dispatch.loads.reported.get(m.identity)) and dispatch.avoidance.trusts(m)
            }
            sessions = [session for group in self._groups.values() for session in group.sessions]
            calls = [call for session in sessions for call in session.running]
            moves = plan_moves(loads, calls, dispatch.askers, asyncio.get_running_loop().time())
            for call, target in moves:
                call.move(self.directory.members[target])
            self._moved += len(moves)

    @property
    def _running(self) -> int:
        """Number of unfinished samples in all groups."""
        return sum(group.unfinished for group in self._groups.values())

    def _begin_group(self, permit: Permit) -> None:
        self.sampling.awaited_rewards.update(permit.rewards)
        group = self._groups[permit.group] = self._group_of(permit)
        group.task = self.member.spawn(group.run(), permit.group)
        # A callback, not code in the task: a task that is cancelled before its first step never runs.
        group.task.add_done_callback(lambda _: self._end_group(group))

    def _group_of(self, permit: Permit) -> GroupRun:
        return GroupRun(permit, self.member, self.sampling, self._rows, self._saved, self.run_workflow)

    def _end_group(self, group: GroupRun) -> None:
        del self._groups[group.permit.group]
        self._samples_finished += group.finished
        self.sampling.dispatch.loads.room.notify()

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """Run the workflow for a training sample, have scorers score the tokens, and lower the reward if the
        completion is too long (`reward.overlong_tokens`). Raises SampleFailed."""
        sample = await self.sampling.run_workflow(session, self._workflow, row)
        sample = await with_scorer_columns(sample, self.config, row, self.sampling.services.rewards)
        penalty = self.sampling.services.overlong(sample)
        return sample.lowered(penalty) if penalty else sample
