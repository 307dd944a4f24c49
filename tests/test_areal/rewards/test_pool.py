import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from random import Random

import pytest
from support.process_tree import descendants

from areal.base.errors import UserError
from areal.config.scoring import RewardConfig
from areal.data import addition
from areal.rewards.functions import Traits
from areal.rewards.pool import RewardPool, digest
from areal.rewards.quarantine import Quarantine
from areal.rewards.worker import RewardFailed

OWN = textwrap.dedent(
    """
    import asyncio, os, subprocess, sys, time

    def echo(prompt, completion, row):
        time.sleep(row.get("sleep", 0))
        return float(completion)

    async def later(prompt, completion, row):
        await asyncio.sleep(0.01)
        return 0.25

    inside, met = 0, asyncio.Event()

    async def meets(prompt, completion, row):
        global inside
        inside += 1
        if inside == row["calls"]:
            met.set()
        await met.wait()
        return os.getpid()

    async def sleeps(prompt, completion, row):
        try:
            await asyncio.sleep(float(completion))
        except asyncio.CancelledError:
            open("cancelled", "w").write("yes")
            raise
        return os.getpid()

    async def gives_up(prompt, completion, row):
        raise asyncio.CancelledError

    async def leaves_late(prompt, completion, row):
        await asyncio.sleep(0.2)
        if completion == "leave":
            os._exit(3)
        time.sleep(float(completion))
        await asyncio.sleep(1)
        return 1.0

    def raises(prompt, completion, row):
        raise KeyError("no such thing")

    class Unspeakable(Exception):
        def __str__(self):
            raise TypeError

    def raises_this(prompt, completion, row):
        raise Unspeakable

    def hangs(prompt, completion, row):
        child = subprocess.Popen(["sleep", "300"])
        open(row["pids"], "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(300)

    def leaves(prompt, completion, row):
        os._exit(3)

    def exits(prompt, completion, row):
        sys.exit("bye")

    def interrupts(prompt, completion, row):
        raise KeyboardInterrupt("now")

    def forks(prompt, completion, row):
        if (child := os.fork()) == 0:
            raise ValueError("in the child")
        os.waitpid(child, 0)
        return 1.0

    def pid(prompt, completion, row):
        return os.getpid()

    pid.deterministic = False

    def listed(prompt, completion, row):
        with open("calls", "a") as calls:
            print(completion, file=calls)
        time.sleep(row.get("sleep", 0))
        return (len(completion), {"long": 0.5})

    def grows(prompt, completion, row):
        return len(bytearray(int(completion)))

    kept = []

    def leaks(prompt, completion, row):
        try:
            kept.append(bytearray(100 << 20))
        except MemoryError:
            if row["hides"]:
                raise KeyError("something else")
            raise
        return os.getpid()

    class Counting:
        deterministic = False

        def __init__(self, step):
            self.step, self.count = step, 0

        async def score(self, prompt, completion, row, tokens):
            self.count += self.step
            return self.count, {"tokens": sum(tokens)}

    def nan(prompt, completion, row):
        return float("nan")

    def text(prompt, completion, row):
        return "1.0"

    def noisy(prompt, completion, row):
        print("not a message" * 1000)
        os.write(1, b"nor this")
        assert sys.stdin.read() == ""
        return 0.5

    def length(prompt, completion, row):
        return len(completion)

    def longer(prompt, completions, rows):
        return [(len(text) - len(min(completions, key=len)), {"n": len(rows)}) for text in completions][: rows[0]["n"]]

    async def later_longer(prompt, completions, rows):
        return longer(prompt, completions, rows)
    """
)


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def pool_of(*names, **settings):
    return pool([f"own:{name}" for name in names], **settings)


def pool(names, **settings):
    return RewardPool(names, RewardConfig(functions=names, **settings))


async def score(pool, *scorings):
    return (await pool.score(*scorings)).score


async def failure(pool, name, completion="", row=None):
    with pytest.raises(RewardFailed) as caught:
        await pool.score(name, "", completion, row or {})
    return caught.value.kind, str(caught.value)


