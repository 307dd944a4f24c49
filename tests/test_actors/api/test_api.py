"""A process that joins a run beside its own work, on a real master."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs
from support.small_runs import ten_steps

import areal
from actors.api.call_settings import named_rewards, settings_of
from actors.api.function_pool import FunctionPool
from actors.api.local_actors import LocalActors, _follow
from actors.api.python_rows import write_rows
from actors.master.master import Master
from actors.runtime.bound_addresses import open_network, take_folder
from actors.sampling.flows import Flow
from actors.sampling.jobs import ScoreJob
from areal.base.errors import UserError
from areal.base.processes import KEYS, ROOT
from areal.config import dump_config
from areal.config.scoring import RewardConfig
from areal.rewards.lookup import of_object
from areal.rewards.worker import RewardFailed
from areal.storage.journal import Journal
from areal.storage.run_folder import RunFolder, config_of_run
from areal.workflows import begin, turns
from protocols.bus import Bus
from protocols.membership_messages import AskSnapshot, AskStatus, Member


@pytest.fixture
async def run(tmp_path, monkeypatch, free_port):
    """A run whose reward is left to others, with its master in this process; and a way to ask the master."""
    monkeypatch.delenv(KEYS, raising=False)
    reward, master = {"functions": ["length"], "external": ["length"]}, {"address": f"tcp://127.0.0.1:{free_port}"}
    folders = {"name": "here", "run_dir": tmp_path, "model": str(tmp_path)}
    config = ten_steps(**folders, steps=2, group_size=1, reward=reward, master=master)
    take_folder(config, resume=False).close()
    folder = RunFolder(config)
    keys = Path(os.environ.pop(KEYS))

    def bus(name: str) -> Bus:
        return Bus(name, open_network("127.0.0.1", keys=keys))

    master = Master(bus("master/0#m"), config, journal=Journal.open(folder.path / "journal.db"), folder=folder)
    running = asyncio.create_task(master.run())
    asker = bus("rollout_manager/?#a")
    yield folder.path, asker, config.master.address
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asker.close()


async def reward_actors(asker: Bus, address: str) -> list[Member]:
    members = (await asker.peer(address).ask(AskSnapshot(), 20)).members
    return [member for member in members if member.role == "reward" and member.state == "healthy"]


async def scored(asker: Bus, member: Member, *completions: str) -> list[float]:
    """What a reward actor says of completions, by the protocol."""
    async with asyncio.TaskGroup() as tasks:
        flows: list[asyncio.Task[None]] = []

        def spawn(work, name):
            flows.append(tasks.create_task(work))
            return flows[-1]

        flow = Flow(asker.peer(member.address), itertools.count(), ScoreJob, spawn)
        jobs = [ScoreJob(None, member.serves[0], "p", [text], {"prompt": "p"}, None) for text in completions]
        results = await asyncio.gather(*(flow.run_job(job) for job in jobs))
        for task in flows:
            task.cancel()
    return [result.score for (result,) in results]


async def test_a_process_joins_scores_with_its_closures_and_leaves(run):
    folder, asker, address = run
    seen, unit = [], 2.0

    def length(prompt, completion, row):
        seen.append((os.getpid(), threading.current_thread() is threading.main_thread()))
        return len(completion) / unit

    async def late(prompt, completion, row):
        await asyncio.sleep(0.01)
        return 0.25

    joined = await asyncio.to_thread(areal.join, folder)
    await asyncio.to_thread(joined.serve_reward, length)
    (member,) = await reward_actors(asker, address)
    assert member.serves == ("length",)
    assert await scored(asker, member, "aaa", "a") == [1.5, 0.5]
    assert seen == [(os.getpid(), False)] * 2
    unit = 1.0
    assert await scored(asker, member, "aaa") == [3.0]
    await asyncio.to_thread(joined.serve_reward, lambda prompt, completion, row: 7, name="length")
    assert await scored(asker, member, "aaa") == [7.0]  # the new function, by the same actor

    with pytest.raises(UserError, match="The run has no reward 'late': give it a weight"):
        await asyncio.to_thread(joined.serve_reward, late)
    await asyncio.to_thread(joined.serve_reward, late, 0.5)
    assert (await asker.peer(address).ask(AskStatus(), 20)).values["rewards"] == {"length": 1.0, "late": 0.5}
    serving = {member.serves: member for member in await reward_actors(asker, address)}
    assert await scored(asker, serving["late",], "x") == [0.25]

    with pytest.raises(areal.UserError, match="'single_turn', not `external`"):
        await asyncio.to_thread(joined.serve_workflow, late)
    await asyncio.to_thread(joined.leave)
    assert await reward_actors(asker, address) == []
    await asyncio.to_thread(joined.serve_reward, length)
    (member,) = await reward_actors(asker, address)
    assert await scored(asker, member, "aaa") == [3.0]
    await asyncio.to_thread(joined.leave)
    (folder / "address").unlink()
    with pytest.raises(UserError, match=r"The run in .* is over"):
        await asyncio.to_thread(joined.serve_reward, late)
    with pytest.raises(UserError, match=r"waited 0.2 s"):
        await asyncio.to_thread(areal.join, folder, 0.2)


@pytest.mark.parametrize("stop", [areal.LiveRun.stop, lambda live: asyncio.to_thread(live.stop)])
async def test_a_run_is_stopped_from_a_coroutine_and_from_elsewhere(run, stop):
    process = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220
    await stop(areal.LiveRun(run[0], config_of_run(run[0]), process))
    assert process.returncode == -signal.SIGTERM


CELLS = """
import areal, os
scale = 3.0
run = areal.join({folder!r})
run.serve_reward(lambda prompt, completion, row: scale * len(completion), name="length")
await run.step(0)
os.getpid()
"""
LIVE = """
import threading
from areal.storage.records import line_of
step = run.version + 1
records = (run.folder / "metrics.jsonl").open("a", buffering=1)
threading.Timer(1.5, records.write, [line_of({"step": step})]).start()
run.wait(step)
"""


@pytest.mark.slow
async def test_a_notebook_serves_a_run_and_another_kernel_does_when_it_is_killed(run):
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    folder, asker, address = run
    cells = [CELLS.format(folder=str(folder)), "scale = 2.0", LIVE]
    identities = []
    for _ in range(2):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(Path.cwd())}})
        async with client.async_setup_kernel():
            cell = await client.async_execute_cell(notebook.cells[0], 0)
            newest = (await reward_actors(asker, address))[-1]
            assert newest.identity not in identities
            assert await scored(asker, newest, "ab") == [6.0]  # the cell has ended, and the kernel is free
            await client.async_execute_cell(notebook.cells[1], 1)
            assert await scored(asker, newest, "ab") == [4.0]
            (view,) = (await client.async_execute_cell(notebook.cells[2], 2)).outputs
            assert "here  ·  step 0 of 2" in view["data"]["text/plain"] and "generator" in view["data"]["text/html"]
            os.kill(int(cell.outputs[-1]["data"]["text/plain"]), signal.SIGKILL)
        identities.append(newest.identity)


def test_a_process_has_one_thread_for_all_the_runs_that_it_joins():
    assert [LocalActors("tcp://127.0.0.1:5", None) for _ in range(2)]
    assert [thread.name for thread in threading.enumerate()].count("areal") == 1


def test_what_fails_in_this_process_is_told_plainly_and_cannot_steer_the_terminal(capsys):
    structlog.reset_defaults()
    try:
        LocalActors("tcp://127.0.0.1:5", None)
        structlog.get_logger().error("workflow failed", exc_info=ValueError("\x1b[2J"))
    finally:
        structlog.reset_defaults()
    assert capsys.readouterr().err.splitlines()[1:] == ["ValueError: \\x1b[2J"]


def test_an_actor_of_this_process_that_fails_later_says_so():
    ready, life, error = Future(), Future(), RuntimeError("no more memory")
    ready.set_result(None)
    life.set_exception(error)
    with capture_logs() as logs:
        _follow(life, ready)
    assert [(entry["log_level"], entry["exc_info"]) for entry in logs] == [("error", error)]


async def test_calls_in_this_process_have_a_deadline_and_places():
    def slow(prompt, completion, row):
        time.sleep(float(completion))
        return 1.0

    async def meets(prompt, completion, row):
        await barrier.wait()
        return {"a": 1} if completion == "odd" else 1.0

    def raises(prompt, completion, row):
        raise SystemExit("no")

    async def exits(prompt, completion, row):
        raise SystemExit("no")

    async def gives_up(prompt, completion, row):
        raise TimeoutError("of its own client, long before the deadline")

    barrier = asyncio.Barrier(3)
    rewards = slow, meets, raises, exits, gives_up
    functions = {reward.__name__: of_object(reward.__name__, reward) for reward in rewards}
    settings = RewardConfig(timeout_seconds=0.5, workers=1)
    async with FunctionPool(functions, settings) as pool:
        outcomes = await asyncio.gather(
            pool.score_all("slow", "", ["5"], {}),
            pool.score_all("slow", "", ["0"], {}),
            *(pool.score_all(name, "", [""], {}) for name in ("raises", "exits", "gives_up")),
            *(pool.score_all("meets", "", [text], {}) for text in ("", "", "odd")),
            return_exceptions=True,
        )
    verdicts = [outcome.kind if isinstance(outcome, RewardFailed) else outcome[0].score for outcome in outcomes]
    assert verdicts == ["timeout", 1.0, "raised", "raised", "raised", 1.0, 1.0, "not_finite"]


def length(prompt, completion, row):
    return len(completion)


class Judge:
    async def score(self, prompt, completion, row):
        return 0.5


def test_rewards_are_given_as_functions_objects_and_names():
    assert named_rewards("math") == ({"math": 1.0}, {})
    weights, functions = named_rewards({length: 0.5, Judge(): 2, "math": 1})
    assert (weights, list(functions)) == ({"length": 0.5, "Judge": 2.0, "math": 1.0}, ["length", "Judge"])
    assert functions["Judge"].concurrent and not functions["length"].concurrent
    names = named_rewards([length, length, lambda prompt, completion, row: 0])[0]
    assert list(names) == ["length", "length_", "reward"]
    with pytest.raises(UserError, match="it is called with prompt, completion and row"):
        named_rewards(lambda text: 0.0)
    with pytest.raises(UserError, match="The weight of reward 'length' is <function length"):
        named_rewards({"length": length})


def test_a_call_gives_the_configuration_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n}?", "number": n} for n in range(70)]
    settings = settings_of(
        None,
        rows,
        length,
        None,
        {"model": "m", "steps": 3, "trainer.lr": 1e-3, "data.eval_size": 4, "data.prompt_template": "{{ question }}"},
    )
    config = settings.config
    assert areal.load_config(settings.file) == config
    assert (config.steps, config.group_size, config.trainer.lr, config.data.eval_size) == (3, 8, 1e-3, 4)
    assert config.data.answer_key is None and config.reward.external == ["length"] and not config.own_rewards
    assert config.data.source == str(tmp_path / "runs" / "notebook" / "rows.jsonl")
    text = tmp_path / "again.yaml"
    text.write_text(dump_config(config))
    assert areal.load_config(text) == config


def test_a_call_replaces_what_its_configuration_says_of_rewards_rows_and_workflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def once(session, row):
        raise NotImplementedError

    keys = {
        "model": "m",
        "steps": 3,
        "batch_size": 1,
        "group_size": 2,
        "sampling": {"max_new_tokens": 8},
        "reward": {"functions": {"math": 1.0}, "workers": 3},
        "trainer": {"minibatches": 1},
        "data": {"source": "hf:other", "split": "test", "eval_source": "hf:more", "answer_key": "right"},
    }
    rows = [{"prompt": "a", "right": "b"}]
    settings = settings_of(areal.Config(**keys), rows, length, once, {"data.eval_size": 0, "data.system_prompt": None})
    config = settings.config
    assert config.rewards == {"length": 1.0} and config.reward.workers == 3
    assert (config.data.split, config.data.eval_source, config.data.answer_key) == ("train", None, "right")
    assert config.rollout_manager.external and settings.workflow is once
    named = settings_of(keys, "rows.jsonl", None, "multi_turn", {"data.answer_key": None})
    assert (named.config.rollout_manager.workflow, named.workflow) == ("multi_turn", None)
    assert named.config.data.answer_key is None
    with pytest.raises(UserError, match="The key 'model' is missing in the call"):
        settings_of(None, rows, length, None, {"model": None})
    with pytest.raises(UserError, match="The workflow 'length' is no async function"):
        settings_of(keys, rows, length, length, {})


def test_a_run_that_prepares_itself_is_waited_for_and_one_that_is_gone_is_not(tmp_path):
    given_as_objects = f"data.source '{tmp_path}/rows.jsonl'"
    (tmp_path / "console.log").write_text(f"Note: a long download\nA prompt in {given_as_objects} has 'W'.\n")
    process = subprocess.Popen(["sh", "-c", "sleep 0.5; exit 2"])
    with pytest.raises(UserError, match=r"^A prompt in data has 'W'\.$"):
        areal.LiveRun(tmp_path, ten_steps(), process)._find_master(0.0)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "data has no rows"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c"}], "Row 1 of data has no 'answer'"),
        ([{"prompt": ""}], "Row 0 of data has an empty 'prompt'"),
        (["text"], "Row 0 of data is of type str"),
        ({"prompt": ["a"]}, "data is of type dict: give a list of dicts"),
        ([{"prompt": "a", "at": object()}], r"Row 0 of data is not JSON \(object is no value of JSON"),
    ],
)
def test_rows_that_cannot_be_used_are_found_before_the_start(tmp_path, monkeypatch, data, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        settings_of(None, data, length, None, {"model": "m", "data.eval_size": 0})
    assert not [*tmp_path.iterdir()]


def no_score(prompt, completion, row):
    return float("nan") if completion else None


def no_column(prompt, completion, row):
    return row["colour"] == completion


def uneven(prompt, completion, row):
    return 1 / len(completion)


@pytest.mark.parametrize(
    ("reward", "sentence"), [(no_score, "NoneType, not a number"), (no_column, "KeyError: 'colour'")]
)
def test_a_reward_that_cannot_score_is_found_before_the_start(tmp_path, monkeypatch, reward, sentence):
    monkeypatch.chdir(tmp_path)
    words = f"{reward.__name__}' fails for the completion '' of the prompt '1'.*{sentence}"
    with pytest.raises(UserError, match=words):
        settings_of(None, [{"prompt": "1"}], reward, None, {"model": "m", "data.eval_size": 0})
    assert not [*tmp_path.iterdir()]


LOCK = threading.Lock()


def needs_a_lock(tokens, config):
    return LOCK


async def test_a_reward_that_cannot_score_an_empty_completion_is_told_in_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings_of(None, [{"prompt": "1"}], uneven, None, {"model": "m", "data.eval_size": 0})
    note = "Note: reward 'uneven' fails for the completion '' of the prompt '1' (ZeroDivisionError"
    assert note in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: areal.train("quickstart", length), "areal.train: too many positional arguments: write NAME=VALUE"),
        (lambda: areal.train("quickstart"), 'the quickstart is a model: model="quickstart"'),
        (lambda: areal.join(), "areal.join: missing a required argument: 'folder'"),
        (lambda: areal.Config(model="m", steps="x"), "steps is 'x' in the call, but should be a valid integer"),
        (lambda: areal.train(model="m", data=[{"prompt": "1"}]), "Rows of your own need a reward"),
        (
            lambda: areal.train(model="quickstart", **{"trainer.objective": lambda tokens, config: 0.0}),
            "The objective <lambda> is no plain function: use def, without decorators, or write it to a file",
        ),
        (
            lambda: areal.train(model="quickstart", trainer={"objective": needs_a_lock}),
            "The objective needs_a_lock uses LOCK of this process: define it in needs_a_lock",
        ),
        (lambda: areal.train(model="none", data=[{"prompt": "1"}], reward=length, data_=1), "Unknown key 'data_'"),
        (
            lambda: areal.train(model="quickstart", trainer={"lr": 1e-5}, **{"trainer.lr": 1e-4}),
            "The call has 'trainer.lr' twice, also in trainer={...}",
        ),
        (
            lambda: areal.train(model="quickstart", workflow=lambda session, row: 0),
            "The workflow 'workflow' is no async",
        ),
    ],
)
def test_a_call_that_cannot_be_raises_a_user_error_and_leaves_nothing(tmp_path, monkeypatch, call, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(sentence)):
        call()
    assert not [*tmp_path.iterdir()]


def test_rows_come_from_tables(tmp_path):
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    columns = {"prompt": ["a", "b"], "answer": [1, 2]}
    written = []
    for data in (pandas.DataFrame(columns), datasets.Dataset.from_dict(columns), ({"prompt": "a", "answer": 1},)):
        file, has_answers = write_rows(data, tmp_path)
        assert has_answers
        written.append(file.read_text().splitlines())
    assert written[0] == written[1] == ['{"prompt": "a", "answer": 1}', '{"prompt": "b", "answer": 2}']


@pytest.mark.slow
def test_a_run_from_python_ends_with_a_workflow_and_a_reward_that_stay_here(tmp_path, monkeypatch, tiny_model, capsys):
    monkeypatch.chdir(tmp_path)
    seen = []

    async def once(session, row):
        talk, messages = begin(session.tokenizer, row.prompt)
        async for answer in turns(session, talk, messages, 1):
            score = await session.score(answer)
        return session.trajectory(score)

    def length(prompt, completion, row):
        seen.append(completion)
        return float(len(completion))

    run = areal.train(
        ROOT / "configs" / "quickstart.yaml",
        model=tiny_model,
        reward=length,
        workflow=once,
        steps=2,
        batch_size=4,
        group_size=2,
        sampling={"max_new_tokens": 16},
        **{"data.eval_size": 4},
    )
    assert "Everything is in runs/quickstart" in capsys.readouterr().out
    assert list(run.metrics["step"]) == [1, 2] and len(seen) >= 16 + 2 * 4
    assert run.rollouts.sql("SELECT count(*) AS n FROM rollouts")["n"][0] >= 16
    assert run.checkpoint and run.report().exists() and run.summary["ok"]
    assert "uPlot" in run.figure() and run.figure()._repr_html_().startswith('<iframe sandbox="allow-scripts"')
