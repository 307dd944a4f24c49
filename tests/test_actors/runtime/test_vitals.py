"""What an actor says of its process."""

import asyncio
import sys

import structlog

from actors.runtime import vitals

SIZE = 64 << 20
CHILD = f"import sys; held = b'x' * {SIZE}; print('holds', flush=True); sys.stdin.read()"


async def test_only_where_memory_is_short_an_actor_counts_what_its_processes_hold(monkeypatch):
    vitals.watch()
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stdin=pipe, stdout=pipe)
    await child.stdout.readline()
    monkeypatch.setattr(vitals, "ENOUGH_BYTES", 0)
    own = vitals.numbers()["memory"]
    monkeypatch.setattr(vitals, "ENOUGH_BYTES", 1 << 60)
    assert vitals.numbers()["memory"] > own + SIZE
    await child.communicate(b"")


async def test_an_event_loop_that_stands_still_is_logged_once_with_the_line_that_holds_it(monkeypatch):
    monkeypatch.setattr(vitals, "BLOCKED_SECONDS", 1)
    with structlog.testing.capture_logs() as logged:
        vitals.watch()
        while not logged:
            pass
    (line,) = [line["event"] for line in logged]
    assert line.startswith(f"the event loop has stood still for 1 s, in {__file__}, line ")
    assert line.endswith((": while not logged:", ": pass"))