def gone(pid, within=30.0):
    """Whether the process ends within so many seconds; one that nobody has waited for yet counts as ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


async def written(file):
    """Wait until there is something in a file."""
    async with asyncio.timeout(30):
        while not file.exists() or not file.read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)


async def test_scores_come_from_built_in_and_own_functions():
    async with pool(["addition", "own:echo", "own:later"], workers=2) as started:
        row = addition.make_row(0, 0)
        right = addition.demonstration(row, Random(0))
        assert await score(started, "addition", row["prompt"], right, row) == 1.0
        assert await score(started, "own:later", "", "", {}) == 0.25
        many = await asyncio.gather(*(score(started, "own:echo", "", str(i), {}) for i in range(200)))
        assert many == list(range(200))
        assert started.places == 2


async def test_calls_of_an_async_reward_run_at_once_in_one_process():
    async with pool_of("meets", timeout_seconds=20) as pool:
        calls = (score(pool, "own:meets", "", f"{number}", {"calls": 32}) for number in range(32))
        assert len({*await asyncio.gather(*calls)}) == 1
        assert pool.places == 64


async def test_an_async_call_that_misses_its_deadline_or_is_not_wanted_is_cancelled_and_no_other(tmp_path):
    async with pool_of("sleeps", timeout_seconds=2) as pool:
        late = asyncio.create_task(failure(pool, "own:sleeps", "100"))
        while not pool._concurrent._calls:  # noqa: ASYNC110 - until it has begun
            await asyncio.sleep(0.02)
        remainder = [await score(pool, "own:sleeps", "", seconds, {}) for seconds in ("0.5", "0.6")]
        assert await late == ("timeout", "no score within 2 s")
        await written(tmp_path / "cancelled")
        (tmp_path / "cancelled").unlink()
        unwanted = asyncio.create_task(score(pool, "own:sleeps", "", "1.9", {}))
        assert await score(pool, "own:sleeps", "", "0.1", {}) == remainder[0] == remainder[1]  # it is the same process
        unwanted.cancel()
        await written(tmp_path / "cancelled")


@pytest.mark.parametrize(("bad", "kind"), [("leave", "died"), ("100", "timeout")])
async def test_an_async_call_that_costs_the_process_is_found_and_the_others_are_scored(bad, kind, monkeypatch):
    monkeypatch.setattr("areal.rewards.concurrent_calls.CANCEL_SECONDS", 0.5)
    async with pool_of("leaves_late", timeout_seconds=2) as pool:
        harmful = asyncio.create_task(failure(pool, "own:leaves_late", bad))
        good = asyncio.create_task(score(pool, "own:leaves_late", "", "0", {}))
        assert await good == 1.0
        assert (await harmful)[0] == kind
        assert await score(pool, "own:leaves_late", "", "0.1", {}) == 1.0


async def test_a_failure_is_told_by_kind_and_never_a_score(capfd):
    async with pool_of("raises", "raises_this", "exits", "interrupts", "nan", "text", "gives_up", "echo") as pool:
        for _ in range(2):
            kind, reason = await failure(pool, "own:raises")
            assert kind == "raised" and reason.startswith("KeyError: 'no such thing', in ")
            assert reason.endswith('own.py, line 42: raise KeyError("no such thing")'), "it names the user's own line"
        assert (await failure(pool, "own:raises_this"))[0] == "raised"
        for name, reason in {"exits": "SystemExit: bye, in ", "interrupts": "KeyboardInterrupt: now, in "}.items():
            assert (await failure(pool, f"own:{name}"))[1].startswith(reason)
        assert await failure(pool, "own:gives_up") == ("raised", "it was cancelled")
        assert (await failure(pool, "own:nan"))[0] == "not_finite"
        assert (await failure(pool, "own:text"))[0] == "not_finite"
        assert (await failure(pool, "own:other"))[0] == "unknown"
        assert await score(pool, "own:echo", "", "1", {}) == 1.0
    error_text = capfd.readouterr().err
    assert "raise KeyError" not in error_text and "sys.exit" not in error_text, "the reason has the only line"


async def test_a_hung_worker_is_killed_with_its_children_and_replaced(tmp_path):
    async with pool_of("hangs", "echo", timeout_seconds=2) as pool:
        kind, reason = await failure(pool, "own:hangs", row={"pids": str(tmp_path / "pids")})
        assert (kind, reason) == ("timeout", "no score within 2 s")
        assert all(gone(pid) for pid in (tmp_path / "pids").read_text().split())
        assert await score(pool, "own:echo", "", "1", {}) == 1.0


async def test_the_deadline_counts_from_the_start_of_the_job():
    async with pool_of("echo", timeout_seconds=1.5) as pool:
        jobs = (score(pool, "own:echo", "", f"{i}", {"sleep": 0.4}) for i in range(5))
        assert await asyncio.gather(*jobs) == [0, 1, 2, 3, 4]


async def test_a_crashed_worker_is_replaced():
    async with pool_of("leaves", "echo") as pool:
        assert await failure(pool, "own:leaves") == ("died", "the worker process ended while scoring (exit code 3)")
        assert await score(pool, "own:echo", "", "1", {}) == 1.0


async def test_a_class_is_made_once_a_worker_with_its_options_and_gets_the_tokens():
    async with pool_of("Counting", options={"own:Counting": {"step": 3}}) as pool:
        request = ("own:Counting", "", "x", {}, [1, 2])
        assert [await pool.score(*request), await pool.score(*request)] == [(3, {"tokens": 3}), (6, {"tokens": 3})]
        assert "session.score(completion, tokens)" in (await failure(pool, "own:Counting"))[1]


async def test_what_was_asked_before_is_not_scored_again(tmp_path):
    async with pool_of("listed", "raises", cache_size=2) as pool:
        for completion in ("a", "a", "bb", "a", "cc", "a", "bb"):
            assert await pool.score("own:listed", "", completion, {}) == (len(completion), {"long": 0.5})
        # "bb" was the least recently asked for when "cc" came.
        assert (tmp_path / "calls").read_text().split() == ["a", "bb", "cc", "bb"]
        assert await score(pool, "own:listed", "", "a", {"another": "row"}) == 1
        assert (await failure(pool, "own:raises")) == (await failure(pool, "own:raises"))


async def test_without_a_cache_everything_is_scored(tmp_path):
    async with pool_of("listed", cache_size=0) as pool:
        for _ in range(2):
            await pool.score("own:listed", "", "a", {})
    assert (tmp_path / "calls").read_text().split() == ["a", "a"]


async def test_callers_who_ask_the_same_at_once_share_one_call_which_outlives_all_but_the_last(tmp_path):
    async with pool_of("listed", cache_size=0) as pool:
        request = ("own:listed", "", "a", {"sleep": 0.3})
        first, *remainder = [asyncio.create_task(pool.score(*request)) for _ in range(3)]
        await asyncio.sleep(0.05)
        first.cancel()
        assert [result.score for result in await asyncio.gather(*remainder)] == [1, 1]
    assert (tmp_path / "calls").read_text().split() == ["a"]


async def test_an_input_that_has_cost_too_many_workers_is_refused_at_once(tmp_path):
    async with pool_of("leaves", "hangs", "echo", quarantine_after=2, timeout_seconds=1) as pool:
        row = {"pids": str(tmp_path / "pids")}
        assert [(await failure(pool, "own:leaves", "x"))[0] for _ in range(4)] == ["died", "died"] + ["quarantined"] * 2
        assert [(await failure(pool, "own:hangs", "x", row))[0] for _ in range(3)] == ["timeout"] * 2 + ["quarantined"]
        assert (await failure(pool, "own:leaves", "y"))[0] == "died"
        assert await score(pool, "own:echo", "", "1", {}) == 1.0


async def test_a_queued_job_is_refused_once_its_input_has_cost_too_many_workers():
    async with pool_of("leaves", quarantine_after=1) as pool:
        pool._traits["own:leaves"] = Traits(False, False, False, False)  # not deterministic: nobody shares a job
        kinds = [kind for kind, _ in await asyncio.gather(*(failure(pool, "own:leaves") for _ in range(3)))]
    assert kinds == ["died", "quarantined", "quarantined"]


def test_what_is_remembered_of_inputs_is_bounded(monkeypatch):
    monkeypatch.setattr("areal.rewards.quarantine.SUSPECTS", 2)
    quarantine = Quarantine(1)
    for name in ("a", "b", "c"):
        quarantine.lost(digest(name))
    quarantine.check(digest("a"))
    with pytest.raises(RewardFailed, match=r"completion \(1\): it is refused"):
        quarantine.check(digest("c"))


async def test_a_worker_has_no_more_memory_than_it_may():
    async with pool_of("grows", memory_gib=0.5) as pool:
        assert await score(pool, "own:grows", "", f"{2**20}", {}) == 2**20
        assert (await failure(pool, "own:grows", f"{2**30}"))[0] in ("raised", "died")
        assert await score(pool, "own:grows", "", f"{2**21}", {}) == 2**21


@pytest.mark.parametrize("hides", [False, True])
async def test_a_worker_that_has_leaked_all_its_memory_is_replaced(hides):
    async with pool_of("leaks", memory_gib=0.5) as pool:
        workers = []
        while len({*workers} - {None}) < 3:  # a new one leaks, too
            try:
                workers.append(await score(pool, "own:leaks", "", f"{len(workers)}", {"hides": hides}))
            except RewardFailed as error:
                assert error.kind == "raised"
                assert "reward.memory_gib" in str(error)
                assert workers[-1] is not None, "the call after the one that failed must succeed"
                workers.append(None)
    assert workers.count(None) == 2


async def test_a_worker_that_died_idle_costs_no_job():
    async with pool_of("pid") as pool:
        first = int(await score(pool, "own:pid", "", "", {}))
        os.kill(first, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert await score(pool, "own:pid", "", "", {}) != first


async def test_what_a_reward_prints_or_forks_does_not_disturb_the_answers_and_large_completions_pass():
    async with pool_of("noisy", "forks", "length", "echo") as pool:
        assert await score(pool, "own:noisy", "", "", {}) == 0.5
        assert await score(pool, "own:echo", "", "1", {}) == 1.0
        assert await score(pool, "own:forks", "", "", {}) == 1.0
        assert await score(pool, "own:echo", "", "0.5", {}) == 0.5
        assert await score(pool, "own:length", "", "x" * 3_000_000, {}) == 3_000_000


async def test_a_cancelled_call_gives_its_answer_to_nobody_and_a_queued_one_is_not_made(tmp_path):
    async with pool_of("listed") as pool:
        running = asyncio.create_task(pool.score("own:listed", "", "a", {"sleep": 0.3}))
        queued = asyncio.create_task(pool.score("own:listed", "", "bb", {"sleep": 0.3}))
        await written(tmp_path / "calls")
        running.cancel()
        queued.cancel()
        assert await score(pool, "own:listed", "", "ccc", {}) == 3.0
    assert (tmp_path / "calls").read_text().split() == ["a", "ccc"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_like_it", "broken imports nothing_like_it, which .* does not have: install the package"),
        ("raise ValueError('at import')", "failed with ValueError: at import"),
        ("import os; os._exit(4)", r"ended its process while it was imported \(exit code 4\)"),
    ],
)
async def test_a_reward_that_does_not_import_is_told_at_the_start(tmp_path, source, message):
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(UserError, match=message):
        async with pool(["broken:f"]):
            pytest.fail("started")


async def test_jobs_fail_while_no_worker_can_be_started_again(own_module):
    async with pool_of("leaves", "echo") as pool:
        own_module.write_text("raise ValueError('edited')")
        assert (await failure(pool, "own:leaves"))[0] == "died"
        kind, reason = await failure(pool, "own:echo", "1")
        assert kind == "no_worker"
        assert "ValueError: edited" in reason
        own_module.write_text(OWN)
        assert await score(pool, "own:echo", "", "1", {}) == 1.0


async def test_closing_fails_what_is_waiting_and_leaves_no_process(tmp_path):
    async with pool_of("hangs", "pid", workers=2, timeout_seconds=60.0) as pool:
        hung = asyncio.create_task(pool.score("own:hangs", "", "", {"pids": str(tmp_path / "pids")}))
        await written(tmp_path / "pids")
        worker = int(await score(pool, "own:pid", "", "", {}))
    with pytest.raises(RewardFailed, match="closed"):
        await hung
    assert all(gone(pid) for pid in [worker, *(tmp_path / "pids").read_text().split()])
    assert (await failure(pool, "own:pid"))[0] == "no_worker"


def test_workers_die_with_their_parent_even_in_the_middle_of_a_job(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, os
            from areal.config.scoring import RewardConfig
            from areal.rewards.pool import RewardPool

            async def main():
                names = ["own:hangs", "own:pid"]
                async with RewardPool(names, RewardConfig(functions=names, workers=2, timeout_seconds=60)) as pool:
                    job = asyncio.create_task(pool.score("own:hangs", "", "", {"pids": "pids"}))
                    while not os.path.exists("pids") or not open("pids").read():
                        await asyncio.sleep(0.02)
                    print(int((await pool.score("own:pid", "", "", {})).score), flush=True)
                    await job

            asyncio.run(main())
            """
        )
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        idle = int(parent.stdout.readline())
        parent.kill()
    hung, grandchild = map(int, (tmp_path / "pids").read_text().split())
    assert gone(idle)
    assert gone(hung)
    os.kill(grandchild, signal.SIGKILL)


