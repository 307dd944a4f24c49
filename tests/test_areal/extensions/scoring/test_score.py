"""`python -m areal score`: the same rewards, on completions in a file."""

from __future__ import annotations

import json
import os
import sys

import pytest
from support.process_tree import needs_namespaces
from support.small_runs import read_jsonl
from support.tiny_pictures import png

from areal.__main__ import main


@pytest.fixture
def score(tmp_path, capsys):
    """Runs the tool on rows; what it wrote, and what it said."""

    def run(
        *rows: dict, reward: tuple[str, ...], overrides: tuple[str, ...] = (), flags: tuple[str, ...] = ()
    ) -> tuple[int, list[dict], str]:
        inputs, output = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
        inputs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        named = [word for name in reward for word in ("--reward", name)]
        arguments = [*named, "--input", str(inputs), "--output", str(output), *overrides, *flags]
        code = main(["score", *arguments])
        return code, read_jsonl(output) if output.exists() else [], capsys.readouterr().err

    return run


def test_every_line_gets_a_score_or_the_reason_why_there_is_none(score):
    request = {"prompt": "1+1=", "answer": "2"}
    code, scores, printed = score(
        request | {"completion": "2"},
        request | {"completion": "3"},
        {"prompt": "?", "completion": "2"},
        request | {"completion": "2", "number": 1 << 64},
        reward=("exact_match",),
        overrides=("reward.workers=2",),
    )
    assert code == 0
    message = [(item["line"], item["score"], item["status"]) for item in scores]
    assert message == [(1, 1.0, "ok"), (2, 0.0, "ok"), (3, None, "raised"), (4, None, "raised")]
    assert scores[2]["reason"] == "the row has no answer to compare with"
    assert all(item["seconds"] > 0 for item in scores)
    assert scores[3]["reason"].startswith("the row cannot be passed to a worker")
    assert "2 of 4 completions scored" in printed
    assert "mean score 0.5000" in printed
    assert "raised: 2" in printed


def test_a_reward_that_scores_nothing_leaves_the_reasons(score):
    code, scores, printed = score({"prompt": "?", "completion": "2"}, reward=("exact_match",))
    assert code == 1
    assert scores[0]["reason"] == "the row has no answer to compare with"
    assert "0 of 1 completions scored" in printed
    assert "raised: 1" in printed


