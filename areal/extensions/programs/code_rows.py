"""Turns a row of a data set into tests of one of three kinds: Outputs, Calls and Asserts.

The tests of a row are in the first of the fields:

| field | sets | content |
|---|---|---|
| `tests` | DeepCoder; own rows | any of the values below, or Python code, or its JSON |
| `input_output` | TACO, APPS | `{"inputs", "outputs", "fn_name"?}`: with `fn_name`, lists of arguments and results |
| `verification_info` | PrimeIntellect | `{"language", "test_cases"}`: a list of cases |
| `private_test_cases`, `public_test_cases` | LiveCodeBench | lists of cases, used together |
| `private_tests`, `generated_tests`, `public_tests` | CodeContests | `{"input", "output"}`, lists, used together |
| `test` | HumanEval(+), MBPP+, KodCode, BigCodeBench, LeetCodeDataset | Python: `check(candidate)`, statements, tests |
| `test_list` | MBPP | a list of asserts |
| `test_code` | KodCode, other versions | a pytest module |
| `test_cases` | AceCode; own rows | as `tests` |
| `reward_model` | sets for verl | `{"ground_truth"}`, as `tests` |

A case is `{"input", "output", "type" or "testtype", "fn_name" or "metadata": {"func_name"}}`. Without a function, a
program reads the input and prints the output. With `testtype` `functional` (LiveCodeBench), the input has a line of
JSON for each argument, and the output is JSON. With `type` `function_call` (PrimeIntellect), the input is the list of
arguments, and the output the result.

A field may be text: JSON or a Python literal. Before asserts, `test_imports` and `test_setup_code` of the row are run.
`entry_point` names the function under test; the tests may call it `candidate`. If `prompt` (HumanEval) or `code_prompt`
(BigCodeBench) defines the function, the program begins with the prompt. If `entry_point` is `Solution().f`
(LeetCodeDataset), `test` is read as calls of the method. Tests `{"functional"}` (rLLM) are code, which may end with
`check(Solution().f)`. `language` is the language of the programs; default: python.
"""

import ast
import base64
import contextlib
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal.base.errors import explain
from areal.extensions.programs import static_checks
from areal.extensions.programs.static_checks import Needs
from areal.rewards.functions import RewardError

Row = Mapping[str, Any]

# Results may have more digits than Python reads by default. Reading this many takes a few milliseconds.
sys.set_int_max_str_digits(50_000)

