"""An actor's metrics for Prometheus, http://HOST:PORT/metrics: areal_NAME, with the labels role and index."""

import hmac
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import structlog

from areal.config.role_sections import ObserveConfig
from areal.storage.events import TOTALS

# Actors of a machine try this many ports, from `observe.prometheus_port` on, and take the first free port.
PORTS_TRIED = 256

log = structlog.get_logger()


class Numbers:
    """A prometheus_client collector of the numbers that `read` returns. The HTTP server calls `read` in a thread, so
    `read` must return a dictionary that no longer changes."""

    def __init__(self, role: str, index: int, read: Callable[[], dict[str, float]]) -> None:
        self._labels = {"role": role, "index": str(index)}
        self._read = read

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._read().items():
            kind = CounterMetricFamily if name in TOTALS else GaugeMetricFamily
            family = kind("areal_" + re.sub(r"\W", "_", name), name.replace("_", " "), labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), value)
            yield family


def serve(config: ObserveConfig, role: str, index: int, read: Callable[[], dict[str, float]]) -> Any:
    """Serve the numbers that `read` returns, from threads that end with the process. config: with a port. Returns the
    HTTP server, or None if no port is free, which does not fail the actor."""
    assert config.prometheus_port is not None
    from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

    registry = CollectorRegistry()
    for port in range(config.prometheus_port, min(config.prometheus_port + PORTS_TRIED, 1 << 16)):
        try:
            server, _ = start_http_server(port, config.prometheus_host, registry)
        except OSError as error:
            failure = error
        else:
            server.set_app(_asks_for(config.prometheus_token, make_wsgi_app(registry)))
            registry.register(Numbers(role, index, read))
            log.info("metrics", address=f"http://{config.prometheus_host}:{port}/metrics")
            return server
    log.warning("no metrics are served", port=config.prometheus_port, error=str(failure))
    return None


def _asks_for(token: str | None, application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return `application`, but only for requests with the token. token: None allows all requests."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        brought = environ.get("HTTP_AUTHORIZATION", "")
        if token is None or hmac.compare_digest(brought.encode(), f"Bearer {token}".encode()):
            return application(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
        return [b"The metrics need a token: Authorization: Bearer ...\n"]

    return guarded
