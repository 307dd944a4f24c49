"""Programs per second in the sandbox, against bare processes that nothing holds.

    python tests/benchmarks/sandbox.py --json sandbox.json

Both run the same programs on the same interpreter, two at a time, one contestant after the other in every round. A bare
process gets stdin, stdout and stderr as pipes and the sandbox's environment, and has no limit at all. The asserts are
judged by the reward, which takes a sandbox and a second process; bare they are part of the program.

`ratio` is the sandbox's programs/s over the bare ones', for a Python program that reads stdin and prints.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from results import ratio, show, write

from areal.config.scoring import SandboxConfig
from areal.extensions.programs.code_tests import CodeTests
from areal.extensions.programs.inside import ENVIRONMENT
from areal.extensions.programs.outside import LANGUAGES, LocalSandbox

AT_ONCE = 2
PYTHON = "print(sum(map(int, input().split())))"
BASH = "read a b; echo $((a + b))"
FUNCTION = "def add(a, b):\n    return a + b\n"
ASSERTS = [f"assert add({i}, 1) == {i + 1}" for i in range(10)]

Program = Callable[[], Awaitable[None]]


def sandboxed(sandbox: LocalSandbox, code: str, language: str) -> Program:
    async def run() -> None:
        outcome = await sandbox.run(code, language, stdin="40 2\n")
        assert outcome.stdout == "42\n"

    return run


def judged(reward: CodeTests) -> Program:
    async def run() -> None:
        score, _ = await reward.score("", FUNCTION, {"test_list": ASSERTS})
        assert score == 1.0

    return run


def bare(folder: Path, code: str, language: str) -> Program:
    spoken = LANGUAGES[language]

    async def run() -> None:
        (folder / spoken.file).write_text(code)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(*spoken.command, cwd=folder, env=ENVIRONMENT, **pipes)
        await process.communicate(b"40 2\n")
        assert process.returncode == 0

    return run


async def rate(program: Program, count: int) -> float:
    """Programs per second."""

    async def some() -> None:
        for _ in range(count // AT_ONCE):
            await program()

    started = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - started)


async def measure(rounds: int, count: int) -> dict[str, tuple[list[float], list[float]]]:
    """For each kind of program the rates in the sandbox and bare, one a round, after a round that warms up."""
    reward = CodeTests()
    with contextlib.closing(LocalSandbox(SandboxConfig())) as sandbox, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contestants = {
            "Python, stdin": (sandboxed(sandbox, PYTHON, "python"), bare(folder, PYTHON, "python")),
            "Python, 10 asserts": (judged(reward), bare(folder, "\n".join([FUNCTION, *ASSERTS]), "python")),
            "bash, stdin": (sandboxed(sandbox, BASH, "bash"), bare(folder, BASH, "bash")),
        }
        rates = {name: ([], []) for name in contestants}
        for _ in range(rounds + 1):
            for name, pair in contestants.items():
                for result, program in zip(rates[name], pair, strict=True):
                    result.append(await rate(program, count))
    reward.close()
    return {name: (our_rates[1:], other_rates[1:]) for name, (our_rates, other_rates) in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", type=int, default=100, help="in a round, of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one round of two programs: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.programs = 1, 2
    rates = asyncio.run(measure(options.rounds, options.programs))
    ratios = {name: ratio(*pair) for name, pair in rates.items()}
    rows = [
        {
            "of": name,
            "sandbox": median(our_rates),
            "bare": median(other_rates),
            "overhead_ms": 1000 * AT_ONCE * (1 / median(our_rates) - 1 / median(other_rates)),
            "ratio": ratios[name][0],
        }
        for name, (our_rates, other_rates) in rates.items()
    ]
    show(
        f"{options.rounds} rounds of {options.programs} programs, {AT_ONCE} at once",
        ["", "sandbox, programs/s", "bare, programs/s", "overhead, ms", "sandbox / bare"],
        [list(row.values()) for row in rows],
        [],
    )
    value, spread = ratios["Python, stdin"]
    write({"ratio": value, "spread": spread, "rounds": options.rounds, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
