"""The table of extensions: what it finds, where from, and how it says that something is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal.base import extensions
from areal.base.errors import UserError
from areal.config import Config
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
