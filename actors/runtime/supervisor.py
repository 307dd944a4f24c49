"""The supervisor: starts roles as processes on this machine, and restarts those that die.

It starts each role with the command line that a user would type. The exit code of a process (a child) means:

    0       of the master: the run reached its end. Of another role: so the master said, which ends itself soon; if it
            does not, a plug-in has ended the process, and it died
    1       of the master: the run failed, and the last line of its output says why. Of another role: it died
    2       at its first start, before a step was trained: something that the user supplied has to be changed, and the
            run ends. Later: it died
    3       the master has fenced it; it is restarted at once
    5       somebody else than the supervisor sent it SIGTERM, and it has handed over its work; it is restarted as if it
            had died
    6       the master has said that the run failed, or was stopped
    others  it died

A supervised master is stopped by SIGINT, and no run ends for a SIGTERM that only the master gets.

A child that died is restarted after half a second. Each further death within a minute of the child's start doubles the
pause, up to half a minute. The supervisor ends the run when one child dies for the fifth time in a row, each time
within ten minutes of its start, and without a trained step since the death before. A restarted master continues with
its journal, if it has begun one, and the other roles wait for it meanwhile. Once summary.json exists, the run has
ended, and the supervisor starts no more processes.
"""

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from actors.runtime.actor import Ending
from actors.runtime.bound_addresses import new_bus
from actors.runtime.logs import log_file
from actors.watching.run_status import status_of
from areal.base import extensions
from areal.base.children import kill_group
from areal.base.processes import START, SUPERVISED, timed
from areal.base.text import shown
from areal.config import Config
from areal.config.roles import ROLES
from areal.devices import memory_kills
from areal.storage.disk import Backlog
from areal.storage.records import read_records
from areal.storage.run_folder import read_summary
from protocols.addresses import on_this_machine
from protocols.bus_errors import BusError, ProtocolVersionError
from protocols.messages import AskStatus, actor_name
from protocols.network import Network
from protocols.transport import Bus, ask_until

END, FAILED, USER_ERROR, FENCED, ERROR, LEFT, RUN_FAILED = range(7)
TAIL_LINES, QUOTED_LINES = 40, 15
LONGEST_LINE_BYTES = 1 << 16
READ_BYTES = 1 << 13  # fewer lines than a log takes at a time (Backlog.LINES)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0
SOUND_SECONDS = 600.0
DEATHS_IN_VAIN = 5

# Shutdown: the supervisor stops the master, which tells the other roles to leave. After FAREWELL_SECONDS the supervisor
# sends SIGTERM to the processes that are left, and STOP_SECONDS after the beginning it kills the rest. If a signal told
# it to stop, the trainer has `master.drain_seconds` before that, until a second signal comes.
FAREWELL_SECONDS = 4.0
STOP_SECONDS = 10.0
# How long to read a dead child's output if a process that the child left behind still holds the pipe open.
LAST_WORDS_SECONDS = 1.0
ASK_SECONDS = 2.0
# How long the master may take to end after the first of the other roles, which is when it has written the summary.
END_SECONDS = 6.0
# The interval of looks at the status of the run: at first, by how much each is longer than the one before, at last.
FIRST_LOOK_SECONDS, LOOK_GROWTH, LOOK_SECONDS = 0.25, 1.02, 2.0
# The time that an actor which is no member any more has to end.
FENCED_SECONDS = 15.0


