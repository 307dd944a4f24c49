"""The start of a run is shown as it happens."""

from __future__ import annotations

import re

from actors.terminal.start_lines import StartLines


def status(version: int = 0, steps: int = 5, **activities: str) -> dict:
    """That of a run whose members do this; a member that is ready does something else in a run."""
    members = []
    for role, activity in activities.items():
        state = "healthy" if activity == "ready" else "starting"
        members.append({"identity": f"{role}/0#ab12", "state": state, "activity": activity})
    return {"members": members, "version": version, "steps": steps}


def lines_of(*statuses: dict) -> list[list[str]]:
    """The lines of each of these statuses, one after another, without their times."""
    said: list[str] = []
    lines, result = StartLines(said.append), []
    for now in statuses:
        lines.show(now)
        result.append([re.sub(r"^ *\d+\.\d s  ", "", line) for line in said])
        said.clear()
    return result


def test_each_change_of_an_actor_is_a_line_with_its_time_until_the_actor_is_ready():
    assert lines_of(
        status(trainer="starting"),
        status(trainer="starting", generator="starting"),
        status(trainer="starting DeepSpeed", generator="ready"),
        status(trainer="starting DeepSpeed", generator="loading version 1"),
        status(trainer="ready", generator="ready"),
    ) == [
        ["trainer/0: starting"],
        ["generator/0: starting"],
        ["trainer/0: starting DeepSpeed", "generator/0: ready"],
        [],
        ["trainer/0: ready"],
    ]


def test_a_start_is_over_with_its_first_step_or_when_all_are_ready_to_evaluate():
    again = status(version=8, generator="starting")
    assert lines_of(status(version=7, trainer="ready"), again, again) == [
        ["trainer/0: ready"],
        ["generator/0: starting", "step 8 is trained"],
        [],
    ]
    joins = status(steps=0, evaluator="ready", generator="starting")
    assert lines_of(status(steps=0, evaluator="ready"), joins) == [["evaluator/0: ready"], []]
