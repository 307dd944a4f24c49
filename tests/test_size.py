"""The guard on size: what a run reaches is counted by its imports, and a number above its limit fails."""

from __future__ import annotations

import pytest
import size
from size import ROOT


@pytest.fixture
def product(tmp_path):
    """A product of five modules: a role, what it imports at the start, late, and for types alone; and a tool."""
    files = {
        "run.py": "from actors import master\n",
        "actors/__init__.py": "",
        "actors/master.py": "from typing import TYPE_CHECKING\nimport areal.early\n"
        "if TYPE_CHECKING:\n    import areal.types\ndef work():\n    from areal import late\n",
        "areal/__init__.py": "\n\n",
        "areal/early.py": "1\n",
        "areal/late.py": "1\n",
        "areal/types.py": "1\n",
        "areal/tool.py": "import areal.early\n2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def limit(product, run: int, tools: int) -> None:
    (product / "pyproject.toml").write_text(f"[tool.areal.size]\nrun = {run}\ntools = {tools}\n")


def test_a_run_reaches_what_its_roles_import_also_late_and_tools_are_the_others(product):
    files, run = size.of_a_run(product)
    assert run == {"run", "actors", "actors.master", "areal", "areal.early", "areal.late"}
    assert files.keys() - run == {"areal.types", "areal.tool"}


@pytest.mark.parametrize(("run", "tools", "code"), [(11, 3, 0), (10, 3, 1), (11, 2, 1)])
def test_a_number_above_its_limit_fails_and_says_so(product, capsys, run, tools, code):
    limit(product, run, tools)
    assert size.main(product) == code
    out = capsys.readouterr().out
    assert f"run: 11 lines of at most {run}" in out and f"tools: 3 lines of at most {tools}" in out
    assert ("raise the limit and explain" in out) == bool(code)


def test_every_process_of_its_own_is_a_module():
    assert set(size.PROCESSES) <= size.modules(ROOT).keys()


def test_a_run_never_imports_the_desk_nor_a_page_of_it():
    _, run = size.of_a_run(ROOT)
    pages = ("actors.watching.dashboard", "actors.watching.rollouts", "areal.selftest")
    assert not [name for name in run if name.startswith(("areal.desk", *pages))]
