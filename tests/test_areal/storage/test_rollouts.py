import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rollout_files import write_model, write_run
from support.stored_samples import BRANCHED

from areal.__main__ import main
from areal.base.errors import UserError
from areal.samples.trajectory import Group, Note, TokenValues, Trajectory, row_text
from areal.storage import rollout_files, rollouts
from areal.storage.rollout_files import files
from areal.storage.rollouts import ONE_OF, RolloutWriter
from areal.storage.run_files import ROLLOUTS
from areal.storage.stored_groups import batches

ROW = row_text({"prompt": "0 1", "answer": "2", "tests": "x" * 20_000})
NOTES = (Note({"form": 0.5}, 0, ("generator/0", "generator/1"), 1e9, 2.5),) * 2


def group(number: int, version: int = 4) -> Group:
    plain = Trajectory(
        np.array([0, number, 2], np.int32),
        np.array([0, -0.1, -0.7], np.float32),
        np.array([-1, version, version + 1], np.int32),
        0.1 + number,
        "length",
    )
    return Group(f"g{number}.0", number, (plain, BRANCHED), ROW, NOTES)


def writer(folder: Path, kinds: str = "all", limit: int = 1 << 30) -> RolloutWriter:
    return RolloutWriter(folder, kinds, limit, lambda sequences: [" ".join(map(str, tokens)) for tokens in sequences])


def rows(folder: Path) -> list[dict]:
    return [row for path in files(folder) for row in pq.read_table(path).to_pylist()]


def test_the_trained_groups_come_back_as_they_were(tmp_path):
    rollout_writer = writer(tmp_path)
    for step in (6, 7):
        rollout_writer.add_trained(step, [group(2 * step), group(2 * step + 1)], None)
        rollout_writer.add_untrained(group(100 + step), "discarded", "too late")
        rollout_writer.write()
    assert [step for step, _ in batches(tmp_path)] == [6, 7]
    for step, results in batches(tmp_path):
        for first, second in zip(results, [group(2 * step), group(2 * step + 1)], strict=True):
            assert (first.id, first.prompt_index, first.row) == (second.id, second.prompt_index, second.row)
            for a, b in zip(first.trajectories, second.trajectories, strict=True):
                assert a.columns.keys() == b.columns.keys()
                for name, array in b.columns.items():
                    assert getattr(a, name).dtype == array.dtype
                for name in (field.name for field in fields(Trajectory)):
                    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_a_row_is_a_branch_and_says_what_became_of_it(tmp_path):
    rollout_writer = writer(tmp_path)
    places = np.arange(14, dtype=np.float32)  # 3 tokens, and branches of 4, 5 and 2
    rollout_writer.add_trained(7, [group(1)], TokenValues(places, 10 * places))
    rollout_writer.add_untrained(group(2), "filtered", "no signal")
    rollout_writer.write()
    first, item, two, three, *remainder = rows(tmp_path)
    assert (first["step"], first["place"], first["group"], first["sample"], first["fate"]) == (
        7,
        0,
        "g1.0",
        0,
        "trained",
    )
    assert (first["prompt"], first["completion"], first["finish"]) == ("0", "1 2", "length")
    assert (first["prompt_tokens"], first["completion_tokens"], first["turns"]) == (1, 2, 1)
    assert (first["start_version"], first["staleness"]) == (4, 3)  # version 6, and 3 is the oldest of the group
    assert (first["proximal_logprobs"], first["advantage"], first["returns"]) == ([0, 1, 2], 15, None)
    assert json.loads(first["row"]) == {"prompt": "0 1", "answer": "2"}
    assert json.loads(first["reward_parts"]) == {"form": 0.5}
    assert (first["generators"], first["began"], first["seconds"]) == ("generator/0,generator/1", 1e9, 2.5)
    assert [row["branch"] for row in (item, two, three)] == [0, 1, 2]
    assert [row["shared"] for row in (item, two, three)] == [0, 3, 0]
    assert (two["tokens"], two["versions"], two["prompt"]) == ([0, 1, 2, 7, 8], [-1, -1, -1, -1, 5], "0 1 2 7")
    assert [row["advantages"][0] for row in (item, two, three)] == [30, 70, 120]
    assert {(row["step"], row["fate"], row["reason"], row["advantage"]) for row in remainder} == {
        (None, "filtered", "no signal", None)
    }


def test_a_later_trainer_goes_on_after_the_newest_step_and_adds_nothing_twice(tmp_path):
    rollout_writer = writer(tmp_path)
    rollout_writer.add_trained(1, [group(1)], None)
    rollout_writer.add_untrained(group(9), "discarded", "")
    rollout_writer.write()
    rollout_writer.add_trained(2, [group(2)], None)  # lost with its writer
    rollout_writer = writer(tmp_path)
    assert rollout_writer.step == 1
    rollout_writer.add_trained(1, [group(1)], None)
    rollout_writer.add_trained(2, [group(2)], None)
    for number in (9, 1, 2):  # sent again by a manager that has missed the answer
        rollout_writer.add_untrained(group(number), "discarded", "")
    rollout_writer.write()
    rollout_writer.write()
    assert [row["group"] for row in rows(tmp_path)] == ["g1.0"] * 4 + ["g9.0"] * 4 + ["g2.0"] * 4
    assert [path.name for path in files(tmp_path)] == ["000001.parquet", "000002.parquet"]


