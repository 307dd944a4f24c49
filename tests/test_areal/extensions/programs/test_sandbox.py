import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from programs import attacks
from programs.drawing import an_eighth_or_all, drawn
from support.process_tree import descendants, needs_namespaces

from areal.base.errors import UserError
from areal.config.scoring import SandboxConfig
from areal.extensions.programs import outside as sandbox_module
from areal.extensions.programs.code_tests import CodeTests, continued, program_in, same_output
from areal.extensions.programs.outside import LocalSandbox, SandboxError, open_sandbox

pytestmark = needs_namespaces

# Ample time, for what shall end by itself on any machine, and little for what shall not.
LIMITS = {
    "cpu_seconds": 20.0,
    "wall_seconds": 60.0,
    "memory_mib": 192,
    "processes": 24,
    "disk_mib": 8,
    "output_kib": 64,
}
HURRIED = LIMITS | {"cpu_seconds": 0.6, "wall_seconds": 4.0}


@pytest.fixture(scope="module")
def sandbox():
    os.environ["HARNESS_SECRET"] = "1"
    with contextlib.closing(open_sandbox(SandboxConfig(**LIMITS))) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def hurried():
    with contextlib.closing(open_sandbox(SandboxConfig(**HURRIED))) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def code_tests():
    # Right programs use less than 0.1 seconds of CPU time, and attacks that end by themselves less than one.
    reward = CodeTests(**LIMITS | {"cpu_seconds": 1.5, "wall_seconds": 10.0})
    yield reward
    reward.close()


def below(launcher):
    """Processes that stay in an idle sandbox: its server."""
    return {process.pid for process in descendants(launcher.pid)}


def nothing_left(sandbox, processes_before, within=60.0):
    """Whether no processes run but those from before, at once or when the last have ended. Some from before may have
    ended: they belonged to an earlier program."""
    deadline = time.monotonic() + within
    while not below(sandbox._launcher) <= processes_before and time.monotonic() < deadline:
        time.sleep(0.02)
    return below(sandbox._launcher) <= processes_before


def begun(sandbox, processes_before):
    """Returns once a program runs."""
    while len(below(sandbox._launcher)) <= len(processes_before):
        time.sleep(0.02)


async def all_of(programs, call, at_once=4):
    """What `call` gives for each of the programs, by name."""
    slots = asyncio.Semaphore(at_once)

    async def one(program):
        async with slots:
            return await call(program)

    return dict(zip(programs, await asyncio.gather(*map(one, programs.values())), strict=True))


