"""Tools for a policy in a sandbox: a shell and an editor of files, described as in OpenAI's API. The workflows and the
other protocols of agents take this form too."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from areal.extensions.sandboxes.sandbox_tasks import Task
from areal.extensions.sandboxes.sandboxes import OUTPUT_BYTES, Sandbox

NO_TASK = Task()


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class SandboxTools:
    """The tools of the sandbox of a task. timeout_seconds: the most that a call may take. max_output: the most bytes of
    an output; a longer output is cut in the middle. `shown` belongs into a request; `await tools.call("shell",
    '{"command": "ls"}')` returns a result."""

    shown: Sequence[dict[str, Any]] = (
        _tool("shell", "Run a shell command. Returns its output and its exit status.", command="the command"),
        _tool(
            "edit",
            "Replace text in a file. An empty old text writes the whole file.",
            path="the absolute path of the file",
            old="the text to replace, which has to be in the file once",
            new="the text to put there",
        ),
    )

    def __init__(
        self, sandbox: Sandbox, task: Task = NO_TASK, timeout_seconds: float = 60.0, max_output: int = 4000
    ) -> None:
        self._sandbox, self._task = sandbox, task
        self._seconds, self._max_output = timeout_seconds, max_output

    async def call(self, name: str, arguments: str) -> str:
        """Return the result of a tool, or an error of the call, as text for the policy. arguments: JSON. Raises
        SandboxError if the sandbox is lost."""
        fields = None
        with suppress(ValueError, RecursionError):
            fields = json.loads(arguments)
        tools = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in self.shown}
        if name not in tools:
            return f"Error: there is no tool {name}"
        if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in tools[name]):
            return f"Error: the arguments of {name} have to be a JSON object with the texts {', '.join(tools[name])}"
        if name == "shell":
            return "\nexit status: ".join(await self.run(fields["command"])).lstrip()
        return await self._edit(fields["path"], fields["old"], fields["new"])

    async def run(self, code: str) -> tuple[str, str]:
        """Run shell code. Return the output, and the exit status or a sentence about the exceeded time."""
        ran = await self._sandbox.exec(*self._task.shell(code), seconds=self._seconds, most_bytes=self._max_output)
        killed = f"killed after {self._seconds:g} s, with all that it had started"
        return ran.text, killed if ran.status is None else str(ran.status)

    async def _edit(self, path: str, old: str, new: str) -> str:
        if old:
            content = await self._sandbox.read(path, self._seconds, most_bytes=OUTPUT_BYTES)
            if content is None or len(content) == OUTPUT_BYTES:
                return f"Error: {path} cannot be read, or has {OUTPUT_BYTES} bytes or more"
            text = content.decode(errors="surrogateescape")
            if (times := text.count(old)) != 1:
                return f"Error: the old text is {times} times in {path}, but has to be there once"
            new = text.replace(old, new)
        ok = await self._sandbox.write(path, new.encode(errors="surrogateescape"), self._seconds)
        return f"{path} is written" if ok else f"Error: {path} cannot be written"
