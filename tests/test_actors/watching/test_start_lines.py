"""The start of a run is shown as it happens."""

from __future__ import annotations

import re

from actors.watching.start_lines import StartLines


def status(**activities: str) -> dict:
    """That of a run whose members do this; a member that is ready does something else in a run."""
    members = []
    for role, activity in activities.items():
        state = "healthy" if activity == "ready" else "starting"
        members.append({"identity": f"{role}/0#ab12", "state": state, "activity": activity})
    return {"members": members}


def test_each_change_of_an_actor_is_a_line_with_its_time_until_the_actor_is_ready():
    lines = StartLines()
    printed = [
        [re.sub(r"^ *\d+\.\d s  ", "", line) for line in lines.new(now)]
        for now in (
            status(trainer="starting"),
            status(trainer="starting", generator="starting"),
            status(trainer="starting DeepSpeed", generator="ready"),
            status(trainer="starting DeepSpeed", generator="loading version 1"),
            status(trainer="ready", generator="ready"),
        )
    ]
    assert printed == [
        ["trainer/0: starting"],
        ["generator/0: starting"],
        ["trainer/0: starting DeepSpeed", "generator/0: ready"],
        [],
        ["trainer/0: ready"],
    ]
    assert lines.all_ready
