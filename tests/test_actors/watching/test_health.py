"""`python -m areal health`: what probes and waiting scripts learn from its exit code."""

from __future__ import annotations

import asyncio

import pytest
from support.networks import keys_folder, network

from actors.watching.health import UnhealthyError, until_healthy
from areal.__main__ import main
from areal.base.processes import KEYS
from protocols.bus import Bus
from protocols.membership_messages import Status


@pytest.fixture
async def bus():
    bus = Bus("monitor/0#test", network())
    yield bus
    await bus.close()


@pytest.fixture
async def master(free_port):
    """The address of a master that answers with `members`, which the test may change."""
    members: list[dict] = []

    async def answer(request) -> Status:
        return Status(values={"run": "r", "version": 3, "steps": 9, "waiting": "nobody waits", "members": members})

    bus = Bus("master/0#stand-in", network())
    bus.serve(f"tcp://127.0.0.1:{free_port}", answer, print)
    yield f"tcp://127.0.0.1:{free_port}", members
    await bus.close()


async def test_a_master_that_answers_is_healthy(bus, master):
    address, _ = master
    assert await until_healthy(bus, address, None, 30) == "r is at step 3 of 9: nobody waits"


async def test_an_actor_that_is_stale_or_absent_is_not_healthy(bus, master):
    address, members = master
    members.append({"identity": "generator/1#a", "state": "stale"})
    with pytest.raises(UnhealthyError, match="generator/1 is stale"):
        await until_healthy(bus, address, "generator/1", 2)
    with pytest.raises(UnhealthyError, match="no generator/0 in the run r"):
        await until_healthy(bus, address, "generator/0", 2)


async def test_who_waits_learns_of_an_actor_that_becomes_healthy(bus, master):
    address, members = master
    waiting = asyncio.create_task(until_healthy(bus, address, "trainer/0", 60))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    members.append({"identity": "trainer/0#b", "state": "healthy"})
    assert (await waiting).startswith("r is at step 3")


def test_without_a_master_the_exit_code_is_1_and_one_sentence_says_so(free_port, capsys, monkeypatch):
    monkeypatch.setenv(KEYS, keys_folder())
    address = f"tcp://127.0.0.1:{free_port}"
    assert main(["health", "--master", address, "--wait", "0.1"]) == 1
    assert capsys.readouterr().err == f"No master answers at {address} (waited 0.1 s).\n"


def test_beyond_this_machine_it_wants_the_keys_too(capsys, monkeypatch):
    monkeypatch.delenv(KEYS, raising=False)
    assert main(["health", "--master", "tcp://10.0.0.1:1"]) == 2
    assert "links need keys" in capsys.readouterr().err


def test_without_a_run_in_the_folder_the_exit_code_is_1(tmp_path, capsys):
    assert main(["health", "--master", f"{tmp_path}", "--wait", "0"]) == 1
    assert "No run is in progress" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--master", "node0"], "write tcp://HOST:PORT"),
        (["--master", "tcp://127.0.0.1:1", "--actor", "gen/0"], "'gen/0' names no actor: write ROLE/INDEX"),
        (["--master", "tcp://127.0.0.1:1", "--actor", "generator"], "'generator' names no actor: write ROLE/INDEX"),
    ],
)
def test_an_address_or_an_actor_that_is_none_is_the_users_mistake(capsys, arguments, sentence):
    assert main(["health", *arguments]) == 2
    assert sentence in capsys.readouterr().err
