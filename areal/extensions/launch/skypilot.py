"""The target `skypilot`: a task of SkyPilot, which makes the nodes, and starts the roles of each node."""

import json
from pathlib import Path
from typing import Any

import yaml

from areal.base.errors import UserError
from areal.extensions.launch.scheduler_program import call
from areal.extensions.launch.scripts import render, values_of
from areal.extensions.launch.targets import Launch

TASK = "skypilot.yaml"
COMMAND_SECONDS = 3600.0
"""Seconds for SkyPilot to make the nodes."""
DISK_GB = 512


class _Literal(yaml.SafeDumper):
    """Writes scripts line by line."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Literal.add_representer(str, _Literal.represent_str)


class SkyPilot:
    def check(self, launch: Launch) -> None:
        if len(launch.cluster.nodes) > 1 or launch.cluster.device == "cpu":
            raise UserError("SkyPilot makes equal nodes with GPUs: give cluster.nodes one kind, and devices.")
        if launch.config.weights.transport == "folder":
            raise UserError("Nodes of SkyPilot's share no folder: set weights.transport=stream.")
        if any(process.node for process in launch.placement.of("trainer")):
            raise UserError(
                "All ranks of a trainer write to the run folder, and nodes of SkyPilot's share none: lower "
                "trainer.ranks to the devices of one node."
            )

    def render(self, launch: Launch) -> dict[str, str]:
        cluster, nodes = launch.cluster, len(launch.placement.nodes)
        resources: dict[str, Any] = {"accelerators": f"{cluster.accelerator}:{launch.placement.nodes[0].devices}"}
        resources["disk_size"] = DISK_GB
        if cluster.image:
            resources["image_id"] = f"docker:{cluster.image}"
        values = values_of(launch, "python", str(Path("runs", launch.config.name)))
        prepare = [] if cluster.image else ["make setup EXTRA=cuda"]
        way = "cd /areal\n" if cluster.image else "export PATH=$PWD/.venv/bin:$PATH\n"
        task = {
            "name": name_of(launch),
            "num_nodes": nodes,
            "resources": resources,
            **({} if cluster.image else {"workdir": str(launch.project)}),
            "file_mounts": {"~/.areal-launch": str(launch.folder)},
            "envs": launch.environment,
            "setup": "\n".join([*prepare, *filter(None, [cluster.setup])]) or "true",
            "run": way + render("skypilot.sh.jinja", nodes=range(nodes), **values),
        }
        return {TASK: yaml.dump(task, Dumper=_Literal, sort_keys=False, width=120)}

    def submit(self, launch: Launch) -> str:
        name = name_of(launch)
        _sky("launch", "--yes", "--detach-run", "--cluster", name, str(launch.folder / TASK))
        return name

    def status(self, job: str) -> str:
        text = _sky("status", "--output", "json", job)
        rows = json.loads(text or "[]")
        return " ".join(str(row.get("status", "")) for row in rows)

    def logs(self, launch: Launch, job: str) -> str:
        return f"sky logs {job}"

    def stop(self, job: str, folder: Path) -> None:
        _sky("cancel", "--yes", "--all", job)  # the nodes stay, until `sky down`


def name_of(launch: Launch) -> str:
    return f"areal-{launch.config.name}".lower().replace("_", "-").replace(".", "-")


def _sky(*words: str) -> str:
    """Return the output of SkyPilot. Raises UserError."""
    result = call(
        "sky",
        *words,
        seconds=COMMAND_SECONDS,
        missing="There is no sky here: pip install 'skypilot[...]' for your cloud.",
        slow=f"sky {words[0]} took more than {COMMAND_SECONDS:g} s: see `sky status`.",
    )
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip() or "no reason").splitlines()[-1].rstrip(".")
        raise UserError(f"SkyPilot refuses it ({last:.300}): correct the section cluster, or see `sky check`.")
    return result.stdout
