"""The supervisor: starts roles as processes on this machine, and restarts dead processes.

A role is started with the command line that a user would type. The exit codes of a process (a child):

    0       master: the run reached its end. Another role: the master has ended the run, and ends soon. If the master
            does not end, a plug-in has ended the process, and the end counts as a death
    1       master: the run failed, and the last line of the output has the reason. Another role: a death
    2       first start, before a step was trained: the user has to change something, and the run ends. Later: a death
    3       the master has fenced the process; it is restarted at once
    5       somebody else than the supervisor sent SIGTERM, and the process has handed over its work; it is restarted
            as after a death
    6       the master has said that the run failed, or was stopped
    others  a death

SIGINT stops a supervised master, and no run ends for a SIGTERM that only the master gets.

A dead child is restarted after half a second. Every further death within a minute of the child's start doubles the
pause, up to half a minute. The supervisor ends the run when a child dies for the fifth time in a row, each time within
ten minutes of its start, and without a trained step since the death before. A restarted master continues with its
journal, if any, and the other roles wait for the master meanwhile. Once summary.json exists, the run has ended, and the
supervisor starts no more processes.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.runtime.actor import Ending
from actors.runtime.bound_addresses import new_bus
from actors.runtime.role_process import (
    DEATHS_IN_VAIN,
    END,
    ERROR,
    FAILED,
    FENCED,
    RUN_FAILED,
    USER_ERROR,
    Child,
    how_it_ended,
)
from actors.runtime.status_watch import StatusWatch
from areal.base.processes import START, timed
from areal.base.text import shown
from areal.config import Config
from areal.config.roles import ROLES
from areal.storage.records import read_records
from areal.storage.run_folder import read_summary
from protocols.addresses import on_this_machine
from protocols.bus_errors import ProtocolVersionError
from protocols.network import Network

QUOTED_LINES = 15
# Shutdown: the supervisor stops the master, and the master tells the other roles to leave. After FAREWELL_SECONDS the
# supervisor sends SIGTERM to the remaining processes, and STOP_SECONDS after the beginning it kills the rest. After a
# signal to the supervisor, the trainer has `master.drain_seconds` before that, until a second signal comes.
FAREWELL_SECONDS = 4.0
STOP_SECONDS = 10.0
# How long the master may take to end after the first other role has ended, when the summary is written.
END_SECONDS = 6.0


def role_command(role: str, arguments: list[str]) -> list[str]:
    """The command line of a role."""
    return [sys.executable, START, "--role", role, *arguments]


class Supervisor:
    """Runs roles until a role ends the run. No child outlives the supervisor. To be used once."""

    def __init__(
        self,
        console: Console,
        command: Callable[[str, list[str]], list[str]] = role_command,
        environments: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """environments: variables to add to an actor's environment, by the actor's name, such as `generator/0`."""
        self.console = console
        self._environments = environments or {}
        self.children: list[Child] = []
        self.user_error = False
        self._command = command
        self._master: Child | None = None
        self._folder: Path | None = None  # the run folder, once the master has made it
        self._progress_before = 0  # the value of `_progress` when the supervisor began
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[Ending] = loop.create_future()
        self._hurry: asyncio.Future[None] = loop.create_future()
        self._drain_seconds = 0.0

    async def run_everything(self, config: Config, options: list[str], network: Network) -> Ending:
        """Run all roles of a run on this machine. The run folder has the configuration. Returns the end of the run.

        options: further arguments of all roles but the master.
        """
        folder = config.folder.resolve()
        self._drain_seconds = config.master.drain_seconds
        skipped = sum(1 for _ in read_records(folder / "metrics.jsonl"))

        async def work() -> None:
            async with asyncio.TaskGroup() as tasks:
                self._master = master = self._add(tasks, "master", 0, ["--resume", str(folder)])
                watch = StatusWatch(bus, address, master, self._say)
                try:
                    await watch.until_answers()
                except ProtocolVersionError as error:
                    self.user_error = True
                    reason = f"The program at {address} is not the master of this run: {error}."
                    return self._finish(Ending(False, reason))
                self._say(timed("the master is ready, the other roles are started"))
                self._folder = folder
                self._progress_before = self._progress()
                for role in ROLES.values():
                    for index in range(role.started(config)):
                        words = ["--index", str(index), "--master", address, *options, *role.options(config, index)]
                        self._add(tasks, role.name, index, words)
                await watch.repeat(config, self.console, self.children, skipped)

        address = on_this_machine(config.master.address)
        async with new_bus("supervisor/0", network) as bus:
            return await self._until_over(work())

    async def run_roles(
        self, roles: list[str], arguments: list[str], further: Mapping[str, list[str]], drain_seconds: float = 0.0
    ) -> Ending:
        """Run several roles of a run with a master on another machine. further: more arguments, by role. drain_seconds:
        of the run's configuration."""
        self._drain_seconds = drain_seconds

        async def work() -> None:
            async with asyncio.TaskGroup() as tasks:
                for role in roles:
                    index = sum(child.role == role for child in self.children)
                    self._add(tasks, role, index, arguments + further.get(role, []))
            failures = [child.last_line for child in self.children if child.failed]
            self._finish(Ending(not failures, failures[0] if failures else "every role reached its end"))

        return await self._until_over(work())

    def interrupt(self, sign: signal.Signals) -> None:
        """Stop all children; the second time, at once. Called from a signal handler."""
        if self._over.done() and not self._hurry.done():
            self._hurry.set_result(None)
        self._finish(Ending(False, f"told to stop by {sign.name}", stopped=True))

    async def _until_over(self, work: Coroutine[Any, Any, None]) -> Ending:
        """Do `work` until `_finish` is called, then stop all children. Raises exceptions of `work`."""
        working = asyncio.create_task(work, name="supervision")
        ends: list[asyncio.Future[Any]] = [working, self._over]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            return await self._over
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            stopped = self._over.done() and self._over.result().stopped
            await self._stop_all(self._drain_seconds if stopped else 0.0)

    def _finish(self, ending: Ending) -> None:
        if not self._over.done():
            self._over.set_result(ending)

    def _summary(self) -> dict[str, Any] | None:
        return read_summary(self._folder) if self._folder else None

    def _say(self, line: str) -> None:
        self.console.print(shown(line), highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def _add(self, tasks: asyncio.TaskGroup, role: str, index: int, arguments: list[str]) -> Child:
        """Keep a further child, in its own task."""
        self.children.append(child := Child(role, index, arguments))
        tasks.create_task(self._keep(child), name=child.name)
        return child

    async def _keep(self, child: Child) -> None:
        """Start a child, and restart it after every death. Returns once no restart is due any more."""
        loop, command = asyncio.get_running_loop(), self._command(child.role, child.arguments)
        environment = self._environments.get(child.name, {})
        while True:
            try:
                await child.start(command, environment, lambda: self._folder)
            except OSError as error:  # for instance, the machine has no process left
                child.tail.append(f"it could not be started: {error}")
                code = ERROR
            else:
                code = await child.until_ended()
            if ending := self._end_of_run(child, code):
                return self._finish(ending)
            if code in (END, RUN_FAILED) and self._master is None:
                child.failed = code == RUN_FAILED
                return self._say(f"{child.name} has left and is not started again. Last output: {child.last_line}")
            if code in (END, RUN_FAILED):
                await asyncio.sleep(END_SECONDS)
            if self._summary():
                return
            pause = child.deaths.pause(loop.time() - child.began, self._progress())
            if pause is None:
                return self._finish(Ending(False, _why_it_ends(child, code)))
            pause = 0.0 if code == FENCED else pause
            why = f"{f'. Last output: {child.last_line}' if code >= 0 else ''}{child.killed_for_memory}"
            self._say(f"{child.name} {how_it_ended(code)}, and is started again in {pause:g} s{why}")
            await asyncio.sleep(pause)

    def _end_of_run(self, child: Child, code: int) -> Ending | None:
        """The end of the run, if the end of this child ends the run; else None."""
        firsts = child.starts == 1 and (self._master is None or self._master.starts == 1)
        if code == USER_ERROR and firsts and self._progress() == self._progress_before:
            self.user_error = True
            return Ending(False, child.last_line)
        if child is not self._master:
            return None
        if code in (END, FAILED):
            return Ending(code == END, child.last_line)
        summary = self._summary()
        return Ending(summary["ok"], summary["reason"]) if summary else None

    def _progress(self) -> int:
        metrics = self._folder and self._folder / "metrics.jsonl"
        return metrics.stat().st_size if metrics and metrics.exists() else 0

    async def _stop_all(self, drain_seconds: float) -> None:
        """Stop all children: first the master, which tells the other roles that the run has ended, then the other
        roles. drain_seconds: the time for roles that hand over their work."""
        loop = asyncio.get_running_loop()
        trainers = [child for child in self.children if drain_seconds and child.role == "trainer" and child.running]
        if trainers:
            self._say(
                f"The trainer may take {drain_seconds:g} s (master.drain_seconds) to end its step and save a "
                f"checkpoint; a second signal stops at once."
            )
        if self._master is not None and (process := self._master.running):
            process.send_signal(signal.SIGINT)
            await self._until_ended(drain_seconds, self._hurry)
            if self._hurry.done() and self._master.running:
                process.send_signal(signal.SIGINT)
        elif drain_seconds:
            self._terminate_others()
            await self._until_ended(drain_seconds, self._hurry)
        begun = loop.time()
        if self._master is not None:
            await self._until_ended(FAREWELL_SECONDS)
        self._terminate_others()
        await self._until_ended(begun + STOP_SECONDS - loop.time())
        for child in self.children:
            child.kill(f"it did not stop within {STOP_SECONDS:g} s", self._say)
            if child.process is not None:
                await child.until_ended()
        for child in trainers:
            self._say(f"{child.name}: {child.last_line}")

    def _terminate_others(self) -> None:
        for child in self.children:
            if child is not self._master and (process := child.running):
                process.terminate()

    async def _until_ended(self, timeout: float, hurry: asyncio.Future[None] | None = None) -> None:
        """Wait until all children have ended, for `timeout` seconds, or until `hurry`."""
        ends = [process.wait() for child in self.children if (process := child.running)]
        if ends:
            waited: list[asyncio.Future[Any]] = [asyncio.gather(*ends), *([hurry] if hurry else [])]
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _why_it_ends(child: Child, code: int) -> str:
    """The reason to end the run for a child that dies again and again."""
    words = "\n".join(f"  {line}" for line in list(child.tail)[-QUOTED_LINES:])
    return (
        f"{child.name} {how_it_ended(code)}, for the {DEATHS_IN_VAIN}th time in a row without a trained step in "
        f"between. Its last lines:\n{words}{child.killed_for_memory}"
    )
