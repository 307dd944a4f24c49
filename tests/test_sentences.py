"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = [file for folder in ("actors", "areal", "protocols") for file in sorted((ROOT / folder).rglob("*.py"))]
WITH_EXAMPLES = [file for file in PRODUCT if ">>> " in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_examples_of_a_module_run(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    failed, tried = doctest.testmod(module)
    assert tried and not failed
