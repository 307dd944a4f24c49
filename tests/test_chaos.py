"""A kill at any moment costs time only: whole runs, with kill -9 in the middle of them.

pytest tests/test_chaos.py                     small runs
pytest tests/test_chaos.py --kills 20          the quickstart as well, with 20 kills
pytest tests/test_chaos.py --chaos-seed 7      the same kills again, as far as a machine does the same twice
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from accounts import check_accounts
from conftest import ROOT, Run
from fakes.scorers import judging, scorer_of, scores_of, token_scores_of, verdict, write_classifier
from safetensors.torch import load_file, save_file
from support.process_tree import Process, descendants, processes, processes_mentioning
from support.small_disks import flip_a_bit
from support.small_runs import SHORT, check_adapters, read_jsonl

from actors.master.run_state import RunState
from actors.record.completeness import check_record
from areal.__main__ import main
from areal.base.errors import UserError
from areal.samples.table import TOP
from areal.samples.tokenizer import load_tokenizer
from areal.storage.journal import journal_copy
from areal.storage.records import read_records
from areal.storage.rollout_files import files
from areal.storage.run_folder import checkpoint_of, config_of_run
from areal.storage.stored_groups import batches

CONFIG = str(ROOT / "configs" / "quickstart.yaml")
ROLES = ("master", "trainer", "generator", "rollout_manager", "reward", "evaluator")
HANGS_AT = 3
# While a role is started again, others take further steps.
KILLED_AT = range(HANGS_AT + 1, HANGS_AT + 6)
# Long enough for a kill to find any moment of a step.
PHASE_SECONDS = 0.5
# To look at all processes takes tens of milliseconds.
POLL_SECONDS = 0.25
# Between two steps there may be several starts of everything.
RESTART_SECONDS = 300
SECONDS_OF_A_SMALL_RUN = 600
NOTICE_SECONDS = 120
GAIN = 0.15


@pytest.fixture
def chaos(request) -> random.Random:
    """What happens when; its seed stands in the output of a test that failed."""
    seed = request.config.getoption("--chaos-seed")
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"--chaos-seed {seed}")
    return random.Random(seed)


@pytest.fixture
def small(tiny_model: Path, free_port: int) -> list[str]:
    """Overrides that make the quickstart small, and impatient with who is silent."""
    return [
        f"model={tiny_model}",
        f"master.address=tcp://127.0.0.1:{free_port}",
        "master.lease_seconds=10",
        "name=test",
        "steps=100000",
        "batch_size=4",
        "group_size=4",
        "max_staleness=2",
        "sampling.max_new_tokens=32",
        "data.eval_size=16",
        "generator.count=2",
        "generator.kv_cache_gib=0.25",
        "generator.memory_share=0.1",
        "trainer.checkpoint_every=3",
        "observe.tensorboard=false",
    ]


def steps_done(folder: Path) -> int:
    return sum(1 for _ in read_records(folder / "metrics.jsonl"))


def wait_for(run: Run, condition: Callable[[], object]) -> object:
    """The first true value of `condition`, while the run goes on. Fails the test where none comes in time."""
    deadline = time.monotonic() + RESTART_SECONDS
    while not (value := condition()):
        assert run.code is None, f"the run has ended with {run.code}:\n{run.output[-4000:]}"
        assert time.monotonic() < deadline, f"nothing for {RESTART_SECONDS} s:\n{run.output[-4000:]}"
        time.sleep(POLL_SECONDS)
    return value


def wait_for_step(run: Run, folder: Path, step: int) -> None:
    for done in range(step):
        wait_for(run, lambda done=done: steps_done(folder) > done)


def after_steps(run: Run, folder: Path, steps: int) -> None:
    done = steps_done(folder)
    wait_for(run, lambda: steps_done(folder) >= done + steps)


def of_role(run: Run, role: str, everything: list[Process] | None = None) -> list[Process]:
    """The processes that the run's supervisor has started for a role, of all that run now."""
    everything = processes() if everything is None else everything
    return [p for p in everything if p.parent == run.process.pid and f"--role {role} " in f"{p.command} "]


def kill(run: Run, role: str, chaos: random.Random) -> None:
    """Kill one process of a role, as soon as there is one."""
    victim = chaos.choice(wait_for(run, lambda: of_role(run, role)))
    print(f"step {steps_done(run.folder / 'runs' / 'test')}: kill {victim.pid}, {victim.command[-150:]}")
    os.kill(victim.pid, signal.SIGKILL)


