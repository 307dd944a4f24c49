"""The table of extensions: what it finds, where from, and how it says that something is missing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import size

from actors.start.preflight import check_extensions
from areal.base import extensions
from areal.base.errors import UserError
from areal.config import Config, load_config
from areal.workflows.tools import Tool, Tools

ROOT = Path(__file__).parents[1]
POINTS = """
[areal.extensions]
tool.search = stranger:open_search
tool.python = stranger:open_search
tool.broken = stranger:nothing
tool.absent = no_such_module:open_search
"""


def install(site: Path, package: str, points: str, **modules: str) -> None:
    """Install a package with these entry points and modules into a folder, as pip does."""
    folder = site / f"{package.replace('-', '_')}-1.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (folder / "entry_points.txt").write_text(points)
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder of installed packages, which the table sees."""
    monkeypatch.syspath_prepend(tmp_path)
    extensions.installed_entries.cache_clear()
    yield tmp_path
    extensions.installed_entries.cache_clear()
    sys.modules.pop("stranger", None)


def test_every_entry_of_this_project_can_be_imported():
    for entry in extensions.own_entries().values():
        module, _, name = entry.target.partition(":")
        if module == "actors.direct.transfer":  # importing vLLM takes seconds
            assert f"\nclass {name}" in Path(find_spec(module).origin).read_text()
        else:
            assert callable(entry.load()), entry


def test_an_installed_package_adds_a_tool_and_does_not_hide_one_of_this_project(site):
    install(site, "searching", POINTS, stranger="def open_search(tools):\n    return tools.config.model\n")
    assert Tools(config(), None)["search"] == "m"
    assert extensions.entry("tool", "python").source == "areal/extensions/programs"
    assert extensions.entry("tool", "search").source == "searching 1.2"
    assert {"python", "search"} <= {*extensions.names("tool")}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", r"tool 'broken' of searching 1\.2, 'stranger:nothing': .*stranger\.py has no nothing"),
        ("absent", r"tool 'absent' of searching 1\.2, .*importing no_such_module .* failed with ModuleNotFoundError"),
        ("none", "there is no tool 'none': name one of .*, or your own as package.module:object"),
    ],
)
def test_a_missing_or_broken_extension_gives_one_sentence_that_names_its_package(site, name, sentence):
    install(site, "searching", POINTS, stranger="")
    with pytest.raises(UserError, match=sentence):
        extensions.find("tool", name)


def test_two_packages_with_the_same_name_are_a_mistake_that_names_both(site):
    for package in ("searching", "seeking"):
        install(site, package, "[areal.extensions]\ntool.search = stranger:open_search\n")
    with pytest.raises(UserError, match=r"Both searching 1\.2 and seeking 1\.2 have a tool 'search'"):
        extensions.find("tool", "search")


def test_an_entry_point_without_a_kind_is_a_mistake_that_names_its_package(site):
    install(site, "searching", "[areal.extensions]\nsearch = stranger:open_search\n")
    with pytest.raises(UserError, match=r"'search' in the group areal\.extensions of searching 1\.2 .*KIND\.NAME"):
        extensions.names("tool")


def config() -> Config:
    settings = {"data": {"source": "addition"}, "sampling": {"max_new_tokens": 4}, "reward": {"functions": "addition"}}
    return Config(model="m", steps=1, batch_size=4, group_size=2, **settings)


async def test_a_tool_is_opened_once_and_closed_after_the_tools_that_were_opened_later():
    closed = []

    class Opened(Tool):
        def __init__(self, name: str) -> None:
            self.name = name

        def stats(self):
            return {self.name: 1.0}

        async def close(self):
            closed.append(self.name)

    tools = Tools(config(), None)
    assert tools["python"] is tools["python"]
    await tools.close()
    assert not tools
    tools["first"], tools["second"] = Opened("first"), Opened("second")
    assert tools.stats() == {"first": 1.0, "second": 1.0} and not [*tools.expecting()]
    await tools.close()
    assert closed == ["second", "first"]


PAGES = [*ROOT.glob("actors/*/README.md"), *ROOT.glob("areal/extensions/*/README.md")]
FOLDERS = sorted(page.parent.relative_to(ROOT) for page in PAGES)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the product."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("areal", "actors", "protocols", "configs"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run.py", copy)
    return copy


@contextlib.contextmanager
def moved_away(folder: Path, place: Path) -> Iterator[None]:
    away = folder.rename(place / "away")
    try:
        yield
    finally:
        away.rename(folder)


WITHOUT = {"actors/evaluator": ["data.eval_size=0"]}
"""What the quickstart has to do without, by the folder that is missing."""


