"""The documentation says what the code does, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_the_example_of_the_quickstart_page_is_a_configuration():
    from areal.config import Config

    example = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    Config.model_validate(yaml.safe_load(example))
