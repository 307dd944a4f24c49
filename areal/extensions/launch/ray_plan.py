"""The plan of a launch for the nodes of a Ray cluster, and the names of the files in the launch's folder."""

from typing import Any

from areal.extensions.launch.placement import Process
from areal.extensions.launch.targets import FINAL, FINAL_OF_MASTER, Launch

PLAN, LOG, STOP, ADDRESS, RENDEZVOUS = "ray.json", "ray.log", "stop", "address", "rendezvous"


def plan_of(launch: Launch) -> dict[str, Any]:
    """Return the facts of a launch for all nodes, as JSON values."""
    leads = launch.placement.of("trainer")[:1]
    processes = [
        {
            "name": "master",
            "command": launch.master(str(launch.folder), f"${ADDRESS}"),
            "final": FINAL_OF_MASTER,
            "leads": False,
            "resources": {"CPU": 1},
        }
    ]
    for number, process in enumerate(launch.placement.processes):
        count = sum(earlier.role == process.role for earlier in launch.placement.processes[:number])
        processes.append(
            {
                "name": f"{process.role}-{count}",
                "command": launch.command([process], f"${ADDRESS}", f"${RENDEZVOUS}"),
                "final": FINAL,
                "leads": process in leads,
                "resources": _resources(launch, process),
            }
        )
    return {
        "project": str(launch.project),
        "environment": {**launch.environment, "AREAL_KEYS": str(launch.keys)},
        "port": launch.port,
        "rendezvous_port": launch.cluster.rendezvous_port,
        "start_seconds": launch.cluster.start_seconds,
        "processes": processes,
    }


def _resources(launch: Launch, process: Process) -> dict[str, int]:
    devices = len(process.devices)
    return {"CPU": 1, "GPU": devices} if devices and launch.cluster.device == "gpu" else {"CPU": max(1, devices)}
