"""A row in the format of each known set of programming problems, with a right program and wrong ones."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

STDIN_SUM = "print(sum(map(int, input().split())))"
STDIN_CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20\n", "output": "30\n"}]
ANAGRAM = "def is_anagram(one, other):\n    return sorted(one.lower()) == sorted(other.lower())\n"

FUNCTIONAL = [
    {"input": "[5, 3, 10]\n5", "output": "2", "testtype": "functional", "metadata": {"func_name": "countAtLeast"}},
    {"input": "[]\n1", "output": "0", "testtype": "functional", "metadata": {"func_name": "countAtLeast"}},
]
# As the starter code of the set has it: List is not imported.
COUNT_AT_LEAST = (
    "class Solution:\n    def countAtLeast(self, hours: List[int], target: int) -> int:\n"
    "        return sum(hour >= target for hour in hours)\n"
)

HUMAN_EVAL_PLUS = """\
import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match

"""

KOD_CODE = """\
import pytest
from solution import Stack, mean, EmptyError

def test_mean():
    assert mean([1, 2]) == pytest.approx(1.5)

@pytest.mark.parametrize("values, expected", [([2], 2), ([2, 4], 3)])
def test_means(values, expected):
    assert mean(values) == expected

def test_nothing_has_no_mean():
    with pytest.raises(EmptyError, match="nothing"):
        mean([])
    with pytest.raises(ValueError):
        mean([])

@pytest.fixture
def filled():
    stack = Stack()
    stack.push(3)
    yield stack

class TestStack:
    def setup_method(self):
        self.stack = Stack()

    def test_pop(self, filled):
        assert filled.pop() == 3
        assert self.stack.size() == 0
"""
KOD_CODE_FUNCTIONS = KOD_CODE[: KOD_CODE.index("@pytest.fixture")].replace("Stack, ", "")
KOD_CODE_SOLUTION = """\
class EmptyError(ValueError):
    pass

def mean(values):
    if not values:
        raise EmptyError("nothing to take the mean of")
    return sum(values) / len(values)

class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def pop(self):
        return self.items.pop()
    def size(self):
        return len(self.items)
"""


def compressed(cases: list[dict], protocol: int = 4) -> str:
    """As LiveCodeBench publishes its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases), protocol))).decode()


def live_code_bench(public: list[dict], private: list[dict], **fields: object) -> dict:
    bare = [{key: case[key] for key in ("input", "output", "testtype")} for case in [*public, *private]]
    return {
        "question_content": "?",
        "starter_code": "",
        "public_test_cases": json.dumps(bare[: len(public)]),
        "private_test_cases": compressed(bare[len(public) :]),
        **fields,
    }


STDIN_TESTS = [case | {"testtype": "stdin"} for case in STDIN_CASES]

