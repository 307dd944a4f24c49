from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stored_samples import put

import areal.storage.database
import areal.storage.spool_file
from areal.base.errors import UserError
from areal.samples.table import COLUMNS, Generation
from areal.samples.trajectory import Branch, Group, Note, Trajectory
from areal.storage.saved_calls import NO_LIMIT, SavedCall, packed, unpacked
from areal.storage.spool import Spool, SpoolPart
from areal.storage.spool_file import SpoolError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.db"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal.storage.database, "LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(areal.storage.database, "LOCK_RETRY_SECONDS", 0.01)


def make_group(number: int, lengths: tuple[int, ...] = (5, 3, 8)) -> Group:
    rng = np.random.default_rng(number)
    return Group(
        id=f"g{number}.0",
        prompt_index=number,
        trajectories=tuple(
            Trajectory(
                tokens=rng.integers(0, 50_000, length, dtype=np.int32),
                logprobs=rng.normal(size=length).astype(np.float32),
                versions=rng.integers(-1, 9, length, dtype=np.int32),
                reward=float(rng.normal()),
                finish=("stop", "length")[index % 2],
                branches=(Branch(0, 2), Branch(1, length - 2)) if length > 4 else (),
                returns=rng.normal(size=length) if number % 2 else None,
            )
            for index, length in enumerate(lengths)
        ),
    )


def bits(group: Group) -> tuple:
    arrays = [
        [(array.dtype, array.tobytes()) for array in (sample.tokens, sample.logprobs, sample.versions)]
        + [sample.returns if sample.returns is None else sample.returns.tobytes()]
        for sample in group.trajectories
    ]
    return group.id, group.prompt_index, arrays, [(repr(s.reward), s.finish, s.branches) for s in group.trajectories]


def in_memory() -> Spool:
    return Spool(sqlite3.connect(":memory:", check_same_thread=False))


# ------------------------------------------------------------------------------------------------------ what comes back


def test_a_group_comes_back_bit_by_bit_after_a_restart(path: Path):
    odd = Trajectory(
        tokens=np.array([1, 2], np.int32),
        logprobs=np.array([np.nan, -0.0], np.float32),
        versions=np.array([-1, 0], np.int32),
        reward=-0.0,
        finish="stop",
    )
    groups = [make_group(0), make_group(1, (0, 1, 0)), make_group(2, (7,)), Group("g3.1", 3, (odd, odd))]
    spool = Spool.open(path)
    for group in groups:
        put(spool, group)
    spool.close()

    again = Spool.open(path)
    assert [bits(group) for group in again.get(["g3.1", "g0.0", "g1.0", "g2.0"])] == [
        bits(groups[number]) for number in (3, 0, 1, 2)
    ]
    again.close()


def test_ids_come_in_order_of_arrival():
    spool = in_memory()
    for number in (7, 2, 11):
        put(spool, make_group(number))
    spool.forget(["g11.0"])
    put(spool, make_group(1))
    assert spool.ids() == ["g7.0", "g2.0", "g1.0"]


def test_a_repeated_group_changes_nothing():
    spool = in_memory()
    first, second = make_group(0), make_group(1)
    put(spool, first)
    put(spool, second)
    put(spool, Group(first.id, 99, second.trajectories))
    assert spool.ids() == [first.id, second.id]
    assert bits(spool.get([first.id])[0]) == bits(first)


def parts_of(group: Group) -> list[Group]:
    return [
        replace(group, trajectories=(sample,), row='{"answer": "7"}', notes=(Note({"exact": 0.5}, number, ("g",)),))
        for number, sample in enumerate(group.trajectories)
    ]


def test_a_group_of_parts_is_there_once_it_is_complete_in_the_order_of_their_places_and_takes_no_more():
    spool, group, neighbour = in_memory(), make_group(1), make_group(2)
    first, second, third = parts_of(group)
    assert put(spool, third, 2, 3) is put(spool, first, 0, 3) is put(spool, replace(second, id="g0.9"), 1, 3) is None
    assert put(spool, replace(second, trajectories=neighbour.trajectories[:1]), 0, 3) is None, "the place is taken"
    assert bits(put(spool, second, 1, 3)) == bits(spool.complete("g1.0", 3).group) == bits(group)
    assert bits(put(spool, second, 7, 3)) == bits(group), "it has three"
    again = [replace(part, id="g1.1") for part in (first, second, third)]
    complete = {
        place: SpoolPart(part, part.trajectories[0].frame()) for place, part in zip((0, 2, 5), again, strict=True)
    }
    assert bits(spool.put_all(complete, 3).group) == bits(replace(group, id="g1.1"))
    (stored,) = spool.get(["g1.0"])
    assert stored.row == '{"answer": "7"}' and stored.notes == tuple(Note({"exact": 0.5}, n, ("g",)) for n in range(3))


