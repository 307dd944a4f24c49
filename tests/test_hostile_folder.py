"""A run folder that somebody else has made: tools that read it write nowhere else, and take no file from elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from actors.mastering.run_state import RunState
from areal.__main__ import main
from areal.config import dump_config, load_config
from areal.processes import ROOT
from areal.storage.journal import Journal

PRIVATE = '{"text": "the private text of the user"}'


@pytest.fixture
def private(tmp_path) -> Path:
    """A folder of the user's that is none of the run's."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "private.json").write_text(PRIVATE)
    return folder


@pytest.fixture
async def hostile(tiny_model, tmp_path, private) -> Path:
    """A run folder whose files, and those that tools write there, are links to the user's own."""
    folder = tmp_path / "runs" / "adder"
    checkpoint = folder / "checkpoints" / "step_000020"
    shutil.copytree(tiny_model, checkpoint)
    (folder / "logs").mkdir()
    overrides = ["name=adder", f"run_dir={folder.parent}", f"model={tiny_model}", "observe.tensorboard=true"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 20, "reward_mean": 0.5, "staleness_max": 3}) + "\n")
    (folder / "summary.json").write_text(json.dumps({"ok": True, "staleness_max": 3, "checkpoint": str(checkpoint)}))
    journal = Journal.open(folder / "journal.db")
    RunState(config, journal)
    journal.close()
    for name in ("report.html", "report.html.tmp", "trace.json", "evaluations.jsonl"):
        (folder / name).symlink_to(private / "private.json")
    (folder / "tensorboard").symlink_to(private)
    (folder / "logs" / "ssh").symlink_to(private)
    (checkpoint / "extra.json").symlink_to(private / "private.json")
    return folder


def texts_in(folder: Path) -> list[str]:
    """Of all files that are in a folder itself, links to files left out."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path.read_text(errors="replace") for path in files]


@pytest.mark.parametrize("tool", ["report", "trace"])
def test_what_a_tool_writes_into_the_folder_replaces_a_link_and_does_not_follow_it(hostile, private, tool):
    assert main([tool, str(hostile)]) == 0
    assert (private / "private.json").read_text() == PRIVATE
    written = hostile / {"report": "report.html", "trace": "trace.json"}[tool]
    assert not written.is_symlink() and written.stat().st_size > len(PRIVATE)


def test_a_tracker_refuses_a_folder_that_is_a_link(hostile, private, capsys):
    assert main(["track", str(hostile)]) == 2
    assert f"tensorboard is a link to {private}: remove the link" in capsys.readouterr().err
    assert [path.name for path in private.iterdir()] == ["private.json"]


def test_a_model_for_the_hub_has_no_file_that_a_link_leads_to(hostile, capsys):
    assert main(["push", str(hostile)]) == 0
    assert "extra.json is left out: it is a link to" in capsys.readouterr().err
    assert not any(PRIVATE in text for text in texts_in(hostile / "hub"))
    assert (hostile / "hub" / "config.json").is_file()


def test_links_in_a_copy_of_a_run_are_links(hostile, tmp_path):
    copy = tmp_path / "copy"
    assert main(["backup", str(hostile), str(copy)]) == 0
    assert (copy / "logs" / "ssh").is_symlink() and (copy / "config.yaml").is_file()
    assert not any(PRIVATE in text for text in texts_in(copy))
