"""A live web page of a run, made from the files in the run folder: `python -m areal dashboard RUN_FOLDER`. Of several
runs it is a page with their curves overlaid.

The page loads nothing from elsewhere, and asks the server once a second for new data. If it is served on an interface
other than loopback, requests need a token.
"""

import hmac
import json
import re
import secrets
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from actors.watching.answers import answer, finite, page
from actors.watching.rollouts_page import RolloutPages
from actors.watching.sessions_page import SessionPages
from areal.base.errors import explain
from areal.extensions.desk import timeline
from areal.extensions.desk.comparison import differing_settings, end_figures, value_of
from areal.extensions.desk.report import headlines
from areal.observe.alert_inputs import Digests
from areal.storage.events import GONE
from areal.storage.record import Record
from protocols.addresses import is_loopback

# Length of the timeline, which ends at the newest event.
WINDOW_SECONDS = 120.0
# Actors are heard of every second. A run whose events end without a summary has been silent for at least this long.
SILENT_SECONDS = 60.0
LONGEST_NUMBER = 18
# An answer waits no longer for rollouts, of which the next answers read more. One file may take as long again.
ROLLOUTS_SECONDS = 0.2
# A connection that has sent no request for this long is closed.
IDLE_SECONDS = 30.0
LEFT_OUT = ("prompts", "discarded")


def ending_of(summary: dict[str, Any] | None) -> str | None:
    """`finished: ...` or `ended early: ...`, with the reason; None of a run that is not over."""
    if not summary:
        return None
    state = "finished" if summary.get("ok", True) else "ended early"
    return f"{state}: {summary.get('reason') or 'no reason is recorded'}"


class RunView:
    """The data of the page for the run in `folder`. Raises UserError if it is not the folder of a run."""

    page = "dashboard.html"
    count = 1

    def __init__(self, folder: Path) -> None:
        self.record = Record(folder, without=LEFT_OUT)
        self._events: deque[dict[str, Any]] = deque()
        self._actors: dict[str, dict[str, Any]] = {}
        self._digests = Digests(folder)
        self._written: float | None = None  # when, by the clock of its host
        self._changed: float | None = None  # when that was seen to change, by this process's clock

    def since(self, step: int) -> dict[str, Any]:
        """The steps after `step`, and the current state of everything else."""
        self._read()
        config = self.record.settings
        return {
            "run": config.get("name", self.record.folder.name),
            "total": config.get("steps"),
            "max_staleness": config.get("max_staleness"),
            "steps": finite([record for record in self.record.records if record["step"] > step]),
            "evaluations": finite(self.record.evaluations),
            "alerts": self._alerts(config),
            "lanes": self._lanes(),
        } | self._ending()

    def _ending(self) -> dict[str, Any]:
        """How the run ended, or for how long it has been silent, as a sentence; None where that is not so. An ended run
        has totals, and its actors are in the state that it ended in."""
        summary = self.record.ending
        ended = ending_of(summary)
        actors = [self._actors[actor] for actor in sorted(self._actors)]
        if ended:
            actors = [actor | {"state": ended.partition(":")[0], "activity": ""} for actor in actors]
        silent = 0.0 if ended else self._silent_seconds()
        sentence = (
            f"silent for {silent:.0f} s: the master was killed, or cannot write" if silent > SILENT_SECONDS else None
        )
        totals = headlines(summary) if summary else []
        return {"ended": ended, "silent": sentence, "actors": actors, "totals": totals}

    def _silent_seconds(self) -> float:
        """The master's host may have another clock: only what was there before is judged by this host's."""
        written, now = self.record.last_written, time.monotonic()
        if written != self._written:
            self._written, self._changed = written, now if self._written else None
        if self._changed is not None:
            return now - self._changed
        return time.time() - written if written else 0.0

    def _read(self) -> None:
        self.record.update()
        for event in finite(self.record.new_events()):
            self._events.append(event)
            if event.get("state") == GONE:
                self._actors.pop(event["actor"], None)
            elif "state" in event:
                self._actors[event["actor"]] = event
        # An actor's activity is recorded repeatedly, so one that began before the window also has an event within it.
        while self._events and self._events[0]["time"] < self._events[-1]["time"] - WINDOW_SECONDS:
            self._events.popleft()

    def _alerts(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """For each alert its name, its sentence and the query of the page of its rollouts, None if none are kept."""
        alerts = self._digests.alerts(self.record.records, self.record.evaluations, config, ROLLOUTS_SECONDS)
        rollouts = self._digests.has_rollouts
        return [
            {"name": a.name, "text": a.sentence, "query": urlencode(a.filters) if rollouts else None} for a in alerts
        ]

    def _lanes(self) -> list[dict[str, Any]]:
        """For each actor, what it did in the last WINDOW_SECONDS: tuples of the name, its purpose (TimelineSpan), the
        beginning (in seconds before the end of the timeline), the duration in seconds, and True if the actor measured
        it itself."""
        if not self._events:
            return []
        end = max(event["time"] + event.get("seconds", 0.0) for event in self._events)
        ordered = sorted(self._events, key=lambda event: event["time"])
        spans = [(span, False) for span in timeline.activities(ordered)]
        spans += [(span, True) for span in timeline.spans(ordered)]
        lanes: dict[str, list[tuple[str, str, float, float, bool]]] = {}
        for span, measured in spans:
            if span.end >= end - WINDOW_SECONDS:
                bar = (span.name, span.purpose, end - span.begin, span.seconds, measured)
                lanes.setdefault(span.actor, []).append(bar)
        return [{"actor": actor, "spans": lanes[actor]} for actor in sorted(lanes)]


class RunsView:
    """The data of the page that compares the runs in several folders. Raises UserError if one of them holds no run."""

    page = "overlay.html"

    def __init__(self, folders: Sequence[Path]) -> None:
        self._runs = [Record(folder, without=LEFT_OUT) for folder in folders]
        self.count = len(folders)

    def since(self, *steps: int) -> dict[str, Any]:
        """For each run its steps after the one in `steps`, the settings that others do not share, and its figures."""
        runs = self._runs
        for run in runs:
            run.update()
        configs = [run.settings for run in runs]
        settings = differing_settings(configs)
        figures = end_figures(runs)
        return {
            "columns": [*settings, *(figure.name for figure in figures)],
            "runs": [
                {
                    "run": run.name,
                    "steps": finite([record for record in run.records if record["step"] > step]),
                    "evaluations": finite(run.evaluations),
                    "ended": ending_of(run.ending),
                    "cells": [json.dumps(value_of(config, key)) for key in settings] + [f.shown(n) for f in figures],
                }
                for n, (run, config, step) in enumerate(zip(runs, configs, steps, strict=True))
            ],
        }


# The Host of a request: a name or an address, and a port. `localhost/.evil.example` is neither.
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::[0-9]{1,5})?")


