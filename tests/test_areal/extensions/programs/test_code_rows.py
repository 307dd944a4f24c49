"""What is read from the rows of known sets, without running anything."""

from __future__ import annotations

import base64
import json
import pickle
import tracemalloc
import zlib

import pytest
from programs.code_sets import (
    ANAGRAM,
    COUNT_AT_LEAST,
    FUNCTIONAL,
    SETS,
    STDIN_CASES,
    STDIN_SUM,
    compressed,
    live_code_bench,
)

from areal.extensions.programs.code_rows import Asserts, Calls, Outputs, read_tests, solutions_of
from areal.rewards.functions import RewardError

PAIRS = [("1 2\n", "3\n"), ("10 20\n", "30\n")]


@pytest.mark.parametrize("name", [name for name in SETS if "stdin" in name or name in ("CodeContests",)])
def test_programs_that_read_stdin_are_tested_with_pairs(name):
    assert read_tests(SETS[name][0]) == Outputs(PAIRS)


def test_lines_of_a_text_may_be_a_list():
    assert read_tests(SETS["APPS"][0]) == Outputs([("1\n2", "3\n")])


@pytest.mark.parametrize("name", ["DeepCoder, lcbv5, calls", "LiveCodeBench, calls", "LeetCodeDataset"])
def test_arguments_are_one_a_line_or_those_of_asserts(name):
    assert read_tests(SETS[name][0]) == Calls("countAtLeast", [[[5, 3, 10], 5], [[], 1]], [[2], [0]])


def test_results_that_are_all_in_a_list_may_be_given_without_it():
    tests = read_tests(SETS["DeepCoder, taco, calls"][0])
    assert tests.expected == [[[True], True], [[False], False]]
    tests = read_tests({"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}})
    assert tests.expected == [[[1]], [[1, 2]]]


def test_the_language_of_a_row_is_its_own_or_that_of_its_verification():
    info = {"language": "javascript", "test_cases": [{"type": "stdin_stdout", **case} for case in STDIN_CASES]}
    assert read_tests({"language": None, "verification_info": info}) == Outputs(PAIRS, "nodejs")
    assert read_tests({"language": "C++", "tests": STDIN_CASES}) == Outputs(PAIRS, "cpp")


def test_tests_of_pytest_are_told_from_statements():
    assert read_tests(SETS["KodCode"][0]).pytest_style
    assert read_tests({"test_code": SETS["KodCode"][0]["test"]}) == read_tests(SETS["KodCode"][0])
    assert not read_tests(SETS["MBPP"][0]).pytest_style
    assert read_tests(SETS["HumanEval"][0]).tests == ["check(candidate)"]


def test_the_larger_tests_of_mbpp_plus_are_used():
    assert "inputs = " in read_tests(SETS["MBPP+"][0]).tests[0]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 300, 100_000])
def test_compressed_tests_are_read_without_loading_a_pickle(protocol, size, monkeypatch):
    monkeypatch.setattr("pickle.loads", None)
    cases = [{"input": "ä" * size, "output": "ü", "testtype": "stdin"}]
    row = live_code_bench([], []) | {"private_test_cases": compressed(cases, protocol)}
    assert read_tests(row) == Outputs([("ä" * size, "ü")])


class Evil:
    def __reduce__(self):
        return print, ("loaded",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Evil()),
        pickle.dumps(["[]"]),
        pickle.dumps("[]") + b"cos\nsystem\n.",
        b"\x80\x04X\xff\xff\xff\xff[].",
        b"[",
        b"",
    ],
)
def test_any_other_pickle_is_refused(content, capsys):
    row = live_code_bench(FUNCTIONAL, []) | {"private_test_cases": base64.b64encode(zlib.compress(content)).decode()}
    with pytest.raises(RewardError, match="hold a pickle of more than text, which is never loaded"):
        read_tests(row)
    assert not capsys.readouterr().out


