"""The supervisor: starts roles on this machine, each by the command line that a user would type, and watches them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from rich.console import Console

from actors.monitor import print_steps, watch_live
from actors.runtime import Ending, incarnation
from areal.config import Config
from areal.processes import SUPERVISED
from protocols.errors import BusError
from protocols.messages import AskStatus
from protocols.transport import ZmqBus

RUN_PY = Path(__file__).parent.parent / "run.py"
TAIL_LINES = 40
STOP_SECONDS = 10.0
# After the master's end the others have heard of it, or never will.
AFTERMATH_SECONDS = 20.0
ASK_SECONDS = 2.0

log = structlog.get_logger()


@dataclass(slots=True)
class Child:
    """A role's process and the end of what it printed."""

    role: str
    index: int
    process: asyncio.subprocess.Process
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    pump: asyncio.Task | None = None

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


class Supervisor:
    """Runs roles until one ends the run. Whatever happens, no child outlives `run`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.children: list[Child] = []
        self._interrupted: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._logs: Path | None = None
        self.user_error = False

    async def run_everything(self, config: Config, config_arguments: list[str]) -> Ending:
        """The whole run of a configuration on this machine."""
        bus = ZmqBus(f"supervisor/0#{incarnation()}")
        view: asyncio.Task | None = None
        try:
            master = await self._start("master", 0, config_arguments)
            await self._until_answers(bus, config.master.address, master)
            self._logs = config.folder.resolve() / "logs"
            for role, count in roles_of(config):
                for index in range(count):
                    await self._start(role, index, ["--index", str(index), "--master", config.master.address])
            terminal = self.console.is_terminal
            show = (
                watch_live(bus, config.master.address, self.console) if terminal else print_steps(config, self.console)
            )
            view = asyncio.create_task(show, name="view")
            return await self._until_ended(master)
        except _ChildDied as died:
            return died.ending
        finally:
            if view:
                view.cancel()
                await asyncio.gather(view, return_exceptions=True)
            await self._stop_all()
            await bus.close()

    async def run_roles(self, roles: list[str], arguments: list[str], rewards: list[str]) -> Ending:
        """Several roles of a run whose master is elsewhere; `rewards` are the further arguments of a reward."""
        try:
            for role in roles:
                more = rewards if role == "reward" else []
                await self._start(role, sum(child.role == role for child in self.children), [*arguments, *more])
            ends = {asyncio.create_task(child.process.wait()): child for child in self.children}
            while ends:
                done, _ = await asyncio.wait([*ends, self._interrupted], return_when=asyncio.FIRST_COMPLETED)
                if self._interrupted in done:
                    return self._interrupted.result()
                for child in [ends.pop(task) for task in done]:
                    if not (ending := await self._ended(child)).ok:
                        return ending
            return Ending(True, "every role reached its end")
        finally:
            await self._stop_all()

    def interrupt(self, sign: signal.Signals) -> None:
        """Stop everything, from a signal handler."""
        if not self._interrupted.done():
            self._interrupted.set_result(Ending(False, f"told to stop by {sign.name}"))

    # --- children

    async def _start(self, role: str, index: int, arguments: list[str]) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(RUN_PY), "--role", role, *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            # Some reasoning_gym tasks make the same rows in two processes only under the same hash seed.
            env=os.environ | {SUPERVISED: "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which stops the others in order
        )  # fmt: skip
        child = Child(role, index, process)
        child.pump = asyncio.create_task(self._pump(child), name=f"output of {child.name}")
        self.children.append(child)
        return child

    async def _pump(self, child: Child) -> None:
        """Keep what a child prints: its last lines here, all of them in the run folder."""
        out = None
        while line := await child.process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            child.tail.append(text)
            if out is None and self._logs is not None:
                self._logs.mkdir(parents=True, exist_ok=True)
                out = (self._logs / f"{child.role}-{child.index}.out").open("a", buffering=1)
                print(*child.tail, sep="\n", file=out)
            elif out is not None:
                print(text, file=out)
        if out is not None:
            out.close()

    async def _until_answers(self, bus: ZmqBus, address: str, master: Child) -> None:
        """The master may first have to make the quickstart's model: its lines are shown meanwhile."""
        shown = asyncio.create_task(self._show(master))
        asking = asyncio.create_task(self._asks_until_answered(bus, address))
        try:
            await self._first_of(asking, master)
        finally:
            shown.cancel()
            asking.cancel()

    async def _asks_until_answered(self, bus: ZmqBus, address: str) -> None:
        while True:
            try:
                await bus.peer(address).ask(AskStatus(), ASK_SECONDS)
                return
            except BusError:
                continue

    async def _show(self, child: Child) -> None:
        shown = ""
        while True:
            await asyncio.sleep(0.2)
            if child.tail and child.tail[-1] != shown:
                shown = child.tail[-1]
                self.console.print(shown, highlight=False, markup=False, soft_wrap=True)

    async def _until_ended(self, master: Child) -> Ending:
        """The master's end is the run's; any other child that ends before it has failed."""
        ends = {asyncio.create_task(child.process.wait()): child for child in self.children}
        try:
            done, _ = await asyncio.wait([*ends, self._interrupted], return_when=asyncio.FIRST_COMPLETED)
            if self._interrupted in done:
                return self._interrupted.result()
            first = next((ends[task] for task in done if ends[task] is not master), master)
            if first is not master and first.process.returncode != 0:
                return await self._ended(first)
            async with asyncio.timeout(AFTERMATH_SECONDS):
                await asyncio.wait(ends)
            return await self._ended(master)
        except TimeoutError:
            left = [child.name for child in self.children if child.process.returncode is None]
            return Ending(False, f"{', '.join(left)} did not leave after the end of the run")
        finally:
            for task in ends:
                task.cancel()

    async def _first_of(self, work: asyncio.Task, child: Child) -> None:
        """Wait for `work`; raises _ChildDied if the child ends, or the supervisor is told to stop, before that."""
        end = asyncio.create_task(child.process.wait())
        done, _ = await asyncio.wait([work, end, self._interrupted], return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if self._interrupted in done:
            raise _ChildDied(self._interrupted.result())
        if work not in done:
            raise _ChildDied(await self._ended(child))

    async def _ended(self, child: Child) -> Ending:
        """How a child ended, in its own last words."""
        code = await child.process.wait()
        await child.pump
        if code == 0:
            return Ending(True, f"{child.name} reached its end")
        if code == 2 and child.tail:
            self.user_error = True
            return Ending(False, child.tail[-1])
        words = "\n".join(f"  {line}" for line in list(child.tail)[-15:])
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return Ending(False, f"{child.name} {how}. Its last lines:\n{words}")

    async def _stop_all(self) -> None:
        running = [child for child in self.children if child.process.returncode is None]
        for child in running:
            child.process.terminate()
        if running:
            await asyncio.wait([asyncio.create_task(c.process.wait()) for c in running], timeout=STOP_SECONDS)
        for child in self.children:
            if child.process.returncode is None:
                log.warning("killed: it did not stop", child=child.name)
                os.killpg(child.process.pid, signal.SIGKILL)
                await child.process.wait()
            await child.pump


class _ChildDied(Exception):
    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending


def roles_of(config: Config) -> list[tuple[str, int]]:
    """The roles beside the master, slowest to start first, and how many of each."""
    roles = [
        ("trainer", 1),
        ("generator", config.generator.count),
        ("reward", config.reward.count),
        ("rollout_manager", config.rollout_manager.count),
    ]
    return [*roles, ("evaluator", 1)] if config.data.eval_size else roles
