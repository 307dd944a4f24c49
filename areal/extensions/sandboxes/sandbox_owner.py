"""The owner of the sandboxes of a process: their images, starts and ends. None outlives its sample.

What is begun elsewhere has the label of the run and of this place in it. What a killed process has left there is ended
before the first sandbox of its successor starts, and when this process ends.
"""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

import structlog

from areal.base import extensions
from areal.data.rows import Row
from areal.extensions.programs.outside import SandboxError
from areal.extensions.programs.slots import Programs
from areal.extensions.sandboxes.sandbox_providers import (
    BubbleSandbox,
    ContainerSandbox,
    HttpSandbox,
    SandboxService,
    end_containers,
    pull_image,
)
from areal.extensions.sandboxes.sandbox_tasks import RowError, Task, task_of
from areal.extensions.sandboxes.sandboxes import Limits, Sandbox
from areal.workflows.tools import Tool, Tools

CONTAINERS = ("docker", "podman")
PROVIDER = "The provider of sandboxes"
# Images that are pulled at once, and how often the pull of one may fail before its rows are discarded.
PULLS, PULL_FAILURES = 2, 3
PULL_SECONDS = 1800.0

log = structlog.get_logger()


def is_url(provider: str) -> bool:
    return provider.startswith(("http://", "https://"))


class Sandboxes(Tool):
    """label: of this run and place. programs: the namespaces of `bubble`, and the slots of commands on this machine.
    `running`: sandboxes that are open."""

    def __init__(self, label: str, programs: Programs) -> None:
        self._label, self._programs = label, programs
        self._pulls: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failures: Counter[tuple[str, str]] = Counter()
        self._pull_slots = asyncio.Semaphore(PULLS)
        self._service = functools.cache(SandboxService)
        self._swept: dict[str, asyncio.Task[None]] = {}
        self.running = 0

    def stats(self) -> dict[str, float]:
        """Counts for the displays of the run; none where there was no sandbox."""
        if not self._swept:
            return {}
        pulling = sum(not pull.done() for pull in self._pulls.values())
        return {"sandboxes": self.running, "images_pulling": pulling, "images_failed": self._failures.total()}

    @property
    def containers(self) -> list[str]:
        """The container programs in use."""
        return [provider for provider in self._swept if provider in CONTAINERS]

    @property
    def expects_rows(self) -> bool:
        return bool(self.containers)

    def expect(self, row: Row) -> None:
        """Begin to pull the image of the row, unless that has failed. A sample that needs the image tries again."""
        task = task_of(row.fields)
        for provider in self.containers if task.image else ():
            if not self._failures[provider, str(task.image)]:
                self._pull(provider, task)

    @contextlib.asynccontextmanager
    async def opened(
        self, provider: str, task: Task, limits: Limits, seconds: float, arguments: Sequence[str] = ()
    ) -> AsyncIterator[Sandbox]:
        """A new sandbox with the task's image, its files, and after its setup, until the end of the block.

        provider: docker, podman, bubble, http://..., or package.module:function, an async function of the image, the
        label, the limits and the seconds, which returns a sandbox that has started. seconds: for the start, for
        each file and for the setup. arguments: more for `docker run`. Raises SandboxError.
        """
        if provider not in self._swept:
            self._swept[provider] = asyncio.create_task(self._sweep(provider))
        await asyncio.shield(self._swept[provider])
        label, image, limits = self._label, task.image, limits.changed(task.limits)
        sandbox: Sandbox
        if provider in CONTAINERS:
            if not image:
                raise RowError(f"the row names no image, and neither does the sandbox {provider!r}")
            await asyncio.shield(self._pull(provider, task))
            sandbox = ContainerSandbox(provider, image, label, limits, arguments, self._programs)
        elif provider == "bubble":
            sandbox = BubbleSandbox(self._programs, limits)
        elif is_url(provider):
            sandbox = HttpSandbox(self._service(provider), image, label, limits)
        else:
            sandbox = await extensions.find("provider", provider, PROVIDER)(image, label, limits, seconds)
        self.running += 1
        try:
            await sandbox.start(seconds)
            if not await written(sandbox, task.files, seconds):
                raise SandboxError("the row's files cannot be written")
            if task.setup:
                await run_own(sandbox, task, task.setup, seconds)
            yield sandbox
        finally:
            self.running -= 1
            await asyncio.shield(asyncio.ensure_future(sandbox.close()))

    async def close(self) -> None:
        """End all that this process and those before it have left."""
        pulls = [*self._pulls.values()]
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        for provider in self._swept:
            await self._sweep(provider)
            if is_url(provider):
                await self._service(provider).close()

    def _pull(self, provider: str, task: Task) -> asyncio.Task[None]:
        """The pull of the task's image, which has begun or is here. Raises RowError if it has failed too often."""
        image = str(task.image)
        if self._failures[provider, image] >= PULL_FAILURES:
            raise RowError(f"the image {image} could not be had {PULL_FAILURES} times, so its rows are discarded")

        async def pull() -> None:
            try:
                async with self._pull_slots:
                    await pull_image(provider, image, task.build, PULL_SECONDS)
            except SandboxError:
                self._failures[provider, image] += 1
                del self._pulls[provider, image]
                raise

        if (provider, image) not in self._pulls:
            self._pulls[provider, image] = asyncio.create_task(pull())
            self._pulls[provider, image].add_done_callback(lambda pull: pull.cancelled() or pull.exception())
        return self._pulls[provider, image]

    async def _sweep(self, provider: str) -> None:
        """End what has this label: of this process and those before it."""
        try:
            if provider in CONTAINERS:
                await end_containers(provider, self._label)
            elif is_url(provider):
                await self._service(provider).end_all(self._label)
        except SandboxError as error:
            log.warning("sandboxes that were left cannot be ended", provider=provider, why=str(error))


async def written(sandbox: Sandbox, files: Mapping[str, str], seconds: float) -> bool:
    """Whether all files could be written."""
    return all([await sandbox.write(path, text.encode(), seconds) for path, text in files.items()])


async def run_own(sandbox: Sandbox, task: Task, code: str, seconds: float) -> None:
    """Run the row's own shell code. Raises SandboxError if it fails, since no policy has run there yet."""
    ran = await sandbox.exec(*task.shell(code), seconds=seconds, most_bytes=2000)
    if ran.status != 0:
        raise SandboxError(f"the row's code {code!r:.80} ends with status {ran.status}: {ran.text}")


def open_sandboxes(tools: Tools) -> Sandboxes:
    return Sandboxes(tools.label, tools["python"])
