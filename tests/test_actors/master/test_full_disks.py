"""A master whose disk is full, refuses or hangs: it is heard, and its run can be ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.callers import callers, master_of, without_evaluation
from support.small_disks import fill_disk, mounted_small_disk

from actors.master import farewell
from areal.storage import disk
from areal.storage import journal as journal_module
from areal.storage.journal import JournalTransaction
from areal.storage.run_folder import RunFolder
from protocols.attempt_messages import RenewLeases
from protocols.bus_errors import PreparingError
from protocols.membership_messages import AskSnapshot, AskStatus, DiskShortage, Shutdown
from protocols.messages import AskPermits, Permit


@pytest.fixture
def small_disk(config, monkeypatch) -> Iterator[Path]:
    """The run folder, on a disk of its own."""
    monkeypatch.setattr(disk, "RESERVE_BYTES", 300_000)
    config.folder.mkdir()
    with mounted_small_disk(config.folder, inodes=100):
        yield config.folder


async def test_a_master_with_a_full_disk_is_heard_and_its_run_can_be_ended_in_order(config, small_disk):
    async with master_of(without_evaluation(config)) as running, callers(config, "rollout_manager") as (manager,):
        fill_disk(small_disk)
        assert (await manager.ask(AskStatus())).values["capacity"]
        with pytest.raises(PreparingError, match=r"waits to write the journal: the disk of .* is full"):
            while True:  # the log of the journal has room for some
                await manager.ask(AskPermits(count=1))
                await manager.ask(RenewLeases(groups=()))
        assert (await manager.ask(AskStatus())).values["capacity"] == 0
        elsewhere = DiskShortage(folder="/weights", cause="read-only", free=9 << 20, waits="a trainer waits")
        with pytest.raises(PreparingError):
            await manager.beat(shortage=elsewhere)
        while not (alerts := (await manager.ask(AskStatus())).values["alerts"]):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        assert list(alerts) == [
            f"The disk of {small_disk} is full (0.0 MiB free): the master waits to write the journal; the disk of "
            "/weights is read-only (9.0 MiB free): a trainer waits. Free some room there, or make it writable, and the "
            "run goes on by itself; Ctrl-C ends it, and --resume continues it."
        ]
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await running).reason == "told to stop by SIGTERM"
    assert json.loads((small_disk / "summary.json").read_text())["reason"] == "told to stop by SIGTERM"


async def test_who_stops_a_run_on_a_disk_that_takes_nothing_at_all_is_heard_by_its_actors(config, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(farewell, "FAREWELL_SECONDS", 0.5)
    heard: list[object] = []
    async with master_of(without_evaluation(config)) as running, callers(config, "rollout_manager") as (manager,):
        events = (await manager.ask(AskSnapshot())).events
        subscriber = manager.bus.subscribe(events, lambda sequence, event: heard.append(event))
        await asyncio.sleep(0.5)  # a subscription takes its time
        monkeypatch.setattr(JournalTransaction, "write", refuse)
        monkeypatch.setattr(RunFolder, "write_summary", refuse)
        with pytest.raises(PreparingError, match="read-only"):
            while True:
                await manager.ask(AskPermits(count=1))
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await running).reason == "told to stop by SIGTERM"
        await subscriber.close()
    assert any(isinstance(event, Shutdown) for event in heard)


async def test_a_master_whose_disk_does_not_answer_is_heard_and_goes_on_with_it(config, monkeypatch):
    monkeypatch.setattr(journal_module, "SILENT_SECONDS", 0.05)
    answers, write = threading.Event(), JournalTransaction.write
    monkeypatch.setattr(
        JournalTransaction, "write", lambda self, connection: answers.wait() and write(self, connection)
    )
    answers.set()
    async with master_of(without_evaluation(config)), callers(config, "rollout_manager") as (manager,):
        answers.clear()
        try:
            for ask in (manager.ask(AskPermits(count=1)), manager.beat()):
                with pytest.raises(PreparingError, match=r"waits to write the journal: the disk of .* not answering"):
                    await ask
            assert (await manager.ask(AskStatus())).values["capacity"] == 0
        finally:
            answers.set()
        permits: tuple[Permit, ...] = ()
        while not permits:
            with contextlib.suppress(PreparingError):
                permits = (await manager.ask(AskPermits(count=1))).permits
        assert permits[0].prompt_index == 0


async def test_permits_that_a_full_disk_kept_from_their_asker_are_granted_again(config, small_disk):
    config = without_evaluation(config).model_copy(update={"batch_size": 8})
    async with master_of(config), callers(config, "rollout_manager") as (manager,):
        prompts: set[int] = set()

        async def ask(count: int) -> None:
            permits = (await manager.ask(AskPermits(count=count))).permits
            assert permits, f"all but {16 - len(prompts)} groups were granted to those who know"
            prompts.update(permit.prompt_index for permit in permits)

        hog = fill_disk(small_disk)
        with pytest.raises(PreparingError):
            while True:  # the log of the journal has room for some
                await ask(1)
        assert len(prompts) < 8
        hog.unlink()
        while prompts != set(range(16)):
            with contextlib.suppress(PreparingError):
                await ask(16)
