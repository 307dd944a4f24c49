"""What Prometheus reads of an actor."""

from __future__ import annotations

from urllib.request import urlopen

import pytest

from actors import prometheus
from areal.config import ObserveConfig


@pytest.fixture
def serve():
    servers = []

    def start(port: int | None, role: str = "generator", index: int = 3, **numbers: float):
        servers.append(prometheus.serve(ObserveConfig(prometheus_port=port), role, index, lambda: numbers))
        return servers[-1]

    yield start
    for server in filter(None, servers):
        server.shutdown()
        server.server_close()


def read(server) -> str:
    return urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10).read().decode()


def test_numbers_are_served_with_the_actors_role_and_index(serve, free_port):
    text = read(serve(free_port, running=7.0, tokens_generated=100.0))
    assert 'areal_running{index="3",role="generator"} 7.0' in text
    assert 'areal_tokens_generated_total{index="3",role="generator"} 100.0' in text


def test_actors_of_one_machine_take_the_next_free_port(serve, free_port):
    first, second = serve(free_port, index=0, running=1.0), serve(free_port, index=1, running=2.0)
    assert first.server_port < second.server_port
    assert 'index="1"' in read(second)


def test_names_are_such_as_prometheus_takes(serve, free_port):
    assert "areal_step_reward_parts_a_b_c" in read(serve(free_port, **{"step_reward_parts/a:b.c": 1.0}))


def test_nothing_is_served_unless_it_is_asked_for(serve):
    assert serve(None, running=1.0) is None


def test_an_actor_lives_without_a_port(serve, monkeypatch):
    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr("prometheus_client.start_http_server", refuse)
    assert serve(5, running=1.0) is None
