"""Episodes in real containers, where docker or podman has an image with a shell, which AREAL_TEST_CONTAINER names:
`podman:IMAGE`, and further arguments for `run`. Where the tests run is also tested with a stand-in for docker."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from fakes.imitated_docker import make_docker, make_image
from fakes.scripted_policy import Session

from areal.base.errors import UserError
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.extensions.programs.outside import SandboxError
from areal.extensions.sandboxes import sandboxes as sandboxes_module
from areal.workflows.named_workflows import rehearse, resolve_workflow

WORLD, *ARGUMENTS = os.environ.get("AREAL_TEST_CONTAINER", "").split() or [""]
PROGRAM = WORLD.partition(":")[0]
needs_container = pytest.mark.skipif(not WORLD, reason="AREAL_TEST_CONTAINER names no image")


def containers() -> set[str]:
    listed = subprocess.run([PROGRAM, "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def bash(code: str) -> str:
    return f"Let me see.\n```bash\n{code}\n```"


async def play(
    session: Session, command: str = "test -f /made", fields: dict | None = None, world: str = WORLD, **options
):
    options = {"command": command, "folder": None, "arguments": ARGUMENTS, **options}
    row = Row(index=0, prompt="Go.", answer=None, reward=None, fields=fields or {})
    workflow = resolve_workflow("environment", {"environment": world, "environment_options": options})
    return await workflow(session, row)


@needs_container
async def test_the_policy_sees_what_its_commands_print_and_the_users_command_is_the_judge():
    containers_before = containers()
    session = Session(bash("echo a; echo b >&2; false"), bash("touch /made"), "Done.")
    assert (await play(session)).reward == 1.0
    assert session.prompts[1].endswith("```output\na\nb\n```\nexit status: 1")
    assert (await play(Session("Done."))).reward == 0.0  # nothing is left of the other episode
    assert containers() == containers_before


@needs_container
async def test_files_are_there_from_the_start_and_tests_only_at_the_end():
    fields = {"files": {"/work/a b": "ä\n"}, "tests": {"/work/test": "grep -q ä '/work/a b'"}}
    session = Session(bash("ls /work; cat '/work/a b'"), "Done.")
    assert (await play(session, "sh /work/test", fields)).reward == 1.0
    assert "```output\na b\nä\n```" in session.prompts[1]


@needs_container
async def test_the_tests_get_the_folder_in_a_new_container():
    containers_before = containers()
    session = Session(bash("echo 42 > /work/answer; rm /work/old; touch /made"), "Done.")
    fields = {"files": {"/work/old": "", "/work/b": ""}, "tests": {"/work/test": "grep -q 42 answer && ls"}}
    command = "cd /work && test ! -e old && test -e b && test ! -e /made && sh test"
    assert (await play(session, command, fields, folder="/work")).reward == 1.0
    assert containers() == containers_before


@needs_container
async def test_a_policy_that_keeps_tests_from_being_written_has_not_passed_them():
    session = Session(bash("mkdir -p /work/test"), "Done.")
    assert (await play(session, "true", {"tests": {"/work/test": "true"}})).reward == 0.0


@needs_container
async def test_a_command_that_takes_too_long_is_killed_with_what_it_has_started():
    session = Session(bash("echo begun; sleep 3600 & sleep 3600"), bash("ps | grep 'sleep 360[0]'"), "Done.")
    await play(session, timeout_seconds=5)
    assert "```output\nbegun\n```\nexit status: killed after 5 s" in session.prompts[1]
    assert session.prompts[2].endswith("```output\n\n```\nexit status: 1")


@needs_container
async def test_output_without_end_is_cut():
    session = Session(bash("yes | head -c 100000000"), "Done.")
    await play(session, max_output=4)
    assert "```output\ny\n\n[99999996 bytes are left out here]\ny\n```" in session.prompts[1]


@needs_container
async def test_a_container_has_no_network_and_little_memory_unless_told_otherwise():
    session = Session(bash("ls /sys/class/net"), bash("head -c 200000000 /dev/zero | tail | wc -c"), "Done.")
    await play(session, memory="64m")
    assert "```output\nlo\n```" in session.prompts[1]
    assert "200000000" not in session.prompts[2].rpartition("```output")[2]


@needs_container
async def test_an_episode_that_is_given_up_leaves_no_container():
    containers_before = containers()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4):
            await play(Session(bash("sleep 3600")))
    assert containers() == containers_before


@needs_container
async def test_an_image_without_a_shell_or_no_image_at_all_fails_the_sample():
    with pytest.raises(SandboxError, match="does not start"):
        await play(Session("x"), arguments=[*ARGUMENTS, "--no-such-argument"])


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_a_program_or_an_image_that_is_not_there_is_told_before_anything_runs(program):
    world = f"{program}:no/such:image"
    with pytest.raises(UserError, match=f"The environment '{world}' (needs {program}|cannot be started)"):
        rehearse(
            "environment",
            {"environment": world, "environment_options": {"command": "true", "folder": None}},
            SandboxConfig(),
        )


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Path:
    """The folder of a stand-in for docker, whose image has a judge and a repository."""
    at = make_docker(tmp_path)
    box = make_image(at / "images/image")
    (box / "repo").mkdir()
    (box / "repo/wrong").touch()
    (box / "judge").write_text("#!/bin/sh\ntest ! -e wrong && grep -q 42 answer\n")
    (box / "judge").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return at


SOLVES = bash("cd /box/repo && rm wrong && echo 42 > answer")
BECOMES_THE_JUDGE = bash("printf '#!/bin/sh\\ntrue\\n' > /box/judge")


@pytest.mark.parametrize(
    ("policy", "folder", "reward"),
    [
        (SOLVES, "/box/repo", 1.0),
        (SOLVES, None, 1.0),
        (BECOMES_THE_JUDGE, "/box/repo", 0.0),
        (BECOMES_THE_JUDGE, None, 1.0),  # as docs/workflows.md warns
        (bash("rm -r /box/repo"), "/box/repo", 0.0),
        (bash("rm -r /box/repo && ln -s /box /box/repo"), "/box/repo", 0.0),
    ],
)
async def test_what_a_policy_did_outside_the_folder_is_not_there_when_the_tests_run(docker, policy, folder, reward):
    fields = {"files": {"/box/data": "4"}, "tests": {"/box/repo/test": "test -e ../data && exec judge\n"}}
    outcome = await play(
        Session(policy, "Done."), "cd /box/repo && sh test", fields, world="docker:image", folder=folder
    )
    assert outcome.reward == reward
    assert not [*(docker / "containers").iterdir()]


async def test_a_folder_that_is_too_large_is_not_judged(docker, monkeypatch):
    monkeypatch.setattr(sandboxes_module, "FOLDER_BYTES", 20_000)
    for size, reward in (1000, 1.0), (100_000, 0.0):
        session = Session(SOLVES, bash(f"head -c {size} /dev/zero > /box/repo/more"), "Done.")
        outcome = await play(session, "cd /box/repo && judge", world="docker:image", folder="/box/repo")
        assert outcome.reward == reward


@pytest.mark.parametrize("folder", ["/", "repo"])
def test_a_folder_that_cannot_be_copied_is_told_before_anything_runs(docker, folder):
    options = {"command": "true", "folder": folder}
    with pytest.raises(UserError, match=f"folder is {folder}, but has to be the absolute path of a folder below /"):
        rehearse("environment", {"environment": "docker:image", "environment_options": options}, SandboxConfig())
