"""The display of a run that was started on this machine: a live view on a terminal, else lines."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from actors.terminal.monitor import REFRESH_SECONDS, render, step_line
from actors.terminal.start_lines import StartLines
from areal.base.text import shown
from areal.config import Config
from areal.storage.records import new_steps

# Interval of the lines about an evaluation alone.
PROGRESS_SECONDS = 60.0


class Display:
    """Shows a run from the statuses of its master. say: prints a line. skipped: number of steps that an earlier start
    has shown. seconds: the longest interval between statuses; None: any interval.
    """

    def __init__(self, console: Console, config: Config, skipped: int, say: Callable[[str], None]) -> None:
        self.seconds = REFRESH_SECONDS if console.is_terminal else None
        self._config, self._skipped, self._say = config, skipped, say
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._steps = new_steps(config.folder)
        self._lines = StartLines(say)
        self._progress, self._next_progress = "", 0.0

    def begin(self) -> None:
        if self._live:
            self._live.start()

    def end(self) -> None:
        """Print the remaining lines, or end the live view."""
        if self._live:
            self._live.stop()
        elif self._config.steps:
            self._print_steps()

    def show(self, status: Mapping[str, Any]) -> None:
        self._lines.show(status)
        if self._live:
            self._live.update(render(status))
        elif self._config.steps:
            self._print_steps()
        else:
            self._print_progress(status)

    def show_silence(self, why: Exception) -> None:
        """Show that the master has not answered."""
        if self._live:
            self._live.update(Text(shown(f"The master does not answer: {why}")))

    def _print_steps(self) -> None:
        for metrics in self._steps():
            if metrics["step"] > self._skipped:
                self._say(step_line(metrics, self._config.steps, self._config.max_staleness))

    def _print_progress(self, status: Mapping[str, Any]) -> None:
        """Print the evaluator's activity, if it has changed."""
        if (now := time.monotonic()) < self._next_progress:
            return
        self._next_progress = now + PROGRESS_SECONDS
        of_evaluators = (m["activity"] for m in status["members"] if m["identity"].startswith("evaluator/"))
        if (doing := next(of_evaluators, self._progress)) != self._progress:
            self._say(doing)
        self._progress = doing