@pytest.mark.parametrize("places", [(0,), (0, 2)])
def test_parts_that_are_forgotten_before_they_are_read_back_are_not_said_to_be_stored(monkeypatch, places):
    spool = in_memory()
    store = spool._file.store

    def store_and_forget(changes):
        store(changes)
        spool.forget(["g1.0"])  # as another thread may, after a checkpoint

    monkeypatch.setattr(spool._file, "store", store_and_forget)
    parts = {place: SpoolPart(part, part.trajectories[0].frame()) for place, part in enumerate(parts_of(make_group(1)))}
    assert spool.put_all({place: parts[place] for place in places}, len(places)) == ((), None)
    assert not spool._recent


def test_what_is_stored_of_a_group_is_told_from_nothing():
    spool, parts = in_memory(), parts_of(make_group(1))
    assert spool.complete("g1.0", 3) == ((), None)
    put(spool, parts[2], 2, 3)
    put(spool, parts[0], 0, 3)
    assert spool.complete("g1.0", 3) == ((0, 2), None)
    put(spool, parts[1], 1, 3)
    assert spool.complete("g1.0", 3).places == (0, 1, 2)


def test_a_group_that_was_just_written_is_not_read_again_and_one_of_before_a_restart_is(path: Path):
    spool, (first, second, third) = Spool.open(path), parts_of(make_group(1))
    statements: list[str] = []
    spool._file.connection.set_trace_callback(statements.append)
    for part, place in ((first, 0), (third, 2)):
        put(spool, part, place, 3)
        put(spool, replace(part, id="g1.1"), place, 3)
    assert bits(put(spool, second, 1, 3)) == bits(make_group(1))
    assert statements and not any("frame" in text for text in statements if text.startswith("SELECT"))
    spool.close()
    spool = Spool.open(path)
    assert bits(put(spool, replace(second, id="g1.1"), 1, 3)) == bits(replace(make_group(1), id="g1.1"))
    spool.close()


def test_samples_of_an_earlier_attempt_become_those_of_the_next_one(path: Path):
    spool, group = Spool.open(path), make_group(1)
    first, second, third = parts_of(group)
    for place, part in enumerate([first, second, third]):
        put(spool, part, place, 3)
    put(spool, replace(third, id="g1.1"), 1, 3)
    put(spool, make_group(2), 0, 3)
    samples = spool.samples(1)
    assert {key: sample.reward for key, sample in samples.items()} == {
        ("g1.0", 0): group.trajectories[0].reward,
        ("g1.0", 1): group.trajectories[1].reward,
        ("g1.0", 2): group.trajectories[2].reward,
        ("g1.1", 1): group.trajectories[2].reward,
    }
    spool.move("g1.1", [("g1.0", 0), ("g1.0", 1), ("g1.0", 5), ("g1.0", 2)], size=2)
    assert spool.samples(1).keys() == {("g1.1", 0), ("g1.1", 1), ("g1.0", 1), ("g1.0", 2)}
    spool.close()
    again = Spool.open(path)
    expected = replace(group, id="g1.1", trajectories=(group.trajectories[0], group.trajectories[2]))
    assert bits(again.get(["g1.1"])[0]) == bits(expected)
    again.close()


def calls_of(*versions: int, notes: str = "") -> bytes:
    n = len(versions)
    tokens = np.arange(n, dtype=np.int32)
    sampled = Generation(tokens, np.zeros(n, np.float32), np.array(versions, np.int32))
    return packed([SavedCall(b"p" * 16, NO_LIMIT, sampled)], notes)


def versions_of(spool: Spool, *key: Any) -> list[int]:
    calls = spool.unfinished.calls(*key)
    return unpacked(calls)[0].sampled.versions.tolist() if calls else []


def test_the_calls_of_a_sample_are_kept_until_it_is_stored_and_the_longest_ones_count(path: Path):
    spool, (first, *_) = Spool.open(path), parts_of(make_group(1))
    spool.unfinished.put("g1.0", 0, 1, calls_of(5, 6))
    spool.unfinished.put("g1.0", 1, 1, calls_of(7))
    spool.close()
    spool = Spool.open(path)
    spool.unfinished.put("g1.0", 0, 1, calls_of(5, 6, 4))
    spool.unfinished.put("g1.0", 0, 1, calls_of(5, 6))  # comes late
    assert spool.unfinished.oldest_versions(1) == {("g1.0", 0): 4, ("g1.0", 1): 7} and versions_of(
        spool, "g1.0", 0
    ) == [5, 6, 4]
    assert spool.ids() == ["g1.0"] and spool.samples(1) == {}
    put(spool, first, 0, 3)
    spool.unfinished.put("g1.0", 0, 1, calls_of(5, 6, 4, 4))
    assert spool.unfinished.oldest_versions(1) == {("g1.0", 1): 7}
    spool.forget(["g1.0"])
    assert spool.ids() == [] and spool.unfinished.oldest_versions(1) == {}
    spool.close()


