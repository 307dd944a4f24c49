"""What every provider of sandboxes does: namespaces, docker (an imitation), podman (where AREAL_TEST_CONTAINER names an
image, as in test_containers.py), and a service in a process of its own that is slow or loses answers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from conftest import ROOT
from fakes.imitated_docker import make_docker, make_image

from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.extensions.programs.outside import SandboxError
from areal.extensions.programs.slots import Programs
from areal.extensions.sandboxes import sandbox_owner, sandbox_providers
from areal.extensions.sandboxes.sandbox_owner import Sandboxes
from areal.extensions.sandboxes.sandbox_providers import HttpSandbox, SandboxService
from areal.extensions.sandboxes.sandbox_tasks import RowError, Task
from areal.extensions.sandboxes.sandbox_tools import SandboxTools
from areal.extensions.sandboxes.sandboxes import Limits, Ran, Sandbox, clean_archive, copy_folder

REAL, *ARGUMENTS = os.environ.get("AREAL_TEST_CONTAINER", "").split() or [""]
SECONDS = 60.0
PROVIDERS = ("bubble", "docker", "http none", "http slow", "http drops", "http twice")


@contextlib.contextmanager
def service_in(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service in a process of its own: its address and the process."""
    port_file = folder / "port"
    command = [sys.executable, str(ROOT / "tests/fakes/sandbox_service.py"), str(port_file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        while not port_file.exists():
            assert process.poll() is None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        yield f"http://127.0.0.1:{port_file.read_text()}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[str]:
    with service_in(tmp_path_factory.mktemp("service")) as (url, _):
        yield url


def set_fault(url: str, fault: str) -> None:
    request = urllib.request.Request(f"{url}/fault/{fault}", method="PUT")
    urllib.request.urlopen(request).close()


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Path:
    at = make_docker(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    make_image(at / "images/image")
    return at


@pytest.fixture
async def programs() -> AsyncIterator[Programs]:
    of_this_test = Programs(SandboxConfig())
    yield of_this_test
    await of_this_test.close()


@pytest.fixture
async def owner(programs) -> AsyncIterator[Sandboxes]:
    sandboxes = Sandboxes("run-1", programs)
    yield sandboxes
    await sandboxes.close()


@pytest.fixture(params=[*PROVIDERS, pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="no image"))])
def provider(request):
    """`name` and `image` of a provider, a `folder` in which its sandboxes can write, and what is `left` of them."""
    if request.param == "docker":
        at = request.getfixturevalue("docker")
        yield SimpleNamespace(name="docker", image="image", folder="/box", arguments=())
        assert not [*(at / "containers").iterdir()]
    elif request.param == "real":
        program, _, image = REAL.partition(":")
        yield SimpleNamespace(name=program, image=image, folder="/tmp/box", arguments=ARGUMENTS)
        listed = subprocess.run([program, "ps", "-aq", "--filter=label=areal=run-1"], capture_output=True, check=True)
        assert not listed.stdout
    elif request.param == "bubble":
        yield SimpleNamespace(name="bubble", image=None, folder="/tmp/box", arguments=())
    else:
        url = request.getfixturevalue("service")
        set_fault(url, request.param.split()[1])
        yield SimpleNamespace(name=url, image=None, folder="/tmp/box", arguments=())
        set_fault(url, "none")


def opened(owner: Sandboxes, provider: SimpleNamespace, **task) -> contextlib.AbstractAsyncContextManager[Sandbox]:
    return owner.opened(provider.name, Task(image=provider.image, **task), Limits(), SECONDS, provider.arguments)


async def test_every_provider_keeps_the_contract(provider, owner, tmp_path):
    seconds, place = SECONDS, provider.folder
    (tmp_path / "local/deep").mkdir(parents=True)
    (tmp_path / "local/deep/file").write_text("uploaded")
    files = {f"{place}/a b": "ä\n"}
    async with opened(owner, provider, files=files, setup=f"echo ready > {place}/setup") as sandbox:
        assert owner.running == 1
        ran = await sandbox.exec(
            "sh", "-c", 'echo out; echo err >&2; cat "$1"; exit 3', "sh", f"{place}/a b", seconds=seconds
        )
        assert (ran.status, sorted(ran.text.split())) == (3, ["err", "out", "ä"])
        # A command runs once, whatever becomes of its answer.
        assert (await sandbox.exec("sh", "-c", f"cat >> {place}/once", stdin=b"x", seconds=seconds)).status == 0
        assert await sandbox.read(f"{place}/once", seconds) == b"x"
        assert await sandbox.read(f"{place}/setup", seconds) == b"ready\n"
        content = bytes(range(256)) * 100
        assert await sandbox.write(f"{place}/new/bytes", content, seconds)
        assert await sandbox.read(f"{place}/new/bytes", seconds) == content
        assert await sandbox.read(f"{place}/new/bytes", seconds, start=255, most_bytes=3) == b"\xff\x00\x01"
        assert await sandbox.read(f"{place}/none", seconds) is None
        assert not await sandbox.write(f"{place}/once/below a file", b"", seconds)
        assert await sandbox.upload(tmp_path / "local", f"{place}/up", seconds)
        assert await sandbox.read(f"{place}/up/deep/file", seconds) == b"uploaded"
        cut = (
            await sandbox.exec(
                "sh", "-c", "echo begin; yes | head -c 100000; echo end", seconds=seconds, most_bytes=100
            )
        ).text
        assert cut.startswith("begin") and cut.endswith("end") and "bytes are left out here" in cut
        assert await sandbox.alive()
    assert owner.running == 0


async def test_a_command_is_ended_at_its_deadline_and_the_policy_is_told(provider, owner):
    async with opened(owner, provider) as sandbox:
        tools = SandboxTools(sandbox, timeout_seconds=3.0)
        answer = await tools.call("shell", '{"command": "echo begun; sleep 3600"}')
        assert answer == "begun\nexit status: killed after 3 s, with all that it had started"
        assert await tools.call("shell", '{"command": "echo on"}') == "on\nexit status: 0"


async def test_two_sandboxes_share_nothing_and_a_folder_can_be_copied(provider, owner):
    place = provider.folder
    async with opened(owner, provider) as first, opened(owner, provider) as two:
        await first.write(f"{place}/repo/deep/kept", b"1", SECONDS)
        await first.exec("sh", "-c", f"ln -s deep/kept {place}/repo/link", seconds=SECONDS)
        await two.write(f"{place}/repo/old", b"", SECONDS)
        assert await two.read(f"{place}/repo/deep/kept", SECONDS) is None
        assert await copy_folder(first, two, f"{place}/repo", SECONDS)
        assert await two.read(f"{place}/repo/link", SECONDS) == b"1"
        assert await two.read(f"{place}/repo/old", SECONDS) is None
        await first.exec("sh", "-c", f"rm -r {place}/repo && ln -s {place} {place}/repo", seconds=SECONDS)
        assert not await copy_folder(first, two, f"{place}/repo", SECONDS)


async def test_a_late_answer_is_awaited_no_more_and_the_command_is_not_run_again(service, monkeypatch, owner):
    monkeypatch.setattr(sandbox_providers, "GRACE_SECONDS", 6.0)  # the first answer is awaited for 4 s
    async with opened(owner, SimpleNamespace(name=service, image=None, arguments=())) as sandbox:
        set_fault(service, "late")
        try:
            assert (await sandbox.exec("sh", "-c", "echo x >> once; cat once", seconds=2.0)).text == "x"
        finally:
            set_fault(service, "none")


async def test_a_service_that_dies_fails_the_sample(tmp_path, monkeypatch, owner):
    monkeypatch.setattr(sandbox_providers, "GRACE_SECONDS", 1.0)
    with service_in(tmp_path) as (url, process):
        with pytest.raises(SandboxError, match=f"{url}/sandboxes/"):
            async with owner.opened(url, Task(), Limits(), SECONDS) as sandbox:
                set_fault(url, "dies")
                await sandbox.exec("true", seconds=1.0)
        assert process.wait() == 1
    assert owner.running == 0


async def test_what_a_killed_process_left_is_ended_by_its_label_when_the_next_one_starts(service, programs):
    killed, foreign_owner, successor = (Sandboxes(name, programs) for name in ("run-1", "run-2", "run-1"))
    provider = SimpleNamespace(name=service, image=None, arguments=())
    lost, foreign = opened(killed, provider), opened(foreign_owner, provider)
    leftover, foreign_sandbox = await lost.__aenter__(), await foreign.__aenter__()
    async with opened(successor, provider):
        assert not await leftover.alive() and await foreign_sandbox.alive()
        with pytest.raises(SandboxError, match="has ended the sandbox"):
            await leftover.exec("true", seconds=SECONDS)
    await foreign.__aexit__(None, None, None)
    for sandboxes in killed, foreign_owner, successor:
        await sandboxes.close()


async def test_a_service_says_why_it_starts_no_sandbox(service, owner):
    with pytest.raises(SandboxError, match="no image unknown"):
        async with owner.opened(service, Task(image="unknown"), Limits(), SECONDS):
            pass


def log_of(docker: Path) -> list[str]:
    return (docker / "log").read_text().split()


async def test_an_image_is_pulled_once_and_ahead_of_its_use(owner, docker):
    make_image(docker / "registry/far")
    task, row = Task(image="far"), Row(0, "", None, None, {"image": "far"})
    async with owner.opened("docker", Task(image="image"), Limits(), SECONDS):
        owner.expect(row)
        owner.expect(row)
    async with owner.opened("docker", task, Limits(), SECONDS), owner.opened("docker", task, Limits(), SECONDS):
        assert owner.stats() == {"sandboxes": 2, "images_pulling": 0, "images_failed": 0}
    assert log_of(docker).count("pull") == 1


async def test_an_image_that_is_no_where_fails_the_sample_and_in_the_end_its_rows(owner, docker):
    async def start() -> None:
        async with owner.opened("docker", Task(image="nowhere"), Limits(), SECONDS):
            pass

    for _ in range(sandbox_owner.PULL_FAILURES):
        failures = await asyncio.gather(start(), start(), return_exceptions=True)
        assert [type(failure) for failure in failures] == [SandboxError] * 2
        assert "docker cannot pull the image nowhere: manifest unknown" in str(failures[0])
    with pytest.raises(RowError, match="nowhere could not be had 3 times, so its rows are discarded"):
        await start()
    assert log_of(docker).count("pull") == owner.stats()["images_failed"] == 3


async def test_an_image_is_built_of_its_folder_once(owner, docker, tmp_path):
    make_image(tmp_path / "environment")
    for _ in range(2):
        async with owner.opened("docker", Task(image="own", build=str(tmp_path / "environment")), Limits(), SECONDS):
            pass
    assert log_of(docker).count("build") == 1


async def test_a_command_that_is_given_up_ends_in_its_container(owner, docker):
    async with owner.opened("docker", Task(image="image"), Limits(), SECONDS) as sandbox:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await sandbox.exec("sleep", "3600", seconds=SECONDS)
        assert "kill -9 -1" in (docker / "log").read_text()


async def test_a_start_that_is_given_up_or_fails_leaves_nothing(owner, docker):
    for setup in "sleep 3600", "exit 4":
        with pytest.raises((TimeoutError, SandboxError), match="status 4|"):
            async with asyncio.timeout(1):
                async with owner.opened("docker", Task(image="image", setup=setup), Limits(), SECONDS):
                    pass
        assert not [*(docker / "containers").iterdir()] and owner.running == 0


async def test_a_row_sets_limits_but_not_the_network(owner):
    row = {"memory": "64m", "processes": 8}
    async with owner.opened("bubble", Task(limits=row), Limits(), SECONDS) as sandbox:
        hungry = await sandbox.exec("python", "-c", "x = bytearray(10**9); x[::4096] = x[::4096]", seconds=SECONDS)
        assert hungry.status != 0
        assert (await sandbox.exec("echo", "on", seconds=SECONDS)).text == "on"
    for row, complaint in (
        ({"network": "host"}, "known are memory, cpus, processes and disk"),
        ({"memory": "65g"}, "limit of memory is above 64g"),
        ({"processes": 10**9}, "limit of processes is above 4096"),
        ({"cpus": "all"}, "limit of cpus is no size"),
        ({"disk": "0"}, "limit of disk is above 16g, or 0"),
    ):
        with pytest.raises(SandboxError, match=complaint):
            async with owner.opened("bubble", Task(limits=row), Limits(), SECONDS):
                pass


async def test_python_in_a_bubble_is_the_python_of_the_run(owner):
    code = "import sys, numpy; print(sys.version)"
    async with owner.opened("bubble", Task(), Limits(), SECONDS) as sandbox:
        for name in "python", "python3":
            ran = await sandbox.exec(name, "-c", code, seconds=SECONDS)
            assert ran.output.decode().strip() == sys.version


async def test_a_policy_cannot_end_its_own_bubble_nor_take_its_time_for_later_commands(owner):
    async with owner.opened("bubble", Task(), Limits(), SECONDS) as sandbox:
        await sandbox.exec("sh", "-c", "kill -9 -1; kill -9 1", seconds=SECONDS)
        for _ in range(2):  # each has its own processor time
            assert (await sandbox.exec("python", "-c", "while True: pass", seconds=0.3)).status is None
        assert (await sandbox.exec("echo", "on", seconds=SECONDS)).text == "on"


@pytest.fixture
async def one_core(monkeypatch) -> AsyncIterator[tuple[Programs, Sandbox, Sandbox]]:
    """The programs of a machine with one core, and two sandboxes."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    programs = Programs(SandboxConfig())
    owner = Sandboxes("run-1", programs)
    bubble = SimpleNamespace(name="bubble", image=None, arguments=())
    async with opened(owner, bubble) as first, opened(owner, bubble) as two:
        yield programs, first, two
    await programs.close()


async def test_a_command_waits_for_a_core_and_its_time_counts_from_then_on(one_core):
    programs, first, two = one_core
    async with programs.slot():
        late = asyncio.create_task(first.exec("echo", "on", seconds=3))
        given_up = asyncio.create_task(two.exec("echo", "no", seconds=3))
        ended, _ = await asyncio.wait([late, given_up], timeout=3.1)
        assert not ended
        given_up.cancel()
    assert (await late).text == "on"
    assert (await two.exec("echo", "on", seconds=SECONDS)).text == "on"  # it had not begun, and has lost no slot


async def test_a_command_that_only_waits_keeps_no_core_from_others_and_one_that_computes_does(one_core):
    _, first, two = one_core
    ended = []

    async def run(sandbox: Sandbox, *command: str, seconds: float) -> None:
        ended.append((await sandbox.exec(*command, seconds=seconds)).status)

    await asyncio.gather(run(first, "python", "-c", "while True: pass", seconds=1.5), run(two, "true", seconds=SECONDS))
    assert ended == [None, 0]
    server = asyncio.create_task(first.exec("sleep", "3600", seconds=3600))
    assert (await two.exec("echo", "on", seconds=SECONDS)).text == "on"
    server.cancel()


async def test_a_provider_of_ones_own_is_an_async_function(tmp_path, monkeypatch, owner):
    (tmp_path / "own_sandboxes.py").write_text(
        "from areal.extensions.sandboxes.sandboxes import Ran, Sandbox\n\n\n"
        "class Own(Sandbox):\n"
        "    async def exec(self, *command, seconds, stdin=b'', most_bytes=0):\n"
        "        return Ran(0, ' '.join(command).encode())\n\n"
        "    async def close(self):\n        print('closed')\n\n\n"
        "async def start(image, label, limits, seconds):\n    return Own()\n"
    )
    async with owner.opened(f"{tmp_path}/own_sandboxes.py:start", Task(), Limits(), SECONDS) as sandbox:
        assert (await sandbox.exec("a", "b", seconds=1)).text == "a b"


async def test_the_editor_replaces_text_that_is_there_once(owner):
    async with owner.opened("bubble", Task(files={"/tmp/a.py": "x = 1\ny = 1\n"}), Limits(), SECONDS) as sandbox:
        tools = SandboxTools(sandbox)

        async def edit(path: str, old: str, new: str) -> str:
            return await tools.call("edit", json.dumps({"path": path, "old": old, "new": new}))

        assert (
            await edit("/tmp/a.py", "= 1", "= 2")
            == "Error: the old text is 2 times in /tmp/a.py, but has to be there once"
        )
        assert await edit("/tmp/a.py", "y = 1", "y = 2") == "/tmp/a.py is written"
        assert await sandbox.read("/tmp/a.py", SECONDS) == b"x = 1\ny = 2\n"
        assert await edit("/tmp/new/b.py", "", "z") == "/tmp/new/b.py is written"
        assert "cannot be written" in await edit("/usr/b.py", "", "z")
        assert "cannot be read" in await edit("/tmp/none", "a", "b")
        assert await tools.call("fly", "{}") == "Error: there is no tool fly"
        assert "JSON object with the texts command" in await tools.call("shell", "ls")


class Foolish(Sandbox):
    """Whose programs are the policy's: each part of a file has one byte."""

    async def exec(self, *command, seconds, stdin=b"", most_bytes=0):
        self.calls = getattr(self, "calls", 0) + 1
        return Ran(0, b"a")


async def test_a_replaced_program_does_not_keep_the_judge_from_judging():
    sandbox = Foolish()
    assert not await copy_folder(sandbox, sandbox, "/work", 1.0)
    assert sandbox.calls == 2, "what is shorter than a part is the last"


@pytest.mark.parametrize("kind", ["files with holes", "very many files", "no end in time"])
def test_an_archive_that_would_grow_is_refused(kind, monkeypatch, tmp_path):
    evil = tmp_path / "evil.tar"
    if kind == "files with holes":
        with (tmp_path / "hole").open("wb") as hole:
            hole.truncate(1 << 31)
        subprocess.run(["tar", "-cSf", evil, "-C", tmp_path, "hole"], check=True)
        assert evil.stat().st_size < 20_000
    else:
        with tarfile.open(evil, mode="w") as archive:
            for number in range(3):
                archive.addfile(tarfile.TarInfo(f"{number}"), io.BytesIO())
        monkeypatch.setattr("areal.extensions.sandboxes.sandboxes.FOLDER_FILES", 2)
    with evil.open("rb") as source, pytest.raises(ValueError, match="too many files, or files with holes"):
        clean_archive(source, io.BytesIO(), *[-1.0] * (kind == "no end in time"))


@pytest.fixture
async def liar(owner) -> AsyncIterator[Any]:
    """A service that answers what the test says, and what it was asked."""
    says, paths = SimpleNamespace(status=200, text="{}", headers={}), []

    async def answer(request: web.Request) -> web.Response:
        paths.append(str(request.rel_url))
        return web.Response(status=says.status, text=says.text, headers=says.headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield SimpleNamespace(url=str(server.make_url("")), says=says, paths=paths)


@pytest.mark.parametrize(
    ("status", "text", "complaint"),
    [
        (307, "secret", "it sends elsewhere \\(status 307\\)"),
        (400, json.dumps({"error": "e" * 900_000}), "eee$"),
        (404, "[" * 100_000, "the answer is not JSON"),
        (404, "secret", "the answer is not JSON"),
        (404, '{"id": "of another"}', "starts no sandboxes"),
    ],
)
async def test_a_service_that_lies_is_an_error_in_one_short_sentence(liar, status, text, complaint, monkeypatch):
    monkeypatch.setattr(sandbox_providers, "GRACE_SECONDS", 0.3)
    liar.says.status, liar.says.text = status, text
    liar.says.headers = {"Location": f"{liar.url}elsewhere"}
    service = SandboxService(liar.url)
    with pytest.raises(SandboxError, match=complaint) as failure:
        await HttpSandbox(service, None, "run-1", Limits()).start(0.1)
    assert len(str(failure.value)) < 800 and "secret" not in str(failure.value)
    assert not any("elsewhere" in path for path in liar.paths), "a command goes to the address of the run alone"
    await service.close()


@pytest.mark.parametrize("names", ["5", '{"a": 1}', "[[1]]", "Infinity"])
async def test_a_list_of_sandboxes_that_is_none_is_an_error_in_one_sentence(liar, names):
    liar.says.text = f'{{"sandboxes": {names}}}'
    service = SandboxService(liar.url)
    with pytest.raises(SandboxError, match="lists no names of sandboxes"):
        await service.end_all("run-1")
    await service.close()


async def test_a_status_that_is_no_number_of_a_program_is_an_error_in_one_sentence(liar, monkeypatch):
    monkeypatch.setattr(sandbox_providers.uuid, "uuid4", lambda: SimpleNamespace(hex="1"))
    liar.says.text = '{"id": "1", "status": Infinity, "output": ""}'
    service = SandboxService(liar.url)
    with pytest.raises(SandboxError, match="answers without"):
        await HttpSandbox(service, None, "run-1", Limits()).exec("true", seconds=1.0)
    await service.close()


def test_an_archive_of_a_policy_reaches_nothing_outside_its_folder():
    evil, clean = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as archive:

        def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size, member.mode, member.uid = kind, link, len(content), 0o4777, 7
            archive.addfile(member, io.BytesIO(content))

        add("../above")
        add("/absolute")
        add("link", tarfile.SYMTYPE, "/usr")
        add("link/below")
        add("device", tarfile.CHRTYPE)
        add("file", content=b"good")
        add("hard", tarfile.LNKTYPE, "file")
    evil.seek(0)
    clean_archive(evil, clean)
    clean.seek(0)
    with tarfile.open(fileobj=clean) as archive:
        members = {member.name: member for member in archive}
        assert [*members] == ["link", "file", "hard"]
        assert members["link"].linkname == "/usr" and members["file"].mode == 0o777 and members["file"].uid == 0
        assert archive.extractfile("hard").read() == b"good"
