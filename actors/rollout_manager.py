"""The rollout manager: asks for permits, runs workflows as coroutines, forms groups and sends them to the trainer.

The prompt of a group is the row of the data source at the index in the permit. The source is a pure function of that
index, so a rollout manager has no state that another one could not rebuild. It never decides admission.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from actors.parts.calls import SampleFailed
from actors.parts.sampler import Sampler
from actors.parts.sessions import SampleSession
from areal.data.rows import Row
from areal.generation.routing import GeneratorLoad, groups_that_fit, plan_moves
from areal.rewards.result import mean_parts
from areal.trajectory import Group, Trajectory, columns, notes_of
from protocols.errors import BusError, FencedError, RefusedError
from protocols.messages import (
    AskPermits,
    Cause,
    Done,
    GroupFailed,
    GroupStarted,
    LoadColumns,
    LostLeases,
    Permit,
    Permits,
    RenewLeases,
    StoreGroup,
)

ASK_PERMITS_SECONDS = 20.0
STORE_SECONDS = 60.0
RETRY_SECONDS = 1.0
BALANCE_SECONDS = 2.0

log = structlog.get_logger()


class RolloutManager(Sampler):
    role = "rollout_manager"

    async def setup(self) -> None:
        await super().setup()
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._unfinished: dict[str, int] = {}  # number of unfinished samples, by group
        self._sessions: dict[str, list[SampleSession]] = {}
        self._samples_finished = self._moved = 0

    async def main(self) -> None:
        await self.become_healthy()
        self.spawn(self._renew_leases(), "renew leases")
        self.spawn(self._balance(), "balance")
        while self.state == "healthy":
            self.activity = "waiting for a healthy generator"
            await self.until(lambda: bool(self.with_role("generator")))
            self.activity = f"the generators are full, so no new group starts: {self._running} samples are running"
            await self._router.room.until(lambda: self._free_groups() > 0)
            self.activity = "waiting for permits from the master"
            permits = await self.ask_master(AskPermits(count=self._free_groups()), Permits, ASK_PERMITS_SECONDS)
            for permit in permits.permits:  # also if the manager has begun to drain since it asked
                self._begin(permit)

    async def hand_over(self) -> None:
        """Wait until the groups in progress are finished. Unfinished ones are admitted again, to another manager."""
        await self._router.room.until(lambda: not self._groups)

    def stats(self) -> dict[str, float]:
        if self.state == "stale":
            return {}
        return super().stats() | {
            "groups_running": len(self._groups),
            "samples_running": self._running,
            "samples_finished": self._samples_finished,
            "moved": self._moved,
        }

    def note_loads(self, loads: LoadColumns) -> None:
        if self.state != "stale":
            columns = (loads.sequences, loads.asker_sequences, loads.limits, loads.versions)
            rows = map(GeneratorLoad, *(column.tolist() for column in columns))
            self._router.loads = dict(zip(loads.names, rows, strict=True))
            self._router.room.notify()

    def _free_groups(self) -> int:
        """Number of groups to start now. It is at least 1 if no group is in progress."""
        generators = self.with_role("generator")
        places = sum(map(self._router.limit, generators)) / self._router.askers
        beginning = self._samples * sum(not sessions for sessions in self._sessions.values())
        requests = sum(self._router.requests[m.identity] for m in generators) + beginning
        free = groups_that_fit(self._samples, places, requests, self._running)
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

    async def _balance(self) -> None:
        """Every BALANCE_SECONDS, move sequences to generators where they finish sooner."""
        while True:
            await asyncio.sleep(BALANCE_SECONDS)
            generators = {m.identity: m for m in self.with_role("generator") if m.identity in self._router.loads}
            loads = {identity: self._router.loads[identity] for identity in generators}
            calls = [call for sessions in self._sessions.values() for session in sessions for call in session.running]
            moves = plan_moves(loads, calls, self._router.askers, asyncio.get_running_loop().time())
            for call, target in moves:
                call.move(generators[target])
            self._moved += len(moves)

    @property
    def _samples(self) -> int:
        """Number of samples that are started for a group."""
        return self.config.group_size + self.config.oversample

    @property
    def _running(self) -> int:
        """Number of unfinished samples in all groups."""
        return sum(self._unfinished.values())

    # --- one group

    def _begin(self, permit: Permit) -> None:
        self._unfinished[permit.group] = self._samples
        self._sessions[permit.group] = []
        self._groups[permit.group] = task = self.spawn(self._run_group(permit), permit.group)
        # A callback, not code in the task: a task that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: self._end(permit.group))

    def _end(self, group: str) -> None:
        del self._groups[group]
        del self._unfinished[group]
        del self._sessions[group]
        self._router.room.notify()

    async def _run_group(self, permit: Permit) -> None:
        try:
            await self._store(*await self._sample(permit))
        except _GroupFailed as failure:
            failed = GroupFailed(
                group=permit.group, cause=failure.cause, reason=f"{failure}"[:4096], discarded=failure.discarded
            )
            await self.ask_master(failed, Done)

    async def _sample(self, permit: Permit) -> tuple[Group, int, dict[str, float]]:
        """Sample a group. Returns the group, the number of tokens that were sampled but are not part of it, and the
        parts of its rewards. Raises _GroupFailed."""
        try:
            row = self._source.row(permit.prompt_index)
        except Exception as error:  # a bad row, or a data set that cannot be read; libraries raise anything
            log.error("row failed", row=permit.prompt_index, exc_info=error)
            raise _GroupFailed("row", f"row {permit.prompt_index} of the data cannot be used: {error}", 0) from None
        if too_long := self.services.too_long(row):
            raise _GroupFailed("long", too_long, 0)
        home = await self._router.choose("generator", min_version=permit.min_version)
        start = _GroupStart(self._samples)
        sessions = self._sessions[permit.group] = [
            SampleSession(
                self.services, row, self.config.sampling, permit.min_version, home=home,
                place=self._router.place_at(home), on_start=start.sample_started,
            )
            for _ in range(self._samples)
        ]  # fmt: skip

        def report(version: int) -> None:
            for session in sessions:
                session.min_version = version
            self.spawn(self.ask_master(GroupStarted(group=permit.group, start_version=version), Done), "group started")

        start.report = report
        try:
            scored = await self._first_scored([self._run_sample(permit, session, row, start) for session in sessions])
        except SampleFailed as failure:
            raise _GroupFailed(failure.cause, failure, _sampled(sessions)) from None
        finally:
            for session in sessions:
                session.close()
        samples, notes = zip(*scored, strict=True)
        notes_text = notes_of(row.fields, notes) if self.config.observe.rollouts != "none" else ""
        group = Group(permit.group, permit.prompt_index, samples, notes_text)
        beside = max(0, _sampled(sessions) - sum(int(t.sampled.sum()) for t in group.trajectories))
        return group, beside, mean_parts(session.reward_parts for session in sessions)

    async def _first_scored(self, work: list[Coroutine[Any, Any, _Scored | SampleFailed]]) -> list[_Scored]:
        """The first `group_size` scored samples, with their notes; the others are cancelled. Raises SampleFailed once
        so many samples have failed that fewer than `group_size` are left."""
        scored: list[_Scored] = []
        failures: list[SampleFailed] = []
        async with asyncio.TaskGroup() as tasks:
            samples = [tasks.create_task(task) for task in work]
            for ended in asyncio.as_completed(samples):
                sample = await ended
                failures.append(sample) if isinstance(sample, SampleFailed) else scored.append(sample)
                if len(scored) == self.config.group_size or len(failures) > self.config.oversample:
                    break
            for task in samples:
                task.cancel()
        if len(failures) > self.config.oversample:
            raise failures[0]
        return scored

    async def _run_sample(
        self, permit: Permit, session: SampleSession, row: Row, start: _GroupStart
    ) -> _Scored | SampleFailed:
        began = time.time()
        try:
            sample = await self.run_workflow(session, row)
            times = {"began": began, "seconds": time.time() - began}
            return sample, {"parts": session.reward_parts, "generators": [*session.generators], **times}
        except SampleFailed as failure:
            if session.first_version is None:
                start.sample_lost()
            return failure
        finally:
            self._unfinished[permit.group] -= 1
            self._samples_finished += 1
            self._router.room.notify()

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """Run the workflow for one sample, and lower its reward if the completion is too long
        (`reward.overlong_tokens`). Only training samples get this penalty, not those of an evaluation."""
        sample = await super().run_workflow(session, row)
        penalty = self.services.overlong(sample)
        return sample.lowered(penalty) if penalty else sample

    async def _store(self, group: Group, discarded: int, reward_parts: dict[str, float]) -> None:
        """Send the group to the trainer, until the trainer has stored it. Repeats are harmless, because a group is
        identified by its id. Raises _GroupFailed if the trainer refuses the group."""
        request = StoreGroup(
            group=group.id,
            prompt_index=group.prompt_index,
            discarded=discarded,
            reward_parts=reward_parts,
            notes=group.notes,
            columns=columns(group.trajectories),
        )
        while True:
            await self.until(lambda: bool(self.with_role("trainer")))
            try:
                await self.ask(self.with_role("trainer")[0].address, request, Done, STORE_SECONDS)
                return
            except BusError as error:
                # If the trainer was fenced, its successor will take the group.
                if isinstance(error, RefusedError) and not isinstance(error, FencedError):
                    sampled = sum(int(t.sampled.sum()) for t in group.trajectories)
                    raise _GroupFailed(
                        "trainer", f"the trainer refused the group: {error}", sampled + discarded
                    ) from None
                log.warning("the trainer did not take a group", group=group.id, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)


_Scored = tuple[Trajectory, dict[str, Any]]
"""A sample and what `notes_of` notes about it."""


class _GroupFailed(Exception):
    """A group cannot be finished. `discarded`: number of tokens that were sampled for it."""

    def __init__(self, cause: Cause, why: object, discarded: int) -> None:
        super().__init__(str(why))
        self.cause = cause
        self.discarded = discarded


def _sampled(sessions: list[SampleSession]) -> int:
    return sum(session.tokens_sampled for session in sessions)


class _GroupStart:
    """Reports a group's start version once every sample of the group has started, or has failed before its first token.
    The start version is the oldest version that sampled a first token."""

    report: Callable[[int], None]

    def __init__(self, samples: int) -> None:
        self._missing = samples
        self._versions: list[int] = []

    def sample_started(self, version: int) -> None:
        self._versions.append(version)
        self._one_less()

    def sample_lost(self) -> None:
        """A sample has failed before its first token."""
        self._one_less()

    def _one_less(self) -> None:
        self._missing -= 1
        if not self._missing and self._versions:
            self.report(min(self._versions))
