"""An MCP server that keeps notes: on its standard streams or, if it is given a port, by streamable HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes", log_level="ERROR")
notes: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Notes a text. Returns all notes."""
    notes.append(text)
    return ", ".join(notes)


@server.tool()
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


@server.tool()
def variable(name: str) -> str:
    return os.environ.get(name, "not set")


@server.tool()
def die() -> str:
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdigit():
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
