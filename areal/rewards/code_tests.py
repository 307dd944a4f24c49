"""The reward `code`: runs a row's tests on the program in a completion, in a sandbox.

`areal.rewards.code_rows` reads the tests. How each kind is run:

* Outputs: once per test. The program reads stdin; what it prints is compared outside the sandbox.
* Calls: `areal.rewards.call_runner` calls the program's function; the results are compared outside the sandbox.
* Asserts: `areal.rewards.assert_runner` runs them in a process that the program cannot reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal.config import SandboxConfig
from areal.rewards.code_rows import LANGUAGES, Asserts, Calls, Outputs, read_tests
from areal.rewards.result import RewardError
from areal.sandbox.outside import open_sandbox

_BLOCK = re.compile(r"```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Outcomes after which the remaining tests are skipped: the next test would most likely take as long again.
_GIVE_UP = {"timeout", "memory", "output", "not_compiled"}
# What runs in the sandbox, and is not imported here.
_ASSERTER, _CALLER, _OBJECTS, _PYTEST = (
    Path(__file__).with_name(f"{name}.py").read_text()
    for name in ("assert_runner", "call_runner", "remote_objects", "pytest_standin")
)
# How far a number may be from the right one, where that is written with a decimal point.
_TOLERANCE = 1e-6


class CodeTests:
    """1.0 if the program in a completion passes all tests of its row, else 0.0. Part `passed`: the share it passes.

    Options are the fields of SandboxConfig.
    """

    def __init__(self, **options: Any) -> None:
        """Raises UserError if programs cannot be run safely."""
        config = SandboxConfig(**options)
        self._seconds = config.wall_seconds
        self._sandbox = open_sandbox(config)

    def close(self) -> None:
        self._sandbox.close()

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """The score and its parts. Raises RewardError if the row has no usable tests, and SandboxError if the sandbox
        fails; neither counts as a score."""
        tests = read_tests(row)
        code = program_in(completion, tests.language)
        if isinstance(tests, Asserts):
            if tests.prompt and tests.candidate:
                code = continued(tests.prompt, code, tests.candidate)
            results = await self._run_asserts(code, tests)
        else:
            results = [False] * len(tests)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    if isinstance(tests, Outputs):
                        await self._run_outputs(code, tests, results)
                    else:
                        await self._run_calls(code, tests, results)
        return float(all(results)), {"passed": sum(results) / len(results)}

    async def _run_outputs(self, code: str, tests: Outputs, results: list[bool]) -> None:
        for i, (given, wanted) in enumerate(tests.pairs):
            outcome = await self._sandbox.run(code, tests.language, stdin=given)
            results[i] = outcome.succeeded and same_output(outcome.stdout, wanted)
            if outcome.status in _GIVE_UP:
                break

    async def _run_calls(self, code: str, tests: Calls, results: list[bool]) -> None:
        """All calls in one run. If a limit ends it after some answers, the other calls get another run: so each call
        may take as much as a program."""
        files = {"program.py": code.encode(errors="replace")}
        job = json.dumps({"function": tests.function, "int_keys": tests.int_keys})
        calls = [json.dumps(arguments) for arguments in tests.arguments]
        done = 0
        while done < len(tests):
            outcome = await self._sandbox.run(_CALLER, stdin="\n".join([job, *calls[done:]]), files=files)
            answers = outcome.stdout.split("\n")[:-1][: len(tests) - done]
            if not answers:
                break
            for answer in answers:
                results[done] = any(same_result(answer, wanted) for wanted in tests.wanted[done])
                done += 1

    async def _run_asserts(self, code: str, tests: Asserts) -> list[bool]:
        nonce = secrets.token_hex(16)
        job = {
            "nonce": nonce,
            "names": tests.needs.names,
            "modules": tests.needs.modules,
            "prepare": tests.prepare,
            "tests": tests.tests,
            "candidate": tests.candidate,
            "collect": tests.pytest_style,
            "pytest": _PYTEST if tests.pytest_style or "pytest" in tests.needs.modules else None,
        }
        files = {"program.py": code.encode(errors="replace"), "remote_objects.py": _OBJECTS.encode()}
        outcome = await self._sandbox.run(_ASSERTER, stdin=json.dumps(job), files=files)
        told = {tuple(line.split(" ", 2)[1:]) for line in outcome.stdout.split("\n") if line.startswith(f"{nonce} ")}
        said = dict(pair for pair in told if len(pair) == 2)
        if reason := said.get("unusable"):
            raise RewardError(f"the row's tests cannot be run: {reason}")
        if said.get("tests") == "0":
            raise RewardError("the row's tests are none: no test is collected from them")
        count = int(said.get("tests", len(tests.tests) or 1))
        return [said.get(str(i)) == "1" for i in range(count)]


def program_in(completion: str, language: str = "python") -> str:
    """The last fenced block of `language`; without one, the last block that names no language; without that, the whole
    completion."""
    blocks = [(fence.lower(), code) for fence, code in _BLOCK.findall(completion)]
    named = [code for fence, code in blocks if fence in LANGUAGES.get(language, {language})]
    unnamed = [code for fence, code in blocks if not fence]
    return (named or unnamed or [completion])[-1]


def continued(prompt: str, code: str, function: str) -> str:
    """The prompt, followed by the code. Code that does not define `function` is taken as its body, up to the first
    unindented line."""
    if re.search(rf"^(?:async )?def {re.escape(function)}\b", code, re.MULTILINE):
        return f"{prompt}\n\n{code}"
    lines = code.split("\n")
    # The first line may lack its indent, because the prompt may end with it.
    end = next((i for i, line in enumerate(lines) if i and line.strip() and not line[0].isspace()), len(lines))
    return prompt + "\n".join(lines[:end]) + "\n"


def same_output(printed: str, wanted: str) -> bool:
    """True if the lines agree word by word. White space around the text is ignored, and how much of it separates words.
    A word of `wanted` with a decimal point also agrees with a number within 1e-6 of it, relative or absolute."""
    given, expected = _lines(printed), _lines(wanted)
    return given == expected or (
        len(given) == len(expected)
        and all(_same_line(one.split(), other.split()) for one, other in zip(given, expected, strict=True))
    )


def same_result(answer: str, wanted: Any) -> bool:
    """True if the text is the JSON of `wanted`; a float in `wanted` also agrees with a number within 1e-6 of it."""
    try:
        return _same_value(json.loads(answer), wanted)
    except (ValueError, RecursionError):
        return False


def _same_value(given: Any, wanted: Any) -> bool:
    match given, wanted:
        case list(), list():
            return len(given) == len(wanted) and all(map(_same_value, given, wanted))
        case dict(), dict():
            return given.keys() == wanted.keys() and all(_same_value(given[key], wanted[key]) for key in wanted)
        case int() | float(), float():
            return given == wanted or math.isclose(given, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(given == wanted)


def _same_line(given: list[str], wanted: list[str]) -> bool:
    return len(given) == len(wanted) and all(
        one == other or ("." in other and _close(one, other)) for one, other in zip(given, wanted, strict=True)
    )


def _close(given: str, wanted: str) -> bool:
    try:
        return math.isclose(float(given), float(wanted), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
