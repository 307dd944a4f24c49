"""What Prometheus reads of an actor."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from pydantic import ValidationError

from areal.config.role_sections import ObserveConfig
from areal.extensions.prometheus import prometheus


@pytest.fixture
def serve():
    servers = []

    def start(port: int, role: str = "generator", index: int = 3, token: str | None = None, **numbers: float):
        config = ObserveConfig(prometheus_port=port, prometheus_token=token)
        servers.append(prometheus.serve(config, role, index, lambda: numbers))
        return servers[-1]

    yield start
    for server in filter(None, servers):
        server.shutdown()
        server.server_close()


def read(server, **headers: str) -> str:
    request = Request(f"http://127.0.0.1:{server.server_port}/metrics", headers=headers)
    return urlopen(request, timeout=10).read().decode()


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


def test_who_does_not_bring_the_token_reads_nothing(serve, free_port):
    server = serve(free_port, token="secret", running=7.0)
    assert "areal_running" in read(server, Authorization="Bearer secret")
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
        with pytest.raises(HTTPError, match="401") as refused:
            read(server, **headers)
        assert b"running" not in refused.value.read()


def test_beyond_this_machine_a_token_is_needed():
    with pytest.raises(ValidationError, match="set observe.prometheus_token"):
        ObserveConfig(prometheus_port=9400, prometheus_host="0.0.0.0")
    ObserveConfig(prometheus_port=9400, prometheus_host="0.0.0.0", prometheus_token="secret")


def test_an_actor_lives_without_a_port(serve, monkeypatch):
    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr("prometheus_client.start_http_server", refuse)
    assert serve(5, running=1.0) is None
