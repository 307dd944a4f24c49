"""What an actor does before it has a master."""

import asyncio
import inspect
import threading

import pytest
from support.networks import network

from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from areal.base.errors import UserError
from areal.storage.disk import DiskRetry
from protocols.bus import Bus
from protocols.bus_errors import BusyError


class Idle(Actor):
    role = "reward"


def waiting(port, patience):
    return Membership(Idle, Bus("reward/?#a", network()), f"tcp://127.0.0.1:{port}", patience=patience)


async def test_one_who_waits_for_a_master_leaves_when_told(free_port):
    actor = waiting(free_port, patience=1000.0)
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0.1)
    assert not running.done()
    actor.leave("SIGTERM")
    ending = await running
    assert ending.ok and ending.reason == "told to leave by SIGTERM"


async def test_one_who_has_waited_long_enough_says_so(free_port):
    with pytest.raises(UserError, match="No master answers at .*waited 0.1 s"):
        await waiting(free_port, patience=0.1).run()


async def test_one_who_is_not_in_the_run_is_busy_for_whoever_asks_it_for_work(free_port):
    work = asyncio.sleep(0)
    with pytest.raises(BusyError, match="this actor is ending"):
        waiting(free_port, patience=1.0).spawn(work, "work")
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


async def test_each_thing_that_is_written_is_a_kind_of_work_and_rollouts_never_count_as_a_hang(free_port, tmp_path):
    actor = waiting(free_port, patience=1.0)
    actor.disk = DiskRetry(tmp_path, "the trainer")
    begun, go_on = threading.Barrier(3), threading.Event()

    def write():
        begun.wait(60)
        assert go_on.wait(60)

    async with asyncio.TaskGroup() as writes:
        writes.create_task(actor.on_disk("the spool", write))
        writes.create_task(actor.on_disk("the rollouts", write, optional=True))
        await asyncio.to_thread(begun.wait, 60)
        works = {work.what: work.kind for work in actor.works.report()}
        go_on.set()
    assert works == {"writing the spool": "the spool", "writing the rollouts": ""}
    assert actor.works.take_ended().keys() == {"the spool"}
