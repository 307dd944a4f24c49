"""The section `cluster` of a configuration: the nodes on which `areal launch` places a run."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from areal.config.roles import ROLES
from areal.config.section import Section


class NodesConfig(Section):
    """Nodes of the same kind."""

    count: int = Field(1, ge=1, description="number of nodes")
    devices: int = Field(ge=0, description="GPUs of a node; with cluster.device=cpu, its trainer ranks and engines")
    roles: list[str] = Field(default_factory=list, description="the roles that these nodes are for; empty: all")
    select: dict[str, str] = Field(default_factory=dict, description="Kubernetes: labels that such a node has")

    def conflicts(self) -> Iterator[str]:
        for name in self.roles:
            if name not in ROLES:
                yield f"cluster.nodes names the role {name!r}, but roles are {', '.join(ROLES)}: correct it"


class ClusterConfig(Section):
    """The nodes on which `areal launch` places and starts the run."""

    nodes: dict[str, NodesConfig] = Field(min_length=1)
    """nodes by the name of their kind, such as {gpu: {count: 2, devices: 8}}. The first node has the master"""
    device: Literal["gpu", "cpu"] = Field("gpu", description="the device of the engines and the trainer")
    queue: str | None = None
    """Slurm's partition, or Kueue's local queue; null: the default partition, or no queue"""
    time: int | str | None = None
    """Slurm's time limit, such as 24:00:00, or minutes; null: the partition's limit"""
    image: str | None = None
    """container image. Slurm: a file .sif for apptainer, or a name for pyxis; Kubernetes and SkyPilot: a name"""
    mounts: list[str] = Field(default_factory=list, description="folders that a container on Slurm sees, as they are")
    volume: str = Field("areal-runs", description="Kubernetes: the PersistentVolumeClaim with the run folder")
    storage: str = Field("500Gi", description="Kubernetes: size of the volume, which is made if missing")
    accelerator: str = Field("H100", description="SkyPilot's name of the GPUs")
    resources: dict[str, int] = Field(default_factory=dict)
    """Kubernetes: resources of a pod with all devices of a node, such as {rdma/hca_shared_devices_a: 1}"""
    environment: dict[str, str | None] = Field(default_factory=dict)
    """variables of all roles; null: the value in the environment of `areal launch`"""
    options: list[str] = Field(default_factory=list, description="further options of sbatch, such as --account=NAME")
    setup: str | None = Field(None, description="shell commands that every node does first, such as `module load cuda`")
    start_seconds: float = Field(600.0, gt=0, description="Ray: how long a launch waits for room for all processes")
    rendezvous_port: int = Field(
        29400, ge=1, le=65535, description="where the ranks of a trainer on several nodes meet"
    )

    def conflicts(self) -> Iterator[str]:
        for kind in self.nodes:
            if not kind.replace("-", "").isalnum() or not kind.islower():
                yield f"cluster.nodes has a kind {kind!r}: name it by small letters, digits and `-`"
        if self.device == "gpu" and not any(nodes.devices for nodes in self.nodes.values()):
            yield "cluster.nodes has no devices: set devices, or cluster.device=cpu"
