"""The owner of the sandboxes of a process: their images, starts and ends. No sandbox outlives its sample.

Containers and sandboxes of services have the label of the run and of the process's place in it. The successor of a
killed process ends the remaining sandboxes of its label before the first start, and again at its own end.
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
# The most pulls of images at once, and the failed pulls of an image after which its rows are discarded.
PULLS, PULL_FAILURES = 2, 3
PULL_SECONDS = 1800.0

log = structlog.get_logger()


def is_url(provider: str) -> bool:
    return provider.startswith(("http://", "https://"))


class Sandboxes(Tool):
    """label: names this run and place. programs: the namespaces of `bubble`, and the slots of commands on this machine.
    `running`: the number of open sandboxes."""

    def __init__(self, label: str, programs: Programs) -> None:
        self._label, self._programs = label, programs
        self._pulls: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failures: Counter[tuple[str, str]] = Counter()
        self._pull_slots = asyncio.Semaphore(PULLS)
        self._service = functools.cache(SandboxService)
        self._swept: dict[str, asyncio.Task[None]] = {}
        self.running = 0

    def stats(self) -> dict[str, float]:
        """Return counts for the displays of the run; an empty dict before the first sandbox."""
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
        """Begin to pull the image of the row, unless a pull has failed. A sample that needs the image tries again."""
        task = task_of(row.fields)
        for provider in self.containers if task.image else ():
            if not self._failures[provider, str(task.image)]:
                self._pull(provider, task)

    @contextlib.asynccontextmanager
    async def opened(
        self, provider: str, task: Task, limits: Limits, seconds: float, arguments: Sequence[str] = ()
    ) -> AsyncIterator[Sandbox]:
        """Open a new sandbox with the task's image and files, after the task's setup, until the end of the block.

        provider: docker, podman, bubble, http://..., or package.module:function. The function is async; it gets the
        image, the label, the limits and the seconds, and returns a started sandbox. seconds: for the start, for a file
        and for the setup. arguments: more for `docker run`. Raises SandboxError.
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
        """End all sandboxes that this process and its predecessors have left."""
        pulls = [*self._pulls.values()]
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        for provider in self._swept:
            await self._sweep(provider)
            if is_url(provider):
                await self._service(provider).close()

    def _pull(self, provider: str, task: Task) -> asyncio.Task[None]:
        """Return the pull of the task's image, running or done. Raises RowError after too many failures."""
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
        """End the sandboxes with this label, left by this process and its predecessors."""
        try:
            if provider in CONTAINERS:
                await end_containers(provider, self._label)
            elif is_url(provider):
                await self._service(provider).end_all(self._label)
        except SandboxError as error:
            log.warning("sandboxes that were left cannot be ended", provider=provider, why=str(error))


async def written(sandbox: Sandbox, files: Mapping[str, str], seconds: float) -> bool:
    """Write the files into the sandbox. Return whether all could be written."""
    return all([await sandbox.write(path, text.encode(), seconds) for path, text in files.items()])


async def run_own(sandbox: Sandbox, task: Task, code: str, seconds: float) -> None:
    """Run the row's own shell code. Raises SandboxError if the code fails: no policy has run in the sandbox yet."""
    ran = await sandbox.exec(*task.shell(code), seconds=seconds, most_bytes=2000)
    if ran.status != 0:
        raise SandboxError(f"the row's code {code!r:.80} ends with status {ran.status}: {ran.text}")


def open_sandboxes(tools: Tools) -> Sandboxes:
    return Sandboxes(tools.label, tools["python"])