def lose_machine(run: Run) -> None:
    """What the loss of its machine does to a run: nobody has time to tell anybody. The supervisor and the roles are
    killed; what they have started, such as vLLM's engine process, has to notice."""
    run.process.send_signal(signal.SIGSTOP)  # who saw it end first would have time to close its files
    everything = descendants(run.process.pid)
    for process in everything:
        if process.parent == run.process.pid:
            os.kill(process.pid, signal.SIGKILL)
    run.process.kill()
    run.process.wait()
    pids, deadline = {process.pid for process in everything}, time.monotonic() + NOTICE_SECONDS
    while left := [p.command for p in processes() if p.pid in pids and p.command]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def engine_keeps_its_core(run: Run) -> bool:
    """On two cores: everything else keeps to the other one."""
    cores = os.sched_getaffinity(0)
    if len(cores) != 2:
        return True
    everything = processes()
    roles = {role: of_role(run, role, everything) for role in ROLES}
    engines = [p for role in roles["generator"] for p in descendants(role.pid) if "EngineCore" in p.command]
    try:
        kept = [os.sched_getaffinity(p.pid) for p in engines]
        left = [os.sched_getaffinity(p.pid) for actors in roles.values() for p in actors]
    except ProcessLookupError:
        return False  # one has just ended
    return kept == [{min(cores)}] and len(left) == len(ROLES) and all(own == {max(cores)} for own in left)


def check_finished(run: Run, folder: Path, timeout: float) -> None:
    output = run.wait(timeout)
    print(output[-8000:])
    assert run.code == 0
    check_accounts(folder)
    assert not [p for p in processes() if str(folder) in p.command]
    # Whatever was killed, the weights are those of the rollouts alone.
    assert main(["replay", str(folder)]) == 0


ADAPTERS = [
    "reward.functions={addition: 1, mine:Short: 0.1}",
    "reward.options.mine:Short.characters=1",
    "trainer.lora.rank=4",
    "trainer.lora.target_modules=[q_proj,v_proj]",
    "trainer.kl_coef=0.01",
    "generator.count=1",
]
"""A run with one generator that trains adapters, by a reward of its own."""


@pytest.mark.timeout(SECONDS_OF_A_SMALL_RUN)
def test_a_run_whose_trainer_and_master_are_killed_reaches_its_end_and_a_replay_reaches_the_same_weights(
    run, small, tiny_model, chaos, tmp_path
):
    folder, copy = tmp_path / "runs" / "test", tmp_path / "copy"
    (tmp_path / "mine.py").write_text(SHORT)
    started = run("--config", CONFIG, *small, *ADAPTERS, "steps=9")
    wait_for(started, lambda: engine_keeps_its_core(started))
    for role in chaos.sample(["trainer", "master"], 2):
        after_steps(started, folder, 2)
        time.sleep(chaos.uniform(0, PHASE_SECONDS))
        kill(started, role, chaos)
    wait_for(started, lambda: "master/0 was killed by SIGKILL, and is started again" in started.output)
    done = steps_done(folder)
    assert main(["backup", str(folder), str(copy)]) == 0  # while it goes on
    assert steps_done(copy) >= done
    check_finished(started, folder, SECONDS_OF_A_SMALL_RUN)
    check_summary(folder, tiny_model)


