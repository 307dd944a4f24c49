"""Rows in the forms in which sets publish tasks: SWE-bench's family, Harbor's folders, and rows of one's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.imitated_docker import make_docker, make_image
from fakes.scripted_policy import Session, byte_tokenizer

from areal.base.errors import UserError
from areal.config.data_section import DataConfig
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.extensions.programs.outside import SandboxError
from areal.extensions.programs.slots import Programs
from areal.extensions.sandboxes import sandbox_tasks
from areal.extensions.sandboxes import sandboxes as sandboxes_module
from areal.extensions.sandboxes.sandbox_owner import Sandboxes
from areal.extensions.sandboxes.sandbox_tasks import RowError, task_of
from areal.workflows.named_workflows import examine, resolve_workflow

# Fields as the sets have them: SWE-bench's lists are JSON.
SWE_BENCH = {
    "repo": "o/r",
    "instance_id": "o__R-1",
    "base_commit": "abc",
    "problem_statement": "It adds wrongly.",
    "environment_setup_commit": "abc",
    "version": "1",
    "patch": "",
    "FAIL_TO_PASS": '["t.py::a"]',
    "PASS_TO_PASS": "[]",
    "test_patch": "--- a/tests/t.py\n+++ b/tests/t.py\n@@ -1 +1 @@\n-a\n+b\n",
}


def bash(code: str) -> str:
    return f"Let me see.\n```bash\n{code}\n```"


@pytest.fixture
async def sandboxes() -> AsyncIterator[Sandboxes]:
    programs = Programs(SandboxConfig())
    owner = Sandboxes("test", programs)
    yield owner
    await owner.close()
    await programs.close()


async def play(session: Session, fields: dict, environment: str = "bubble", **options) -> float:
    options = {"environment": environment, "environment_options": {"folder": None, **options}}
    row = Row(index=0, prompt="Go.", answer=None, reward=None, fields=fields)
    return (await resolve_workflow("environment", options)(session, row)).reward


def test_the_image_of_a_row_is_the_one_that_it_names_or_that_its_set_has_published():
    assert task_of(SWE_BENCH).image == "swebench/sweb.eval.x86_64.o_1776_r-1:latest"
    gym = {key: value for key, value in SWE_BENCH.items() if key != "environment_setup_commit"}
    assert task_of(gym | {"FAIL_TO_PASS": ["t.py::a"]}).image == "xingyaoww/sweb.eval.x86_64.o_s_r-1:latest"
    assert task_of(SWE_BENCH | {"image_name": "smith/x"}).image == "smith/x"
    assert task_of(SWE_BENCH | {"image": "own"}, image="default").image == "own"
    assert task_of({}, image="default").image == "default"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (SWE_BENCH | {"FAIL_TO_PASS": '["test_a (m.T)"]'}, "no names of pytest: give it a command"),
        (SWE_BENCH | {"FAIL_TO_PASS": "test_a"}, "FAIL_TO_PASS is no list of names of tests"),
        ({"files": "a"}, "files are of type str, not an object"),
        ({"command": "true", "isolated": True}, "names no folder that is copied there"),
        (SWE_BENCH | {"isolated": False}, "made ready in a new sandbox: leave out isolated=false"),
        (
            {"command": "true", "tests_folder": "~/.ssh"},
            "names a folder of this machine as tests_folder: only tasks of",
        ),
        ({"command": "true", "build": "/etc"}, "names a folder of this machine as build: only tasks of harbor"),
        ({"command": "true", "image": "--volume=/:/mnt"}, "image '--volume=/:/mnt' is no name of an image"),
        ({"command": ["rm"]}, "the row's command is no text"),
        ({"command": "true", "files": {"/a": 1}}, "the row's /a is no text"),
        ({"command": "true", "tests": {"/a": {"b": 1}}}, "the row's /a is no text"),
        ({"command": "true", "seconds": 1e18}, "seconds are no number up to 86400"),
        ({"command": "true", "seconds": "9"}, "seconds are no number up to 86400"),
    ],
)
def test_a_row_that_cannot_be_judged_is_an_error_of_the_row(fields, complaint):
    with pytest.raises(RowError, match=complaint):
        task_of(fields).check()


ADD = "def add(a, b):\n    return a {} b\n"
TESTS = (
    "import pytest\nfrom calc import add\n\n\ndef test_zero():\n    assert add(1, 0) == 1\n\n\n"
    "@pytest.mark.parametrize('text', ['a b'])\ndef test_text(text):\n    assert add(text, '') == 'a b'\n"
)
MORE_TESTS = TESTS + "\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
FIXES = bash("cd /tmp/testbed && sed -i 's/a - b/a + b/' calc.py")


@pytest.fixture
def swe_row(monkeypatch) -> dict:
    """A row as of SWE-bench whose repository is in /tmp/testbed of a bubble, since only /tmp can be written there."""
    for name, value in {"REPOSITORY": "/tmp/testbed", "BIN": "/usr/bin"}.items():
        monkeypatch.setattr(sandbox_tasks, name, value)
    row = SWE_BENCH | {"FAIL_TO_PASS": '["test_calc.py::test_sum"]'}
    row["PASS_TO_PASS"] = '["test_calc.py::test_zero", "test_calc.py::test_text[a"]'  # cut at a space, as published
    old_lines, new_lines = TESTS.splitlines(), MORE_TESTS.splitlines()[len(TESTS.splitlines()) :]
    hunk = f"@@ -{len(old_lines)},1 +{len(old_lines)},{len(new_lines) + 1} @@\n {old_lines[-1]}\n" + "".join(
        f"+{line}\n" for line in new_lines
    )
    row["test_patch"] = f"--- a/test_calc.py\n+++ b/test_calc.py\n{hunk}"
    row |= {"files": {"/tmp/testbed/calc.py": ADD.format("-"), "/tmp/testbed/test_calc.py": TESTS}}
    return row | {"path": None, "seconds": 60}


async def test_tests_of_swe_rows_run_in_a_new_sandbox_with_their_own_files(swe_row, sandboxes):
    log = bash("rm /tmp/testbed/test_calc.py; git -C /tmp/testbed log --format=%s")
    for turns, reward in (
        ([bash("cd /tmp/testbed && echo 'def test_sum(): pass' > test_calc.py")], 0.0),
        ([FIXES, log], 1.0),
    ):
        session = Session(*turns, "Done.", sandboxes=sandboxes)
        assert await play(session, swe_row, timeout_seconds=60) == reward
        assert turns[-1] != log or "```output\nstart\n```" in session.prompts[-1]  # there is no other history


def harbor_task(folder: Path, docker: str = "FROM far\nWORKDIR /box/app\n", **settings) -> Path:
    for name, text in {
        "instruction.md": "Write 42 into answer.",
        "task.toml": "[verifier]\ntimeout_sec = 9.0\n[environment]\nmemory_mb = 512\ncpus = 2\n",
        "environment/Dockerfile": docker,
        "tests/test.sh": "cat /box/app/answer > /box/logs/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_harbors_tasks_are_rows(tmp_path):
    harbor_task(tmp_path / "b"), harbor_task(tmp_path / "a", "FROM x\nRUN make\n")
    source = open_source(DataConfig(source=f"harbor:{tmp_path}", eval_size=0), seed=0)
    rows = {row.fields["name"]: row for row in map(source.row, range(2))}
    assert rows["a"].prompt == "Write 42 into answer."
    task = task_of(rows["b"].fields)
    assert (task.image, task.build, task.folder, task.seconds) == ("far", None, "/box/app", 9.0)
    assert not task.isolated
    assert task.limits == {"memory": "512m", "cpus": 2}
    built = task_of(rows["a"].fields)
    assert built.build == str(tmp_path / "a/environment")
    harbor_task(tmp_path / "other/a", "FROM y\nRUN make\n")  # one of the same name has another image
    second = open_source(DataConfig(source=f"harbor:{tmp_path}/other", eval_size=0), seed=0).row(0)
    assert built.image != task_of(second.fields).image and built.image.startswith("areal-harbor-a:")
    (tmp_path / "link").mkdir()
    harbor_task(tmp_path / "link/a")
    shutil.rmtree(tmp_path / "link/a/tests")
    (tmp_path / "link/a/tests").symlink_to(tmp_path / "b/tests")
    with pytest.raises(UserError, match="tests of the task .* is a link to"):
        open_source(DataConfig(source=f"harbor:{tmp_path}/link", eval_size=0), seed=0)
    settings = tmp_path / "a/task.toml"
    settings.write_text(settings.read_text().replace("[verifier]", '[verifier]\nenvironment_mode = "separate"'))
    with pytest.raises(UserError, match="a container of its own for the tests, which is not supported: remove it"):
        open_source(DataConfig(source=f"harbor:{tmp_path}", eval_size=0), seed=0)
    (tmp_path / "a/tests/test.sh").unlink()
    with pytest.raises(UserError, match="has no tests/test.sh"):
        open_source(DataConfig(source=f"harbor:{tmp_path}", eval_size=0), seed=0)


@pytest.fixture
def harbor(tmp_path, monkeypatch):
    """Makes a row of a Harbor task with these tests, whose image has the answer 0 in /box/app and in /box/opt."""
    at = make_docker(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    box = make_image(at / "registry/far")
    for name in "app", "opt":
        (box / name).mkdir()
        (box / name / "answer").write_text("0\n")

    def fields_of(script: str) -> dict:
        task = harbor_task(tmp_path / "task")
        (task / "tests/test.sh").write_text(f'cd "$(dirname "$0")/.."\n{script}\n')
        return open_source(DataConfig(source=f"harbor:{task}", eval_size=0), seed=0).row(0).fields

    yield fields_of
    assert not [*(at / "containers").iterdir()]


def reads(place: str) -> str:
    return f"cat box/{place}/answer > logs/verifier/reward.txt"


async def test_the_reward_of_a_harbor_task_is_what_its_tests_write(harbor, sandboxes):
    for code, reward in ("echo 0.5 > /box/app/answer", 0.5), ("ls", 0.0), ("echo x > /box/app/answer", 0.0):
        assert await play(Session(bash(code), "Done.", sandboxes=sandboxes), harbor(reads("app")), "docker") == reward


async def test_tests_of_harbor_see_all_that_the_policy_has_done_unless_an_isolated_judge_is_asked_for(
    harbor, sandboxes
):
    async def solve(place: str, **options) -> float:
        session = Session(bash(f"echo 1 > /box/{place}/answer"), "Done.", sandboxes=sandboxes)
        return await play(session, harbor(reads(place)), "docker", **options)

    assert await solve("opt") == await solve("opt", folder="/box/app") == 1.0
    assert (await solve("opt", isolated=True), await solve("app", isolated=True)) == (0.0, 1.0)


async def test_an_isolated_judge_is_out_of_reach_of_what_the_policy_has_left_running(harbor, sandboxes):
    keeps_writing = "(while [ -d /logs/verifier ]; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &"
    session = Session(bash(f"mkdir -p /logs/verifier; {keeps_writing}"), "Done.", sandboxes=sandboxes)
    assert await play(session, harbor(reads("app")), "docker", isolated=True) == 0.0


async def test_a_reward_that_the_policy_has_written_itself_is_none(harbor, sandboxes):
    forged = bash(
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt && echo 1 > /logs/verifier/reward.json"
    )
    scripts = {"exit 1": None, "if [ -e box/app/done ]; then exit; fi; echo 0.25 > logs/verifier/reward.txt": 0.0}
    for script, reward in scripts.items():
        session = Session(forged, bash("touch /box/app/done"), "Done.", sandboxes=sandboxes)
        if reward is None:
            with pytest.raises(RowError, match="cannot be put there, or write no number"):
                await play(session, harbor(script), "docker")
        else:
            assert await play(session, harbor(script), "docker") == reward


async def test_tests_that_take_too_long_fail_the_sample_and_give_no_reward(harbor, sandboxes):
    slow = harbor(f"if grep -q 1 box/app/answer; then sleep 60; fi; {reads('app')}") | {"seconds": 1.0}
    session = Session(bash("echo 1 > /box/app/answer"), "Done.", sandboxes=sandboxes)
    with pytest.raises(SandboxError, match="the tests did not end within 1 s") as failure:
        await play(session, slow, "docker")
    assert not isinstance(failure.value, RowError)


async def test_work_is_judged_where_the_turns_have_ended_before_the_policy_did(harbor, sandboxes):
    options = {"environment": "docker", "max_turns": 1}
    row = Row(index=0, prompt="Go.", answer=None, reward=None, fields=harbor(reads("app")))
    session = Session(bash("echo 1 > /box/app/answer"), sandboxes=sandboxes)
    assert (await resolve_workflow("environment", options)(session, row)).reward == 1.0


async def test_a_folder_that_no_sandbox_can_copy_is_an_error_of_the_row(harbor, sandboxes, monkeypatch):
    monkeypatch.setattr(sandboxes_module, "FOLDER_BYTES", 20_000)
    large = harbor(reads("app")) | {"setup": "head -c 100000 /dev/zero > /box/app/large"}
    with pytest.raises(RowError, match="the folder /box/app cannot be copied .* even without a policy"):
        await play(Session("Done.", sandboxes=sandboxes), large, "docker", isolated=True)


def test_the_start_says_of_how_many_tasks_the_tests_name_what_is_not_there(capsys):
    scripts = (
        "grep 42 /opt/answer /usr/lib/x",
        "cat /app/a ./a/b ~/c $HOME/d https://localhost/e",
        "apt-get install -y curl && cat /tests/x /app/a/b > /logs/verifier/reward.txt",
    )
    rows = [
        Row(
            i,
            "Go.",
            None,
            None,
            {"command": "sh /tests/a.sh", "folder": "/app", "isolated": False, "tests": {"a.sh": x}},
        )
        for i, x in enumerate(scripts)
    ]
    options = {"environment": "docker", "environment_options": {"isolated": True}}
    examine("environment", options, iter(rows))
    notes = capsys.readouterr().err.splitlines()
    assert "the tests of 1 of 3 rows name paths outside" in notes[0] and "such as /opt/answer" in notes[0]
    assert "the tests of 1 of 3 rows download, but the sandbox has no network" in notes[1]
    options["environment_options"] = {"network": "bridge"}
    examine("sandbox_tools", options, iter(rows))
    assert not capsys.readouterr().err


async def test_tests_that_never_give_a_reward_are_an_error_of_the_row(sandboxes):
    fields = {"command": "true", "reward_file": "/tmp/reward.txt"}
    with pytest.raises(RowError, match="no number into /tmp/reward.txt, not even without a policy"):
        await play(Session("Done.", sandboxes=sandboxes), fields)
    with pytest.raises(RowError, match="not found .exit status 127., not even without a policy"):
        await play(Session("Done.", sandboxes=sandboxes), {"command": "no-such-program"})
    with pytest.raises(RowError, match="no command that judges"):
        await play(Session("Done.", sandboxes=sandboxes), {})
    with pytest.raises(SandboxError, match="ends with status 3: no"):
        await play(Session("Done.", sandboxes=sandboxes), fields | {"setup": "echo no; exit 3"})


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


async def test_a_policy_calls_a_shell_and_an_editor_and_the_tests_give_the_reward(sandboxes):
    row = Row(0, "Mend it.", None, None, {"files": {"/tmp/repo/a": "wrong\n"}, "command": "grep right /tmp/repo/a"})
    turns = (
        call("shell", command="cat /tmp/repo/a; sleep 60"),
        call("edit", path="/tmp/repo/a", old="wrong", new="right"),
        call("edit", path="/tmp/repo/a", old="wrong", new="right"),
        "Done.",
    )
    session = Session(*turns, tokenizer=byte_tokenizer(), sandboxes=sandboxes)
    options = {"environment": "bubble", "environment_options": {"folder": "/tmp/repo", "timeout_seconds": 5}}
    assert (await resolve_workflow("sandbox_tools", options)(session, row)).reward == 1.0
    assert session.prompts[0].startswith("tools shelledituser Mend it.")
    assert "wrong\nexit status: killed after 5 s" in session.prompts[1]
    assert "/tmp/repo/a is written" in session.prompts[2] and "is 0 times in /tmp/repo/a" in session.prompts[3]
    with pytest.raises(UserError, match="column_addition' of the workflow sandbox_tools is no sandbox"):
        await resolve_workflow("sandbox_tools", {"environment": "column_addition"})(session, row)
