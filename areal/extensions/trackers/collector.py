"""The tracker `opentelemetry`: sends the spans of a run (areal.extensions.trackers.spans) to a collector, by OTLP.

The tracker reads the files of the run, so actors have no extra work. A thread sends the spans, so no other tracker
waits for the collector. Refused spans are sent again with the next step, and no new spans are made until then.
`traced.json` has the last record sent, so that a resumed run sends nothing twice.
"""

import atexit
import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from areal.base.errors import UserError
from areal.config import Config
from areal.extensions.trackers.spans import COLUMNS, SpanMaker
from areal.extensions.trackers.tracking import run_id
from areal.storage.disk import replace
from areal.storage.records import NewRecords
from areal.storage.rollout_files import files, opened
from areal.storage.run_files import EVENTS, METRICS, ROLLOUTS
from areal.storage.stored_groups import rows_of

# Spans of a request.
AT_ONCE = 512
ROWS_AT_ONCE = 256
# Seconds for the last spans of a run; the process has five seconds.
CLOSE_SECONDS = 4.0
SENT = "step", "file", "time"

log = structlog.get_logger()


class SpanSender:
    """A sink (areal.extensions.trackers.tracking): each record is a sign to look for new spans. exporter: by default
    the exporter named by OTEL_EXPORTER_OTLP_PROTOCOL, configured by the other variables of OTLP."""

    def __init__(self, config: Config, folder: Path, exporter: SpanExporter | None = None) -> None:
        self._folder, self._maker = folder, SpanMaker(config, run_id(folder))
        self._exporter = exporter or open_exporter()
        self._new_steps, self._new_events = NewRecords(folder / METRICS), NewRecords(folder / EVENTS)
        self._events: list[dict[str, Any]] = []  # events of a step not yet there
        self._unsent: deque[ReadableSpan] = deque()
        self._state = folder / "traced.json"
        state = json.loads(self._state.read_text()) if self._state.exists() else {}
        # The last step, file of rollouts and time of events already sent.
        self._first, self._file, self._since = (
            value if isinstance(value := state.get(key), int | float) else 0 for key in SENT
        )
        self._newest_event = self._since
        self._refused = False
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, step: int, numbers: dict[str, float], at: float) -> None:
        self._wake.set()

    def close(self) -> None:
        """Send the remaining spans of an ended run, unless the collector refuses."""
        atexit.unregister(self.close)
        self._over.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        self._exporter.shutdown()

    def _follow(self) -> None:
        over = False
        while not over:
            self._wake.wait()
            self._wake.clear()
            over = self._over.is_set()
            if not (over and self._refused):
                self._look(over)

    def _look(self, over: bool) -> None:
        """Send the new spans. over: send all spans of an ended run."""
        while self._read(over):
            if not self._send():
                return

    def _read(self, over: bool) -> bool:
        """Make spans of new records and of a file of rollouts, unless spans wait. Returns whether there are spans."""
        if self._unsent:
            return True
        maker = self._maker
        for record in self._new_steps.read():
            spans = maker.step(record)
            self._unsent += spans if record["step"] > self._first else []
        until = math.inf if over else maker.until
        events = [*self._events, *(e for e in self._new_events.read() if "span" in e and e["time"] > self._since)]
        self._events = [event for event in events if event["time"] > until]
        for event in events:
            if event["time"] <= until:
                self._unsent += maker.event(event)
                self._newest_event = max(self._newest_event, event["time"])
        path = next((path for path in files(self._folder / ROLLOUTS) if int(path.stem) > self._file), None)
        samples = [*_samples(path)] if path else []
        if path and (over or all((of_one[0]["step"] or 0) in {0, *maker.steps} for of_one in samples)):
            self._file = int(path.stem)
            for sample in samples:
                self._unsent += maker.sample(sample)
        return bool(self._unsent)

    def _send(self) -> bool:
        """Send the waiting spans. Returns whether the collector has taken all."""
        while portion := [*islice(self._unsent, AT_ONCE)]:
            if self._exporter.export(portion) is not SpanExportResult.SUCCESS:
                if not self._refused:
                    log.warning("the collector takes no spans: they are sent with a later step", waiting=len(portion))
                self._refused = True
                return False
            self._refused = False
            for _ in portion:
                self._unsent.popleft()
        with suppress(OSError):  # a full disk: the spans are sent again
            values = max(self._maker.steps, default=self._first), self._file, self._newest_event
            replace(self._state, json.dumps(dict(zip(SENT, values, strict=True))))
        return True


def open_exporter() -> SpanExporter:
    """Return the exporter of the protocol named by the environment. Raises UserError."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # each failure would be logged twice
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    raise UserError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: set it to http/protobuf or grpc.")


def _samples(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each sample in a file of rollouts. An unreadable file yields nothing."""
    rows = []
    try:
        with opened(path) as file:
            rows = [row for batch in file.batches(ROWS_AT_ONCE, COLUMNS) for row in rows_of(batch)]
    except UserError as error:
        log.warning("the spans of a file of rollouts are left out", error=str(error))
    for _, branches in groupby(rows, key=itemgetter("group", "sample")):
        yield [*branches]