def check_summary(folder: Path, model: Path) -> None:
    """Of a run with ADAPTERS whose master and trainer were killed."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["masters"] >= 2
    assert summary["lineages"] >= 2
    assert all(0 < record["reward_parts"]["mine:Short"] < 1 for record in read_jsonl(folder / "metrics.jsonl"))
    check_adapters(folder, model, summary["checkpoint"])


@pytest.mark.slow  # the test above has the kills and the replay, the simulator all the rest
@pytest.mark.timeout(2 * SECONDS_OF_A_SMALL_RUN)
@pytest.mark.parametrize("spared", ["generator", "nobody"])
def test_an_engine_may_hang_then_roles_be_killed_then_the_machine_and_the_run_goes_on_from_its_damaged_backup(
    run, small, tiny_model, free_port, chaos, tmp_path, spared
):
    """A generator that is spared is lost with its engine before, and with the machine: its start takes longest. A
    reward actor that was started by hand joins the run."""
    folder, copy = tmp_path / "runs" / "test", tmp_path / "copy"
    (tmp_path / "mine.py").write_text(SHORT)
    started = run("--config", CONFIG, *small, *ADAPTERS, "master.hang_seconds=10")
    wait_for(started, lambda: engine_keeps_its_core(started))
    by_hand = run("--role", "reward", "--master", "runs/test")
    hang_engine(started, folder)
    roles = [role for role in chaos.sample(ROLES, len(ROLES)) if role != spared]
    for step, victims in zip(sorted(chaos.sample(KILLED_AT, 2)), (roles[:3], roles[3:]), strict=True):
        wait_for_step(started, folder, step)
        for role in victims:  # who is started again keeps one core busy
            time.sleep(chaos.uniform(0, PHASE_SECONDS))
            kill(started, role, chaos)
    after_steps(started, folder, 1)
    assert "master/0 was killed by SIGKILL, and is started again" in started.output
    backed_up_after = steps_done(folder)
    assert main(["backup", str(folder), str(copy)]) == 0  # while it goes on
    after_steps(started, folder, 1)
    print(f"step {steps_done(folder)}: lose_machine")
    lose_machine(started)
    lose_machine(by_hand)
    assert not processes_mentioning(f"tcp://127.0.0.1:{free_port}")
    assert '"reward/1#' in log_of(folder, "master-0")
    done = steps_done(folder)
    assert steps_done(copy) in range(backed_up_after, done + 1)

    # A record that is not whole is refused.
    (folder / "journal.db-wal").rename(tmp_path / "wal")
    with pytest.raises(UserError, match=r"journal.db is not whole: it ends at step \d+, and .* is of a later one"):
        check_record(config_of_run(folder))
    with journal_copy(copy / "journal.db") as journal:
        newest = checkpoint_of(copy, RunState(config_of_run(copy), journal).checkpoint_version)
    flip_a_bit(newest / "training" / "rank_00000-of-00001.safetensors")
    check_finished(resumed := run("--resume", str(copy), f"steps={done + 3}"), copy, SECONDS_OF_A_SMALL_RUN)
    assert "the steps since are trained again" in resumed.output
    check_summary(copy, tiny_model)


def hang_engine(run: Run, folder: Path) -> None:
    """Stop vLLM's engine process, whose actor lives and beats meanwhile, as with a GPU that hangs. Returns once it has
    been ended for that. After a few steps loads have a history."""
    wait_for_step(run, folder, HANGS_AT)
    (engine,) = (p for p in descendants(run.process.pid) if "EngineCore" in p.command)
    (server,) = (p for p in processes() if p.pid == engine.parent)
    assert server.command.startswith("areal forkserver of vLLM")  # which had imported vLLM already
    os.kill(engine.pid, signal.SIGSTOP)
    hung = re.compile(r'"generator/0#\w+", "reason": "it hangs: .* has stood still for')
    wait_for(run, lambda: hung.search(log_of(folder, "master-0")))
    assert "generator/0 may hang" in run.output
    wait_for(run, lambda: engine.pid not in {p.pid for p in processes()})


SLOW_ROLLOUTS = """\
import os, pathlib, time
fsync = os.fsync
def slow(number):
    if "/rollouts/" in os.readlink(f"/proc/self/fd/{number}"):
        (mark := pathlib.Path(__file__).with_name("slow")).touch()
        while mark.exists():
            time.sleep(0.05)
    fsync(number)
