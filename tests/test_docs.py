"""The documentation says what the code does, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import configuration
import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_reference_is_that_of_the_code():
    current = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert current == configuration.page(), "run python docs/site/configuration.py"


def test_every_key_of_the_configuration_is_described():
    bare = re.findall(r"^\| `(\S+)` .*\|  \|$", configuration.page(), re.MULTILINE)
    assert not bare


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def examples(language: str) -> list[str]:
    """Those of the quickstart's page."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_examples_of_the_quickstart_page_are_configurations():
    from areal.config import Config

    assert [Config.model_validate(yaml.safe_load(example)).name for example in examples("yaml")] == ["mine", "talks"]


def test_the_reward_of_the_quickstart_page_knows_right_from_wrong():
    (source,) = examples("python")
    names: dict[str, Any] = {}
    exec(source, names)
    scores = [
        names["digits_right"]("a75b48c30=", completion, {"answer": "432"})
        for completion in ("a7512b4813c3004", "a7512b4812c3004", "a7512", "", "a7512b4813c3004" * 2)
    ]
    assert scores == [1, 2 / 3, 1 / 3, 0, 1 / 2]
