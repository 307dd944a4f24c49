"""The reward `code`: runs a row's tests on the program in a completion, in a sandbox.

`areal.extensions.programs.code_rows` reads the tests. The kinds of tests and their runs:

* Outputs: a run for each test. The program reads stdin; its output is compared outside the sandbox.
* Calls: `call_runner.py` calls the program's function; the results are compared outside the sandbox.
* Asserts: `tests_runner.py` runs them, outside in a process that the program cannot reach, or inside.
"""

import ast
import asyncio
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from areal.config.scoring import SandboxConfig
from areal.extensions.programs.code_rows import (
    LANGUAGES,
    Asserts,
    Calls,
    Outputs,
    Tests,
    is_python,
    read_tests,
    solutions_of,
)
from areal.extensions.programs.outside import open_sandbox
from areal.rewards.functions import RewardError, passing

Way = Literal["outside", "inside"]

_FENCE = re.compile(r"`{3,}|^~{3,}", re.MULTILINE)
_LABEL = re.compile(r"[ \t]*([\w+#-]*)")
# The search for the end of Python: the most ends of a block that are tried, and characters parsed in all.
_MOST_ENDS, _MOST_CHARACTERS = 64, 1 << 18
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
# The number of facts about rows that are remembered.
_KEPT_FACTS = 4096
# Outcomes after which the remaining tests are skipped: the next test would most likely take as long again.
_GIVE_UP = {"timeout", "memory", "output", "not_compiled"}
# Modules that run tests in the sandbox, and are not imported here.
_SOURCES = {
    name: Path(__file__).with_name(name).read_bytes() for name in ("tests_runner.py", "call_runner.py", "plain_data.py")
}
# Reasons to refuse a row: the solutions do not pass, or the tests need to run inside.
FAILS = "the row's own solution does not pass them so"
REFUSED_OUTSIDE = "the row's tests cannot be judged outside the program"
# CPU time of a program that computes nothing, and of the tests.
_TRIVIAL_SECONDS = 1.0
# The largest error of a number, relative to the right number, and in any case: the noise of sums that are 0.
_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = 1e-6, 1e-12
_FEW_DECIMALS = 6
_NUMBER = re.compile(r"[+-]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})(e[+-]?\d{1,3})?", re.IGNORECASE)


