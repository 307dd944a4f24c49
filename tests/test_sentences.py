"""Docstrings and comments name what they speak of, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from support.prose import measure, texts_of_code

ROOT = Path(__file__).parent.parent
PRODUCT = [file for folder in ("actors", "areal", "protocols") for file in sorted((ROOT / folder).rglob("*.py"))]
MOST_REFERENCES, MOST_HARD, MOST_BARE, LEAST_WORDS = 60, 5, 0.03, 1000
"""Of a room: references and hard ones in 1,000 words, bare sentences (`support/prose.py`). Rooms with fewer words are
measured together."""
WITH_EXAMPLES = [file for file in PRODUCT if ">>> " in file.read_text(encoding="utf-8")]


def texts_by_room() -> dict[str, list[str]]:
    rooms: dict[str, list[str]] = {}
    for file in PRODUCT:
        folders = file.relative_to(ROOT).parts[:-1]
        room = "/".join(folders[: 3 if "extensions" in folders else 2])
        rooms.setdefault(room, []).extend(texts_of_code(file.read_text(encoding="utf-8")))
    small = [name for name, texts in rooms.items() if sum(len(text.split()) for text in texts) < LEAST_WORDS]
    return rooms | {"small rooms": [text for name in small for text in rooms.pop(name)]}


def test_the_sentences_of_each_room_name_what_they_mean():
    measured = {room: measure(texts) for room, texts in texts_by_room().items()}
    limits = MOST_REFERENCES, MOST_HARD, MOST_BARE
    assert not {
        room: found for room, found in measured.items() if any(a > b for a, b in zip(found, limits, strict=True))
    }


def test_texts_of_code_are_docstrings_and_comments():
    source = '"""Adds."""\nname = "no text"  # see below\nother = 1  # noqa: E501\n'
    assert [*texts_of_code(source)] == ["Adds.", "see below"]


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_examples_of_a_module_run(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    failed, tried = doctest.testmod(module)
    assert tried and not failed