# Those whose tests run beside the program.
INSIDE = {"KodCode"}
# By set: the row, a right program, and wrong ones.
SETS: dict[str, tuple[dict, str, list[str]]] = {
    "DeepCoder, taco, stdin": (
        {"tests": json.dumps({"inputs": ["1 2\n", "10 20\n"], "outputs": ["3\n", "30\n"]}), "solutions": [STDIN_SUM]},
        STDIN_SUM,
        ["print(3)", "x = 1"],
    ),
    "DeepCoder, taco, calls": (
        {
            "tests": json.dumps(
                {
                    "fn_name": "is_anagram",
                    "inputs": [["foefet", "toffee"], ["apple", "pale"]],
                    "outputs": [[True], [False]],
                }
            )
        },
        ANAGRAM,
        ["def is_anagram(one, other):\n    return True", "print(True)", "def is_anagram(one, other): return [[True]]"],
    ),
    "DeepCoder, primeintellect, stdin": (
        {"tests": json.dumps([{"type": "stdin_stdout", "fn_name": None, **case} for case in STDIN_CASES])},
        STDIN_SUM,
        ["print(3)"],
    ),
    "DeepCoder, primeintellect, calls": (
        {
            "tests": json.dumps(
                [
                    {"type": "function_call", "fn_name": "majority", "input": [[3, 2, 3]], "output": 3},
                    {"type": "function_call", "fn_name": "majority", "input": [[1]], "output": 1},
                ]
            )
        },
        "class Solution:\n    def majority(self, nums: List[int]):\n        return Counter(nums).most_common(1)[0][0]",
        ["def majority(nums): return 3"],
    ),
    "DeepCoder, lcbv5, stdin": ({"tests": json.dumps(STDIN_TESTS), "metadata": "{}"}, STDIN_SUM, ["print(3)"]),
    "DeepCoder, lcbv5, calls": (
        {"tests": json.dumps(FUNCTIONAL), "starter_code": "class Solution: ..."},
        COUNT_AT_LEAST,
        [COUNT_AT_LEAST.replace(">=", ">"), "class Solution: pass", STDIN_SUM],
    ),
    "DeepCoder, codeforces": ({"tests": json.dumps(STDIN_CASES)}, STDIN_SUM, ["print(30)"]),
    "LiveCodeBench, stdin": (live_code_bench(STDIN_TESTS[:1], STDIN_TESTS[1:], metadata="{}"), STDIN_SUM, ["print(3)"]),
    "LiveCodeBench, calls": (
        live_code_bench(FUNCTIONAL[:1], FUNCTIONAL[1:], metadata=json.dumps({"func_name": "countAtLeast"})),
        COUNT_AT_LEAST,
        ["class Solution:\n    def countAtLeast(self, hours, target): return 2"],
    ),
    "LeetCodeDataset": (
        {
            "prompt": "from typing import *\n",
            "entry_point": "Solution().countAtLeast",
            "test": "def check(candidate):\n    assert candidate(hours = [5, 3, 10],target = 5) == 2\n"
            "    assert candidate(hours = [],target = 1) == 0\n",
            "input_output": [{"input": "hours = [5, 3, 10], target = 5", "output": "2"}],
        },
        COUNT_AT_LEAST,
        [COUNT_AT_LEAST.replace(">=", ">"), "print(2)"],
    ),
    "TACO, Codewars": (
        {
            "input_output": json.dumps(
                {
                    "fn_name": "scaled",
                    "inputs": [[{"1": 0.1, "2": 0.2}, 3], [{"5": 1.0}, 1]],
                    "outputs": [[[[1, 0.3], [2, 0.6]]], [[[5, 1.0]]]],
                }
            ),
            "solutions": json.dumps(["def scaled(d, f):\n    return [(k + 0, v * f) for k, v in d.items()]"]),
        },
        "def scaled(d, f):\n    return [(k + 0, v * f) for k, v in d.items()]",
        ["def scaled(d, f):\n    return [(k + 0, v) for k, v in d.items()]"],
    ),
    "APPS": (
        {"input_output": json.dumps({"inputs": [["1", "2"]], "outputs": [["3", ""]]}), "solutions": "[]"},
        "print(int(input()) + int(input()))",
        ["print(4)"],
    ),
    "CodeContests": (
        {
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["10 20\n"], "output": ["30\n"]},
            "solutions": {"language": [2, 3, 1], "solution": ["int main() {}", STDIN_SUM, "print 3"]},
        },
        STDIN_SUM,
        ["print(3)"],
    ),
    "PrimeIntellect, JSON": (
        {
            "verification_info": json.dumps(
                {"language": "python", "test_cases": [{"type": "stdin_stdout", **case} for case in STDIN_CASES]}
            ),
            "gold_standard_solution": f"```python\n{STDIN_SUM}\n```",
        },
        STDIN_SUM,
        ["print(3)"],
    ),
    "PrimeIntellect, a Python literal": (
        {
            "verification_info": str(
                {
                    "language": "python",
                    "test_cases": [
                        {"type": "function_call", "fn_name": "odd", "input": [[2, 4, 7]], "output": [7]},
                        {"type": "function_call", "fn_name": "odd", "input": [[2, 3, 8]], "output": [3]},
                    ],
                }
            )
        },
        "def odd(xs): return next(x for x in xs if x % 2)",
        ["def odd(xs): return xs[-1]"],
    ),
    "AceCode": ({"test_cases": ["assert add(1, 2) == 3"]}, "def add(a, b): return a + b", ["def add(a, b): return a"]),
    "verl, stdin": (
        {"reward_model": {"ground_truth": json.dumps({"inputs": ["1 2\n", "10 20\n"], "outputs": ["3\n", "30\n"]})}},
        STDIN_SUM,
        ["print(3)"],
    ),
    "KodCode": ({"test": KOD_CODE, "solution": KOD_CODE_SOLUTION}, KOD_CODE_SOLUTION, ["def mean(v): return 0"]),
    "KodCode, without classes": (
        {"test": KOD_CODE_FUNCTIONS, "solution": KOD_CODE_SOLUTION},
        KOD_CODE_SOLUTION,
        ["def mean(v): return 0"],
    ),
    "MBPP": (
        {
            "text": "?",
            "code": "def height(node):\n    return 1 + height(node['left']) if node else 0",
            "test_setup_code": "root = {'left': {'left': None}}",
            "test_list": ["assert height(root) == 2", "assert height(root['left']) == 1"],
        },
        "def height(node):\n    return 1 + height(node['left']) if node else 0",
        ["def height(node):\n    return 2"],
    ),
    "MBPP+": (
        {
            "code": "def halves(xs):\n    return [x / 2 for x in xs]",
            "test_imports": ["import math"],
            "test_list": ["assert halves([2]) == [1]"],
            "test": HUMAN_EVAL_PLUS + "inputs = [[[2]], [[3, 1]]]\nresults = [[1.0], [1.5, 0.5]]\n"
            "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(halves(*inp), exp, 0)\n",
        },
        "def halves(xs):\n    return [x * 0.5000000001 for x in xs]",
        ["def halves(xs):\n    return [x // 2 for x in xs]"],
    ),
    "HumanEval": (
        {
            "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    '''Sum'''\n",
            "entry_point": "total",
            "canonical_solution": "    return sum(xs)\n",
            "test": "\n\nMETADATA = {'author': 'jt'}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n",
        },
        "    return sum(xs)\n",
        ["    return 0\n", "METADATA = 1"],
    ),
    "BigCodeBench": (
        {
            "prompt": "Count words. Write self-contained code starting with:\n```\ndef task_func(text):\n```",
            "code_prompt": "import re\nfrom collections import Counter\nWORD = r'[a-z]+'\ndef task_func(text):\n",
            "entry_point": "task_func",
            "canonical_solution": "    return Counter(re.findall(WORD, text.lower()))",
            "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def test_words(self):\n"
            "        self.assertEqual(task_func('A b a'), {'a': 2, 'b': 1})\n"
            "    def test_none(self):\n        self.assertEqual(len(re.findall(WORD, '7')), len(task_func('7')))\n",
        },
        "    return Counter(re.findall(WORD, text.lower()))",
        ["    return Counter(re.findall(WORD, text))", "    return {}"],
    ),
    "rLLM, LeetCode": (
        {
            "tests": {
                "functional": "def check(candidate):\n    assert candidate(hours = [5, 3, 10],target = 5) == 2\n"
                "    assert candidate(hours = [],target = 1) == 0\n\n\ncheck(Solution().countAtLeast)"
            }
        },
        COUNT_AT_LEAST,
        [COUNT_AT_LEAST.replace(">=", ">"), "print(2)"],
    ),
    "rLLM, function": (
        {
            "reward_model": {
                "ground_truth": json.dumps(
                    {"functional": "def check(f):\n    assert f(2) == 4\n    assert f(3) == 9\n\ncheck(square)"}
                )
            }
        },
        "def square(x): return x * x",
        ["def square(x): return 4"],
    ),
    "HumanEval+": (
        {
            "prompt": "def half(x):\n    '''Half of it'''\n",
            "entry_point": "half",
            "canonical_solution": "    return x / 2\n",
            "test": f"{HUMAN_EVAL_PLUS}def check(candidate):\n    inputs = [[3], [4]]\n    results = [1.5, 2.0]\n"
            "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 0)\n",
        },
        "    return x * 0.5\n",
        ["    return x // 2\n"],
    ),
}
