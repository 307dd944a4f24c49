from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import areal.storage.database
import areal.storage.journal
from areal.base.errors import UserError
from areal.storage.database import copy_store
from areal.storage.journal import FORMAT_VERSION, Journal, JournalError
from areal.storage.spool import Spool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal.storage.database, "LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(areal.storage.database, "LOCK_RETRY_SECONDS", 0.01)


def in_memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", check_same_thread=False)


class Commits:
    """Counts the transactions of a connection, and holds each until it may end."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.count = 0
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        connection.set_trace_callback(self._trace)

    def _trace(self, statement: str) -> None:
        if statement == "COMMIT":
            self.count += 1
            self.begun.set()
            self.may_end.wait()


# ------------------------------------------------------------------------------------------------- what is remembered


async def test_what_was_durable_is_read_by_the_next_owner_in_order(path: Path):
    journal = Journal.open(path)
    assert journal.read() == (None, [])
    events = [("joined", {"name": "α", "at": 0.1 + 0.2, "none": None}), ("left", {"ids": ["a", "b"]}), ("joined", {})]
    for kind, body in events:
        journal.append(kind, body)
    await journal.durable()
    journal.close()

    again = Journal.open(path)
    assert again.read() == (None, events)
    assert again.size == 3
    again.close()


async def test_a_snapshot_replaces_what_came_before_it_and_nothing_after():
    journal = Journal(in_memory())
    journal.append("old", {"on": "disk"})
    await journal.durable()
    journal.append("old", {"on": "its way"})
    journal.compact({"sum": 2})
    journal.append("new", {})
    assert journal.size == 1
    await journal.durable()
    assert journal.read() == ({"sum": 2}, [("new", {})])
    journal.compact({"sum": 3})
    await journal.durable()
    assert journal.read() == ({"sum": 3}, [])
    assert journal.size == 0


async def test_a_snapshot_taken_while_events_are_written_covers_them_too():
    connection = in_memory()
    journal, commits = Journal(connection), Commits(connection)
    commits.may_end.clear()
    journal.append("old", {})
    first = asyncio.create_task(journal.durable())
    await asyncio.to_thread(commits.begun.wait)
    journal.compact({"covers": "old"})
    second = asyncio.create_task(journal.durable())
    commits.may_end.set()
    await asyncio.gather(first, second)
    assert journal.read() == ({"covers": "old"}, [])


async def test_an_event_is_remembered_as_it_was_when_it_was_appended():
    journal = Journal(in_memory())
    body, snapshot = {"n": 1}, {"n": 1}
    journal.compact(snapshot)
    journal.append("counted", body)
    body["n"] = snapshot["n"] = 2
    await journal.durable()
    assert journal.read() == ({"n": 1}, [("counted", {"n": 1})])


async def test_with_compaction_the_files_stay_small(path: Path):
    journal = Journal.open(path)

    async def turns(n: int) -> int:
        for _ in range(n):
            for number in range(100):
                journal.append("event", {"number": number, "text": "x" * 200})
            await journal.durable()
            journal.compact({"text": "x" * 10_000})
            await journal.durable()
        return sum(file.stat().st_size for file in path.parent.iterdir())

    assert await turns(100) < 2 * 1024 * 1024 + 1.2 * await turns(100)
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 6 * 1024 * 1024
    journal.close()


# ------------------------------------------------------------------------------------------------------------- commits


async def test_callers_that_come_while_a_transaction_is_written_share_the_next_one():
    connection = in_memory()
    journal, commits = Journal(connection), Commits(connection)

    async def one(number: int) -> None:
        journal.append("event", {"number": number})
        await journal.durable()

    await asyncio.gather(*(one(number) for number in range(100)))
    assert commits.count == 2
    assert [body["number"] for _, body in journal.read()[1]] == list(range(100))


async def test_durable_waits_for_the_transaction_that_has_the_events():
    connection = in_memory()
    journal, commits = Journal(connection), Commits(connection)
    commits.may_end.clear()
    journal.append("first", {})
    first = asyncio.create_task(journal.durable())
    await asyncio.to_thread(commits.begun.wait)
    nothing_new = asyncio.create_task(journal.durable())
    await asyncio.sleep(0.01)
    assert not first.done() and not nothing_new.done()
    commits.may_end.set()
    await asyncio.gather(first, nothing_new)
    assert commits.count == 1


def test_with_nothing_to_write_durable_returns_without_a_loop():
    with pytest.raises(StopIteration):
        Journal(in_memory()).durable().send(None)


async def test_a_caller_that_gives_up_does_not_stop_the_others():
    connection = in_memory()
    journal, commits = Journal(connection), Commits(connection)
    commits.may_end.clear()
    journal.append("event", {})
    first, second = asyncio.create_task(journal.durable()), asyncio.create_task(journal.durable())
    await asyncio.to_thread(commits.begun.wait)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    commits.may_end.set()
    await second
    assert journal.read() == (None, [("event", {})])


async def test_once_a_write_has_failed_nothing_is_durable_any_more():
    connection = in_memory()
    journal = Journal(connection)
    journal.append("kept", {})
    await journal.durable()
    failing = "BEFORE INSERT ON events WHEN new.kind = 'large' BEGIN SELECT RAISE(FAIL, 'it is damaged'); END"
    connection.execute(f"CREATE TEMP TRIGGER damage {failing}")
    journal.append("small", {})
    journal.append("large", {"text": "x" * 100_000})
    with pytest.raises(JournalError, match="damaged"):
        await journal.durable()
    connection.execute("DROP TRIGGER damage")
    journal.append("late", {})
    for _ in range(2):
        with pytest.raises(JournalError, match="damaged"):
            await journal.durable()
    assert journal.read() == (None, [("kept", {})]), "half a transaction was kept"


# ---------------------------------------------------------------------------------------------------------- sudden ends

APPENDING = """
import asyncio, sys
from pathlib import Path
from areal.storage.journal import Journal

