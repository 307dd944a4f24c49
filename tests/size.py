"""Counts the lines of the product: the core, the tools, each extension, the spine. `make lint` fails above the numbers
in pyproject.toml (`[tool.areal.size]`), which a commit raises by hand and explains.

The core is what imports lead to from run.py, the roles and the files that are started as processes of their own.
Imports within functions count. Extensions are folders; the tools are the rest. The spine is the way of a sample from
its permit to the optimizer's step, a list that is kept by hand.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocols", "actors", "areal")
# Extensions that are actors, or parts of actors.
ROOMS = ("direct", "evaluator", "gateway", "scorer", "terminal", "ways_back")
ROLES = ("master", "trainer", "generator", "rollout_manager", "reward")
# Parts of the engine in vLLM's process, and the workers of reward pools.
PROCESSES = (
    "areal.generation.gathering_scheduler",
    "areal.generation.vllm_worker",
    "areal.rewards.worker",
)
# The losses, which the trainer imports by name.
LOSSES = "areal.training.algorithms."


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


def parts(root: Path) -> dict[str, dict[str, Path]]:
    """All modules of the product by the part that they belong to: core, tools, or the name of an extension."""
    files = modules(root)
    starts = ["run", "actors.start.__main__", *PROCESSES, *(f"actors.{role}" for role in ROLES)]
    starts += [f"actors.{role}.{role}" for role in ROLES]
    starts += [name for name in files if name.startswith(LOSSES)]
    core = reached({name: file for name, file in files.items() if not extension_of(name)}, starts)
    result: dict[str, dict[str, Path]] = {"core": {}, "tools": {}}
    for name, file in files.items():
        part = extension_of(name) or ("core" if name in core else "tools")
        result.setdefault(part, {})[name] = file
    return result


def extension_of(module: str) -> str | None:
    """The extension that a module belongs to, if any: its folder below areal/extensions, or its room in actors."""
    if module.startswith("areal.extensions."):
        return module.split(".")[2]
    room = module.partition("actors.")[2].partition(".")[0]
    return room if room in ROOMS else None


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main(root: Path = ROOT) -> int:
    """Prints the numbers. Returns 1 if one is above its limit, else 0."""
    size = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["areal"]["size"]
    counts = {part: lines(files.values()) for part, files in parts(root).items()}
    extensions = {part: count for part, count in counts.items() if part not in ("core", "tools")}
    spine = [root / name for name in size["spine"]]
    measured = {
        "core": counts["core"],
        "tools": counts["tools"],
        "extensions": sum(extensions.values()),
        "spine_files": len(spine),
        "spine_lines": lines(spine),
    }
    for name, count in measured.items():
        verdict = "" if count <= size[name] else ": shrink it, or raise the limit and explain that in the commit"
        print(f"{name}: {count} of at most {size[name]}{verdict}")
    print("extensions: " + ", ".join(f"{name} {count}" for name, count in sorted(extensions.items())))
    return int(any(count > size[name] for name, count in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
