"""A dashboard for Grafana, from the panels and the numbers of actors in Prometheus: `areal grafana`."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from areal.extensions.desk.panels import Panel, panels

UNITS = {"s": "s", "share": "percentunit", "bytes": "bytes"}
STEP = "areal_step_"
# The panels of actors, by title: the unit, and the expressions by legend.
ACTORS: dict[str, tuple[str, dict[str, str]]] = {
    "Step": ("", {"version": 'areal_version{role="master"}'}),
    "Healthy actors": ("", {"{{role}}": "sum by (role) (areal_healthy)"}),
    "Tokens generated, by generator": ("", {"{{index}}": "rate(areal_tokens_generated_total[1m])"}),
    "Sequences": (
        "",
        {
            name: f'sum(areal_{key}{{role="generator"}})'
            for name, key in (("running", "running"), ("queued", "waiting"), ("limit", "limit"))
        },
    ),
    "KV cache in use": ("share", {"{{index}}": "areal_kv_use"}),
    "Groups that may start": ("", {"groups": "areal_groups_capacity"}),
    "Time of generators for new weights": (
        "share",
        {f"{part} {{{{index}}}}": f"rate(areal_{part}_seconds_total[1m])" for part in ("pause", "load", "resume")},
    ),
    "Completions scored": (
        "",
        {"{{index}}": "rate(areal_scored_total[1m])", "failed {{index}}": "rate(areal_failed_total[1m])"},
    ),
    "Memory": ("bytes", {"{{role}} {{index}}": "areal_memory"}),
}


def print_dashboard(_options: Namespace) -> None:
    """`areal grafana`: print the dashboard as JSON."""
    print(json.dumps(dashboard(), indent=1))


def dashboard() -> dict[str, Any]:
    """Return the dashboard as plain data: the actors, the panels of steps, and a panel for all further metrics."""
    drawn = [(title, unit, curves) for title, (unit, curves) in ACTORS.items()]
    drawn += [(panel.title, panel.unit, curves) for panel in panels() if (curves := dict(_curves(panel)))]
    listed = sorted({f"{STEP}{metric}" for panel in panels() for metric in panel.metrics if not panel.has_parts})
    unlisted = f'{{__name__=~"{STEP}.+", __name__!~"{"|".join(listed)}"}}'
    drawn.append(("Other metrics of a step", "", {"{{__name__}}": unlisted}))
    return {
        "title": "Asynchronous RL",
        "uid": "areal-as-actors",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [_drawn(n, *panel) for n, panel in enumerate(drawn)],
    }


def _curves(panel: Panel) -> Iterator[tuple[str, str]]:
    """Yield the expressions of a panel of steps, by legend. Panels of evaluations or of parts have no expression, since
    Prometheus has different names for them."""
    if panel.of == "step" and not panel.has_parts:
        for label, formula in panel.curves.items():
            terms = [term if term in "+/" else f"{STEP}{term}" for term in formula.split()]
            sums, *by = " ".join(terms).split(" / ")
            yield label or panel.title, " / ".join([f"({sums})" if by and "+" in sums else sums, *by])


def _drawn(n: int, title: str, unit: str, curves: Mapping[str, str]) -> dict[str, Any]:
    stat = title in ("Step", "Healthy actors")
    return {
        "id": n + 1,
        "title": title if unit in UNITS or not unit else f"{title}, {unit}",
        "type": "stat" if stat else "timeseries",
        "gridPos": {"x": 12 * (n % 2), "y": 8 * (n // 2), "w": 12, "h": 8},
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": UNITS.get(unit, "none")}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (legend, expression) in enumerate(curves.items())
        ],
    }
