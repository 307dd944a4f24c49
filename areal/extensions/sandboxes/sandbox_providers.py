"""The kinds of sandboxes: `docker` and `podman`, a service behind `http`, and the namespaces of this machine, `bubble`.

A sandbox is made, then started, so that `close` ends an interrupted start. README.md has the protocol of a service.
"""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from areal.base.children import Output, finish
from areal.base.errors import explain
from areal.base.processes import tied
from areal.extensions.programs.outside import Commands, SandboxError
from areal.extensions.programs.slots import Programs
from areal.extensions.sandboxes.sandboxes import END_SECONDS, OUTPUT_BYTES, Limits, Ran, Sandbox, size_of

# The program of a container: says that it runs, and ends with the process that holds its standard input.
_WAITS = "echo; exec cat > /dev/null"
# A service may be this much slower than a command, and is asked again after this pause if a connection is lost.
GRACE_SECONDS, AGAIN_SECONDS = 30.0, 0.2
# A service ends a sandbox after this time without a request: no sandbox survives a killed process for ever.
IDLE_SECONDS = 3600.0
# The length at which the error of a service is cut.
ERROR_LENGTH = 500
# Environment variable with the key that a service expects as `Authorization: Bearer`.
KEY = "AREAL_SANDBOX_KEY"
_FIELD = "label=areal="


class BubbleSandbox(Sandbox):
    """Namespaces of this machine (areal docs sandbox): the system's folders, Python and the installed packages,
    read-only, and an empty /tmp in memory. Processes that a command leaves running end with the command."""

    def __init__(self, programs: Programs, limits: Limits) -> None:
        self._programs, self._limits = programs, limits
        self._commands: Commands | None = None

    async def start(self, seconds: float) -> None:
        """Raises SandboxError."""
        limits = self._limits
        sizes = {"memory_bytes": size_of(limits.memory), "disk_bytes": size_of(limits.disk)}
        sandbox = await self._programs.namespaces()
        self._commands = await sandbox.stay(self._programs.slot, processes=limits.processes, **sizes)

    async def exec(self, *command: str, seconds: float, stdin: bytes = b"", most_bytes: int = OUTPUT_BYTES) -> Ran:
        if self._commands is None:
            raise SandboxError("the sandbox was not started")
        output = Output(most_bytes)
        limits = {"wall_seconds": seconds, "cpu_seconds": seconds * self._limits.cpus}
        status, code = await self._commands.run(command, stdin, limits, output)
        if status == "memory":
            output.add(b"\n[it was ended: it exceeded its limit of memory]")
        return Ran(137 if status == "memory" else code, bytes(output))

    async def close(self) -> None:
        if self._commands is not None:
            self._commands.close()


