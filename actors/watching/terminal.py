"""A live dashboard of any run on the terminal: what each actor does, which actor waits for which, and the metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Grid, Vertical, VerticalScroll
from textual.widgets import Footer, Header, Sparkline, Static

from actors.watching.monitor import REFRESH_SECONDS, Feed, actors_table, rate
from areal.text import shown
from protocols.errors import BusError

STEPS_SHOWN = 512
BAR = 16

Step = dict[str, Any]


def _share(record: Step, *seconds: str) -> float:
    return float(sum(record.get(name) or 0.0 for name in seconds) / max(record["step_seconds"], 1e-9))


# Of each plot: its title, its value for a step, and the format of the value.
PLOTS: tuple[tuple[str, Callable[[Step], float | None], str], ...] = (
    ("reward", lambda step: step["reward_mean"], ".3f"),
    ("staleness, mean", lambda step: step["staleness_mean"], ".2f"),
    ("tokens / s generated", lambda step: rate(step, "tokens_generated"), ",.0f"),
    ("tokens / s trained", lambda step: rate(step, "tokens_trained"), ",.0f"),
    ("trainer idle", lambda step: _share(step, "trainer_wait_seconds", "publish_wait_seconds"), ".0%"),
    ("completion tokens, mean", lambda step: step.get("completion_tokens_mean"), ".0f"),
)


class Plot(Vertical):
    """A plot of one number over the steps."""

    def __init__(self, title: str, value: Callable[[Step], float | None], form: str) -> None:
        super().__init__()
        self._title, self._value, self._form = title, value, form

    def compose(self) -> ComposeResult:
        yield Static(f"[b]{self._title}[/]")
        yield Sparkline()

    def show(self, steps: list[Step]) -> None:
        values = [value for step in steps if (value := self._value(step)) is not None and math.isfinite(value)]
        if values:
            low, high = min(values), max(values)
            span = f"  [dim]{low:{self._form}} to {high:{self._form}}[/]"
            self.query_one(Static).update(f"[b]{self._title}[/]  {values[-1]:{self._form}}{span}")
            self.query_one(Sparkline).data = values


class Dashboard(App[None]):
    """Shows the status from a feed, updated every second, until the user quits."""

    BINDINGS: ClassVar = [("q", "quit", "quit (the run continues)")]
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #waiting { padding: 0 1; background: $boost; }
    #plots { grid-size: 3; grid-gutter: 1 2; height: 13; padding: 1 1 0 1; }
    Plot { height: 5; } Sparkline { height: 4; }
    #below { grid-size: 2; grid-columns: 2fr 1fr; padding: 0 1; }
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        self._steps: deque[Step] = deque(maxlen=STEPS_SHOWN)

    def compose(self) -> ComposeResult:
        yield Header(icon="")
        yield Static(id="waiting", markup=False)
        with Grid(id="plots"):
            for plot in PLOTS:
                yield Plot(*plot)
        with Grid(id="below"):
            with VerticalScroll():
                yield Static(id="actors")
            with VerticalScroll():
                yield Static(id="numbers")
        yield Footer()

    async def on_mount(self) -> None:
        self.set_interval(REFRESH_SECONDS, self._look)
        await self._look()

    async def _look(self) -> None:
        waiting = self.query_one("#waiting", Static)
        if self._feed.ended is not None:
            waiting.update(f"The run has ended: {self._feed.ended}")
            return
        try:
            status = await self._feed.look()
        except BusError as error:
            waiting.update(shown(f"The master does not answer: {error}"))
            return
        if self.is_running:  # the user may have quit meanwhile
            self.show(status)

    def show(self, status: dict[str, Any]) -> None:
        self._steps.extend(status["recent"])
        self.title = status["run"]
        self.sub_title = f"step {status['version']} of {status['steps']}"
        self.query_one("#waiting", Static).update(status["waiting"])
        steps = list(self._steps)
        for plot in self.query(Plot):
            plot.show(steps)
        self.query_one("#actors", Static).update(actors_table(status["members"]))
        self.query_one("#numbers", Static).update(_numbers(status, steps))


def _numbers(status: dict[str, Any], steps: list[Step]) -> Table:
    """A table of the numbers of groups, the accuracies, and the groups of the last step by staleness."""
    table = Table.grid(padding=(0, 2))
    table.add_row("groups alive / ready", f"{status['alive']} / {status['ready']}")
    table.add_row("groups that may start", f"{status['capacity']}")
    for version, accuracy in list(status["accuracy"].items())[-5:]:
        table.add_row(f"accuracy of version {version}", f"{accuracy:.3f}")
    if steps:
        table.add_row("", "")
        table.add_row(f"staleness (bound {status['max_staleness']})", f"groups of step {steps[-1]['step']}")
        histogram = steps[-1]["staleness_histogram"]
        for age, groups in enumerate(histogram):
            bar = "█" * round(BAR * groups / max(histogram))
            table.add_row(Text(f"{age}", justify="right"), f"[blue]{bar}[/] {groups}")
    return table