def test_several_rewards_add_up_and_are_told_apart(score, tmp_path, monkeypatch):
    (tmp_path / "scored_lengths.py").write_text("def short(prompt, completion, row):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "1+1=", "answer": "2", "completion": "2"}
    _, (result,), _ = score(row, reward=("exact_match", "scored_lengths.py:short"))
    assert result["score"] == 1.25
    assert result["parts"] == {"exact_match": 1.0, "scored_lengths.py:short": 0.25}


HUMANEVAL = {
    "prompt": 'def add(a, b):\n    """The sum."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}


@needs_namespaces
def test_rows_with_programs_are_tested_in_the_ways_that_data_sets_write_them(score):
    right, wrong = (
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a - b\n```",
    )
    mbpp = {"prompt": "Write add.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
    asserts = {"prompt": "Write add.", "entry_point": "add", "tests": "assert candidate(1, 2) == 3"}
    defined = {"prompt": "Write add.", "entry_point": "add", "tests": HUMANEVAL["test"]}
    stdin = {"prompt": "Add.", "tests": json.dumps([{"input": "1 2", "output": "3"}])}
    _, scores, _ = score(
        HUMANEVAL,
        HUMANEVAL | {"completion": "    return a * b\n"},
        mbpp | {"completion": right},
        mbpp | {"completion": wrong},
        asserts | {"completion": right},
        asserts | {"completion": wrong},
        defined | {"completion": right},
        stdin | {"completion": "print(sum(map(int, input().split())))"},
        stdin | {"completion": right},
        reward=("code",),
    )
    assert [item["score"] for item in scores] == [1, 0, 1, 0, 1, 0, 1, 1, 0]
    assert scores[3]["parts"] == {"code/passed": 0.5}


def check_data(score, *rows, reward):
    code, results, printed = score(*rows, reward=(reward,), flags=("--check-data",))
    return code, [(item["status"], item["solution"], item.get("reason")) for item in results], printed


GOOD = ("ok", "passed", None)


@needs_namespaces
def test_the_data_are_checked_with_a_program_that_does_nothing_and_with_their_own_solutions(score):
    swallowed = "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass"
    code, results, printed = check_data(
        score,
        HUMANEVAL,
        {"tests": json.dumps([{"input": "1", "output": "1"}]), "solutions": ["print(2)", "print(input())"]},
        {"test_list": ["assert add(1, 2) == 3", "assert add(1, 1) == 2"], "code": "def add(a, b): return 3"},
        {"test_list": ["assert add(1, 2) is None"], "code": "def add(a, b): return"},
        {"test_list": [swallowed]},
        {"tests": "x = 1", "solution": "x = 1"},
        reward="code",
    )
    assert code == 1
    idle = "if functions return None, the score is full"
    refused = "the row's tests cannot be judged outside the program: "
    advice = ": remove the row, or set sandbox.tests=inside_where_needed (areal docs sandbox)"
    assert results == [
        GOOD,
        GOOD,
        ("bad", "failed", f"{refused}the row's own solution does not pass them so{advice}"),
        ("bad", "passed", idle),
        ("bad", None, idle),
        ("bad", None, "the row's tests cannot fail: no code that runs in them checks something about the program"),
    ]
    assert f"line 4: {idle}" in printed
    assert "4 of 6 rows are bad" in printed
    assert "3 passed, 1 failed" in printed


@needs_namespaces
def test_the_check_counts_the_rows_that_are_judged_beside_the_program(score):
    code, results, printed = score(
        {"test_list": ["assert f(1) == 2"]},
        {"test_list": ["assert f(1).left == 2"]},
        reward=("code",),
        flags=("--check-data",),
        overrides=("sandbox.tests=inside_where_needed",),
    )
    assert (code, [result["inside"] for result in results]) == (0, [False, True])
    assert "the tests of 1 of 2 rows run beside the program, which can forge their verdict" in printed
    assert "sandbox.tests=outside takes 1 of 2 rows, inside_where_needed 2: choose inside_where_needed" in printed


@needs_namespaces
def test_the_check_says_which_share_of_the_rows_each_setting_takes_and_which_to_choose(score):
    plain, looks, weak = ({"test_list": [test]} for test in ("assert f(1) == 2", "assert f(1).left == 2", "x = 1"))
    assert (
        "takes 1 of 3 rows, inside_where_needed 2: choose inside_where_needed"
        in (check_data(score, plain, looks, weak, reward="code")[2])
    )
    assert (
        "takes 1 of 2 rows, inside_where_needed 1: choose outside" in check_data(score, plain, weak, reward="code")[2]
    )


@needs_namespaces
def test_a_row_is_good_if_only_some_of_the_programs_that_compute_nothing_cannot_be_judged(score):
    slow_for_zero = "x = f(1)\nwhile type(x) is int and x == 0: pass\nassert x == 3"
    code, (result,), _ = score(
        {"test_list": [slow_for_zero]},
        reward=("code",),
        flags=("--check-data",),
        overrides=("sandbox.cpu_seconds=0.5",),
    )
    assert (code, result["status"]) == (0, "ok")


def test_data_with_answers_are_checked_with_these(score, tmp_path):
    assert check_data(score, {"answer": "#### 18"}, {"answer": "\\frac{1}{2}"}, reward="math")[:2] == (0, [GOOD, GOOD])
    code, results, _ = check_data(score, {"answer": ""}, {"question": "?"}, {"answer": "Paris"}, reward="exact_match")
    assert (code, [status for status, *_ in results]) == (1, ["bad", "bad", "ok"])
    assert results[0][2] == "if the completion is empty, the score is full"
    assert results[1][2] == "the row has no answer to compare with"
    (tmp_path / "here.png").write_bytes(png(6, 4, 0))
    rows = [{"answer": "1", "images": [f"{name}.png"]} for name in ("here", "none")]
    good, bad = check_data(score, *rows, reward="math")[1]
    assert good == GOOD and bad[:2] == ("bad", None) and "the row has a picture that cannot be read" in bad[2]


def test_only_rewards_that_compare_with_the_row_check_it(score, tmp_path, monkeypatch):
    (tmp_path / "unchecked_lengths.py").write_text("def short(prompt, completion, row):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    code, results, printed = check_data(score, {"answer": "1"}, reward="unchecked_lengths.py:short")
    assert (code, results) == (2, [])
    assert (
        "--check-data checks rows for one reward of code, addition, exact_match, math, reasoning_gym, not for"
        in printed
    )


@pytest.mark.parametrize(
    ("row", "reward", "overrides", "sentence"),
    [
        (
            {"prompt": "1", "answer": "2"},
            "exact_match",
            (),
            "has no 'completion', only prompt, answer: add it, or check",
        ),
        ({"completion": "1"}, "exact_match", (), "line 1, has no 'prompt'"),
        (
            {"prompt": 1, "completion": "2"},
            "exact_match",
            (),
            "line 1, has a prompt that cannot be read (it is neither text nor messages)",
        ),
        (
            {"prompt": [{"role": "user"}], "completion": "2"},
            "exact_match",
            (),
            "line 1, has a prompt that cannot be read (the content of a message",
        ),
        ({"prompt": "1", "completion": "2"}, "exact", (), "there is no reward 'exact'"),
        ({"prompt": "1", "completion": "2"}, "exact_match", ("reward.speed=2",), "Unknown key 'reward.speed'"),
        ({"prompt": "1", "completion": "2"}, "code", ("sandbox.wall_seconds=60",), "reward.timeout_seconds is 10, but"),
    ],
)
def test_a_mistake_is_one_sentence(score, row, reward, overrides, sentence):
    code, scores, printed = score(row, reward=(reward,), overrides=overrides)
    assert (code, scores, len(printed.splitlines())) == (2, [], 1)
    assert sentence in printed


def test_what_is_there_is_kept_if_nothing_can_be_written_in_its_place(tmp_path, capsys):
    rows, scores = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    rows.write_text('{"prompt": "1", "answer": "2"}')
    scores.write_text("those of before")
    for output, sentence in (rows, "rows.jsonl is the --input, which would be lost"), (scores, "has no 'completion'"):
        assert main(["score", "--reward", "exact_match", "--input", str(rows), "--output", str(output)]) == 2
        assert sentence in capsys.readouterr().err
    assert rows.read_text() and scores.read_text() == "those of before"
    rows.write_text('{"prompt": "1", "answer": "2", "completion": "2"}')
    assert main(["score", "--reward", "exact_match", "--input", str(rows), "--output", str(rows / "x.jsonl")]) == 2
    assert "x.jsonl cannot be written (Not a directory): name another" in capsys.readouterr().err


def test_scores_that_nobody_reads_any_more_end_nothing(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2", "completion": "2"}')
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    assert main(["score", "--reward", "exact_match", "--input", str(tmp_path / "rows.jsonl"), "reward.workers=1"]) == 0
