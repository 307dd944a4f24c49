"""The start of a run on this machine, in lines: an event, and the seconds since the command was given."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal.base.processes import timed
from protocols.membership_messages import actor_name


class StartLines:
    """Prints changes since the last status, until the first step of this start is trained, or until all actors are
    ready to evaluate a model."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._activities: dict[str, str] = {}
        self._first: int | None = None
        self._over = False

    def show(self, status: Mapping[str, Any]) -> None:
        """status: the master's status of the run."""
        if self._over:
            return
        for line in self._new(status["members"]):
            self._say(timed(line))
        version = status["version"]
        self._first = version if self._first is None else self._first
        if version > self._first:
            self._say(timed(f"step {version} is trained"))
        self._over = version > self._first or (not status["steps"] and {*self._activities.values()} == {"ready"})

    def _new(self, members: list[dict[str, Any]]) -> Iterator[str]:
        """Yield a line for every actor with a new activity, until the actor is ready."""
        for member in members:
            name = actor_name(member["identity"])
            activity = member["activity"] if member["state"] == "starting" else "ready"
            if self._activities.get(name) not in (activity, "ready"):
                self._activities[name] = activity
                yield f"{name}: {activity}"
