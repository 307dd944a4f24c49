"""The start of a run on this machine, in lines: what has happened, and how many seconds after its command was given."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal.base.processes import timed
from protocols.membership_messages import actor_name


class StartLines:
    """Says what has changed since the status before, until the first step of this start is trained, or all are ready to
    evaluate a model."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._activities: dict[str, str] = {}
        self._first: int | None = None
        self._over = False

    def show(self, status: Mapping[str, Any]) -> None:
        """status: of the run, from its master."""
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
        """A line for each actor that begins something else, until it is ready."""
        for member in members:
            name = actor_name(member["identity"])
            activity = member["activity"] if member["state"] == "starting" else "ready"
            if self._activities.get(name) not in (activity, "ready"):
                self._activities[name] = activity
                yield f"{name}: {activity}"