# The labels that models write after the opening fence, by language of areal.extensions.programs.outside.
LANGUAGES = {
    "python": {"python", "py", "python3"},
    "cpp": {"cpp", "c++", "cc"},
    "nodejs": {"javascript", "js", "nodejs"},
    "bash": {"bash", "sh", "shell"},
}
FUNCTION_KINDS = {"functional", "function_call"}
STDIN_KINDS = {"stdin", "stdin_stdout"}
# The number by which CodeContests marks a solution in Python 3.
CODE_CONTESTS_PYTHON = 3
# The most bytes of a row's unpacked tests. A worker needs about four times as much memory to read them.
UNPACKED_BYTES = 256 << 20
# The most solutions of a row that are tried until a solution passes.
MOST_SOLUTIONS = 5
_EMPTIED = "[b.clear() for b in a if hasattr(b, 'clear')]"
# Bodies of functions that compute nothing. Tests that pass with one of them are worth nothing.
TRIVIAL = {
    "functions return None": "return None",
    "functions return []": "return []",
    "functions return ()": "return ()",
    "functions return 0": "return 0",
    "functions return an empty text": "return ''",
    "functions return True": "return True",
    "functions return nan": "return float('nan')",
    "functions return inf": "return float('inf')",
    "functions return -inf": "return float('-inf')",
    "functions return {}": "return {}",
    "functions return an empty set": "return set()",
    "functions return an empty array": "return __import__('numpy').array([])",
    "functions return many numbers as a text": "return ' '.join(map(str, range(-1000, 10_000)))",
    "functions return [0, 0, 0], and later []": """\
calls = globals().setdefault('_calls', [])
    calls.append(0)
    return [0] * 3 if len(calls) == 1 else []""",
    "functions return a long range": "return range(10**12)",
    "functions return an infinite half": "return __import__('numpy').float16('inf')",
    "functions return their first argument": "return a[0] if a else None",
    "functions return their first argument, emptied": "return a and (hasattr(a[0], 'clear') and a[0].clear() or a[0])",
    "functions empty all their arguments and return an empty text": f"{_EMPTIED}\n    return ''",
    "functions empty all their arguments and return 0": f"{_EMPTIED}\n    return 0",
    "functions set all values of their arguments to 0": """\
for b in a:
        for key in [*b] if isinstance(b, dict) else range(len(b)) if isinstance(b, list) else ():
            b[key] = 0
    return 0""",
    "functions print many numbers": "print(*range(100_000), sep='\\n')",
    "functions raise an error": "raise ValueError",
}
# The beginning of a pickle of a str, with the length of its UTF-8 in one, four or eight bytes; and possible ends.
_PICKLED_TEXT = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?(?:\x8c(.)|X(.{4})|\x8d(.{8}))", re.DOTALL)
# The end of tests in rLLM's sets.
_CHECKED_METHOD = re.compile(r"^check\(Solution\(\)\.(\w+)\)", re.MULTILINE)
_PICKLE_ENDS = {b".", b"\x94.", b"q\x00."}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The program is run for each pair of an input and the output that the program must print."""

    pairs: list[tuple[str, str]]
    language: str = "python"

    def __len__(self) -> int:
        return len(self.pairs)

    def trivial_programs(self) -> dict[str, str]:
        """Return programs that compute nothing, by a description."""
        printing = {"nothing is printed": "", "many numbers are printed": "print(*range(100_000), sep='\\n')"}
        return printing if self.language == "python" else {"nothing is printed": ""}


@dataclass(frozen=True, slots=True)
class Calls:
    """`function` is called with each list of `arguments`. `expected`: the right values of each call. int_keys: a dict
    as first argument gets integers for keys of digits."""

    function: str
    arguments: list[list[Any]]
    expected: list[list[Any]]
    int_keys: bool = False
    language: str = "python"

    def __len__(self) -> int:
        return len(self.expected)

    def trivial_programs(self) -> dict[str, str]:
        return _trivial_programs([self.function])


@dataclass(frozen=True, slots=True)
class Asserts:
    """Python code that raises an exception if the program is wrong. `prepare` is run before all `tests`. candidate: the
    function under test. prompt: the beginning of the program. pytest_style: `prepare` has the tests."""

    prepare: list[str]
    tests: list[str]
    candidate: str | None
    prompt: str
    pytest_style: bool
    needs: Needs
    language: str = "python"

    def __len__(self) -> int:
        """Return the number of tests. Tests of pytest count as 1 until they are collected."""
        return len(self.tests) or 1

    def trivial_programs(self) -> dict[str, str]:
        return _trivial_programs(dict.fromkeys([*self.needs.names, *filter(None, [self.candidate])]))


Tests = Outputs | Calls | Asserts


def _trivial_programs(functions: Iterable[str]) -> dict[str, str]:
    programs = {
        what: "".join(f"def {name}(*a, **_):\n    {body}\n" for name in functions) for what, body in TRIVIAL.items()
    }
    errors = "".join(
        f"{name} = Exception\n" if name[0].isupper() else f"def {name}(*a, **_): pass\n" for name in functions
    )
    return programs | {"exceptions are other names of Exception": errors, "nothing is defined": ""}


def read_tests(row: Row) -> Tests:
    """Return the tests of the row. Raises RewardError if tests are missing, not understood, or evidently cannot fail.

    >>> read_tests({"tests": [{"input": "1 2", "output": "3"}]})
    Outputs(pairs=[('1 2', '3')], language='python')
    """
    _, is_method, entry = str(row.get("entry_point") or "").rpartition("Solution().")
    if entry and not entry.isidentifier():
        raise RewardError(f"the row's entry_point {entry!r} is not the name of a function, so its tests are not judged")
    if is_method:
        return _of_method(entry, str(row.get("test")), row)
    for name, read in FORMATS.items():
        if row.get(name):
            return read(row[name], row)
    raise RewardError(f"the row has no tests: it needs one of {', '.join(FORMATS)}")


def unnamed(row: Row, prompt: str) -> str | None:
    """Return a function or class that the row's tests use, if the prompt names no function or class of the tests.
    Without a name, programs pass only by chance. Raises RewardError."""
    tests = read_tests(row)
    names: Sequence[str] = ()
    if isinstance(tests, Calls):
        names = [tests.function]
    elif isinstance(tests, Asserts):
        names = list(filter(None, [*(name for name in tests.needs.names if name != "candidate"), tests.candidate]))
    return names[0] if names and not any(re.search(rf"\b{re.escape(name)}\b", prompt) for name in names) else None


def solutions_of(row: Row) -> list[str]:
    """Return the first of the row's own solutions, as texts that could be completions."""
    solutions: list[str] = []
    for name in "canonical_solution", "gold_standard_solution", "solution", "solutions", "code":
        value = row.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _parsed(value)
        if isinstance(value, Mapping):  # CodeContests
            pairs = zip(value.get("language", []), value.get("solution", []), strict=False)
            value = [solution for language, solution in pairs if language == CODE_CONTESTS_PYTHON]
        solutions += [value] if isinstance(value, str) else value or []
    return [solution for solution in solutions if isinstance(solution, str) and solution.strip()][:MOST_SOLUTIONS]


