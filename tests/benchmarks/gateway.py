"""Milliseconds to the first text and for each further character through a gateway, against vLLM's own server; sessions
a second; memory of a gateway with open sessions.

    python tests/benchmarks/gateway.py MODEL --json gateway.json

Both servers run at once, on the same cores, and are asked in turns: an idle one takes nothing. Answers of the gateway
are on the trainer's disk when they end; the trainer itself waits, since few sessions get a reward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from results import show, write
from runs import QUICKSTART, ROOT, find_free_port

from areal.data import addition

KEY, DIGITS, TOKENS = "key", 20, 128
START_SECONDS = 240
# Far more sessions than there are: the trainer waits.
SETTINGS = [
    "group_size=1",
    "batch_size=2048",
    "max_staleness=2",
    "data.eval_size=0",
    "evaluator.every=0",
    "generator.kv_cache_gib=0.5",
    "trainer.advantage_mean=batch",
    "trainer.advantage_std=batch",
    "observe.tensorboard=false",
    "gateway.count=1",
    "gateway.share=1",
    "gateway.keys.user.rights=[serve,reward]",
]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Call:
    """Seconds until the first text and until the last, and from there to the end; characters."""

    first: float
    last: float
    end: float
    characters: int


class Server:
    def __init__(self, http: aiohttp.ClientSession, process: psutil.Popen, port: int, model: str) -> None:
        self._http, self.process, self._url, self._model = http, process, f"http://127.0.0.1:{port}/v1", model

    async def post(self, path: str, body: dict[str, Any], session: str) -> aiohttp.ClientResponse:
        headers = {"Authorization": f"Bearer {KEY}", "X-Session-Id": session}
        answer = await self._http.post(f"{self._url}/{path}", json=body, headers=headers)
        answer.raise_for_status()
        return answer

    async def call(self, session: str) -> Call:
        prompt = addition.make_row(0, 0, min_digits=DIGITS, max_digits=DIGITS)["prompt"]
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS}
        began, times, characters = time.perf_counter(), [], 0
        async with await self.post("chat/completions", body | {"stream": True}, session) as answer:
            async for line in answer.content:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        times.append(time.perf_counter() - began)
                        characters += len(text)
        return Call(times[0], times[-1], time.perf_counter() - began, characters)

    async def ready(self) -> None:
        async with asyncio.timeout(START_SECONDS):
            while self.process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError):
                    return await self._models()
                await asyncio.sleep(0.5)
        sys.exit(f"{self.process.args} has ended")

    async def _models(self) -> None:
        async with self._http.get(f"{self._url}/models", headers={"Authorization": f"Bearer {KEY}"}) as answer:
            answer.raise_for_status()


@contextlib.contextmanager
def started(command: list[str], folder: Path, **environment: str) -> Iterator[psutil.Popen]:
    with (folder / f"{len(list(folder.iterdir()))}.txt").open("w") as output:
        process = psutil.Popen([sys.executable, *command], stdout=output, stderr=output, env=os.environ | environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def gateway_command(model: Path, folder: Path, port: int) -> list[str]:
    own = [f"model={model}", f"run_dir={folder}", f"master.address=tcp://127.0.0.1:{find_free_port()}"]
    own += [f"gateway.port={port}", f"gateway.keys.user.sha256={sha256(KEY.encode()).hexdigest()}"]
    return [str(ROOT / "run.py"), str(QUICKSTART), f"sampling.max_new_tokens={TOKENS}", *own, *SETTINGS]


def vllm_command(model: Path, port: int) -> list[str]:
    options = {"model": model, "port": port, "dtype": "float32", "max-model-len": 512, "chat-template": TEMPLATE}
    options |= {"served-model-name": "vllm", "generation-config": "vllm"}
    command = ["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    return [*command, *(f"--{key}={value}" for key, value in options.items())]


async def compare(servers: dict[str, Server], clients: int, rounds: int) -> dict[str, list[list[Call]]]:
    """The calls of each server, by round."""
    calls: dict[str, list[list[Call]]] = {name: [] for name in servers}
    for number in range(-2, rounds):
        for name in sorted(servers, reverse=bool(number % 2)):
            sessions = (f"{clients}-{number}-{client}" for client in range(clients))
            answers = await asyncio.gather(*(servers[name].call(session) for session in sessions))
            if number >= 0:  # the others warm it up
                calls[name].append(answers)
    return calls


def summarise(calls: dict[str, list[list[Call]]]) -> dict[str, dict[str, float]]:
    """Milliseconds, medians over all calls of a server; `difference`: median of that of the rounds."""
    results = {}
    for name, rounds in calls.items():
        every = [call for answers in rounds for call in answers]
        results[name] = {
            "first": 1e3 * median(call.first for call in every),
            "character": 1e3 * median((call.last - call.first) / max(1, call.characters - 1) for call in every),
            "end": 1e3 * median(call.end - call.last for call in every),
        }
    firsts = [[median(call.first for call in answers) for answers in calls[name]] for name in ("gateway", "vllm")]
    results["difference"] = {"first": 1e3 * median(ours - theirs for ours, theirs in zip(*firsts, strict=True))}
    return results


async def fill(server: Server, gateway: psutil.Process, open_sessions: int, clients: int) -> dict[str, float]:
    """Open so many sessions, and look at the gateway. Sessions with a reward a second."""
    slots = asyncio.Semaphore(clients)

    async def use(session: str, reward: bool) -> None:
        async with slots:
            await server.call(session)
            if reward:
                (await server.post(f"sessions/{session}/reward", {"reward": 1}, session)).close()

    await asyncio.gather(*(use(f"open-{number}", reward=False) for number in range(open_sessions)))
    began, rewarded = time.perf_counter(), 5 * clients
    await asyncio.gather(*(use(f"of-{open_sessions}-{number}", reward=True) for number in range(rewarded)))
    seconds = time.perf_counter() - began
    megabytes, files = gateway.memory_info().rss / 2**20, gateway.num_fds()
    return {"sessions a second": rewarded / seconds, "megabytes": megabytes, "descriptors": files}


async def measure(model: Path, folder: Path, rounds: int, sessions: list[int]) -> dict[str, Any]:
    ports, results = [find_free_port(), find_free_port()], {}
    with (
        started(
            vllm_command(model, ports[0]), folder, VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0"
        ) as vllm,
        started(gateway_command(model, folder, ports[1]), folder) as run,
    ):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            servers = {"gateway": Server(http, run, ports[1], "policy"), "vllm": Server(http, vllm, ports[0], "vllm")}
            await asyncio.gather(*(server.ready() for server in servers.values()))
            for clients in (1, 4):
                results[f"{clients} clients"] = summarise(await compare(servers, clients, rounds))
            (gateway,) = (child for child in run.children() if "--role gateway" in " ".join(child.cmdline()))
            for number in sessions:
                results[f"{number} open sessions"] = await fill(servers["gateway"], gateway, number, 32)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the quickstart's model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sessions", type=int, nargs="*", default=[10, 100, 1000], help="open ones at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(options.model.resolve(), Path(folder), options.rounds, options.sessions))
    rows = [
        [clients, name, *(numbers.get(key, "") for key in ("first", "character", "end"))]
        for clients in ("1 clients", "4 clients")
        for name, numbers in results[clients].items()
    ]
    remarks = [f"{name}: {numbers}" for name, numbers in results.items() if "open" in name]
    show(
        "Milliseconds through a gateway and vLLM's server", ["", "", "first text", "a character", "end"], rows, remarks
    )
    write(results, options.json)


if __name__ == "__main__":
    main()
