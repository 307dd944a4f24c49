"""The tools of an actor's samples, for `session.tool(NAME)`: a sandbox for Python, an endpoint for agents.

A tool comes from an extension. A function with an entry of the kind `tool` in the table of extensions opens the tool:

    def open_search(tools: Tools) -> Search: ...

The first sample that asks for a tool opens it, all samples of the actor share the tool, and the actor's end closes it.
"""

import contextlib
import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from areal.base import extensions
from areal.config import Config
from areal.data.rows import Row

# Makes a block in which a sample waits for something that all samples share. `session.tool` has no part in it.
waiting: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("waiting", default=contextlib.nullcontext)


class Tool:
    """The interface of a tool to its actor."""

    @property
    def expects_rows(self) -> bool:
        """Whether `expect` is called for coming rows."""
        return False

    def expect(self, row: Row) -> None:
        """Prepare for a row that is sampled soon. Raises SampleError if the row cannot be prepared for."""

    def stats(self) -> Mapping[str, float]:
        """Counts for the displays of the run."""
        return {}

    async def close(self) -> None:
        """Give back the resources of the tool."""


class Tools(dict[str, Any]):
    """The open tools, by name. A look-up of another name opens the tool.

    config, tokenizer: for the run. place: the role and index of the actor, as in rollout_manager/0. `label`: identifies
    this place in the run, also after a restart of the process.
    """

    def __init__(self, config: Config, tokenizer: Any, place: str = "trial") -> None:
        self.config, self.tokenizer = config, tokenizer
        names = f"{socket.gethostname()}:{config.folder.absolute()}:{place}"
        self.label = f"{config.name}-{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"

    def __missing__(self, name: str) -> Any:
        """Open a tool. Raises UserError if there is no such tool, or if the tool cannot be opened."""
        self[name] = tool = extensions.find("tool", name)(self)
        return tool

    def expecting(self) -> Iterator[Tool]:
        """The open tools that prepare for rows."""
        return (tool for tool in self.values() if tool.expects_rows)

    def stats(self) -> dict[str, float]:
        """The counts of all open tools."""
        return {name: count for tool in self.values() for name, count in tool.stats().items()}

    async def close(self) -> None:
        """Close the open tools, the last tool first: a tool may use earlier tools."""
        while self:
            await self.popitem()[1].close()
