"""The comparison of this working tree with a commit, in pairs of runs."""

from versus_commit import COMMIT, CPU, HERE, SECONDS, summary


def test_ratios_are_those_of_the_pairs_and_what_hardly_runs_is_left_out():
    pairs = [
        {HERE: {SECONDS: 1.0, CPU: 2.0, "reward": 0.001}, COMMIT: {SECONDS: 2.0, CPU: 2.0, "reward": 0.5}},
        {HERE: {SECONDS: 3.0, CPU: 4.0, "reward": 0.1}, COMMIT: {SECONDS: 2.0, CPU: 2.0, "reward": 0.5}},
        {HERE: {SECONDS: 1.0, CPU: 3.0, "reward": 0.1}, COMMIT: {SECONDS: 1.0, CPU: 2.0, "reward": 0.5}},
    ]
    figures = summary(pairs)
    assert (figures["ratio"], figures["spread"]) == (1.0, [0.5, 1.5])
    assert figures["rows"].keys() == {SECONDS, CPU}
    assert figures["rows"][CPU] == {HERE: 3.0, COMMIT: 2.0, "ratio": 1.5, "spread": [1.0, 2.0]}
