"""The files of configs/data, on rows in the sets' own formats."""

import json
from pathlib import Path

import pytest

from areal.config import RowsConfig, load_config
from areal.data.rows import prompt_text
from areal.data.sources import open_source
from areal.rewards import functions
from areal.rewards.code_rows import read_tests

FOLDER = Path(__file__).parents[3] / "configs" / "data"
BOX = "put your final answer within \\boxed{}."
SUM = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}

# By file: a row, what its prompt contains, and a right answer where the reward is `math`.
ROWS = {
    "deepscaler": ({"problem": "What is 6*7?", "answer": "42", "solution": "Multiply."}, "What is 6*7?", "\\boxed{42}"),
    "gsm8k": ({"question": "Sum 70 and 2.", "answer": "70+2 = <<70+2=72>>72\n#### 72"}, "Sum 70 and 2.", "\\boxed{72}"),
    "math": (
        {"problem": "Halve 1.", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"},
        "Halve 1.", "so \\boxed{0.5}",
    ),
    "math500": (
        {"problem": "Find x.", "solution": "...", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "unique_id": "t/1"},
        "Find x.", "\\boxed{(3, \\pi/2)}",
    ),
    "aime24": ({"id": 60, "problem": "Find a.", "solution": "...", "answer": "204"}, "Find a.", "\\boxed{204}"),
    "aime25": ({"problem": "Find b.", "answer": "70", "id": "0"}, "Find b.", "\\boxed{70}"),
    "amc23": ({"id": 0, "question": "Find c.", "answer": 27.0, "url": ""}, "Find c.", "\\boxed{27}"),
    "boba": (
        {
            "prompt": f"<｜User｜>Find d.\nPlease reason step by step, and {BOX}<｜Assistant｜><think>\n",
            "task": "math", "query_id": "1", "solutions": ["\\boxed{9}", "\\boxed{3^2}"],
        },
        f"Find d.\nPlease reason step by step, and {BOX}", "\\boxed{9}",
    ),
    "deepcoder-taco": ({"problem": "Add.", "tests": json.dumps(SUM)}, "Add.", None),
    "deepcoder-primeintellect": (
        {"problem": "Add.", "tests": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}])},
        "Add.", None,
    ),
    "deepcoder-lcbv5": (
        {
            "problem": "Add.", "starter_code": "class Solution:\n    def add(self, a, b):",
            "tests": json.dumps(
                [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]
            ),
        },
        "class Solution:", None,
    ),
    "deepcoder-codeforces": ({"problem": "Add.", "tests": json.dumps([{"input": "1 2", "output": "3"}])}, "Add.", None),
    "livecodebench": (
        {
            "question_content": "Add.", "starter_code": "", "metadata": "{}",
            "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
            "private_test_cases": json.dumps([{"input": "4 5", "output": "9", "testtype": "stdin"}]),
        },
        "Add.", None,
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0", "prompt": 'def add(a, b):\n    """Add."""\n', "entry_point": "add",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            "canonical_solution": "    return a + b\n",
        },
        "def add(a, b)", None,
    ),
    "mbpp": (
        {"task_id": 1, "text": "Write a function.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""},
        "assert add(1, 2) == 3", None,
    ),
}  # fmt: skip


def test_every_file_has_a_row_here():
    assert {path.stem for path in FOLDER.iterdir()} == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_set_becomes_a_prompt_with_an_answer_that_its_reward_reads(name, tmp_path):
    raw, expected, right = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(raw) + "\n")
    given = {
        "base": str(FOLDER / f"{name}.yaml"),
        "source": str(tmp_path / "rows.jsonl"),
        "eval_source": None,
        "eval_size": 0,
    }
    # Options and splits belong to the set on the hub.
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in given.items()], RowsConfig)
    row = open_source(config.model_copy(update={"options": {}}), seed=0).row(0)
    text = prompt_text(row.prompt)
    assert expected in text
    assert "｜" not in text and "{{" not in text
    if row.reward == {"math": 1.0}:
        assert functions.math_answer(text, right, row.fields) == 1.0
        assert functions.math_answer(text, "\\boxed{0}", row.fields) == 0.0
        assert BOX in text
    else:
        assert row.reward == {"code": 1.0}
        assert read_tests(row.fields)
        assert "```python block" in text