def test_a_row_that_unpacks_to_more_than_its_bound_is_refused_before_it_is_unpacked():
    packing = zlib.compressobj(1)
    bomb = b"".join(packing.compress(bytes(1 << 24)) for _ in range(40)) + packing.flush()
    row = live_code_bench(FUNCTIONAL, []) | {"private_test_cases": base64.b64encode(bomb).decode()}
    tracemalloc.start()
    with pytest.raises(RewardError, match="the row's private_test_cases unpack to more than 256 MiB"):
        read_tests(row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 600 << 20


CANNOT_FAIL = "the row's tests cannot fail"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "the row has no tests: it needs one of tests, input_output"),
        ({"tests": None, "input_output": ""}, "the row has no tests"),
        ({"tests": "[]"}, "list of tests is empty"),
        ({"tests": "[1"}, "'\\[1', which is neither JSON nor a literal"),
        ({"tests": [1]}, "are not understood"),
        ({"tests": {"in": "1", "out": "2"}}, "are not understood"),
        ({"tests": [{"input": "1"}]}, "are not understood"),
        ({"tests": [{"input": "1", "output": "2", "type": "http"}]}, "the unknown type 'http'"),
        ({"tests": [{"input": "1", "output": "2", "testtype": "functional"}]}, "no fn_name or metadata.func_name"),
        ({"tests": [*STDIN_CASES, *FUNCTIONAL]}, r"of several kinds \(countAtLeast, stdin\)"),
        ({"tests": [FUNCTIONAL[0] | {"output": "yes"}]}, "contain 'yes', which is neither JSON nor"),
        ({"tests": {"fn_name": "f", "inputs": [3], "outputs": [3]}}, "are of type int, not a list"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"verification_info": {"language": "python"}}, "has no test_cases"),
        ({"public_test_cases": "[]", "private_test_cases": "x"}, "neither JSON nor compressed JSON"),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"[]")[:-1]).decode()}, "compressed JSON: they are cut"),
        ({"public_tests": {"input": ["1"], "output": []}}, "public_tests are not two lists"),
        ({"test_list": ["assert f(1) =="]}, "not valid Python: invalid syntax"),
        ({"test_list": ["assert f()"], "language": "cpp"}, "its language is cpp"),
        ({"tests": FUNCTIONAL, "language": "rust"}, "call countAtLeast, which needs Python, but its language is rust"),
        ({"tests": [{"input": "1", "output": "\n"}]}, f"{CANNOT_FAIL}: none of them expects any output"),
        ({"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [None]}}, f"{CANNOT_FAIL}: .*return None"),
        ({"tests": "x = 1"}, CANNOT_FAIL),
        ({"tests": "assert 1 + 1 == 2"}, CANNOT_FAIL),
        ({"tests": "assert len(str(1)) == 1"}, CANNOT_FAIL),
        ({"tests": "assert (f(1) == 2, 'wrong')"}, CANNOT_FAIL),
        ({"tests": "f(1)\nassert True"}, CANNOT_FAIL),
        ({"tests": "def verify():\n    assert f(1) == 2"}, CANNOT_FAIL),
        ({"tests": "def check(f):\n    assert f(1) == 2"}, "neither they nor entry_point name what it is to check"),
        ({"test": "def test_f():\n    f(1)"}, CANNOT_FAIL),
        ({"input_output": STDIN_CASES, "entry_point": "Solution().f"}, "no test that compares what f returns"),
        ({"test": "assert candidate(a=1) != 2", "entry_point": "Solution().f"}, "more than compare what f returns"),
        ({"test": "assert candidate(a=g()) == 2", "entry_point": "Solution().f"}, r"contain 'g\(\)', which is neither"),
        ({"test_list": ["assert 1"], "entry_point": "a.b"}, "entry_point 'a.b' is not the name of a function"),
        ({"reward_model": {"style": "rule"}}, "that should have them has no ground_truth"),
        ({"test": "def same(a, b):\n    return a == b\nfor x in [1]:\n    same(f(x), 2)"}, CANNOT_FAIL),
    ],
)
def test_a_row_whose_tests_say_nothing_is_an_error_of_the_data(row, message):
    with pytest.raises(RewardError, match=message):
        read_tests(row)


@pytest.mark.parametrize(
    ("source", "unsafe"),
    [
        ("assert eval(f(1)) == 2", "eval"),
        ("import pickle\nassert pickle.loads(f(1)) == 2", "the module pickle"),
        ("from unittest import mock\nassert f(mock.Mock()) == 2", "the module unittest.mock"),
        ("import os.path\nassert os.path.exists(f(1))", "the module os.path"),
        ("def test_f(tmp_path):\n    assert f(str(tmp_path))", "the fixture tmp_path"),
        ("import asyncio\nassert asyncio.run(f(1)) == 2", "the module asyncio"),
        ("import random, sys\nassert f(random.random()) < 2", None),
    ],
)
def test_what_gives_a_program_a_hold_on_its_tests_is_seen(source, unsafe):
    assert read_tests({"tests": source}).needs.unsafe == unsafe


