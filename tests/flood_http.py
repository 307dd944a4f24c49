"""Malformed requests to the OpenAI endpoint, over connections of their own, and what came back."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from urllib.parse import urlsplit

from malformed import MalformedHttp
from scripted_policy import Session, byte_tokenizer

from actors.parts.openai_endpoint import OpenAIEndpoint

# So many to one sample: its conversation only grows.
BATCH = 100
# A request that promises more than it holds is waited for.
SILENCE_SECONDS = 0.2


class Talkative(Session):
    """Its policy always says the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = byte_tokenizer()

    async def generate(self, tokens, max_new_tokens=None, keep=None):
        self.turns.append('yes <tool_call>{"name": "f", "arguments": {}}</tool_call>')
        return await super().generate(tokens, max_new_tokens, keep)


async def flood_http(requests: int, seed: int) -> Counter[str]:
    """How often each status came; `none` for a connection that was closed without one, `waits` for one that was left
    open, `hung` where the endpoint does not answer any more; and the memory of this process in MiB at its most."""
    endpoint, seen, began = OpenAIEndpoint("policy", "127.0.0.1"), Counter(), time.monotonic()
    session = Talkative()
    try:
        for first in range(0, requests, BATCH):
            async with endpoint.serve(session) as access:
                http = MalformedHttp(seed + first, access)
                port = urlsplit(access.base_url).port
                made = [http.request() for _ in range(min(BATCH, requests - first))]
                for i in range(0, len(made), 10):
                    seen.update(await asyncio.gather(*(_status(port, one) for one in made[i : i + 10])))
                seen["sent"] += len(made)
                session.prompts.clear()
                well = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.api_key}\r\n\r\n"
                seen["hung"] += await _status(port, well.encode()) != "200"
            if first == requests // 10 // BATCH * BATCH:
                seen["MiB early"] = _memory()
    finally:
        await endpoint.close()
    seen["MiB"], seen["per second"] = _memory(), int(seen["sent"] / (time.monotonic() - began))
    return seen


async def _status(port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(SILENCE_SECONDS):
            head = await reader.readline()
        return head.split()[1].decode() if head.startswith(b"HTTP/1.1 ") else "none"
    except TimeoutError:
        return "waits"
    except ConnectionError:
        return "none"
    finally:
        writer.close()


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
