"""The dashboard's page of sessions: users' alive sessions, the number of ended sessions, and the use of every key."""

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from actors.watching.answers import answer, page
from areal.base.errors import UserError, explain
from areal.base.text import all_shown, shown
from areal.extensions.desk.audit import read_journal
from areal.extensions.desk.run_view import finite
from areal.staleness.ledger_records import snapshot_of
from areal.staleness.ledger_state import LedgerError
from areal.storage.record import Record

PAGE = Path(__file__).with_name("sessions.html")


class SessionPages:
    """The page at /sessions of a run, and the data for the page. Reads a copy of the journal, one copy at a time."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._reading = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/sessions", page(PAGE)), web.get("/sessions/list", self._list)]

    async def _list(self, request: web.Request) -> web.Response:
        async with self._reading:
            with explain((UserError, LedgerError), "{why}", lambda why: web.HTTPBadRequest(text=shown(why))):
                sessions = await asyncio.to_thread(sessions_of, self._record)
        return answer(all_shown(finite(sessions)))


def sessions_of(record: Record) -> dict[str, Any]:
    """The sessions in the journal, and the keys in the last step's metrics. `expires`: the last version that may train
    the session. Raises as `read_journal`."""
    journal = read_journal(record)
    ledger = snapshot_of(journal.ledger)
    rows = []
    for group in ledger["groups"]:
        if group["session"]:
            version = group["admission_version"] if group["start_version"] is None else group["start_version"]
            rows.append(
                {
                    "session": group["session"],
                    "state": group["state"],
                    "version": version,
                    "age": ledger["version"] - version,
                    "reward": journal.rewards.get(group["group_id"]),
                    "expires": version + group["max_staleness"],
                    "gateway": group["owner"].partition("#")[0] or "none",
                    "group": group["group_id"],
                }
            )
    counters = ledger["counters"]
    return {
        "version": ledger["version"],
        "rows": rows,
        "keys": [{"key": name, **use} for name, use in journal.metrics.get("keys", {}).items()],
        "opened": ledger["next_session"],
        "trained": counters["sessions_trained"],
    }
