"""An MCP server without the library, whose tools answer in the forms that the protocol allows."""

from __future__ import annotations

import json
import sys

ANSWERS = {
    "structured": {"content": [], "structuredContent": {"temperature": 7, "sky": "rain"}},
    "summary": {"content": [{"type": "text", "text": "2 rows."}], "structuredContent": {"rows": ["a", "b"]}},
    "repeated": {"content": [{"type": "text", "text": '{"n": 1}'}], "structuredContent": {"n": 1}},
    "wrapped": {"content": [{"type": "text", "text": "seven"}], "structuredContent": {"result": "seven"}},
    "listed": {
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "structuredContent": {"result": ["a", "b"]},
    },
    "empty": {"content": [{"type": "text", "text": ""}]},
    "picture": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]},
    "link": {"content": [{"type": "resource_link", "uri": "file:///notes/7.txt", "name": "notes 7"}]},
    "resource": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]},
    "blob": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": "AAAA", "mimeType": "a/b"}}]},
    "error": {"content": [{"type": "text", "text": "no such place"}], "isError": True},
}

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    method, parameters = request["method"], request.get("params", {})
    answer: dict = {"error": {"code": -32601, "message": "unknown"}}
    if method == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "forms", "version": "1"}}
        answer = {"result": {"protocolVersion": parameters["protocolVersion"], **about}}
    elif method == "tools/list":
        answer = {"result": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ANSWERS]}}
    elif method == "tools/call":
        answer = {"result": ANSWERS[parameters["name"]]}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
