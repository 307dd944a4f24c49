"""Child processes that lead a group of their own."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import uvloop

from areal.base.children import finish

CHILD = """
import os, signal, sys
from pathlib import Path
from areal.extensions.selftest.child import CheckProcess
log, held = Path(sys.argv[1]), os.dup(1)
os.set_inheritable(held, True)
CheckProcess(["sh", "-c", f"exec 1>/proc/{os.getpid()}/fd/{held}; echo begun >&2; exec sleep 600"], {}, log)
while "begun" not in log.read_text():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("script", "most_bytes", "outcome"),
    [
        ("cat; exit 3", 9, (3, b"asks much")),
        ("cat; exit 3", 4, (3, b"as\n[5 bytes are left out here]\nch")),
        ("cat; exit 3", 0, (3, b"")),
        ("yes | head -c 1000000; echo said >&2", 13, (0, b"y\ny\ny\ny\n[999992 bytes are left out here]\n\nsaid\n")),
        ("exit", 10, (0, b"")),
    ],
)
async def test_a_program_is_run_to_its_end_and_both_ends_of_what_it_prints_are_kept(script, most_bytes, outcome):
    assert await finish("sh", "-c", script, stdin=b"asks much", seconds=60, most_bytes=most_bytes) == outcome


def test_programs_that_end_before_they_read_have_an_exit_status():
    async def many():
        return await asyncio.gather(*(finish("sh", "-c", "exit 3", stdin=b"x", seconds=60) for _ in range(20)))

    for run in (asyncio.run, uvloop.run):
        assert run(many()) == [(3, b"")] * 20


async def test_a_program_that_takes_too_long_is_killed_with_what_it_has_started():
    reader, writer = os.pipe()
    script = f"exec 9>/proc/{os.getpid()}/fd/{writer}; sleep 600 & echo begun; wait"
    assert await finish("sh", "-c", script, seconds=1.0, most_bytes=100) == (None, b"begun\n")
    os.close(writer)
    # The pipe is at its end when all who could write have ended: what the program has started as well.
    assert await asyncio.to_thread(os.read, reader, 1) == b""
    os.close(reader)


def test_what_the_self_test_has_started_ends_with_it_even_if_it_does_not_listen(tmp_path):
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "log")], stdout=subprocess.PIPE) as parent:
        # The output is at its end when all who hold it have ended: the child as well, which never reads.
        parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGKILL
