"""Asks a master for the status of its run."""

from typing import Any

from areal.base.text import all_shown
from protocols.bus import Bus
from protocols.bus_errors import BusError
from protocols.membership_messages import AskStatus, Status


async def status_of(bus: Bus, master: str, seconds: float, since: int | None = None) -> dict[str, Any]:
    """The status of the run, from the master. since: include the recent steps after step `since`. Raises BusError."""
    answer = await bus.peer(master).ask(AskStatus(since=since), seconds)
    if not isinstance(answer, Status):
        raise BusError(f"{master} answered {answer.kind!r}")
    return {key: all_shown(value) for key, value in answer.values.items()}
