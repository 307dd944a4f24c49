"""What lies in configs/deploy: every command in it is one that run.py or `python -m areal` takes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.start.run_command import parse
from areal.__main__ import command_line
from areal.base.processes import KEYS
from areal.config import load_config
from areal.extensions.launch.master import words_of

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "configs" / "deploy"
MASTER = "areal.extensions.launch.master"


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parsed arguments of a command that starts a part of a run. Fails where it would be refused."""
    words = [re.sub(r"\$[({]?\w+[)}]?", "0", word.replace("${MASTER}", "tcp://h:1")) for word in words]
    if words[:2] == ["sh", "-c"]:
        words = shlex.split(words[2])
    if "areal" in words:
        return command_line().parse_args(words[words.index("areal") + 1 :])
    if MASTER in words:
        folder, address, run = words[words.index(MASTER) + 1 :]
        words = ["run.py", *words_of(Path(folder), address, Path(run))]
    if "torchrun" in words[0]:
        words = words[words.index("--") + 1 :]
    start = next(n for n, word in enumerate(words) if word.endswith("run.py"))
    monkeypatch.setattr(sys, "argv", words[start:])
    arguments = parse()
    if arguments.role == ["master"]:
        load_config(ROOT / arguments.config, arguments.overrides)
        assert any(override.startswith("master.address=tcp://") for override in arguments.overrides)
    else:
        assert arguments.role and arguments.master.startswith("tcp://") and not arguments.overrides
    return arguments


def compose_services() -> dict[str, dict]:
    return yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command in the YAML files and units, with where it is from."""
    for name, service in compose_services().items():
        if name == "keys":
            continue
        yield f"compose-{name}", shlex.split(service["command"])
        if "healthcheck" in service:
            yield f"compose-{name}-health", service["healthcheck"]["test"][1:]
    for unit in sorted((DEPLOY / "systemd").iterdir()):
        for line in re.findall(
            r"^Exec\w+=(.*)$", unit.read_text().replace("--role %i", "--role trainer"), re.MULTILINE
        ):
            yield f"systemd-{unit.stem}", shlex.split(line)


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_a_command_is_one_that_the_programs_take(words, monkeypatch):
    check_command(words, monkeypatch)


def test_in_compose_everybody_has_the_keys_and_nobody_the_rights_of_the_host():
    services = compose_services()
    keys = services.pop("keys")
    assert keys["volumes"] == ["keys:/keys"] and "python -m areal keys /keys" in keys["command"]
    assert services["master"]["depends_on"] == {"keys": {"condition": "service_completed_successfully"}}
    for name, service in services.items():
        assert service["environment"][KEYS] == "/keys" and "keys:/keys:ro" in service["volumes"]
        assert "ipc" not in service and "privileged" not in service and service["cap_drop"] == ["ALL"]
        # The sandbox needs these; the roles in `others` use it.
        extra = ["seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"] if name == "others" else []
        assert service["security_opt"] == ["no-new-privileges:true", *extra]


def test_the_image_runs_as_a_user_who_owns_what_is_written_and_nothing_else():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    assert re.findall(r"^USER (.*)$", lines, re.MULTILINE) == ["1000:1000"]
    owned = re.findall(r"install -d -o areal -g areal -m 700 (.*)", lines)[0].split()
    mounts = {volume.split(":")[1] for service in compose_services().values() for volume in service["volumes"]}
    assert mounts <= {str(Path("/areal") / path) for path in owned}  # an empty volume takes the owner of the folder


def test_in_compose_no_two_services_share_a_device():
    services = compose_services()
    groups = [
        device["device_ids"]
        for service in services.values()
        for device in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    ]
    assert sorted(sum(groups, [])) == [str(n) for n in range(8)]
