"""What `areal selftest` finds about links: streams over real sockets, and the way to a real master."""

import asyncio
import os
import time

import pytest

from actors.start import link_checks as links
from areal.base.processes import KEYS
from areal.config import Config
from protocols.security import make_keys

CONFIG = """
name: mine
model: {model}
steps: 1
batch_size: 4
group_size: 2
run_dir: {runs}
data: {{source: addition, eval_size: 0}}
sampling: {{max_new_tokens: 32}}
reward: {{functions: [addition]}}
master: {{address: "tcp://127.0.0.1:{port}"}}
"""


def receive(order, **arguments):
    """A receiver in this process; it is called in a thread of its own."""
    return asyncio.run(getattr(links.Receiver(), order)(**arguments))


def test_weights_are_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "SLOWEST", 1.0)
    findings = links.check_streams(receive, tmp_path, 3 << 20)
    assert [(finding.name, finding.result) for finding in findings] == [("stream", "ok")]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(links, "SLOWEST", 1e15)
    assert {finding.result for finding in links.check_streams(receive, tmp_path, 1 << 20)} == {"FAILED"}


@pytest.fixture
def master(run, tmp_path, tiny_model, free_port):
    """The run folder of a master that listens, and its address."""
    file = tmp_path / "mine.yaml"
    file.write_text(CONFIG.format(model=tiny_model, runs=tmp_path / "runs", port=free_port))
    run("--role", "master", "--config", str(file))
    return str(tmp_path / "runs" / "mine"), f"tcp://127.0.0.1:{free_port}"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    monkeypatch.setenv(KEYS, "")  # so that what a check sets is undone
    monkeypatch.setattr(links, "ANSWER_SECONDS", 60.0)


def results(findings):
    return {finding.name: finding.result for finding in findings}


def test_the_way_to_a_master_is_measured_and_what_is_wrong_with_it_is_told(master, tmp_path, monkeypatch):
    folder, address = master
    right = {"master": "ok", "clock": "ok", "shared folder": "ok", "port": "ok", "interface": "skipped"}
    assert results(links.check_way_to(folder)) == right
    for interface, result in ("lo", "FAILED"), ("nowhere0", "FAILED"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        assert results(links.check_way_to(folder)) == right | {"interface": result}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    now = time.time
    monkeypatch.setattr(links.time, "time", lambda: now() + 5)
    late = {item.name: item for item in links.check_way_to(address)}
    assert results(late.values()) == right | {"clock": "FAILED"}
    assert late["clock"].values["seconds"] == pytest.approx(-5, abs=0.5)
    (tmp_path / "runs" / "mine" / "address").rename(tmp_path / "elsewhere")
    assert results(links.check_way_to(address))["shared folder"] == "FAILED"

    monkeypatch.setattr(links, "ANSWER_SECONDS", 2.0)
    monkeypatch.setenv(KEYS, str(make_keys(tmp_path / "others").parent))
    refused = links.check_way_to(address)[0]
    assert (refused.name, refused.result) == ("master", "FAILED")
    assert "same keys" in refused.advice


def test_keys_that_cannot_be_read_and_links_without_any_fail(tmp_path, monkeypatch):
    def check(address, keys=None):
        values = {
            "model": "m",
            "steps": 1,
            "batch_size": 4,
            "group_size": 2,
            "data": {"source": "none.jsonl"},
            "sampling": {"max_new_tokens": 4},
            "reward": {"functions": ["math"]},
            "master": {"address": address},
            "network": {"keys": keys},
        }
        return results(links.check_this_node(Config.model_validate(values)))

    monkeypatch.delenv(KEYS)
    assert check("tcp://127.0.0.1:0") == {"keys": "ok", "port": "ok"}
    assert check("tcp://*:0") == {"keys": "FAILED", "port": "ok"}
    assert check("tcp://*:0", str(make_keys(tmp_path / "keys").parent)) == {"keys": "ok", "port": "ok"}
    assert check("tcp://*:0", str(tmp_path / "nowhere"))["keys"] == "FAILED"
    assert check("tcp://192.0.2.1:1", str(tmp_path / "keys")) == {"keys": "ok", "port": "FAILED"}
    assert not os.environ.get(KEYS)
