"""The reward `code` on rows as known sets have them."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest
from programs import attacks
from programs.code_sets import COUNT_AT_LEAST, FUNCTIONAL, INSIDE, SETS
from programs.drawing import an_eighth_or_all, drawn
from programs.right_programs import right_programs
from support.process_tree import needs_namespaces

from areal.extensions.programs.code_tests import CodeTests, same_result
from areal.rewards.functions import RewardError

pytestmark = needs_namespaces


@pytest.fixture(scope="module")
def code():
    # Little CPU time, for what never ends; ample time in all, since the machine may be busy.
    reward = CodeTests(cpu_seconds=2.0, wall_seconds=60.0, output_kib=64)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def anywhere():
    """Where tests also run inside."""
    reward = CodeTests(cpu_seconds=2.0, wall_seconds=60.0, output_kib=64, tests="inside_where_needed")
    yield reward
    reward.close()


@pytest.fixture
def hurried():
    reward = CodeTests(cpu_seconds=0.7, wall_seconds=60.0, output_kib=64)
    yield reward
    reward.close()


async def scores(code, row, programs):
    """The scores of several programs, of which two run at a time."""
    slots = asyncio.Semaphore(2)

    async def one(program):
        async with slots:
            return await code.score("", program, row)

    return await asyncio.gather(*map(one, programs))


@pytest.mark.parametrize("name", SETS)
async def test_right_programs_pass_and_wrong_ones_and_those_that_do_nothing_do_not(code, anywhere, name):
    row, right, wrong = SETS[name]
    reward, inside = (anywhere, {"inside": 1.0}) if name in INSIDE else (code, {})
    results = await scores(reward, row, [f"```python\n{right}\n```", *wrong, ""])
    assert [score for score, _ in results] == [1.0, *[0.0] * (len(results) - 1)]
    assert results[0][1] == {"passed": 1.0, **inside}
    # numpy finds all of no numbers close to one.
    assert await reward.weakness(row) == ("functions return []" if name == "HumanEval+" else None)
    if name in INSIDE:
        with pytest.raises(RewardError, match="they use the class Stack: remove the row, or set sandbox.tests"):
            await code.score("", right, row)


async def test_a_variable_of_a_comprehension_does_not_hide_a_function_of_the_program(anywhere):
    program = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x): return x"
    row = {"test_list": ["assert P(1).x == 1 and [f for f in 'xy'] == ['x', 'y']", "assert f(2) == 2"]}
    assert (await anywhere.score("", f"```python\n{program}\n```", row))[0] == 1.0


async def test_tests_have_the_packages_of_the_run_and_not_those_beside_its_interpreter(anywhere):
    check = f"assert f(pytest.__version__) == {pytest.__version__!r}"
    row = {"test": f"import pytest\nfrom solution import f\ndef test_f():\n    {check}\n"}
    assert (await anywhere.score("", "```python\ndef f(x): return x\n```", row))[0] == 1.0


@an_eighth_or_all
async def test_right_programs_of_every_kind_pass_in_one_of_the_ways(code, anywhere, share):
    slots = asyncio.Semaphore(2)

    async def one(row, program):
        async with slots:
            return await anywhere.score("", f"Here it is:\n```python\n{program}\n```\nIt works.", row)

    programs = drawn({name: parts for name, *parts in right_programs()}, share)
    results = await asyncio.gather(*(one(row, program) for row, program, _ in programs.values()))
    expected = {"inside": (1.0, {"passed": 1.0, "inside": 1.0}), "outside": (1.0, {"passed": 1.0})}
    pairs = zip(programs.items(), results, strict=True)
    assert {name: result for (name, (_, _, way)), result in pairs if result != expected[way]} == {}
    for row, program, way in programs.values():
        if way == "inside":
            with pytest.raises(RewardError, match="cannot be judged outside the program: they need"):
                await code.score("", program, row)


def calls(*pairs):
    return {
        "tests": {
            "fn_name": "f",
            "inputs": [[argument] for argument, _ in pairs],
            "outputs": [want for _, want in pairs],
        }
    }


async def test_results_are_compared_as_plain_data(code):
    row = calls((1, [1, 2]), (2, {"1": 0.5}), (3, "ä\u2028\n"), (4, True), (5, None), (6, 2**80), (7, 1 / 3), (8, 0.5))
    right = (
        "from fractions import Fraction\nimport collections\n"
        "P = collections.namedtuple('P', 'x y')\n"
        "results = [P(1, 2), {1: 0.5}, 'ä\\u2028\\n', 1, None, 2 ** 80, 0.33333333, Fraction(1, 2)]\n"
        "def f(x):\n    print('[7]')\n    return results[x - 1]"
    )
    assert await code.score("", right, row) == (1.0, {"passed": 1.0})
    wrong = (
        "class Same(int):\n    __eq__ = lambda a, b: True\n"
        "results = [{1, 3}, [['1', 0.5]], 'a', 2, 0, Same(3), 0.333, lambda: 0]\n"
        "def f(x): return results[x - 1]"
    )
    assert await code.score("", wrong, row) == (0.0, {"passed": 0.0})


@pytest.mark.parametrize("digits", [5000, 20_000])
async def test_a_number_may_have_thousands_of_digits(code, digits):
    number = "7" * digits
    of_stdin = {"tests": [{"input": str(digits), "output": number}]}
    assert (await code.score("", "print('7' * int(input()))", of_stdin))[0] == 1.0
    assert (await code.score("", "print(7 * (10 ** int(input()) // 9))", of_stdin))[0] == 1.0
    assert (await code.score("", "print(7 * (10 ** int(input()) // 9) + 1)", of_stdin))[0] == 0.0
    for row in (
        {"input_output": f'{{"fn_name": "f", "inputs": [[{digits}]], "outputs": [{number}]}}'},
        {"test_list": [f"assert f({digits}) == {number}"]},
    ):
        assert (await code.score("", "def f(n): return 7 * (10 ** n // 9)", row))[0] == 1.0
        assert (await code.score("", "def f(n): return 7 * (10 ** n // 9) + 1", row))[0] == 0.0


async def test_each_call_has_an_object_of_its_own_and_its_own_names_first(code):
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass D:\n    a: int\n"
        "def gcd(x): return 5\n"
        "class Solution:\n    def __init__(self): self.seen = []\n"
        "    def f(self, x):\n        self.seen.append(x)\n        return D(len(self.seen)).a + gcd(1)"
    )
    assert await code.score("", program, calls((1, 6), (2, 6))) == (1.0, {"passed": 1.0})


async def test_what_is_imported_for_programs_is_no_answer_of_theirs(code):
    row = {"tests": {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}}
    results = await scores(code, row, ["", "from math import gcd", "def gcd(a, b): return math.gcd(a, b)"])
    assert [score for score, _ in results] == [0.0, 1.0, 1.0]


async def test_each_call_may_use_the_limits_for_itself(hurried):
    busy = (
        "import time\ndef f(x):\n    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n    return x"
    )
    assert await hurried.score("", busy, calls((1, 1), (2, 2), (3, 3))) == (1.0, {"passed": 1.0})
    large = "def f(x): return 'x' * x"
    assert await hurried.score("", large, calls(*[(30_000, "x" * 30_000)] * 3)) == (1.0, {"passed": 1.0})
    endless = "def f(x):\n    while x == 2: pass\n    return x"
    assert await hurried.score("", endless, calls((1, 1), (2, 2), (3, 3))) == (0.0, {"passed": 1 / 3})


@an_eighth_or_all
async def test_no_program_passes_calls_without_the_answer(code, share):
    secret = 123456789
    elsewhere = ("answers", "asks", "says", "names", "containers", "mocks", "text", "exceptions", "time", "resources")
    programs = {name: program for name, program in attacks.CHEATS.items() if not name.startswith(("lets", *elsewhere))}
    programs = drawn(programs, share)
    results = await scores(code, calls((7, secret)), programs.values())
    assert {name: result for name, result in zip(programs, results, strict=True) if result[0]} == {}


async def test_a_function_of_the_program_may_have_the_name_of_a_built_in_one(code):
    row = {"test_list": ["assert sum(10, 15) == 6", "assert sum(4, 6) == 3"]}
    right = (
        "def sum(a, b):\n    total = 0\n    for i in range(1, min(a, b)):\n        total += i * (a % i == b % i == 0)\n"
    )
    results = await scores(code, row, [f"{right}    return total", "", "def sum(a, b): return 6"])
    assert [score for score, _ in results] == [1.0, 0.0, 0.0]
    row = {"test_list": ["assert all(f(x) == 2 * x for x in (1, 2))"]}
    assert (await code.score("", "def f(x): return 0\ndef all(xs): return True", row))[0] == 0.0


async def test_programs_get_built_in_types_and_functions_as_these(code):
    row = {"test_list": ["assert without((4, 7.7), int) == [7.7]", "assert is_len(len)"]}
    program = "def without(xs, kind): return [x for x in xs if not isinstance(x, kind)]\ndef is_len(x): return x is len"
    assert await code.score("", program, row) == (1.0, {"passed": 1.0})


async def test_names_that_tests_do_not_import_are_not_the_programs_where_they_are_a_librarys(code):
    row = {"test_list": ["assert math.isclose(f(1), 3)", "assert Counter(f(2)) == Counter('ab')"]}
    forged = "class math:\n    isclose = lambda *a: True\nclass Counter:\n    __init__ = __eq__ = lambda *a: None\n"
    assert (await code.score("", f"{forged}def f(x): return 0", row)) == (0.0, {"passed": 0.0})
    assert (await code.score("", "def f(x): return 3 if x == 1 else 'ba'", row)) == (1.0, {"passed": 1.0})


async def test_asserts_import_nothing_that_the_program_wrote(code):
    row = {"test_list": ["import colorsys\nassert f(7) == colorsys.rgb_to_hsv(1, 1, 1)[2] + 122"]}
    forged = "open('colorsys.py', 'w').write('class Same:\\n    def __radd__(s, o): return s')\ndef f(x): return 0"
    assert await code.score("", forged, row) == (0.0, {"passed": 0.0})
    assert await code.score("", "def f(x): return 123", row) == (1.0, {"passed": 1.0})


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("import no_such_package\nassert f(1)", "they need the module no_such_package"),
        ("import colorsys.no_such\nassert f(1)", "they import what cannot be imported here: colorsys.no_such"),
        ("def test_f(caplog):\n    assert f(1)", "they need the fixture caplog"),
        ("assert f(1)(2) == 3", "they need a call of what f returns"),
        ("x = [print, open]\nassert f(x) == 3", "they need open"),
        ("import csv\nassert f(csv.reader) == 3", "they need a function that is given to f"),
        (
            "import csv\nassert f(csv.excel()) == 3",
            "give the program what is no plain data: an object of the class excel",
        ),
        ("class Test:\n    __init__ = lambda s: 0\n    def test_f(self):\n        assert f(1)", "no test is collected"),
    ],
)
async def test_tests_that_cannot_be_run_outside_are_an_error_before_any_program_runs(code, test, message):
    for program in ("def f(x): return 1", "def f(x): raise SystemExit", ""):
        with pytest.raises(RewardError, match=message):
            await code.score("", program, {"test": test})


async def test_a_row_whose_own_solution_does_not_pass_is_an_error_whatever_the_program(code):
    with pytest.raises(RewardError, match="the row's own solution does not pass them so; they use .left, which no"):
        await score_of(code, "def f(x): return 1", "assert f(1).left == 2", solution="def f(x): return x")
    row = {"solutions": ["def f(x): return 0", "def f(x): return x"]}
    assert await score_of(code, "def f(x): return 1", "assert f(1) == 1", **row) == 1.0


async def test_of_skipped_tests_and_those_that_are_expected_to_fail_none_has_passed(code):
    tests = (
        "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f(1)\ndef test_b():\n    assert f(1)\n"
        "@pytest.mark.xfail\ndef test_c():\n    assert f(1) == 2\n"
        "@pytest.fixture\ndef broken():\n    yield\n    assert f(2) == 2\n"
        "def test_d(broken):\n    assert f(1)\n"
    )
    assert await code.score("", "def f(x): return 1", {"test": tests}) == (0.0, {"passed": 0.25})


async def test_pytest_style_tests_are_counted_one_by_one(code):
    tests = (
        "import unittest, pytest\nfrom solution import f\n"
        "@pytest.fixture(autouse=True)\ndef noise():\n    print('no end of line', end='')\n    yield\n"
        "@pytest.mark.parametrize('y', [1, 2])\n"
        "@pytest.mark.parametrize(['x', 'z'], [(1, 1), pytest.param(2, 2, id='b')])\n"
        "def test_f(x, y, z):\n    assert f(x) == pytest.approx(z)\n"
        "class TestOne:\n    @pytest.fixture\n    def three(self):\n        return 3\n"
        "    def test_three(self, three):\n        assert f(three) == 3\n"
        "class Two(unittest.TestCase):\n    def setUp(self):\n        self.x = 4\n"
        "    def test_two(self):\n        self.assertEqual(f(self.x), 4)\n"
    )
    wrong = "def f(x): return x if x != 2 else 0"
    results = await scores(code, {"test": tests}, ["def f(x): return x", wrong, "def g(x): return x"])
    assert results == [(1.0, {"passed": 1.0}), (0.0, {"passed": 4 / 6}), (0.0, {"passed": 0.0})]


def test_an_answer_is_the_json_of_the_result():
    assert same_result("[1, [2.0000000001]]", [1, [2.0]])
    assert same_result('{"a": true}', {"a": 1})
    for answer in ("", "x", "[1", "[1, 2]", "[" * 100_000, "NaN", "9" * 5000, "1.0000001", "2"):
        assert not same_result(answer, 1)
    assert same_result("1e-17", 0.0)
    assert not same_result("0", 9e-7)
    for answer in (str(10**400), "1e999", "-Infinity", "NaN"):  # no float can be so large
        assert not same_result(answer, 0.5)
    assert same_result(str(10**400), 10**400) and same_result("Infinity", math.inf)


async def test_a_call_that_is_not_understood_is_no_score(code):
    with pytest.raises(RewardError, match="are of several kinds"):
        await code.score("", COUNT_AT_LEAST, {"tests": json.dumps([*FUNCTIONAL, {"input": "1", "output": "2"}])})


async def score_of(code, program, *tests, **row):
    return (await code.score("", program, {"test_list": [*tests], **row}))[0]


async def test_what_a_program_does_to_its_arguments_is_seen_in_place(code):
    program = (
        "def f(xs):\n    xs.append(len(xs))\n    return xs\ndef g(d, s, q):\n    d['x'] = d.pop('y')\n    s.clear()\n"
        "    q.rotate(1)\ndef h(rows): rows[0][0] = rows[1]\ndef keep(xs): return list(xs)"
    )
    tests = [
        "a = [5]\nb = f(a)\nassert b is a and a == [5, 1]",
        "a = []\nassert f(f(a)) is a and a == [0, 1]",
        "from collections import deque\nd, s, q = {'y': 1}, {1}, deque([1, 2])\ng(d, s, q)\n"
        "assert (d, s, q) == ({'x': 1}, set(), deque([2, 1]))",
        "rows = [[1], [2]]\nh(rows)\nassert rows[0][0] is rows[1] and rows == [[[2]], [2]]",
        "a = [1]\nassert keep(a) == a and keep(a) is not a and a == [1]",
    ]
    assert await score_of(code, program, *tests) == 1.0
    wrong = program.replace("xs.append(len(xs))\n    return xs", "return xs + [len(xs)]")
    assert await score_of(code, wrong, tests[0]) == 0.0


async def test_exceptions_arrive_with_their_hierarchy_and_what_would_end_an_iteration_does_not(code):
    program = (
        "class AppError(Exception): pass\nclass NotFound(AppError, LookupError):\n"
        "    def __init__(self, name):\n        super().__init__(f'no {name}')\n        self.name = name\n"
        "def f(x): raise NotFound(x)\ndef ends(x): raise StopIteration(x)\n"
        "def steps():\n    yield 1\n    raise NotFound('step')"
    )
    checks = "assert isinstance(e, LookupError) and str(e) == 'no a' and e.name == 'a' and e.args == ('no a',)"
    tests = [
        *(
            f"try:\n    f('a')\nexcept {kind} as e:\n    {checks}\nelse:\n    assert 0"
            for kind in ("NotFound", "AppError", "LookupError")
        ),
        "try:\n    list(map(ends, [1]))\n    assert False\nexcept Exception as e:\n"
        "    assert type(e).__name__ == 'StopIteration' and not isinstance(e, StopIteration)",
        "it = steps()\nassert next(it) == 1\ntry:\n    next(it)\n    assert False\n"
        "except NotFound as e:\n    assert e.name == 'step'",
    ]
    assert await score_of(code, program, *tests) == 1.0
    # An empty loop would prove nothing.
    assert await score_of(code, program, "assert all(x == 2 for x in map(ends, [1]))") == 0.0


async def test_what_uses_up_the_time_is_a_score_unless_the_rows_own_solution_shows_it(hurried):
    slow = "sum(range(10**10))"  # C code, which keeps all threads of Python from running
    with pytest.raises(RewardError, match="they take longer than a program may"):
        await score_of(hurried, "", f"assert f(1) == 1\n{slow}", solution="def f(x): return x")
    with pytest.raises(RewardError, match="they take longer than a program may"):
        await score_of(hurried, "def f(x): return 2", f"{slow}\nassert f(1) == 1")
    assert await score_of(hurried, f"def f(x):\n    {slow}", "assert f(1) == 1") == 0.0
    # The tests take long for what the program has returned.
    assert await score_of(hurried, "def f(x): return range(10**12)", "for x in f(1): assert x >= 0") == 0.0


async def test_many_calls_are_within_the_limits(code):
    lists = "kept = []\nfor i in range(1000):\n    kept.append([i] * 1000)\n    assert f(kept[-1]) == i * 1000"
    assert await score_of(code, "def f(xs): return sum(xs)", lists) == 1.0


async def test_a_row_whose_function_has_a_built_in_name_may_use_it_and_others(code):
    test = (  # as Mbpp/126 of MBPP+
        "inputs, results = [[10, 15], [4, 6]], [6, 3]\n"
        "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assert sum(*inp) == exp, len(inp)"
    )
    right = "def sum(a, b):\n    return __builtins__['sum'](i for i in range(1, min(a, b)) if a % i == b % i == 0)"
    right = right.replace("__builtins__['sum']", "__import__('builtins').sum")
    row = {"test": test, "code": right}
    assert (await code.score("", right, row))[0] == 1.0
    assert (await code.score("", "def sum(a, b): return 6", row))[0] == 0.0
    assert (await code.score("", "def sum(a, b): return 6\ndef zip(*a): return []", row))[0] == 0.0


@pytest.mark.parametrize(
    ("test", "weakness"),
    [
        ("x = [1]\ny = [2]\nassert f(x, y) == '' and not x and not y", "empty all their arguments and return an empty"),
        ("x = [1]\ny = {2}\nassert f(x, y) == 0 and not x and not y", "empty all their arguments and return 0"),
        ("assert f(1) < -10**300", "return -inf"),
        ("assert '5' in f(5).split()", "return many numbers as a text"),
        ("d = {'a': 1}\nf(1, d)\nassert d == {'a': 0}", "set all values of their arguments to 0"),
        ("assert len(f('a')) == 3\nassert f('b') == []", r"return \[0, 0, 0\], and later \[\]"),
        ("assert isinstance(f(1), dict) and not f(1)", "return {}"),
        ("assert f(1) == set()", "return an empty set"),
    ],
)
async def test_what_a_program_without_a_thought_may_return_is_tried(code, test, weakness):
    assert re.search(weakness, await code.weakness({"test": test}))


async def test_a_constant_that_only_the_program_could_define_refuses_the_row(code):
    for test in ("assert abs(f(1) - 2) < EPS", "from solution import f, EPS\nassert abs(f(1) - 2) < EPS"):
        with pytest.raises(RewardError, match="use EPS, a constant that nobody defines but the program"):
            await code.score("", "EPS = float('inf')\ndef f(x): return 0", {"test": test})
    right = {"test": "EPS = 1e-9\nassert abs(f(1) - 2) < EPS\nassert GCD(4, 6) == 2"}
    assert (await code.score("", "from math import gcd as GCD\ndef f(x): return 2", right))[0] == 1.0


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("return float('nan')", math.nan),
        ("return {3, 1, 2}", [1, 2, 3]),
        ("return (i for i in range(3))", [0, 1, 2]),
        ("return {1: 2}.values()", [2]),
    ],
)
async def test_results_that_json_does_not_know_are_right(code, program, expected):
    row = {"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}}
    assert (await code.score("", f"def f(x): {program}", row))[0] == 1.0


async def test_infinite_results_and_sorted_lists_of_leetcode_are_right(code):
    """As in Solution().findXSum and Solution().minimumSumSubarray of LeetCodeDataset."""
    asserts = "assert candidate(xs = [3, 1]) == [1, 3, inf]\n    assert candidate(xs = []) == [-inf]"
    test = f"def check(candidate):\n    {asserts}"
    row = {"prompt": "from math import *\n", "entry_point": "Solution().f", "test": test}
    program = "class Solution:\n    def f(self, xs):\n        return [*SortedList(xs), inf] if xs else [-inf]"
    assert (await code.score("", program, row))[0] == 1.0
    assert (await code.score("", program.replace("else [-inf]", "else [inf]"), row))[0] < 1.0


async def test_tests_that_look_for_warnings_are_judged_beside_the_program_or_not_at_all(code, anywhere):
    row = {"test": "import pytest\ndef test_f():\n    with pytest.warns(UserWarning):\n        f()"}
    right = "import warnings\ndef f(): warnings.warn('w')"
    with pytest.raises(RewardError, match="they need .warns"):
        await code.score("", right, row)
    assert (await anywhere.score("", right, row))[0] == 1.0


async def test_a_row_that_a_program_without_a_thought_passes_is_refused_where_that_is_asked_for():
    reward = CodeTests(refuse_weak=True, cpu_seconds=2.0, wall_seconds=60.0)
    weak, good = "assert f(3) > 70000", "assert f(3) == [0, 2, 4]"
    programs = "def f(n): return 10**6", "def f(n): return [0, 2, 4]"
    with pytest.raises(RewardError, match="are weak: a program in which functions return inf passes them"):
        await score_of(reward, programs[0], weak)
    with pytest.raises(RewardError, match="are weak"):  # the row decides, not the program
        await score_of(reward, "def f(n): return 1", weak)
    assert await score_of(reward, programs[1], good) == 1.0
    reward.close()
