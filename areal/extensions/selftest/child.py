"""A part of the self-test in a process of its own: orders go in and findings come out, each as a line of JSON.

Two engines in one process disturb each other, and a crash or a hang ends only the checks of its own process.
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
"""How many lines of a dead process's output a finding shows."""
LOG_LINES = 400
"""How many lines of a failed check's output selftest.json keeps."""
END_SECONDS = 10.0


class ChildFailed(Exception):
    """The process died, was late, or could not follow its order: the message says why. The process is killed."""


class ChildSlow(ChildFailed):
    """The process did not answer in time."""


class ChildGone(Exception):
    """An earlier order to the process failed, so the process is gone and this order was not tried."""


class CheckProcess:
    """The parent's end of a process in which `serve` runs."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the process. log: the file for its output."""
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
        """Return the answer of the method `order`. deadline: of time.monotonic. Raises ChildFailed, ChildGone."""
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
        assert self._process.stdin is not None and self._process.stdout is not None  # both are pipes
        try:
            self._process.stdin.write(json.dumps({"order": order, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildFailed(f"its process has died: {self.last_words}") from None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise ChildSlow(f"no answer within {seconds:.0f} s: {self.last_words}")
        if not (line := self._process.stdout.readline()):  # an answer is a single line, written at once
            raise ChildFailed(f"its process has died: {self.last_words}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer["found"]

    @property
    def last_words(self) -> str:
        """The end of the process's output."""
        return "\n".join(self.last_lines(LINES)) or "it printed nothing"

    def last_lines(self, count: int) -> list[str]:
        """Return the last `count` lines of the process's output, without empty lines."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-count:]

    def close(self) -> None:
        """Close the process's input, wait until the process ends, and kill the rest."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the process and the processes started by it."""
        kill_group(self._process)
        self._process.wait()


def serve(checks: Any) -> None:
    """Follow the orders on standard input until the input ends. An order is the name of a method of `checks`. Standard
    output carries the answers only: all other output goes to stderr."""
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
        except Exception as error:  # any failure of a check is a result
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(answer), file=answers, flush=True)


def _orders() -> Iterator[dict[str, Any]]:
    """Yield the lines of standard input. Only rank 0 reads the input; it passes each line on to the other ranks."""
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
