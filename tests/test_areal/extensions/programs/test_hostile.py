# ruff: noqa: E501
"""Programs that do not know the answer, each with tests that it is made for: what becomes of it is a 0, or the row is
refused before it runs. `tests/programs/attacks.py` has more, which are tried on many forms of tests."""

from __future__ import annotations

import pytest
from support.process_tree import needs_namespaces

from areal.extensions.programs.code_tests import CodeTests
from areal.rewards.functions import RewardError

pytestmark = needs_namespaces

BANK = """
import pytest, unittest
from solution import withdraw, InsufficientFunds
def test_raises():
    with pytest.raises(InsufficientFunds):
        assert withdraw(1, 5) == -3
def test_caught():
    try:
        withdraw(1, 5)
        assert False
    except InsufficientFunds:
        pass
class TestBank(unittest.TestCase):
    def test_raises(self):
        with self.assertRaises(InsufficientFunds):
            self.assertEqual(withdraw(1, 5), -3)
"""
MODULE = "import pytest, math, numpy as np\nfrom solution import f\n"
# A file that pytest would run before the tests beside it.
PACKAGE = """
import os
code = 'import _pytest.python as p\\np.Function.runtest = lambda self: None'
open('__init__.py', 'w').write(code)
"""
# By name: the program, and its tests.
ZEROS: dict[str, tuple[str, dict]] = {
    "an infinite half": (
        "import numpy as np\ndef f(x): return np.float16('inf')",
        {"test": MODULE + "@pytest.mark.parametrize('n', [65520, 10**6, 1e30])\ndef test_f(n):\n    assert f(n) == n"},
    ),
    "a half of pi": ("import numpy as np\ndef f(): return np.float16(3.14)", {"test_list": ["import math\nassert f() == math.pi"]}),
    "a rounded number": ("import numpy as np\ndef f(): return np.float32(16777216)", {"test_list": ["assert f() == 16777217"]}),
    "an infinite array": (
        "import numpy as np\ndef f(): return np.array([np.float16('inf')])",
        {"test_list": ["assert f() == 70000", "assert (f() == [70000]).all()", "assert f()[0] == 70000"]},
    ),
    "a small array": (
        "import numpy as np\ndef f(): return np.array([16777216, 44], np.float32)",
        {"test_list": ["import numpy as np\nassert np.array_equal(f(), [16777217, 44])", "assert f()[0] == 16777217"]},
    ),
    "a rounded double": ("import numpy as np\ndef f(): return np.float64(2**53)", {"test_list": ["assert f() == 2**53 + 1"]}),
    "another name of Exception": (
        "InsufficientFunds = Exception\nclass Account: pass\ndef withdraw(a, b): return 0", {"test": BANK},
    ),
    "another name of AssertionError": ("InsufficientFunds = AssertionError\ndef withdraw(a, b): return 0", {"test": BANK}),
    "a pair of names": ("InsufficientFunds = (AssertionError, Exception)\ndef withdraw(a, b): return 0", {"test": BANK}),
    "an error derived from AssertionError": (
        "class InsufficientFunds(AssertionError): pass\nInsufficientFunds.__name__ = 'AssertionError'\nInsufficientFunds.__module__ = 'solution'\n"
        "def withdraw(a, b): return 0",
        {"test": BANK},
    ),
    "an AssertionError of its own": (
        "def f(x): raise AssertionError('no')",
        {"test_list": ["try:\n    f(1)\n    ok = True\nexcept ValueError:\n    ok = False\nassert ok", "import pytest\nwith pytest.raises(LookupError):\n    f(1)"]},
    ),
    "a huge integer where a float is expected": ("def f(): return 10**400", {"tests": {"fn_name": "f", "inputs": [[]], "outputs": [0.5]}}),
    "a huge integer near a float": (
        "def f(): return 10**400",
        {"test_list": ["import math\nassert math.isclose(f(), 0.5)", "assert abs(f() - 0.5) < 1e-6", "assert f() == 0.5"]},
    ),
    "a huge float": ("def f(): return 1e308 * 10", {"tests": {"fn_name": "f", "inputs": [[]], "outputs": [1e308]}}),
    "not a number": ("def f(): return float('nan')", {"tests": {"fn_name": "f", "inputs": [[]], "outputs": [0.5]}}),
    "data that make the tests slow": (
        "def f(x): return list(range(13))", {"test_list": ["import itertools\nassert (1, 2) in [*itertools.permutations(f(1))]"]},
    ),
    "text that makes the tests slow": (
        "def f(x): return 'a' * 40 + 'b'", {"test_list": ["import re\nassert re.fullmatch('(a+)+$', f(1))"]},
    ),
    "a number that makes the tests slow": ("def f(x): return 10**9", {"test_list": ["assert sum(range(f(1))) + f(2) ** f(1) == 3"]}),
    "an iterator without end": ("import itertools\ndef f(x): return itertools.count()", {"test_list": ["assert list(f(1)) == [1]"]}),
    "an object with a truth of its own": (
        "class T:\n    def __bool__(self): raise SystemExit\n    __eq__ = lambda s, o: s\ndef f(x): return T()",
        {"test_list": ["assert f(1)", "assert f(1) == 3", "assert not f(1) != 3"]},
    ),
    "a FIFO in the place of the tests": (
        "import os\nfor name in ('tests.py', 'solution.py', 'conftest.py', 'pytest.ini'):\n    os.mkfifo(name)\ndef f(x): return 0",
        {"test": MODULE + "def test_f():\n    assert f(1) == 3"},
    ),
    "a plugin of its own": (
        "open('conftest.py', 'w').write('def pytest_runtest_makereport(item, call): call.excinfo = None')\n"
        "open('pytest.ini', 'w').write('[pytest]\\naddopts = -k nothing')\ndef f(x): return 0",
        {"test": MODULE + "def test_f():\n    assert f(1) == 3"},
    ),
    "a package around the tests": (PACKAGE + "def f(x): return 0", {"test": MODULE + "def test_f():\n    assert f(1) == 3"}),
    "a package in the place of the tests": (
        PACKAGE + "def again():\n    while True:\n        try:\n            os.unlink('tests.py')\n            os.mkdir('tests.py')\n"
        "            open('tests.py/__init__.py', 'w').write(code)\n            open('tests.py/test_a.py', 'w')\n        except OSError: pass\n"
        "import threading\nthreading.Thread(target=again, daemon=True).start()\ndef f(x): return 0",
        {"test": MODULE + "def test_f():\n    assert f(1) == 3"},
    ),
    "the end of its process": ("import os\ndef f(x): os._exit(0)", {"test_list": ["import pytest\nwith pytest.raises(ValueError):\n    f(1)"]}),
    "the death of its tests": ("import os\ndef f(x): os.kill(os.getppid(), 9)", {"test": MODULE + "def test_f():\n    assert f(1) == 3"}),
    "a skipped test": (
        "import pytest, unittest\ndef f(x): raise (pytest.skip.Exception if x else unittest.SkipTest)('no')",
        {"test": MODULE + "def test_f():\n    assert f(1) == 3\ndef test_g():\n    assert f(0) == 3"},
    ),
    "the end of the session": (
        "import pytest\ndef f(x): pytest.exit('all is well', 0)", {"test": MODULE + "def test_f():\n    assert f(1) == 3"},
    ),
}  # fmt: skip
# By name: the tests, and what passes them and computes nothing.
WEAK: dict[str, tuple[dict, str]] = {
    "a loop over a result": ({"test_list": ["for i, x in zip(range(9), f(3)):\n    assert x >= 0"]}, "functions return"),
    "a loop over a result that has items": (
        {"test_list": ["r = f(3)\nassert len(r) > 5 and r[1] and all(x == i for i, x in zip(range(9), r))"]}, "functions return a long range",
    ),
    "more than a number": ({"test_list": ["assert f(3) > 10**6"]}, "functions return inf"),
    "what numpy rounds": ({"test_list": ["assert f(3) > 70000"]}, "functions return inf"),
    "an argument that is read afterwards": (
        {"test_list": ["case = {'given': 3, 'expected': 9}\nr = f(case)\nassert r == case['expected']"]}, "functions set all values",
    ),
    "a number in the output": (
        {"test": "from solution import f\ndef test_f(capsys):\n    f(3)\n    assert '777' in capsys.readouterr().out"}, "functions print many numbers",
    ),
    "an error of any kind": ({"test_list": ["try:\n    f(3)\n    ok = False\nexcept Exception:\n    ok = True\nassert ok"]}, "functions raise an error"),
    "an undefined name": (
        {"test_list": ["try:\n    f(3)\n    ok = 0\nexcept ValueError:\n    ok = 0\nexcept Exception:\n    ok = 1\nassert ok"]}, "nothing is defined",
    ),
}  # fmt: skip
# By name: tests that run outside for no program, and what they need.
REFUSED = {
    "a folder that the program sees": (
        "def test_f(tmp_path):\n    (tmp_path / 'x').write_text('7')\n    assert f(tmp_path) == 7",
        "the fixture tmp_path",
    ),
    "an object that the program gets": (
        "from unittest.mock import Mock\nassert f(Mock()) == 3",
        "the module unittest.mock",
    ),
    "text that is run": ("assert eval(f(3)) == 3", "eval"),
    "an object whose parts are asked for by name": ("assert getattr(f(3), 'value') == 3", "getattr, which looks into"),
    "an object that is looked into": ("assert f(3).value == 3", ".value, which no plain data have"),
}


@pytest.fixture(scope="module")
def code():
    reward = CodeTests(cpu_seconds=1.0, wall_seconds=30.0)
    yield reward
    reward.close()


@pytest.mark.parametrize("name", ZEROS)
async def test_a_program_without_the_answer_gets_0_whatever_it_does(code, name):
    program, row = ZEROS[name]
    assert await code.score("", program, row) == (0.0, {"passed": 0.0})


@pytest.mark.parametrize("name", WEAK)
async def test_tests_that_are_passed_by_what_computes_nothing_are_weak(code, name):
    row, what = WEAK[name]
    assert (await code.weakness(row) or "").startswith(what)


@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_program_could_reach_is_refused_before_it_runs(code, name):
    test, needed = REFUSED[name]
    with pytest.raises(RewardError, match=f"cannot be judged outside the program: they need {needed}"):
        await code.score("", "def f(x): return 7", {"test": test})