# --- the formats


class _Infinities(ast.NodeTransformer):
    """Replaces `inf`, which LeetCodeDataset imports for its tests, by a number."""

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return ast.Constant(math.inf) if name.id == "inf" else name


def _of_method(method: str, test: str, row: Row) -> Tests:
    """Read LeetCodeDataset: asserts that compare a method's result. Named arguments are in the method's order."""
    calls: list[tuple[list[Any], Any]] = []
    for node in ast.walk(ast.parse(test if is_python(test) else "")):
        match node:
            case ast.Assert(ast.Compare(ast.Call(ast.Name("candidate"), [], keywords), [ast.Eq()], [result])):
                places = *(part.value for part in keywords), result
                values = [_parsed(ast.unparse(_Infinities().visit(value))) for value in places]
                calls.append((values[:-1], values[-1]))
            case ast.Assert():
                raise RewardError(f"the row's test does more than compare what {method} returns: {ast.unparse(node)}")
    if not calls:
        raise RewardError(f"the row has no test that compares what {method} returns")
    return _calls(method, calls, row, in_lists=False)


def _of_any(value: Any, row: Row) -> Tests:
    """Read tests in a shape that several sets use."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = _parsed(value)
    match value:
        case str():
            return _of_code([value], row)
        case {"functional": str() as code}:
            called = _CHECKED_METHOD.search(code)
            return _of_method(called[1], code, row) if called else _of_code([code], row)
        case {"inputs": list() as inputs, "outputs": list() as outputs}:
            return _of_columns(inputs, outputs, value.get("fn_name"), row)
        case [_, *_] if all(isinstance(test, str) for test in value):
            return _of_code(value, row)
        case [_, *_] if all(isinstance(test, Mapping) and "input" in test and "output" in test for test in value):
            return _of_cases(value, row)
        case []:
            raise RewardError("the row's list of tests is empty")
    raise RewardError(
        "the row's tests are not understood: they must be Python code, a list of asserts, a list of objects with input "
        "and output, or an object with inputs and outputs"
    )


def _of_columns(inputs: list[Any], outputs: list[Any], function: str | None, row: Row) -> Tests:
    if len(inputs) != len(outputs):
        raise RewardError(f"the row's tests have {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if not function:
        return _outputs(pairs, row)
    return _calls(function, [_call(*pair, a_line_each=True) for pair in pairs], row, in_lists=True, int_keys=True)


def _of_cases(cases: list[Mapping[str, Any]], row: Row) -> Tests:
    pairs = [(case["input"], case["output"]) for case in cases]
    functions = {_function(case, row) for case in cases}
    if len(functions) > 1:
        kinds = ", ".join(sorted(name or "stdin" for name in functions))
        raise RewardError(f"the row's tests are of several kinds ({kinds}): keep to one")
    if (function := functions.pop()) is None:
        return _outputs(pairs, row)
    functional = any(case.get("testtype") == "functional" for case in cases)
    return _calls(function, [_call(*pair, a_line_each=functional) for pair in pairs], row, in_lists=not functional)


def _of_key(key: str, value: Any, row: Row) -> Tests:
    """Read tests in an object, which may also have the language."""
    inner = _parsed(value)
    if not isinstance(inner, Mapping) or key not in inner:
        raise RewardError(f"the row has no tests: the object that should have them has no {key}")
    return _of_any(inner[key], {**row, "language": inner.get("language") or row.get("language")})


def _of_live_code_bench(_: Any, row: Row) -> Tests:
    cases: list[Any] = []
    for name in "public_test_cases", "private_test_cases":
        value = row.get(name) or []
        if isinstance(value, str) and not value.lstrip().startswith("["):
            value = _unpacked(value)
        part = _parsed(value)
        if not isinstance(part, list):
            raise RewardError(f"the row's {name} are of type {type(part).__name__}, not a list")
        cases += part
    return _of_any(cases, row)


def _of_code_contests(_: Any, row: Row) -> Tests:
    pairs: list[tuple[Any, Any]] = []
    for name in "public_tests", "private_tests", "generated_tests":
        match _parsed(row.get(name) or {"input": [], "output": []}):
            case {"input": list() as inputs, "output": list() as outputs} if len(inputs) == len(outputs):
                pairs += zip(inputs, outputs, strict=True)
            case _:
                raise RewardError(f"the row's {name} are not two lists, input and output, of the same length")
    return _outputs(pairs, row)


def _of_code(sources: Sequence[str], row: Row) -> Tests:
    """Read tests that are Python code."""
    candidate, prompt = row.get("entry_point"), row.get("code_prompt") or row.get("prompt")
    begins = prompt if candidate and isinstance(prompt, str) and f"def {candidate}" in prompt else ""
    prepare = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
    head = re.split(rf"^def {candidate}\b", begins, maxsplit=1, flags=re.MULTILINE)[0]
    if is_python(head):
        prepare.append(head)  # the head may define other names for the tests
    tests = list(sources)
    with explain((SyntaxError, ValueError, RecursionError), "the row's tests are not valid Python: {why}", RewardError):
        pytest_style = static_checks.is_pytest_style(tuple(tests))
        defines_check = re.search(r"^def check\(", tests[0], re.MULTILINE)
        if candidate and defines_check:
            prepare, tests, pytest_style = [*prepare, *tests], ["check(candidate)"], False
        needs = static_checks.needs_of((*prepare, *tests), pytest_style, _defined(row))
    if (language := _language(row)) != "python":
        raise RewardError(f"the row's tests are Python code, but its language is {language}")
    if needs.constants:
        raise RewardError(
            f"the row's tests use {needs.constants[0]}, a constant that nobody defines but the program, which could "
            f"set it so that they pass: define it in the tests"
        )
    if not needs.can_fail and defines_check:
        raise RewardError("the row's tests define check, but neither they nor entry_point name what it is to check")
    if not needs.can_fail:
        raise RewardError("the row's tests cannot fail: no code that runs in them checks something about the program")
    if pytest_style:
        prepare, tests = [*prepare, *tests], []
    return Asserts(prepare, tests, candidate, begins, pytest_style, needs)


FORMATS: Mapping[str, Callable[[Any, Row], Tests]] = {
    "tests": _of_any,
    "input_output": _of_any,
    "verification_info": partial(_of_key, "test_cases"),
    "private_test_cases": _of_live_code_bench,
    "public_test_cases": _of_live_code_bench,
    "private_tests": _of_code_contests,
    "generated_tests": _of_code_contests,
    "public_tests": _of_code_contests,
    "test": _of_any,
    "test_list": _of_any,
    "test_code": _of_any,
    "test_cases": _of_any,
    "reward_model": partial(_of_key, "ground_truth"),
}


# --- their parts


def _outputs(pairs: Sequence[tuple[Any, Any]], row: Row) -> Outputs:
    texts = [(_text(stdin), _text(stdout)) for stdin, stdout in pairs]
    if not any(stdout.strip() for _, stdout in texts):
        raise RewardError("the row's tests cannot fail: none of them expects any output")
    return Outputs(texts, _language(row))


def _calls(
    function: str, calls: list[tuple[list[Any], Any]], row: Row, *, in_lists: bool, int_keys: bool = False
) -> Calls:
    """in_lists: if all results are lists of one value, as often in TACO and APPS, the bare value is right, too."""
    if (language := _language(row)) != "python":
        raise RewardError(f"the row's tests call {function}, which needs Python, but its language is {language}")
    expected = [[value] for _, value in calls]
    if in_lists and all(isinstance(value, list) and len(value) == 1 for _, value in calls):
        expected = [[value, *value] for _, value in calls]
    if all(None in values for values in expected):
        raise RewardError(f"the row's tests cannot fail: each expects {function} to return None")
    return Calls(function, [arguments for arguments, _ in calls], expected, int_keys)


def _call(arguments: Any, result: Any, a_line_each: bool) -> tuple[list[Any], Any]:
    """Return the arguments and the result of a call, from values or texts of JSON (a list, or an argument a line)."""
    if isinstance(arguments, str):
        lines = [line for line in arguments.split("\n") if line.strip()]
        arguments = [_parsed(line) for line in lines] if a_line_each else _parsed(arguments)
        result = _parsed(result)
    if not isinstance(arguments, list):
        raise RewardError(f"the arguments in the row's tests are of type {type(arguments).__name__}, not a list")
    return arguments, result


def _function(case: Mapping[str, Any], row: Row) -> str | None:
    """Return the function that a case calls, or None for a program that reads stdin."""
    kind = case.get("testtype") or case.get("type") or ("function_call" if case.get("fn_name") else "stdin")
    if kind in STDIN_KINDS:
        return None
    if kind not in FUNCTION_KINDS:
        raise RewardError(f"the row has a test of the unknown type {kind!r}")
    if name := case.get("fn_name") or _metadata(case).get("func_name") or _metadata(row).get("func_name"):
        return str(name)
    raise RewardError("the row's tests call a function, but no fn_name or metadata.func_name says which")


def _metadata(owner: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = _parsed(owner.get("metadata") or {})
    return metadata if isinstance(metadata, Mapping) else {}


def _language(row: Row) -> str:
    name = str(row.get("language") or "python").lower()
    return next((language for language, names in LANGUAGES.items() if name in names), name)


def _text(value: Any) -> str:
    """Return a value as text. Some sets store the lines of a text as a list."""
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _defined(row: Row) -> frozenset[str]:
    """Return the functions that the row's own solution defines."""
    trees = [ast.parse(solution) for solution in solutions_of(row)[:1] if is_python(solution)]
    return frozenset(node.name for tree in trees for node in tree.body if isinstance(node, static_checks.Function))


