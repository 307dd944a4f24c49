"""Runs programs written by a model in a sandbox.

    with closing(open_sandbox(SandboxConfig())) as sandbox:
        outcome = await sandbox.run("print(int(input()) + 1)", stdin="41")
        assert outcome.stdout == "42\\n"

On this machine every program runs in separate Linux namespaces (`inside.py`), and sees only the system's folders and
a small working folder, removed afterwards. Before the first program runs, a probe tries to break out of the
sandbox; if the probe succeeds, no program is run. With `sandbox.url`, a SandboxFusion server runs programs instead.

Everything that a program does is returned as an `Outcome`. A failure of the sandbox itself raises SandboxError.
"""

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import sysconfig
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from areal.base.children import Output
from areal.base.errors import ToolError, UserError, explain
from areal.config.scoring import SandboxConfig
from areal.extensions.programs import inside as sandbox_init

# Opens a block that has a slot. Calling the block's value gives the slot back before the end of the block.
Slot = Callable[[], AbstractAsyncContextManager[Callable[[], None]]]
Status = Literal["ok", "killed", "timeout", "memory", "output", "not_compiled"]

MIB = 1 << 20
START_SECONDS = 30.0
# Time beyond wall_seconds after which a sandbox on a busy machine counts as failed.
GRACE_SECONDS = 30.0
COMPILE_SECONDS = 60.0
COMPILE_MIB = 2048
ADVICE = (
    "allow namespaces (in Docker: --security-opt seccomp=unconfined --security-opt systempaths=unconfined; if AppArmor "
    "forbids them: sysctl kernel.apparmor_restrict_unprivileged_userns=0), set sandbox.url to a SandboxFusion server, "
    "or, only if every program is trusted, set sandbox.mode=none"
)


class SandboxError(ToolError):
    """The sandbox failed, not the program."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program. status: `ok` (the program ended by itself), `killed` (by a signal), `timeout`, `memory`
    or `output` (ended at this limit), `not_compiled` (stderr says why). exit: the exit code, the negative number of the
    signal, or None. stdout and stderr: the output, cut at the limit."""

    status: Status
    exit: int | None
    stdout: str
    stderr: str

    @property
    def transcript(self) -> str:
        """Text for the author of the program: the output, and a note if the program did not end by itself."""
        end = "" if self.status == "ok" else f"[it was ended: {self.status}]"
        return f"{self.stdout}{self.stderr}{end}"

    @property
    def succeeded(self) -> bool:
        return self.status == "ok" and self.exit == 0


@dataclass(frozen=True, slots=True)
class Language:
    """The way to run a program: an optional `compiler` compiles `file` to `program`; then `command` runs the result."""

    file: str
    command: tuple[str, ...]
    compiler: tuple[str, ...] = ()


PYTHON = os.path.realpath(sys.executable)
# The names of languages are SandboxFusion's.
LANGUAGES = {
    "python": Language("main.py", (PYTHON, "main.py")),
    "cpp": Language("main.cpp", ("./program",), ("g++", "-O2", "-std=c++17", "-o", "program", "main.cpp")),
    "nodejs": Language("main.js", ("node", "main.js")),
    "bash": Language("main.sh", ("bash", "main.sh")),
}


def open_sandbox(config: SandboxConfig) -> "ProgramSandbox":
    """Open the sandbox of the configuration, and test it. Raises UserError if the test fails."""
    return RemoteSandbox(config, config.url) if config.url else LocalSandbox(config)


