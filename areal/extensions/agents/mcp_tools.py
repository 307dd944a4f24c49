"""Tools of MCP servers (Model Context Protocol).

A server with a command is a program, started anew for each sample, so that samples do not share its state. A server
with a URL (streamable HTTP) runs elsewhere and serves all samples.
"""

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Any, TextIO

from pydantic import BaseModel

from areal.base.errors import UserError, explain
from areal.base.processes import find_program, plain_environment, tied

# The time limit of a server's start and of a tool's call, unless the user sets another.
TIMEOUT_SECONDS = 60.0
# The time in which a server has to end. The library closes the server's input, and kills a server that goes on.
END_SECONDS = 10.0
# The end of a server's stderr that an error message quotes.
ERROR_CHARACTERS = 300
# All samples share the certificates: loading them takes 20 ms.
_certificates = functools.cache(lambda: importlib.import_module("httpx2").create_ssl_context())


class Server(BaseModel, extra="forbid"):
    """A server: a command with arguments and environment variables besides the plain ones (`env` with values,
    `pass_env` from this process), or a URL."""

    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    pass_env: list[str] = []
    url: str | None = None


class ServerFailed(Exception):
    """A server did not start, was lost, or gave a result that is no text. The sample fails, without a low score."""


class ServerTools:
    """The tools of some servers, in one sample.

    shown: the tools as chat templates take them.
    """

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self._owners: dict[str, tuple[str, Any]] = {}

    def add(self, server: str, client: Any, tools: list[Any]) -> None:
        """Add a server's tools. Raises ServerFailed if another tool has the same name."""
        for tool in tools:
            if tool.name in self._owners:
                raise ServerFailed(f"MCP servers {self._owners[tool.name][0]!r} and {server!r} both have {tool.name}")
            self._owners[tool.name] = server, client
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            self.shown.append({"type": "function", "function": function})

    async def call(self, name: str, arguments: str) -> str:
        """Return the whole result of a tool, or its error, as text. `arguments`: JSON. Raises ServerFailed if the
        server is lost, or for a result that is no text."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if name not in self._owners:
            return f"Error: there is no tool {name}"
        fields = None
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(arguments)
        if not isinstance(fields, dict):
            return f"Error: the arguments of {name} are no JSON object"
        server, client = self._owners[name]
        try:
            result = await client.call_tool(name, fields)
        except Exception as error:  # the tool takes too long, or the library refuses its result
            if isinstance(error, MCPError) and error.code == CONNECTION_CLOSED:
                raise ServerFailed(f"the MCP server {server!r} was lost while {name} ran") from error
            return f"Error: {error}"
        return text_of_result(result, name)


def check(servers: Mapping[str, Server]) -> None:
    """Check all that can be checked without a start. Raises UserError."""
    where = "rollout_manager.workflow_options.servers"
    if importlib.util.find_spec("mcp") is None:
        raise UserError("The workflow tools needs the MCP library: pip install 'mcp==2.3.0'.")
    for name, server in servers.items():
        if bool(server.command) == bool(server.url):
            raise UserError(f"{where}.{name} needs one of command and url.")
        if server.command and not find_program(server.command):
            raise UserError(f"There is no program {server.command!r} to start: correct {where}.{name}.command.")


def rehearse(options: Mapping[str, Any]) -> None:
    """Start each server of the options once. Raises UserError if a server fails, or two tools have the same name."""
    servers = {name: Server.model_validate(server) for name, server in options["servers"].items()}

    async def once() -> None:
        async with opened(servers, options.get("timeout_seconds", TIMEOUT_SECONDS)):
            pass

    with explain(ServerFailed, "rollout_manager.workflow_options.servers: {why}."):
        asyncio.run(once())


@contextlib.asynccontextmanager
async def opened(servers: Mapping[str, Server], timeout_seconds: float) -> AsyncIterator[ServerTools]:
    """Open new sessions with the servers, and close them at the end of the block. A start and a call have
    `timeout_seconds`. Raises ServerFailed."""
    tools = ServerTools()
    async with contextlib.AsyncExitStack() as stack:
        for name, server in servers.items():
            tools.add(name, *await stack.enter_async_context(_session(name, server, timeout_seconds)))
        yield tools


@contextlib.asynccontextmanager
async def _session(name: str, server: Server, timeout_seconds: float) -> AsyncIterator[tuple[Any, list[Any]]]:
    """Open a session with a server, and list the server's tools.

    A separate task holds the session open. In the task that uses the session, the library would cancel the sample when
    the server is lost, and wrap the sample's own exceptions into groups.
    """
    ready: asyncio.Future[tuple[Any, list[Any]]] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        holder = asyncio.create_task(_run_session(server, timeout_seconds, errors, ready, over))
        try:
            ends: set[asyncio.Future[Any]] = {holder, ready}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise ServerFailed(f"the MCP server {name!r} did not start: {_reason(holder)}{_last_line(errors)}")
            yield ready.result()
        finally:
            if ready.done():
                over.set()
            else:
                holder.cancel()
            await asyncio.wait({holder}, timeout=END_SECONDS)


async def _run_session(
    server: Server,
    timeout_seconds: float,
    errors: TextIO,
    ready: asyncio.Future[tuple[Any, list[Any]]],
    over: asyncio.Event,
) -> None:
    """Start a session, set `ready` to the session and its tools, and end the session when it is `over`."""
    import httpx2
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    async with contextlib.AsyncExitStack() as stack:
        if server.command:
            program, *arguments = tied(server.command, *server.args)
            environment = plain_environment(server.pass_env) | server.env
            started = StdioServerParameters(command=program, args=arguments, env=environment)
            transport = stdio_client(started, errors)
        else:
            # The session limits the time to read a result.
            http = httpx2.AsyncClient(verify=_certificates(), timeout=httpx2.Timeout(timeout_seconds, read=None))
            transport = streamable_http_client(str(server.url), http_client=await stack.enter_async_context(http))
        async with _starts(asyncio.get_running_loop()), asyncio.timeout(timeout_seconds):
            client = await stack.enter_async_context(Client(transport, read_timeout_seconds=timeout_seconds))
            page = await client.list_tools()
            tools = page.tools
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                tools = [*tools, *page.tools]
        ready.set_result((client, tools))
        await over.wait()


@functools.cache
def _starts(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """Limit the servers that start at once: more would only delay each other, up to their deadline."""
    return asyncio.Semaphore(len(os.sched_getaffinity(0)))


def _reason(failed: asyncio.Task[None]) -> str:
    error = failed.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it took too long" if isinstance(error, TimeoutError) else str(error)


def _last_line(errors: TextIO) -> str:
    """Return the last line that a server wrote, as the end of a sentence."""
    errors.seek(0)
    lines = errors.read().split("\n")
    return next((f" ({line[-ERROR_CHARACTERS:].strip()})" for line in reversed(lines) if line.strip()), "")


def text_of_result(result: Any, tool: str) -> str:
    """Return the whole result as text. Raises ServerFailed for a result that is no text."""
    texts = [_text(part, tool) for part in result.content]
    if not _is_repeated(result.structured_content, texts):
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(text for text in texts if text)


def _text(part: Any, tool: str) -> str:
    """Return the text of a part of a result, or the address of a resource. Raises ServerFailed for any other part."""
    content = getattr(part, "resource", part)
    if isinstance(text := getattr(content, "text", None), str):
        return text
    if part.type == "resource_link":
        return " ".join(word for word in (part.name, part.title, part.description, str(part.uri)) if word)
    raise ServerFailed(
        f"the MCP tool {tool} has answered with a part of the type {part.type} ({content.mime_type}), which the "
        f"workflow tools cannot show to the policy: have the tool say it as text"
    )


def _is_repeated(structured: Any, texts: list[str]) -> bool:
    """Return whether the texts already contain the structured content of a result, as JSON. Some servers put a value
    that is no object under `result`; the bare value counts, too."""
    values = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        values += structured.values()
    readings: list[Any] = [texts, *texts]
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            readings.append(json.loads(text))
    written = functools.partial(json.dumps, sort_keys=True)  # in JSON, true is not 1
    return structured is None or not {*map(written, values)}.isdisjoint(map(written, readings))
