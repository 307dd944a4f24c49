"""Nodes meet before a run starts, or one sentence says what is between them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.base.errors import UserError
from areal.extensions.launch import gang


class Nodes:
    """Nodes of one machine that meet, each in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sentences: dict[int, str] = {}

    def meet(self, nodes: int, *present: int, folder: Callable[[int], Path] | None = None, seconds: float = 20) -> None:
        def join(node: int) -> None:
            try:
                gang.meet(folder(node) if folder else self.folder, node, nodes, "127.0.0.1", 5555, seconds)
            except UserError as error:
                self.sentences[node] = str(error)

        threads = [threading.Thread(target=join, args=[node]) for node in present]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_nodes_that_reach_each_other_know_the_address_of_the_master_and_of_each_node(nodes):
    nodes.meet(3, 0, 1, 2)
    assert not nodes.sentences
    assert (nodes.folder / "address").read_text().startswith("tcp://127.0.0.1:")
    assert (nodes.folder / "hosts").read_text().split() == ["127.0.0.1"] * 3


def test_the_master_gets_another_port_if_another_run_has_it(free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        assert gang.free_port("127.0.0.1", free_port) != free_port
    assert gang.free_port("127.0.0.1", free_port) == free_port


def test_half_of_the_nodes_start_nothing(nodes):
    nodes.meet(4, 0, 1, seconds=1)
    assert nodes.sentences.keys() == {0} and "Of 4 nodes, 2, 3 did not come" in nodes.sentences[0]
    assert not (nodes.folder / "address").exists()


def test_a_folder_that_a_node_does_not_share_is_named(nodes, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    nodes.meet(2, 0, 1, folder=lambda node: elsewhere if node else nodes.folder, seconds=1)
    assert f"does not see what node 0 has written to {elsewhere}: give a run_dir that all" in nodes.sentences[1]


def test_clocks_that_are_apart_are_named(nodes, monkeypatch):
    class Apart:
        """Node 0 answers in the main thread's clock; the other nodes ask in one that is an hour ahead."""

        monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

        def time(self) -> float:
            return time.time() + 3600 * (threading.current_thread().name == "ahead")

    monkeypatch.setattr(gang, "time", Apart())
    leader = threading.Thread(target=gang.meet, args=(nodes.folder, 0, 2, "127.0.0.1", 5555, 20))
    leader.start()

    def ahead() -> None:
        threading.current_thread().name = "ahead"
        nodes.meet(2)
        with pytest.raises(UserError, match=r"The clock of node 1 is \+3600 s off that of node 0"):
            gang.meet(nodes.folder, 1, 2, "127.0.0.1", 5555, 20)
        nodes.sentences[1] = "seen"

    follower = threading.Thread(target=ahead)
    follower.start()
    follower.join()
    leader.join()
    assert nodes.sentences == {1: "seen"}


def test_a_port_that_node_0_cannot_reach_is_named(nodes, monkeypatch):
    connect = socket.create_connection

    def refused(address, *options):
        if threading.current_thread().name == "leader":
            raise ConnectionRefusedError(111, "Connection refused")
        return connect(address, *options)

    monkeypatch.setattr(gang.socket, "create_connection", refused)
    with pytest.raises(UserError, match="Of 2 nodes, 1 did not come"):
        leader = threading.Thread(target=nodes.meet, name="x", args=(2, 1))
        leader.start()
        threading.current_thread().name = "leader"
        try:
            gang.meet(nodes.folder, 0, 2, "127.0.0.1", 5555, 2)
        finally:
            threading.current_thread().name = "MainThread"
            leader.join()
    assert "Node 0 cannot connect to node 1 at 127.0.0.1 (Connection refused): open the ports" in nodes.sentences[1]


def test_who_does_not_know_the_token_is_nobody(nodes):
    leader = threading.Thread(target=lambda: nodes.meet(2, 0, seconds=3))
    leader.start()
    head = nodes.folder / "gang" / "head.json"
    while not head.exists():
        time.sleep(0.01)
    facts = json.loads(head.read_text())
    for line in (b"", b"[]\n", b'{"token": "other", "node": 1, "port": 1}\n', b"x" * 5000 + b"\n"):
        with socket.create_connection(("127.0.0.1", facts["port"])) as link:
            link.sendall(line)
    nodes.meet(2, 1)
    leader.join()
    assert not nodes.sentences
