"""Writers on a disk that is full for a while: a small tmpfs, where this user may mount one."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from structlog.testing import capture_logs
from support.small_disks import fill_disk, mounted_small_disk, use_up_inodes
from support.stored_samples import put

from areal.base.errors import UserError
from areal.samples.trajectory import Group, Trajectory
from areal.storage import claim, disk
from areal.storage.claim import check_room
from areal.storage.disk import Backlog, DiskRetry, Reserve, append, rename, replace, running_out, shortage
from areal.storage.events import EventLog
from areal.storage.journal import Journal
from areal.storage.spool import Spool
from areal.storage.spool_file import SpoolError
from areal.weights.folders import atomic_folder, write_tensors


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("disk", "journal"):
        monkeypatch.setattr(f"areal.storage.{module}.RETRY_SECONDS", 0.02)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 1 MiB and 20 inodes."""
    with mounted_small_disk(tmp_path, inodes=20):
        yield tmp_path


def test_every_way_in_which_a_full_disk_is_reported_is_understood(small: Path):
    connection = sqlite3.connect(small / "store.db")
    connection.execute("CREATE TABLE texts (text TEXT)")
    connection.commit()
    hog = fill_disk(small)
    with pytest.raises(OSError) as written:
        (small / "hog2").write_bytes(bytes(8192))
    with pytest.raises(sqlite3.Error) as inserted, connection:
        connection.execute("INSERT INTO texts VALUES (?)", ("x" * 100_000,))
    with pytest.raises(SafetensorError) as saved:
        write_tensors({"a": torch.zeros(4096)}, small / "a.safetensors")
    with pytest.raises(SpoolError) as spooled:
        try:
            raise inserted.value
        except sqlite3.Error as error:
            raise SpoolError("the spool cannot be used") from error
    for error in (written, inserted, saved, spooled):
        assert shortage(error.value, small) == "full"
    hog.unlink()
    connection.close()
    use_up_inodes(small)
    with pytest.raises(sqlite3.Error) as opened:
        sqlite3.connect(small / "other.db").execute("CREATE TABLE texts (text TEXT)")
    assert shortage(opened.value, small) == "full (it has no inodes left)"


@pytest.mark.parametrize("number, word", [(errno.EDQUOT, "out of quota"), (errno.EROFS, "read-only")])
def test_a_quota_and_a_read_only_disk_are_waited_for(number: int, word: str):
    assert shortage(OSError(number, os.strerror(number))) == word


def test_other_errors_are_not_waited_for(tmp_path: Path):
    connection = sqlite3.connect(tmp_path / "store.db")
    with pytest.raises(sqlite3.Error) as wrong:
        connection.execute("INSERT INTO missing VALUES (1)")
    for error in (wrong.value, OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "denied")):
        assert shortage(error, tmp_path) is None


async def test_a_write_is_repeated_until_there_is_room_and_that_is_said_once(small: Path):
    hog, disk_retry = fill_disk(small), DiskRetry(small, "the trainer")

    def write(name: str) -> None:
        (small / name).write_bytes(bytes(100_000))

    with capture_logs() as logs:
        names = ("a", "b")
        writes = [
            asyncio.create_task(disk_retry.write(lambda n=name: asyncio.to_thread(write, n), name)) for name in names
        ]
        either_order = [f"the trainer waits to write {text}" for text in ("a, b", "b, a")]
        async with asyncio.timeout(60):
            while not (waiting := disk_retry.shortage) or waiting.waits not in either_order:  # noqa: ASYNC110 - threads change it
                await asyncio.sleep(0.01)
        assert waiting.disk == f"the disk of {small} is full (0.0 MiB free)"
        assert not any(task.done() for task in writes)
        hog.unlink()
        await asyncio.gather(*writes)
    assert disk_retry.shortage is None and [(small / name).stat().st_size for name in names] == [100_000] * 2
    first, last = [entry["event"] for entry in logs]
    assert str(small) in first and "0.0 MiB free" in first and "goes on" in last


def test_a_disk_is_named_by_one_of_its_folders(small: Path):
    weights, elsewhere = small / "weights", Path("/proc")
    weights.mkdir()
    disk_retry, full = DiskRetry(small, "the trainer"), OSError(errno.ENOSPC, "full")
    for folder, named in ((weights, small), (None, small), (elsewhere, elsewhere)):
        assert disk_retry.must_wait(full, "a", folder=folder)
        assert disk_retry.shortage and disk_retry.shortage.folder == str(named)


