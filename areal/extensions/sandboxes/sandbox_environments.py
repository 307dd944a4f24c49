"""Episodes in a sandbox, in which the policy runs shell commands. The environment is called `docker:IMAGE`,
`podman:IMAGE`, `bubble`, `http://HOST`, or `sandbox:package.module:function`.

The policy may have replaced any program in the sandbox, `sh` included. So the tests of an isolated task run in a new
sandbox, into which one folder is copied. Tests of other tasks need the whole sandbox, and run in the policy's own.
"""

import contextlib
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config.scoring import SandboxConfig
from areal.data.rows import Prompt, Row
from areal.extensions.agents.tool_calls import use_tools
from areal.extensions.environments import environments
from areal.extensions.programs.outside import SandboxError, open_sandbox
from areal.extensions.programs.slots import NO_NAMESPACES
from areal.extensions.sandboxes.sandbox_owner import CONTAINERS, PROVIDER, Sandboxes, is_url, run_own, written
from areal.extensions.sandboxes.sandbox_tasks import RowError, Task, task_of
from areal.extensions.sandboxes.sandbox_tools import SandboxTools
from areal.extensions.sandboxes.sandboxes import Limits, Sandbox, copy_folder
from areal.extensions.sandboxes.task_tests import downloads, path_outside
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import Turns
from areal.workflows.conversation import messages_of
from areal.workflows.named_workflows import with_hooks
from areal.workflows.session import Session

_COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
# The most bytes that are read of a file with a reward.
REWARD_BYTES = 1000
# The path of a folder of tests in the sandbox.
TESTS = "/tests"
# The exit status of a shell that does not find a program.
NOT_FOUND = 127


def _reward_files(path: str) -> tuple[str, str]:
    return path, str(PurePosixPath(path).with_suffix(".json"))


