import json

import pytest

from actors.runtime import preflight
from areal.config import Config, UserError
from areal.data.sources import open_source


@pytest.fixture
def check(tmp_path):
    """Checks the answers of rows with these answers and other fields."""

    def check(answers, eval_size=0, rewards="math", **fields):
        file = tmp_path / "rows.jsonl"
        rows = [{"prompt": f"What is {n}?", "answer": answer, **fields} for n, answer in enumerate(answers)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = Config.model_validate(
            {
                "model": "m",
                "steps": 1,
                "batch_size": 4,
                "group_size": 2,
                "data": {"source": str(file), "eval_size": eval_size},
                "sampling": {"max_new_tokens": 64},
                "reward": {"functions": rewards},
            }
        )
        preflight.check_answers(config, open_source(config.data, config.seed))

    return check


GOOD = ["72", 7, 0.5, "5 + 2 = 7\n#### 1,007", "\\frac{1}{2}", ["x+1", 3], "so it is \\boxed{\\pi}", "Paris"]


def test_answers_that_can_be_read_pass_silently(check, capsys):
    check(GOOD * 3, eval_size=5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("bad", ["x^2 +* 3", None, [], ["5", "\\frac{1}{0}"]])
@pytest.mark.parametrize("eval_size", [0, 8])
def test_answers_that_cannot_be_read_are_refused_before_the_run(check, bad, eval_size):
    named = repr(bad if isinstance(bad, str) else bad[-1]) if bad else "the row of the prompt 'What is 8?'"
    with pytest.raises(UserError) as told:
        check([*GOOD, bad], eval_size=eval_size)
    assert "cannot read the answers of 1 of the 9 rows of data.source" in str(told.value)
    assert "correct or remove these rows" in str(told.value)
    assert f"that were checked, such as {named}" in str(told.value)


def test_a_few_answers_that_cannot_be_read_are_told(check, capsys):
    check([*GOOD * 3, "x^2 +* 3"])
    assert "cannot read the answers of 1 of the 25 rows" in capsys.readouterr().err


def test_only_rows_that_math_scores_are_checked(check, capsys):
    check(["x^2 +* 3"], rewards="exact_match")
    check(["x^2 +* 3"], reward="exact_match")
    with pytest.raises(UserError, match="cannot read the answers of 1 of the 1 rows"):
        check(["x^2 +* 3"], rewards="exact_match", reward={"math": 1.0, "exact_match": 0.5})
    assert capsys.readouterr() == ("", "")
