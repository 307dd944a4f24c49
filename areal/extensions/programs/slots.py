"""The programs and commands of samples on this machine: a limited number at once, in one sandbox."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

from areal.base.errors import UserError, explain
from areal.config.scoring import SandboxConfig
from areal.extensions.programs.outside import LocalSandbox, ProgramSandbox, SandboxError, open_sandbox
from areal.workflows.tools import Tool, Tools, waiting

NO_NAMESPACES = "The sandbox `bubble` is namespaces of this machine: leave out sandbox.url and sandbox.mode."


class Programs(Tool):
    """The sandbox of a process, opened for the first program, and a slot for each of its cores. More programs at once
    would only slow all down. Time limits count from when a program has a slot."""

    def __init__(
        self, config: SandboxConfig, open_sandbox: Callable[[SandboxConfig], ProgramSandbox] = open_sandbox
    ) -> None:
        self._config = config
        self._open_sandbox = open_sandbox
        self._sandbox: asyncio.Task[ProgramSandbox] | None = None
        self._slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Callable[[], None]]:
        """Hold a slot until the end of the block, or until the value of the block is called."""
        with waiting.get()():
            await self._slots.acquire()
        with contextlib.ExitStack() as held:
            held.callback(self._slots.release)
            yield held.close

    async def run(self, code: str) -> str:
        """Return the output of Python code, errors included. Raises SandboxError only if the sandbox fails."""
        async with self.slot():
            return (await (await self.opened()).run(code)).transcript

    async def opened(self) -> ProgramSandbox:
        """Return the sandbox, opened at the first call. Raises SandboxError."""
        if self._sandbox is None:
            self._sandbox = asyncio.create_task(asyncio.to_thread(self._open_sandbox, self._config))
        with explain(UserError, "{why}", SandboxError):
            return await asyncio.shield(self._sandbox)

    async def namespaces(self) -> LocalSandbox:
        """Return the sandbox, for commands. Raises SandboxError if `bubble` cannot use the sandbox."""
        sandbox = await self.opened()
        if self._config.mode != "namespaces" or not isinstance(sandbox, LocalSandbox):
            raise SandboxError(NO_NAMESPACES)
        return sandbox

    async def close(self) -> None:
        if self._sandbox is not None:
            with contextlib.suppress(UserError):
                (await self._sandbox).close()


def open_programs(tools: Tools) -> Programs:
    return Programs(tools.config.sandbox)
