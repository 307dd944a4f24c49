"""What the scores of an evaluation say, against every way to choose k of n samples."""

from __future__ import annotations

from itertools import combinations

import pytest

from actors.evaluator.pass_at_k import pass_at_k, scorecard


def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_solved_one():
    for n in range(1, 8):
        for c in range(n + 1):
            solved = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                choices = [any(choice) for choice in combinations(solved, k)]
                assert pass_at_k(n, c, k) == pytest.approx(sum(choices) / len(choices))


def test_every_row_weighs_the_same_however_many_of_its_samples_were_scored():
    card = scorecard([[1.0, 0.0, 0.0, 0.5], [1.0]], samples=4, pass_score=1.0)
    assert card.accuracy == pytest.approx((1.5 / 4 + 1.0) / 2)
    assert card.pass_at == pytest.approx({"1": (1 / 4 + 1) / 2, "2": 1 / 2, "4": 1.0})
    assert card.failed == 0


def test_a_row_without_a_score_is_failed_and_not_a_zero():
    card = scorecard([[1.0], [], []], samples=1, pass_score=1.0)
    assert (card.accuracy, card.pass_at, card.failed) == (1.0, {"1": 1.0}, 2)


def test_a_sample_is_solved_from_the_given_score_on():
    rows = [[0.5, 0.4]]
    assert scorecard(rows, samples=2, pass_score=0.5).pass_at == {"1": 0.5, "2": 1.0}
    assert scorecard(rows, samples=2, pass_score=0.6).pass_at == {"1": 0.0, "2": 0.0}


def test_k_doubles_up_to_the_samples_of_a_row():
    assert list(scorecard([[0.0] * 6], samples=6, pass_score=1.0).pass_at) == ["1", "2", "4"]
    assert list(scorecard([[0.0] * 3], samples=8, pass_score=1.0).pass_at) == ["1", "2"]  # five could not be scored


def test_an_evaluation_in_which_nothing_was_scored_has_no_accuracy():
    with pytest.raises(ValueError, match="not one sample of 2 rows"):
        scorecard([[], []], samples=2, pass_score=1.0)


def test_the_standard_error_counts_rows_and_not_samples():
    rows = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    assert scorecard(rows, samples=2, pass_score=1.0).standard_error == pytest.approx(0.2394, abs=1e-4)
    extra = [row * 8 for row in rows]  # samples that are all alike tell nothing new
    assert scorecard(extra, samples=16, pass_score=1.0).standard_error == pytest.approx(0.2394, abs=1e-4)
    assert scorecard([[1.0, 0.0]], samples=2, pass_score=1.0).standard_error is None
