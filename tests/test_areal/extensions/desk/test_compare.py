"""Several runs are shown side by side: in what they differ, and what they end with."""

import json

import pytest
import yaml

from areal.__main__ import main
from areal.models import quickstart_folder
from areal.storage.records import line_of, read_records


@pytest.fixture
def run_of(tmp_path):
    """Writes the folder of a run whose reward rises to 0.8 in `steps` steps, and returns it."""

    def write(name, *, seed=0, accuracy=None, steps=10, **settings):
        folder = tmp_path / name
        folder.mkdir()
        config = {"name": name, "run_dir": name, "seed": seed, "master": {"address": name}} | settings
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        records = [
            {
                "step": step,
                "reward_mean": min(0.8, 0.8 * step / steps),
                "staleness_mean": 1.5,
                "staleness_max": 3,
                "logprob_gap": 1e-6 * step if step % 2 else None,
                "step_seconds": 2.0,
                "trainer_wait_seconds": 0.4,
                "publish_wait_seconds": 0.1,
            }
            for step in range(1, 21)
        ]
        (folder / "metrics.jsonl").write_text("".join(map(line_of, records)))
        if accuracy is not None:
            (folder / "summary.json").write_text(json.dumps({"accuracy_after": accuracy, "samples_per_second": 64.25}))
        return str(folder)

    return write


def table(capsys, *runs):
    """The rows of the printed table by their name."""
    assert main(["compare", *runs]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line or "┃" in line]
    rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_runs_that_differ_in_their_seed_alone_are_one_column_with_an_interval(run_of, capsys, tmp_path):
    model, models = str(quickstart_folder(tmp_path)), [str(quickstart_folder(tmp_path, seed)) for seed in range(2)]
    runs = [
        run_of(f"a{seed}", seed=seed, accuracy=0.6 + 0.1 * seed, trainer={"lr": 1e-5}, model=models[seed])
        for seed in range(2)
    ]
    rows = table(capsys, *runs, run_of("b", accuracy=0.9, steps=20, trainer={"lr": 3e-5}, model=model))
    assert rows["trainer.lr"] == ["1e-05", "3e-05"] and not {"seed", "name", "master.address"} & set(rows)
    # Two standard errors; the standard deviation of the two seeds is 0.0707.
    assert rows["held-out accuracy"] == ["0.650 ± 0.100", "0.900 ± 0.141"]
    assert rows["steps to reward 0.720"] == ["12.0 ± 0.0", "20.0 ± 0.0"]
    assert rows["seconds to reward 0.720"] == ["24 ± 0", "40 ± 0"]


def test_a_repetition_of_settings_and_seed_is_no_further_seed(run_of, capsys):
    rows = table(capsys, run_of("a", accuracy=0.5), run_of("again", accuracy=0.5), run_of("b", seed=1, accuracy=0.7))
    assert rows[""] == ["2 seeds", "again"]
    assert rows["held-out accuracy"] == ["0.600 ± 0.200", "0.500 ± 0.283"]
    assert main(["compare", run_of("c"), run_of("d")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Same settings and seeds as in another column: d." in out and "seeds │" not in out and "±" not in out


def test_the_reward_of_the_trained_groups_is_told_from_that_of_all(run_of, tmp_path, capsys):
    plain, filtering = run_of("plain"), run_of("filtering", filter_zero_signal=True)
    metrics = tmp_path / "filtering" / "metrics.jsonl"
    changed = [
        record | {"reward_mean": 0.5, "reward_mean_all": 0.04 * record["step"], "groups_filtered": 2}
        for record in read_records(metrics)
    ]
    metrics.write_text("".join(map(line_of, changed)))
    rows = table(capsys, plain, filtering)
    assert "reward, last 10 steps" not in rows
    assert rows["reward of trained groups, last 10 steps"] == ["0.800", "0.500"]
    assert rows["reward of all groups, last 10 steps"] == ["–", "0.620"]
    assert rows["steps to reward 0.720"] == ["12.0", "20.0"]  # the mean of the last 5 steps


def test_single_runs_have_no_interval_and_a_run_that_goes_on_has_what_is_known(run_of, capsys):
    rows = table(capsys, run_of("done", accuracy=0.5, steps=5), run_of("going", max_staleness=8))
    assert rows["max_staleness"] == ["–", "8"]  # an earlier version may not have known it
    assert rows["held-out accuracy"] == ["0.500", "–"] and rows["samples a second"] == ["64.2", "–"]
    assert rows["trainer idle"] == ["25.0%", "25.0%"] and rows["log-prob gap, max"] == ["1.9e-05", "1.9e-05"]
    assert rows["staleness, max"] == ["3.0", "3.0"] and rows["reward, last 10 steps"] == ["0.800", "0.800"]
    assert "effective tokens a second" not in rows


def test_runs_are_compared_at_equal_generated_tokens_and_by_what_they_cost(run_of, tmp_path, capsys):
    for name, tokens, mixed, last in (("a", 100, 0.5, 0.8), ("b", 200, 1.0, 0.6)):
        folder = tmp_path / run_of(name, data={"sampler": name})
        extra = {"tokens_generated": tokens, "mixed_groups": mixed, "groups_trained": 4, "coverage": mixed}
        records = [record | extra for record in read_records(folder / "metrics.jsonl")]
        (folder / "metrics.jsonl").write_text("".join(map(line_of, records)))
        evaluations = [{"version": version, "accuracy": value} for version, value in ((0, 0.2), (20, last))]
        (folder / "evaluations.jsonl").write_text("".join(map(line_of, evaluations)))
    rows = table(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert rows["held-out accuracy at 2,000 tokens generated"] == ["0.800", "0.400"]
    assert rows["trained groups with signal"] == ["50.0%", "100.0%"]
    assert rows["tokens generated for each of them"] == ["50", "50"]
    assert rows["rows of which a prompt was admitted"] == ["50.0%", "100.0%"]


def test_settings_are_printed_as_they_are(run_of, capsys):
    rows = table(capsys, run_of("a", sampling={"stop": ["[/INST]"]}), run_of("b", sampling={"stop": None}))
    assert rows["sampling.stop"] == ['["[/INST]"]', "null"]


def test_what_is_no_run_is_one_sentence(run_of, tmp_path, capsys):
    assert main(["compare", run_of("one"), str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_forks_are_lines_below_the_runs_that_they_go_on_from(run_of, tmp_path, capsys):
    runs = [run_of(name) for name in ("late", "root", "early")]
    root = {"name": "root", "folder": "gone", "run": "root", "step": 12}
    (tmp_path / "late" / "fork.json").write_text(json.dumps([root]))
    gone = {"name": "gone", "folder": "gone", "run": "g", "step": 8}
    (tmp_path / "early" / "fork.json").write_text(json.dumps([root | {"step": 4}, gone]))
    assert main(["compare", *runs]) == 0
    tree = ["root", "    gone, from step 4 on", "        early, from step 8 on", "    late, from step 12 on"]
    assert capsys.readouterr().out.splitlines()[-4:] == tree
    assert main(["compare", runs[1]]) == 0
    assert "from step" not in capsys.readouterr().out