async def test_no_program_reaches_what_is_not_its_own(sandbox, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    processes_before = below(sandbox._launcher)

    async def attack(program):
        program = program.replace("{canary}", str(canary)).replace("{parent}", str(os.getpid()))
        return await sandbox.run(f"{attacks.PRELUDE}\n{program}\nprint('ESCAPED')")

    outcomes = await all_of(attacks.REACHES, attack)
    assert [name for name, outcome in outcomes.items() if "ESCAPED" in outcome.stdout] == []
    # They were refused where they tried, not before.
    assert {name for name, outcome in outcomes.items() if "Error" not in outcome.stderr} <= {
        "become root by set-user-id"
    }
    assert canary.read_text() == "untouched"
    assert nothing_left(sandbox, processes_before)


@pytest.mark.parametrize("kind", ["sandbox", "hurried"])
async def test_what_a_program_uses_up_is_limited(kind, request):
    sandbox = request.getfixturevalue(kind)
    processes_before = below(sandbox._launcher)
    programs = {
        name: program
        for name, (program, statuses) in attacks.EXHAUSTS.items()
        if ("timeout" in statuses) == (kind == "hurried")
    }
    at_once = 8 if kind == "hurried" else 4  # these wait for the end of their time
    outcomes = await all_of(programs, lambda program: sandbox.run(f"{attacks.PRELUDE}\n{program}"), at_once)
    wrong = {
        name: (outcome.status, outcome.exit, outcome.stderr[-300:])
        for name, outcome in outcomes.items()
        if outcome.status not in attacks.EXHAUSTS[name][1]
    }
    assert wrong == {}
    assert nothing_left(sandbox, processes_before)


async def test_memory_that_does_not_show_as_resident_is_counted():
    with contextlib.closing(open_sandbox(SandboxConfig(**LIMITS | {"memory_mib": 64}))) as sandbox:
        outcomes = await all_of(attacks.HIDES, lambda program: sandbox.run(f"{attacks.PRELUDE}\n{program}"), at_once=2)
    wrong = {name: (outcome.status, outcome.stderr[-300:]) for name, outcome in outcomes.items()}
    assert {name: found for name, found in wrong.items() if found[0] != "memory"} == {}


@pytest.mark.parametrize("counter", ["open_counter()", "None"])
async def test_processes_that_nobody_waits_for_count_towards_the_cpu_time(weakened, counter):
    weakened("self.counter = open_counter()", f"self.counter = {counter}")
    with contextlib.closing(open_sandbox(SandboxConfig(**LIMITS | {"cpu_seconds": 0.4}))) as sandbox:
        outcomes = await all_of(attacks.LOSES, lambda program: sandbox.run(f"{attacks.PRELUDE}\n{program}"), at_once=2)
    assert {name: (outcome.status, outcome.stdout) for name, outcome in outcomes.items()} == dict.fromkeys(
        attacks.LOSES, ("timeout", "")
    )


@pytest.mark.parametrize(("seconds", "status"), [("0.5", "memory"), ("10**6", "timeout")])
async def test_a_look_at_the_memory_that_does_not_end_delays_no_limit(weakened, seconds, status):
    weakened("def exact_bytes(tasks):", "def exact_bytes(tasks):\n    threading.Event().wait()\n\ndef unused(tasks):")
    weakened("import time\n", "import threading\nimport time\n")
    weakened("LOOK_SECONDS, BUSY = 2.0, 5", f"LOOK_SECONDS, BUSY = {seconds}, 5")
    with contextlib.closing(open_sandbox(SandboxConfig(**HURRIED))) as sandbox:
        outcome = await sandbox.run(f"{attacks.PRELUDE}\nx = [bytearray(40 << 20)]\nin_children(10, int)")
    assert outcome.status == status


FORKS = """
import os, time
x = [bytearray(40 << 20)]
for _ in range(10):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
for _ in range(10):
    os.wait()
print(1)
"""


async def test_a_look_at_the_memory_that_waits_for_the_processor_is_no_verdict(weakened):
    slow = "def exact_bytes(tasks):\n    time.sleep(0.3)\n    return 0\n\ndef unused(tasks):"
    weakened("def exact_bytes(tasks):", slow)
    weakened("LOOK_SECONDS, BUSY = 2.0, 5", "LOOK_SECONDS, BUSY = 0.2, 50")
    with contextlib.closing(open_sandbox(SandboxConfig(**LIMITS))) as sandbox:
        outcome = await sandbox.run(FORKS)
    assert (outcome.status, outcome.stdout) == ("ok", "1\n")


WRITES = """
import ctypes
libc = ctypes.CDLL(None)
libc.sync()
print(libc.fsync(-1), libc.fdatasync(-1), libc.syncfs(-1), libc.sync_file_range(-1, 0, 0, 0))
print(libc.posix_fadvise(-1, 0, 0, 4), libc.readahead(-1, 0, 0), libc.msync(4096, 4096, 4), libc.msync(4096, 4096, 1))
"""


async def test_no_program_makes_the_disk_work_or_drops_what_is_cached_of_system_files(sandbox):
    outcome = await sandbox.run(WRITES)
    assert outcome.stdout == "0 0 0 0\n0 0 0 -1\n", outcome.stderr  # the last one does not write


DELEGATED = os.environ.get("DELEGATED_CGROUP")


def groups_of_programs():
    return [name for name in os.listdir(DELEGATED) if name.startswith("areal-")]


def wait_for_a_group():
    while not groups_of_programs():
        time.sleep(0.02)


@pytest.mark.skipif(not DELEGATED, reason="DELEGATED_CGROUP names no control group that is delegated to the tests")
async def test_a_control_group_limits_memory_and_cpu_time():
    with contextlib.closing(open_sandbox(SandboxConfig(**LIMITS, cgroup=DELEGATED))) as sandbox:
        for name in ("fill memory by children", "fill memory by orphans"):
            outcome = await sandbox.run(f"{attacks.PRELUDE}\n{attacks.EXHAUSTS[name][0]}")
            assert outcome.status == "memory", (name, outcome)
        assert (await sandbox.run(USUAL)).stdout == "usual\n"
        assert "/areal-" in (await sandbox.run("print(open('/proc/self/cgroup').read())")).stdout
        assert groups_of_programs() == []
        running = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
        await asyncio.to_thread(wait_for_a_group)
    with pytest.raises(SandboxError, match="without a result"):
        await running
    ample = LIMITS | {"cpu_seconds": 6.0, "wall_seconds": 600.0}
    with contextlib.closing(open_sandbox(SandboxConfig(**ample, cgroup=DELEGATED))) as sandbox:
        outcome = await sandbox.run(f"{attacks.PRELUDE}\n{attacks.EXHAUSTS['spin in a chain of processes'][0]}")
    assert outcome.status == "timeout"
    assert groups_of_programs() == []


def test_a_control_group_that_cannot_be_used_is_told_at_the_start(tmp_path):
    with pytest.raises(UserError, match=f"sandbox.cgroup={tmp_path} cannot be used .*name a control group"):
        open_sandbox(SandboxConfig(cgroup=tmp_path))


USUAL = """
import asyncio, multiprocessing, os, shutil, signal, socket, sqlite3, subprocess, threading
from concurrent.futures import ProcessPoolExecutor

async def printed():
    process = await asyncio.create_subprocess_exec("cat", "a", stdout=subprocess.PIPE)
    return (await process.communicate())[0]

def square(x): return x * x

def main():
    open("a", "w").write("text")
    shutil.copy("a", "b")
    assert open("b").read() == "text" == asyncio.run(printed()).decode()
    with sqlite3.connect("database") as database:
        database.execute("create table numbers (x)")
        database.execute("insert into numbers values (1)")
    assert sqlite3.connect("database").execute("select * from numbers").fetchall() == [(1,)]
    for method in ("fork", "forkserver"):
        with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
            assert list(pool.map(abs, [-1, -2])) == [1, 2]
    with multiprocessing.Pool(2) as pool:
        assert pool.map(square, [1, 2]) == [1, 4]
    with multiprocessing.Manager() as manager:
        assert manager.list([1])[0] == 1
    value = multiprocessing.Value("i", 0)
    with value.get_lock(): value.value += 1
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    os.nice(1)
    assert open("/dev/zero", "rb").read(3) == bytes(3)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    one, other = socket.socketpair()
    one.sendall(b"x" * 1000)
    assert len(other.recv(1000)) == 1000
    assert subprocess.check_output(["bash", "-c", "echo $(seq 3 | sort -r) & wait; cat <<< b"]) == b"3 2 1\\nb\\n"
    print("usual")

if __name__ == "__main__":
    main()
"""


async def test_what_programs_usually_do_is_allowed(sandbox):
    outcome = await sandbox.run(USUAL)
    assert (outcome.stdout, outcome.stderr) == ("usual\n", "")


async def test_nothing_remains_of_a_program(sandbox):
    processes_before = below(sandbox._launcher)
    outcomes = await all_of(attacks.REMAINS, lambda program: sandbox.run(f"{attacks.PRELUDE}\n{program}"))
    assert {outcome.status for outcome in outcomes.values()} == {"ok", "killed"}
    assert nothing_left(sandbox, processes_before)
    listing = await sandbox.run("import os; print(os.listdir('/tmp'))")
    assert listing.stdout == "['main.py']\n"


@an_eighth_or_all
async def test_no_program_passes_asserts_without_the_answer(code_tests, share):
    secret = 10**8 + secrets.randbelow(9 * 10**8)
    row = {"test_list": [test.format(secret=secret) for test in attacks.CHEATED]}
    processes_before = below(code_tests._sandbox._launcher)
    programs = drawn(attacks.CHEATS, share)
    scores = await all_of(programs, lambda program: code_tests.score("", attacks.AROUND + program, row))
    assert {name: score for name, score in scores.items() if score != (0.0, {"passed": 0.0})} == {}
    right = f"{attacks.AROUND}def f(x): return {secret}"
    assert await code_tests.score("", right, row) == (1.0, {"passed": 1.0})
    assert nothing_left(code_tests._sandbox, processes_before)


@an_eighth_or_all
async def test_no_program_passes_a_pytest_module_without_the_answer(code_tests, share):
    secret = 10**8 + secrets.randbelow(9 * 10**8)
    row = {"test": attacks.CHEATED_MODULE.format(secret=secret)}
    kinds = ("raises", "modules", "everything", "verdict", "patches", ": ")
    limits = ("time: ", "resources: ")  # the judge has them whatever the tests are: asserts show them
    programs = {
        name: program
        for name, program in attacks.CHEATS.items()
        if any(kind in name for kind in kinds) and not name.startswith(limits)
    }
    scores = await all_of(drawn(programs, share), lambda program: code_tests.score("", attacks.AROUND + program, row))
    assert {name: score for name, score in scores.items() if score != (0.0, {"passed": 0.0})} == {}
    right = f"{attacks.AROUND}def f(x):\n    print({secret})\n    return {secret}\n"
    assert await code_tests.score("", right, row) == (0.0, {"passed": 5 / 7})  # it raises no error


HUMAN_EVAL = {
    "prompt": "from typing import List\n\ndef twice(x):\n    return 2 * x\n\n"
    "def add(xs: List[int]) -> int:\n    '''Sum'''\n",
    "entry_point": "add",
    "canonical_solution": "    return sum(xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) + twice(2) == 4\n",
}


async def test_rows_of_human_eval_are_tested_with_the_prompt_before_the_completion(code_tests):
    async def score(completion):
        return (await code_tests.score("a chat template", completion, HUMAN_EVAL))[0]

    assert await score(HUMAN_EVAL["canonical_solution"]) == 1.0
    assert await score(HUMAN_EVAL["canonical_solution"] + "\nNow some text") == 1.0
    assert await score("So:\n```python\ndef add(xs: List[int]):\n    return sum(xs)\n```") == 1.0
    assert await score("    return 3\n") == 0.0


async def test_asserts_pass_data_both_ways(code_tests):
    program = """
import collections
def same(x): return x
def squares(n): return (i * i for i in range(n))
def counts(x): return collections.Counter(x)
def fails(x): raise ValueError(x)
"""
    tests = [
        "for x in (1, 1.5, True, None, 'ä', b'b', (1, [2, {3}]), {(1, 2): 'x'}, 2j, 10**5000): assert same(x) == x",
        "assert type(same((1, 2))) is tuple and same(True) is True",
        "import array, types\nfor x in (array.array('i', [1]), memoryview(b''), types.MappingProxyType({1: 2}), int):\n"
        "    assert same(x) == x",
        "assert same(NotImplemented) is NotImplemented and same(ValueError('x')).args == ('x',)",
        "assert list(squares(4)) == [0, 1, 4, 9]",
        "assert counts('aab') == {'a': 2, 'b': 1}",
        "try:\n    fails('x')\nexcept ValueError as e:\n    assert str(e) == 'x'\nelse:\n    assert False",
        "import math\nassert math.isclose(same(0.1) + same(0.2), 0.3)",
        "assert same(1) == 2",
        "assert missing(1)",
    ]
    score, parts = await code_tests.score("", program, {"test_list": tests})
    assert (score, parts["passed"]) == (0.0, 0.8)


async def test_programs_that_read_stdin_are_scored_by_what_they_print(code_tests):
    row = {"tests": json.dumps([{"input": "1 2", "output": "3"}, {"input": "5 5\n", "output": "10\n"}])}
    text = "I add.\n```python\nprint(0)\n```\nNo:\n```python\nprint(sum(map(int, input().split())))\n```\n"
    assert await code_tests.score("", text, row) == (1.0, {"passed": 1.0})
    assert await code_tests.score("", "print(3)", row) == (0.0, {"passed": 0.5})
    assert await code_tests.score("", "print(3); raise SystemExit(1)", row) == (0.0, {"passed": 0.0})
    apps = {"input_output": {"inputs": [["1", "2"]], "outputs": ["3"]}}
    assert await code_tests.score("", "print(int(input()) + int(input()))", apps) == (1.0, {"passed": 1.0})


PROGRAMS = {
    "cpp": ("g++", "#include <iostream>\nint main() { int a; std::cin >> a; std::cout << a + 1; }"),
    "nodejs": ("node", "console.log(Number(require('fs').readFileSync(0)) + 1)"),
    "bash": ("bash", "read a; echo $((a + 1))"),
}


@pytest.mark.parametrize("language", PROGRAMS)
async def test_other_languages_run_where_they_are_installed(language):
    command, program = PROGRAMS[language]
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    reward = CodeTests(wall_seconds=60.0)  # a busy machine may take long to compile
    row = {"language": language, "tests": [{"input": str(i), "output": str(i + 1)} for i in range(2)]}
    try:
        assert await reward.score("", f"```{language}\n{program}\n```", row) == (1.0, {"passed": 1.0})
        assert await reward.score("", "no program )", row) == (0.0, {"passed": 0.0})
    finally:
        reward.close()


async def test_the_failure_of_the_sandbox_is_no_outcome_and_the_next_program_runs(sandbox):
    with pytest.raises(SandboxError, match="no language 'cobol'"):
        await sandbox.run("", "cobol")
    running = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
    await asyncio.to_thread(begun, sandbox, below(sandbox._launcher))
    for pid in sorted(below(sandbox._launcher)):  # the server first: it would report the end of the program
        with contextlib.suppress(ProcessLookupError):  # the end of one of them may have ended it
            os.kill(pid, 9)
    with pytest.raises(SandboxError, match="without a result"):
        await running
    sandbox._launcher.wait(10)
    assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_a_program_whose_caller_is_cancelled_is_ended(sandbox):
    processes_before = below(sandbox._launcher)
    running = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
    await asyncio.to_thread(begun, sandbox, processes_before)
    running.cancel()
    await asyncio.wait([running])
    assert await asyncio.to_thread(nothing_left, sandbox, processes_before)


def test_all_programs_end_with_the_worker():
    code = (
        "import asyncio, os\nfrom areal.config.scoring import SandboxConfig\n"
        "from areal.extensions.programs.outside import open_sandbox\n"
        "s = open_sandbox(SandboxConfig())\n"
        "async def main():\n"
        "    print(flush=True)\n    await s.run('import time; time.sleep(60)')\n"
        "asyncio.run(main())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as worker:
        worker.stdout.readline()
        while len(pids := {process.pid for process in descendants(worker.pid)}) < 4:
            time.sleep(0.02)
        worker.kill()
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            threading.Event().wait(0.02)


UNPRIVILEGED = f"""
import asyncio, attacks, contextlib
from areal.config.scoring import SandboxConfig
from areal.extensions.programs.outside import open_sandbox

async def main():
    with contextlib.closing(open_sandbox(SandboxConfig(**{LIMITS | {"cpu_seconds": 3.0}}))) as sandbox:
        for name in ("read init's memory", "connect", "mount", "stop init", "become root", "raise its limits",
                     "limit init", "schedule others", "be nicer to init", "be nicer to others", "signal by a lease"):
            outcome = await sandbox.run(attacks.PRELUDE + attacks.REACHES[name] + "\\nprint('ESCAPED')")
            assert "ESCAPED" not in outcome.stdout and "Error" in outcome.stderr, name
        for name in ("fork bomb", "fill memory by orphans"):
            program, statuses = attacks.EXHAUSTS[name]
            outcome = await sandbox.run(attacks.PRELUDE + program)
            assert outcome.status in statuses, (name, outcome)
        outcome = await sandbox.run(attacks.PRELUDE + attacks.REMAINS["init interrupted"] + "\\nprint('ended')")
        assert outcome.stdout.split() == ["ended"], outcome
    with contextlib.closing(open_sandbox(SandboxConfig(**{LIMITS | {"memory_mib": 64}}))) as sandbox:
        for name in ("behind a first thread that has ended", "in pipes", "in sockets"):
            outcome = await sandbox.run(attacks.PRELUDE + attacks.HIDES[name])
            assert outcome.status == "memory", (name, outcome)

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests are run by an unprivileged user already")
def test_it_holds_for_an_unprivileged_user_too(tmp_path):
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    nobody = {"user": 65534, "group": 65534, "extra_groups": [], "env": environment, "cwd": "/"}
    system_python = [f"/usr/bin/python3.{sys.version_info.minor}", "-B"]
    try:
        subprocess.run(
            [*system_python, "-c", "import attacks; from areal.extensions.programs import outside"],
            check=True,
            **nobody,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("another user cannot run this Python")
    subprocess.run([*system_python, "-c", UNPRIVILEGED], check=True, timeout=200, **nobody)


@pytest.fixture
def weakened(monkeypatch, tmp_path):
    """Has the launcher do something else instead of a part of it."""

    def weaken(part, instead):
        launcher = sandbox_module.sandbox_init
        source = Path(launcher.__file__).read_text()
        assert part in source
        for name in "tests_runner.py", "call_runner.py", "plain_data.py":  # which the launcher loads
            (tmp_path / name).write_bytes(Path(sandbox_module.__file__).with_name(name).read_bytes())
        (tmp_path / "launcher.py").write_text(source.replace(part, instead, 1))
        monkeypatch.setattr(launcher, "__file__", str(tmp_path / "launcher.py"))

    return weaken


def test_where_namespaces_are_forbidden_nothing_is_run(weakened):
    weakened('call("unshare", CLONE_NEWUSER)\n    finally', 'raise OSError(1, "unshare: forbidden")\n    finally')
    with pytest.raises(UserError, match=r"this machine \(.*unshare: forbidden.*sandbox.url.*sandbox.mode=none"):
        LocalSandbox(SandboxConfig())


@pytest.mark.parametrize(
    ("part", "instead", "leak"),
    [
        ('call("umount2", b"/old", MNT_DETACH)\n    os.rmdir("/old")', "pass", "read the host's files"),
        ("install_filter(self.filter)", "pass", "open connections"),
        ("resource.setrlimit(resource.RLIMIT_NPROC", "max((resource.RLIMIT_NPROC,)", "start any number of processes"),
        ('call("capset"', '("capset"', "use capabilities"),
        (
            "CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET)\n            if os.fork():",
            "CLONE_NEWNS)\n            if 0:",
            "",
        ),
    ],
)
def test_a_sandbox_that_leaks_is_found_before_anything_runs(weakened, part, instead, leak):
    weakened(part, instead)
    with pytest.raises(UserError, match=f"on this machine.*{leak}"):
        LocalSandbox(SandboxConfig(**LIMITS))


@pytest.fixture
def given_folder():
    """A folder outside /tmp, wherever this checkout and pytest's folders lie, that every user may read."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="given-") as folder:
        os.chmod(folder, 0o755)
        (Path(folder) / "data").write_text("given")
        yield Path(folder)


async def test_programs_read_the_folders_they_are_given_and_cannot_change_them(given_folder):
    with pytest.raises(UserError, match="is in /tmp, but every program has its own empty /tmp"):
        LocalSandbox(SandboxConfig(folders=[Path("/tmp/data")]))
    with contextlib.closing(open_sandbox(SandboxConfig(folders=[given_folder]))) as sandbox:
        probe = f"import os; print(os.listdir('/var/tmp')); print(open('{given_folder}/data').read())"
        outcome = await sandbox.run(f"{probe}; open('{given_folder}/x', 'w')")
        assert outcome.stdout == f"['{given_folder.name}']\ngiven\n"
        assert "Read-only file system" in outcome.stderr


async def test_the_project_itself_may_be_in_a_folder_that_programs_read():
    folder = Path(sandbox_module.__file__).parent
    if folder.is_relative_to("/tmp"):
        pytest.skip("no program can read folders of /tmp")
    with contextlib.closing(open_sandbox(SandboxConfig(folders=[folder]))) as sandbox:
        outcome = await sandbox.run(f"import os; print(os.listdir({str(folder.parent)!r}))")
    assert outcome.stdout == "['programs']\n", outcome.stderr


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="packages are not in a virtual environment")
async def test_installed_packages_can_be_imported_and_lead_to_nothing_else():
    folder = sysconfig.get_path("purelib")
    probe = f"""
import msgpack, os, sys
print(msgpack.__file__.partition("/msgpack")[0], {folder!r} in sys.path)
print(os.path.exists({folder!r}), os.path.exists({str(Path(sandbox_module.__file__).parents[3])!r}))
open("/packages/0/mine", "w")
"""
    with contextlib.closing(open_sandbox(SandboxConfig())) as sandbox:
        outcome = await sandbox.run(probe)
    assert outcome.stdout == "/packages/0 False\nFalse False\n"
    assert "Read-only file system: '/packages/0/mine'" in outcome.stderr


async def test_mode_none_still_ends_what_takes_too_long():
    with contextlib.closing(open_sandbox(SandboxConfig(**HURRIED, mode="none"))) as sandbox:
        outcome = await sandbox.run("print(input())", stdin="41")
        assert (outcome.status, outcome.stdout) == ("ok", "41\n")
        assert (await sandbox.run("while True: pass")).status == "timeout"
        daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)"
        assert (await sandbox.run(daemon)).status == "ok"
        assert nothing_left(sandbox, set())


