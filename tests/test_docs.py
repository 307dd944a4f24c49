"""The documentation says what the code does, and its links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import configuration
import pytest
import size
import yaml
from markdown_tables import cut_tables
from support.prose import measure, sentences

ROOT = Path(__file__).parents[1]
OURS = ("areal", "actors", "protocols")
EXTENSIONS = [*sorted(ROOT.glob("areal/extensions/*/README.md")), *sorted(ROOT.glob("actors/*/README.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *EXTENSIONS]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_configuration_reference_is_that_of_the_code():
    current = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert current == configuration.page(), "run python docs/site/configuration.py"


def test_every_key_of_the_configuration_is_described():
    bare = re.findall(r"^\| `(\S+)` .*\|  \|$", configuration.reference(), re.MULTILINE)
    assert not bare


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_leads_to_one(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_exists(page):
    named = re.findall(r"`((?:areal|actors|protocols|tests|configs|docs)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_table_is_cut_in_two(page):
    assert not cut_tables(page.read_text(encoding="utf-8")), "a blank line before these lines"


def test_every_page_is_in_the_navigation_of_the_site():
    names = [f"extensions/{page.parent.name}.md" for page in EXTENSIONS]
    names += [page.name for page in (ROOT / "docs").glob("*.md")]
    navigation = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [name for name in names if f": {name}\n" not in navigation]


def test_the_page_of_an_extension_is_printed_by_the_name_of_its_folder():
    from areal.base.pages import all_pages

    assert {page.parent.name for page in EXTENSIONS} <= {*all_pages()}
    assert all_pages()["alerts"].samefile(ROOT / "areal/extensions/alerts/README.md")


def test_every_page_that_the_code_names_is_printed_by_this_name():
    from areal.base.pages import all_pages

    texts = [file.read_text(encoding="utf-8") for room in OURS for file in (ROOT / room).rglob("*.py")]
    names = {name for text in texts for name in re.findall(r"areal docs ([a-z_]+)", text)}
    assert len(names) > 10 and names <= {*all_pages()}


PROSE = [page for page in PAGES if page not in EXTENSIONS or page.parent.name in ("evaluator", "gateway")]
MOST_WORDS = 32310
"""Of README and docs/."""
MOST_POINTING = (60, 5, 0.03)
"""Of a page: references and hard ones in 1,000 words, bare sentences (`support/prose.py`)."""


def test_the_pages_stay_short():
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS, "replace, do not append"


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_a_page_names_what_it_means(page):
    figures = measure([page.read_text(encoding="utf-8")])
    assert all(figure <= limit for figure, limit in zip(figures, MOST_POINTING, strict=True)), figures


@pytest.mark.parametrize("name", ["quickstart", "own_reward", "own_data", "deploy"])
def test_a_page_of_a_newcomers_path_has_at_most_600_words(name):
    assert len((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split()) <= 600


def test_a_reference_counts_once_and_code_and_links_do_not():
    page = "Ask `that` again. It is one.\n\n```\nthat one\n```\n\n* A [link](what.md) to a page."
    assert [*sentences(page)] == [["ask", "x", "again"], ["it", "is", "one"], ["a", "link", "to", "a", "page"]]
    assert measure([page]) == pytest.approx((2000 / 11, 1000 / 11, 1 / 3))


def test_a_table_that_a_blank_line_cuts_is_seen_and_a_fence_is_no_table():
    table = "| a | b |\n|---|:-:|\n| 1 | 2 |\n"
    assert not cut_tables(f"{table}\ntext\n\n```\n| x |\n```\n\n{table}")
    assert cut_tables(f"{table}\n| 3 | 4 |\n| 5 | 6 |\n\n{table}\n| 7 | 8 |\n") == [5, 12]


def python_examples() -> list[Any]:
    sources = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
    results = [(page, code) for page in sources for code in fenced(page, "python")]
    return [pytest.param(code, id=f"{name_of(page)}-{number}") for number, (page, code) in enumerate(results)]


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", python_examples())
def test_an_example_imports_what_is_public_and_runs(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "areal",
            "actors",
            "protocols",
        ):
            public = importlib.import_module(node.module or "").__all__
            assert {alias.name for alias in node.names} <= set(public), f"{node.module} does not publish all of this"
    try:
        exec(compile(code, "example", "exec"), {})
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_every_metric_of_a_step_is_explained():
    from actors.master.accounts import StepMeter
    from actors.trainer import trainer
    from actors.trainer.phases import PHASES
    from areal.storage.events import COUNTERS
    from areal.training.step_metrics import StepResult

    names = {*COUNTERS, *StepResult.__annotations__, *(f"{what}_seconds" for what in PHASES)}
    for function in (StepMeter.metrics, trainer._metrics):
        names |= set(re.findall(r'^\s+"(\w+)":', inspect.getsource(function), re.MULTILINE))
    page = (ROOT / "docs" / "observe.md").read_text(encoding="utf-8")
    assert not {name for name in names if f"`{name}`" not in page}


def test_every_alert_is_explained():
    names = re.findall(r'_alert\("(.+?)"', (ROOT / "areal/extensions/alerts/alerts.py").read_text(encoding="utf-8"))
    page = (ROOT / "areal/extensions/alerts/README.md").read_text(encoding="utf-8")
    table = re.search(r"^\| alert \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert names and table and names == re.findall(r"^\| (.+?) \|", table[1], re.MULTILINE)


def test_the_public_names_are_those_of_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    message = {
        room: set(re.findall(r"`(\w+)`", names))
        for room, names in re.findall(r"^\| `(areal\.[\w.]+)` \| (.*) \|$", page, re.M)
    }
    files = [*(ROOT / "areal").glob("*/__init__.py"), *(ROOT / "areal").glob("extensions/*/__init__.py")]
    rooms = [".".join(file.parent.relative_to(ROOT).parts) for file in files]
    public = {room: getattr(importlib.import_module(room), "__all__", None) for room in rooms}
    assert message == {room: set(names) for room, names in public.items() if names}


def test_the_keys_beside_those_of_other_systems_are_keys_of_the_configuration():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    keys = re.findall(r"^\| `([\w.]+)`(?: \(.*?\))? \|.*\|.*\|.*\|.*\|$", page, re.MULTILINE)
    reference = configuration.reference()
    assert len(keys) > 20 and not [key for key in keys if f"| `{key}` |" not in reference]


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_an_example_configuration_names_nothing_that_is_private(config):
    assert "areal." not in config.read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    """The examples of the page of your own data."""
    return fenced(ROOT / "docs" / "own_data.md", language)


def test_the_examples_of_the_page_of_your_own_data_are_configurations():
    from areal.config import Config

    assert [Config.model_validate(yaml.safe_load(example)).name for example in examples("yaml")] == ["mine", "talks"]


def test_the_rows_of_the_page_of_your_own_data_are_enough_for_its_configuration(tmp_path, monkeypatch):
    from areal.config import Config
    from areal.data.sources import open_source

    page = (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(re.findall(r'^\{"prompt".*$', page, re.MULTILINE)))
    config = Config.model_validate(yaml.safe_load(examples("yaml")[0]))
    assert open_source(config.data, config.seed).row(0).answer in ("87", "9939")


def test_the_sizes_in_the_readme_are_those_of_the_command_beside_them():
    counts = {part: size.lines(files.values()) for part, files in size.parts(ROOT).items()}
    spine = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["areal"]["size"]["spine"]
    core, tools = counts.pop("core"), counts.pop("tools")
    measured = (size.lines(ROOT / name for name in spine), core, sum(counts.values()))
    sizes = [1000 * int(number) for number in re.findall(r"~(\d+)K lines", (ROOT / "README.md").read_text())]
    assert tools and sizes == [pytest.approx(count, rel=0.08) for count in measured]


def test_the_first_reward_scores_as_its_page_says():
    page = ROOT / "docs" / "own_reward.md"
    scope: dict[str, Any] = {}
    exec(compile(fenced(page, "python")[0], "example", "exec"), scope)
    rows = [json.loads(row) for row in re.findall(r"^\{.*$", page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert [scope["last_number"](row["prompt"], row["completion"], row) for row in rows] == [1, 0]
    assert "here 1 and 0," in page.read_text(encoding="utf-8")


def test_the_largest_reward_is_that_of_the_code():
    from areal.samples.trajectory import LARGEST_REWARD

    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert float(page.partition("an absolute value of at most ")[2].partition(",")[0]) == LARGEST_REWARD


def test_the_first_example_in_python_has_enough_rows(tmp_path, monkeypatch):
    import areal
    from actors.api.call_settings import settings_of

    def train(data, reward, **keys):
        settings_of(None, data, reward, None, keys)
        return MagicMock()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(areal, "train", train)
    exec(compile(fenced(ROOT / "docs" / "running.md", "py")[0], "example", "exec"), {})
    assert (tmp_path / "runs" / "notebook" / "rows.jsonl").exists()


def test_the_page_of_commands_has_all_members_of_a_run():
    import areal

    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8").partition("| member |")[2]
    listed = {name for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    assert listed == {"folder", "config", *(name for name in vars(areal.LiveRun) if not name.startswith("_"))}
