"""The figures of the docs: a run, or several by the setting in which they differ, averaged over seeds."""

import json
import statistics
from xml.etree import ElementTree

import pytest
import yaml
from figures import main

from areal.storage.records import line_of


@pytest.fixture
def run_of(tmp_path):
    """Writes the folder of a finished run and returns it."""

    def write(accuracy, *, staleness=1.0, seed=0, evaluations=(), **settings):
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = {"name": folder.name, "seed": seed, "master": {"address": folder.name}} | settings
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        ages = [99.0, 99.0, staleness, staleness]  # the first steps do not count
        records = [{"step": step, "staleness_mean": age, "reward_mean": step / 8} for step, age in enumerate(ages, 1)]
        (folder / "metrics.jsonl").write_text("".join(map(line_of, records)))
        lines = (line_of({"version": version, "accuracy": value}) for version, value in evaluations)
        (folder / "evaluations.jsonl").write_text("".join(lines))
        (folder / "summary.json").write_text(json.dumps({"ok": True, "accuracy_after": accuracy}))
        return str(folder)

    return write


def shown(capsys, tmp_path, *runs):
    """The rows of the table, and the texts of the figure."""
    figure = tmp_path / "figure.svg"
    code = main([str(figure), *runs])
    out, error = capsys.readouterr()
    assert code == 0, error
    texts = [text.text for text in ElementTree.parse(figure).iter("{http://www.w3.org/2000/svg}text")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if "│" in line], texts


def test_runs_are_points_by_setting_with_a_line_for_each_other_setting(run_of, capsys, tmp_path):
    accuracies = {
        (0, "ppo"): (0.70, 0.72),
        (16, "ppo"): (0.50, 0.58),
        (0, "tis"): (0.69, 0.71),
        (16, "tis"): (0.6, 0.7),
    }
    runs = [
        run_of(
            accuracy,
            seed=seed,
            staleness=eta / 2,
            max_staleness=eta,
            trainer={"objective": objective, "w": objective[:1]},
        )
        for (eta, objective), results in accuracies.items()
        for seed, accuracy in enumerate(results)
    ]
    rows, texts = shown(capsys, tmp_path, *runs)
    # Two standard errors of a mean of two, with the standard deviation over all pairs.
    error = 2 * (statistics.fmean(statistics.variance(pair) for pair in accuracies.values()) / 2) ** 0.5
    assert rows == [
        ["ppo", "0", "2", f"0.710 ± {error:.3f}", "0.00"],
        ["ppo", "16", "2", f"0.540 ± {error:.3f}", "8.00"],
        ["tis", "0", "2", f"0.700 ± {error:.3f}", "0.00"],
        ["tis", "16", "2", f"0.650 ± {error:.3f}", "8.00"],
    ]
    assert {"ppo", "tis", "max_staleness", "Held-out accuracy at the end", "Staleness, mean"} <= set(texts)


def test_single_runs_have_no_interval(run_of, capsys, tmp_path):
    rows, _ = shown(capsys, tmp_path, run_of(0.5, trainer={"lr": 1e-5}), run_of(0.75, trainer={"lr": 3e-5}))
    assert rows == [["", "1e-05", "1", "0.500", "1.00"], ["", "3e-05", "1", "0.750", "1.00"]]


def test_runs_that_differ_in_no_number_are_drawn_by_step(run_of, capsys, tmp_path):
    curves = {("a", 0): (0.1, 0.5, 0.7), ("a", 1): (0.1, 0.6, 0.8), ("b", 0): (0.1, 0.3, 0.2)}
    runs = [
        run_of(curve[-1], model=model, seed=seed, evaluations=zip((0, 2, 4), curve, strict=True))
        for (model, seed), curve in curves.items()
    ]
    rows, texts = shown(capsys, tmp_path, *runs)
    error = 2 * (2 * 0.005 / 3 / 2) ** 0.5  # variances of three pairs, 0 at the start
    assert rows[:4] == [
        ["a", "0", "2", f"0.100 ± {error:.3f}", "–"],
        ["a", "2", "2", f"0.550 ± {error:.3f}", "0.188"],
        ["a", "4", "2", f"0.750 ± {error:.3f}", "0.438"],
        ["b", "0", "1", f"0.100 ± {error * 2**0.5:.3f}", "–"],
    ]
    assert {"a", "b", "step", "Held-out accuracy", "Reward of the steps"} <= set(texts)


def test_what_cannot_be_drawn_is_one_sentence(run_of, capsys, tmp_path):
    figure, unfinished = tmp_path / "figure.svg", run_of(None, model="c")
    assert main([str(figure), run_of(0.5, model="a"), unfinished]) == 2
    assert unfinished in capsys.readouterr().err
    assert not figure.exists()


def test_a_run_is_its_learning_curve_and_its_staleness_on_no_page(run_of, tmp_path):
    figure = tmp_path / "figure.svg"
    assert main([str(figure), run_of(0.5, evaluations=[(0, 0.25), (4, 0.5)], max_staleness=4)]) == 0
    svg = figure.read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert all(text in svg for text in ("reward, mean of 5 steps", "held-out accuracy", "Staleness", "bound"))


def test_a_run_without_a_step_has_no_figure(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("name: early\n")
    assert main([str(tmp_path / "run.svg"), str(tmp_path)]) == 2
    assert "no step yet" in capsys.readouterr().err
