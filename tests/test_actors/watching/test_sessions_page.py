"""The page of sessions, over HTTP, of a journal that the real ledger has written."""

from __future__ import annotations

from aiohttp.test_utils import TestClient, TestServer

from actors.gateway.ledger_sessions import LedgerSessions
from actors.watching.dashboard import application
from areal.extensions.desk.run_view import RunView
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_records import event_record, snapshot_of
from areal.staleness.ledger_state import LedgerSettings, LedgerState
from areal.storage.journal import Journal

SETTINGS = LedgerSettings(
    batch_size=1,
    max_staleness=1,
    on_straggler="wait",
    steps=4,
    max_attempts=3,
    on_failed_sample="requeue",
    max_sessions=2,
)


async def test_the_page_shows_each_session_that_is_alive_with_its_age_and_when_it_expires(tmp_path):
    (tmp_path / "config.yaml").touch()
    journal = Journal.open(tmp_path / "journal.db")
    ledger = Ledger(LedgerState(SETTINGS))
    journal.compact({"ledger": snapshot_of(ledger.state)})
    ledger.state.journal = lambda event: journal.append(*event_record(event))
    for name in ("anna:first", "anna:<b>", "bert:third"):
        group = LedgerSessions(ledger.state).open(name, "gateway/0#1", 0.0, 60.0)
        if name != "anna:<b>":
            ledger.ready(group.group_id, ledger.version)
            journal.append("rewarded", {"group": group.group_id, "mean": 0.5})
        if name == "anna:first":
            ledger.next_batch(0)
            ledger.commit(0)
    use = {"calls": 2, "tokens": 64, "sessions": 1, "refused": 3}
    journal.append("stepped", {"metrics": {"step": 1, "keys": {"anna": use}}, "groups": []})
    await journal.durable()
    async with TestClient(TestServer(application(RunView(tmp_path), "secret"))) as page:
        assert (await page.get("/sessions/list")).status == 403
        text = await (await page.get("/sessions?token=secret")).text()
        assert "http" not in text and "innerHTML" not in text
        shown = await (await page.get("/sessions/list?token=secret")).json()
        assert "sessions" in await (await page.get("/?token=secret")).text()
    journal.close()
    assert {name: shown[name] for name in ("version", "opened", "trained")} == {"version": 1, "opened": 3, "trained": 1}
    assert shown["keys"] == [{"key": "anna", **use}]
    open_one, ready = shown["rows"]
    assert open_one == {
        "session": "anna:<b>",
        "state": "open",
        "version": 1,
        "age": 0,
        "reward": None,
        "expires": 2,
        "gateway": "gateway/0",
        "group": "s1.0",
    }
    assert (ready["session"], ready["state"], ready["reward"]) == ("bert:third", "ready", 0.5)


async def test_without_a_journal_the_page_says_so(tmp_path):
    (tmp_path / "config.yaml").touch()
    async with TestClient(TestServer(application(RunView(tmp_path), None))) as page:
        refused = await page.get("/sessions/list")
        assert refused.status == 400 and "is missing" in await refused.text()
