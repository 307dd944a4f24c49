"""Twenty users of a policy in training, while every role is killed and the run goes back once: is what they hear true?

    python tests/benchmarks/storm.py --json storm.json

Users talk to two gateways by HTTP, with an `Idempotency-Key` for each call and an id for each reward. They reward most
sessions, some twice, have some deleted, and leave some. Every few seconds a process of a role is killed. In the middle
the whole run is killed, and resumed from a checkpoint before its last step, first without `--yes`. At the end it is
stopped. Then all that users were told is compared with the journal's folder, by sqlite3, pyarrow and json alone: each
acknowledged reward is in one trained rollout or waits in the spool, or it is among those that were undone, whose number
the command had said; what was deleted is not trained afterwards; what is gone is nowhere.

Exits with 1 if an answer was not true.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pyarrow.parquet as pq
from results import show, write
from runs import ROOT, find_free_port

from areal.data import addition, quickstart

CONFIG = ROOT / "configs" / "examples" / "gateway" / "run.yaml"
KEY, USERS, GATEWAYS, BOUND = "key-of-the-example", 20, 2, 3
VICTIMS = ("gateway", "trainer", "generator", "master", "gateway", "trainer")
# What becomes of a session, with weights.
ENDS = {"reward": 10, "reward twice": 3, "reward, then delete": 1, "delete": 2, "leave": 2}
START_SECONDS, STOP_SECONDS, RETRY_SECONDS = 150.0, 60.0, 0.5
UNDONE = re.compile(r"undoes (\d+) rewards of users")


@dataclass
class Story:
    """What one user was told of a session. value: of its reward. part: of the run, 0 before it went back, else 1.
    answers: to rewards and deletions, each with what was asked, the part and the time."""

    session: str
    value: float
    part: int = 0
    answers: list[dict[str, Any]] = field(default_factory=list)

    def states(self, asked: str) -> list[dict[str, Any]]:
        return [answer for answer in self.answers if answer["asked"] == asked and answer["status"] == 200]


class Crowd:
    """Users, who ask again, perhaps at another gateway, until they are answered."""

    def __init__(self, ports: list[int], seed: int, part: int = 0) -> None:
        self.stories: list[Story] = []
        self.refusals: Counter[str] = Counter()
        self.ports, self.part = ports, part
        self.over = asyncio.Event()
        self._random = random.Random(seed)

    async def live(self) -> None:
        timeout = aiohttp.ClientTimeout(total=40.0)
        async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {KEY}"}) as http:
            await asyncio.gather(*(self._user(http, number) for number in range(USERS)))

    async def _user(self, http: aiohttp.ClientSession, number: int) -> None:
        for count in itertools.count():
            if self.over.is_set():
                return
            story = Story(f"user-{self.part}-{number}-{count}", self._random.choice((-1.0, -0.5, 0.25, 1.0)), self.part)
            messages = [{"role": "user", "content": addition.make_row(number, count, max_digits=8)["prompt"]}]
            call = {"model": "policy", "messages": messages}
            headers = {"X-Session-Id": story.session, "Idempotency-Key": story.session}
            answer = await self._ask(http, "POST", "chat/completions", call, headers)
            if answer is not None and answer[0] == 200:
                self.stories.append(story)
                end = self._random.choices(list(ENDS), list(ENDS.values()))[0]
                await self._end(http, story, end)

    async def _end(self, http: aiohttp.ClientSession, story: Story, end: str) -> None:
        path, body = f"sessions/{story.session}", {"reward": story.value, "id": f"of {story.session}"}
        await asyncio.sleep(self._random.expovariate(1.0))
        for _ in range(("reward" in end) + (end == "reward twice")):
            await self._note(http, story, "reward", "POST", f"{path}/reward", body)
        if "delete" in end:
            await self._note(http, story, "delete", "DELETE", path, None)

    async def _note(self, http: Any, story: Story, asked: str, method: str, path: str, body: Any) -> None:
        answer = await self._ask(http, method, path, body, {})
        if answer is not None:
            about = {"asked": asked, "part": self.part, "time": time.time(), "status": answer[0]}
            story.answers.append(about | {"body": answer[1]})

    async def _ask(self, http: Any, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        """The status and the body of the first answer that is not one for now; None once all is over."""
        port = self._random.choice(self.ports)
        while not self.over.is_set():
            with suppress(aiohttp.ClientError, TimeoutError):
                url = f"http://127.0.0.1:{port}/v1/{path}"
                async with http.request(method, url, json=body, headers=headers) as answer:
                    content = await answer.json(content_type=None)
                    if answer.status < 400 or self._is_final(answer.status, content):
                        return answer.status, content
            await asyncio.sleep(RETRY_SECONDS)
            port = self._random.choice(self.ports)
        return None

    def _is_final(self, status: int, content: Any) -> bool:
        """Whether an error says that asking again is in vain."""
        code = (content.get("error") or {}).get("code", "") if isinstance(content, dict) else f"no JSON: {status}"
        self.refusals[f"{status} {code}"] += 1
        if status == 400 and code != "no_calls":
            raise SystemExit(f"a request of a user is refused: {content}")
        return code in ("rewarded", "id_in_use", "session_over", "no_calls")


class Run:
    """The run on this machine, over its resumes. `output`: what it writes."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder, self.output, self._ports = folder / "run", folder / "out.txt", ports

    def begin(self, model: Path) -> None:
        settings = (
            "name=run",
            f"run_dir={self.folder.parent}",
            f"model={model.resolve()}",
            f"gateway.port={self._ports[0]}",
            f"gateway.count={GATEWAYS}",
            f"max_staleness={BOUND}",
            *("steps=100000", "batch_size=4", "data.eval_size=0", "evaluator.every=0", "sampling.max_new_tokens=16"),
            *("trainer.checkpoint_every=3", "trainer.minibatches=1", "trainer.lr=1e-6", "master.lease_seconds=20"),
            *("gateway.session_seconds=30", "guard.effective_sample_size=0"),
        )
        self.process = self._start(f"{CONFIG}", *settings, f"master.address=tcp://127.0.0.1:{find_free_port()}")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "run.py"), *words]
        with self.output.open("ab") as out:
            environment = os.environ | {"HF_HUB_OFFLINE": "1"}
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def steps(self) -> int:
        with suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def kill(self, role: str) -> bool:
        """Kill a process of a role. Returns False if there is none now."""
        processes = []
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.process.pid if self.process else 0).children(recursive=True)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "--role" in words and words[words.index("--role") + 1] == role:
                    process.kill()
                    return True
        return False

    def go_back(self) -> tuple[int, int]:
        """Resume from a checkpoint before the last. Returns the step, and how many rewards the command said that this
        would undo."""
        versions = sorted(int(path.name.split("_")[1]) for path in (self.folder / "checkpoints").glob("step_*"))
        words = ("--resume", str(self.folder), "--from-step", str(versions[max(0, len(versions) - 2)]))
        command = subprocess.run([sys.executable, str(ROOT / "run.py"), *words], capture_output=True, text=True)
        says = UNDONE.search(command.stderr)
        if command.returncode != 2 or says is None:
            raise SystemExit(f"the way back is not asked about: {command.returncode}, {command.stderr}")
        self.process = self._start(*words, "--yes")
        return int(words[-1]), int(says[1])

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)

    def lose(self) -> None:
        """Kill all of it, as if the machine were lost."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        time.sleep(5.0)  # children die with their parent


async def storm(run: Run, crowd: Crowd, seconds: float, every: float) -> Counter[str]:
    """Let users live and kill processes, from the next step on. Returns what was killed."""
    kills, checkpoints = Counter[str](), run.folder / "checkpoints"
    users = asyncio.create_task(crowd.live())
    try:
        await reach(run, run.steps() + 1)
        due = time.monotonic() + seconds
        for victim in itertools.cycle(VICTIMS):
            await asyncio.sleep(every)
            if time.monotonic() > due and len(list(checkpoints.glob("step_*"))) > 1:
                break
            kills[victim] += run.kill(victim)
    finally:
        crowd.over.set()
    await users
    return kills


def live(folder: Path, model: Path, options: argparse.Namespace, seconds: float, every: float) -> dict[str, Any]:
    """What happened: the stories, the kills, and the way back. It is written after the first part, and read before the
    second if that comes by itself."""
    notes = folder / "told.json"
    if options.part != 2:
        port = find_free_port()
        crowd = Crowd([port + number for number in range(GATEWAYS)], options.seed)
        run = Run(folder, crowd.ports)
        try:
            run.begin(model)
            kills = asyncio.run(storm(run, crowd, seconds / 2, every))
        finally:
            run.lose()
        happened = {"stories": [asdict(s) for s in crowd.stories], "kills": kills, "refusals": crowd.refusals}
        notes.write_text(json.dumps(happened | {"ports": crowd.ports}))
    if options.part == 1:
        return {}
    happened = json.loads(notes.read_text())
    run, crowd = Run(folder, happened["ports"]), Crowd(happened["ports"], options.seed + 1, part=1)
    try:
        step, undone = run.go_back()
        kills = asyncio.run(storm(run, crowd, seconds / 2, every))
        run.stop()
    finally:
        run.lose()
    happened["stories"] += [asdict(story) for story in crowd.stories]
    for name, counts in (("kills", kills), ("refusals", crowd.refusals)):
        happened[name] = Counter(happened[name]) + counts
    return happened | {"step": step, "undone": undone}


async def reach(run: Run, step: int) -> None:
    """Wait until the run has trained this step. Raises SystemExit if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while run.steps() < step:
        if run.process is None or run.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run does not get on:\n{run.output.read_text()[-3000:]}")
        await asyncio.sleep(1.0)