# Forks a process for each command: it imports only the project's own modules, from the folders that are left.
FORKS = """
import gc, importlib, json, os, runpy, sys
import actors.start.run_command, actors.start.start_checks, areal.__main__
for name in [*sys.modules]:
    if name.partition(".")[0] in ("actors", "areal", "protocols"):
        del sys.modules[name]
gc.freeze()
place, codes = sys.argv[2], {}
for folder, commands in json.loads(sys.argv[1]).items():
    os.rename(folder, f"{place}/away")
    for number, (program, *sys.argv[1:]) in enumerate(commands):
        if not os.fork():
            for output in 1, 2:
                file = f"{place}/{folder.replace('/', '.')}-{number}-{output}"
                os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), output)
            importlib.invalidate_caches()
            if program == "run.py":
                runpy.run_path(program, run_name="__main__")
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        codes.setdefault(folder, []).append(os.waitstatus_to_exitcode(os.wait()[1]))
    os.rename(f"{place}/away", folder)
print(json.dumps(codes))
"""


def test_without_the_folder_of_an_extension_the_quickstart_can_start_and_the_rest_is_listed(tree, tmp_path):
    dry_run = ["run.py", "--dry-run", "--quiet", "configs/quickstart.yaml"]
    commands = {str(folder): ([*dry_run, *WITHOUT.get(str(folder), [])], ["areal", "extensions"]) for folder in FOLDERS}
    words = [sys.executable, "-c", FORKS, json.dumps(commands), str(tmp_path)]
    ended = subprocess.run(words, cwd=tree, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    codes = json.loads(ended.stdout)
    assert codes.keys() == commands.keys()
    for folder in commands:
        outputs = [*sorted(tmp_path.glob(f"{folder.replace('/', '.')}-*"))]
        texts = [path.read_text() for path in outputs]
        assert codes[folder] == [0, 0], (folder, texts)
        assert "single_turn" in texts[2] and f"{folder}\n" not in texts[2]


REFUSED = """
from areal.config.data_section import DataConfig
from areal.data.sources import open_source
open_source(DataConfig(source="rows.jsonl", eval_size=0), 0)
"""


@pytest.mark.parametrize("prompt", ["What is it?", [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]])
def test_without_the_extension_for_pictures_a_row_with_a_picture_is_refused_in_one_sentence(tree, tmp_path, prompt):
    row = {"prompt": prompt, "image": "a.png", "answer": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with moved_away(tree / "areal/extensions/pictures", tmp_path):
        command = [sys.executable, "-c", REFUSED]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].endswith(
        "a picture needs the extension `pictures`, whose folder is missing: put it back, or do without"
    )
    assert "line 1" in ended.stderr.splitlines()[-1] and "UserError" in ended.stderr.splitlines()[-1]


SETTINGS = {
    "routing": ({"trainer.routing": "replay"}, "trainer.routing=replay"),
    "lora": ({"trainer.lora": {"rank": 4}}, "trainer.lora"),
    "parallel": ({"trainer.sequence_parallel": 2, "trainer.ranks": 2}, "trainer.sequence_parallel"),
    "losses": ({"trainer.objective": "gspo"}, "trainer.objective=gspo"),
    "direct": ({"weights.transport": "direct"}, "weights.transport=direct"),
    "prometheus": ({"observe.prometheus_port": 9400}, "observe.prometheus_port"),
    "critic": ({"trainer.critic.lr": 0.1}, "trainer.critic"),
    "distillation": ({"trainer.teacher": "big", "scorers.big.model": "quickstart"}, "trainer.teacher"),
    "evaluator": ({"data.eval_size": 8}, "the role evaluator"),
    "scorer": ({"reward.functions": "big", "scorers.big": {"model": "m", "kind": "reward_model"}}, "the role scorer"),
    "gateway": ({"gateway": {"count": 1, "keys": {"a": {"sha256": "0" * 64}}}}, "the role gateway"),
}


@pytest.mark.parametrize("extension", SETTINGS)
def test_a_run_that_asks_for_an_extension_whose_folder_is_missing_is_refused_before_it_starts(monkeypatch, extension):
    settings, what = SETTINGS[extension]
    asking = load_config(
        ROOT / "configs/quickstart.yaml", [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    )
    check_extensions(asking)
    present = {key: entry for key, entry in extensions.own_entries().items() if f"/{extension}" not in entry.source}
    monkeypatch.setattr(extensions, "own_entries", lambda: present)
    with pytest.raises(
        UserError, match=rf"^{re.escape(what)} needs the extension `{extension}`, whose folder is missing"
    ):
        check_extensions(asking)


def test_each_extension_has_a_page_of_a_few_screens_whose_part_about_the_code_has_at_most_60_lines():
    extensions_of = {*ROOT.glob("areal/extensions/*/__init__.py"), *ROOT.glob("actors/*/extension.toml")}
    assert {file.parent.relative_to(ROOT) for file in extensions_of} == {*FOLDERS}
    for folder in FOLDERS:
        page = (ROOT / folder / "README.md").read_text()
        assert len(page.splitlines()) <= 145 and len(page.rpartition("## In the code\n")[2].splitlines()) <= 60, folder


def test_the_page_of_each_extension_says_about_how_many_lines_it_costs():
    for folder in FOLDERS:
        stated = re.search(r"\*\*Cost\.\*\* (?:About )?([\d,]+) lines", (ROOT / folder / "README.md").read_text())
        assert stated, folder
        assert int(stated[1].replace(",", "")) == pytest.approx(size.lines((ROOT / folder).rglob("*.py")), rel=0.1)


PACKAGE = """
import numpy as np
from pathlib import Path
from actors.runtime.actor import Actor

async def echo(session, row):
    return None

def polite(prompt, completion, row):
    return float("please" in completion)

def backwards(history, prompt):
    return 7 - prompt

def lines(config, folder, path):
    return lambda step, numbers, at: Path(path).open("a").write(f"{step} {numbers}\\n")

class Echo(Actor):
    role = "echo"

def rows(config, name, options, seed, what):
    return [{"prompt": f"{name} {number}", "answer": "1"} for number in range(options["count"])]
"""
PACKAGE_POINTS = """
[areal.extensions]
workflow.echo = stranger:echo
reward.polite = stranger:polite
sampler.backwards = stranger:backwards
source.made: = stranger:rows
tracker.lines = stranger:lines
role.echo = stranger:Echo
"""
USE = """
import asyncio
import os
from argparse import Namespace
from pathlib import Path
from actors.start.run_command import build, role_named
from areal.config import load_config
from areal.config.data_section import DataConfig
from areal.data.history import History
from areal.data.samplers import open_sampler
from areal.data.sources import open_source
from areal.rewards.lookup import resolve
from areal.config.reading import CONFIGS
from areal.extensions.trackers.tracking import Tracker, TrackingProcess, open_sinks
from areal.storage.records import line_of
from areal.workflows.named_workflows import resolve_workflow
from fakes.quiet_master import QuietMaster
from protocols.security import make_keys

config = DataConfig(source="made:letters", options={"count": 8}, eval_size=0, sampler="backwards")
source = open_source(config, 0)
print(open_sampler(config, source)(History(source), 3), sorted(source.row(index).prompt for index in range(8))[0])
(folder := Path("run")).mkdir()
(folder / "metrics.jsonl").write_text(line_of({"step": 3, "loss": 0.5}))
settings = ["observe.trackers=[lines]", "observe.tracker_options.lines.path=tracked", "observe.tensorboard=false"]
followed = load_config(CONFIGS / "quickstart.yaml", settings)
TrackingProcess.check(followed.observe)
Tracker(folder, open_sinks(followed, folder)).look()
print(Path("tracked").read_text(), end="")
arguments = Namespace(master="tcp://127.0.0.1:1", host=None, bind=None, ports="*", index=None, wait=1.0, reward=None)
arguments.scorer, arguments.overrides = None, []
os.environ["AREAL_KEYS"] = str(make_keys(Path("keys")).parent)
async def built():
    return build("echo", arguments).kind.__name__
print(role_named("echo"), asyncio.run(built()))
print(QuietMaster().join("echo").identity.partition("#")[0])
print(resolve("polite").function("", "yes please", {}), asyncio.run(resolve_workflow("echo", {})(None, None)))
"""


def test_a_package_of_a_stranger_adds_a_workflow_a_reward_a_sampler_a_source_a_tracker_and_a_role(tmp_path):
    install(tmp_path, "strange-things", PACKAGE_POINTS, stranger=PACKAGE)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'tests'}"}

    def printed(*words: str) -> str:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, check=True, capture_output=True).stdout

    assert printed("-c", USE).splitlines() == ["4 letters 0", "3 {'step/loss': 0.5}", "echo Echo", "echo/0", "1.0 None"]
    rows = [line.split(maxsplit=2) for line in printed("-m", "areal", "extensions").splitlines()]
    assert ["reward", "polite", "strange-things 1.2"] in rows