def application(view: RunView | RunsView, token: str | None) -> web.Application:
    """The web application: the page at /, its data at /data?since=STEP, with a since for
    each run, and of one run the pages of rollouts and sessions.

    token: the required value of ?token=; None: no token is required, but the address in the request has to be one of
    this machine: any web page could otherwise have its own name point to this machine, and read the answers.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = HOST.fullmatch(request.host)
        if token is None and not (host and is_loopback(host[1] or host[2])):
            raise web.HTTPForbidden(text="This page is served as http://127.0.0.1 or http://localhost only.")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text="Another web page may not read this one.")
        if token is not None and not hmac.compare_digest(request.query.get("token", "").encode(), token.encode()):
            raise web.HTTPForbidden(text="The token is missing from the address or wrong: add ?token=...")
        return await handler(request)

    async def data(request: web.Request) -> web.Response:
        since = request.query.getall("since", ["0"] * view.count)
        if len(since) != view.count or not all(n.isdecimal() and len(n) <= LONGEST_NUMBER for n in since):
            raise web.HTTPBadRequest(text="since has to be the number of a step, once for each run")
        return answer(view.since(*map(int, since)))

    app = web.Application(middlewares=[guarded])
    app.add_routes([web.get("/", page(view.page)), web.get("/data", data)])
    if isinstance(view, RunView):
        app.add_routes(RolloutPages(view.record).routes() + SessionPages(view.record).routes())
    return app


def serve(options: Namespace) -> None:
    """`areal dashboard`: serve the page until interrupted."""
    folders, host, port, token = options.folders, options.host, options.port, options.token
    view = RunView(folders[0]) if len(folders) == 1 else RunsView(folders)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    address = f"http://{host}:{port}/" + (f"?token={token}" if token else "")
    app = application(view, token)
    with explain(OSError, f"The page cannot be served at {host}:{port} ({{strerror}}): choose another --port."):
        # aiohttp counts from the connection on, so the headers of a request have to come within this time too.
        web.run_app(
            app,
            host=host,
            port=port,
            keepalive_timeout=IDLE_SECONDS,
            print=lambda _: print(f"The run is at {address}", flush=True),
        )
