"""What an actor does before it has a master."""

import asyncio
import inspect

import pytest
from helpers import network

from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from areal.config import UserError
from protocols.errors import BusyError
from protocols.transport import Bus


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
