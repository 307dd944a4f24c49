"""What is drawn of a run, or of several: the panels of the list, with values, colours and limits."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from areal.extensions.desk.grafana import ACTORS, dashboard
from areal.extensions.desk.panels import COLOURS, Panel, panels, panels_of
from areal.extensions.desk.plots import MOST_POINTS, SMALLEST, plots, ramp, smoothed, upper_limit
from areal.storage.record import Record
from areal.storage.records import line_of

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture
def run_of(tmp_path):
    """Makes a run of these steps and evaluations."""

    def make(steps=(), evaluations=(), name="demo", config="max_staleness: 4\n"):
        folder = tmp_path / name
        folder.mkdir()
        records = [{"step": n, **step} for n, step in enumerate(steps, 1)]
        (folder / "metrics.jsonl").write_text("".join(map(line_of, records)))
        (folder / "evaluations.jsonl").write_text("".join(map(line_of, evaluations)))
        (folder / "config.yaml").write_text(config)
        return Record(folder)

    return make


def by_title(*runs):
    drawn = plots(runs)
    json.dumps(drawn, allow_nan=False)  # a browser can read it
    return {plot["title"]: plot for plot in drawn}


def points(plot):
    return {line["label"]: line["points"] for line in plot["lines"]}


# --- the list


def test_every_metric_of_the_list_is_explained_and_every_colour_is_known():
    page = (DOCS / "observe.md").read_text()
    unknown = [metric for panel in panels() for metric in panel.metrics if f"`{metric}`" not in page]
    assert not {*unknown} - {"accuracy", "pass_at", "benchmarks"}  # of evaluations
    assert {name for panel in panels() for name in panel.colours} <= {*COLOURS}
    assert all(panel.says.endswith(".") for panel in panels())


def test_a_metric_that_no_panel_has_gets_a_panel_with_the_unit_of_its_name(run_of):
    assert [panel.title for panel in panels_of([{"step": 1, "reward_mean": 0.5, "time": 1.0, "prompts": [3]}])] == [
        panel.title for panel in panels()
    ]
    drawn = by_title(run_of([{"positive_share": 0.5, "my_seconds": 2.0}] * 3))
    assert [(title, plot["unit"], plot["high"]) for title, plot in drawn.items()] == [
        ("Positive share", "share", 1.0),
        ("My seconds", "s", None),
    ]


def test_grafana_shows_what_the_list_has_of_a_step_and_the_rest_in_one_panel():
    shown = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in dashboard()["panels"]}
    (others,) = shown.pop("Other metrics of a step")
    of_steps = " ".join(query for title, queries in shown.items() if title not in ACTORS for query in queries)
    assert {*re.findall(r"areal_step_(\w+)", of_steps)} == {
        metric for panel in panels() for metric in panel.metrics if panel.of == "step" and not panel.has_parts
    }
    assert shown["Throughput, tokens / s"][0] == "areal_step_tokens_generated / areal_step_step_seconds"
    assert "|areal_step_reward_mean|" in others and others.startswith('{__name__=~"areal_step_.+"')


# --- values


def test_rates_are_per_second_and_shares_of_a_step_that_took_no_time_are_unknown(run_of):
    step = {"tokens_generated": 1000, "tokens_trained": 900, "step_seconds": 2.0, "trainer_wait_seconds": 0.5}
    drawn = by_title(run_of([step, step | {"step_seconds": 0.0}, step]))
    assert points(drawn["Throughput"]) == {"generated": [500.0, None, 500.0], "trained": [450.0, None, 450.0]}
    assert points(drawn["Trainer idle"]) == {"waiting for data": [0.25, None, 0.25]}


def test_the_time_of_a_step_is_split_in_work_weights_waiting_and_the_rest(run_of):
    step = {"train_seconds": 1.25, "snapshot_seconds": 0.125, "save_seconds": 0.125, "publish_wait_seconds": 0.1}
    plot = by_title(run_of([step | {"step_seconds": 2.0}, step | {"step_seconds": 1.0}]))["Step time"]
    assert points(plot) == {"training": [1.25] * 2, "weights": [0.25] * 2, "waiting": [0.1] * 2, "other": [0.4, 0.0]}
    assert [line["curve"][0] for line in plot["lines"]] == [1.25, 1.5, 1.6, 2.0]
    assert [line["colour"] for line in plot["lines"]] == [
        COLOURS[name] for name in ("work", "weights", "waiting", "rest")
    ]


def test_ages_of_groups_keep_their_colours_while_the_run_goes_on(run_of):
    early = by_title(run_of([{"staleness_histogram": [4, 1]}]))["Groups by staleness"]
    later = by_title(run_of([{"staleness_histogram": [4, 1]}, {"staleness_histogram": [2, 0, 3]}], name="later"))
    plot = later["Groups by staleness"]
    assert points(plot) == {"0": [4, 2], "1": [1, 0], "2": [0, 3]}
    assert [line["colour"] for line in plot["lines"]][:2] == [line["colour"] for line in early["lines"]] == ramp(5)[:2]


def test_a_run_that_filters_nothing_has_one_reward(run_of):
    step = {"reward_mean": 0.5, "reward_mean_all": 0.4, "groups_filtered": 0}
    assert [*by_title(run_of([step]))] == ["Reward"]
    assert [*by_title(run_of([step, step | {"groups_filtered": 2}], name="filtering"))] == [
        "Reward",
        "Reward of all groups",
        "Groups filtered",
    ]


def test_the_accuracy_has_its_error_and_what_the_most_samples_solve_if_that_differs(run_of):
    evaluations = [
        {"version": 0, "accuracy": 0.25, "standard_error": 0.01, "pass_at": {"1": 0.25, "4": 0.5}},
        {"version": 5, "accuracy": 0.5, "standard_error": 0.02, "pass_at": {"1": 0.5, "4": 0.75}},
    ]
    plot = by_title(run_of(evaluations=evaluations))["Held-out accuracy"]
    assert points(plot) == {"mean": [0.25, 0.5], "pass@4": [0.5, 0.75]}
    assert (plot["of"], plot["lines"][0]["x"]) == ("version", [0, 5])
    assert (plot["lines"][0]["low"], plot["lines"][0]["high"]) == ([0.23, 0.46], [0.27, 0.54])


def test_each_benchmark_and_each_part_of_the_reward_is_a_line(run_of):
    evaluations = [
        {"version": 0, "benchmarks": {"aime.24": {"accuracy": 0.25}, "gsm8k": {"accuracy": 0.5}}},
        {"version": 3, "benchmarks": {"gsm8k": {"accuracy": 0.75}}},
    ]
    drawn = by_title(run_of([{"reward_parts": {"my:Format.x": 0.5}}], evaluations))
    assert points(drawn["Benchmarks"]) == {"aime.24": [0.25, None], "gsm8k": [0.5, 0.75]}
    assert points(drawn["Parts of the reward"]) == {"my:Format.x": [0.5]}


@pytest.mark.parametrize("value", [None, math.nan, "text", [], {}])
def test_a_value_that_is_no_number_breaks_nothing(run_of, value):
    keys = {metric for panel in panels() for metric in panel.metrics}
    assert plots([run_of([dict.fromkeys(keys, value), {}])]) == []
    assert points(by_title(run_of([dict.fromkeys(keys, value), {"reward_mean": 1.0}], name="other"))["Reward"]) == {
        "": [None, 1.0]
    }


def test_a_run_without_a_step_has_no_plot(run_of):
    assert plots([run_of()]) == []


def test_several_runs_are_a_colour_each_and_each_curve_has_its_plot(run_of):
    step = {"reward_mean": 0.5, "staleness_mean": 1.0, "staleness_max": 2, "train_seconds": 1.0, "step_seconds": 2.0}
    drawn = by_title(run_of([step], name="a"), run_of([step, step | {"reward_mean": 0.75}], name="b"))
    assert [*drawn] == ["Reward", "Staleness, mean", "Staleness, max", "Step time"]
    assert points(drawn["Reward"]) == {"a": [0.5], "b": [0.5, 0.75]} and points(drawn["Step time"])["a"] == [2.0]
    colours = [[line["colour"] for line in plot["lines"]] for plot in drawn.values()]
    assert colours == [["#3b82d6", "#e07b28"]] * 4


# --- curves and axes


def test_a_curve_is_the_mean_of_its_neighbourhood():
    assert smoothed(np.array([1.0, 5.0] * 9)).tolist() == [1.0, 5.0] * 9  # few values stay
    curve = smoothed(np.arange(40) % 2.0)  # two to either side
    assert curve[10] == pytest.approx(2 / 5) and curve[11] == pytest.approx(3 / 5)
    assert curve[0] == pytest.approx(1 / 3) and curve[-1] == pytest.approx(2 / 3)
    assert smoothed(np.arange(40.0))[2:-2] == pytest.approx(range(2, 38))


def test_a_constant_stays_constant_and_an_outlier_stays_where_it_is():
    assert smoothed(np.full(400, 3e-5)) == pytest.approx(np.full(400, 3e-5))
    curve = smoothed(np.where(np.arange(400) == 200, 1e6, 1.0))
    assert {*np.flatnonzero(curve > 2)} == {*range(180, 221)}


def test_where_nothing_was_measured_a_curve_has_a_gap(run_of):
    values = [0.5] * 40 + [None] * 40 + [0.75] * 40
    (line,) = by_title(run_of([{"entropy": value} for value in values]))["Entropy"]["lines"]
    assert line["points"] == values
    assert (
        line["curve"][:46] == [0.5] * 46 and line["curve"][46:74] == [None] * 28 and line["curve"][74:] == [0.75] * 46
    )
    (rare,) = by_title(run_of([{"entropy": None if n % 4 else 0.25} for n in range(80)], name="rare"))["Entropy"][
        "lines"
    ]
    assert {*rare["curve"]} == {0.25}  # every fourth step is no gap


def test_a_long_run_is_thinned_to_the_values_that_stand_out(run_of):
    steps = [{"grad_norm": 900.0 if n == 4321 else 1.0 + n % 2} for n in range(5 * MOST_POINTS)]
    (line,) = by_title(run_of(steps))["Gradient norm"]["lines"]
    assert len(line["x"]) == len(line["points"]) == MOST_POINTS
    assert (line["x"][line["points"].index(900.0)], max(line["points"])) == (4322, 900.0)
    times = [{"train_seconds": 1.0, "step_seconds": 60.0 if n == 777 else 2.0} for n in range(5 * MOST_POINTS)]
    training, unnamed = by_title(run_of(times, name="times"))["Step time"]["lines"]
    assert training["x"] == unnamed["x"] and unnamed["curve"][unnamed["x"].index(778)] == 60.0


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ([], None),
        ([0.0, 0.0], None),
        ([30.0], None),
        ([30.0, 2.0], 2.4),
        ([34.0] + [2.0, 2.5] * 10, 3.0),
        ([2.0, 2.5] * 10 + [4.0], None),  # a slow step is no outlier
        ([2.0] * 8 + [9.0] * 2, None),  # every fifth step saves a checkpoint
    ],
)
def test_single_large_values_are_cut_off(values, limit):
    assert upper_limit(values) == (limit and pytest.approx(limit))


def test_values_above_the_axis_are_named_and_the_bound_is_never_cut(run_of):
    steps = [
        {"step_seconds": 60.0 if n == 1 else 2.0, "train_seconds": 1.0, "staleness_max": n % 9 * 3}
        for n in range(1, 21)
    ]
    drawn = by_title(run_of(steps))
    assert (drawn["Step time"]["high"], drawn["Step time"]["cut"]) == (pytest.approx(2.4), [(60.0, 1)])
    assert drawn["Staleness"]["high"] is None and drawn["Staleness"]["bound"] == 4


@pytest.mark.parametrize(
    ("gaps", "axis"), [([1e-7, 2e-7], None), ([1e-7, 2e-4], 0.0), ([0.0, 3e-7, 2e-5], 1e-7), ([0.0, 0.0], SMALLEST)]
)
def test_zero_has_a_place_on_a_logarithmic_axis_and_near_values_need_none(run_of, gaps, axis):
    plot = by_title(run_of([{"logprob_gap": gap} for gap in gaps]))["Log-prob gap, engine and trainer"]
    assert plot["log"] == (axis and pytest.approx(axis))


def test_small_shares_have_an_axis_of_their_own(run_of):
    drawn = by_title(run_of([{"clip_fraction": 0.004, "coverage": 0.5}] * 3))
    assert [drawn[title]["high"] for title in ("Clipped tokens", "Rows of which a prompt was admitted")] == [None, 1.0]


def test_a_scale_goes_from_its_first_colour_to_its_last():
    assert ramp(3)[::2] == ramp(2) and ramp(1) == ramp(2)[:1] and len({*ramp(9)}) == 9 and ramp(0) == []


def test_the_metrics_of_a_panel_are_those_of_its_formulas():
    panel = Panel("p", {"a": "x_seconds + y / z", "b *": "parts.*.accuracy"}, total="all")
    assert panel.metrics == ["x_seconds", "y", "z", "parts", "all"]