# --- the check, which knows the files of a run and nothing of this project's code


def trained_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps that have trained each session, with its reward, by the rollouts in the folder."""
    steps = defaultdict(list)
    for file in sorted(folder.glob("*.parquet")):
        columns = ("step", "branch", "fate", "row", "reward")
        for row in pq.read_table(file, columns=list(columns)).to_pylist():
            if row["fate"] == "trained" and not row["branch"]:
                steps[json.loads(row["row"])["session"].partition(":")[2]].append((row["step"], row["reward"]))
    return steps


def waiting_in(spool: Path) -> set[str]:
    """The sessions that a spool has."""
    if not spool.exists():
        return set()
    with closing(sqlite3.connect(spool)) as database:
        rows = database.execute("SELECT row FROM parts").fetchall()
    return {json.loads(row)["session"].partition(":")[2] for (row,) in rows}


def untruths(folder: Path, happened: dict[str, Any]) -> Iterator[str]:
    """What users and the owner were told that is not so."""
    trained, waiting = trained_in(folder / "rollouts"), waiting_in(folder / "spool.db")
    abandoned = folder / "abandoned" / "1"
    undone = {*trained_in(abandoned / "rollouts")} | waiting_in(abandoned / "sessions.db")
    undone -= trained.keys() | waiting
    acknowledged = set()
    for notes in happened["stories"]:
        story = Story(**notes)
        name, steps = story.session, trained.get(story.session, [])
        if len(steps) > 1:
            yield f"{name} is trained more than once, in {steps}"
        if any(abs(reward - story.value) > 1e-6 for _, reward in steps):
            yield f"{name} is trained with {steps}, but its reward is {story.value}"
        deleted = story.states("delete")
        taken = [a["part"] for a in story.states("reward") if a["body"]["changed"]]
        acknowledged |= {name} if taken and not deleted else set()
        if taken and not deleted and not steps and name not in waiting and (1 in taken or name not in undone):
            yield f"the reward of {name} is acknowledged, and is nowhere"
        for answer in deleted:
            if answer["part"] and sorted(answer["body"]["trained_in"]) != sorted(step for step, _ in steps):
                yield f"{name} is told that it is trained in {answer['body']['trained_in']}, and is in {steps}"
            if not answer["body"]["trained_in"] and steps:
                yield f"{name} is told that it is deleted, and is trained in {steps}"
        gone = [answer for answer in story.states("reward") if answer["body"]["state"] == "gone" and answer["part"]]
        if gone and not taken and (steps or name in waiting):
            yield f"{name} is told that it is gone, and is trained in {steps}, or waits"
    if len(undone) != happened["undone"]:
        yield f"the way back was said to undo {happened['undone']} rewards, and has undone {len(undone)}"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if (stale := max(record["staleness_max"] for record in metrics)) > BOUND:
        yield f"a session was {stale} versions old, and {BOUND} were allowed"


def figures_of(folder: Path, happened: dict[str, Any]) -> dict[str, Any]:
    stories = [Story(**notes) for notes in happened["stories"]]
    trained, waiting = trained_in(folder / "rollouts"), waiting_in(folder / "spool.db")
    taken = {s.session for s in stories if any(a["body"]["changed"] for a in s.states("reward"))}
    return {
        "sessions": len(stories),
        "acknowledged": len(taken),
        "acknowledged and trained": len(taken & trained.keys()),
        "acknowledged and waiting": len(taken & waiting - trained.keys()),
        "undone by the way back": happened["undone"],
        "deleted": sum(bool(story.states("delete")) for story in stories),
        "kills": sum(happened["kills"].values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the storm, without starts")
    parser.add_argument("--every", type=float, default=15.0, help="seconds from one kill to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the run goes (default: a temporary folder)")
    parser.add_argument("--model", type=Path, help="of the quickstart's task (default: it is made)")
    parser.add_argument("--part", type=int, choices=(1, 2), help="only until the way back, or only from there on")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--quick", action="store_true", help="a storm of a minute: does it work?")
    options = parser.parse_args()
    minutes, every = (1.0, 8.0) if options.quick else (options.minutes, options.every)
    with tempfile.TemporaryDirectory() as place:
        folder = (options.folder or Path(place)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = options.model or quickstart.ensure(folder / "models")
        happened = live(folder, model, options, 60 * minutes, every)
        if not happened:
            return 0
        figures, wrong = figures_of(folder / "run", happened), list(untruths(folder / "run", happened))
    show("A storm", list(figures), [list(figures.values())], [*wrong, f"refusals: {dict(happened['refusals'])}"])
    if options.json:
        write({"figures": figures, "kills": happened["kills"], "untruths": wrong}, options.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
