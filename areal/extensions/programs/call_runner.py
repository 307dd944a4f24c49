"""Calls a function of a program, and prints what it returns.

`code_tests` runs `main` in a sandbox, with the program in `program.py`. The values that are right are not in the
sandbox: they are compared outside it. So the program may do here what it likes.

stdin: a line `{"function", "int_keys"}`, then for each call a line with the list of its arguments. stdout: for each
call a line with the JSON of the result, or an empty line if the call failed or its result is not plain data.

Programs may use, without importing them, the modules and names that LeetCode and LiveCodeBench import for them.
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
# Of what a result is iterated over for.
MOST_ITEMS = 1_000_000


def builtins_of_programs():
    """Python's built-in names, and before them those of MODULES. The program's own names hide them."""
    names: dict[str, object] = {}
    exec("".join(f"from {name} import *\n" for name in MODULES) + f"import {', '.join(MODULES)}", names)
    with contextlib.suppress(ImportError):  # it is no part of Python
        exec("import sortedcontainers\nfrom sortedcontainers import *", names)
    return names | vars(builtins)


def call(program, name, arguments):
    """Calls the function, or the method of a new object of the class Solution, as on LeetCode."""
    owner = program
    if hasattr(program, "Solution") and hasattr(program.Solution, name):
        owner = program.Solution()
    return getattr(owner, name)(*arguments)


def plain(value):
    """Numbers, arrays, sets and what is iterated over, which JSON does not know, as what it knows. Raises TypeError."""
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
    """A dict whose keys are digits with int keys: JSON has made them text. Anything else as it is."""
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
    # What the program prints itself is no answer.
    with open(os.dup(1), "w") as answers, open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
        program = load(builtins_of_programs())
        for arguments in calls:
            print(answer(program, job, arguments), file=answers, flush=True)
    os._exit(0)