@dataclass(slots=True)
class Deaths:
    """Counts the deaths of one child, for the pause before its restart and for the decision to give up.

    early: deaths in a row within STEADY_SECONDS of a start. in_vain: deaths in a row within SOUND_SECONDS of a start,
    without a trained step between them. progress: as given to `pause` at the last death.
    """

    early: int = 0
    in_vain: int = 0
    progress: int = 0

    def pause(self, lived: float, progress: int) -> float | None:
        """To be called after each death. Returns the seconds until the next start; None: do not start it again.

        lived: seconds since its start. progress: any number that grows with each trained step.
        """
        self.early = 1 if lived >= STEADY_SECONDS else min(self.early + 1, 100)  # beyond that, no pause is longer
        self.in_vain = 1 if lived >= SOUND_SECONDS or progress != self.progress else self.in_vain + 1
        self.progress = progress
        if self.in_vain >= DEATHS_IN_VAIN:
            return None
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self.early - 1), LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Child:
    """One role of this machine, over all its restarts: its current process, and the last lines of that one's output."""

    role: str
    index: int
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    pump: asyncio.Task[None] | None = None
    starts: int = 0
    failed: bool = False  # the run, as it has said at its end
    deaths: Deaths = field(default_factory=Deaths)
    began: float = 0.0  # when this process was started
    memory_kills: int = 0  # on this machine until then
    identity: str = ""  # as which this process is a member of the run, or was
    absent_since: float | None = None  # when it was first seen to be no member any more
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def running(self) -> asyncio.subprocess.Process | None:
        return self.process if self.process is not None and self.process.returncode is None else None

    def has_left(self, members: Mapping[str, float], now: float) -> bool:
        """To be called at each look with the members of the run, and the seconds for which each was silent. True once
        the process has been none for so long that it should have ended."""
        for identity, silent in members.items():
            # Who was last heard of before this process was started is one before it.
            if actor_name(identity) == self.name and silent < now - self.began:
                self.identity = identity
        if not self.identity or self.identity in members:
            self.absent_since = None
            return False
        self.absent_since = now if self.absent_since is None else self.absent_since
        return now - self.absent_since > FENCED_SECONDS

    @property
    def last_line(self) -> str:
        return self.tail[-1] if self.tail else f"{self.name} printed nothing"

    @property
    def killed_for_memory(self) -> str:
        """A sentence if this process, or one that it had started, may have been killed for lack of memory."""
        kills = memory_kills() - self.memory_kills
        return f". Since its start the kernel has killed {kills} for lack of memory: see `dmesg`" if kills else ""


def role_command(role: str, arguments: list[str]) -> list[str]:
    """The command line of a role."""
    return [sys.executable, START, "--role", role, *arguments]


