"""Two gateways, 20 users, and one key that does what it can: does it harm them, and does it keep to its quota?

    python tests/benchmarks/hostile_key.py                    # ten minutes
    python tests/benchmarks/hostile_key.py --minutes 3
    python tests/benchmarks/hostile_key.py --quick            # under two minutes: does it run?

A run of `configs/examples/gateway` with the quickstart's model and real engines. In the first third of the time the
users are alone. Then the hostile key sends, at both gateways at once: prompts of megabytes, 64 answers a call, streams
that it leaves, sessions by the hundred, unknown sessions, rewards without bounds, and connections that say nothing.

It exits 0 only if every acknowledged reward of a user is in a session that is trained or ready, and the hostile key got
no more calls answered than its quota, and what two gateways let through in the second between two shares.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
from results import show, write
from runs import ROOT, find_free_port

from areal.data import addition, quickstart
from areal.extensions.desk.audit import read_journal
from areal.staleness.ledger_records import snapshot_of
from areal.storage.record import Record
from areal.storage.rollout_files import files, opened
from areal.storage.run_files import ROLLOUTS

USERS, KEYS = 20, {"user": "key-of-users", "hostile": "key-of-an-enemy"}
CALLS_A_MINUTE, SESSIONS, ATTACKERS = 60, 4, 6
HUGE = "a" * (4 << 20)
PROBE = addition.make_row(0, 0, max_digits=8)["prompt"]
START_SECONDS, CALL_SECONDS = 180.0, 60.0


class Door:
    """A gateway as one key sees it."""

    def __init__(self, http: aiohttp.ClientSession, port: int, key: str) -> None:
        self._http, self.port = http, port
        self._address, self._key = f"http://127.0.0.1:{port}/v1", {"Authorization": f"Bearer {KEYS[key]}"}

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status and the body; 0 if the connection is lost, or for a body that is none of JSON."""
        try:
            async with self._http.request(
                method, f"{self._address}/{path}", json=body, headers=self._key | headers
            ) as answer:
                return answer.status, await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return 0, None

    async def say(self, text: str, session: str, **fields: Any) -> tuple[int, Any]:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return await self.ask("POST", "chat/completions", body, **{"X-Session-Id": session})


async def use(number: int, door: Door, seconds: list[tuple[float, float]], taken: set[str]) -> None:
    """A user: asks for a sum, and rewards the answer. seconds: when each call began, and how long it took. taken: gets
    the sessions whose reward was acknowledged."""
    for question in range(1_000_000):
        row = addition.make_row(number, question, max_digits=8)
        session, began = f"{number}-{question}", time.monotonic()
        status, answer = await door.say(row["prompt"], session)
        seconds.append((began, time.monotonic() - began))
        if status != 200:
            await asyncio.sleep(0.5)
            continue
        value = addition.reward(row["prompt"], answer["choices"][0]["message"]["content"] or "", row)
        status, answer = await door.ask("POST", f"sessions/{session}/reward", {"reward": value, "id": session})
        if status == 200 and answer["state"] == "ready":
            taken.add(session)
        await asyncio.sleep(0.2)


async def attack(door: Door, statuses: Counter[int]) -> None:
    """One of those who have the hostile key. statuses: of its answers; 200 counts answers of the policy alone."""
    while True:
        name = secrets.token_hex(4)
        for number, body in enumerate(({}, {"n": 64}, {"junk": HUGE}, {"tool_choice": {"junk": "x" * 1000}})):
            status, _ = await door.say(PROBE, f"{name}-{number}", **body)
            statuses[status] += 1
            if status == 200:
                parts = {f"{n}": 1e60 for n in range(5000)}
                await door.ask("POST", f"sessions/{name}-{number}/reward", {"reward": parts})
                await door.ask("POST", f"sessions/{name}-{number}/reward", {"reward": 1, "id": name})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await door.say(PROBE, name, stream=True)
        await door.ask("POST", "messages/count_tokens", {"messages": [{"role": "user", "content": HUGE}]})
        await door.say(HUGE, name)
        await asyncio.gather(*(door.ask("POST", "sessions", {"id": f"{name}{n}"}) for n in range(50)))
        await asyncio.gather(*(door.ask("GET", f"sessions/{name}{n}") for n in range(50)))
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")


