"""Processes of the self-test that end badly."""

import sys
import time

import pytest

from areal.extensions.selftest.child import CheckProcess, ChildFailed, ChildGone, ChildSlow

CHECKS = """
import os, sys, time
from areal.base.errors import UserError
from areal.extensions.selftest.child import serve
from areal.extensions.selftest.findings import Finding

class Checks:
    def fine(self, text):
        print("noise")
        return [Finding("fine", "ok", text)]
    async def later(self):
        return {"a": 1}
    def wrong(self):
        raise UserError("Do it otherwise.")
    def dies(self):
        print("my last words", file=sys.stderr, flush=True)
        os._exit(3)
    def hangs(self):
        print("still here", file=sys.stderr, flush=True)
        time.sleep(1000)

serve(Checks())
"""


@pytest.fixture
def child(tmp_path):
    child = CheckProcess([sys.executable, "-c", CHECKS], {}, tmp_path / "log")
    yield child
    child.close()
    assert child._process.poll() is not None


def ask(child, order, seconds=60.0, **arguments):
    return child.ask(order, time.monotonic() + seconds, **arguments)


def test_orders_are_answered_one_after_another_whatever_is_printed(child):
    assert ask(child, "fine", text="é")[0]["measured"] == "é"
    assert ask(child, "later") == {"a": 1}
    assert "noise" in child.last_words and child.last_lines(400)[-1:] == child.last_lines(1)


@pytest.mark.parametrize(
    ("order", "sentence"),
    [("wrong", "^Do it otherwise.$"), ("dies", "its process has died: my last words"), ("unknown", "AttributeError")],
)
def test_what_fails_says_why_and_nothing_is_tried_after_it(child, order, sentence):
    with pytest.raises(ChildFailed, match=sentence):
        ask(child, order)
    with pytest.raises(ChildGone, match=order):
        ask(child, "fine", text="")


def test_a_process_that_hangs_is_ended_at_the_deadline(child):
    ask(child, "later")
    with pytest.raises(ChildSlow, match="before it began"):
        ask(child, "later", seconds=0.0)
    with pytest.raises(ChildSlow, match=r"no answer within 2 s: (?s:.*)still here"):
        ask(child, "hangs", seconds=2.0)
    assert child._process.poll() is not None
