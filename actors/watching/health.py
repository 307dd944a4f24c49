"""The health check: is the master at an address alive, and is an actor of the run healthy?

The probes of cluster managers use the check, and scripts that wait until a run is up.
"""

import asyncio
from typing import Any

from actors.watching.run_status import status_of
from protocols.bus import Bus
from protocols.bus_errors import BusError
from protocols.membership_messages import actor_name
from protocols.transport import ask_until

ASK_SECONDS = 5.0
PAUSE_SECONDS = 0.5


class UnhealthyError(BusError):
    """The run or the actor did not become healthy in time. The message names the missing part."""


async def until_healthy(bus: Bus, master: str, actor: str | None, seconds: float) -> str:
    """Wait until the master answers and `actor`, such as `generator/0`, is healthy. actor: None waits for the master
    only. Returns the activity of the run, in a line. Raises UnhealthyError after `seconds`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds

    async def look() -> str:
        run = await status_of(bus, master, min(max(0.0, deadline - loop.time()), ASK_SECONDS))
        if missing := _missing(run, actor):
            raise UnhealthyError(missing)
        return f"{run['run']} is at step {run['version']} of {run['steps']}: {run['waiting']}"

    try:
        return await ask_until(look, pause=PAUSE_SECONDS, seconds=seconds)
    except BusError as error:
        missing = error if isinstance(error, UnhealthyError) else f"No master answers at {master}"
        raise UnhealthyError(f"{missing} (waited {seconds:g} s).") from None


def _missing(status: dict[str, Any], actor: str | None) -> str:
    states = {actor_name(member["identity"]): member["state"] for member in status["members"]}
    if actor is None or states.get(actor) == "healthy":
        return ""
    return f"{actor} is {states[actor]}" if actor in states else f"There is no {actor} in the run {status['run']}"