os.fsync = slow
"""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_OF_A_SMALL_RUN)
def test_a_disk_that_is_slow_with_rollouts_alone_fences_no_trainer_and_holds_up_no_step(run, small, tmp_path):
    """Every process of the run has that disk. Writes of the spool, which are fast, end all the time."""
    folder, slow = tmp_path / "runs" / "test", tmp_path / "slow"
    (tmp_path / "sitecustomize.py").write_text(SLOW_ROLLOUTS)
    hang_seconds = 10
    more = [f"master.hang_seconds={hang_seconds}", "generator.count=1", "trainer.checkpoint_every=100000"]
    started = run("--config", CONFIG, *small, *more)
    wait_for(started, slow.exists)
    (trainer,) = of_role(started, "trainer")
    began, steps = time.monotonic(), steps_done(folder)
    wait_for(started, lambda: time.monotonic() > began + 2 * hang_seconds and steps_done(folder) > steps + 3)
    assert not list((folder / "rollouts").glob("[0-9]*.parquet"))
    slow.unlink()
    wait_for(started, lambda: list((folder / "rollouts").glob("[0-9]*.parquet")))
    assert [process.pid for process in of_role(started, "trainer")] == [trainer.pid]
    assert "it hangs" not in log_of(folder, "master-0")


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS_OF_A_SMALL_RUN)
def test_a_run_goes_on_after_it_lost_its_generators_was_stopped_and_lost_its_machine(
    run, small, free_port, chaos, tmp_path
):
    folder = tmp_path / "runs" / "test"
    started = run("--config", CONFIG, *small, "data.eval_size=0")
    lose_generators(started, folder)
    for end, more in zip(chaos.sample([stop, lose_machine], 2), (100_000, 5), strict=True):
        after_steps(started, folder, chaos.randint(1, 3))
        time.sleep(chaos.uniform(0, PHASE_SECONDS))
        print(f"step {steps_done(folder)}: {end.__name__}")
        end(started)
        assert not processes_mentioning(f"tcp://127.0.0.1:{free_port}")
        last = steps_done(folder) + more
        started = run("--resume", str(folder), "generator.count=1", f"steps={last}")
    check_finished(started, folder, SECONDS_OF_A_SMALL_RUN)

    again = run("--resume", str(folder))
    assert "is complete" in again.wait(60)
    assert again.code == 2


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS_OF_A_SMALL_RUN)
def test_columns_of_scorers_that_are_killed_and_join_are_those_of_scorers_that_nobody_disturbs(
    run, small, tiny_model, chaos, tmp_path
):
    folder = tmp_path / "runs" / "test"
    scorers = json.dumps(write_scorers(tmp_path, tiny_model))
    with judging() as url:
        judge = json.dumps({"url": url, "model": "m", "template": "{{ prompt }}|{{ completion }}"})
        started = run(
            "--config",
            CONFIG,
            *small,
            "generator.count=1",
            "data.eval_size=0",
            "trainer.teacher=wise",
            "trainer.kl_coef=0.01",
            "trainer.reference=scorer:first",
            f"scorers={scorers}",
            "trainer.teacher_coef=0.1",
            "trainer.teacher_top_k=3",
            "reward.functions={addition: 1, judge: 0.1, liked: 0.1}",
            f"reward.options.judge={judge}",
        )
        wait_for_step(started, folder, 1)
        kill_servers(started, chaos)
        joined = run("--role", "scorer", "--scorer", "wise", "--master", "runs/test")
        health = ["--master", str(folder), "--actor", "scorer/3", "--wait", str(RESTART_SECONDS)]
        subprocess.run([sys.executable, "-m", "areal", "health", *health], check=True, cwd=ROOT)
        kill_servers(started, chaos)
        stop(started)
        joined.wait(RESTART_SECONDS)
        last = steps_done(folder) + 1
        check_finished(run("--resume", str(folder), f"steps={last}"), folder, SECONDS_OF_A_SMALL_RUN)
    asyncio.run(check_columns(folder))


def write_scorers(folder: Path, model: Path) -> dict[str, dict[str, object]]:
    """The settings of a teacher, a reference and a reward model, none of which is the run's model."""
    write_classifier(folder / "liked", model)
    weights = load_file(model / "model.safetensors")
    for share, name in ((1.1, "wise"), (1.2, "first")):
        shutil.copytree(model, folder / name)
        changed = {key: share * weight for key, weight in weights.items()}
        save_file(changed, folder / name / "model.safetensors", metadata={"format": "pt"})
    engine = {"dtype": "float32", "kv_cache_gib": 0.25, "repeatable": True}
    settings: dict[str, dict[str, object]] = {
        name: {"model": str(folder / name), **engine} for name in ("wise", "first", "liked")
    }
    settings["liked"]["kind"] = "reward_model"
    return settings


def kill_servers(run: Run, chaos: random.Random) -> None:
    """Kill each scorer that the run has started, and its reward actor. Returns once the run needs them again."""
    for victim in chaos.sample(["--scorer wise", "--scorer first", "--scorer liked", "--role reward"], 4):
        time.sleep(chaos.uniform(0, PHASE_SECONDS))
        own = lambda: [p for p in processes() if p.parent == run.process.pid and f"{victim} " in p.command]  # noqa: B023, E731
        (process,) = wait_for(run, own)
        print(f"kill {process.pid}, {victim}")
        os.kill(process.pid, signal.SIGKILL)
    after_steps(run, run.folder / "runs" / "test", 4)  # more than what was sampled by then


