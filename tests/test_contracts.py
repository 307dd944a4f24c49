"""The contracts on imports in pyproject.toml, which `make lint` checks: each fails where it is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = Path(sys.executable).with_name("lint-imports")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the packages and their contracts, without the user's cache."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("areal", "actors", "protocols"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def report(tree: Path) -> str:
    """What lint-imports says of the tree, without the breaks of lines."""
    ended = subprocess.run(
        [LINT, "--no-cache", "--no-logo"], cwd=tree, capture_output=True, text=True, env={"COLUMNS": "1000"}
    )
    assert "Contracts: " in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == (" BROKEN" in ended.stdout)
    return ended.stdout


# By contract: lines that break it, by the module in which they are, and how they are reported if not so.
BREAKS: dict[str, tuple[dict[str, str], str]] = {
    "Protocols import neither": ({"protocols.bus_errors": "areal.config"}, ""),
    "The library imports no actors": ({"areal.rewards.functions": "actors.reward"}, ""),
    "Rooms of the library": (
        {"areal.rewards.pool": "areal.workflows.session", "areal.storage.journal": "areal.extensions.desk.report"},
        "- areal.attic",  # a room without a place on the map
    ),
    "Rooms of the actors": (
        {"actors.watching.health": "actors.master.master", "actors.generator.generator": "actors.trainer.trainer"},
        "",
    ),
    "The roles and what they share": (
        {"actors.sampling.services": "areal.extensions.programs.slots", "actors.reward": "actors.gateway.gateway"},
        "",
    ),
    "The desk opens a run by": ({"areal.extensions.desk.trace": "areal.storage.run_folder"}, ""),
    "No circles": ({"areal.workflows.conversation": "areal.workflows.builtin"}, "- .conversation -> .builtin"),
    "vLLM is known": ({"actors.reward": "vllm"}, ""),
    "DeepSpeed is known": ({"areal.training.step_metrics": "deepspeed"}, ""),
    "ZeroMQ is known": ({"actors.runtime.actor": "zmq"}, ""),
    "The master, the configuration": ({"areal.staleness.ledger": "torch"}, ""),
}


def test_each_line_that_breaks_a_contract_is_found(tree):
    """All at once, since import-linter takes seconds."""
    for lines, _ in BREAKS.values():
        for module, imported in lines.items():
            with (tree / f"{module.replace('.', '/')}.py").open("a") as file:
                file.write(f"\nimport {imported}\n")
    (tree / "areal" / "attic").mkdir()
    (tree / "areal" / "attic" / "__init__.py").touch()
    details = report(tree).partition("Broken contracts\n")[2]
    _, *parts = re.split(r"^(\S.*)\n-+\n", details, flags=re.MULTILINE)
    by_contract = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(by_contract) == len(BREAKS)
    for contract, (lines, reported) in BREAKS.items():
        (part,) = (text for name, text in by_contract.items() if name.startswith(contract))
        assert reported in part
        if contract != "No circles":
            assert all(f"{module} -> {imported} (" in part for module, imported in lines.items())
