"""The process of a run, for the caller: console, live view, and the reason of the end."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from actors.api.call_settings import Settings
from actors.api.python_rows import FILE as ROWS
from actors.watching.machine_runs import STOP_SECONDS, run_in, stop_run
from areal.base import extensions
from areal.base.errors import UserError
from areal.base.processes import START, SUPERVISED
from areal.base.text import all_shown
from areal.config import Config
from areal.storage.claim import claimed_address
from areal.storage.run_folder import read_summary

CONSOLE = "console.log"
# The interval of looking at the run's record, and the interval of the live view in a notebook.
LOOK_SECONDS, LIVE_SECONDS = 0.2, 1.0


class RunFailed(Exception):
    """A run has failed. The message says why."""


class RunProcess:
    """See the module. process: the process of the run, if started here. show: whether the run's console is printed here
    while this process waits."""

    def __init__(self, folder: Path, config: Config, process: subprocess.Popen[bytes] | None, show: bool) -> None:
        self._folder, self._config = folder, config
        self._process = process
        self._show = show
        self._shown = 0  # bytes of the console
        self._view: Any = None  # in a notebook

    @property
    def is_own(self) -> bool:
        """Whether this process has started the run."""
        return self._process is not None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None if self._process else claimed_address(self._folder) is None

    @property
    def reason(self) -> str:
        """Why the run has ended."""
        if (summary := read_summary(self._folder)) is not None:
            return str(summary["reason"])
        lines = _of_caller(self._folder, _text(self._folder / CONSOLE)).splitlines()
        return lines[-1] if lines else f"it left no record in {self._folder}"

    def stop(self) -> None:
        """Stop the run, and wait until it has ended. Raises UserError if it runs on another machine."""
        if self._process is None:
            stop_run(run_in(self._folder))
        else:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._config.master.drain_seconds + STOP_SECONDS)

    def wait_until(self, condition: Callable[[], bool], status: Callable[[float], Any]) -> None:
        """Print the console until `condition` holds. status: returns the master's status within a number of seconds,
        or None without a master; a notebook shows the status below the cell."""
        self._view = None
        while not condition():
            self._show_live(status)
            time.sleep(LIVE_SECONDS if self._view else LOOK_SECONDS)
            self._print_console()
        self._print_console()

    def pause_while_it_runs(self) -> None:
        """Sleep for a moment. Raises UserError or RunFailed if the process of the run has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise (UserError if code == 2 else RunFailed)(self.reason)
        time.sleep(LIVE_SECONDS if self._view else LOOK_SECONDS)
        self._print_console()

    def _print_console(self) -> None:
        if self._show:
            with (self._folder / CONSOLE).open("rb") as console:
                console.seek(self._shown)
                lines = [line for line in console if line.endswith(b"\n")]
            told = b"".join(line for line in lines if not (self._view and line.startswith(b"step ")))
            print(_of_caller(self._folder, told.decode(errors="replace")), end="", flush=True)
            self._shown += sum(map(len, lines))

    def _show_live(self, status: Callable[[float], Any]) -> None:
        kernel = sys.modules.get("ipykernel.zmqshell")
        render = extensions.part_of("terminal", "render")
        if not render or not kernel or not kernel.ZMQInteractiveShell.initialized():
            return
        display: Any = import_module("IPython.display").display

        with contextlib.suppress(UserError):  # the master is busy, or has ended
            if (values := status(LIVE_SECONDS)) is None:
                return
            view = render(all_shown(values))
            if self._view is None:
                self._view = display(view, display_id=True)
            else:
                self._view.update(view)


def launch(settings: Settings, outlives: bool) -> subprocess.Popen[bytes]:
    """Start the process of a run. outlives: whether the run continues after any end of this process."""
    folder = settings.config.folder
    command = [sys.executable, START, "--config", str(settings.file)]
    # A kernel sets the first two, and rich would write its live view into the file.
    left_out = ("FORCE_COLOR", "TTY_COMPATIBLE", SUPERVISED)
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    if not outlives:
        environment[SUPERVISED] = str(os.getpid())
    with (folder / CONSOLE).open("wb") as console:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    return process


def _of_caller(folder: Path, text: str) -> str:
    """The printed text, without the file of rows that the caller gave as objects."""
    return text.replace(f"data.source {str((folder / ROWS).absolute())!r}", "data")


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")
    return ""
