"""The supervisor's view of a run: the status, asked of the master again and again."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from actors.runtime.role_process import Child
from actors.watching.run_status import status_of
from areal.base import extensions
from areal.config import Config
from protocols.bus import Bus
from protocols.bus_errors import BusError, ProtocolVersionError
from protocols.membership_messages import AskStatus
from protocols.transport import ask_until

ASK_SECONDS = 2.0
# The interval of looks at the status of the run: the first interval, its growth, and the longest interval.
FIRST_LOOK_SECONDS, LOOK_GROWTH, LOOK_SECONDS = 0.25, 1.02, 2.0


class StatusWatch:
    """Asks the master at `address`, the child `master`. say: prints a line on the console."""

    def __init__(self, bus: Bus, address: str, master: Child, say: Callable[[str], None]) -> None:
        self._bus, self._address, self._master = bus, address, master
        self._say = say
        self._display: Any = None  # until the master answers, or without the extension
        self._alerts: set[str] = set()

    async def until_answers(self) -> None:
        """Wait until the master answers. Meanwhile show the master's output: it may first have to make the quickstart's
        model. Raises ProtocolVersionError if the process at the address has another version of this program."""
        showing = asyncio.create_task(self._show_last_lines())

        def again(error: BusError) -> bool:
            return not isinstance(error, ProtocolVersionError)

        try:
            await ask_until(lambda: self._bus.peer(self._address).ask(AskStatus(), ASK_SECONDS), again, pause=0.1)
        finally:
            showing.cancel()

    async def _show_last_lines(self) -> None:
        last, tail = "", self._master.tail
        while True:
            await asyncio.sleep(0.2)
            if tail and tail[-1] != last and "[info " not in tail[-1]:  # lines of the log are not shown
                last = tail[-1]
                self._say(last)

    async def repeat(self, config: Config, console: Console, children: Sequence[Child], skipped: int) -> None:
        """Show the status on `console`, print new alerts on any kind of console, and kill children that have lost their
        place in the run and do not end. Also kill a master that no longer answers, before all other actors leave it.
        skipped: number of steps that an earlier start has shown."""
        make = extensions.part_of("terminal", "display")
        self._display = make and make(console, config, skipped, self._say)
        longest = (self._display and self._display.seconds) or LOOK_SECONDS
        pause, patience, loop = FIRST_LOOK_SECONDS, config.master.lost_seconds / 2, asyncio.get_running_loop()
        answering, answered = 0, loop.time()  # the start of the master that last answered, and the time of that answer
        self._show("begin")
        try:
            while True:
                pause = min(pause * LOOK_GROWTH, longest)
                await asyncio.sleep(pause)
                try:
                    status = await status_of(self._bus, self._address, ASK_SECONDS)
                except BusError as error:  # the next look asks again
                    self._show("show_silence", error)
                    if answering == self._master.starts and loop.time() - answered > patience:
                        self._master.kill(f"it has not answered for {patience:g} s", self._say)
                    continue
                answering, answered = self._master.starts, loop.time()
                self._show("show", status)
                self._print_alerts(status["alerts"])
                self._kill_fenced(children, status["members"])
        finally:
            self._show("end")

    def _show(self, method: str, *values: Any) -> None:
        """Call a method of the display, if there is a display."""
        if self._display is not None:
            try:
                getattr(self._display, method)(*values)
            except Exception as error:  # the run needs no display, so no error of the display matters
                self._display = None
                self._say(f"the display of the run has failed; the run continues: {error!r}")

    def _print_alerts(self, alerts: Sequence[str]) -> None:
        for alert in alerts:
            if alert not in self._alerts:
                self._say(alert)
        self._alerts = {*alerts}

    def _kill_fenced(self, children: Sequence[Child], members: Sequence[Mapping[str, Any]]) -> None:
        now, silences = asyncio.get_running_loop().time(), ((m["identity"], m["silent"]) for m in members)
        silent = {identity: math.inf if seconds is None else seconds for identity, seconds in silences}
        for child in children:
            if child.has_left(silent, now):
                why = f"it has lost its place in the run, and does not end. Last output: {child.last_line}"
                child.kill(why, self._say)
