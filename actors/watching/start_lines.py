"""The start of a run on this machine, in lines: what has happened, and how many seconds after its command was given."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from actors.watching.health import status_of
from protocols.bus_errors import BusError
from protocols.messages import actor_name
from protocols.transport import Bus

ASK_SECONDS = 5.0
# How often the master is asked: each pause is longer than the one before, as a run may wait for hours for who joins it.
FIRST_PAUSE, GROWTH, LAST_PAUSE = 0.25, 1.02, 5.0


def timed(text: str) -> str:
    """The text, after the seconds for which this program has run."""
    return f"{time.time() - psutil.Process().create_time():5.1f} s  {text}"


class StartLines:
    """What has changed in a run that starts since the last look."""

    def __init__(self) -> None:
        self._activities: dict[str, str] = {}

    @property
    def all_ready(self) -> bool:
        """Whether there are actors, and all are ready."""
        return {*self._activities.values()} == {"ready"}

    def new(self, status: Mapping[str, Any]) -> Iterator[str]:
        """A line for each actor that begins something else, until it is ready. status: of the run, from its master."""
        for member in status["members"]:
            name = actor_name(member["identity"])
            activity = member["activity"] if member["state"] == "starting" else "ready"
            if self._activities.get(name) not in (activity, "ready"):
                self._activities[name] = activity
                yield timed(f"{name}: {activity}")


async def show_start(bus: Bus, master: str, say: Callable[[str], None]) -> None:
    """Say the lines of a start until the first step of this start is trained, or all are ready to evaluate a model."""
    lines, first, pause = StartLines(), None, FIRST_PAUSE
    while True:
        with contextlib.suppress(BusError):  # it is asked again
            status = await status_of(bus, master, ASK_SECONDS)
            first = status["version"] if first is None else first
            for line in lines.new(status):
                say(line)
            if status["version"] > first:
                return say(timed(f"step {status['version']} is trained"))
            if not status["steps"] and lines.all_ready:
                return
        await asyncio.sleep(pause)
        pause = min(GROWTH * pause, LAST_PAUSE)
