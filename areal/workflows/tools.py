"""The tools of an actor's samples, which `session.tool(NAME)` gives: a sandbox for Python, an endpoint for agents.

A tool comes from an extension. A function opens it, whose entry in the table of extensions has the kind `tool`:

    def open_search(tools: Tools) -> Search: ...

The first sample that asks for a tool opens it, all samples of the actor share it, and it is closed with the actor.
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
        """Whether `expect` is to be called."""
        return False

    def expect(self, row: Row) -> None:
        """Prepare for a row that is sampled soon. Raises SampleError if the row cannot be prepared for."""

    def stats(self) -> Mapping[str, float]:
        """Counts for the displays of the run."""
        return {}

    async def close(self) -> None:
        """Give back what the tool holds."""


class Tools(dict[str, Any]):
    """The tools that are open, by name. A name that is looked up and is not open is opened.

    config, tokenizer: of the run. place: who samples, as in rollout_manager/0. `label`: of this place in the run,
    whichever process has it.
    """

    def __init__(self, config: Config, tokenizer: Any, place: str = "trial") -> None:
        self.config, self.tokenizer = config, tokenizer
        names = f"{socket.gethostname()}:{config.folder.absolute()}:{place}"
        self.label = f"{config.name}-{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"

    def __missing__(self, name: str) -> Any:
        """Raises UserError if there is no such tool, or if it cannot be opened."""
        self[name] = tool = extensions.find("tool", name)(self)
        return tool

    def expecting(self) -> Iterator[Tool]:
        """The open tools that prepare for rows."""
        return (tool for tool in self.values() if tool.expects_rows)

    def stats(self) -> dict[str, float]:
        """The counts of all open tools."""
        return {name: count for tool in self.values() for name, count in tool.stats().items()}

    async def close(self) -> None:
        """Close the open tools, the last one first: a tool may use tools that were opened before."""
        while self:
            await self.popitem()[1].close()
