"""Counts the lines of the modules that a run reaches, and of all others, the tools. `make lint` fails above the numbers
in pyproject.toml (`[tool.areal.size]`), which a commit raises by hand and explains.

Imports are read, also those within functions, from run.py, the roles and the files that are started as processes of
their own, which no import leads to.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocols", "actors", "areal")
# The engine in vLLM's process, the workers of reward pools with what they import by name, and what sandboxes start.
PROCESSES = (
    "areal.generation.vllm_worker",
    "areal.weights.transfer",
    "areal.rewards.worker",
    "areal.rewards.math_answers",
)
IN_SANDBOXES = "areal.programs"


def modules(root: Path) -> dict[str, Path]:
    """The files of the product by the names of their modules."""
    files = [root / "run.py", *(file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))]
    names = (".".join(file.relative_to(root).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def imports(file: Path) -> Iterator[str]:
    """The names that a file imports, but for types alone. `from a import b` imports a.b or, if that is no module, a."""
    todo: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


def reached(files: Mapping[str, Path], starts: Iterable[str]) -> set[str]:
    """The modules among `files` that imports lead to from `starts`, and the packages that they are in."""
    seen: set[str] = set()
    todo = [name for name in starts if name in files]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            above = name.rpartition(".")[0]
            todo += [module for module in (above, *imports(files[name])) if module in files]
    return seen


def of_a_run(root: Path) -> tuple[dict[str, Path], set[str]]:
    """All modules of the product, and those of them that a run reaches."""
    files = modules(root)
    roles = [name for name in files if name.startswith("actors.") and name.count(".") == 1 and _is_file(files[name])]
    programs = [name for name in files if name.startswith(IN_SANDBOXES)]
    return files, reached(files, ["run", "actors.start.__main__", *roles, *programs, *PROCESSES])


def _is_file(path: Path) -> bool:
    return path.name != "__init__.py"


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main(root: Path = ROOT) -> int:
    """Prints the two numbers. Returns 1 if one is above its limit, else 0."""
    files, run = of_a_run(root)
    counts = {"run": lines(files[name] for name in run), "tools": lines(files[name] for name in files.keys() - run)}
    limits = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["areal"]["size"]
    for name, count in counts.items():
        verdict = "" if count <= limits[name] else ": shrink it, or raise the limit and explain that in the commit"
        print(f"{name}: {count} lines of at most {limits[name]}{verdict}")
    return int(any(count > limits[name] for name, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
