"""Requests that the master parks."""

import asyncio
from types import SimpleNamespace

from actors.master.run_control import RunControl
from actors.runtime.actor import Notifier
from protocols.messages import AskPermits
from protocols.transport import Request


async def test_of_requests_that_wait_in_turn_one_looks_at_each_change():
    run, turn, looks, free = SimpleNamespace(changed=Notifier()), asyncio.Lock(), [], []
    deadline = asyncio.get_running_loop().time() + 1000.0

    def look() -> int:
        looks.append(1)
        return free.pop() if free else 0

    def park() -> asyncio.Task[int | None]:
        request = Request(AskPermits(count=1), "rollout_manager/0#x", deadline, b"token")
        return asyncio.create_task(RunControl.park(run, request, look, turn))  # type: ignore[arg-type]

    waiting = [park() for _ in range(3)]
    for _ in range(10):
        run.changed.notify()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(looks) <= 11
    free += [3, 2, 1]
    run.changed.notify()
    assert await asyncio.gather(*waiting) == [1, 2, 3]
