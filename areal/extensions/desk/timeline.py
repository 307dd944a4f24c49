"""The timeline of a run, from its events (areal.storage.events): spans measured by actors, and their activities."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.storage.events import GONE

# The phases of a step, in the trainer's order. The trainer commits the step after the last phase.
PHASES = ("save_wait", "save", "trainer_wait", "fetch", "train", "publish_wait", "snapshot", "offload")
# The purposes of spent time. Each purpose has a colour in pictures.
WORK, WEIGHTS, WAITING = "work", "weights", "waiting"


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A period of an actor's activity. begin: seconds since 1970."""

    actor: str
    name: str
    begin: float
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.begin + self.seconds

    @property
    def kind(self) -> str:
        """The name up to its first number."""
        return re.sub(r"\W*\d.*", "", self.name)

    @property
    def purpose(self) -> str:
        """WORK, WEIGHTS or WAITING, by the words of the name."""
        if re.search(r"(?<!nobody )wait|idle|finished|are full", self.name):
            return WAITING
        weights = r"load|snapshot|write|publish|sav(e|ing)\b|checkpoint|pause|resume|receiving|fetching"
        return WEIGHTS if re.search(weights, self.name) else WORK


def spans(events: Iterable[dict[str, Any]]) -> Iterator[TimelineSpan]:
    """Yield the spans measured by actors."""
    for event in events:
        if "span" in event:
            yield TimelineSpan(event["actor"], event["span"], event["time"], event["seconds"])


def measured(
    events: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], times: Sequence[float]
) -> list[TimelineSpan]:
    """Return the spans measured by actors. If the trainer's spans are not recorded, they are reconstructed from the
    seconds of each phase in `steps`: the last phase of a step ends at its commit."""
    recorded = list(spans(events))
    if any(span.actor.startswith("trainer") for span in recorded):
        return recorded
    for step, end in zip(steps, times, strict=True):
        seconds = [(phase, step.get(f"{phase}_seconds") or 0.0) for phase in PHASES]
        begin = end - sum(spent for _, spent in seconds)
        for phase, spent in seconds:
            if spent:
                recorded.append(TimelineSpan("trainer/0", phase, begin, spent))
            begin += spent
    return recorded


def activities(events: Iterable[dict[str, Any]]) -> Iterator[TimelineSpan]:
    """Yield the activities reported by actors. Each lasts from its first report until the actor's next activity."""
    since: dict[str, tuple[float, str]] = {}
    end = 0.0
    for event in events:
        if "activity" not in event:
            continue
        actor, end = event["actor"], event["time"]
        begin, name = since.get(actor, (end, None))
        if name not in (None, event["activity"]):
            yield TimelineSpan(actor, name, begin, end - begin)
        if event["state"] == GONE:
            since.pop(actor, None)
        elif name != event["activity"]:
            since[actor] = (end, event["activity"])
    for actor, (begin, name) in since.items():
        yield TimelineSpan(actor, name, begin, end - begin)
