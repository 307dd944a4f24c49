"""Tasks in Harbor's folder layout, as rows: `harbor:FOLDER` is a folder of tasks, or a single task.

A task is a folder with `instruction.md`, `task.toml`, `environment/Dockerfile` and `tests/test.sh`, which writes the
reward into /logs/verifier/reward.txt. A `solution` is not read. As in Harbor, the tests run in the policy's own sandbox
and may look at everything there.
"""

import hashlib
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal.base.errors import UserError, explain
from areal.config.data_section import SourceConfig
from areal.data.prompt_sources import Table
from areal.data.sources import table
from areal.extensions.sandboxes.sandbox_tasks import TaskFolder

# The last folder that a Dockerfile works in, and the image of a Dockerfile that does nothing else.
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)\s*$", re.MULTILINE | re.IGNORECASE)
_ONLY_FROM = re.compile(r"\s*FROM\s+(\S+)\s*(?:WORKDIR\s+\S+\s*)*", re.IGNORECASE)


def rows(folder: Path, what: str) -> list[dict[str, Any]]:
    """Return the rows of all tasks, by name, with the fields in README.md. Raises UserError."""
    folders = (
        [folder] if (folder / "task.toml").is_file() else sorted(file.parent for file in folder.glob("*/task.toml"))
    )
    if not folders:
        raise UserError(f"{what} names {folder.absolute()}, without tasks: name a folder of folders with task.toml")
    return [_row(task) for task in folders]


def _row(task: Path) -> dict[str, Any]:
    with explain((OSError, tomllib.TOMLDecodeError), f"The task {task} cannot be read ({{why}}): correct it"):
        settings = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))
        prompt = (task / "instruction.md").read_text(encoding="utf-8")
        docker = file.read_text(encoding="utf-8") if (file := task / "environment/Dockerfile").is_file() else ""
        # Tasks of the same name, or of a changed folder, do not share an image.
        content = hashlib.blake2b(digest_size=6)
        for file in sorted((task / "environment").rglob("*")):
            content.update(f"{file.relative_to(task)}\n".encode() + (file.read_bytes() if file.is_file() else b""))
    if not (task / "tests/test.sh").is_file() or (task / "environment/docker-compose.yaml").is_file():
        raise UserError(f"The task {task} has no tests/test.sh, or needs several containers: remove it")
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    if verifier.get("environment_mode", "shared") != "shared" or verifier.get("environment"):
        raise UserError(f"The task {task} has a container of its own for the tests, which is not supported: remove it")
    image = environment.get("docker_image") or ((only := _ONLY_FROM.fullmatch(docker)) and only[1])
    if not image and not docker:
        raise UserError(f"The task {task} has neither environment/Dockerfile nor environment.docker_image: add one")
    memory = f"{size}m" if (size := environment.get("memory_mb")) else environment.get("memory")
    variables = " ".join(shlex.quote(f"{name}={value}") for name, value in verifier.get("env", {}).items())
    return {
        "prompt": prompt,
        "name": task.name,
        "image": image or f"areal-harbor-{task.name.lower()}:{content.hexdigest()}",
        "build": None if image else TaskFolder.inside(task, "environment"),
        "folder": environment.get("workdir") or next(reversed(_WORKDIR.findall(docker)), None),
        "isolated": False,
        "limits": {"memory": memory, "cpus": environment.get("cpus")},
        "tests_folder": TaskFolder.inside(task, "tests"),
        "command": f"mkdir -p /logs/verifier && env {variables} bash /tests/test.sh",
        "reward_file": "/logs/verifier/reward.txt",
        "seconds": verifier.get("timeout_sec"),
    }


def open_source(config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str) -> Table:
    """Open the source `harbor:FOLDER`."""
    config = config.model_copy(update={"prompt_key": "prompt", "answer_key": None})
    return table(config, rows(Path(name).expanduser(), what), what)