class ContainerSandbox(Sandbox):
    """A container of docker or podman, by default without network and capabilities. The container ends with the process
    that started it, even if the process is killed."""

    def __init__(
        self, program: str, image: str, label: str, limits: Limits, arguments: Sequence[str], programs: Programs
    ) -> None:
        self._program, self._image, self._programs = program, image, programs
        self._name = f"areal-{uuid.uuid4().hex}"
        self._options = [
            f"--name={self._name}",
            f"--{_FIELD}{label}",
            f"--network={limits.network}",
            f"--memory={limits.memory}",
            f"--memory-swap={limits.memory}",
            f"--cpus={limits.cpus}",
            f"--pids-limit={limits.processes}",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            *arguments,
        ]
        self._container: asyncio.subprocess.Process | None = None

    async def start(self, seconds: float) -> None:
        """Raises SandboxError."""
        run = ["run", "--interactive", "--rm", "--pull=never", "--entrypoint=sh", *self._options, self._image]
        self._container = await asyncio.create_subprocess_exec(
            *tied(self._program, *run, "-c", _WAITS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._container.stdout is not None and self._container.stderr is not None  # both are pipes
        with explain(TimeoutError, f"{self._image} did not start within {seconds:g} s", SandboxError):
            async with asyncio.timeout(seconds):
                started = await self._container.stdout.readline()
                reason = b"" if started else await self._container.stderr.read()
        if not started:
            why = reason.decode(errors="replace").strip()
            raise SandboxError(f"{self._program} does not start {self._image}: {why}")

    async def exec(self, *command: str, seconds: float, stdin: bytes = b"", most_bytes: int = OUTPUT_BYTES) -> Ran:
        inside = self._program, "exec", "--interactive", self._name, *command
        status = None
        async with self._programs.slot():
            try:
                status, printed = await finish(*inside, stdin=stdin, seconds=seconds, most_bytes=most_bytes)
            finally:
                if status is None:  # end all but the container's first process, which the kernel spares
                    await self._end("exec", self._name, "sh", "-c", "kill -9 -1")
        if self._container is None or self._container.returncode is not None:
            raise SandboxError(f"the container of {self._image} has ended")
        return Ran(status, printed)

    async def close(self) -> None:
        if self._container is None:
            return
        assert self._container.stdin is not None  # it is a pipe
        self._container.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._container.wait()
        except TimeoutError:
            self._container.kill()
            await self._end("rm", "--force", self._name)

    async def _end(self, *command: str) -> None:
        await finish(self._program, *command, seconds=END_SECONDS)


async def pull_image(program: str, image: str, folder: str | None, seconds: float) -> None:
    """Have an image here: already present, built from a `folder` with a Dockerfile, or pulled. Raises SandboxError."""
    if (await finish(program, "image", "inspect", image, seconds=END_SECONDS))[0] == 0:
        return
    command = ["build", "--quiet", "--tag", image, folder] if folder else ["pull", "--quiet", image]
    status, printed = await finish(program, *command, seconds=seconds, most_bytes=2000)
    if status != 0:
        reason = f"it took longer than {seconds:g} s" if status is None else printed.decode(errors="replace").strip()
        raise SandboxError(f"{program} cannot {command[0]} the image {image}: {reason}")


async def end_containers(program: str, label: str) -> None:
    """End the containers with this label."""
    _, listed = await finish(
        program, "ps", "--all", "--quiet", f"--filter={_FIELD}{label}", seconds=END_SECONDS, most_bytes=1 << 20
    )
    if names := listed.decode(errors="replace").split():
        await finish(program, "rm", "--force", *names, seconds=END_SECONDS)


class SandboxService:
    """A service of sandboxes, behind HTTP. A lost request is sent again with the same id, and gets the first answer."""

    def __init__(self, url: str) -> None:
        import aiohttp  # a web library, which few runs need

        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
        self._http = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self._http.close()

    async def ask(
        self, method: str, path: str, body: dict[str, Any], seconds: float, most_bytes: int = 0
    ) -> dict[str, Any] | None:
        """Return the service's answer to a request of at most `seconds` and GRACE_SECONDS, or None if the service does
        not know the path. Raises SandboxError."""
        import aiohttp

        loop = asyncio.get_running_loop()
        end = loop.time() + seconds + GRACE_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(min(end, loop.time() + seconds + GRACE_SECONDS / 3)):
                    status, answer = await self._send(method, path, body, OUTPUT_BYTES + 2 * most_bytes)
            except (OSError, ValueError, aiohttp.ClientError) as error:  # a TimeoutError included
                status, answer = 503, {"error": str(error) or type(error).__name__}
            if status < 300 or status == 404:
                return answer if status < 300 else None
            if status < 500 or loop.time() + AGAIN_SECONDS > end:
                raise SandboxError(f"{self.url}{path}: {str(answer.get('error', status)):.{ERROR_LENGTH}}")
            await asyncio.sleep(AGAIN_SECONDS)

    async def _send(self, method: str, path: str, body: dict[str, Any], most_bytes: int) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer. Redirects are not followed. Raises errors of aiohttp, and ValueError if the
        answer is to another request."""
        text = bytearray()
        async with self._http.request(method, self.url + path, json=body, allow_redirects=False) as response:
            if 300 <= response.status < 400:
                return 400, {"error": f"it sends elsewhere (status {response.status}): name that address"}
            async for part in response.content.iter_any():
                text += part
                if len(text) > most_bytes:
                    raise ValueError(f"the answer has more than {most_bytes} bytes")
        with explain((ValueError, RecursionError), "the answer is not JSON", ValueError):
            answer = json.loads(text or "{}")
        if not isinstance(answer, dict) or (response.status < 300 and answer.get("id") != body.get("id")):
            raise ValueError("the answer is to another request")
        return response.status, answer

    async def end_all(self, label: str) -> None:
        """End the sandboxes with this label. Raises SandboxError."""
        listed = await self.ask("GET", f"/sandboxes?label={label}", {}, 0.0) or {}
        names = listed.get("sandboxes", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SandboxError(f"{self.url} lists no names of sandboxes")
        for name in names:
            await self.ask("DELETE", f"/sandboxes/{quote(name, safe='')}", {}, END_SECONDS)


class HttpSandbox(Sandbox):
    """A sandbox of a service."""

    def __init__(self, service: SandboxService, image: str | None, label: str, limits: Limits) -> None:
        self._service = service
        self._path = f"/sandboxes/{uuid.uuid4().hex}"
        self._wanted = {"image": image, "label": label, "limits": vars(limits), "idle_seconds": IDLE_SECONDS}

    async def start(self, seconds: float) -> None:
        """Raises SandboxError."""
        if await self._service.ask("PUT", self._path, self._wanted, seconds) is None:
            raise SandboxError(f"{self._service.url} starts no sandboxes: it does not know PUT {self._path}")

    async def exec(self, *command: str, seconds: float, stdin: bytes = b"", most_bytes: int = OUTPUT_BYTES) -> Ran:
        job = {"command": command, "stdin": base64.b64encode(stdin).decode()}
        body = job | {"id": uuid.uuid4().hex, "seconds": seconds, "most_bytes": most_bytes}
        answer = await self._service.ask("POST", f"{self._path}/exec", body, seconds, most_bytes)
        if answer is None:
            raise SandboxError(f"{self._service.url} has ended the sandbox")
        with explain(
            (LookupError, TypeError, ValueError, OverflowError),
            f"{self._service.url} answers without {{why}}",
            SandboxError,
        ):
            status, printed = answer["status"], base64.b64decode(answer["output"], validate=True)
            return Ran(None if status is None else int(status), printed)

    async def close(self) -> None:
        with contextlib.suppress(SandboxError):  # the service ends the sandbox later, or the next start of the run does
            await self._service.ask("DELETE", self._path, {}, 0.0)