class CodeTests:
    """1.0 if the program in a completion passes all tests of its row, else 0.0. Part `passed`: the share of passed
    tests. Part `inside`: 1.0 if the tests ran beside the program, which can forge the verdict.

    Options are the fields of SandboxConfig, and refuse_weak: refuse a row if a program that computes nothing passes its
    tests. Before a program is judged, the row's own solutions, or else the needs of the tests, show whether and how the
    row can be judged. After this check there is a score, whatever the program does.
    """

    concurrent = False  # a call has the cores that its programs need

    def __init__(self, refuse_weak: bool = False, **options: Any) -> None:
        """Raises UserError if programs cannot be run safely."""
        self._config = SandboxConfig(**options)
        self._refuse_weak = refuse_weak
        self._facts: dict[bytes, str | None] = {}
        self._sandbox = open_sandbox(self._config)
        self._runner = _SOURCES if self._config.url else {}  # a sandbox on this machine has the sources

    def close(self) -> None:
        self._sandbox.close()

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the score and its parts. Raises RewardError before the program is run if the row cannot be judged, and
        SandboxError if the sandbox fails; neither counts as a score."""
        tests = read_tests(row)
        way = await self.way(row)
        if self._refuse_weak and (weakness := await self.weakness(row)):
            raise RewardError(f"the row's tests are weak: a program in which {weakness} passes them")
        results = await self._results(program_in(completion, tests.language), tests, way)
        inside = {"inside": 1.0} if way == "inside" else {}
        return float(all(results)), {"passed": sum(results) / len(results), **inside}

    async def way(self, row: Mapping[str, Any]) -> Way:
        """Return where the row's tests run: outside the program, or inside, beside it. Raises RewardError."""
        tests = read_tests(row)
        if not isinstance(tests, Asserts):
            return "outside"
        programs = [program_in(solution) for solution in solutions_of(row)]
        programs = [program for program in programs if is_python(_whole(program, tests))]
        outside = await self._once(self._hindrance, "outside", tests, *programs)
        if outside is None:
            return "outside"
        if self._config.tests == "outside":
            raise RewardError(
                f"{REFUSED_OUTSIDE}: {outside}: remove the row, or set "
                f"sandbox.tests=inside_where_needed (areal docs sandbox)"
            )
        if inside := await self._once(self._hindrance, "inside", tests, *programs):
            raise RewardError(f"the row's tests cannot be judged: {inside}")
        return "inside"

    async def weakness(self, row: Mapping[str, Any]) -> str | None:
        """Describe a program that passes the row's tests and computes nothing, or return None. Raises RewardError."""
        return await self._once(self._weakness, await self.way(row), read_tests(row))

    async def _once(
        self, find: Callable[[Way, Any, Sequence[str]], Awaitable[str | None]], way: Way, tests: Tests, *programs: str
    ) -> str | None:
        """Return a remembered fact about tests, or find it by `_hindrance` or `_weakness`."""
        key = sha256(f"{find.__name__} {way} {tests!r} {programs!r}".encode(errors="replace")).digest()
        if key not in self._facts:
            self._facts[key] = await find(way, tests, programs)
            while len(self._facts) > _KEPT_FACTS:
                del self._facts[next(iter(self._facts))]
        return self._facts[key]

    async def _hindrance(self, way: Way, tests: Asserts, programs: Sequence[str]) -> str | None:
        """Return why right programs would not pass the tests in this way, or None. programs: the row's solutions."""
        needs = tests.needs.unsafe or (None if programs else tests.needs.beyond)
        if way == "outside" and needs:
            return f"they need {needs}"
        reasons: list[str] = []
        for program in programs or [next(iter(tests.trivial_programs().values()))]:
            passed = all(await self._results(program, tests, way, reasons))
            if passed or not (programs or reasons):
                return None
        use = f"; they use {tests.needs.beyond}" if tests.needs.beyond else ""
        return reasons[0] if reasons else f"{FAILS}{use}"

    async def _weakness(self, way: Way, tests: Tests, _: Sequence[str]) -> str | None:
        async def score(program: str) -> float:
            return float(all(await self._results(program, tests, way, trivial=True)))

        return await passing(tests.trivial_programs(), score)

    async def _results(
        self, code: str, tests: Tests, way: Way, reasons: list[str] | None = None, trivial: bool = False
    ) -> list[bool]:
        """Return whether the program passes each test. reasons: gets the reasons why tests cannot be run. trivial: the
        program computes nothing, so its time is short, and the first failed test is the last."""
        results = [False] * len(tests)
        reasons = [] if reasons is None else reasons
        try:
            async with asyncio.timeout(self._config.wall_seconds):
                match tests:
                    case Outputs():
                        await self._run_outputs(code, tests, results, trivial)
                    case Calls():
                        await self._run_calls(code, tests, results)
                    case Asserts():
                        lines = await self._run_asserts(code, tests, way, trivial)
                        results[:], reason = _verdict(lines, len(results))
                        reasons += filter(None, [reason])
        except TimeoutError:
            reasons.append("they take longer than a program may")
        return results

    async def _run_outputs(self, code: str, tests: Outputs, results: list[bool], trivial: bool) -> None:
        for i, (stdin, expected) in enumerate(tests.pairs):
            outcome = await self._sandbox.run(code, tests.language, stdin=stdin, expected=len(expected.encode()))
            results[i] = outcome.succeeded and same_output(outcome.stdout, expected)
            if outcome.status in _GIVE_UP or (trivial and not results[i]):
                break

    async def _run_calls(self, code: str, tests: Calls, results: list[bool]) -> None:
        """Make all calls in one run. If a limit ends the run after some answers, the other calls get another run."""
        files = {"program.py": code.encode(errors="replace"), **self._runner}
        main = "import call_runner\ncall_runner.main()\n"
        job = json.dumps({"function": tests.function, "int_keys": tests.int_keys})
        calls = [json.dumps(arguments) for arguments in tests.arguments]
        position = 0
        while position < len(tests):
            size = len(json.dumps(tests.expected[position:]))
            stdin = "\n".join([job, *calls[position:]])
            outcome = await self._sandbox.run(main, stdin=stdin, files=files, expected=size)
            answers = outcome.stdout.split("\n")[:-1][: len(tests) - position]
            if not answers:
                break
            for answer in answers:
                results[position] = any(same_result(answer, expected) for expected in tests.expected[position])
                position += 1

    async def _run_asserts(self, code: str, tests: Asserts, way: Way, trivial: bool) -> list[list[str]]:
        """Return the words of each line of the verdict (tests_runner.py). All tests are in one run. The program and,
        outside it, the tests may each use `cpu_seconds`."""
        seconds = min(self._config.cpu_seconds, _TRIVIAL_SECONDS if trivial else math.inf)
        nonce = secrets.token_hex(16)
        job = {
            "nonce": nonce,
            "names": tests.needs.names,
            "prepare": tests.prepare,
            "tests": tests.tests,
            "candidate": tests.candidate,
            "pytest": tests.pytest_style,
            "to_the_end": not trivial,
        }
        files = {"program.py": _whole(code, tests).encode(errors="replace"), **self._runner}
        main = f"import tests_runner\ntests_runner.main({way == 'outside'}, {seconds})\n"
        outcome = await self._sandbox.run(main, stdin=json.dumps(job), files=files, cpu_seconds=2 * seconds)
        lines = [line.split(" ", 2)[1:] for line in outcome.stdout.split("\n") if line.startswith(f"{nonce} ")]
        return lines if outcome.status != "timeout" else [*lines, ["unusable", "they take longer than a program may"]]


