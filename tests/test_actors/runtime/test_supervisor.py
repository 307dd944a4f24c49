"""The supervisor with stand-ins for the roles: small programs that end as they are told to."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from support.networks import network
from support.process_tree import descendants, processes_mentioning
from support.small_runs import ten_steps

import areal.devices
from actors.runtime import role_process, status_watch, supervisor
from actors.runtime.role_process import Deaths
from actors.runtime.supervisor import Supervisor
from areal.base.processes import ROOT, LenientOutput
from areal.config import Config
from areal.storage.disk import Backlog
from protocols.bus import Bus
from protocols.bus_errors import ProtocolVersionError
from protocols.membership_messages import Status
from protocols.transport import Request

# Each start of a role appends its arguments to ROLE.starts; then it does what the script for that start says.
PRELUDE = """\
import os, signal, subprocess, sys, time
from pathlib import Path
role, arguments, folder = sys.argv[1], sys.argv[2:], Path.cwd()
starts = folder / (role + ".starts")
with starts.open("a") as file:
    print(*arguments, file=file)
start = len(starts.read_text().splitlines())
def stay():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(role, "stays", flush=True)
    while True:
        time.sleep(0.02)
def wait_for(path):
    while not (path.exists() and path.read_text()):
        time.sleep(0.02)
"""
# A master, until a file named `end` says with which code to exit. Its requests are answered here, by `whole`: a process
# that imports the bus takes a second.
MASTER = """\
run = Path(RUN)
run.mkdir(exist_ok=True)
(run / "metrics.jsonl").touch()
(run / "journal.db").touch()
try:
    wait_for(folder / "end")
except KeyboardInterrupt:
    with (folder / "stopped").open("a") as file:
        print("master", file=file)
print("the master's last line", flush=True)
sys.exit(int((folder / "end").read_text()) if (folder / "end").exists() else 1)
"""


@pytest.fixture
def at_once(monkeypatch):
    """What died is started again without a pause."""
    monkeypatch.setattr(role_process, "FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def just_ended(monkeypatch):
    """Whoever is killed has ended just before."""
    kill = os.killpg

    def killed(group: int, sign: int) -> None:
        kill(group, sign)
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", killed)


class Stage:
    """A supervisor whose roles are the scripts given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]) -> None:
        self.folder = folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        for role, script in scripts.items():
            (folder / f"{role}.py").write_text(PRELUDE + script)
        self.printed = io.StringIO()
        self.supervisor = Supervisor(Console(file=self.printed, width=10_000), self._command)

    def _command(self, role: str, arguments: list[str]) -> list[str]:
        return [sys.executable, str(self.folder / f"{role}.py"), role, *arguments]

    def starts(self, role: str) -> list[str]:
        """The arguments of each start of a role so far."""
        file = self.folder / f"{role}.starts"
        return file.read_text().splitlines() if file.exists() else []

    def pid(self, role: str) -> int:
        return next(child.process.pid for child in self.supervisor.children if child.role == role)

    def everybody_has_started(self) -> bool:
        return all(map(self.starts, ("master", "trainer", "generator", "reward", "rollout_manager")))

    def everybody_is_up(self) -> bool:
        return self.everybody_has_started() and all(child.tail for child in self.supervisor.children[1:])

    @property
    def output(self) -> str:
        return self.printed.getvalue()


@pytest.fixture
def stage(tmp_path, monkeypatch):
    return lambda **scripts: Stage(tmp_path, monkeypatch, scripts)


@pytest.fixture
def config(tmp_path, free_port) -> Config:
    master = {"address": f"tcp://127.0.0.1:{free_port}"}
    return ten_steps(model=str(tmp_path), run_dir=tmp_path, name="run", steps=2, group_size=1, master=master)