def test_a_writer_that_is_killed_leaves_whole_files(tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); from pathlib import Path\n"
        "import test_rollouts as t\n"
        "own = t.writer(Path(sys.argv[2]))\n"
        "for step in range(1, 10_000):\n"
        "    own.add_trained(step, [t.group(step)], None); own.write(); print(step, flush=True)"
    )
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", code, f"{here}:{here.parents[1]}", str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        words = [process.stdout.readline() for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
    results = [step for step, _ in batches(tmp_path)]
    assert words[-1] == "20\n" and results == list(range(1, len(results) + 1)) and len(results) >= 20
    assert writer(tmp_path).step == len(results)


def test_the_oldest_files_are_removed_beyond_the_limit(tmp_path):
    rollout_writer = writer(tmp_path)
    rollout_writer.add_trained(1, [group(1)], None)
    rollout_writer.write()
    size = files(tmp_path)[0].stat().st_size
    rollout_writer = writer(tmp_path, limit=int(2.5 * size))
    for step in range(2, 6):
        rollout_writer.add_trained(step, [group(step)], None)
        rollout_writer.write()
    assert [step for step, _ in batches(tmp_path)] == [4, 5]


def test_of_a_sample_whole_groups_are_kept_and_of_none_nothing(tmp_path):
    stored, nothing = writer(tmp_path / "some", "sample"), writer(tmp_path / "none", "none")
    for part in (stored, nothing):
        part.add_trained(1, [group(n) for n in range(40 * ONE_OF)], None)
        part.write()
    (result,) = [result for _, result in batches(tmp_path / "some")]
    assert 20 < len(result) < 60 and all(len(item.trajectories) == 2 for item in result)
    assert not files(tmp_path / "none")


def test_a_file_that_cannot_be_read_is_named_and_stops_no_trainer(tmp_path):
    rollout_writer = writer(tmp_path)
    rollout_writer.add_trained(1, [group(1)], None)
    rollout_writer.write()
    (tmp_path / "000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="000002.parquet"):
        list(batches(tmp_path))
    rollout_writer = writer(tmp_path)
    rollout_writer.add_trained(2, [replace(group(2), row="", notes=())], None)
    rollout_writer.write()
    assert [path.stem for path in files(tmp_path)] == ["000001", "000002", "000003"]


def test_a_flipped_bit_is_told_or_changes_nothing_that_is_read(tmp_path):
    rollout_writer = writer(tmp_path)
    rollout_writer.add_trained(1, [group(1), group(2)], None)
    rollout_writer.write()
    (file,) = files(tmp_path)
    content, whole = file.read_bytes(), repr(list(batches(tmp_path)))
    told = 0
    for place in range(4, len(content) - 8, 150):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        try:
            assert repr(list(batches(tmp_path))) == whole
        except UserError:
            told += 1
    assert told > 10


STRANGE = {
    "reward": [None, math.nan],
    "reward_parts": [None, "[1]", "{", "[" * 100_000, '{"a": "b"}'],
    "versions": [None, [None], [-7] * 10],
    "tokens": [None, [-5] * 10, [1]],
    "shared": [None, -3, 999],
    "finish": [None, "lost"],
    "prompt": [None],
    "row": [None, "{"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in STRANGE for value in STRANGE[name]], ids=str)
def test_values_that_no_run_writes_are_one_sentence_for_each_reader(tmp_path, name, value, capsys):
    write_run(tmp_path)
    write_model(tmp_path)
    for file in files(tmp_path / ROLLOUTS):
        table = pq.read_table(file)
        field = table.schema.field(name)
        column = pa.array([value] * table.num_rows, field.type)
        pq.write_table(table.set_column(table.schema.get_field_index(name), field, column), file)
    with pytest.raises(UserError):
        if name in ("reward_parts", "prompt"):  # which are read for people alone
            rollout_files.lacking(files(tmp_path / ROLLOUTS)[0])
        list(batches(tmp_path / ROLLOUTS))
    for words in ("rollouts", "report"):
        with contextlib.suppress(SystemExit):
            main([words, str(tmp_path)])
        assert "Traceback" not in capsys.readouterr().err


def test_the_files_are_those_of_one_run(tmp_path):
    rollout_writer = writer(tmp_path)
    rollout_writer.assign("a")
    rollout_writer.add_untrained(group(1), "discarded", "")
    rollout_writer.write()
    writer(tmp_path).assign("a")
    with pytest.raises(UserError, match="are those of another run"):
        writer(tmp_path).assign("b")


def test_a_write_that_stands_still_keeps_no_other_and_what_comes_meanwhile_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "PATIENCE_SECONDS", 0.01)
    slow, store = writer(tmp_path), RolloutWriter.store
    entered, go_on = threading.Event(), threading.Event()

    def store_slowly(self, added):
        entered.set()
        assert go_on.wait(60)
        store(self, added)

    monkeypatch.setattr(RolloutWriter, "store", store_slowly)
    slow.add_trained(1, [group(1)], None)
    stuck = threading.Thread(target=slow.write)
    stuck.start()
    assert entered.wait(60)
    monkeypatch.setattr(rollouts, "MOST_BYTES", slow.waiting + 1)
    slow.add_trained(2, [group(2)], None)
    slow.add_trained(3, [group(3), group(4)], None)
    slow.write()  # returns, though the other one does not
    assert (slow.lost, rows(tmp_path)) == (2, [])
    go_on.set()
    stuck.join()
    slow.write()
    assert {row["group"] for row in rows(tmp_path)} == {"g1.0", "g2.0"}