async def main():
    journal = Journal.open(Path(sys.argv[1]))
    numbers = iter(range(10**9))

    async def keep_appending():
        for number in numbers:
            journal.append("event", {"number": number, "text": "x" * (number % 5000)})
            if number % 40 == 39:
                journal.compact({"last": number})
            await journal.durable()
            print(number, flush=True)

    await asyncio.gather(*(keep_appending() for _ in range(4)))

asyncio.run(main())
"""


@pytest.mark.parametrize("enough", [1, 57, 300])
def test_what_was_durable_outlives_a_process_that_is_killed(path: Path, enough: int):
    with subprocess.Popen([sys.executable, "-c", APPENDING, str(path)], stdout=subprocess.PIPE, text=True) as process:
        printed = [int(process.stdout.readline()) for _ in range(enough)]
        process.send_signal(signal.SIGKILL)
        printed += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    assert process.returncode == -signal.SIGKILL

    journal = Journal.open(path)
    snapshot, events = journal.read()
    journal.close()
    covered = snapshot["last"] + 1 if snapshot else 0
    assert [body["number"] for _, body in events] == list(range(covered, covered + len(events)))
    assert all(body["text"] == "x" * (body["number"] % 5000) for _, body in events)
    assert max(printed) < covered + len(events)


# ---------------------------------------------------------------------------------------------------- the file it needs


@pytest.mark.usefixtures("impatient")
def test_a_journal_has_one_writer(path: Path):
    first = Journal.open(path)
    with pytest.raises(UserError, match=r"journal\.db is in use by another process"):
        Journal.open(path)
    first.close()
    Journal.open(path).close()


def test_a_predecessor_that_is_just_going_is_waited_for(path: Path):
    first = Journal.open(path)
    going = threading.Timer(0.3, first.close)
    going.start()
    Journal.open(path).close()
    going.join()


def write_text(path: Path) -> None:
    path.write_text("not a database at all, but long enough for a header. " * 100)


def write_another_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY)")
    connection.close()


def write_spool(path: Path) -> None:
    Spool.open(path).close()


def write_truncated(path: Path) -> None:
    async def fill() -> None:
        journal = Journal.open(path)
        for _ in range(100):
            journal.append("event", {"text": "x" * 1000})
        await journal.durable()
        journal.close()

    asyncio.run(fill())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def write_later_format(path: Path) -> None:
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {areal.storage.journal.FORMAT_VERSION + 1}")
    connection.close()


@pytest.mark.parametrize(
    "write", [write_text, write_another_program, write_spool, write_truncated, write_later_format, Path.mkdir]
)
def test_a_file_that_is_no_journal_is_told_in_one_sentence_and_left_alone(path: Path, write: Any):
    write(path)
    content_before = path.read_bytes() if path.is_file() else None
    for _ in range(2):
        with pytest.raises(UserError) as raised:
            Journal.open(path)
        assert str(raised.value).startswith(f"{path} cannot be used as a journal (") and "\n" not in str(raised.value)
    assert content_before is None or path.read_bytes() == content_before


def test_another_store_of_the_run_is_told_from_a_journal(path: Path):
    write_spool(path)
    with pytest.raises(UserError, match="another program or purpose"):
        Journal.open(path)


def test_a_folder_that_is_missing_is_told_in_one_sentence(tmp_path: Path):
    with pytest.raises(UserError, match="No such file or directory"):
        Journal.open(tmp_path / "missing" / "journal.db")


def test_a_journal_that_was_made_but_never_written_is_an_empty_one(path: Path):
    path.touch()
    journal = Journal.open(path)
    assert journal.read() == (None, [])
    journal.close()


def test_only_json_is_remembered():
    with pytest.raises(TypeError):
        Journal(in_memory()).append("event", {"what": object()})


# ------------------------------------------------------------------------------------------------------ what is damaged


def filled(path: Path, count: int = 5) -> str:
    """Make a journal of `count` events. Returns the identity of its run."""

    async def fill() -> str:
        journal = Journal.open(path)
        for number in range(count):
            journal.append("ready", {"group": f"g{number}.0", "start_version": number})
        await journal.durable()
        journal.close()
        return journal.run

    return asyncio.run(fill())


def change(path: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(sql)


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        (
            "UPDATE events SET body = replace(body, '3', '2') WHERE seq = 4",
            "event 4 (ready) does not have the checksum",
        ),
        ("UPDATE events SET body = substr(body, 2) WHERE seq = 2", "event 2 (ready) does not have the checksum"),
        ("UPDATE events SET kind = 'readz' WHERE seq = 1", "event 1 (readz) does not have the checksum"),
        ("DELETE FROM events WHERE seq = 3", "event 3 is missing"),
        ("INSERT INTO snapshot VALUES (1, '{}', 7)", "the snapshot (snapshot) does not have the checksum"),
    ],
)
def test_an_event_that_is_not_as_it_was_written_is_named_with_the_ways_out(path: Path, sql: str, what: str):
    filled(path)
    change(path, sql)
    (path.parent / "checkpoints" / "step_000002").mkdir(parents=True)
    journal = Journal.open(path)
    with pytest.raises(UserError) as refused:
        journal.read()
    journal.close()
    message = str(refused.value)
    assert message.startswith(f"The journal {path} is damaged ({what}") and "\n" not in message
    assert "areal backup" in message and f"model={path.parent}/checkpoints/step_000002" in message


def test_a_zeroed_page_is_told_in_one_sentence(path: Path):
    filled(path, 1000)
    content = bytearray(path.read_bytes())
    content[4096 * 5 : 4096 * 6] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(UserError, match="malformed.*: put back a backup"):
        Journal.open(path).read()


def test_a_journal_keeps_the_identity_of_its_run_and_no_two_have_the_same(path: Path):
    run = filled(path)
    journal = Journal.open(path)
    assert journal.run == run != filled(path.with_name("other.db"))
    journal.close()


def test_a_journal_of_an_older_format_names_the_version_that_wrote_it(path: Path):
    filled(path)
    version = FORMAT_VERSION - 1
    change(path, f"PRAGMA user_version = {version}; UPDATE facts SET value = 'version 0.0.1' WHERE name = 'program'")
    with pytest.raises(UserError, match=rf"version 0\.0\.1 wrote it in format version {version}"):
        Journal.open(path)
    change(path, f"UPDATE facts SET value = 'version {areal.__version__}' WHERE name = 'program'")
    with pytest.raises(
        UserError, match=re.escape(f"an earlier commit of version {areal.__version__} wrote it in format")
    ):
        Journal.open(path)


def test_a_journal_of_a_later_format_names_the_version_that_wrote_it(path: Path):
    write_later_format(path)
    change(path, "UPDATE facts SET value = 'version 7.1.0' WHERE name = 'program'")
    with pytest.raises(
        UserError, match=r"version 7\.1\.0 wrote it in format version .*: resume the run with that version"
    ):
        Journal.open(path)


def test_a_copy_of_a_journal_that_is_being_written_is_what_it_was_at_some_moment(path: Path, tmp_path: Path):
    async def write_and_copy() -> None:
        journal = Journal.open(path)
        written = copied = 0
        while copied < 10:
            for _ in range(200):  # so much that SQLite empties its log in between
                journal.append("event", {"number": written, "text": "x" * 100})
                written += 1
            copying = asyncio.create_task(asyncio.to_thread(copy_store, path, tmp_path / "copies"))
            durable = written - 200
            await journal.durable()
            copy = Journal.open(await copying)
            _, events = copy.read()
            copy.close()
            assert [body["number"] for _, body in events] == list(range(len(events)))
            assert durable <= len(events) <= written and copy.run == journal.run
            copied += 1
        journal.close()

    (tmp_path / "copies").mkdir()
    asyncio.run(write_and_copy())


def test_what_is_written_faster_than_it_is_copied_is_not_copied_for_ever(path: Path, tmp_path: Path, monkeypatch):
    Journal.open(path).close()
    (tmp_path / "copies").mkdir()
    changes = itertools.count()
    monkeypatch.setattr(areal.storage.database, "_marks", lambda *_: next(changes))
    with pytest.raises(UserError, match=r"journal\.db is written faster than it can be copied: stop the run before"):
        copy_store(path, tmp_path / "copies")