def test_calls_with_a_higher_number_count_though_they_are_fewer():
    spool = in_memory()
    for number, versions in ((2, (5, 6)), (1, (5, 6, 7)), (3, (5,)), (3, (4,))):
        spool.unfinished.put("s1.0", 0, -2, calls_of(*versions), number)
    assert versions_of(spool, "s1.0", 0) == [5]


def test_the_calls_of_an_earlier_attempt_become_those_of_the_next_one_at_places_that_are_free():
    spool, (first, *_) = in_memory(), parts_of(make_group(1))
    for place in range(3):
        spool.unfinished.put("g1.0", place, 1, calls_of(place))
    put(spool, replace(first, id="g1.1"), 0, 3)
    spool.unfinished.put("g1.1", 1, 1, calls_of(9, 9))
    spool.unfinished.move("g1.1", [("g1.0", 0), ("g1.0", 1), ("g1.0", 2), ("g1.0", 7)])
    assert spool.unfinished.oldest_versions(1) == {("g1.0", 0): 0, ("g1.0", 1): 1, ("g1.1", 1): 9, ("g1.1", 2): 2}
    assert versions_of(spool, "g1.1", 2) == [2]


@pytest.mark.parametrize("change", ["frame = zeroblob(length(frame))", "oldest = 1", "place = 1"])
def test_damaged_calls_are_none(change):
    spool = in_memory()
    spool.unfinished.put("g1.0", 0, 1, calls_of(5, 6))
    spool._file.connection.execute(f"UPDATE unfinished SET {change}")
    assert versions_of(spool, "g1.0", 0) == versions_of(spool, "g1.0", 1) == []


