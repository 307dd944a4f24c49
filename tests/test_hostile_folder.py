"""A run folder that somebody else has made: tools that read it write nowhere else, and take no file from elsewhere."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer

import areal
from actors.master.run_state import RunState
from actors.watching.dashboard import application
from areal.__main__ import main
from areal.base.plugins import announce_code
from areal.base.processes import ROOT
from areal.config import dump_config, load_config
from areal.extensions.desk.run_view import RunView
from areal.storage.journal import Journal
from areal.storage.records import line_of, read_records

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
    (folder / "metrics.jsonl").write_text(line_of({"step": 20, "reward_mean": 0.5, "staleness_max": 3}))
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


@pytest.fixture
def armed(hostile, tmp_path) -> Path:
    """The folder with an objective that leaves a mark where it is imported; returns the place of the mark."""
    mark, code = tmp_path / "mark", hostile / "loss.py"
    code.write_text(f"open({str(mark)!r}, 'w')\ndef loss(*values):\n    return None, {{}}\n")
    config = (hostile / "config.yaml").read_text()
    (hostile / "config.yaml").write_text(config.replace("objective: decoupled_ppo", f"objective: {code}:loss"))
    assert f"{code}:loss" in (hostile / "config.yaml").read_text()
    return mark


READERS = [
    "report RUN",
    "trace RUN",
    "compare RUN RUN",
    "rollouts RUN",
    "export RUN --format model --output OUT",
    "export RUN --output OUT.jsonl",
    "audit RUN",
    "replay RUN",
    "track RUN",
    "backup RUN OUT",
    "health --master RUN --wait 0.1",
]


@pytest.mark.parametrize("words", READERS, ids=str)
def test_code_in_the_folder_of_another_user_is_named_and_does_not_run(
    armed, hostile, tmp_path, monkeypatch, capsys, words
):
    monkeypatch.setattr("os.geteuid", lambda: hostile.stat().st_uid + 1)
    words = words.replace("RUN", str(hostile)).replace("OUT", str(tmp_path / "out")).split()
    main(words)
    assert not armed.exists()
    if words[0] in ("audit", "replay"):
        error = capsys.readouterr().err
        assert f"{hostile / 'loss.py'}:loss" in error and "repeat the command with --trust" in error


async def test_who_looks_at_the_folder_in_a_browser_or_a_notebook_runs_nothing_and_sees_nothing_of_the_user(
    armed, hostile, private
):
    async with TestClient(TestServer(application(RunView(hostile), None))) as page:
        shown = [await (await page.get(path)).text() for path in ("/", "/data")]
    run = await asyncio.to_thread(areal.join, hostile)
    assert "checkpoint" in run.summary and len(run.metrics) == 1
    shown.append((await asyncio.to_thread(run.report)).read_text())
    assert "private text" not in "".join(shown) and '"points": [0.5]' in shown[1]
    assert (private / "private.json").read_text() == PRIVATE
    assert not armed.exists()


def test_a_resume_names_the_code_of_the_folder_before_it_runs(armed, hostile, capsys):
    config = yaml.safe_load((hostile / "config.yaml").read_text())
    announce_code(hostile, config, trust=False)  # the folder is the user's own
    assert f"names code that runs with your rights: {hostile / 'loss.py'}:loss" in capsys.readouterr().err
    assert not armed.exists()


def test_a_configuration_without_code_of_its_own_asks_nothing(hostile, capsys):
    announce_code(hostile, yaml.safe_load((hostile / "config.yaml").read_text()), trust=False)
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(
    "link, words",
    [
        ("checkpoints", "export RUN --format model --output OUT"),
        ("checkpoints", "backup RUN OUT"),
        ("summary.json", "export RUN --format model --output OUT"),
        ("replays", "replay RUN"),
    ],
)
def test_a_folder_in_the_place_of_the_runs_own_is_neither_published_nor_copied_nor_emptied(
    hostile, private, tmp_path, capsys, link, words
):
    elsewhere = hostile.rename(tmp_path / "elsewhere") / link if link == "checkpoints" else private / "private.json"
    if link == "checkpoints":
        shutil.copytree(tmp_path / "elsewhere", hostile, symlinks=True)
        shutil.rmtree(hostile / link)
    elif link == "replays":
        elsewhere = private
        (private / "unchanged").mkdir()
    (hostile / link).unlink(missing_ok=True)
    (hostile / link).symlink_to(elsewhere)
    assert main(words.replace("RUN", str(hostile)).replace("OUT", str(tmp_path / "out")).split()) == 2
    assert "remove the link, nothing is read or written by it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert link != "replays" or (private / "unchanged").is_dir()


def test_a_model_for_the_hub_has_no_file_that_a_link_leads_to(hostile, tmp_path, capsys):
    folder = tmp_path / "hub"
    assert main(["export", str(hostile), "--format", "model", "--output", str(folder)]) == 0
    assert "extra.json is left out: it is a link to" in capsys.readouterr().err
    assert not any(PRIVATE in text for text in texts_in(folder))
    assert (folder / "config.json").is_file()


def test_records_with_values_of_another_type_stop_no_reader(hostile, capsys):
    for name in ("evaluations.jsonl", "tensorboard", "trace.json", "report.html"):
        (hostile / name).unlink()
    records = {
        "metrics.jsonl": [{"step": [1], "reward_mean": 0.5}, {"reward_mean": 0.5}],
        "evaluations.jsonl": [{"version": None, "accuracy": 1.0}, {"accuracy": 1.0}],
        "events.jsonl": [{"time": "now", "actor": "trainer/0"}, {"time": 1.0, "actor": 7}],
        "changes.jsonl": [{"step": "1", "key": 3}],
    }
    for file, lines in records.items():
        with (hostile / file).open("a") as text:
            text.writelines(line_of(record) for record in lines)
        assert len(list(read_records(hostile / file))) == (file == "metrics.jsonl")
    (hostile / "summary.json").write_text('{"seconds": [1, "a"], "steps": {}}')
    (hostile / "tracked.json").write_text('{"metrics.jsonl": null}')
    for tool in (["trace"], ["track"], ["report"], ["compare", str(hostile)]):
        assert not main([*tool, str(hostile)])
    assert main(["audit", str(hostile)]) == 1  # it shows less than a run without damage
    assert "damaged, or of another run" in capsys.readouterr().out


def test_links_in_a_copy_of_a_run_are_links(hostile, tmp_path):
    copy = tmp_path / "copy"
    (hostile / "pictures").mkdir()
    (hostile / "pictures" / "0a").write_bytes(b"of a prompt")
    assert main(["backup", str(hostile), str(copy)]) == 0
    assert (copy / "pictures" / "0a").read_bytes() == b"of a prompt"
    assert (copy / "logs" / "ssh").is_symlink() and (copy / "config.yaml").is_file()
    assert not any(PRIVATE in text for text in texts_in(copy))