def _verdict(lines: Sequence[Sequence[str]], count: int) -> tuple[list[bool], str | None]:
    """Return which tests passed, and why the tests cannot be run, or None. count: the default number of tests."""
    words = {line[0]: line[1] for line in reversed(lines) if len(line) == 2}
    count = int(words.get("tests", count))
    if count == 0:
        return [False], "no test is collected from them"
    return [words.get(str(i)) == "1" for i in range(count)], words.get("unusable")


def _whole(code: str, tests: Asserts) -> str:
    """Return the program, after the row's prompt if the tests need the prompt."""
    return continued(tests.prompt, code, tests.candidate) if tests.prompt and tests.candidate else code


def program_in(completion: str, language: str = "python") -> str:
    """Return the last fenced block of `language`, else the last block without a language, else the whole completion.

    >>> program_in("So:\\n```python\\nprint(3)\\n```")
    'print(3)\\n'
    """
    blocks = list(_blocks(completion))
    named = [code for label, code in blocks if label in LANGUAGES.get(language, {language})]
    unnamed = [code for label, code in blocks if not label]
    return (named or unnamed or [completion])[-1]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the label and the content of each fenced block. A fence of the same marks (``` or ~~~), at least as long as
    the first, ends a block: of Python, the first fence after valid Python, because programs have fences in their texts;
    else the first fence alone on a line, or the first at all. The opening fence's indent is removed from the lines."""
    fences = [(match.start(), match.end()) for match in _FENCE.finditer(text)]
    budget = _MOST_CHARACTERS
    position = 0
    for index, (fence_start, fence_end) in enumerate(fences):
        line_end = text.find("\n", fence_end)
        if line_end < 0:
            return
        if fence_end <= position:
            continue
        match = _LABEL.match(text, fence_end)
        label = match[1].lower() if match else ""
        later = fences[index + 1 : index + 1 + _MOST_ENDS]
        ends = [fence for fence in later if fence[0] > line_end and text[fence[0]] == text[fence_start]]
        ends = [(start, end) for start, end in ends if end - start >= fence_end - fence_start] or ends
        indent = text[text.rfind("\n", 0, fence_start) + 1 : fence_start]
        closing = None
        if not label or label in LANGUAGES["python"]:
            for end in ends:
                budget -= end[0] - line_end
                if budget < 0:
                    break
                if is_python(_unindented(text[line_end + 1 : end[0]], indent)):
                    closing = end
                    break
        closing = closing or next((end for end in ends if _is_alone(text, *end)), ends[0] if ends else None)
        start, position = closing or (len(text), len(text))
        yield label, _unindented(text[line_end + 1 : start], indent)


def _unindented(code: str, indent: str) -> str:
    return code if indent.strip() else "\n".join(line.removeprefix(indent) for line in code.split("\n"))


def _is_alone(text: str, start: int, end: int) -> bool:
    line_end = text.find("\n", end)
    prefix = text[text.rfind("\n", 0, start) + 1 : start]
    return not prefix.strip() and not text[end : line_end if line_end >= 0 else len(text)].strip()


def continued(prompt: str, code: str, function: str) -> str:
    """Return the prompt, followed by the code. Code that does not define `function` counts as the function's body with
    definitions after it. If anything else follows, the code is cut at the first unindented line."""
    if re.search(rf"^(?:async )?def {re.escape(function)}\b", code, re.MULTILINE):
        return f"{prompt}\n\n{code}"
    if is_python(prompt + code) and all(isinstance(node, _DEFINITIONS) for node in ast.parse(prompt + code).body):
        return prompt + code
    lines = code.split("\n")
    # The first line may lack the indent, because the prompt may end with it.
    end = next((i for i, line in enumerate(lines) if i and line.strip() and not line[0].isspace()), len(lines))
    return prompt + "\n".join(lines[:end]) + "\n"


def same_output(printed: str, expected: str) -> bool:
    """Return whether the texts have the same lines, up to white space around the text and around a line. A line also
    passes if its words are equal or close numbers (`_same_word`), and the space between them is equal or all are
    numbers.

    >>> same_output("0.3333333\\n", "0.33333334")
    True
    """
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    return len(printed_lines) == len(expected_lines) and all(map(_same_line, printed_lines, expected_lines))


def same_result(answer: str, expected: Any) -> bool:
    """Return whether the text is the JSON of `expected`, with close numbers. False if the comparison raises."""
    try:
        return _same_value(json.loads(answer), expected)
    except (ArithmeticError, ValueError, RecursionError):
        return False


def _same_value(value: Any, expected: Any) -> bool:
    match value, expected:
        case list(), list():
            return len(value) == len(expected) and all(map(_same_value, value, expected))
        case dict(), dict():
            return value.keys() == expected.keys() and all(_same_value(value[key], expected[key]) for key in expected)
        case float(), float() if math.isnan(value) and math.isnan(expected):
            return True
        case int() | float(), float():
            return value == expected or math.isclose(
                value, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE
            )
    return bool(value == expected)


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    # Words, and the white space between them.
    words, expected_words = re.split(r"(\s+)", line), re.split(r"(\s+)", expected)
    if len(words) != len(expected_words) or not all(map(_same_word, words[::2], expected_words[::2])):
        return False
    return words[1::2] == expected_words[1::2] or all(_number(word) is not None for word in expected_words[::2])


def _same_word(word: str, expected: str) -> bool:
    """Return whether the words are equal, up to a point and zeros behind an integer. A number with decimals may be off
    by a millionth, and by at most one in the last decimal if there are fewer than six."""
    if word == expected or (expected.lstrip("+-").isdecimal() and re.fullmatch(rf"{re.escape(expected)}\.0*", word)):
        return True
    number, expected_number = _number(word), _number(expected)
    if number is None or expected_number is None:
        return False
    decimals = -int(expected_number.as_tuple().exponent)
    if decimals <= 0 and "." not in expected:
        return False
    difference = abs(float(number) - float(expected_number))
    allowed = abs(float(expected_number)) * _RELATIVE_TOLERANCE
    if decimals < _FEW_DECIMALS:
        allowed = min(allowed, 10**-decimals)
    return difference <= max(allowed, _ABSOLUTE_TOLERANCE)


def _number(word: str) -> Decimal | None:
    """Return the number in a word, if a float can be as large, else None."""
    number = Decimal(word) if _NUMBER.fullmatch(word) else Decimal("nan")
    return number if math.isfinite(float(number)) else None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]
