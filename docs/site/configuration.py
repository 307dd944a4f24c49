"""Writes docs/configuration.md from the configuration models; run it after every change to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from pydantic.fields import FieldInfo

from areal.config import Config, DataConfig, EvaluatorConfig, Section, SourceConfig, section_in
from areal.desk.settings_list import value_of
from areal.training.sft import SftConfig, SftData

PAGE = Path(__file__).parents[1] / "configuration.md"
INTRODUCTION = """\
# Configuration

This page lists every key of a run and of supervised fine-tuning.

<!-- Written by docs/site/configuration.py from areal/config.py: change it there. -->

A run is configured by a YAML file, by arguments such as `trainer.lr=1e-5` and `reward.functions=[math]`, or by both.
Unknown keys and wrong values are reported before anything is started. `--dry-run` checks and prints the resolved
configuration; a run also writes it to `config.yaml` in the run folder.

The column *value* begins with the default, or with *required*. Other values, the type where the default does not show
it, and limits follow, but not the obvious ones: no count, size or time is negative.
"""

FINE_TUNING = """\
## Supervised fine-tuning

These are the keys of `python -m areal sft --model FOLDER --data FILE.jsonl --output FOLDER key=value ...`, which trains
a model that a run can start from. The keys of its section `trainer` are those of a run.
"""


def page() -> str:
    """The text of docs/configuration.md."""
    return "\n".join(
        [
            INTRODUCTION,
            *_section("", Config),
            FINE_TUNING,
            *_table("", SftConfig),
            "",
            *_section("data.", SftData, "### data (fine-tuning)"),
        ]
    )


def _section(prefix: str, section: type[Section], heading: str | None = None) -> Iterator[str]:
    yield heading or (f"## {prefix[:-1]}" if prefix else "## The run")
    yield ""
    if section.__doc__:
        yield _linked(inspect.cleandoc(section.__doc__))
        yield ""
    yield from _table(prefix, section)
    yield ""
    same = _shared(section)
    for described, keys in same.items():
        yield f"Meaning and default as in [{described}](#{described}): {', '.join(f'`{key}`' for key in keys)}."
        yield ""
    for name, field in section.model_fields.items():
        if name not in chain(*same.values()) and (inner := section_in(field.annotation)):
            yield from _section(f"{prefix}{name}.", inner)


def _table(prefix: str, section: type[Section]) -> Iterator[str]:
    same = list(chain(*_shared(section).values()))
    yield "| key | value | meaning |"
    yield "|---|---|---|"
    for name, field in section.model_fields.items():
        if name not in same and not section_in(field.annotation):
            text = _linked(field.description or "").replace("|", "\\|")
            yield f"| `{prefix}{name}` | {value_of(field)} | {text} |"


def _shared(section: type[Section]) -> dict[str, list[str]]:
    """The keys that a section of rows shares with `data` and `evaluator`, by the one that describes them."""
    if section is DataConfig or not issubclass(section, SourceConfig):
        return {}
    keys = {
        name: [key for key, field in section.model_fields.items() if _same(field, described.model_fields.get(key))]
        for name, described in (("data", DataConfig), ("evaluator", EvaluatorConfig))
    }
    return {name: shared for name, shared in keys.items() if shared}


def _same(field: FieldInfo, described: FieldInfo | None) -> bool:
    if described is None:
        return False
    return (field.description, value_of(field)) == (described.description, value_of(described))


def _linked(text: str) -> str:
    """Turns the name of a page, as the code writes it (`docs/x.md`), into a link to the page."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