def test_a_spool_whose_pages_are_damaged_is_told_with_the_ways_on(path: Path):
    with closing(Spool.open(path)) as spool:
        put(spool, make_group(0))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ((page,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'parts'")
        ((size,),) = connection.execute("PRAGMA page_size")
    data = bytearray(path.read_bytes())
    data[(page - 1) * size] ^= 0x40  # which kind of page it is
    path.write_bytes(data)
    with (
        closing(Spool.open(path)) as spool,
        pytest.raises(UserError, match=r"spool .* is damaged \(.*malformed.*areal"),
    ):
        spool.get(["g0.0"])


def test_missing_groups_are_named():
    spool = in_memory()
    put(spool, make_group(0))
    with pytest.raises(SpoolError, match=r"not in the spool: g5\.0, g6\.0$"):
        spool.get(["g5.0", "g0.0", "g6.0"])


def test_forgotten_groups_are_gone_and_unknown_ones_are_no_matter():
    spool = in_memory()
    for number in range(3):
        put(spool, make_group(number))
    spool.forget(["g0.0", "g77.0", "g2.0"])
    spool.forget([])
    assert spool.ids() == ["g1.0"]
    put(spool, make_group(0))
    assert spool.ids() == ["g1.0", "g0.0"]


def test_once_it_is_scrubbed_nothing_of_what_was_forgotten_stands_in_any_file_of_the_spool(path: Path):
    with closing(Spool.open(path)) as spool:
        for number in range(3):
            spool.unfinished.put(f"s{number}.0", 0, -2 - number, calls_of(5, notes=f"secret of session {number}"))

        def texts() -> list[bool]:
            content = b"".join(file.read_bytes() for file in path.parent.iterdir())
            return [f"secret of session {number}".encode() in content for number in range(3)]

        assert all(texts())
        spool.forget(["s0.0", "s2.0"])
        spool.scrub()
        assert texts() == [False, True, False]


def test_the_file_stays_as_large_as_what_is_in_it_at_once(path: Path):
    spool = Spool.open(path)

    def turns(first: int, last: int) -> int:
        for number in range(first, last):
            put(spool, make_group(number, (2000,)))
            spool.forget([f"g{number - 10}.0"])
        return sum(file.stat().st_size for file in path.parent.iterdir())

    turns(0, 200)
    early = path.stat().st_size
    assert turns(200, 600) < 8 * 1024 * 1024
    assert path.stat().st_size <= 1.2 * early
    assert len(spool.ids()) == 10
    spool.close()


def test_any_thread_may_call(path: Path):
    spool = Spool.open(path)
    groups = [make_group(number) for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(partial(put, spool), groups + groups))
        back = list(threads.map(lambda group: spool.get([group.id])[0], groups))
        list(threads.map(lambda group: spool.forget([group.id]), groups[:20]))
    assert [bits(group) for group in back] == [bits(group) for group in groups]
    assert sorted(spool.ids()) == sorted(group.id for group in groups[20:])
    spool.close()


def test_what_several_threads_store_while_the_disk_is_busy_is_one_commit(path: Path):
    spool, parts = Spool.open(path), parts_of(make_group(1))
    statements: list[str] = []
    spool._file.connection.set_trace_callback(statements.append)
    with ThreadPoolExecutor(3) as threads, spool._file.lock:
        futures = [threads.submit(put, spool, part, place, 3) for place, part in enumerate(parts)]
        while len(spool._file._waiting) < 3:
            pass
    assert all(bits(future.result()) == bits(make_group(1)) for future in futures)
    assert statements.count("COMMIT") == 1
    spool.close()


# ---------------------------------------------------------------------------------------------------------- sudden ends

PUTTING = """
import sys
from pathlib import Path
import numpy as np
from areal.storage.spool import SpoolPart, Spool
from areal.samples.trajectory import Branch, Group, Trajectory

spool = Spool.open(Path(sys.argv[1]))
for number in range(10**9):
    column = np.full(3000, number, np.int32)
    sample = Trajectory(column, column.astype(np.float32), column, 1.0, "stop")
    part = SpoolPart(Group(f"g{number}.0", number, (sample,)), sample.frame())
    spool.put_all({0: part, 1: part}, 2)
    print(number, flush=True)
"""


@pytest.mark.usefixtures("impatient")
def test_what_was_put_outlives_a_process_that_is_killed_and_its_lock_does_not(path: Path):
    with subprocess.Popen([sys.executable, "-c", PUTTING, str(path)], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(100):
            last = int(process.stdout.readline())
        with pytest.raises(UserError, match=r"spool\.db is in use by another process: stop that process"):
            Spool.open(path)
        # In WAL mode, but without memory shared between processes, which fails on network file systems.
        assert {file.name for file in path.parent.iterdir()} == {"spool.db", "spool.db-wal", "spool.db.lock"}
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL

    spool = Spool.open(path)
    ids = spool.ids()
    assert ids == [f"g{number}.0" for number in range(len(ids))] and len(ids) > last
    for number, group in enumerate(spool.get(ids)):
        assert [sample.tokens.tolist() for sample in group.trajectories] == [[number] * 3000] * 2
    spool.close()


def test_a_disk_that_refuses_keeps_no_part_of_a_group():
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    spool = Spool(connection)
    put(spool, make_group(0))
    connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(SpoolError, match="full"):
        put(spool, make_group(1, (20_000,)))
    connection.execute("PRAGMA max_page_count = 100000")
    assert spool.ids() == ["g0.0"]
    put(spool, make_group(1, (20_000,)))
    assert spool.ids() == ["g0.0", "g1.0"]


def test_what_a_full_disk_refused_is_not_stored_with_what_another_stores_later():
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    spool = Spool(connection)
    connection.execute("PRAGMA max_page_count = 1")
    for _ in range(3):  # as a trainer repeats it while its disk is full
        with pytest.raises(SpoolError, match="full"):
            put(spool, make_group(0, (20_000,)))
    assert not spool._file._waiting
    connection.execute("PRAGMA max_page_count = 100000")
    put(spool, make_group(1))
    assert spool.ids() == ["g1.0"]


def test_while_a_disk_fills_each_of_several_threads_stores_its_group_or_is_told():
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    spool = Spool(connection)

    def stored_id(number: int) -> str | None:
        try:
            stored = put(spool, make_group(number, (3_000,)))
        except SpoolError:
            return None
        assert stored is not None
        return stored.id

    for number in range(0, 800, 8):
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 20}")
        with ThreadPoolExecutor(8) as threads:
            stored = {group for group in threads.map(stored_id, range(number, number + 8)) if group}
        assert set(spool.ids()) == stored
        spool.forget(stored)


def test_what_one_thread_cannot_store_takes_nothing_of_another_with_it():
    spool = in_memory()
    with ThreadPoolExecutor(1) as threads:
        with spool._file.lock:
            waiting = threads.submit(put, spool, make_group(1))
            while not spool._file._waiting:
                time.sleep(0.001)
            with pytest.raises(OverflowError):
                put(spool, replace(make_group(2), prompt_index=1 << 70))
        assert bits(waiting.result()) == bits(make_group(1))
    assert spool.ids() == ["g1.0"]


def write_text(path: Path) -> None:
    path.write_text("not a database at all, but long enough for a header. " * 100)


def write_another_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE groups (id TEXT)")
    connection.close()


def write_truncated(path: Path) -> None:
    spool = Spool.open(path)
    for number in range(20):
        put(spool, make_group(number, (2000,)))
    spool.close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("write", [write_text, write_another_program, write_truncated, Path.mkdir])
def test_a_file_that_is_no_spool_is_told_in_one_sentence(path: Path, write):
    write(path)
    with pytest.raises(UserError) as raised:
        Spool.open(path)
    assert str(raised.value).startswith(f"{path} cannot be used as a spool (") and "\n" not in str(raised.value)


# ------------------------------------------------------------------------------------------------------ what is damaged


@pytest.mark.parametrize("place", [-200, 9, 0])
def test_a_flipped_bit_in_a_group_is_found_and_named(path: Path, place: int):
    spool = Spool.open(path)
    for number in range(3):
        put(spool, make_group(number, (100,)))
    (blob,) = spool._file.connection.execute("SELECT frame FROM parts WHERE id = 'g1.0'").fetchone()
    flipped = bytearray(blob)
    flipped[place] ^= 0x40
    spool._file.connection.execute("UPDATE parts SET frame = ? WHERE id = 'g1.0'", (bytes(flipped),))
    assert [group.id for group in spool.get(["g0.0", "g2.0"])] == ["g0.0", "g2.0"]
    with pytest.raises(UserError, match=f"The spool {path} is damaged .group g1.0 does not have the checksum"):
        spool.get(["g0.0", "g1.0"])
    spool.close()


def test_a_spool_is_that_of_one_run(path: Path):
    spool = Spool.open(path)
    spool.assign("a")
    spool.assign("a")
    with pytest.raises(UserError, match="is the spool of another run: move it away"):
        spool.assign("b")
    spool.close()


# ------------------------------------------------------------------------------------------------------ other versions


def with_column(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """From now on the program has one more column in its table of parts."""
    parts = areal.storage.spool_file._PARTS
    monkeypatch.setattr(areal.storage.spool_file, "_PARTS", parts.replace("UNIQUE", f"novelty {rule}, UNIQUE", 1))


@pytest.mark.parametrize(("rule", "value"), [("TEXT NOT NULL DEFAULT 'x'", "x"), ("INTEGER", None)])
def test_a_spool_of_an_earlier_version_has_the_defaults_of_the_columns_that_it_lacks(path, monkeypatch, rule, value):
    spool = Spool.open(path)
    put(spool, make_group(1))
    spool.close()
    with_column(monkeypatch, rule)
    for _ in range(2):
        spool = Spool.open(path)
        assert [bits(group) for group in spool.get(["g1.0"])] == [bits(make_group(1))]
        assert set(spool._file.select("SELECT novelty FROM parts")) == {(value,)}
        spool.close()


def test_a_spool_without_a_column_that_has_no_default_is_refused_and_so_is_one_with_an_unknown_column(
    path, monkeypatch
):
    Spool.open(path).close()
    with monkeypatch.context() as later:
        with_column(later, "TEXT NOT NULL")
        with pytest.raises(
            UserError, match=r"version .* wrote it without the column parts\.novelty\): resume the run with"
        ):
            Spool.open(path)
    Spool.open(path).close()
    with monkeypatch.context() as later:
        with_column(later, "TEXT")
        Spool.open(path).close()
    with pytest.raises(
        UserError, match=r"version .* wrote it with other columns: parts\.novelty\): resume the run with"
    ):
        Spool.open(path)


def test_a_sample_with_a_field_or_a_column_of_another_version_is_refused_in_one_sentence(path, monkeypatch):
    (part, *_), spool = parts_of(make_group(1)), Spool.open(path)
    put(spool, part)
    spool.close()
    with monkeypatch.context() as later:
        later.setattr(Note, "_asdict", lambda note: {"novelty": 1})
        spool = Spool.open(path)
        put(spool, replace(part, id="g2.0"))
    with pytest.raises(
        UserError, match=r"written by another version of this program \(group g2\.0: .*novelty"
    ) as refused:
        spool.get(["g1.0", "g2.0"])
    assert "\n" not in str(refused.value)
    monkeypatch.delitem(COLUMNS, "returns")
    with pytest.raises(UserError, match=r"written by another version of this program \(group g1\.0: .*returns"):
        spool.get(["g1.0"])
    spool.close()
