"""What is read from a model's text: the right parts, in time that grows with its length and not with its square."""

from __future__ import annotations

import re
import time
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.text import all_shown, python_call, sentences_on, shown
from areal.data import addition
from areal.extensions.agents.parsers import cut
from areal.extensions.math import final_answer
from areal.extensions.programs.code_tests import continued, program_in, same_output
from areal.rewards.functions import exact_match

# What the functions are to find, as regular expressions, which take time beyond all bounds on some texts.
PYTHON = re.compile(r"```python\s*\n(.*?)```|<tool>(.*?)</tool>", re.DOTALL)

PIECES = st.lists(
    st.sampled_from(
        ["```", "`", "python", "```python", "\n", " ", "\t", "x", "<tool>", "</tool>", "<tool", "c++ 17", "é", "\r"]
    ),
    max_size=24,
).map("".join)


@given(PIECES)
def test_a_call_is_found_as_its_definition_says(text):
    match = PYTHON.search(text)
    assert python_call(text) == (match and (match[1] or match[2] or ""))


READERS = {
    "python_call": python_call,
    "program_in": program_in,
    "continued": lambda text: continued("def f():\n", text, "f"),
    "same_output": lambda text: same_output(text, "1.5"),
    "same_output, long": lambda text: same_output(text, text + "1.5"),
    "final_answer.extract": final_answer.extract,
    "final_answer.extract, boxed": lambda text: final_answer.extract("\\boxed{5}" + text + "$"),
    "final_answer.extract, in a formula": lambda text: final_answer.extract(text + "$\\boxed{5}$" + text + "}"),
    "stops": lambda text: cut(text, ["stop"] * 16),
    "addition": lambda text: addition.reward("a12=", text, {"answer": "3"}),
    "exact_match": lambda text: exact_match("", text, {"answer": "3"}),
    "shown": shown,
}
PARTS = (
    "```",
    "\n~~~",
    "`",
    "```python",
    "```python\n",
    "```python ",
    "\n",
    " ",
    "\n ",
    "\t\r\n",
    "<tool>",
    "</tool>",
    "<tool_call>",
    "<tool_call>{",
    "<tool_call>[",
    "\\boxed{",
    "\\boxed{1",
    "\\boxed{1}",
    "$",
    "\\$",
    "$$",
    "\\[",
    "\\]",
    "\\)",
    "#",
    "####",
    "1",
    "1,",
    ",111",
    "-",
    ".",
    "1.",
    "a1111",
    "hope",
    "pct",
    " pct",
    "a",
    "a ",
    "def f",
    "\x1b",
    "sto",
    "{",
    "[[",
    "```\nx = 1\n",
    "```\n(\n",
    "```py\n```\n",
)
SIZE, TIMES = 6_000, 4


def seconds(reader, text: str) -> float:
    """Of the processor."""
    began = time.process_time()
    reader(text)
    return time.process_time() - began


@pytest.mark.parametrize("name", READERS)
def test_reading_a_text_takes_time_in_proportion_to_its_length(name):
    """For texts that begin with one part and repeat another: a square would take 16 times as long."""
    reader = READERS[name]
    for part in PARTS:
        for begin in ("", "```python", "\\boxed{5}"):
            short, long = (begin + part * (size // len(part)) for size in (SIZE, TIMES * SIZE))
            took = seconds(reader, long)
            # It is fast, whatever it does, or in proportion already when each is measured once.
            if took < 0.05 or took < 1.4 * TIMES * seconds(reader, short):
                continue
            least = min(seconds(reader, long) for _ in range(3))
            assert least < 2.2 * TIMES * max(0.005, min(seconds(reader, short) for _ in range(3))), (begin, part)


@pytest.mark.parametrize(
    "text",
    [
        "\x1b]52;c;aGFjaw==\x07",
        "\x1b[2J\x1b[H",
        "\x9b31m",
        "\x90q\x9c",
        "a\rb",
        "\x08" * 9,
        "\x00",
        "\x7f",
        "\u202eabc",
        "\u2066x\u2069",
        "\u2028",
    ],
)
def test_what_is_shown_cannot_steer_a_terminal(text):
    assert shown(text).isprintable()
    assert "\\" in shown(text)


def test_texts_in_values_are_shown_keys_included():
    values = {"a\x1b": ["\x9b", {"b\x07": 1, 2: "c"}]}
    assert all_shown(values) == {r"a\x1b": [r"\x9b", {r"b\x07": 1, 2: "c"}]}


def test_what_is_harmless_is_shown_as_it_is():
    text = "x = 1\n\tπ ≈ 3.14 — “ok” 日本語 🙂 é\u200d"
    assert shown(text) == text


def test_a_terminal_does_not_break_sentences_within_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    sentence = f"It takes minutes to compile {'x' * 30} here."
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    print(sentence, "\x1b[31m" + "red" * 10, sep="\n", file=sentences_on(terminal))
    lines = terminal.getvalue().split("\n")
    assert lines == ["It takes minutes to", "compile", "x" * 30, "here.", "\x1b[31m" + "red" * 10, ""]


def test_what_is_no_terminal_gets_sentences_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "20")
    with (tmp_path / "out").open("w") as out:
        assert sentences_on(out) is out