async def check_columns(folder: Path) -> None:
    """Each column of the trained samples is, to the last bit, what a scorer gives that nobody disturbs."""
    config = config_of_run(folder)
    tables = [pq.read_table(file, columns=["group", "sample", "reward_parts"]) for file in files(folder / "rollouts")]
    parts = {
        (row["group"], row["sample"]): json.loads(row["reward_parts"]) for table in tables for row in table.to_pylist()
    }
    groups = [group for _, groups in batches(folder / "rollouts") for group in groups]
    samples = [(sample, parts[group.id, place]) for group in groups for place, sample in enumerate(group.trajectories)]
    for name, columns in (("wise", ("teacher_logprobs", *TOP)), ("first", ("reference_logprobs",))):
        async with scorer_of(config, name) as scorer:
            rows = await token_scores_of(scorer, [sample.tokens for sample, _ in samples])
        for (sample, _), row in zip(samples, rows, strict=True):
            for column, values in zip(columns, (row.logprobs, row.top_tokens, row.top_logprobs), strict=False):
                expected = getattr(sample.with_scores(column, [values]), column)
                np.testing.assert_array_equal(getattr(sample, column), expected)
    tokenizer = load_tokenizer(config.model)
    texts = [
        [tokenizer.decode(sample.tokens[part], skip_special_tokens=True) for part in (~sample.sampled, sample.sampled)]
        for sample, _ in samples
    ]
    async with scorer_of(config, "liked") as scorer:
        scores = await scores_of(scorer, [(prompt, completion, {}) for prompt, completion in texts])
    for (sample, own), (prompt, completion), (score, read) in zip(samples, texts, scores, strict=True):
        judged = verdict(f"{prompt}|{completion}")
        assert (own["liked"], own["liked/tokens"], own["judge"]) == (score, read, judged)
        assert sample.reward == pytest.approx(own["addition"] + 0.1 * (judged + score))


def lose_generators(run: Run, folder: Path) -> None:
    """Who was stopped for too long is fenced and started again; who is told to leave hands over."""
    wait_for_step(run, folder, 1)
    stopped, leaving = (
        next(p for p in of_role(run, "generator") if f"--index {index} " in p.command) for index in (0, 1)
    )
    os.kill(stopped.pid, signal.SIGSTOP)
    fenced = re.compile(r'"generator/0#\w+", "reason": "silent for')
    wait_for(run, lambda: fenced.search(log_of(folder, "master-0")))
    os.kill(stopped.pid, signal.SIGCONT)
    wait_for(run, lambda: "generator/0 exited with 3" in run.output)
    os.kill(leaving.pid, signal.SIGTERM)
    wait_for(run, lambda: "generator/1 was told to leave by another program" in run.output)
    after_steps(run, folder, 3)  # by the new generator/0 alone


def stop(run: Run) -> None:
    run.process.terminate()
    output = run.wait(RESTART_SECONDS)
    assert run.code == 1
    assert "told to stop by SIGTERM" in output


@pytest.mark.timeout(0)  # each wait in it has an end
def test_the_quickstart_learns_whatever_is_killed(run, free_port, chaos, tmp_path, request):
    kills = request.config.getoption("--kills")
    if not kills:
        pytest.skip("takes long: give --kills N")
    folder = tmp_path / "runs" / "test"
    subprocess.run(
        [sys.executable, "-m", "areal", "quickstart-model", str(tmp_path / "runs" / "models")], check=True, cwd=ROOT
    )
    started = run("--config", CONFIG, f"master.address=tcp://127.0.0.1:{free_port}", "name=test")
    steps = yaml.safe_load(Path(CONFIG).read_text())["steps"]
    for step in sorted(chaos.choices(range(steps), k=kills)):
        wait_for_step(started, folder, step)
        time.sleep(chaos.uniform(0, PHASE_SECONDS))
        kill(started, chaos.choice(ROLES), chaos)
    check_finished(started, folder, timeout=3600)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_after"] >= summary["accuracy_before"] + GAIN


def log_of(folder: Path, actor: str) -> str:
    return (folder / "logs" / f"{actor}.jsonl").read_text()
