"""The files of configs/data, on rows in the sets' own formats."""

import base64
import json
from pathlib import Path

import pytest
from support.tiny_pictures import png

from areal.base.errors import UserError
from areal.config import load_config
from areal.config.data_section import BenchmarkConfig, RowsConfig
from areal.config.role_sections import EvaluatorConfig, benchmarks_in
from areal.data.rows import prompt_text
from areal.data.sources import open_benchmark, open_source
from areal.extensions.math import math_answers
from areal.extensions.programs.code_rows import read_tests

FOLDER = Path(__file__).parents[3] / "configs" / "data"
BOX = "put your final answer within \\boxed{}."
IMAGE = f"data:image/png;base64,{base64.b64encode(png(6, 4, 0)).decode()}"
SUM = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}

# By file: a row, what its prompt contains, and a right answer where the reward is `math`.
ROWS = {
    "deepscaler": ({"problem": "What is 6*7?", "answer": "42", "solution": "Multiply."}, "What is 6*7?", "\\boxed{42}"),
    "gsm8k": ({"question": "Sum 70 and 2.", "answer": "70+2 = <<70+2=72>>72\n#### 72"}, "Sum 70 and 2.", "\\boxed{72}"),
    "math": (
        {"problem": "Halve 1.", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"},
        "Halve 1.",
        "so \\boxed{0.5}",
    ),
    "math500": (
        {"problem": "Find x.", "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "unique_id": "t/1"},
        "Find x.",
        "\\boxed{(3, \\pi/2)}",
    ),
    "aime24": ({"id": 60, "problem": "Find a.", "solution": "...", "answer": "204"}, "Find a.", "\\boxed{204}"),
    "aime25": ({"problem": "Find b.", "answer": "70", "id": "0"}, "Find b.", "\\boxed{70}"),
    "amc23": ({"id": 0, "question": "Find c.", "answer": 27.0, "url": ""}, "Find c.", "\\boxed{27}"),
    "boba": (
        {
            "prompt": f"<｜User｜>Find d.\nPlease reason step by step, and {BOX}<｜Assistant｜><think>\n",
            "task": "math",
            "query_id": "1",
            "solutions": ["\\boxed{9}", "\\boxed{3^2}"],
        },
        f"Find d.\nPlease reason step by step, and {BOX}",
        "\\boxed{9}",
    ),
    "geometry3k": (
        {"images": [IMAGE], "problem": "<image>Find x.", "answer": "4 \\sqrt{2}"},
        "<image>Find x.",
        "\\boxed{4\\sqrt{2}}",
    ),
    "clevr": (
        {"image": IMAGE, "problem": "How many items are there?", "solution": "<answer> 3 </answer>"},
        "<image>How many items are there?",
        "\\boxed{3}",
    ),
    "deepcoder-taco": ({"problem": "Add.", "tests": json.dumps(SUM)}, "Add.", None),
    "deepcoder-primeintellect": (
        {"problem": "Add.", "tests": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}])},
        "Add.",
        None,
    ),
    "deepcoder-lcbv5": (
        {
            "problem": "Add.",
            "starter_code": "class Solution:\n    def add(self, a, b):",
            "tests": json.dumps(
                [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]
            ),
        },
        "class Solution:",
        None,
    ),
    "deepcoder-codeforces": ({"problem": "Add.", "tests": json.dumps([{"input": "1 2", "output": "3"}])}, "Add.", None),
    "livecodebench": (
        {
            "question_content": "Add.",
            "starter_code": "",
            "metadata": "{}",
            "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
            "private_test_cases": json.dumps([{"input": "4 5", "output": "9", "testtype": "stdin"}]),
        },
        "Add.",
        None,
    ),
    "leetcode": (
        {
            "prompt": "import math\n",
            "problem_description": "Add.",
            "entry_point": "Solution().add",
            "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
            "test": "def check(candidate):\n    assert candidate(a = 1,b = 2) == 3\n",
        },
        "class Solution:",
        None,
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": 'def add(a, b):\n    """Add."""\n',
            "entry_point": "add",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            "canonical_solution": "    return a + b\n",
        },
        "def add(a, b)",
        None,
    ),
    "mbpp": (
        {"task_id": 1, "text": "Write a function.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""},
        "assert add(1, 2) == 3",
        None,
    ),
}


BENCHMARKS = ("aime24", "aime25", "amc23", "gsm8k", "humaneval", "livecodebench", "math500")


def benchmark_of(path: Path, *rows: dict, **keys) -> BenchmarkConfig:
    """The benchmark `path.stem` on rows of one's own, as --source gives them."""
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {path.stem: {"source": str(path), **keys}}
    return EvaluatorConfig(benchmarks=benchmarks_in(named)).benchmarks[path.stem]


def test_every_benchmark_is_tried_here():
    assert {path.stem for path in (FOLDER.parent / "benchmarks").iterdir()} == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_takes_the_rows_of_its_set_in_their_order(name, tmp_path):
    raw, expected, _ = ROWS[name]
    rows = [raw | {"contest_date": "2024-10-05T00:00:00", "id": n} for n in range(3)]
    benchmark = open_benchmark(name, benchmark_of(tmp_path / name, *rows), seed=0)
    assert [(row.index, row.fields["id"]) for row in benchmark] == [(0, 0), (1, 1), (2, 2)]
    assert [message["role"] for message in benchmark[0].prompt] == ["user"]
    assert expected in prompt_text(benchmark[0].prompt)
    assert benchmark[0].reward == ({"code": 1.0} if name in ("humaneval", "livecodebench") else {"math": 1.0})


def test_a_benchmark_may_be_the_rows_of_some_days(tmp_path):
    days = ["2024-07-31T22:00:00", "2024-08-01T00:00:00", "2025-02-01T00:00:00", "2025-02-02T00:00:00", "2024-12-24"]
    rows = [ROWS["livecodebench"][0] | {"contest_date": day} for day in days]
    path = tmp_path / "livecodebench"
    assert [row.index for row in open_benchmark("x", benchmark_of(path, *rows), 0)] == [1, 2, 4]
    assert [row.index for row in open_benchmark("x", benchmark_of(path, *rows, size=2), 0)] == [1, 2]
    later = benchmark_of(path, *rows, dates=["2026-01-01", "2026-02-01"])
    with pytest.raises(UserError, match="has no row of the days from 2026-01-01 to 2026-02-01"):
        open_benchmark("x", later, 0)
    with pytest.raises(UserError, match="row 0, has the 'contest_date' None, which is no date"):
        open_benchmark("x", benchmark_of(path, ROWS["livecodebench"][0]), 0)


@pytest.mark.parametrize("source", ["addition", "reasoning_gym:chain_sum"])
def test_a_generated_task_is_a_benchmark_of_its_first_rows(source):
    config = BenchmarkConfig(source=source, size=5, reward="addition")
    rows = open_benchmark("sums", config, seed=3)
    assert [row.index for row in rows] == [0, 1, 2, 3, 4] and len({row.prompt for row in rows}) == 5
    assert rows[:2] == open_benchmark("sums", config.model_copy(update={"size": 2}), seed=3)
    with pytest.raises(UserError, match="has no end: set evaluator.benchmarks.sums.size"):
        open_benchmark("sums", config.model_copy(update={"size": None}), seed=3)


def test_every_file_has_a_row_here():
    assert {path.stem for path in FOLDER.iterdir()} == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_set_becomes_a_prompt_with_an_answer_that_its_reward_reads(name, tmp_path):
    raw, expected, right = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(raw) + "\n")
    inputs = {
        "base": str(FOLDER / f"{name}.yaml"),
        "source": str(tmp_path / "rows.jsonl"),
        "eval_source": None,
        "eval_size": 0,
    }
    # Options and splits belong to the set on the hub.
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in inputs.items()], RowsConfig)
    row = open_source(config.model_copy(update={"options": {}}), seed=0).row(0)
    text = prompt_text(row.prompt)
    assert expected in text
    assert "｜" not in text and "{{" not in text
    if row.reward == {"math": 1.0}:
        assert math_answers.score(text, right, row.fields) == 1.0
        assert math_answers.score(text, "\\boxed{0}", row.fields) == 0.0
        assert BOX in text
    else:
        assert row.reward == {"code": 1.0}
        assert read_tests(row.fields)
        assert "```python block" in text