@pytest.fixture
async def whole(stage, config, tmp_path, monkeypatch):
    """A whole run: a master that answers once it has a journal, and roles that stay unless a script is given for
    them."""
    monkeypatch.setattr(supervisor, "FAREWELL_SECONDS", 0.5)
    replace_status(tmp_path, {"members": [], "alerts": ["first failure (reward)"]})
    bus = Bus("master/0#stand-in", network())

    async def answer(request: Request) -> Status:
        await until((config.folder / "journal.db").exists)
        return Status(values={"version": 0, "steps": 1} | json.loads((tmp_path / "status").read_text()))

    def make(master: str = "", **scripts: str) -> Stage:
        remainder = dict.fromkeys(("trainer", "generator", "reward", "rollout_manager"), "stay()")
        return stage(master=master + MASTER.replace("RUN", repr(str(config.folder))), **(remainder | scripts))

    bus.serve(config.master.address, answer, print)
    yield make
    await bus.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in other processes
            await asyncio.sleep(0.02)


# --- which deaths count


def test_a_pause_doubles_with_each_early_death_up_to_half_a_minute():
    deaths = Deaths()
    assert [deaths.pause(1, step) for step in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert {deaths.pause(1, step) for step in range(8, 2000)} == {30}  # a day of it, while the others train


def test_a_child_that_lived_a_minute_is_started_again_soon():
    deaths = Deaths()
    assert [deaths.pause(lived, step) for step, lived in enumerate([1, 1, 61, 1])] == [0.5, 1, 0.5, 1]


def test_the_fifth_death_in_a_row_without_a_step_between_is_the_last():
    deaths = Deaths()
    assert None not in [deaths.pause(90, 7) for _ in range(4)]
    assert deaths.pause(90, 7) is None


def test_a_step_or_ten_minutes_of_life_show_that_a_child_is_worth_starting():
    deaths = Deaths()
    lives = [(1, 7)] * 4 + [(1, 8)] * 4 + [(601, 8)] + [(1, 8)] * 3
    assert None not in [deaths.pause(*life) for life in lives]
    assert deaths.pause(1, 8) is None


# --- children


async def test_what_dies_is_started_again_and_nothing_else_is_touched(stage, at_once):
    play = stage(reward="if start < 3: sys.exit(4)\nstay()", generator="stay()")
    running = asyncio.create_task(
        play.supervisor.run_roles(["reward", "generator"], ["--master", "M"], {"reward": ["--x"]})
    )
    await until(lambda: len(play.starts("reward")) == 3 and play.starts("generator"))
    assert play.starts("generator") == ["--master M"]
    assert play.starts("reward") == ["--master M --x"] * 3
    play.supervisor.interrupt(signal.SIGTERM)
    assert not (await running).ok
    assert play.output.count("reward/0 exited with 4, and is started again") == 2


async def test_a_killed_child_is_started_again_with_nothing_of_it_left(stage, at_once, tmp_path):
    leaves_something = "if start == 1: subprocess.Popen(['sleep', '12345.678'])\nprint('now', flush=True)\nstay()"
    play = stage(generator=leaves_something)
    running = asyncio.create_task(play.supervisor.run_roles(["generator"], [], {}))
    await until(lambda: play.starts("generator") and len(descendants(play.pid("generator"))) == 1)
    os.kill(play.pid("generator"), signal.SIGKILL)
    await until(lambda: len(play.starts("generator")) == 2)
    assert not processes_mentioning("12345.678")
    assert "generator/0 was killed by SIGKILL, and is started again" in play.output
    play.supervisor.interrupt(signal.SIGINT)
    assert (await running).reason == "told to stop by SIGINT"
    assert not processes_mentioning(str(tmp_path))


async def test_a_child_that_died_while_the_kernel_killed_for_lack_of_memory_is_told_with_that(
    stage, at_once, monkeypatch, tmp_path
):
    monkeypatch.setattr(areal.devices, "VMSTAT", tmp_path / "vmstat")
    count = "(folder / 'vmstat').write_text(f'nr_free_pages 7\\noom_kill {start + 3}\\n')"
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    warning = "print('why it dies\\n  warnings.warn(resource_tracker: 1 leaked semaphore)', flush=True)"  # of Python's
    play = stage(reward=f"{count} if start < 3 else None\n{warning}\nsys.exit(4) if start < 4 else stay()")
    running = asyncio.create_task(play.supervisor.run_roles(["reward"], [], {}))
    await until(lambda: len(play.starts("reward")) == 4)
    play.supervisor.interrupt(signal.SIGINT)
    await running
    deaths = [line for line in play.output.splitlines() if "exited with 4" in line]
    assert ["the kernel has killed 1 for lack of memory" in line for line in deaths] == [True, True, False]
    assert all("Last output: why it dies" in line for line in deaths)


async def test_a_child_for_which_the_machine_has_no_process_left_is_started_again(stage, at_once, monkeypatch):
    start, starts = asyncio.create_subprocess_exec, itertools.count(1)

    async def full(*command: str, **settings: object) -> asyncio.subprocess.Process:
        if next(starts) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*command, **settings)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    play = stage(reward="sys.exit(1) if start == 1 else stay()")
    running = asyncio.create_task(play.supervisor.run_roles(["reward"], [], {}))
    await until(lambda: len(play.starts("reward")) == 2)
    play.supervisor.interrupt(signal.SIGINT)
    assert (await running).reason == "told to stop by SIGINT"
    assert "it could not be started: [Errno 11] Resource temporarily unavailable" in play.output