async def test_a_wait_for_a_disk_can_be_cancelled(small: Path):
    fill_disk(small)
    disk_retry = DiskRetry(small, "the trainer")
    write = asyncio.create_task(
        disk_retry.write(lambda: asyncio.to_thread((small / "a").write_bytes, bytes(8192)), "a")
    )
    await asyncio.sleep(0.05)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    assert disk_retry.shortage is None


def test_a_line_that_does_not_fit_leaves_nothing_behind(small: Path):
    file = small / "metrics.jsonl"
    append(file, "first\n")
    hog = fill_disk(small)
    with pytest.raises(OSError):
        append(file, "x" * 20_000 + "\n")
    assert file.read_text() == "first\n"
    hog.unlink()
    append(file, "second\n")
    assert file.read_text() == "first\nsecond\n"


def test_a_rename_is_on_disk_before_anything_counts_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[tuple[str, bool]] = []  # what, and whether the file had its new name then

    def note(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (tmp_path / "to" / "file").exists()))

    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "file").touch()
    monkeypatch.setattr(os, "fsync", note)
    rename(tmp_path / "from" / "file", tmp_path / "to" / "file")
    assert sorted(synced) == [("from", True), ("to", True)]
    synced.clear()
    replace(tmp_path / "to" / "other", "text")
    assert synced == [("other.tmp", True), ("to", True)]


def test_lines_of_a_log_and_events_that_did_not_fit_are_written_later(small: Path):
    log, events = Backlog(small / "a.jsonl", small / "a.jsonl.1", 1 << 20), EventLog(small, 1 << 20, lambda: 0.0)
    hog = fill_disk(small)
    for number in range(3):
        log.append([f"{number}" * 3000 + "\n"])
    events.record_heartbeat("trainer/0", "healthy", "training", {})
    events.flush()
    hog.unlink()
    log.append(["last\n"])
    events.flush()
    assert [line[0] for line in (small / "a.jsonl").open()] == ["0", "1", "2", "l"]
    assert len(list((small / "events.jsonl").open())) == 1


def test_the_reserve_has_room_on_a_full_disk_for_what_ends_a_run(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "RESERVE_BYTES", 300_000)
    reserve = Reserve(small)
    fill_disk(small)
    with pytest.raises(OSError):
        append(small / "summary.json", "x" * 100_000)
    reserve.free()
    append(small / "summary.json", "x" * 100_000)
    assert not (small / "reserve").exists()


async def until_short(journal: Journal) -> None:
    while not journal.shortage:  # noqa: ASYNC110 - it announces nothing to others
        await asyncio.sleep(0.01)


async def test_what_a_full_disk_refused_is_in_the_journal_once_and_in_order(small: Path):
    journal = Journal.open(small / "journal.db")
    journal.append("first", {})
    await journal.durable()
    hog = fill_disk(small)
    journal.append("large", {"text": "x" * 200_000})
    waiting = asyncio.create_task(journal.durable())
    await until_short(journal)
    journal.append("later", {})
    with pytest.raises(disk.DiskShortageError, match="full"):
        await journal.durable(wait_for_room=False)
    assert not waiting.done() and journal.read() == (None, [("first", {})]), "half a transaction is there"
    hog.unlink()
    await waiting
    await journal.durable()
    assert [kind for kind, _ in journal.read()[1]] == ["first", "large", "later"] and not journal.shortage
    journal.close()


async def test_a_snapshot_stands_for_what_a_full_disk_refused_before_it(small: Path):
    journal = Journal.open(small / "journal.db")
    hog = fill_disk(small)
    journal.append("large", {"text": "x" * 200_000})
    waiting = asyncio.create_task(journal.durable())
    await until_short(journal)
    journal.compact({"state": 1})
    journal.append("later", {})
    hog.unlink()
    await waiting
    await journal.durable()
    assert journal.read() == ({"state": 1}, [("later", {})])
    journal.close()


async def test_a_journal_that_waits_for_its_disk_can_be_closed(small: Path):
    journal = Journal.open(small / "journal.db")
    fill_disk(small)
    journal.append("large", {"text": "x" * 200_000})
    waiting = asyncio.create_task(journal.durable())
    await until_short(journal)
    waiting.cancel()
    journal.close()
    assert Journal.open(small / "journal.db").read() == (None, [])


