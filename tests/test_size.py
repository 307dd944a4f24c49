"""The guard on size: the core is counted by imports, extensions by folders, and a number above its limit fails."""

from __future__ import annotations

import pytest
import size
from size import ROOT


@pytest.fixture
def product(tmp_path):
    """A small product: a role, what it imports at its start, late and for types alone, extensions, and a tool."""
    files = {
        "run.py": "from actors.master import master\n",
        "actors/__init__.py": "",
        "actors/master/__init__.py": "",
        "actors/master/master.py": "from typing import TYPE_CHECKING\nimport areal.early\n"
        "if TYPE_CHECKING:\n    import areal.types\ndef work():\n    from areal import late\n",
        "actors/gateway/keys.py": "1\n",
        "areal/__init__.py": "\n\n",
        "areal/early.py": "import areal.extensions.agents.mcp\n",
        "areal/extensions/agents/mcp.py": "import areal.types\n1\n",
        "areal/late.py": "1\n",
        "areal/types.py": "1\n",
        "areal/tool.py": "import areal.early\n2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def limit(product, core: int, tools: int, spine_lines: int) -> None:
    limits = {"core": core, "tools": tools, "extensions": 3, "spine_files": 2, "spine_lines": spine_lines}
    text = "".join(f"{name} = {limit}\n" for name, limit in limits.items())
    (product / "pyproject.toml").write_text(f"[tool.areal.size]\n{text}spine = ['run.py', 'actors/master/master.py']\n")


def test_the_core_is_what_roles_import_also_late_without_extensions_and_tools_are_the_rest(product):
    parts = {part: set(files) for part, files in size.parts(product).items()}
    assert parts == {
        "core": {"run", "actors", "actors.master", "actors.master.master", "areal", "areal.early", "areal.late"},
        "tools": {"areal.types", "areal.tool"},
        "agents": {"areal.extensions.agents.mcp"},
        "gateway": {"actors.gateway.keys"},
    }


@pytest.mark.parametrize(
    ("core", "tools", "spine_lines", "code"), [(11, 3, 7, 0), (10, 3, 7, 1), (11, 2, 7, 1), (11, 3, 6, 1)]
)
def test_a_number_above_its_limit_fails_and_says_so(product, capsys, core, tools, spine_lines, code):
    limit(product, core, tools, spine_lines)
    assert size.main(product) == code
    out = capsys.readouterr().out
    assert f"core: 11 of at most {core}" in out and f"tools: 3 of at most {tools}" in out
    assert "extensions: 3 of at most 3\n" in out and "extensions: agents 2, gateway 1\n" in out
    assert f"spine_lines: 7 of at most {spine_lines}" in out
    assert ("raise the limit and explain" in out) == bool(code)


def test_every_process_of_its_own_and_every_role_is_a_module():
    files = size.modules(ROOT).keys()
    assert set(size.PROCESSES) <= files
    assert all(f"actors.{role}" in files or f"actors.{role}.{role}" in files for role in size.ROLES)


def test_the_core_never_imports_a_page_of_the_dashboard():
    pages = ("actors.watching.dashboard", "actors.watching.rollouts_page")
    assert not [name for name in size.parts(ROOT)["core"] if name.startswith(pages)]
