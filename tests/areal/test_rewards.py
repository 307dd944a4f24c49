import math
from fractions import Fraction

import pytest

from areal import reasoning_tasks
from areal.config import DataConfig, UserError
from areal.data import open_source
from areal.rewards import BUILT_IN, RewardError, as_score, overlong_penalty, resolve


def test_exact_match_takes_the_completion_or_its_last_line():
    reward = resolve("exact_match")
    assert reward("", " Paris\n", {"answer": "Paris"}) == 1.0
    assert reward("", "Let me think.\nParis ", {"answer": "Paris"}) == 1.0
    assert reward("", "Paris\nLyon", {"answer": "Paris"}) == 0.0


def test_addition_scores_its_own_rows():
    row = open_source(DataConfig(source="addition", eval_size=0), seed=0).row(0)
    assert resolve("addition")(row.prompt, "a1", row.fields) == 0.0


@pytest.mark.parametrize("task", ["leg_counting", "arc_1d", "rearc", "knights_knaves", "sudoku", "countdown"])
def test_reasoning_gym_gives_its_own_answer_full_marks(task):
    row = open_source(DataConfig(source=f"reasoning_gym:{task}", eval_size=0), seed=0).row(3)
    reward = resolve("reasoning_gym")
    assert reward(row.prompt, f"<answer>wrong</answer> no: <answer>\n{row.answer}\n</answer> done", row.fields) == 1.0
    assert reward(row.prompt, row.answer, row.fields) == 1.0
    assert reward(row.prompt, "<answer>nonsense</answer>", row.fields) < 1.0


def test_a_composite_of_tasks_is_scored_by_the_right_one():
    parts = [{"name": name, "weight": 1.0, "config": {}} for name in ("leg_counting", "gcd")]
    config = DataConfig(source="reasoning_gym:composite", options={"datasets": parts}, eval_size=0)
    reward, source = resolve("reasoning_gym"), open_source(config, seed=0)
    for row in map(source.row, range(8)):
        assert reward(row.prompt, row.answer, row.fields) == 1.0


def test_an_answer_that_its_scorer_stumbles_over_scores_zero():
    row = open_source(DataConfig(source="reasoning_gym:prime_factorization", eval_size=0), seed=0).row(0)
    assert resolve("reasoning_gym")(row.prompt, "no number", row.fields) == 0.0


@pytest.mark.parametrize("task", reasoning_tasks.EVALUATING)
def test_no_scorer_runs_what_the_model_wrote(task, tmp_path):
    row = open_source(DataConfig(source=f"reasoning_gym:{task}", eval_size=0), seed=0).row(0)
    trace = tmp_path / "ran"
    assert resolve("reasoning_gym")(row.prompt, f"open({str(trace)!r}, 'w')", row.fields) < 0.1
    assert not trace.exists()


def test_reasoning_gym_needs_a_row_of_its_own():
    with pytest.raises(RewardError, match="no entry of reasoning_gym"):
        resolve("reasoning_gym")("", "1", {"answer": "1"})


def test_names_resolve_or_say_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reward_module.py").write_text("def short(prompt, completion, row):\n    return 1\nvalue = 3\n")
    assert resolve("own_reward_module:short")("", "", {}) == 1
    with pytest.raises(UserError, match="there is no reward 'maths': name one of math, exact_match, addition"):
        resolve("maths")
    with pytest.raises(UserError, match="has no shrt: did you mean short"):
        resolve("own_reward_module:shrt")
    with pytest.raises(UserError, match="is a int, not a function"):
        resolve("own_reward_module:value")
    with pytest.raises(UserError, match="ModuleNotFoundError: No module named 'own_missing'"):
        resolve("own_missing:short")
    assert all(callable(resolve(name)) for name in BUILT_IN)


def test_only_finite_numbers_are_scores():
    assert [as_score(value) for value in (True, 2, 0.5, Fraction(1, 4))] == [1.0, 2.0, 0.5, 0.25]
    for value in (math.nan, math.inf, None, "1", 10**400):
        with pytest.raises(RewardError):
            as_score(value)


def test_an_overlong_completion_loses_its_reward_linearly_over_the_buffer():
    lengths = (1, 60, 61, 70, 79, 80, 200)
    assert [overlong_penalty(n, 80, 20) for n in lengths] == [0, 0, 0.05, 0.5, 0.95, 1, 1]


def test_without_a_buffer_no_length_costs_anything():
    assert [overlong_penalty(n, 80, 0) for n in (1, 80, 200)] == [0, 0, 0]
