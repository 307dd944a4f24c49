"""The tools of notes_server.py on standard streams, without the MCP library."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

TOOLS = {"note": "text", "sleep": "seconds", "variable": "name", "die": None}
notes: list[str] = []


def call(tool: str, argument: Any) -> str:
    if tool == "note":
        notes.append(argument)
    elif tool == "sleep":
        time.sleep(argument)
    elif tool == "die":
        os._exit(3)
    return os.environ.get(argument, "not set") if tool == "variable" else ", ".join(notes)


def result(method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        server = {"name": "notes", "version": "1"}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        schemas = {name: {"type": "object", "properties": {key: {}} if key else {}} for name, key in TOOLS.items()}
        return {"tools": [{"name": name, "inputSchema": schema} for name, schema in schemas.items()]}
    if method == "tools/call":
        argument = next(iter(parameters["arguments"].values()), None)
        return {"content": [{"type": "text", "text": call(parameters["name"], argument)}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:  # else it is a notification
        answer = result(request["method"], request.get("params", {}))
        body = {"error": {"code": -32601, "message": "no such method"}} if answer is None else {"result": answer}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"]} | body), flush=True)