def test_a_worker_imports_neither_torch_nor_a_library_it_does_not_need():
    code = (
        "import areal.rewards.worker, sys; sys.exit(any(n in sys.modules for n in ('torch', 'sympy', 'reasoning_gym')))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}).returncode == 0


async def test_a_reward_of_groups_scores_all_completions_in_one_call():
    pair = ["own:longer", "own:later_longer"]
    async with pool(pair, groups=pair) as rewards:
        for name in pair:
            scored = await rewards.score_all(name, "", ["a", "abc", "ab"], {"n": 3})
            assert scored == [(0.0, {"n": 3.0}), (2.0, {"n": 3.0}), (1.0, {"n": 3.0})]
            with pytest.raises(RewardFailed, match="returned 2 scores for 3 completions") as failed:
                await rewards.score_all(name, "", ["a", "abc", "ab"], {"n": 2})
            assert failed.value.kind == "not_finite"
        assert await rewards.score(pair[0], "", "abc", {"n": 1}) == (0.0, {"n": 1.0})


async def test_a_pool_that_does_not_start_leaves_no_worker():
    processes_before = {process.pid for process in descendants(os.getpid())}
    with pytest.raises(UserError, match="scores all completions of a group at once, but the reward.groups of the run"):
        async with pool(["own:longer"], workers=2):
            pass
    assert {process.pid for process in descendants(os.getpid())} <= processes_before
