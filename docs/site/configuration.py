"""Writes docs/configuration.md from the configuration models; run it after every change to them.

The page in the repository has the sections; the page of the site (hooks.py) has each key with its values and its
meaning, too.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from areal.config import Config
from areal.config.data_section import DataConfig, SourceConfig
from areal.config.role_sections import EvaluatorConfig
from areal.config.section import Section, section_in
from areal.extensions.desk.settings_list import meanings, value_of
from areal.extensions.fine_tuning.sft import SftConfig, SftData
from areal.extensions.launch.cluster import ClusterConfig

Listing = Callable[[str, type[Section]], Iterator[str]]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

This page lists the sections of a run's configuration, and the keys of supervised fine-tuning.

<!-- Written by docs/site/configuration.py from areal/config/: change it there. -->

A run is configured by a YAML file, by arguments such as `trainer.lr=1e-5` and `reward.functions=[math]`, or by both.
Unknown keys and wrong values are reported before anything is started. `--dry-run` checks and prints the resolved
configuration; a run also writes it to `config.yaml` in the run folder.
"""
COMMAND = """\
`areal config` prints the keys with values and meanings, `areal config trainer.` the keys of a section, and
`areal config WORD ...` the keys with the words in name or meaning.
"""
COLUMNS = """\
The column *value* begins with the default, or with *required*. Other values, the type and limits follow, unless they
are obvious: no count, size or time is negative.
"""

FINE_TUNING = """\
## Supervised fine-tuning

`areal sft --model FOLDER --data FILE.jsonl --output FOLDER key=value ...` trains a model from which a run can start.
The section `trainer` is as in a run; the other keys are below.
"""


def page() -> str:
    """The text of docs/configuration.md: the sections, and the keys that no command prints."""
    return "\n".join([INTRODUCTION, COMMAND, COLUMNS, *_section("", Config, _names), *_cluster(), *_fine_tuning()])


def reference() -> str:
    """The page of the site: each key with its values and its meaning."""
    return "\n".join([INTRODUCTION, COLUMNS, *_section("", Config, _keys), *_cluster(), *_fine_tuning()])


def _cluster() -> Iterator[str]:
    """Its keys as tables, on both pages: the section is an extension's."""
    yield from _section("cluster.", ClusterConfig, _keys)


def _fine_tuning() -> Iterator[str]:
    """Its keys as tables, on both pages: no command prints them."""
    yield FINE_TUNING
    yield from _table("", SftConfig)
    yield ""
    yield from _section("data.", SftData, _keys, "### data (fine-tuning)")


def _section(prefix: str, section: type[Section], listed: Listing, heading: str | None = None) -> Iterator[str]:
    yield heading or (f"## {prefix[:-1]}" if prefix else "## The run")
    yield ""
    if section.__doc__:
        yield _linked(inspect.cleandoc(section.__doc__))
        yield ""
    yield from listed(prefix, section)
    same = list(chain(*_shared(section).values()))
    for name, field in section.model_fields.items():
        if name not in same and (inner := section_in(field.annotation)):
            yield from _section(f"{prefix}{name}.", inner, listed)


def _names(prefix: str, section: type[Section]) -> Iterator[str]:
    if not section.__doc__:
        names = [
            f"`{prefix}{name}`" for name, field in section.model_fields.items() if not section_in(field.annotation)
        ]
        yield textwrap.fill(", ".join(names), 120, break_long_words=False, break_on_hyphens=False)
        yield ""


def _keys(prefix: str, section: type[Section]) -> Iterator[str]:
    yield from _table(prefix, section)
    for described, keys in _shared(section).items():
        yield ""
        yield f"Meaning and default as in [{described}](#{described}): {', '.join(f'`{key}`' for key in keys)}."
    yield ""


def _table(prefix: str, section: type[Section]) -> Iterator[str]:
    same = list(chain(*_shared(section).values()))
    yield "| key | value | meaning |"
    yield "|---|---|---|"
    for name, field in section.model_fields.items():
        if name not in same and not section_in(field.annotation):
            text = _linked(meanings(section).get(name, "")).replace("|", "\\|")
            yield f"| `{prefix}{name}` | {value_of(field)} | {text} |"


def _shared(section: type[Section]) -> dict[str, list[str]]:
    """The keys that a section of rows shares with `data` and `evaluator`, by the one that describes them."""
    if section is DataConfig or not issubclass(section, SourceConfig):
        return {}
    keys = {
        name: [key for key in section.model_fields if key in described.model_fields and _same(section, described, key)]
        for name, described in (("data", DataConfig), ("evaluator", EvaluatorConfig))
    }
    return {name: shared for name, shared in keys.items() if shared}


def _same(section: type[Section], described: type[Section], key: str) -> bool:
    of_one, of_other = ((meanings(kind).get(key), value_of(kind.model_fields[key])) for kind in (section, described))
    return of_one == of_other


def _linked(text: str) -> str:
    """Turns the name of a page, as the code writes it (`areal docs x`, `docs/x.md`), into a link to the page."""
    return re.sub(r"(?:areal docs |docs/)(\w+)(?:\.md)?", lambda name: f"[{name[1]}.md]({_address(name[1])})", text)


def _address(name: str) -> str:
    """The page of this name in `docs/`, else the page of the extension or the role."""
    pages = (PAGE.parent / f"{name}.md", ROOT / "actors" / name / "README.md")
    page = next((page for page in pages if page.exists()), ROOT / "areal" / "extensions" / name / "README.md")
    return os.path.relpath(page, PAGE.parent)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
