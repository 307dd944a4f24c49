"""A part of the self-test in a process of its own: an order a line in, its findings a line out, as JSON.

Two engines in one process disturb each other, and a process that crashes or hangs ends only its own checks.
"""

import asyncio
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from areal.base.children import kill_group
from areal.base.errors import UserError
from areal.base.processes import die_with_parent, tied

LINES = 12
"""Of its output that are shown of a process that has died."""
LOG_LINES = 400
"""Of its output that selftest.json keeps of a check that has failed."""
END_SECONDS = 10.0


class ChildFailed(Exception):
    """The process died, was late, or could not do what it was told: the message says which. From then on it is gone."""


class ChildSlow(ChildFailed):
    """Its time was over."""


class ChildGone(Exception):
    """An order before this one has failed, so this one was not tried."""


class CheckProcess:
    """The parent's end of a process that `serve`s."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """log: file for all that the process prints."""
        self._log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                tied(*command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                start_new_session=True,
                env=os.environ | dict(environment),
            )
        self._failed = ""

    def ask(self, order: str, deadline: float, **arguments: Any) -> Any:
        """What the method `order` returns. deadline: of time.monotonic. Raises ChildFailed, ChildGone."""
        if self._failed:
            raise ChildGone(f"not tried, since `{self._failed}` failed")
        if (seconds := deadline - time.monotonic()) <= 0:
            raise ChildSlow("the time was over before it began")
        try:
            return self._answer(order, seconds, arguments)
        except ChildFailed:
            self._failed = order
            self.kill()
            raise

    def _answer(self, order: str, seconds: float, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None  # they are pipes
        try:
            self._process.stdin.write(json.dumps({"order": order, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildFailed(f"its process has died: {self.last_words}") from None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise ChildSlow(f"no answer within {seconds:.0f} s: {self.last_words}")
        if not (line := self._process.stdout.readline()):  # an answer is one line, written at once
            raise ChildFailed(f"its process has died: {self.last_words}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer["found"]

    @property
    def last_words(self) -> str:
        """The end of what the process has printed."""
        return "\n".join(self.last_lines(LINES)) or "it printed nothing"

    def last_lines(self, count: int) -> list[str]:
        """The last lines that the process has printed, without empty ones."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-count:]

    def close(self) -> None:
        """Have the process end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process and all that it has started."""
        kill_group(self._process)
        self._process.wait()


def serve(checks: Any) -> None:
    """Follow the orders on standard input until it ends, with the methods of `checks`. Standard output is for answers:
    what else prints, prints to stderr."""
    die_with_parent(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for order in _orders():
        try:
            findings = getattr(checks, order["order"])(**order["arguments"])
            if isinstance(findings, Awaitable):
                findings = loop.run_until_complete(findings)
            answer = {"found": [asdict(finding) for finding in findings] if isinstance(findings, list) else findings}
        except UserError as error:
            answer = {"error": str(error)}
        except Exception as error:  # whatever went wrong is what this check has found
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(answer), file=answers, flush=True)


def _orders() -> Iterator[dict[str, Any]]:
    """The lines of standard input. Of several ranks, rank 0 alone reads it, and the others hear from rank 0."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield from map(json.loads, sys.stdin)
        return
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(days=1))
    for number in itertools.count():
        if os.environ["RANK"] == "0":
            store.set(f"selftest/{number}", sys.stdin.readline())
        line = store.get(f"selftest/{number}")
        if not line:
            return
        yield json.loads(line)