class SandboxEnvironment:
    """One episode. The first ```bash block of a turn is run, and the policy sees the output next. A turn without a
    block is the last: the tests then give the reward. command, folder, image: for rows without their own. isolated: as
    in `task_of`. docs/sandbox.md describes the other options."""

    def __init__(
        self, prefix: str, name: str, *, folder: str | None = None, isolated: bool | None = None,
        command: str | None = None, image: str | None = None,
        network: str = "none", memory: str = "1g", cpus: float = 1.0, processes: int = 256, disk: str = "256m",
        arguments: Sequence[str] = (), max_output: int = 4000, timeout_seconds: float = 60.0,
    ) -> None:  # fmt: skip
        """prefix, name: the environment is called `prefix:name`."""
        self.provider = {"http": f"http:{name}", "https": f"https:{name}", "sandbox": name}.get(prefix, prefix)
        if prefix in CONTAINERS:
            image = name or image
        self._defaults = {"command": command, "folder": folder, "image": image}
        self._isolated = isolated
        self._limits = Limits(memory, cpus, processes, disk, network)
        self._arguments, self._max_output, self._timeout = arguments, max_output, timeout_seconds
        self.sandboxes: Sandboxes | None = None
        """The owner of the sandboxes, set before the first call."""
        self._sandbox_stack = contextlib.AsyncExitStack()

    def rehearse(self, sandbox: SandboxConfig) -> None:
        """Look for the program and the image. Raises UserError."""
        image = self._defaults["image"]
        named = f"The environment '{self.provider}{f':{image}' if image else ''}'"
        folder = self._defaults["folder"]
        if folder is not None and not (PurePosixPath(folder).is_absolute() and PurePosixPath(folder).name):
            raise UserError(f"{named}: folder is {folder}, but has to be the absolute path of a folder below /.")
        if self.provider not in CONTAINERS:
            if self.provider == "bubble":
                if sandbox.url or sandbox.mode != "namespaces":
                    raise UserError(NO_NAMESPACES)
                open_sandbox(sandbox).close()
            elif not is_url(self.provider):
                extensions.find("provider", self.provider, PROVIDER)
            return
        if not shutil.which(self.provider):
            raise UserError(f"{named} needs {self.provider}, which is not installed here: install it.")
        look = [self.provider, *(["image", "inspect", image] if image else ["info"])]
        with explain(subprocess.TimeoutExpired, f"{named}: {self.provider} has no answer within {self._timeout:g} s."):
            looked = subprocess.run(look, capture_output=True, text=True, check=False, timeout=self._timeout)
        if looked.returncode:
            why = looked.stderr.strip().rpartition("\n")[2]
            raise UserError(f"{named} cannot be started ({why}): pull the image, or start {self.provider}'s service.")

    def examine(self, rows: Iterator[Row]) -> None:
        """Print a note if tests of rows look at paths outside the copied folder, or download without a network."""
        tasks = []
        for row in rows:
            with contextlib.suppress(RowError):  # the row is discarded at its turn
                tasks.append(self._task_of(row))
        elsewhere = [name for task in tasks if self._isolated and (name := path_outside(task))]
        if elsewhere:
            print(
                f"Note: the tests of {len(elsewhere)} of {len(tasks)} rows name paths outside of the folder that is "
                f"copied to them, such as {elsewhere[0]}: what a policy does there is not seen with isolated=true.",
                file=sys.stderr,
            )
        loading = sum(map(downloads, tasks)) if self._limits.network == "none" else 0
        if loading:
            print(
                f"Note: the tests of {loading} of {len(tasks)} rows download, but the sandbox has no network: set "
                f"environment_options.network, or all may get 0.",
                file=sys.stderr,
            )

    def _task_of(self, row: Row) -> Task:
        """Return the row's task. Raises RowError."""
        return task_of(row.fields, isolated=self._isolated, **self._defaults)

    async def reset(self, row: Row) -> Prompt:
        """Start the sandbox, and return the row's prompt. Raises SandboxError, and RowError if nothing can judge."""
        self.task = self._task_of(row)
        self.task.check()
        self.sandbox = await self._sandbox_stack.enter_async_context(self._opened())
        self.tools = SandboxTools(self.sandbox, self.task, self._timeout, self._max_output)
        return row.prompt

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Run the command in a turn, or judge. Raises SandboxError if the sandbox is lost."""
        match = _COMMAND.search(action)
        if match:
            text, ending = await self.tools.run(match[1])
            return f"```output\n{text}\n```\nexit status: {ending}", 0.0, False
        return "", await self.judge(), True

    async def judge(self) -> float:
        """Return the reward of the policy's state. Raises RowError if the tests never give a reward, and SandboxError
        if a sandbox is lost or the tests take too long."""
        if self.task.isolated:
            async with self._opened() as new:
                await self._make_ready(new)
                copied = await copy_folder(self.sandbox, new, str(self.task.folder), self._timeout)
                reward = await self._graded(new) if copied else None
        else:
            reward = await self._graded(self.sandbox)
        if reward is None:  # either the policy did this, or the task cannot be judged
            await self._check_judging()
        return reward or 0.0

    async def _check_judging(self) -> None:
        """Raise RowError if the tests give no reward in a sandbox without a policy."""
        async with self._opened() as new:
            await self._make_ready(new)
            folder = self.task.folder
            if self.task.isolated and not await copy_folder(new, new, str(folder), self._timeout):
                raise RowError(
                    f"the folder {folder} cannot be copied within {self._timeout:g} s, even without a policy"
                )
            if await self._graded(new) is None:
                raise RowError(f"{self._no_reward()}, not even without a policy")

    def _no_reward(self) -> str:
        if self.task.reward_file:
            return f"the tests cannot be put there, or write no number into {self.task.reward_file}"
        return f"the row's command calls a program that is not found (exit status {NOT_FOUND})"

    async def _make_ready(self, sandbox: Sandbox) -> None:
        """Prepare a new sandbox for the tests. Raises SandboxError."""
        if self.task.ready:
            await written(sandbox, self.task.tests, self._timeout)
            await run_own(sandbox, self.task, self.task.ready, self._timeout)

    async def _graded(self, sandbox: Sandbox) -> float | None:
        """Return the tests' reward, or None if the tests cannot be put there, wrote no reward, or a program was not
        found. Raises SandboxError if the tests do not end in time: slow tests do not prove the work wrong."""
        task, seconds = self.task, self.task.seconds or self._timeout
        if not await self._put_tests(sandbox):
            return None
        ran = await sandbox.exec(*task.shell(str(task.command)), seconds=seconds)
        if ran.status is None:
            raise SandboxError(f"the tests did not end within {seconds:g} s: raise the row's seconds")
        if task.reward_file is None:
            return None if ran.status == NOT_FOUND else float(ran.status == 0)
        for path in _reward_files(task.reward_file):
            text = await sandbox.read(path, self._timeout, most_bytes=REWARD_BYTES)
            with contextlib.suppress(ValueError, LookupError, TypeError):
                value = json.loads(text or b"")
                return float(value["reward"] if isinstance(value, dict) else value)
        return None

    async def _put_tests(self, sandbox: Sandbox) -> bool:
        """Put the tests in place of anything that the policy left there. Return whether that worked."""
        task = self.task
        leftovers = [*_reward_files(task.reward_file)] if task.reward_file else []
        if task.tests_folder:
            leftovers.append(TESTS)
        if leftovers and (await sandbox.exec("rm", "-rf", *leftovers, seconds=self._timeout)).status != 0:
            return False
        if not await written(sandbox, task.tests, self._timeout):
            return False
        return not task.tests_folder or await sandbox.upload(Path(task.tests_folder), TESTS, self._timeout)

    def _opened(self) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        assert self.sandboxes is not None  # set by the maker of the environment
        return self.sandboxes.opened(self.provider, self.task, self._limits, self._timeout, self._arguments)

    async def close(self) -> None:
        """End the sandbox, with all its processes."""
        await self._sandbox_stack.aclose()


# The environments of the table: by the prefix before the colon of a name, and for names without a colon.
docker, podman, bubble, http, https, sandbox = (
    functools.partial(SandboxEnvironment, prefix)
    for prefix in ("docker", "podman", "bubble", "http", "https", "sandbox")
)
any_docker, any_podman, any_bubble = (functools.partial(named, "") for named in (docker, podman, bubble))


@with_hooks(check=environments.check, rehearse=environments.rehearse, examine=environments.examine)
async def sandbox_tools(
    session: Session,
    row: Row,
    *,
    environment: str,
    environment_options: dict[str, Any] | None = None,
    max_turns: Turns = 30,
) -> Trajectory:
    """Give the policy a shell and an editor in a sandbox until a turn without a call, or for `max_turns` turns. Then
    the row's tests give the reward. environment: a name of a sandbox."""
    async with environments.opened(environment, environment_options or {}, session) as world:
        if not isinstance(world, SandboxEnvironment):
            raise UserError(f"The environment {environment!r} of the workflow sandbox_tools is no sandbox.")
        prompt = await world.reset(row)
        await use_tools(session, messages_of(prompt), world.tools, max_turns)
        reward = await world.judge()
    return session.trajectory(reward)
