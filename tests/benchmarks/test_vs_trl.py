import argparse
import json

import pytest
import vs_trl


def test_of_trl_the_steps_after_the_first_count_and_what_was_never_trained_on_is_unused(tmp_path):
    keys = ("time", "samples_generated", "tokens_generated", "samples_trained", "tokens_trained")
    totals = [(9, 900, 9, 100, 1), (10, 1000, 1000, 200, 100), (12, 1200, 9000, 300, 2100)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(dict(zip(keys, t, strict=True))) + "\n" for t in totals))
    assert vs_trl.trls(tmp_path) == {
        "samples_per_second": 50,
        "unused_share": 0.75,
        "generated_length": 40,
        "trained_length": 20,
    }


SPEEDS = {"ours": 300, "generate": 50, "colocate": 100, "colocate-1": 75, "async": 200, "async-unbiased": 150}


def a_run(mode, seed):
    return dict.fromkeys(vs_trl.COLUMNS) | {"samples_per_second": SPEEDS[mode] * (1 + seed)}


def options(file, rounds, synchronous_rounds=9):
    return argparse.Namespace(
        json=file, rounds=rounds, synchronous_rounds=synchronous_rounds, steps=3, eval_size=0, model="model"
    )


@pytest.fixture
def measured(monkeypatch):
    """(mode, seed) of every run that is made; the runs themselves are made up."""
    instances = []
    monkeypatch.setattr(
        vs_trl, "measure", lambda mode, seed, *_: instances.append((mode, seed)) or {"mode": mode} | a_run(mode, seed)
    )
    return instances


def test_ours_is_compared_with_the_fastest_of_each_kind_in_the_rounds_that_both_have_run():
    runs = [{"mode": mode, "seed": seed} | a_run(mode, seed) for seed in range(3) for mode in SPEEDS]
    results = vs_trl.summary(runs[:-1])
    assert (results["ratio"], results["best"]) == (3, "colocate")
    assert (results["ratio_async"], results["ratio_async_unbiased"]) == (1.5, 2)
    assert results["spread_async_unbiased"] == [2, 2]
    assert (results["rows"]["async"]["rounds"], results["rows"]["async-unbiased"]["rounds"]) == (3, 2)


def test_without_rounds_of_the_synchronous_modes_there_is_no_ratio_of_theirs():
    runs = [{"mode": mode, "seed": 0} | a_run(mode, 0) for mode in ("ours", "async", "async-unbiased")]
    results = vs_trl.summary(runs)
    assert (results["ratio_async"], results["ratio_async_unbiased"], "ratio" in results) == (1.5, 2, False)
    assert list(results["rows"]) == ["ours", "async", "async-unbiased"]


def test_a_run_that_the_file_holds_is_not_made_again(measured, tmp_path):
    file = tmp_path / "results.json"
    vs_trl.runs(options(file, rounds=1))
    vs_trl.runs(options(file, rounds=2))
    assert measured == [(mode, seed) for seed in range(2) for mode in SPEEDS]
    assert len(json.loads(file.read_text())["runs"]) == len(measured)


def test_the_synchronous_modes_may_have_fewer_rounds(measured, tmp_path):
    vs_trl.runs(options(tmp_path / "results.json", rounds=2, synchronous_rounds=1))
    assert measured == [(mode, 0) for mode in SPEEDS] + [(mode, 1) for mode in ("ours", "async", "async-unbiased")]


def test_results_of_another_setting_are_not_mixed_in(measured, tmp_path):
    vs_trl.runs(options(tmp_path / "results.json", rounds=1))
    second = options(tmp_path / "results.json", rounds=1)
    second.steps = 4
    with pytest.raises(SystemExit, match="another setting"):
        vs_trl.runs(second)