def test_a_group_that_did_not_fit_is_in_the_spool_once_there_is_room(small: Path):
    spool, disk_retry = Spool.open(small / "spool.db"), DiskRetry(small, "the trainer")
    tokens = np.arange(20_000, dtype=np.int32)
    sample = Trajectory(
        tokens=tokens, logprobs=np.zeros(20_000, np.float32), versions=tokens, reward=1.0, finish="stop"
    )
    hog = fill_disk(small)
    threading.Timer(0.1, hog.unlink).start()
    disk_retry.write_in_thread(lambda: put(spool, Group("g1.0", 1, (sample,))), "the spool")
    assert spool.ids() == ["g1.0"]
    spool.close()


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def test_writers_wait_until_a_disk_that_is_read_only_or_without_inodes_takes_new_files(small: Path):
    def write_folder() -> None:
        with atomic_folder(small / "weights") as partial:
            write_tensors({"a": torch.zeros(4)}, partial / "a.safetensors")

    opened: list[Journal | Spool] = []
    writes = {
        "journal": lambda: opened.append(Journal.open(small / "journal.db")),
        "spool": lambda: opened.append(Spool.open(small / "spool.db")),
        "records": lambda: append(small / "metrics.jsonl", "first\n"),
        "weights": write_folder,
    }
    for cause in ("read-only", "full (it has no inodes left)"):
        disk_retry = DiskRetry(small, "the trainer")
        taken = [] if cause == "read-only" else use_up_inodes(small)
        if not taken:
            remount(small, "ro")
        waiting = [threading.Thread(target=disk_retry.write_in_thread, args=(w, name)) for name, w in writes.items()]
        for thread in waiting:
            thread.start()
        while not (result := disk_retry.shortage) or not all(name in result.waits for name in writes):
            time.sleep(0.01)
        assert result.cause == cause
        for file in taken:
            file.unlink()
        if not taken:
            remount(small, "rw")
        for thread in waiting:
            thread.join()
        assert len(opened) == 2 and (small / "weights" / "a.safetensors").exists()
        for store in opened:
            store.close()
        opened.clear()
        shutil.rmtree(small / "weights")
        for path in small.iterdir():
            path.unlink()


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder on an ext4 of its own, and the file by which its kernel is made to find an error there: then it takes no
    writes any more, also into files that are open."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.touch()
    os.truncate(image, 8 << 20)
    commands = f"mkfs.ext4 -q {image} && mount -o loop,errors=remount-ro {image} {folder}"
    if subprocess.run(commands, shell=True, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        device = subprocess.run(["findmnt", "-no", "SOURCE", folder], capture_output=True, text=True).stdout.strip()
        yield folder, Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


async def test_open_stores_on_a_disk_that_becomes_read_only_wait(failing: tuple[Path, Path]):
    folder, trigger = failing
    journal, spool = Journal.open(folder / "journal.db"), Spool.open(folder / "spool.db")
    journal.append("first", {})
    await journal.durable()
    trigger.write_text("an error of a test")
    with pytest.raises(SpoolError) as spooled:
        spool.assign("run")
    assert shortage(spooled.value, folder) == "read-only"
    journal.append("second", {})
    waiting = asyncio.create_task(journal.durable())
    await until_short(journal)
    assert journal.shortage and journal.shortage.cause == "read-only" and not waiting.done()
    assert journal.read() == (None, [("first", {})])
    waiting.cancel()
    journal.close()
    spool.close()


def test_a_run_on_a_full_disk_does_not_begin_and_says_what_it_needs(small: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        UserError, match=r"does not take the 32.0 MiB that .* \(it is full, with 1.0 MiB free\): free some"
    ):
        check_room(small / "runs" / "a", resume=False)
    monkeypatch.setattr(claim, "ROOM_BYTES", 500_000)
    check_room(small / "runs" / "a", resume=False)
    assert list(small.iterdir()) == []
    use_up_inodes(small)
    with pytest.raises(UserError, match=r"it is full \(it has no inodes left\), .* or move the run to another disk"):
        check_room(small, resume=True)


def test_a_disk_that_fills_is_told_before_it_is_full():
    gib = float(1 << 30)
    assert running_out([100 * gib - step * gib for step in range(10)]) is None  # 90 more steps
    assert "about 31 steps" in (running_out([40 * gib - step * gib for step in range(10)]) or "")
    checkpoints = [100, 100, 100, 60, 60, 60, 60, 60, 60, 60]
    assert "one step took 40 GiB" in (running_out([free * gib for free in checkpoints]) or "")
    passing = [100, 99, 98, 20, 20, 95, 94]
    assert running_out([free * gib for free in passing[:5]]) and not running_out([free * gib for free in passing])
    assert running_out([gib] * 10) is None and running_out([4 * gib, 3 * gib]) is None