class Supervisor:
    """Runs roles until one of them ends the run. No child outlives it, also if it fails. It can be used once."""

    def __init__(
        self,
        console: Console,
        command: Callable[[str, list[str]], list[str]] = role_command,
        environments: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """environments: variables to add to the environment of each actor, by its name, such as `generator/0`."""
        self.console = console
        self._environments = environments or {}
        self.children: list[Child] = []
        self.user_error = False
        self._command = command
        self._master: Child | None = None
        self._folder: Path | None = None  # the run's, once the master has made it
        self._progress_before = 0  # what `_progress` was when the supervisor began
        self._display: Any = None  # until the master answers, or without the extension
        self._alerts: set[str] = set()
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[Ending] = loop.create_future()
        self._hurry: asyncio.Future[None] = loop.create_future()
        self._drain_seconds = 0.0

    async def run_everything(self, config: Config, options: list[str], network: Network) -> Ending:
        """Run all roles of a run on this machine. Its folder has the configuration. Returns how the run ended.

        options: further arguments of all roles but the master.
        """
        folder = config.folder.resolve()
        self._drain_seconds = config.master.drain_seconds
        skipped = sum(1 for _ in read_records(folder / "metrics.jsonl"))

        async def work() -> None:
            async with asyncio.TaskGroup() as tasks:
                self._master = master = self._add(tasks, "master", 0, ["--resume", str(folder)])
                if not await self._until_answers(master, bus, address):
                    return
                self._say(timed("the master is ready, the other roles are started"))
                self._folder = folder
                self._progress_before = self._progress()
                for role in ROLES.values():
                    for index in range(role.started(config)):
                        words = ["--index", str(index), "--master", address, *options, *role.options(config, index)]
                        self._add(tasks, role.name, index, words)
                await self._watch(master, bus, address, config, skipped)

        address = on_this_machine(config.master.address)
        async with new_bus("supervisor/0", network) as bus:
            return await self._until_over(work())

    async def run_roles(
        self, roles: list[str], arguments: list[str], further: Mapping[str, list[str]], drain_seconds: float = 0.0
    ) -> Ending:
        """Run several roles of a run whose master is on another machine. further: more arguments, by role.
        drain_seconds: that of the run."""
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

    # --- the run

    async def _until_over(self, work: Coroutine[Any, Any, None]) -> Ending:
        """Do `work` until `_finish` is called, then stop all children. Raises what `work` raises."""
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

    async def _watch(self, master: Child, bus: Bus, address: str, config: Config, skipped: int) -> None:
        """Ask the master for the status of the run again and again: show it, print alerts when they begin, on any kind
        of console, and kill processes that have lost their place in the run and do not end, and a master that has
        stopped to answer, before all others leave it. skipped: number of steps that an earlier start has shown."""
        make = extensions.part_of("terminal", "display")
        self._display = make and make(self.console, config, skipped, self._say)
        longest = (self._display and self._display.seconds) or LOOK_SECONDS
        pause, patience, loop = FIRST_LOOK_SECONDS, config.master.lost_seconds / 2, asyncio.get_running_loop()
        answering, answered = 0, loop.time()  # the start of the master that has answered last, and when it did
        self._show("begin")
        try:
            while True:
                pause = min(pause * LOOK_GROWTH, longest)
                await asyncio.sleep(pause)
                try:
                    status = await status_of(bus, address, ASK_SECONDS)
                except BusError as error:  # it is asked again
                    self._show("show_silence", error)
                    lost = answering == master.starts and loop.time() - answered > patience
                    if lost and (process := master.running):
                        self._kill(master, process, f"it has not answered for {patience:g} s")
                    continue
                answering, answered = master.starts, loop.time()
                self._show("show", status)
                self._look_after(status)
        finally:
            self._show("end")

    def _show(self, method: str, *values: Any) -> None:
        """Call a method of the display, if there is one."""
        if self._display is not None:
            try:
                getattr(self._display, method)(*values)
            except Exception as error:  # whatever it is, the run needs no display
                self._display = None
                self._say(f"the display of the run has failed; the run continues: {error!r}")

    def _look_after(self, status: Mapping[str, Any]) -> None:
        for alert in status["alerts"]:
            if alert not in self._alerts:
                self._say(alert)
        self._alerts = {*status["alerts"]}
        silences = ((member["identity"], member["silent"]) for member in status["members"])
        self._kill_fenced({identity: math.inf if seconds is None else seconds for identity, seconds in silences})

    def _kill_fenced(self, members: Mapping[str, float]) -> None:
        now = asyncio.get_running_loop().time()
        for child in self.children:
            if child.has_left(members, now) and (process := child.running):
                why = f"it has lost its place in the run, and does not end. Last output: {child.last_line}"
                self._kill(child, process, why)

    def _kill(self, child: Child, process: asyncio.subprocess.Process, why: str) -> None:
        self._say(f"{child.name} is killed: {why}")
        kill_group(process)
        child.memory_kills = memory_kills()  # those of the kernel before are not why it dies

    async def _until_answers(self, master: Child, bus: Bus, address: str) -> bool:
        """Wait until the master answers. Its output is shown meanwhile: it may first have to make the quickstart's
        model. False if it is of another version of this program, which ends the run."""
        showing = asyncio.create_task(self._show_last_lines(master))

        def again(error: BusError) -> bool:
            return not isinstance(error, ProtocolVersionError)

        try:
            await ask_until(lambda: bus.peer(address).ask(AskStatus(), ASK_SECONDS), again, pause=0.1)
        except ProtocolVersionError as error:
            self.user_error = True
            self._finish(Ending(False, f"The program at {address} is not the master of this run: {error}."))
            return False
        finally:
            showing.cancel()
        return True

    async def _show_last_lines(self, child: Child) -> None:
        last = ""
        while True:
            await asyncio.sleep(0.2)
            if child.tail and child.tail[-1] != last and "[info " not in child.tail[-1]:  # what the log has
                last = child.tail[-1]
                self._say(last)

    def _say(self, line: str) -> None:
        self.console.print(shown(line), highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    # --- children

    def _add(self, tasks: asyncio.TaskGroup, role: str, index: int, arguments: list[str]) -> Child:
        """Keep one more child, in a task of its own."""
        self.children.append(child := Child(role, index, arguments))
        tasks.create_task(self._keep(child), name=child.name)
        return child

    async def _keep(self, child: Child) -> None:
        """Start a child, and restart it whenever it dies. Returns once it is not to be restarted any more."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._start(child)
            except OSError as error:  # the machine has no process left for it, for instance
                child.tail.append(f"it could not be started: {error}")
                code = ERROR
            else:
                code = await self._end_of(child)
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
                return self._finish(Ending(False, self._gave_up(child, code)))
            pause = 0.0 if code == FENCED else pause
            why = f". Last output: {child.last_line}" if code >= 0 else ""
            self._say(f"{child.name} {_how(code)}, and is started again in {pause:g} s{why}{child.killed_for_memory}")
            await asyncio.sleep(pause)

    async def _start(self, child: Child) -> None:
        child.starts += 1
        child.began, child.identity, child.absent_since = asyncio.get_running_loop().time(), "", None
        child.tail.clear()
        child.memory_kills = memory_kills()
        # With asyncio's own pipe, `wait` would also wait for processes that a dead child has left behind.
        reading, writing = os.pipe()
        child.pump = asyncio.create_task(self._pump(child, os.fdopen(reading, "rb")), name=f"output of {child.name}")
        try:
            child.process = await asyncio.create_subprocess_exec(
                *self._command(child.role, child.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                # Some tasks of reasoning_gym give the same rows in two processes only with the same hash seed.
                env={
                    **os.environ,
                    SUPERVISED: str(os.getpid()),
                    "PYTHONHASHSEED": "0",
                    **self._environments.get(child.name, {}),
                },
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops the children in order
            )
        finally:
            os.close(writing)

    async def _end_of(self, child: Child) -> int:
        """Wait until a child has ended, and kill the processes that it left behind. Returns its exit code."""
        process, pump = child.process, child.pump
        assert process is not None and pump is not None  # it was started
        code = await process.wait()
        kill_group(process)
        await asyncio.wait([pump], timeout=LAST_WORDS_SECONDS)
        pump.cancel()
        return code

    async def _pump(self, child: Child, pipe: IO[bytes]) -> None:
        """Read the output of a child. `child.tail` gets its last lines, the run folder, once there, all."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        with contextlib.closing(transport):
            out: Backlog | None = None
            async for lines in _lines(reader):
                if out is None and self._folder is not None:
                    out = log_file(self._folder / "logs" / f"{child.role}-{child.index}.out")
                    out.append(f"{text}\n" for text in child.tail)
                # Python's tracker of semaphores warns once the process is dead: that says nothing of why.
                child.tail.extend(line for line in lines if "resource_tracker" not in line)
                if out is not None:
                    out.append(f"{text}\n" for text in lines)

    def _end_of_run(self, child: Child, code: int) -> Ending | None:
        """How the run ended, if the end of this child ends it; else None."""
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

    def _gave_up(self, child: Child, code: int) -> str:
        words = "\n".join(f"  {line}" for line in list(child.tail)[-QUOTED_LINES:])
        return (
            f"{child.name} {_how(code)}, for the {DEATHS_IN_VAIN}th time in a row without a trained step in between. "
            f"Its last lines:\n{words}{child.killed_for_memory}"
        )

    async def _stop_all(self, drain_seconds: float) -> None:
        """Stop all children: the master first, which tells the others that the run has ended, then the others.
        drain_seconds: the time that those have who hand over their work."""
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
            if process := child.running:
                self._kill(child, process, f"it did not stop within {STOP_SECONDS:g} s")
            if child.process is not None:
                await self._end_of(child)
        for child in trainers:
            self._say(f"{child.name}: {child.last_line}")

    def _terminate_others(self) -> None:
        for child in self.children:
            if child is not self._master and (process := child.running):
                process.terminate()

    async def _until_ended(self, timeout: float, hurry: asyncio.Future[None] | None = None) -> None:
        """Wait until all children have ended, for so many seconds, or until `hurry`."""
        ends = [process.wait() for child in self.children if (process := child.running)]
        if ends:
            waited: list[asyncio.Future[Any]] = [asyncio.gather(*ends), *([hurry] if hurry else [])]
            await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[list[str]]:
    """The lines of an output, all that have come at a time: a child may print a gigabyte, and waits for who reads it.
    Lines of more than LONGEST_LINE_BYTES, such as those of a progress bar that returns to the start of its line, are
    cut."""
    begun = b""  # the last line, whose end has not come yet
    while data := await reader.read(READ_BYTES):
        *lines, begun = (begun + data).split(b"\n")
        if len(begun) > LONGEST_LINE_BYTES:
            lines, begun = [*lines, begun], b""
        yield [line.decode(errors="replace").rstrip() for line in lines]
    if begun:
        yield [begun.decode(errors="replace").rstrip()]


def _how(code: int) -> str:
    if code == LEFT:
        return "was told to leave by another program (SIGTERM)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
