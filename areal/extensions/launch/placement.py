"""The placement of a run's processes on nodes and devices. Computed from the configuration alone, no I/O.

The trainer has the first devices, on one node or in equal parts on the fewest nodes. Generators and scorers follow,
each on a single node. Roles without devices go round the nodes, from node 0 on. Node 0 also has the master and the
evaluator: the run needs this node in any case.

>>> from areal.config import load_config
>>> nodes = ClusterConfig(nodes={"gpu": {"count": 2, "devices": 8}})
>>> placed = place(load_config("configs/deploy/run.yaml"), nodes)
>>> [(process.role, process.node, process.devices) for process in placed.processes[:2]]
[('trainer', 0, (0, 1, 2, 3)), ('generator', 0, (4, 5))]
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.table import Table

from areal.base.errors import UserError
from areal.config import Config
from areal.config.roles import ROLES, Role
from areal.extensions.launch.cluster import ClusterConfig


@dataclass(frozen=True, slots=True)
class Node:
    """A node. number: from 0, over all kinds. devices: the number of its devices."""

    number: int
    kind: str
    devices: int
    roles: tuple[str, ...]

    def takes(self, role: str) -> bool:
        return not self.roles or role in self.roles


@dataclass(frozen=True, slots=True)
class Process:
    """A role on a node. devices: numbers of devices of the node; a trainer has a device for each rank on the node.
    options: further options of `areal run --role`."""

    role: str
    node: int
    devices: tuple[int, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The role, and the values of its options: `scorer-wise`. Processes with equal names are alike."""
        return "-".join((self.role, *self.options[1::2]))


@dataclass(frozen=True, slots=True)
class Placement:
    """All nodes and processes. device: `gpu` or `cpu`, the meaning of the devices' numbers."""

    nodes: tuple[Node, ...]
    processes: tuple[Process, ...]
    device: str

    def of(self, role: str) -> list[Process]:
        """Return the processes of a role, by node. The trainer has a process for each of its nodes."""
        return [process for process in self.processes if process.role == role]

    def on(self, node: int) -> list[Process]:
        return [process for process in self.processes if process.node == node]

    def table(self) -> Table:
        """Return a table of the roles and the idle devices of each node."""
        table = Table("node", "kind", "role", "devices", box=None)
        for node in self.nodes:
            here = self.on(node.number)
            idle = node.devices - sum(len(process.devices) for process in here)
            rows = [("master", "")] if node.number == 0 else []
            rows += [(_name(process), _numbers(process.devices)) for process in here]
            rows += [(f"(idle: {idle})", "")] if idle else []
            for place, row in enumerate(rows or [("(nothing)", "")]):
                table.add_row(*(("", "") if place else (f"{node.number}", node.kind)), *row)
        return table


def _name(process: Process) -> str:
    ranks = f", {len(process.devices)} ranks" if process.role == "trainer" else ""
    return " ".join((process.role, *process.options[1::2])) + ranks


def _numbers(devices: tuple[int, ...]) -> str:
    return f"{devices[0]}-{devices[-1]}" if len(devices) > 2 else ",".join(map(str, devices))


@dataclass
class _Room:
    """The free devices of each node."""

    nodes: tuple[Node, ...]
    taken: dict[int, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)

    def free(self, node: Node) -> int:
        return node.devices - self.taken.get(node.number, 0)

    def take(self, node: Node, count: int) -> tuple[int, ...]:
        first = self.taken.get(node.number, 0)
        self.taken[node.number] = first + count
        return tuple(range(first, first + count))

    def with_room(self, role: str, count: int) -> list[Node]:
        return [node for node in self.nodes if node.takes(role) and self.free(node) >= count]

    def next_node(self, role: str) -> Node:
        """Return a node for a role without devices: the nodes take turns, from the first on. Raises UserError."""
        nodes = [node for node in self.nodes if node.takes(role)]
        if not nodes:
            raise UserError(f"No node of cluster.nodes takes the role {role}: add it to the roles of a kind.")
        turn = self.turns[role] = self.turns.get(role, -1) + 1
        return nodes[turn % len(nodes)]


def place(config: Config, cluster: ClusterConfig) -> Placement:
    """Place all processes of a run but its master. Raises UserError if the nodes have too few devices."""
    if config.colocate:
        raise UserError("colocate=true shares the devices of one machine: leave it out, or start the run by areal run.")
    nodes = tuple(_nodes(cluster))
    room = _Room(nodes)
    processes = tuple(process for role in ROLES.values() for process in _placed(role, config, room))
    return Placement(nodes, processes, cluster.device)


def _nodes(cluster: ClusterConfig) -> Iterator[Node]:
    number = 0
    for kind, nodes in cluster.nodes.items():
        for _ in range(nodes.count):
            yield Node(number, kind, nodes.devices, tuple(nodes.roles))
            number += 1


def _placed(role: Role, config: Config, room: _Room) -> Iterator[Process]:
    if role.name == "trainer" and role.started(config):
        yield from _ranks(config.trainer.ranks, room)
        return
    for index in range(role.started(config)):
        count, options = role.devices(config, index), tuple(role.options(config, index))
        if not count:
            node = room.nodes[0] if role.single or role.name == "evaluator" else room.next_node(role.name)
            yield Process(role.name, node.number, (), options)
            continue
        if not (nodes := room.with_room(role.name, count)):
            raise UserError(_too_few(role, config, room, count))
        yield Process(role.name, nodes[0].number, room.take(nodes[0], count), options)


def _ranks(ranks: int, room: _Room) -> Iterator[Process]:
    """Yield equal numbers of ranks on the fewest nodes: torchrun starts equal numbers everywhere."""
    for count in range(1, ranks + 1):
        nodes = [] if ranks % count else room.with_room("trainer", ranks // count)
        if len(nodes) >= count > 0:
            for node in nodes[:count]:
                yield Process("trainer", node.number, room.take(node, ranks // count))
            return
    largest = max((room.free(node) for node in room.nodes if node.takes("trainer")), default=0)
    raise UserError(
        f"trainer.ranks is {ranks}, which cluster.nodes cannot hold as equal parts of at most {largest} a node: change "
        f"trainer.ranks, or add nodes."
    )


def _too_few(role: Role, config: Config, room: _Room, count: int) -> str:
    free = ", ".join(f"{room.free(node)}" for node in room.nodes if node.takes(role.name)) or "none"
    needs = role.needed_devices(config, role.started(config))
    largest = max(node.devices for node in room.nodes)
    if count > largest:
        return f"One {role.name} needs {count} devices of one node, but the largest node has {largest}: lower it."
    return (
        f"{needs}, and the nodes for them have {free} free in this order: add nodes to cluster.nodes, or lower "
        f"{role.name}.count.".capitalize()
    )
