"""A service of sandboxes behind HTTP, as a process of its own: namespaces of this machine by the protocol of
areal/extensions/sandboxes/README.md: `python sandbox_service.py PORT_FILE`. `PUT /fault/FAULT` sets what goes wrong
from then on:

none; slow (every answer takes a while); drops (the first answer to every command is lost); late (it comes when nobody
waits for it any more); twice (an answer is sent twice); dies (at the next command).
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from areal.base.children import Output
from areal.config.scoring import SandboxConfig
from areal.extensions.programs.outside import Commands
from areal.extensions.programs.slots import Programs


class Service:
    def __init__(self) -> None:
        self.fault = "none"
        self.programs = Programs(SandboxConfig())
        self.sandboxes: dict[str, Commands] = {}
        self.labels: dict[str, str] = {}
        self.answers: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.asked: set[str] = set()

    async def put(self, request: web.Request) -> web.StreamResponse:
        name, body = request.match_info["name"], await request.json()
        if body["image"] not in (None, "known"):
            return web.json_response({"error": f"no image {body['image']}"}, status=400)
        if name not in self.sandboxes:
            processes = body["limits"]["processes"]
            sandbox = await self.programs.namespaces()
            self.sandboxes[name] = await sandbox.stay(self.programs.slot, processes=processes, disk_bytes=1 << 28)
            self.labels[name] = body["label"]
        return web.json_response({})

    async def set_fault(self, request: web.Request) -> web.StreamResponse:
        self.fault = request.match_info["fault"]
        return web.json_response({})

    async def exec(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sandbox = self.sandboxes.get(request.match_info["name"])
        if sandbox is None:
            return web.json_response({"error": "no such sandbox"}, status=404)
        if self.fault == "dies":
            os._exit(1)
        key = body["id"]
        if key not in self.answers:
            self.answers[key] = asyncio.create_task(self.run(sandbox, body))
        return await self.answer(request, key, await asyncio.shield(self.answers[key]))

    async def run(self, sandbox: Commands, body: dict[str, Any]) -> dict[str, Any]:
        output, seconds = Output(body["most_bytes"]), body["seconds"]
        limits = {"wall_seconds": seconds, "cpu_seconds": seconds}
        _, status = await sandbox.run(body["command"], base64.b64decode(body["stdin"]), limits, output)
        return {"id": body["id"], "status": status, "output": base64.b64encode(bytes(output)).decode()}

    async def answer(self, request: web.Request, key: str, content: dict[str, Any]) -> web.StreamResponse:
        first = key not in self.asked
        self.asked.add(key)
        if self.fault == "slow":
            await asyncio.sleep(0.05)
        if self.fault == "drops" and first:
            request.transport.abort()
        if self.fault == "late" and first:
            await asyncio.sleep(3600)
        response = web.json_response(content)
        if self.fault == "twice":
            await response.prepare(request)
            await response.write_eof()
            text = response.body
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            request.transport.write(head.encode() + text)
        return response

    async def get(self, request: web.Request) -> web.StreamResponse:
        names = [name for name, label in self.labels.items() if label == request.query["label"]]
        return web.json_response({"sandboxes": names})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.labels.pop(name, None)
        sandbox = self.sandboxes.pop(name, None)
        if sandbox is None:
            return web.json_response({"error": "no such sandbox"}, status=404)
        sandbox.close()
        return web.json_response({})


def write_port(file: Path, port: int) -> None:
    new = file.with_name("new")
    new.write_text(str(port))
    new.replace(file)


async def main(port_file: str) -> None:
    service = Service()
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.put("/sandboxes/{name}", service.put),
            web.post("/sandboxes/{name}/exec", service.exec),
            web.get("/sandboxes", service.get),
            web.put("/fault/{fault}", service.set_fault),
            web.delete("/sandboxes/{name}", service.delete),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    write_port(Path(port_file), port)
    await asyncio.to_thread(sys.stdin.read)  # until the test ends


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