class Fusion(BaseHTTPRequestHandler):
    """A SandboxFusion server: POST /run_code."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["code"] == "flood":
            return self.flood()
        answer = {"status": "SandboxError", "message": "no room", "compile_result": None, "run_result": None}
        if self.path == "/run_code" and asked["code"] != "fail":
            files = {name: base64.b64decode(content) for name, content in asked["files"].items()}
            run = self.server.sandbox.run(asked["code"], asked["language"], stdin=asked["stdin"], files=files)
            outcome = asyncio.run(run)
            state = "TimeLimitExceeded" if outcome.status == "timeout" else "Finished" if outcome.exit == 0 else "Error"
            result = {
                "status": state,
                "execution_time": 0.1,
                "return_code": outcome.exit,
                "stdout": outcome.stdout,
                "stderr": outcome.stderr,
            }
            answer |= {"status": "Success" if outcome.succeeded else "Failed", "run_result": result}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def flood(self):
        self.send_response(200)
        self.end_headers()
        self.server.sent = 0
        with contextlib.suppress(ConnectionError):
            while self.server.sent < 1 << 30:
                self.server.sent += self.wfile.write(b"x" * (1 << 20))

    def log_message(self, *_):
        pass


@pytest.fixture
def fusion(hurried, free_port):
    server = ThreadingHTTPServer(("127.0.0.1", free_port), Fusion)
    server.sandbox, server.url = hurried, f"http://127.0.0.1:{free_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_a_server_that_speaks_sandbox_fusion_runs_programs_instead(fusion):
    reward = await asyncio.to_thread(CodeTests, url=fusion.url)
    pairs = {"tests": [{"input": "41", "output": "42"}]}
    assert await reward.score("", "print(int(input()) + 1)", pairs) == (1.0, {"passed": 1.0})
    assert await reward.score("", "while True: pass", pairs) == (0.0, {"passed": 0.0})
    assert await reward.score("", HUMAN_EVAL["canonical_solution"], HUMAN_EVAL) == (1.0, {"passed": 1.0})
    with pytest.raises(SandboxError, match="no room"):
        await reward.score("", "fail", pairs)


def test_of_an_answer_that_has_no_end_only_the_limit_is_read(fusion):
    server = open_sandbox(SandboxConfig(url=fusion.url, output_kib=64))
    assert asyncio.run(server.run("flood")).status == "output"
    assert fusion.sent < 64 << 20


def test_a_server_that_is_not_there_is_told_at_the_start(free_port):
    with pytest.raises(UserError, match=f"sandbox.url is http://127.0.0.1:{free_port}, but .*start the server"):
        open_sandbox(SandboxConfig(url=f"http://127.0.0.1:{free_port}"))


def test_programs_are_taken_from_the_last_block_of_their_language():
    assert program_in("```python\na\n```\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert program_in("```\na\n```\nso") == "a\n"
    assert program_in("```python\ncut off") == "cut off"
    assert program_in("a = 1") == "a = 1"
    assert program_in("```c++\nx\n```\n```python\ny\n```", "cpp") == "x\n"
    assert program_in("So: ```python\nx = 1```, and\n```\ntext\n```") == "x = 1"
    assert program_in("``` python title=a\nx = 1\n``` \n") == "x = 1\n"
    assert program_in("~~~python\nx = '```'\n~~~\nIt is 1 ~~~ 2") == "x = '```'\n"
    assert program_in("```python\n# ~~~\nx = 1\n~~~\n```\n~~~\ny\n~~~") == "# ~~~\nx = 1\n~~~\n"
    assert program_in("1. So:\n   ```python\n   if x:\n     y\n\n   ```\n2. Done") == "if x:\n  y\n\n"


def test_a_block_within_a_block_of_longer_fences_is_a_part_of_it():
    assert program_in("````js\ns = `\n```\n`;\n````\n", "nodejs") == "s = `\n```\n`;\n"
    assert program_in("````markdown\n```python\nx\n```\n````\nSo:\n```python\ny\n```") == "y\n"
    assert program_in("````python\nx\n```\nDone.") == "x\n"  # no fence is as long as the first


def test_a_block_ends_at_a_fence_that_is_not_in_a_text_of_the_program():
    program = 'def f():\n    """\n```python\nf()\n```\n    """\n    return \'```\'\n'
    assert program_in(f"```python\n{program}```\nIt is called like this:\n```text\nf()\n```") == program
    assert program_in('```cpp\nputs("```");\n```\n', "cpp") == 'puts("```");\n'
    assert program_in("```python\nno python\n```\n```text\nx\n```") == "no python\n"


@pytest.mark.parametrize("text", ["```python\n" * 40_000, "```python" + "\n" * 200_000, "`" * 200_000, "``` " * 50_000])
def test_completions_that_are_nothing_but_fences_are_read(text):
    program_in(text)
    program_in(text, "cpp")


def test_a_continuation_ends_where_the_function_does_or_with_what_it_defines_behind_it():
    assert continued("def f():\n", "    return 1\n\nprint(f())", "f") == "def f():\n    return 1\n\n"
    assert continued("def f():\n", "    return 1\n\nSo it is 1.", "f") == "def f():\n    return 1\n\n"
    helped = "def f():\n    return g()\n\ndef g(): return 1"
    assert continued("def f():\n", "    return g()\n\ndef g(): return 1", "f") == helped
    assert continued("def f():\n    1\n", "def f():\n    return 2", "f").endswith("\n\ndef f():\n    return 2")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("1 2 \n3\n\n", "1 2\n3"),
        ("1   2\t3", "1 2 3"),
        ("  indented\n", "indented"),
        ("a\r\nb\r\n", "a\nb"),
        ("0.3333333", "0.33333334"),
        ("2", "2.0000"),
        ("3.0", "3"),
        ("-0.0", "0.0"),
        ("5.6e-17", "0.0"),
        ("1e-07", "0.0000001"),
        ("Case #1: 0.50000001 x", "Case #1: 0.5 x"),
        ("12345678.9", "12345678.90"),
        ("314159265.3589811", "314159265.3589809"),
        ("nan", "nan"),
        ("YES", "YES"),
    ],
)
def test_outputs_that_are_the_same(printed, expected):
    assert same_output(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("1\n2", "1 2"),
        ("1 2", "1\n2"),
        ("1\n\n2", "1\n2"),
        ("3.0000001", "3"),
        ("nan", "0.5"),
        ("inf", "1.0"),
        ("0", "0.0000009"),
        ("12345670.00", "12345678.90"),
        ("0.50", "0.51"),
        ("a  b", "a b"),
        ("*   *", "* *"),
        ("yes", "YES"),
        ("1_0.0", "10.0"),
        ("1 2 3", "1 2"),
        ("0x1.0", "1.0"),
        ("9" * 5000 + ".0", "1.0"),
    ],
)
def test_outputs_that_are_not_the_same(printed, expected):
    assert not same_output(printed, expected)
