"""Where actors listen, what others call them, and that nothing listens beyond this machine without keys unless told."""

import os
import socket
import stat
from typing import Any

import pytest
from support.networks import keys_folder

from actors.runtime import bound_addresses as addresses
from actors.runtime.bound_addresses import ListenAddress, check_place, find_master, open_network, take_folder
from areal.base.errors import UserError
from areal.base.processes import KEYS
from areal.config import load_config
from protocols.addresses import is_loopback, on_this_machine, reachable
from protocols.security import make_keys

MASTER = "tcp://127.0.0.1:5999"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    monkeypatch.delenv(KEYS, raising=False)


@pytest.fixture
def config(tmp_path):
    return load_config(
        None,
        [
            f"run_dir={tmp_path / 'runs'}",
            "name=mine",
            "model=quickstart",
            "steps=1",
            "batch_size=1",
            "group_size=1",
            "data.source=addition",
            "sampling.max_new_tokens=8",
            "reward.functions=addition",
            "trainer.minibatches=1",
            f"master.address={MASTER}",
        ],
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_who_has_no_keys_on_this_machine_is_told_where_a_run_has_its_own(host, monkeypatch):
    assert is_loopback(host)
    with pytest.raises(UserError, match="--master runs/NAME, or its keys, --keys runs/NAME/keys"):
        open_network(host)
    monkeypatch.setenv(KEYS, keys_folder())
    open_network(host).close()


def test_a_run_on_one_machine_has_keys_of_its_own_which_its_folder_tells_the_other_roles(config, monkeypatch):
    keys = config.folder / "keys"
    take_folder(config, resume=False).close()
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert stat.S_IMODE((keys / "keys.json").stat().st_mode) == 0o600
    assert os.environ[KEYS] == str(keys)  # for the processes that this one starts
    monkeypatch.delenv(KEYS)
    assert find_master(str(config.folder), patience=0) == MASTER
    assert os.environ[KEYS] == str(keys)
    monkeypatch.setenv(KEYS, "others")
    find_master(str(config.folder), patience=0)
    assert os.environ[KEYS] == "others"


def test_keys_that_the_user_gives_are_those_of_the_run(config, monkeypatch, tmp_path):
    monkeypatch.setenv(KEYS, str(make_keys(tmp_path / "mine").parent))
    take_folder(config, resume=False).close()
    assert not (config.folder / "keys").exists()
    monkeypatch.delenv(KEYS)
    with pytest.raises(UserError, match="started with other keys than its own: give them with --keys"):
        find_master(str(config.folder), patience=0)


def test_a_run_beyond_this_machine_without_keys_is_refused_before_its_folder_is_touched(config):
    config = config.model_copy(update={"master": config.master.model_copy(update={"address": "tcp://*:5999"})})
    with pytest.raises(UserError, match="links need keys"):
        take_folder(config, resume=False)
    assert not config.folder.exists()


def test_where_no_run_is_in_progress_the_wait_ends_with_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"No run is in progress in .*mine \(waited 0 s\): start one"):
        find_master(str(tmp_path / "mine"), patience=0)
    assert find_master(MASTER, patience=0) == MASTER


def test_a_role_waits_until_the_name_of_the_masters_host_is_known(monkeypatch):
    known, look_up = iter([False, False]), socket.getaddrinfo
    monkeypatch.setattr(addresses, "LOOK_SECONDS", 0.0)

    def late(host: str, *more: Any) -> Any:
        if not next(known, True):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up("127.0.0.1", *more)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    assert find_master("tcp://late:5555", patience=100) == "tcp://late:5555"
    known = iter([False, False])
    assert find_master("tcp://late:5555", patience=0) == "tcp://late:5555"  # and is told by who uses it
    with pytest.raises(UserError, match="Name or service not known: check the host name"):
        ListenAddress.towards("tcp://late:5555")


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "*", "0.0.0.0", "[::]", "node0", "[2001:db8::1]", "localhost.example.org"]
)
def test_beyond_one_machine_keys_are_needed(host, monkeypatch):
    with pytest.raises(UserError, match="areal keys FOLDER") as refused:
        open_network("127.0.0.1", host)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv(KEYS, keys_folder())
    open_network("127.0.0.1", host).close()


def test_keys_that_are_named_have_to_be_there_on_one_machine_too(monkeypatch, tmp_path):
    monkeypatch.setenv(KEYS, str(tmp_path / "keys"))
    with pytest.raises(UserError, match="There are no keys in"):
        open_network("127.0.0.1")


@pytest.mark.parametrize(
    ("options", "listens", "called"),
    [
        ({}, "tcp://127.0.0.1:*", "127.0.0.1"),
        ({"host": "10.0.0.1"}, "tcp://10.0.0.1:*", "10.0.0.1"),
        ({"host": "node7.example.org"}, "tcp://127.0.0.1:*", "node7.example.org"),
        ({"bind": "*"}, "tcp://*:*", "127.0.0.1"),
        ({"bind": "10.0.0.1"}, "tcp://10.0.0.1:*", "10.0.0.1"),
        ({"host": "node7", "bind": "0.0.0.0"}, "tcp://0.0.0.0:*", "node7"),
        ({"host": "2001:db8::1"}, "tcp://[2001:db8::1]:*", "[2001:db8::1]"),
        ({"ports": "20000-20100"}, "tcp://127.0.0.1:20000-20100", "127.0.0.1"),
    ],
)
def test_an_actor_listens_where_it_is_told_and_is_called_what_it_is_told(options, listens, called):
    listen_address = ListenAddress.towards(MASTER, **options)
    assert listen_address.address == listens
    assert listen_address.reached_at("tcp://[::]:20007") == f"tcp://{called}:20007"


@pytest.mark.parametrize("ports", ["20000", "20100-20000", "a-b", "0-10", "1-70000", "-5"])
def test_what_is_not_a_range_of_ports_is_said_so(ports):
    with pytest.raises(UserError, match="--ports"):
        check_place(None, ports)


def test_what_listens_everywhere_is_reached_where_the_master_is():
    assert reachable("tcp://[::]:4000", "10.0.0.1") == "tcp://10.0.0.1:4000"
    assert reachable("tcp://0.0.0.0:4000", "[2001:db8::1]") == "tcp://[2001:db8::1]:4000"
    assert reachable("tcp://10.0.0.2:4000", "10.0.0.1") == "tcp://10.0.0.2:4000"
    assert on_this_machine("tcp://*:5555") == "tcp://127.0.0.1:5555"