async def test_a_child_that_always_dies_ends_it_with_its_last_lines(stage, at_once):
    play = stage(reward="print('attempt', start, 'is out of memory')\nsys.exit(1)", generator="stay()")
    ending = await play.supervisor.run_roles(["generator", "reward"], [], {})
    assert not ending.ok
    assert len(play.starts("reward")) == 5
    assert "reward/0 exited with 1, for the 5th time in a row" in ending.reason
    assert "attempt 5 is out of memory" in ending.reason
    assert not play.supervisor.user_error


async def test_a_users_mistake_ends_it_at_once_in_one_line(stage):
    play = stage(reward="print('noise')\nprint('There is no reward mine.')\nsys.exit(2)", generator="stay()")
    ending = await play.supervisor.run_roles(["generator", "reward"], [], {})
    assert ending.reason == "There is no reward mine."
    assert play.supervisor.user_error
    assert len(play.starts("reward")) == 1


async def test_an_exit_that_looks_like_a_users_mistake_is_a_death_once_the_child_has_been_up(stage, at_once):
    play = stage(reward="sys.exit({1: 4, 2: 2}.get(start, 0))")
    assert (await play.supervisor.run_roles(["reward"], [], {})).ok
    assert len(play.starts("reward")) == 3


async def test_a_child_has_the_environment_that_it_was_given_at_each_start(stage, at_once, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    sees = "with open(role + '.sees', 'a') as file:\n    file.write(os.environ['CUDA_VISIBLE_DEVICES'] + ' ')\n"
    play = stage(generator=sees + "sys.exit(4 if start == 1 else 0)", reward=sees)
    play.supervisor = Supervisor(
        Console(file=play.printed), play._command, {"generator/0": {"CUDA_VISIBLE_DEVICES": "2"}}
    )
    assert (await play.supervisor.run_roles(["generator", "reward"], [], {})).ok
    assert (play.folder / "generator.sees").read_text() == "2 2 "
    assert (play.folder / "reward.sees").read_text() == "0,1,2 "


async def test_children_whose_run_has_failed_elsewhere_are_not_started_again_and_say_why(stage):
    play = stage(reward="print('the guard')\nsys.exit(6)", generator="time.sleep(0.2)\nprint('the guard')\nsys.exit(6)")
    ending = await play.supervisor.run_roles(["reward", "generator"], [], {})
    assert (ending.ok, ending.reason) == (False, "the guard")
    assert [len(play.starts(role)) for role in ("reward", "generator")] == [1, 1]


async def test_a_fenced_child_is_started_again_at_once(stage, monkeypatch):
    monkeypatch.setattr(role_process, "FIRST_PAUSE_SECONDS", 1000.0)
    monkeypatch.setattr(role_process, "LONGEST_PAUSE_SECONDS", 1000.0)
    play = stage(reward="sys.exit(3 if start == 1 else 0)")
    assert (await play.supervisor.run_roles(["reward"], [], {})).ok
    assert len(play.starts("reward")) == 2


async def test_a_child_with_a_very_long_line_is_heard(stage):
    play = stage(reward="print('x' * 1_000_000)\nprint('and so on')\nsys.exit(2)")
    assert (await play.supervisor.run_roles(["reward"], [], {})).reason == "and so on"


async def test_an_output_without_line_feeds_ends_no_child(stage):
    bar = "for _ in range(17):\n    print('x' * (1 << 20), end='\\r')\n"
    play = stage(reward=f"{bar}print('\\nand so on')\nsys.exit(2)")
    assert (await play.supervisor.run_roles(["reward"], [], {})).reason == "and so on"
    assert len(play.starts("reward")) == 1


async def test_a_child_that_prints_much_waits_for_few_writes_and_all_lines_are_kept(stage, tmp_path, monkeypatch):
    writes, append = [], Backlog.append
    monkeypatch.setattr(Backlog, "append", lambda file, lines: (writes.append(1), append(file, lines)))
    play = stage(reward="sys.stdout.write(chr(10).join(map(str, range(50_000))))")
    play.supervisor._folder = tmp_path
    await play.supervisor.run_roles(["reward"], [], {})
    assert (tmp_path / "logs" / "reward-0.out").read_text().split() == [str(number) for number in range(50_000)]
    assert len(writes) < 1_000


async def test_a_console_that_nobody_reads_ends_nothing(stage, at_once):
    reading, writing = os.pipe()
    os.close(reading)
    play = stage(reward="if start < 3:\n    sys.exit(1)\nprint('enough')\nsys.exit(0)")
    with os.fdopen(writing, "w") as broken:
        play.supervisor.console = Console(file=LenientOutput(broken))
        await play.supervisor.run_roles(["reward"], [], {})
    assert len(play.starts("reward")) == 3


# --- a whole run


async def test_a_master_of_another_version_ends_the_run_with_a_sentence(stage, config, tmp_path):
    async def refuse(request: Request) -> Status:
        raise ProtocolVersionError("install the same version of the project on every node")

    play, bus = stage(master="stay()"), Bus("master/0#stand-in", network())
    bus.serve(config.master.address, refuse, print)
    async with asyncio.timeout(120):
        ending = await play.supervisor.run_everything(config, [], network())
    await bus.close()
    assert not ending.ok and play.supervisor.user_error
    assert ending.reason.endswith(
        "is not the master of this run: install the same version of the project on every node."
    )
    assert not processes_mentioning(str(tmp_path))


async def test_the_end_of_the_master_is_the_end_of_the_run(whole, config, tmp_path):
    play = whole()
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(play.everybody_has_started)
    assert play.starts("generator") == [f"--index 0 --master {config.master.address}"]
    (tmp_path / "end").write_text("0")
    assert (await running).ok
    assert [len(play.starts(role)) for role in ("master", "trainer", "generator")] == [1, 1, 1]
    assert not processes_mentioning(str(tmp_path))


def replace_status(folder: Path, status: dict[str, list]) -> None:
    """Let the master's answer change at once."""
    (folder / "new").write_text(json.dumps(status))
    (folder / "new").rename(folder / "status")


async def test_a_fenced_child_that_does_not_end_is_killed_and_started_again(
    whole, config, tmp_path, at_once, just_ended, monkeypatch
):
    """A process that is stopped for good does not hear that it has lost its place. Nor did the kernel kill it."""
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    monkeypatch.setattr(areal.devices, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(status_watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(role_process, "FENCED_SECONDS", 0.2)
    play = whole()

    def tell(*members: str, **more: list[str]) -> None:
        health = {"silent": 0.0, "state": "healthy", "activity": ""}
        status = {"members": [{"identity": identity, **health} for identity in members], "alerts": [], **more}
        replace_status(tmp_path, status)

    tell("generator/0#a", "trainer/0#a", alerts=["generator/0 may hang"])
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(play.everybody_is_up)
    generator = next(child for child in play.supervisor.children if child.role == "generator")
    await until(lambda: generator.identity == "generator/0#a")
    os.kill(play.pid("generator"), signal.SIGSTOP)
    (tmp_path / "vmstat").write_text("oom_kill 4\n")  # some other process
    tell("trainer/0#a")
    await until(lambda: len(play.starts("generator")) == 2)
    await until(lambda: "stays" in generator.last_line)
    await asyncio.sleep(0.5)  # the new process is no member yet, and is left alone
    assert play.output.count("generator/0 may hang") == 1
    tell("trainer/0#a", alerts=["generator/0 may hang"])
    await until(lambda: play.output.count("generator/0 may hang") == 2)  # it begins again
    (tmp_path / "end").write_text("0")
    assert (await running).ok
    assert [len(play.starts(role)) for role in ("trainer", "generator")] == [1, 2]
    assert play.output.count("generator/0 may hang") == 2
    killed = "generator/0 is killed: it has lost its place in the run, and does not end. Last output: generator stays"
    assert killed in play.output
    assert "lack of memory" not in play.output


async def test_a_master_that_has_stopped_to_answer_is_killed_and_started_again(
    whole, config, tmp_path, at_once, monkeypatch
):
    monkeypatch.setattr(status_watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(status_watch, "ASK_SECONDS", 0.5)
    config = config.model_copy(update={"master": config.master.model_copy(update={"lost_seconds": 1.0})})
    play = whole()
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(lambda: "first failure (reward)" in play.output)
    (config.folder / "journal.db").unlink()  # without it, its stand-in here does not answer
    await until(lambda: len(play.starts("master")) == 2)
    (tmp_path / "end").write_text("0")
    assert (await running).ok
    assert "master/0 is killed: it has not answered for 0.5 s" in play.output


@pytest.mark.parametrize("silent", [None, 600.0])
async def test_a_child_that_starts_is_left_alone_while_one_before_it_loses_its_place(
    whole, config, tmp_path, at_once, monkeypatch, silent
):
    """As after `--resume` of a run whose machine was lost: the journal still has the members of then."""
    monkeypatch.setattr(status_watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(role_process, "FENCED_SECONDS", 0.2)
    play = whole()
    earlier = {"identity": "generator/0#a", "silent": silent, "state": "healthy", "activity": ""}
    replace_status(tmp_path, {"members": [earlier], "alerts": ["it is a member"]})
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(play.everybody_is_up)
    await until(lambda: "it is a member" in play.output)
    replace_status(tmp_path, {"members": [], "alerts": ["it is fenced"]})
    await until(lambda: "it is fenced" in play.output)
    await asyncio.sleep(0.5)
    (tmp_path / "end").write_text("0")
    assert (await running).ok
    assert len(play.starts("generator")) == 1


async def test_a_master_that_says_why_the_run_failed_is_not_started_again(whole, config, tmp_path):
    play = whole()
    (tmp_path / "end").write_text("1")
    ending = await play.supervisor.run_everything(config, [], network())
    assert not ending.ok
    assert ending.reason == "the master's last line"
    assert len(play.starts("master")) == 1


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(4)", "sys.exit(2)"])
async def test_a_master_that_dies_goes_on_with_its_journal(whole, config, tmp_path, at_once, death):
    dies = f"import threading\nif start == 2: {death}\n"
    play = whole(master=dies)
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(play.everybody_has_started)
    os.kill(play.pid("master"), signal.SIGKILL)
    await until(lambda: len(play.starts("master")) == 3)
    (tmp_path / "end").write_text("0")
    assert (await running).ok
    assert play.starts("master") == [f"--resume {tmp_path / 'run'}"] * 3
    assert len(play.starts("generator")) == 1


async def test_a_master_that_died_before_it_had_a_journal_starts_as_before(whole, config, tmp_path, at_once):
    play = whole(master="if start == 1: sys.exit(4)\n")
    (tmp_path / "end").write_text("0")
    assert (await play.supervisor.run_everything(config, [], network())).ok
    assert play.starts("master") == [f"--resume {tmp_path / 'run'}"] * 2


async def test_a_master_that_died_after_the_summary_has_ended_the_run(whole, config, tmp_path):
    play = whole()
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(play.everybody_has_started)
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"ok": True, "reason": "the run reached its end"}))
    os.kill(play.pid("generator"), signal.SIGKILL)
    os.kill(play.pid("master"), signal.SIGKILL)
    ending = await running
    assert (ending.ok, ending.reason) == (True, "the run reached its end")
    assert (len(play.starts("master")), len(play.starts("generator"))) == (1, 1)


async def test_a_child_that_a_plugin_has_ended_with_0_is_started_again(whole, config, tmp_path, at_once, monkeypatch):
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.0)
    play = whole(rollout_manager="os._exit(0) if start == 1 else stay()")
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(lambda: len(play.starts("rollout_manager")) == 2)
    (tmp_path / "end").write_text("0")
    assert (await running).ok
    assert "rollout_manager/0 exited with 0, and is started again" in play.output


async def test_a_child_that_somebody_else_told_to_leave_is_started_again(whole, config, tmp_path, at_once):
    play = whole(
        trainer="signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nprint('up', flush=True)\nwhile True: "
        "time.sleep(0.02)"
    )
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(play.everybody_is_up)
    os.kill(play.pid("trainer"), signal.SIGTERM)
    await until(lambda: len(play.starts("trainer")) == 2)
    assert "trainer/0 was told to leave by another program (SIGTERM), and is started again in 0 s" in play.output
    (tmp_path / "end").write_text("0")
    assert (await running).ok


async def test_an_alert_of_the_master_is_a_line_on_a_console_that_is_no_terminal(whole, config, tmp_path, monkeypatch):
    monkeypatch.setattr(status_watch, "LOOK_SECONDS", 0.01)
    play = whole()
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(lambda: "first failure (reward)\n" in play.output)
    await asyncio.sleep(0.1)
    (tmp_path / "end").write_text("0")
    assert (await running).ok
    assert play.output.count("first failure (reward)") == 1


async def test_a_stop_lets_the_master_tell_the_others_first(whole, config, tmp_path, monkeypatch):
    notes = "def note(*_):\n    file = open('stopped', 'a')\n    file.write(role + chr(10))\n    file.close()\n    "
    slow = (
        notes + "sys.exit(0)\nsignal.signal(signal.SIGTERM, note)\nprint('up', flush=True)\nwhile True: time.sleep(1)"
    )
    hears = "print('up', flush=True)\nwait_for(Path('stopped'))\nprint('heard')"
    play = whole(trainer=slow, reward=hears)
    monkeypatch.setattr(supervisor, "FAREWELL_SECONDS", 6.0)
    config = config.model_copy(update={"master": config.master.model_copy(update={"drain_seconds": 0.5})})
    running = asyncio.create_task(play.supervisor.run_everything(config, [], network()))
    await until(play.everybody_is_up)
    play.supervisor.interrupt(signal.SIGTERM)
    assert not (await running).ok
    assert (tmp_path / "stopped").read_text().splitlines() == ["master", "trainer"]
    assert next(c for c in play.supervisor.children if c.role == "reward").process.returncode == 0


async def test_what_does_not_stop_is_killed(stage, just_ended, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.5)
    play = stage(reward="signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(1000)")
    running = asyncio.create_task(play.supervisor.run_roles(["reward"], [], {}))
    await until(lambda: any(child.tail for child in play.supervisor.children))
    play.supervisor.interrupt(signal.SIGTERM)
    assert not (await running).ok
    assert "reward/0 is killed: it did not stop" in play.output
    assert not processes_mentioning(str(tmp_path))