async def measure(ports: tuple[int, int], minutes: float, run: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What users and the hostile key have seen. run: ends the benchmark if it ends before."""
    limit = aiohttp.ClientTimeout(total=CALL_SECONDS)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as http:
        end = time.monotonic() + START_SECONDS
        doors = {key: [Door(http, port, key) for port in ports] for key in KEYS}
        for door in doors["user"]:
            while (await door.ask("GET", "models"))[0] != 200:
                if time.monotonic() > end or run.poll() is not None:
                    sys.exit("the run does not serve: see its logs")
                await asyncio.sleep(0.5)
        while (answer := await doors["user"][0].say(PROBE, "first"))[0] != 200:  # the engines are loaded
            if time.monotonic() > end:
                sys.exit(f"the policy does not answer: {answer}")
            await asyncio.sleep(0.5)
        latencies: list[tuple[float, float]] = []
        taken: set[str] = set()
        statuses = Counter[int]()
        users = [asyncio.create_task(use(n, doors["user"][n % 2], latencies, taken)) for n in range(USERS)]
        began = time.monotonic()
        await asyncio.sleep(minutes * 20)
        attacked = time.monotonic()
        enemies = [asyncio.create_task(attack(doors["hostile"][n % 2], statuses)) for n in range(ATTACKERS)]
        await asyncio.sleep(minutes * 40)
        for task in (*enemies, *users):
            task.cancel()
        ended = await asyncio.gather(*enemies, *users, return_exceptions=True)
        failures = [repr(error) for error in ended if not isinstance(error, asyncio.CancelledError)]
    quiet = [took for start, took in latencies if began <= start < attacked]
    busy = [took for start, took in latencies if start >= attacked]
    return {
        "minutes": minutes,
        "users": {"calls": len(latencies), "rewards": sorted(taken), "failures": failures},
        "seconds_quiet": _quantiles(quiet),
        "seconds_attacked": _quantiles(busy),
        "hostile": {
            "answers": {str(status): count for status, count in sorted(statuses.items())},
            "most_calls": round(CALLS_A_MINUTE * (minutes * 40 / 60 + 2)),
        },
    }


def sessions_in(folder: Path) -> tuple[Counter[str], set[str]]:
    """How many sessions of each key a run has trained, and the names of these and of those that are ready for it."""
    trained = dict[str, str]()
    for path in files(folder / ROLLOUTS):
        with opened(path) as file:
            rows = file.read(["group", "fate", "row"]).to_pylist()
        trained |= {row["group"]: json.loads(row["row"])["session"] for row in rows if row["fate"] == "trained"}
    ready = [group for group in snapshot_of(read_journal(Record(folder)).ledger)["groups"] if group["state"] != "open"]
    counts = Counter(name.partition(":")[0] for name in trained.values())
    return counts, {*trained.values(), *(group["session"] for group in ready)}


def _quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else [float("nan")] * 99
    return {"median": cuts[49], "95 %": cuts[94], "worst": max(values, default=float("nan")), "calls": len(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true", help="under two minutes: does it run?")
    parser.add_argument("--folder", type=Path, help="of the run (default: a new one)")
    parser.add_argument("--model", type=Path, help="of the quickstart's task (default: it is made)")
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    folder = options.folder or Path(mkdtemp(prefix="hostile-key-"))
    model = (options.model or quickstart.ensure(folder / "models")).resolve()
    port = find_free_port()
    digests = {key: sha256(text.encode()).hexdigest() for key, text in KEYS.items()}
    overrides = [
        *(f"model={model}", f"run_dir={folder}", "name=doors", "steps=100000", "batch_size=16", "data.eval_size=0"),
        *("evaluator.every=0", "generator.kv_cache_gib=0.25", "sampling.max_new_tokens=32", "gateway.count=2"),
        *(f"gateway.port={port}", f"master.address=tcp://127.0.0.1:{find_free_port()}", "max_staleness=8"),
        f"gateway.keys={{user: {{sha256: {digests['user']}, rights: [serve, reward]}}, hostile: {{sha256: "
        f"{digests['hostile']}, rights: [serve, reward], calls_per_minute: {CALLS_A_MINUTE}, sessions: {SESSIONS}}}}}",
    ]
    command = [sys.executable, str(ROOT / "run.py"), str(ROOT / "configs/examples/gateway/run.yaml"), *overrides]
    with (
        (folder / "run.log").open("wb") as log,
        subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log) as run,
    ):
        try:
            results = asyncio.run(measure((port, port + 1), 0.5 if options.quick else options.minutes, run))
        finally:
            run.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(60)
            run.kill()
    counts, kept = sessions_in(folder / "doors")
    users = results["users"]
    users |= {"rewards": len(users["rewards"]), "lost": sum(f"user:{n}" not in kept for n in users["rewards"])}
    results["trained"] = dict(counts)
    show(
        "Seconds of an answer to users",
        ("", "median", "95 %", "worst", "calls"),
        [(name, *results[f"seconds_{name}"].values()) for name in ("quiet", "attacked")],
        [f"users: {users}", f"hostile key: {results['hostile']}", f"trained: {results['trained']}"],
    )
    write(results, options.json)
    answers = max(results["hostile"]["answers"].get("200", 0), results["trained"].get("hostile", 0))
    harmed = users["lost"] or users["failures"] or not users["rewards"]
    return int(bool(harmed or answers > results["hostile"]["most_calls"]))


if __name__ == "__main__":
    sys.exit(main())
