"""Shows a run, where it was started or elsewhere: a live view on a terminal, else lines."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from actors.watching.run_status import status_of
from areal.base.text import duration, shown
from protocols.bus import Bus, Subscriber
from protocols.bus_errors import BusError
from protocols.membership_messages import Shutdown, actor_name
from protocols.messages import Message

REFRESH_SECONDS = 1.0
ASK_SECONDS = 5.0
LOST_SECONDS = 60.0
# Number of the latest evaluations shown, besides the first evaluation.
EVALUATIONS_SHOWN = 3
# Counts come with heartbeats, one a second: a shorter step may have none.
COUNTED_SECONDS = 1.0
BAR = 30  # characters of the progress bar
STYLES = {"healthy": "green", "starting": "dim"}


async def watch_live(feed: "Feed", console: Console) -> None:
    """Show a live view of a run until it has ended. A failure of the view does not affect the run."""
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while feed.ended is None:
            try:
                live.update(render(await feed.look()))
            except BusError as error:
                live.update(Text(shown(f"The master does not answer: {error}")))
            await asyncio.sleep(REFRESH_SECONDS)


class Feed:
    """The status of the run of the master at an address. `ended`: why the run ended; None while it runs."""

    def __init__(self, bus: Bus, master: str) -> None:
        self.ended: str | None = None
        self._bus = bus
        self._master = master
        self._since = 0
        self._events: Subscriber | None = None

    async def look(self) -> dict[str, Any]:
        """Return the current status, with the steps since the last call. Raises BusError."""
        status = await status_of(self._bus, self._master, ASK_SECONDS, self._since)
        self._since = max([self._since, *(step["step"] for step in status["recent"])])
        if self._events is None or self._events.address != status["events"]:
            if self._events is not None:
                await self._events.close()
            self._events = self._bus.subscribe(status["events"], self._heard)
        return status

    def _heard(self, sequence: int, event: Message) -> None:
        # The master exits soon after this event, so the status cannot be asked for the reason.
        if isinstance(event, Shutdown):
            self.ended = shown(event.reason)


async def follow(bus: Bus, master: str, console: Console) -> int:
    """Show the run of the master at an address until it has ended: live on a terminal, else a line for each step.
    Returns the exit status: 1 if lines are printed and the master has been silent for LOST_SECONDS, else 0."""
    feed = Feed(bus, master)
    if console.is_terminal:
        await watch_live(feed, console)
    loop = asyncio.get_running_loop()
    heard = loop.time()
    alerts: set[str] = set()
    while feed.ended is None:
        try:
            status = await feed.look()
        except BusError as error:
            if loop.time() - heard > LOST_SECONDS:
                console.print(shown(f"The master has not answered for {LOST_SECONDS:g} s: {error}"), markup=False)
                return 1
        else:
            heard = loop.time()
            for metrics in status["recent"]:
                line = step_line(metrics, status["steps"], status["max_staleness"])
                console.print(line, highlight=False, soft_wrap=True)
            for alert in set(status["alerts"]) - alerts:
                console.print(alert, highlight=False, markup=False, soft_wrap=True)
            alerts = set(status["alerts"])
        await asyncio.sleep(REFRESH_SECONDS)
    console.print(feed.ended, highlight=False, markup=False)
    return 0


def step_line(m: dict[str, Any], steps: int, max_staleness: int) -> str:
    """Return the line for a step among `steps`. m: the metrics of the step."""
    return (
        f"step {m['step']}/{steps}  reward {m['reward_mean']:.3f}{_filtered(m)}  "
        f"staleness {m['staleness_mean']:.1f}/{m['staleness_max']} (bound {max_staleness})  "
        f"{_rate(m, 'tokens_generated')} tok/s generated, {_rate(m, 'tokens_trained')} trained  "
        f"step {m['step_seconds']:.2f} s, waited {m['trainer_wait_seconds']:.2f} s  ready {m['groups_ready']}"
        f"{_left(m, steps)}"
    )


def render(status: Mapping[str, Any]) -> Panel:
    """Return the live view of a run, from the status."""
    numbers = Table.grid(padding=(0, 3))
    numbers.add_column(style="dim", no_wrap=True)
    for name, value in _numbers(status, status["metrics"]):
        numbers.add_row(name, Text(value))
    alerts = [Text(alert, style="red") for alert in status["alerts"]]
    body = Group(
        numbers, Text(), actors_table(status["members"]), Text(), Text(status["waiting"], style="italic"), *alerts
    )
    return Panel(body, title=f"{status['run']}  ·  step {status['version']} of {status['steps']}", title_align="left")


def actors_table(members: list[dict[str, Any]]) -> Table:
    """Return a table of the actors: state, activity and load."""
    actors = Table.grid(padding=(0, 2))
    for member in sorted(members, key=lambda member: member["identity"]):
        state = Text(member["state"], style=STYLES.get(member["state"], "yellow"))
        actors.add_row(actor_name(member["identity"]), state, Text(_doing(member)))
    return actors


def _numbers(status: Mapping[str, Any], m: dict[str, Any]) -> list[tuple[str, str]]:
    evaluated = [f"{value:.3f} at version {version}" for version, value in status["accuracy"].items()]
    accuracy = ", ".join([*evaluated[:1], *evaluated[1:][-EVALUATIONS_SHOWN:]]) or "–"
    groups = f"{status['alive']} admitted, {status['ready']} of them ready; room for {status['capacity']} more"
    filled = BAR * status["version"] // max(status["steps"], 1)
    progress = f"{'█' * filled}{'░' * (BAR - filled)} {_left(m, status['steps'])}"
    rows = [("progress", progress), ("held-out accuracy", accuracy), ("groups", groups)]
    if m:
        mean, oldest, bound = m["staleness_mean"], m["staleness_max"], status["max_staleness"]
        seconds = sum(m[f"{part}_seconds"] for part in ("pause", "load", "resume")) / max(m["reloads"], 1)
        rows += [
            ("reward", f"{m['reward_mean']:.3f}{_filtered(m)}"),
            ("staleness", f"{mean:.1f} on average, {oldest} at most; the bound is {bound}"),
            ("tokens a second", f"{_rate(m, 'tokens_generated')} generated, {_rate(m, 'tokens_trained')} trained"),
            ("last step", f"{m['step_seconds']:.2f} s, of which {m['trainer_wait_seconds']:.2f} s waiting for data"),
            ("weight updates", f"{m['reloads']}, {seconds:.3f} s each"),
            ("interrupted", f"{m['sequences_interrupted']:,} sequences, {m['tokens_recomputed']:,} tokens recomputed"),
        ]
    return rows


def _doing(member: dict[str, Any]) -> str:
    stats = member["stats"]
    load: dict[str, Callable[[float], str]] = {
        "running": lambda n: f"{n:.0f} running",
        "limit": lambda n: f"of {n:.0f}",
        "waiting": lambda n: f"{n:.0f} queued",
        "kv_use": lambda n: f"KV {n:.0%}",
        "groups_running": lambda n: f"{n:.0f} groups",
        "samples_running": lambda n: f"{n:.0f} samples",
        "sandboxes": lambda n: f"{n:.0f} sandboxes",
        "images_pulling": lambda n: f"{n:.0f} images on their way" * bool(n),
        "images_failed": lambda n: f"{n:.0f} failed pulls" * bool(n),
        "scored": lambda n: f"{n:,.0f} scored",
        "failed": lambda n: f"{n:,.0f} failed",
    }
    words = [word(stats[name]) for name, word in load.items() if name in stats]
    return ", ".join(filter(None, [member["activity"], *words])).replace("running, of", "running of")


def _filtered(metrics: dict[str, Any]) -> str:
    if not metrics.get("groups_filtered"):
        return ""
    return f" (of all {metrics['reward_mean_all']:.3f}, {metrics['groups_filtered']} groups filtered)"


def _rate(metrics: dict[str, Any], key: str) -> str:
    """Return the count `key` of a step, per second."""
    if not metrics[key] and metrics["step_seconds"] < COUNTED_SECONDS:
        return "–"
    return f"{metrics[key] / max(metrics['step_seconds'], 1e-9):,.0f}"


def _left(m: dict[str, Any], steps: int) -> str:
    """Return the time that the remaining steps will take, in words."""
    seconds = m.get("step_seconds_median", 0.0) * (steps - m.get("step", steps))
    return f"  about {duration(seconds)} left" if seconds > 0 else ""