class LocalSandbox:
    """Runs programs on this machine. Several programs may run at once."""

    def __init__(self, config: SandboxConfig) -> None:
        """Start the launcher and, in mode namespaces, the probe. Raises UserError if either fails."""
        self._config = config
        self._built: dict[tuple[str, str], bytes | Outcome] = {}
        self._launcher, self._requests = _launch(config)
        if config.mode == "namespaces":
            try:
                self._probe()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End all programs."""
        self._requests.close()
        try:
            self._launcher.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    async def run(
        self,
        code: str,
        language: str = "python",
        *,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        expected: int = 0,
        cpu_seconds: float | None = None,
    ) -> Outcome:
        """Run a program with the input `stdin` and with `files` (content by path) in its folder. The output may have
        `output_kib` more than the `expected` bytes. cpu_seconds: replaces the configuration's limit. Raises
        SandboxError. If the caller is cancelled, the program is killed."""
        spoken = LANGUAGES.get(language)
        if spoken is None:
            raise SandboxError(f"there is no language {language!r} here, only {', '.join(LANGUAGES)}")
        files = {**(files or {}), spoken.file: code.encode(errors="replace")}
        if spoken.compiler:
            built = await self._build(code, language, files)
            if isinstance(built, Outcome):
                return built
            files = {**files, "program": built}
        job = self._job(spoken.command, files)
        if cpu_seconds:
            job["cpu_seconds"] = cpu_seconds
        outcome, _ = await self._execute(job, stdin, expected)
        return outcome

    async def _build(self, code: str, language: str, files: Mapping[str, bytes]) -> bytes | Outcome:
        """Return the compiled program, or a failed compilation's outcome. The last one is kept for further tests."""
        key = (code, language)
        if key not in self._built:
            job = self._job(LANGUAGES[language].compiler, files) | {
                "keep": ["program"],
                "cpu_seconds": COMPILE_SECONDS,
                "wall_seconds": 2 * COMPILE_SECONDS,
                "memory_bytes": COMPILE_MIB * MIB,
            }
            outcome, outputs = await self._execute(job, "")
            failed = Outcome("not_compiled", outcome.exit, "", outcome.stderr)
            self._built = {key: outputs["program"] if outcome.succeeded and "program" in outputs else failed}
        return self._built[key]

    async def _execute(self, job: Mapping[str, Any], stdin: str, expected: int = 0) -> tuple[Outcome, dict[str, bytes]]:
        """Return the outcome of a job, and the remaining files that `keep` names."""
        run, out, err = self._ask(job, stdin)
        reader, writer = await asyncio.open_connection(sock=run, limit=1 << 30)
        limit = self._config.output_kib * 1024 + expected
        try:
            async with asyncio.timeout(job["wall_seconds"] + GRACE_SECONDS):
                texts = await asyncio.gather(_read(out, limit, writer), _read(err, limit, writer))
                answer = await reader.read()
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer within {GRACE_SECONDS:g} s after the time limit") from None
        finally:
            writer.close()
        return _outcome(_result(answer), *texts, limit)

    def _job(self, command: Sequence[str], files: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the job for the launcher: everything that the launcher learns about a program."""
        config = self._config
        return {
            "command": list(command),
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "keep": [],
            "cpu_seconds": config.cpu_seconds,
            "wall_seconds": config.wall_seconds,
            "memory_bytes": config.memory_mib * MIB,
            "processes": config.processes,
            "disk_bytes": config.disk_mib * MIB,
            "environment": {},
            "stays": False,
        }

    def _ask(self, job: Mapping[str, Any], stdin: str) -> tuple[socket.socket, BinaryIO, BinaryIO]:
        """Start a program. Returns the socket for the result, and the pipes of stdout and stderr."""
        if self._launcher.poll() is not None:
            self._requests.close()
            self._launcher, self._requests = _launch(self._config)
        run, its_run = socket.socketpair()
        (out, its_stdout), (err, its_stderr) = os.pipe(), os.pipe()
        stdout, stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        job_file, its_stdin = _sealed(json.dumps(job).encode()), _sealed(stdin.encode(errors="replace"))
        descriptors = [job_file, its_stdin, its_stdout, its_stderr, its_run.fileno()]
        try:
            socket.send_fds(self._requests, [b"."], descriptors)
        except OSError as error:
            for end in (run, stdout, stderr):
                end.close()
            raise SandboxError(f"the sandbox's launcher has ended: {error}") from error
        finally:
            for descriptor in descriptors[:4]:
                os.close(descriptor)
            its_run.close()
        return run, stdout, stderr

    async def stay(self, slot: Slot, **limits: float) -> "Commands":
        """Open a sandbox for many commands, until it is closed. A command runs in a `slot`. limits: keys of a job, in
        place of the configuration's. Raises SandboxError."""
        folders = os.pathsep.join(f"/packages/{number}" for number in range(len(_packages())))
        path = sandbox_init.ENVIRONMENT["PATH"]
        # Without namespaces no links lead to the run's Python.
        environment = {"PATH": f"{path}:{Path(PYTHON).parent}", "PYTHONPATH": folders}
        job = self._job(["true"], {}) | limits | {"stays": True, "environment": environment}
        run, stdout, stderr = self._ask(job, "")
        stdout.close()
        stderr.close()
        commands = Commands(job, slot, run, *await asyncio.open_connection(sock=run.dup(), limit=1 << 20))
        try:
            with explain(TimeoutError, "the sandbox does not answer", SandboxError):
                async with asyncio.timeout(START_SECONDS + GRACE_SECONDS):
                    await commands.answer(lambda: None)
        except BaseException:
            commands.close()
            raise
        return commands

    def _probe(self) -> None:
        """Run the probe. Raises UserError if the probe breaks out, or if no program runs at all."""
        files = {"main.py": PROBE.encode()}
        shown = {Path(folder).parts[1] for folder in _folders(self._config)}
        expected = {*sandbox_init.OWN_FOLDERS, *sandbox_init.SYSTEM_FOLDERS, "packages", *shown}
        host = {"expected": sorted(expected), "processes": self._config.processes}
        job = self._job(LANGUAGES["python"].command, files)
        run, stdout, stderr = self._ask(job, json.dumps(host))
        run.settimeout(START_SECONDS)
        with explain(
            (SandboxError, TimeoutError), f"programs cannot be run in a sandbox on this machine ({{why}}): {ADVICE}"
        ):
            with run, stdout, stderr:
                answer = b"".join(iter(lambda: run.recv(1 << 16), b""))
                printed, complaint = stdout.read(), stderr.read().decode()
            result = _result(answer)
        if result["exit"] != 0:
            reason = (complaint.strip().splitlines() or [result["status"]])[-1]
            raise UserError(f"programs cannot be run in a sandbox on this machine ({reason}): {ADVICE}")
        if leaks := json.loads(printed):
            raise UserError(f"the sandbox is not safe on this machine, programs can {', '.join(leaks)}: {ADVICE}")


class Commands:
    """Commands in turn in the same /tmp. A command and all its children have a slot until the command ends or waits."""

    def __init__(
        self,
        job: Mapping[str, Any],
        slot: Slot,
        run: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._job, self._slot, self._run, self._reader, self._writer = job, slot, run, reader, writer
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """End the sandbox, with all its processes."""
        self._writer.close()
        self._run.close()

    async def run(
        self, command: Sequence[str], stdin: bytes, limits: Mapping[str, float], output: Output
    ) -> tuple[Status, int | None]:
        """Run a command to its end. limits: keys of a job, among them `wall_seconds`, counted from the command's start.
        Returns the status and the exit code as in `Outcome`. Raises SandboxError. If the caller is cancelled after the
        start, the sandbox ends."""
        job = {**self._job, **limits, "command": list(command)}
        async with self._turn, self._slot() as give_back:
            try:
                with explain(OSError, "the sandbox has ended, or does not answer ({why})", SandboxError):
                    stdout = self._send(job, stdin)
                    async with asyncio.timeout(job["wall_seconds"] + GRACE_SECONDS):
                        reader, transport = await _connected(stdout)
                        with contextlib.closing(transport):
                            result, _ = await asyncio.gather(self.answer(give_back), _add_all(reader, output))
            except BaseException:
                self.close()
                raise
        return result["status"], result["exit"]

    def _send(self, job: Mapping[str, Any], stdin: bytes) -> BinaryIO:
        """Start a command. Returns the pipe of its output. Raises OSError."""
        out, its_out = os.pipe()
        stdout = os.fdopen(out, "rb", 0)
        descriptors = [_sealed(json.dumps(job).encode()), _sealed(stdin), its_out]
        try:
            socket.send_fds(self._run, [b"."], [*descriptors, its_out])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return stdout

    async def answer(self, on_idle: Callable[[], None]) -> dict[str, Any]:
        """Return the next result. on_idle: called once the command only waits. Raises SandboxError."""
        while "idle" in (result := _result(await self._reader.readline())):
            on_idle()
        return result


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: programs are sent only to the address in the configuration."""

    def redirect_request(self, *request: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class RemoteSandbox:
    """Runs programs on a SandboxFusion server, with the server's limits on memory, processes and files."""

    def __init__(self, config: SandboxConfig, url: str) -> None:
        """Run one test program. Raises UserError if that fails."""
        self._config = config
        self._address = f"{url.rstrip('/')}/run_code"
        with explain(SandboxError, f"sandbox.url is {config.url}, but {{why}}: start the server or correct the URL"):
            outcome = self._post("print(6 * 7)", "python", "", {})
        if outcome.stdout.strip() != "42":
            raise UserError(f"sandbox.url is {config.url}, but programs do not run there: {outcome.stderr[:300]}")

    def close(self) -> None:
        """Do nothing: no process was started."""

    async def run(
        self,
        code: str,
        language: str = "python",
        *,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        expected: int = 0,
        cpu_seconds: float | None = None,
    ) -> Outcome:
        """Run a program as LocalSandbox.run does, but with the server's own limit of CPU time. If the caller is
        cancelled, the server runs the program on until its time limit."""
        return await asyncio.to_thread(self._post, code, language, stdin, files or {}, expected)

    def _post(self, code: str, language: str, stdin: str, files: Mapping[str, bytes], expected: int = 0) -> Outcome:
        body = {
            "code": code,
            "language": language,
            "stdin": stdin,
            "compile_timeout": COMPILE_SECONDS,
            "run_timeout": self._config.wall_seconds,
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        }
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._address, data, {"Content-Type": "application/json"})
        seconds = COMPILE_SECONDS + self._config.wall_seconds + GRACE_SECONDS
        limit = self._config.output_kib * 1024 + expected
        most_bytes = MIB + 12 * limit  # both outputs; JSON writes a character in up to six bytes
        try:
            with _OPENER.open(request, timeout=seconds) as response:
                answer = response.read(most_bytes + 1)
            if len(answer) > most_bytes:
                return Outcome("output", None, "", "")
            return self._outcome(json.loads(answer), limit)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SandboxError(f"the sandbox server gave no answer ({type(error).__name__}: {error})") from error

    def _outcome(self, answer: Mapping[str, Any], limit: int) -> Outcome:
        if answer["status"] == "SandboxError":
            raise SandboxError(f"the sandbox server failed: {answer.get('message')}")
        ran = answer.get("run_result")
        if ran is None:
            compiled = answer["compile_result"]
            return Outcome("not_compiled", compiled["return_code"], "", compiled["stderr"] or "")
        stdout, stderr = ran["stdout"] or "", ran["stderr"] or ""
        code = ran["return_code"]
        status: Status = "ok" if code is None or code >= 0 else "killed"
        if ran["status"] == "TimeLimitExceeded":
            status, code = "timeout", None
        elif max(len(stdout), len(stderr)) > limit:
            status, code = "output", None
        return Outcome(status, code, stdout[:limit], stderr[:limit])


ProgramSandbox = LocalSandbox | RemoteSandbox


def _launch(config: SandboxConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a launcher, and wait for its readiness. Returns it and the socket for requests. Raises UserError."""
    folders = _folders(config)
    for folder in folders:
        if Path(folder).is_relative_to("/tmp"):
            raise UserError(f"{folder} is in /tmp, but every program has its own empty /tmp: move it, or leave it out")
    requests, its_requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    options = [config.mode, os.pathsep.join(_packages()), _delegated(config)]
    arguments = [str(its_requests.fileno()), *options, *folders]
    with its_requests:
        launcher = subprocess.Popen(
            [PYTHON, "-s", "-P", sandbox_init.__file__, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[its_requests.fileno()],
            env=sandbox_init.ENVIRONMENT,
        )
    requests.settimeout(START_SECONDS)
    try:
        _result(requests.recv(1 << 16))
    except (SandboxError, TimeoutError) as error:
        launcher.kill()
        launcher.wait()
        requests.close()
        raise UserError(f"programs cannot be run in a sandbox on this machine ({error}): {ADVICE}") from None
    return launcher, requests


def _delegated(config: SandboxConfig) -> str:
    """Return the control group for programs' own groups; empty without `sandbox.cgroup`. Raises UserError."""
    if config.cgroup is None:
        return ""
    with (
        explain(
            OSError,
            f"sandbox.cgroup={config.cgroup} cannot be used ({{strerror}}): name a control group of version 2 that "
            "has the memory controller and no process of its own, and that this user may change, or leave it out",
        ),
        open(config.cgroup / "cgroup.subtree_control", "r+") as file,
    ):
        file.write("+memory")
    return str(config.cgroup)


def _folders(config: SandboxConfig) -> list[str]:
    """Return the folders that programs see at the paths of this process, besides the system's folders."""
    return [os.path.realpath(sys.base_prefix), *map(os.path.realpath, config.folders)]


def _packages() -> list[str]:
    """Return the folders of installed packages (numpy, ...) in a virtual environment: importable in this process, but
    not by another interpreter of the same Python."""
    folders = dict.fromkeys(os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))
    return [folder for folder in folders if not Path(folder).is_relative_to(os.path.realpath(sys.base_prefix))]


def _sealed(content: bytes) -> int:
    """Return a descriptor of a file in memory with `content`, which no process can change."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)
    return descriptor


async def _connected(pipe: BinaryIO) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport


async def _add_all(reader: asyncio.StreamReader, output: Output) -> None:
    while part := await reader.read(1 << 16):
        output.add(part)


async def _read(pipe: BinaryIO, limit: int, stop: asyncio.StreamWriter) -> bytes:
    """Return the output of a pipe, at most one byte more than `limit`. A program that exceeds `limit` is stopped."""
    reader, transport = await _connected(pipe)
    with contextlib.closing(transport):
        try:
            text = await reader.readexactly(limit + 1)
        except asyncio.IncompleteReadError as end:
            return end.partial
    if stop.can_write_eof():
        stop.write_eof()
    return text


def _result(answer: bytes) -> dict[str, Any]:
    """Return the answer of the launcher. Raises SandboxError if the answer is empty or reports an error."""
    if not answer:
        raise SandboxError("the sandbox ended without a result")
    result = json.loads(answer)
    if "error" in result:
        raise SandboxError(result["error"])
    return result


def _outcome(result: Mapping[str, Any], stdout: bytes, stderr: bytes, limit: int) -> tuple[Outcome, dict[str, bytes]]:
    status, code = result["status"], result["exit"]
    if max(len(stdout), len(stderr)) > limit:
        status, code = "output", None
    elif status == "stopped":
        raise SandboxError("the program was stopped from outside")
    printed, complaint = (text[:limit].decode(errors="replace") for text in (stdout, stderr))
    files = {name: base64.b64decode(content) for name, content in result["files"].items()}
    return Outcome(status, code, printed, complaint), files


# The probe: the first program in a sandbox. The probe prints a list of the forbidden actions that succeeded.
PROBE = textwrap.dedent(
    """
    import ctypes, errno, json, os, socket, sys

    host = json.load(sys.stdin)
    libc = ctypes.CDLL(None, use_errno=True)

    def reads_the_host():
        return not set(os.listdir("/")) <= set(host["expected"])

    def sees_other_processes():
        return len([name for name in os.listdir("/proc") if name.isdigit()]) > 2 or os.getppid() != 1

    def opens_a_connection():
        try:
            socket.socket(socket.AF_INET)
        except OSError:
            return False
        return True

    def makes_namespaces():
        return libc.unshare(0x10000000) == 0

    def has_rights():
        with open("/proc/self/status") as file:
            return any(int(line.split()[1], 16) for line in file if line.startswith("Cap") and line[3] in "IPEA")

    def ignores_the_limit_of_processes():
        children = []
        try:
            while len(children) <= host["processes"]:
                pid = os.fork()
                if pid == 0:
                    os.read(pipe[0], 1)
                    os._exit(0)
                children.append(pid)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(pipe[1])

    pipe = os.pipe()
    attempts = {
        "read the host's files": reads_the_host,
        "see other processes": sees_other_processes,
        "open connections": opens_a_connection,
        "make namespaces": makes_namespaces,
        "use capabilities": has_rights,
        "start any number of processes": ignores_the_limit_of_processes,
    }
    print(json.dumps([what for what, attempt in attempts.items() if attempt()]))
    """
)
