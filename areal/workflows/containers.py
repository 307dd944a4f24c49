"""Episodes in a container: `environment: docker:IMAGE` or `podman:IMAGE`. The policy runs shell commands in it.

Any program in that container, its `sh` included, may have become the policy's own. So the tests run in a new container,
into which the container program copies one folder.
"""

from __future__ import annotations

import asyncio
import copy
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from areal.children import finish
from areal.config import UserError, explain
from areal.data.rows import Prompt, Row
from areal.processes import tied

_COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
# What a container does: it tells that it is there, and ends with the process that holds its standard input.
_WAITS = "echo; exec cat > /dev/null"
_WRITES = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
_EMPTIES = 'mkdir -p "$1" && cd "$1" && rm -rf ./* ./.[!.]* ./..?*'
# The most bytes of the folder that is copied: a file that is said to be large need not have room on a disk.
FOLDER_BYTES = 2 << 30
_COPIES = f'"$1" cp "$2" - | head -c {FOLDER_BYTES} | "$1" cp - "$3"'
# How long a container may take to be removed.
END_SECONDS = 30.0


class Container:
    """One episode. Each turn's first ```bash block is run, and its output is what the policy sees next. A turn without
    a block is the last: `command` then decides by its exit status whether the reward is 1 or 0.

    The row's field `files` (contents by path) is written before the first turn, its field `tests` before `command`.
    folder: what is copied into the new container for the tests; None: they run in the policy's own container.
    network, memory, cpus, processes: what the container may use. arguments: more for `run`. timeout_seconds: the most
    that the start, and each command, may take.
    """

    def __init__(
        self, program: str, image: str, *, command: str, folder: str | None, network: str = "none", memory: str = "1g",
        cpus: float = 1.0, processes: int = 256, arguments: Sequence[str] = (), max_output: int = 4000,
        timeout_seconds: float = 60.0,
    ) -> None:  # fmt: skip
        self._program, self._image, self._command = program, image, command
        self._folder = None if folder is None else PurePosixPath(folder)
        self._limits = [
            f"--network={network}",
            f"--memory={memory}",
            f"--memory-swap={memory}",
            f"--cpus={cpus}",
            f"--pids-limit={processes}",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            *arguments,
        ]
        self._max_output = max_output
        self._timeout = timeout_seconds
        self._name = _new_name()
        self._container: asyncio.subprocess.Process | None = None

    def rehearse(self) -> None:
        """Look for the program and the image. Raises UserError."""
        named = f"The environment '{self._program}:{self._image}'"
        if self._folder is not None and not (self._folder.is_absolute() and self._folder.name):
            raise UserError(f"{named}: folder is {self._folder}, but has to be the absolute path of a folder below /.")
        if not shutil.which(self._program):
            raise UserError(f"{named} needs {self._program}, which is not installed here: install it.")
        look = [self._program, "image", "inspect", self._image]
        with explain(
            subprocess.TimeoutExpired, f"{named}: {self._program} does not answer within {self._timeout:g} s."
        ):
            looked = subprocess.run(look, capture_output=True, text=True, check=False, timeout=self._timeout)
        if looked.returncode:
            reason = looked.stderr.strip().rpartition("\n")[2]
            raise UserError(
                f"{named} cannot be started ({reason}): pull the image, or start {self._program}'s service."
            )

    async def reset(self, row: Row) -> Prompt:
        """Start the container. Returns the row's prompt. Raises RuntimeError, TimeoutError."""
        run = ["run", "--interactive", "--rm", f"--name={self._name}", "--entrypoint=sh", *self._limits, self._image]
        self._container = await asyncio.create_subprocess_exec(
            *tied(self._program, *run, "-c", _WAITS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._container.stdout is not None and self._container.stderr is not None  # they are pipes
        with explain(
            TimeoutError, f"{self._image} did not start within timeout_seconds ({self._timeout:g} s)", TimeoutError
        ):
            async with asyncio.timeout(self._timeout):
                started = await self._container.stdout.readline()
                reason = b"" if started else await self._container.stderr.read()
        if not started:
            raise RuntimeError(
                f"{self._program} does not start {self._image}: {reason.decode(errors='replace').strip()}"
            )
        self._row = row
        if not await self._written(row.fields.get("files") or {}):
            raise RuntimeError(f"{self._image}: the row's files cannot be written")
        return row.prompt

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Raises RuntimeError if the container is lost."""
        match = _COMMAND.search(action)
        if match:
            status, output = await self._run(match[1])
            return f"```output\n{output}\n```\nexit status: {status}", 0.0, False
        passes = self._passes() if self._folder is None else self._copy_passes(self._folder)
        return "", float(await passes), True

    async def _passes(self) -> bool:
        tests = self._row.fields.get("tests") or {}
        return await self._written(tests) and (await self._run(self._command))[0] == "0"

    async def _copy_passes(self, folder: PurePosixPath) -> bool:
        """Whether a new container with this one's folder passes the tests. This one is removed. Raises RuntimeError if
        the container program fails, but a folder that cannot be copied may be the policy's doing."""
        judge = copy.copy(self)
        judge._name, judge._container = _new_name(), None
        try:
            await judge.reset(self._row)
            # A folder that changes while it is copied might write through its own links.
            if not await self._ends("pause", self._name):
                raise RuntimeError(f"{self._program} cannot pause the container of {self._image}")
            source, target = f"{self._name}:{folder}", f"{judge._name}:{folder.parent}"
            copies = ["sh", "-c", _COPIES, "sh", self._program, source, target]
            ready = (await judge._run(_EMPTIES, str(folder)))[0] == "0"
            ready = ready and (await finish(*copies, seconds=self._timeout))[0] == 0
            await self._ends("rm", "--force", self._name)
            return ready and await judge._passes()
        finally:
            await judge.close()

    async def close(self) -> None:
        """End the container, with all that runs in it."""
        if self._container is None:
            return
        assert self._container.stdin is not None  # it is a pipe
        self._container.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._container.wait()
        except TimeoutError:
            self._container.kill()
            await self._ends("rm", "--force", self._name)

    async def _written(self, files: Mapping[str, str | None]) -> bool:
        """Whether all files could be written. Tables of rows have None for the files of other rows."""
        contents = [(path, text.encode()) for path, text in files.items() if text is not None]
        return all([(await self._run(_WRITES, path, stdin=text))[0] == "0" for path, text in contents])

    async def _run(self, code: str, *arguments: str, stdin: bytes = b"") -> tuple[str, str]:
        """The exit status of shell code, or that it was killed, and what it printed, cut. Raises RuntimeError."""
        inside = self._program, "exec", "--interactive", self._name, "sh", "-c", code, "sh", *arguments
        status, printed = await finish(*inside, stdin=stdin, seconds=self._timeout, most_bytes=4 * self._max_output)
        if status is None:  # end all but the container's first process, which the kernel spares
            await self._ends("exec", self._name, "sh", "-c", "kill -9 -1")
        if self._container is None or self._container.returncode is not None:
            raise RuntimeError(f"the container of {self._image} has ended")
        text = printed.decode(errors="replace").strip()
        ending = f"killed after {self._timeout:g} s" if status is None else str(status)
        return ending, text if len(text) <= self._max_output else f"{text[: self._max_output]}\n[more]"

    async def _ends(self, *command: str) -> bool:
        """Whether a command of the container program succeeds, within END_SECONDS."""
        return (await finish(self._program, *command, seconds=END_SECONDS))[0] == 0


def _new_name() -> str:
    return f"areal-{uuid.uuid4().hex}"