def is_python(text: str) -> bool:
    """Return whether the text can be parsed."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parsed(value: Any) -> Any:
    """Return the value of a text of JSON or of a Python literal; any other `value` unchanged."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value)
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.loads(json.dumps(ast.literal_eval(value)))  # a tuple becomes a list
    raise RewardError(f"the row's tests contain {value[:60]!r}, which is neither JSON nor a literal of plain data")


def _unpacked(text: str) -> str:
    """Return the JSON in a compressed field of LiveCodeBench: a str, pickled, compressed and in base64. Nothing is
    unpickled: the pickle of a str is the length and the UTF-8, between a few bytes, and any other pickle is refused."""
    unpacking = zlib.decompressobj()
    wrong = "the row's private_test_cases are neither JSON nor compressed JSON: {why}"
    with explain((ValueError, zlib.error), wrong, RewardError):
        data = unpacking.decompress(base64.b64decode(text, validate=True), UNPACKED_BYTES)
        if unpacking.unconsumed_tail:
            raise RewardError(f"the row's private_test_cases unpack to more than {UNPACKED_BYTES >> 20} MiB")
        if not unpacking.eof:
            raise ValueError("they are cut short")
        if head := _PICKLED_TEXT.match(data):
            start, length = head.end(), int.from_bytes(head[head.lastindex or 0], "little")
            if data[start + length :] in _PICKLE_ENDS:
                return data[start : start + length].decode()
    raise RewardError("the row's private_test_cases hold a pickle of more than text, which is never loaded: store JSON")
