"""What an actor says of its process."""

import asyncio
import sys

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
