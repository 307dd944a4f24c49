"""The addition task: rows are determined by seed and index, the teacher adds, the reward reads the outcome only."""

import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from areal.data import addition

ROW = {"prompt": "a75b48c30=", "answer": "432"}
RIGHT = "a7512b4813c3004"


def replace(text: str, at: int, character: str) -> str:
    return text[:at] + character + text[at + 1 :]


def rows(seed: int, count: int, **options) -> list[dict[str, str]]:
    return [addition.make_row(seed, index, **options) for index in range(count)]


def summands(prompt: str) -> tuple[int, int]:
    return int(prompt[1:-1:3][::-1]), int(prompt[2:-1:3][::-1])


def test_the_module_does_not_import_torch():
    script = "import sys, areal.data.addition; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_row_depends_on_seed_and_index_alone():
    assert rows(3, 20) == rows(3, 20) != rows(4, 20)
    assert addition.make_row(3, 17) == rows(3, 20)[17] not in rows(3, 17)


def test_the_answer_is_the_sum_of_the_summands_in_the_prompt():
    for row in rows(0, 300):
        assert int(row["answer"]) == sum(summands(row["prompt"]))


def test_held_out_rows_are_never_training_rows():
    training = {row["prompt"] for row in rows(0, 5000, max_digits=3)}
    held_out = {row["prompt"] for row in rows(0, 500, max_digits=3, held_out=True)}
    assert not training & held_out
    assert all(map(addition.is_held_out, held_out))


def test_lengths_are_heavy_tailed():
    digits = Counter((len(row["prompt"]) - 1) // 3 for row in rows(1, 2000))
    assert min(digits) == 2
    assert 30 <= max(digits) <= 40
    assert digits[2] > digits[4] > digits[8]
    assert 35 < sum(5 * n * count for n, count in digits.items()) / 2000 < 45


def test_digit_bounds_hold_and_impossible_ones_are_refused():
    assert {len(row["prompt"]) for row in rows(0, 50, min_digits=4, max_digits=4)} == {13}
    for bounds in ({"min_digits": 1}, {"max_digits": 41}, {"min_digits": 9, "max_digits": 8}):
        with pytest.raises(ValueError, match="digits"):
            addition.make_row(0, 0, **bounds)


def test_a_teacher_without_slips_writes_the_working_of_the_docstring():
    assert addition.demonstration(ROW, Random(0)) == RIGHT


def test_a_teacher_without_slips_is_always_right():
    for row in rows(5, 300):
        completion = addition.demonstration(row, Random(0))
        assert addition.reward(row["prompt"], completion, row) == 1.0


def test_a_sloppy_teacher_is_wrong_more_often_the_longer_the_sum():
    def accuracy(digits: int) -> float:
        drawn = rows(0, 400, min_digits=digits, max_digits=digits)
        scores = [
            addition.reward(r["prompt"], addition.demonstration(r, Random(i), 0.05), r) for i, r in enumerate(drawn)
        ]
        return sum(scores) / len(scores)

    short, middle, long = accuracy(2), accuracy(8), accuracy(24)
    assert 0.75 < short < 0.95
    assert 0.4 < middle < 0.65
    assert 0.02 < long < 0.3


def test_a_sloppy_teacher_goes_on_from_the_carry_it_wrote():
    row = {"prompt": "a78b11=", "answer": "28"}
    written = {addition.demonstration(row, Random(seed), 0.01) for seed in range(20)}
    assert {"a7815b1103", "a7814b1103"} <= written


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        pytest.param(RIGHT, 1.0, id="right"),
        pytest.param(replace(RIGHT, 4, "3"), 0.0, id="a wrong sum digit"),
        pytest.param(replace(RIGHT, -2, "1"), 0.0, id="a wrong last carry"),
        pytest.param(replace(RIGHT, 1, "9"), 1.0, id="a wrong copy that does not change the answer"),
        pytest.param(replace(RIGHT, 3, "0"), 1.0, id="a wrong carry that was not carried on"),
        pytest.param(RIGHT[:-5], 0.0, id="a missing column"),
        pytest.param(RIGHT[:-1], 0.0, id="a cut off column"),
        pytest.param(RIGHT + "d0000", 0.0, id="a column too many"),
        pytest.param(RIGHT + "=", 0.0, id="something after the end"),
        pytest.param("b7512a4813c3004", 0.0, id="labels out of order"),
        pytest.param("", 0.0, id="nothing"),
        pytest.param(" " + RIGHT, 0.0, id="a space"),
        pytest.param(RIGHT.replace("4", "٤"), 0.0, id="digits that are not ASCII"),
    ],
)
def test_the_reward_judges_the_answer_of_a_complete_working(completion: str, score: float):
    assert addition.reward(ROW["prompt"], completion, ROW) == score


def test_the_last_carry_is_the_first_digit_of_the_answer():
    row = {"prompt": "y99z90=", "answer": "108"}
    assert addition.reward(row["prompt"], "y9918z9010", row) == 1.0
    assert addition.reward(row["prompt"], "y9918z9000", row) == 0.0
