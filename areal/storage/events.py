"""Records the events of a run with their times in events.jsonl: one JSON object per line.

    {"time", "actor", "state", "activity", "stats"}    a heartbeat, when it changed or was due to be written again
    {"time", "actor", "span", "seconds"}               an activity of an actor that began at `time`, and its duration

`time` is the master's clock, in seconds since 1970. The newest `limit` to twice `limit` bytes are kept.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from areal.storage.disk import Backlog
from areal.storage.records import line_of
from areal.storage.run_files import EVENTS, OLDER

FLUSH_SECONDS = 1.0
# An unchanged heartbeat is written at this interval. Above ACTORS_AT_ONCE actors the interval grows: all actors
# together write no more than ACTORS_AT_ONCE actors would.
EVERY_SECONDS = 1.0
ACTORS_AT_ONCE = 50
# Messages are delayed, by seconds if a process is busy. The least delayed of the last DELAYS_KEPT messages is used to
# estimate the offset between an actor's clock and the master's.
DELAYS_KEPT = 60
GONE = "gone"
# Counters of a generator since its start. The metrics of a step contain the sums over all generators.
COUNTERS = (
    "tokens_generated",
    "tokens_evaluated",
    "reloads",
    "pause_seconds",
    "load_seconds",
    "resume_seconds",
    "sequences_interrupted",
    "tokens_recomputed",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
# The numbers in heartbeats that never decrease during the life of an actor.
TOTALS = frozenset(COUNTERS) | {
    "preemptions", "fetch_seconds", "weight_bytes_received", "weight_bytes_sent", "work_done", "scored", "failed",
    "samples_scored", "samples_finished", "moved", "sessions_opened", "sessions_rewarded", "sessions_expired",
    "sessions_deleted", "sessions_refused", "sessions_untrained", "sessions_adopted",
}  # fmt: skip


class EventLog:
    """Writes the events of the run in `folder`, `limit` bytes a file. Events that a full disk refuses come later."""

    def __init__(self, folder: Path, limit: int, clock: Callable[[], float] = time.time) -> None:
        self._file = Backlog(folder / EVENTS, folder / OLDER[EVENTS], limit)
        self._clock = clock
        self._lines: list[str] = []
        self._last_written: dict[str, tuple[float, str, str]] = {}  # by actor: time of the last write, state, activity
        self._delays: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=DELAYS_KEPT))
        self._flushed = clock()

    def record_heartbeat(
        self,
        actor: str,
        state: str,
        activity: str,
        stats: Mapping[str, float],
        clock: float | None = None,
        spans: Iterable[tuple[str, float, float]] = (),
    ) -> None:
        """Record a heartbeat of `actor`. clock: the time of sending, on the actor's clock. spans: (activity, start on
        the actor's clock, seconds). Without `clock`, spans are not recorded."""
        now = self._clock()
        if clock is not None:
            delays = self._delays[actor]
            delays.append(now - clock)
            for name, began, seconds in spans:
                self._add({"time": began + min(delays), "actor": actor, "span": name, "seconds": seconds})
        written, *last = self._last_written.get(actor, (0.0, "", ""))
        due = EVERY_SECONDS * max(1.0, len(self._last_written) / ACTORS_AT_ONCE)
        # 0.9: a heartbeat a little early is written now, not with the next heartbeat. abs: the clock may be set back.
        if last != [state, activity] or abs(now - written) > due * 0.9:
            self._last_written[actor] = (now, state, activity)
            self._add({"time": now, "actor": actor, "state": state, "activity": activity, "stats": stats})
        if state == GONE:
            self._delays.pop(actor, None)
        if abs(now - self._flushed) >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        lines, self._lines, self._flushed = self._lines, [], self._clock()
        self._file.append(lines)

    def _add(self, event: dict[str, Any]) -> None:
        self._lines.append(line_of(event))
