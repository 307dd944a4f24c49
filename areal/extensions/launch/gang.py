"""The nodes of a job meet before anything starts, as a program on each node: FOLDER NODE NODES HEAD PORT.

Node 0 listens, and writes a file into FOLDER/gang, visible to all nodes. Each other node connects to node 0 at HEAD and
compares clocks, and node 0 connects back, since actors listen on free ports. Then node 0 writes FOLDER/address
(tcp://HOST:PORT, for the master) and FOLDER/hosts (a line for each node). A failure prints a sentence to standard
error, and gives the exit code 2.
"""

import json
import secrets
import socket
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from areal.base.errors import UserError, explain
from areal.storage.disk import replace

SECONDS = 120.0
"""Seconds for which nodes wait for each other: Slurm starts all steps within a minute, images take longer."""
CONNECT_SECONDS, LOOK_SECONDS = 10.0, 0.2
CLOCK_SECONDS = 5.0
"""The largest difference between two clocks, besides the time for asking."""
MOST_BYTES = 4096
BOOT = Path("/proc/sys/kernel/random/boot_id")
GANG, HEAD, ADDRESS, HOSTS = "gang", "head.json", "address", "hosts"


def meet(folder: Path, node: int, nodes: int, head: str, port: int, seconds: float = SECONDS) -> None:
    """Meet the other nodes. Raises UserError."""
    if node == 0:
        _lead(folder, nodes, port, time.monotonic() + seconds)
    else:
        _follow(folder, node, head, time.monotonic() + seconds)


def _lead(folder: Path, nodes: int, port: int, until: float) -> None:
    token, hosts = secrets.token_hex(16), {0: "127.0.0.1"}
    with socket.create_server(("", 0)) as server:
        with explain(OSError, f"Node 0 cannot write to {folder} ({{strerror}}): let this user write there."):
            (folder / GANG).mkdir(exist_ok=True)
            facts = {"token": token, "port": server.getsockname()[1], "boot": BOOT.read_text()}
            replace(folder / GANG / HEAD, json.dumps(facts), mode=0o600)
        while len(hosts) < nodes:
            if (seconds := until - time.monotonic()) <= 0:
                absent = ", ".join(str(node) for node in range(nodes) if node not in hosts)
                raise UserError(
                    f"Of {nodes} nodes, {absent} did not come in time: look for their sentences above, "
                    f"and let node 0 accept connections from them."
                )
            server.settimeout(seconds)
            with suppress(OSError, ValueError, KeyError, TypeError), closing(server.accept()[0]) as link:
                _greet(link, token, hosts)
    host = hosts[0]
    replace(folder / ADDRESS, f"tcp://{host}:{free_port(host, port)}\n")
    replace(folder / HOSTS, "".join(f"{hosts[node]}\n" for node in range(nodes)))


def _greet(link: socket.socket, token: str, hosts: dict[int, str]) -> None:
    """Answer a node: connect to it, and note its address and the address at which it reached this node."""
    link.settimeout(CONNECT_SECONDS)
    hello = _receive(link)
    if hello.get("token") != token:
        return
    peer = link.getpeername()[0]
    sentence = ""
    try:
        socket.create_connection((peer, hello["port"]), CONNECT_SECONDS).close()
    except OSError as error:
        sentence = (
            f"Node 0 cannot connect to node {hello['node']} at {peer} ({error.strerror or error}): open the ports "
            f"above 1024 between the nodes."
        )
    _send(link, {"time": time.time(), "sentence": sentence})
    if not sentence:
        hosts[int(hello["node"])], hosts[0] = peer, link.getsockname()[0]


def _follow(folder: Path, node: int, head: str, until: float) -> None:
    facts = _head_facts(folder, node, until)
    with explain(OSError, f"Node {node} cannot write to {folder} ({{strerror}}): let this user write there."):
        (folder / GANG / f"{node}").write_text("")
    with socket.create_server(("", 0)) as server:
        hello = {"token": facts["token"], "node": node, "port": server.getsockname()[1]}
        begun = time.time()
        answer = _ask((head, facts["port"]), hello, facts["boot"], node, until)
        took = time.time() - begun
    if answer["sentence"]:
        raise UserError(answer["sentence"])
    offset = answer["time"] - (begun + took / 2)
    if abs(offset) > CLOCK_SECONDS + took / 2:
        raise UserError(f"The clock of node {node} is {-offset:+.0f} s off that of node 0: set both by NTP (chrony).")


def _head_facts(folder: Path, node: int, until: float) -> dict[str, Any]:
    """Return node 0's file once it is there. The job has removed the files of an earlier start before."""
    while time.monotonic() < until:
        try:
            facts: dict[str, Any] = json.loads((folder / GANG / HEAD).read_text())
            return facts
        except (OSError, ValueError):
            time.sleep(LOOK_SECONDS)
    raise UserError(
        f"Node {node} ({socket.gethostname()}) does not see what node 0 has written to {folder}: give a run_dir that "
        f"all nodes share."
    )


def _ask(address: tuple[str, int], hello: dict[str, Any], boot: str, node: int, until: float) -> dict[str, Any]:
    """Say hello to node 0 until it answers. Raises UserError."""
    with explain(
        OSError, f"Node {node} does not know the name {address[0]} of node 0 ({{strerror}}): correct its DNS."
    ):
        target = str(socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][4][0])
    if target.startswith("127.") and boot != BOOT.read_text():
        raise UserError(f"On node {node} the name {address[0]} of node 0 is {target}, itself: correct /etc/hosts.")
    while True:
        try:
            with closing(socket.create_connection((target, address[1]), CONNECT_SECONDS)) as link:
                _send(link, hello)
                return _receive(link)
        except (OSError, ValueError) as error:
            if time.monotonic() > until:
                raise UserError(
                    f"Node {node} cannot connect to node 0 at {address[0]} ({error}): open the ports above 1024 "
                    f"between the nodes."
                ) from None
            time.sleep(LOOK_SECONDS)


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def _receive(link: socket.socket) -> dict[str, Any]:
    link.settimeout(2 * CONNECT_SECONDS)
    with link.makefile("rb") as lines:
        message = json.loads(lines.readline(MOST_BYTES) or b"{}")
    return message if isinstance(message, dict) else {}


def free_port(host: str, port: int) -> int:
    """Return the port, or a free port if another process of the host, such as another run's master, has it."""
    for candidate in (port, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return port


def main() -> int:
    folder, node, nodes, head, port = sys.argv[1:6]
    try:
        meet(Path(folder), int(node), int(nodes), head, int(port))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
