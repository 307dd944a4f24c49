"""A run's record: what a folder says is read, also while it is written, and nothing in it is changed."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from support.rollout_files import write_run

from areal.base.errors import UserError
from areal.storage.record import Record, has_begun, has_finished
from areal.storage.records import line_of, new_steps

HALF = line_of({"step": 3})[:9]


@pytest.fixture
def folder(tmp_path):
    settings = {"name": "demo", "model": "/models/quickstart-0123456789ab", "steps": 9}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    steps = [{"step": n, "loss": n / 2, "prompts": [n], "time": 10.0 * n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(line_of, steps)) + HALF)
    changes = [{"step": 2, "key": "trainer.lr", "before": 1.0, "now": 2.0}]
    (tmp_path / "changes.jsonl").write_text("".join(map(line_of, changes)))
    events = [{"time": at, "actor": "trainer/0"} for at in (2.0, 1.0)] + [{"time": 3.0}]
    (tmp_path / "events.jsonl").write_text("".join(map(line_of, events)))
    for version in (2, 4):
        (tmp_path / "checkpoints" / f"step_{version:06}").mkdir(parents=True)
    write_run(tmp_path)
    return tmp_path


def files_in(folder) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_a_run_has_written_is_read_and_nothing_is_changed(folder):
    files_before, record = files_in(folder), Record(folder)
    assert (record.metrics.steps, record.metrics.trained, record.metrics.times) == ([1, 2], 2, [10.0, 20.0])
    assert (
        record.metrics.series("loss") == [0.5, 1.0] and record.metrics.evaluations == record.configuration.origins == []
    )
    assert record.configuration.settings == {"name": "demo", "model": "quickstart", "steps": 9}
    assert (record.configuration.changed_after(1), record.configuration.changed_after(2)) == ({"trainer.lr": 1.0}, {})
    assert [event["time"] for event in record.events] == [1.0, 2.0]
    assert (record.versions, record.checkpoints.of(4)) == ([0, 2, 4], record.checkpoints.folders[-1])
    assert record.rollouts.groups_by_step() == {1: 2, 2: 2, 3: 2} and [
        step for step, _ in record.rollouts.batches(2)
    ] == [2, 3]
    assert len({row["group"] for row in record.rollouts.rows(["group"])}) == 7
    assert record.ending is None and record.summary == {}
    assert files_in(folder) == files_before


def test_steps_are_taken_in_when_that_is_asked_for_and_without_what_is_not_needed(folder):
    record, read = Record(folder, without=["prompts"]), new_steps(folder)
    assert "prompts" not in record.metrics.records[0] and [step["step"] for step in read()] == [1, 2]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line_of({"step": 3})[9:])
    assert record.metrics.steps == [1, 2], "figures of one page are of the same steps"
    record.metrics.update()
    assert record.metrics.steps == [1, 2, 3] and [step["step"] for step in read()] == [3]


def test_settings_are_those_of_now_after_a_resume(folder):
    record = Record(folder)
    assert record.configuration.settings["steps"] == 9
    (folder / "config.yaml").write_text("name: demo\nsteps: 12\n")
    os.utime(folder / "config.yaml", ns=(1, 1))
    assert record.configuration.settings["steps"] == 12


def test_a_folder_without_a_run_is_told_and_has_not_begun(tmp_path):
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no config\.yaml"):
        Record(tmp_path)
    assert not has_begun(tmp_path) and not has_finished(tmp_path)
    (tmp_path / "journal.db").touch()
    (tmp_path / "summary.json").write_text(json.dumps({"ok": True}))
    assert has_begun(tmp_path) and has_finished(tmp_path)
