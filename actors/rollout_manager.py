"""The rollout manager: asks for permits, runs workflows as coroutines, forms groups and hands them to the trainer.

Its prompts are rows of a source that is a pure function of the index in the permit, so that it holds no state that
another manager could not rebuild. It never decides admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from actors.runtime import Signal
from actors.sessions import SampleFailed, Sampler, SampleSession
from areal.data import Row
from areal.rewards import overlong_penalty
from areal.trajectory import Group, Trajectory
from protocols.errors import BusError
from protocols.messages import (
    AskPermits,
    Done,
    GroupFailed,
    GroupStarted,
    LostLeases,
    Permit,
    Permits,
    RenewLeases,
    StoreGroup,
    TrajectoryPart,
)

ASK_PERMITS_SECONDS = 20.0
STORE_SECONDS = 60.0
RETRY_SECONDS = 1.0

log = structlog.get_logger()


class RolloutManager(Sampler):
    role = "rollout_manager"

    async def setup(self) -> None:
        await super().setup()
        self._groups: dict[str, asyncio.Task] = {}
        self._unfinished: dict[str, int] = {}  # samples, by group
        self._samples_finished = 0
        self._room = Signal()

    async def main(self) -> None:
        await self.become_healthy()
        self.spawn(self._renew_leases(), "renew leases")
        while self.state == "healthy":
            self.activity = "waiting for generators"
            await self.until(lambda: bool(self.with_role("generator")))
            self.activity = f"generators are full: {self._running} samples run"
            await self._room.until(lambda: self._free_groups() > 0)
            self.activity = "waiting for permits"
            permits = await self.ask_master(AskPermits(count=self._free_groups()), Permits, ASK_PERMITS_SECONDS)
            for permit in permits.permits:  # granted meanwhile, they are worked on also by a manager that drains
                self._begin(permit)

    async def hand_over(self) -> None:
        """Finish the groups in hand; what is left at the end is admitted again elsewhere."""
        await self._room.until(lambda: not self._groups)

    def stats(self) -> dict[str, float]:
        if self.state == "stale":
            return {}
        return {
            "groups_running": len(self._groups),
            "samples_running": self._running,
            "samples_finished": self._samples_finished,
        }

    def _free_groups(self) -> int:
        """Groups that fit into this manager's share of what the generators run at once; at least one always may."""
        generators, managers = len(self.with_role("generator")), max(1, len(self.with_role("rollout_manager")))
        samples = generators * self.config.generator.max_concurrent_rollouts / managers
        free = int((samples - self._running) // self.config.group_size)
        if not self._groups:
            free = max(1, free)
        return min(free, self.config.rollout_manager.max_concurrent_groups - len(self._groups))

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self.config.master.lease_seconds / 4)
            if self._groups:
                renewed = await self.ask_master(RenewLeases(groups=tuple(self._groups)), LostLeases)
                for group in renewed.groups:
                    if task := self._groups.get(group):
                        log.warning("lease lost", group=group)
                        task.cancel()

    @property
    def _running(self) -> int:
        """Samples."""
        return sum(self._unfinished.values())

    # --- one group

    def _begin(self, permit: Permit) -> None:
        self._unfinished[permit.group] = self.config.group_size
        self._groups[permit.group] = task = self.spawn(self._run_group(permit), permit.group)
        # Not in the task itself: one that is cancelled before its first step never runs at all.
        task.add_done_callback(lambda _: self._end(permit.group))

    def _end(self, group: str) -> None:
        del self._groups[group]
        del self._unfinished[group]
        self._room.notify()

    async def _run_group(self, permit: Permit) -> None:
        try:
            group = await self._sample(permit)
            await self._store(group)
        except* SampleFailed as failures:
            reason = str(failures.exceptions[0])[:4096]
            await self.ask_master(GroupFailed(group=permit.group, reason=reason), Done)

    async def _sample(self, permit: Permit) -> Group:
        row = self._source.row(permit.prompt_index)
        home = await self._router.choose("generator", min_version=permit.min_version)
        start = _GroupStart(self.config.group_size)
        sessions = [
            SampleSession(
                self._router, self._tokenizer, row, self.config.sampling, permit.min_version, home, start.sample_started
            )
            for _ in range(self.config.group_size)
        ]

        def report(version: int) -> None:
            for session in sessions:
                session.min_version = version
            self.spawn(self.ask_master(GroupStarted(group=permit.group, start_version=version), Done), "group started")

        start.report = report
        with self._router.using(home, len(sessions)):
            async with asyncio.TaskGroup() as tasks:
                samples = [tasks.create_task(self._run_sample(permit, session, row)) for session in sessions]
        return Group(permit.group, permit.prompt_index, tuple(sample.result() for sample in samples))

    async def _run_sample(self, permit: Permit, session: SampleSession, row: Row) -> Trajectory:
        try:
            return await self.run_workflow(session, row)
        finally:
            self._unfinished[permit.group] -= 1
            self._samples_finished += 1
            self._room.notify()

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """One sample, its reward lowered where it is overlong. This is for training only: evaluation scores as is."""
        done = await super().run_workflow(session, row)
        penalty = overlong_penalty(
            int(done.sampled.sum()), self.config.sampling.max_new_tokens, self.config.reward.overlong_tokens
        )
        return replace(done, reward=done.reward - penalty)

    async def _store(self, group: Group) -> None:
        """Until the trainer has it. A repeat is harmless: the group has its id."""
        request = StoreGroup(
            group=group.id,
            prompt_index=group.prompt_index,
            trajectories=tuple(
                TrajectoryPart(
                    tokens=t.tokens, logprobs=t.logprobs, versions=t.versions, reward=t.reward, finish=t.finish
                )
                for t in group.trajectories
            ),
        )
        while True:
            await self.until(lambda: bool(self.with_role("trainer")))
            try:
                await self.ask(self.with_role("trainer")[0].address, request, Done, STORE_SECONDS)
                return
            except BusError as error:
                log.warning("the trainer did not take a group", group=group.id, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)


class _GroupStart:
    """Tells the group's start version, the oldest of its samples', once every sample has begun."""

    report: Callable[[int], None]

    def __init__(self, samples: int) -> None:
        self._missing = samples
        self._versions: list[int] = []

    def sample_started(self, version: int) -> None:
        self._versions.append(version)
        self._missing -= 1
        if not self._missing:
            self.report(min(self._versions))
