"""Answers a question in a child process with limits of processor time and memory.

Computer algebra can take for ever, or all memory, over ten characters of a language model, even within one operation
that nothing in Python interrupts. Hence each question gets a forked child, and the kernel ends the child at its limits.
"""

import faulthandler
import gc
import os
import resource
import signal
from collections.abc import Callable, Sequence

from areal.base.processes import die_with_parent

# Processor time, not time by the clock: the answer is the same on a busy machine, unless the machine is very busy.
CPU_SECONDS = 1.0
MEMORY_BYTES = 1 << 30
# The longest time of a question by the clock: of a single question, and of one among many, for which nobody waits.
WALL_SECONDS = 5.0
WALL_SECONDS_OF_MANY = 60.0
# A child with this much processor time at the end of WALL_SECONDS has no answer, as if its processor time were used up:
# right answers were never seen to need as much. A child with less says nothing: the machine is too busy.
FAIR_SECONDS = 0.5

_READY = b"ready"


def limited(question: Callable[[], bool]) -> bool | None:
    """Return the answer of the question, asked in a child process; None if the question raises or exceeds a limit.

    The call takes WALL_SECONDS at most. Raises TimeoutError, and ChildProcessError if the child cannot be limited.
    """
    return next(iter(_ask_child([question], WALL_SECONDS)), None)


def all_limited(questions: Sequence[Callable[[], bool]]) -> list[bool | None]:
    """Answer each question as `limited` does. A child answers question after question while it lives, and keeps what
    its libraries have learned; the limit of time holds for each question alone."""
    answers: list[bool | None] = []
    while len(answers) < len(questions):
        answers += _ask_child(questions[len(answers) :], WALL_SECONDS_OF_MANY)
        if len(answers) < len(questions):
            answers.append(None)
    return answers


def _ask_child(questions: Sequence[Callable[[], bool]], wall_seconds: float) -> list[bool]:
    """Return the answers up to the first question that ends the child. wall_seconds: per question, by the clock."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _answer(questions, wall_seconds, writing, parent)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read()
    _, status, usage = os.wait4(child, 0)
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    if is_late and (len(questions) > 1 or usage.ru_utime + usage.ru_stime < FAIR_SECONDS):
        raise TimeoutError(f"a comparison got less than {FAIR_SECONDS} s of the processor in {wall_seconds} s")
    if not output.startswith(_READY):
        raise ChildProcessError("the child process of a comparison did not start")
    return [answer == ord("1") for answer in output.removeprefix(_READY)]


def _answer(questions: Sequence[Callable[[], bool]], wall_seconds: float, pipe: int, parent: int) -> None:
    """Write the answers of the questions, and end this process, whatever happens."""
    try:
        die_with_parent(signal.SIGKILL, parent)
        gc.disable()  # garbage collection would visit, and by that copy, all memory of the parent
        faulthandler.disable()  # a deep enough formula ends the child, which is no news
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        allowed = used + MEMORY_BYTES
        soft_limit = allowed if hard_limit == resource.RLIM_INFINITY else min(allowed, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.write(pipe, _READY)
        for question in questions:
            # By default both signals end the process, even within an operation on large integers.
            for timer, sign, seconds in (
                (signal.ITIMER_PROF, signal.SIGPROF, CPU_SECONDS),
                (signal.ITIMER_REAL, signal.SIGALRM, wall_seconds),
            ):
                signal.signal(sign, signal.SIG_DFL)
                signal.setitimer(timer, seconds)
            os.write(pipe, b"1" if question() else b"0")
    finally:
        os._exit(0)
