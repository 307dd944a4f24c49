"""Calls a function of a program, and prints the results.

`code_tests` runs `main` in a sandbox, with the program in `program.py`. The right values are compared outside, and are
never in the sandbox. So the program may do anything here.

stdin: a line `{"function", "int_keys"}`, then for each call a line with the list of its arguments. stdout: for each
call a line with the JSON of the result, or an empty line if the call failed or the result is not plain data.

Programs may use, without an import, the modules and names that LeetCode and LiveCodeBench import for programs.
"""

import builtins
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction

from tests_runner import load

MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
RECURSION = 50_000
# The most items that are taken from an iterable result.
MOST_ITEMS = 1_000_000


def builtins_of_programs():
    """Return Python's built-in names and the names of MODULES. A program's own names hide both."""
    names: dict[str, object] = {}
    exec("".join(f"from {name} import *\n" for name in MODULES) + f"import {', '.join(MODULES)}", names)
    with contextlib.suppress(ImportError):  # sortedcontainers is no part of Python
        exec("import sortedcontainers\nfrom sortedcontainers import *", names)
    return names | vars(builtins)


def call(program, name, arguments):
    """Call the function, or the method of a new object of the class Solution, as on LeetCode."""
    owner = program
    if hasattr(program, "Solution") and hasattr(program.Solution, name):
        owner = program.Solution()
    return getattr(owner, name)(*arguments)


def plain(value):
    """Return values of types that JSON lacks (arrays, numbers, sets, iterables) as JSON types. Raises TypeError."""
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    if isinstance(value, (Decimal, Fraction)):
        return float(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):  # such as a generator without an end
        return list(itertools.islice(value, MOST_ITEMS))
    raise TypeError


def with_int_keys(value):
    """Return a dict with integers for keys of digits, which JSON has made text; any other value unchanged."""
    try:
        return {int(key): item for key, item in value.items()}
    except (AttributeError, ValueError):
        return value


def answer(program, job, arguments):
    if job["int_keys"] and arguments:
        arguments[0] = with_int_keys(arguments[0])
    try:
        return json.dumps(call(program, job["function"], arguments), default=plain)
    except BaseException:  # the program may raise anything
        return ""


def main():
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(RECURSION)
    job, *calls = map(json.loads, sys.stdin.read().split("\n"))
    # Output of the program is no answer.
    with open(os.dup(1), "w") as answers, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        program = load(builtins_of_programs())
        for arguments in calls:
            print(answer(program, job, arguments), file=answers, flush=True)
    os._exit(0)