@pytest.mark.parametrize(
    ("source", "beyond"),
    [
        ("assert f(1).left == 2", ".left, which no plain data have"),
        ("x = f(1)\nassert x.left == 2", ".left, which no plain data have"),
        ("assert f(1)(2) == 3", "a call of what f returns"),
        ("f.cache_clear()\nassert f(1) == 2", ".cache_clear of f"),
        ("s = Stack()\nassert s.pop() == 2", "the class Stack"),
        ("import solution\nassert solution.Stack().pop() == 2", "the class Stack"),
        ("assert f(lambda x: x) == 2", "a function that is given to f"),
        ("def g(x): return x\nassert f(key=g) == 2", "a function that is given to f"),
        ("with f(1) as x:\n    assert x == 2", "with f"),
        ("class Node:\n    def __init__(self, v): self.v = v\nassert f(Node(1)) == 2", "the class Node of theirs"),
        ("import random\nrandom.seed(1)\nassert f(1) == 2", ".seed"),
        ("import io, sys\nsys.stdin = io.StringIO('1')\nassert f() == 1", ".stdin"),
        ("try:\n    f(1)\nexcept AssertionError:\n    pass\nelse:\n    assert 0", "AssertionError, which tests raise"),
        ("async def test_f():\n    assert await f(1)", "asynchronous functions"),
        ("import pytest\ndef test_f():\n    with pytest.raises(E) as e:\n        f(1)\n    assert e.value.n", None),
        ("try:\n    f(1)\n    assert 0\nexcept OwnError as e:\n    assert e.name == 2", None),
        ("import io, sys\nout = io.StringIO()\nsys.stdout = out\nf(1)\nassert out.getvalue() == '1'", None),
        ("assert math.isclose(f(1), 3) and Counter(f(2)) == Counter('ab') and np.allclose(f(3), 1)", None),
        ("LIMIT = 1\nassert f(int, len, LIMIT, key=str) == [1] and f(1)[0].upper().count('A') == 1", None),
        ("def test_f(capsys):\n    f(1)\n    assert capsys.readouterr().out == '1'", None),
        ("import unittest\nclass F(unittest.TestCase):\n    def test_f(self):\n        self.assertTrue(f(1))", None),
    ],
)
def test_tests_that_need_more_than_calls_with_plain_data_are_seen(source, beyond):
    needs = read_tests({"tests": source}).needs
    assert (needs.beyond or "").startswith(beyond or "") and bool(needs.beyond) == bool(beyond)


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == 2",
        "import solution\nassert solution.f(1) == 2",
        "from solution import *\nfor x in (1, 2):\n    assert f(x)",
        "def verify(x):\n    assert f(x) == 2\nverify(1)",
        "if f(1) != 2:\n    raise ValueError",
        "def test_f():\n    assert f(1) == 2",
        "from numpy.testing import assert_allclose\nassert_allclose(f(1), 2)",
        "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)",
    ],
)
def test_tests_that_check_something_are_accepted(source):
    tests = read_tests({"tests": source})
    assert isinstance(tests, Asserts)
    assert tests.needs.names in (("f",), ())


def test_the_names_that_tests_expect_of_a_program_are_those_that_nothing_else_defines():
    source = (
        "import math\nlimit = 3\ndef near(a, b):\n    c = a - b\n    return abs(c) < limit\n"
        "assert near(f(math.pi), [g for g in (h,)])"
    )
    assert read_tests({"tests": source}).needs.names == ("f", "h")


def test_own_solutions_are_found_where_sets_keep_them():
    assert solutions_of(SETS["CodeContests"][0]) == [STDIN_SUM]
    assert solutions_of(SETS["HumanEval"][0]) == ["    return sum(xs)\n"]
    assert solutions_of({"solutions": json.dumps([ANAGRAM, COUNT_AT_LEAST])}) == [ANAGRAM, COUNT_AT_LEAST]
    assert solutions_of(SETS["APPS"][0]) == solutions_of({"solutions": "", "code": None}) == []
    assert solutions_of(SETS["PrimeIntellect, JSON"][0]) == [f"```python\n{STDIN_SUM}\n```"]
    assert solutions_of({"solutions": [str(number) for number in range(9)]}) == ["0", "1", "2", "3", "4"]
