"""The report tells what a run folder holds, whatever is missing in it, and needs nothing from anywhere else."""

import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from areal.__main__ import main
from areal.base.errors import UserError
from areal.extensions.desk.report import (
    Panel,
    draw,
    draw_timeline,
    figure_of,
    headlines,
    panels,
    timeline_of,
    write_figure,
    write_report,
)
from areal.storage.record import Record
from areal.storage.records import line_of

TITLES = [
    "Reward, mean",
    "Groups filtered, without signal",
    "Held-out accuracy",
    "Staleness",
    "Groups by staleness",
    "Throughput",
    "Trainer idle, share",
    "Completion length",
    "Share of completions cut at the limit",
    "Weight updates of all generators",
    "Step time",
    "Log-prob gap, engine and trainer",
    "Importance weight",
    "Effective sample size, share",
    "KL divergence",
    "Entropy",
    "Loss",
    "Gradient norm",
    "Learning rate",
    "Share of clipped tokens",
]


def record(step, **changes):
    return {
        "step": step,
        "reward_mean": 0.1 * step,
        "reward_mean_all": 0.05 * step,
        "groups_filtered": step,
        "staleness_mean": 1.5,
        "staleness_max": 3,
        "staleness_histogram": [5, 3, 0, 8],
        "tokens_trained": 900,
        "tokens_generated": 1000,
        "pause_seconds": 0.01,
        "load_seconds": 0.02,
        "resume_seconds": 0.005,
        "step_seconds": 2.0,
        "trainer_wait_seconds": 0.5,
        "train_seconds": 1.25,
        "publish_wait_seconds": 0.1,
        "completion_tokens_mean": 30.5,
        "completion_tokens_max": 64,
        "cut_share": 0.25,
        "logprob_gap": 1e-4,
        "weight_mean": 1.01,
        "weight_max": 4.0,
        "advantage_max": 1.5,
        "effective_sample_size": 0.8,
        "kl_behaviour": 0.02,
        "kl_reference": 0.1,
        "loss": -0.01,
        "grad_norm": 0.7,
        "lr": 1e-5,
        "optimizer_steps": 4,
        "entropy": 1.2,
        "clip_fraction": 0.01,
    } | changes


BRIEF = {"step": 1, "reward_mean": 0.5}
"""A record of one figure: drawing them all takes seconds."""


def sample(completion, score, prompt="12+7="):
    return {"prompt": prompt, "completion": completion, "answer": "19", "score": score}


SUMMARY = {
    "ok": True,
    "reason": "the run reached its end",
    "steps": 5,
    "accuracy_before": 0.025,
    "accuracy_after": 0.913,
    "staleness_max": 3,
    "max_staleness": 8,
    "logprob_gap_max": 1.5e-4,
    "trainer_idle": 0.031,
    "samples_trained": 12_800,
    "samples_per_second": 37.25,
    "seconds": 343.6,
    "samples_before": [sample("9", 0.0)],
    "samples_after": [sample("19", 1.0)],
}


EVALUATIONS = [
    {"version": 0, "accuracy": 0.025, "pass_at": {"1": 0.02, "2": 0.04, "4": 0.1}},
    {"version": 3, "accuracy": 0.5, "pass_at": {"1": 0.5, "2": 0.6, "4": 0.8}},
    {"version": 5, "accuracy": 0.913, "pass_at": {"1": 0.9, "2": 0.95, "4": 1.0}},
]


def make_folder(folder, records=(), summary=None, config="name: demo\n", evaluations=()):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(map(line_of, records)))
    if evaluations:
        (folder / "evaluations.jsonl").write_text("".join(map(line_of, evaluations)))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def folder(tmp_path):
    """Makes a run folder."""
    return lambda *args, **kwargs: make_folder(tmp_path / "demo", *args, **kwargs)


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    """The HTML of the report of a whole run."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    run = make_folder(folder, [record(step) for step in range(1, 6)], SUMMARY, evaluations=EVALUATIONS)
    return write_report(run).read_text()


class Page(HTMLParser):
    """The tags of a page, the addresses in it, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]

    def handle_data(self, data):
        self.text.append(data)

    def says(self, words):
        return words in " ".join("".join(self.text).split())


def report_of(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text())


def test_a_whole_run_has_its_headlines_and_every_figure(complete_run):
    page = Page(complete_run)
    for words in ("2.5% → 91.3%", "37.2", "staleness, max (bound 8)", "1.5e-04", "12,800", "name: demo"):
        assert page.says(words), words
    assert page.tags.count("svg") == len(TITLES) + 1  # the timeline
    for title in TITLES:
        assert page.says(title), title
    assert len(re.findall(r"</svg>\s*<p>[A-Z]", complete_run)) == len(TITLES), "each plot has its sentence"
    assert page.says("On rows that it never trained on, its accuracy went from 2.5% to 91.3%.")
    assert page.says("No group was more than 3 versions behind the weights that it trained; 8 were allowed.")


def test_the_page_stands_alone(complete_run):
    page = Page(complete_run)
    assert all(address.startswith("#") for address in page.addresses)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import", complete_run)


def test_a_figure_of_its_own_shows_learning_and_staleness_and_needs_no_page(folder, tmp_path):
    run = folder([record(step) for step in range(1, 6)], SUMMARY, evaluations=EVALUATIONS)
    write_figure(run, tmp_path / "run.svg")
    svg = (tmp_path / "run.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert all(text in svg for text in ("reward, mean of the batch", "held-out accuracy", "Staleness", "bound"))
    assert "currentColor" not in svg and "var(" not in svg


def test_a_run_without_a_step_has_no_figure(tmp_path):
    (tmp_path / "config.yaml").write_text("name: early\n")
    with pytest.raises(UserError, match="no step yet"):
        write_figure(tmp_path, tmp_path / "run.svg")


def test_figures_are_well_formed_and_take_the_colours_of_the_page(complete_run):
    for figure in re.findall(r"<svg.*?</svg>", complete_run, re.DOTALL):
        ElementTree.fromstring(figure)
        assert "currentColor" in figure and "var(--faint)" in figure
        assert not re.search(r"fill: #(000000|ffffff)|stroke: #000000", figure)


def test_no_name_stands_twice_in_the_page(complete_run):
    names = re.findall(r'\bid="([^"]*)"', complete_run)
    assert len(names) == len(set(names))


def test_what_a_model_wrote_is_text_and_nothing_else(folder):
    evil = "</pre><script>alert(1)</script><img src=x onerror=y>"
    summary = SUMMARY | {"samples_after": [sample(evil, 0.0, prompt=evil)], "ok": False, "reason": evil}
    page = report_of(folder([BRIEF], summary, config=f"name: '{evil}'"))
    assert not {"script", "img"} & set(page.tags)
    assert "".join(page.text).count(evil) == 4  # prompt, completion, reason, configuration


def test_samples_of_one_prompt_stand_side_by_side(folder):
    summary = SUMMARY | {
        "samples_before": [sample("a", 0.0, "p"), sample("b", 0.0, "q")],
        "samples_after": [sample("c", 1.0, "q"), sample("d", 1.0, "r")],
    }
    page = report_of(folder([BRIEF], summary))
    assert page.says("p 19 a score 0.0 –")
    assert page.says("q 19 b score 0.0 c score 1.0")
    assert page.says("r 19 – d score 1.0")


@pytest.mark.slow  # the whole run above has 5 steps
@pytest.mark.parametrize("steps", [1, 300])
def test_a_run_of_any_length_has_all_figures(folder, steps):
    run = folder([record(step) for step in range(1, steps + 1)], SUMMARY, evaluations=EVALUATIONS)
    assert report_of(run).tags.count("svg") == len(TITLES) + 1


def test_a_run_without_a_step_still_has_a_report(folder):
    page = report_of(folder(summary={"steps": 0, "accuracy_before": None, "samples_before": None}))
    assert page.says("No training step is recorded.")
    assert page.says("– → –")


def test_a_run_without_a_summary_says_so(folder):
    page = report_of(folder([BRIEF]))
    assert page.says("it is still running, or it was killed")
    assert page.says("Reward, mean") and not page.says("Held-out accuracy")


def test_a_run_that_ended_early_says_why(folder):
    assert report_of(folder([BRIEF], SUMMARY | {"ok": False, "reason": "the disk is full"})).says(
        "The run ended early: the disk is full."
    )


WITHOUT_A_PANEL = {"step", "advantage_max", "optimizer_steps"}


@pytest.mark.parametrize("key", sorted(set(record(1)) - WITHOUT_A_PANEL))
@pytest.mark.parametrize(
    "value", [pytest.param(None, id="null"), pytest.param(math.nan, id="nan", marks=pytest.mark.slow)]
)
def test_a_metric_that_is_missing_everywhere_breaks_nothing(tmp_path, key, value):
    complete_run = panels(Record(make_folder(tmp_path / "whole", [record(1)], SUMMARY)))
    holed = panels(Record(make_folder(tmp_path / "holed", [record(1, **{key: value})], SUMMARY)))
    changed = [panel for panel, panel_before in zip(holed, complete_run, strict=True) if panel != panel_before]
    assert changed
    for panel in changed:
        ElementTree.fromstring(draw(panel))


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "events.jsonl"])
def test_records_of_few_keys_damaged_bytes_and_half_a_line_break_nothing(folder, name):
    run = folder([{"step": 1}, {"step": 2, "reward_mean": 0.5}, {"loss": 1.0}], {})
    with (run / name).open("ab") as file:
        file.write(b'{"step": 3, "reward_mean\xff": 0.5}\n{"step": 4, "rew')
    assert report_of(run).tags.count("svg") == 1


def drawn(panel):
    """The only axes of the figure of a panel."""
    (axes,) = figure_of(panel).axes
    return axes


@pytest.mark.parametrize(("count", "inches"), [(0, [4.8, 2.7]), (2, [9.6, 2.7]), (7, [14.4, 8.1])])
def test_many_panels_are_drawn_in_rows(folder, count, inches):
    (panel, *_) = panels(Record(folder([record(step) for step in (1, 2)])))
    figure = figure_of(*[panel] * count)
    assert len(figure.axes) == count and figure.get_size_inches().tolist() == pytest.approx(inches)


@pytest.mark.parametrize("gaps", [[0.0, 0.0], [0.0, 2e-6, 3e-4]])
def test_a_gap_of_zero_has_a_place_on_its_axis(folder, gaps):
    run = Record(folder([BRIEF | {"step": step, "logprob_gap": gap} for step, gap in enumerate(gaps, 1)]))
    (panel,) = (panel for panel in panels(run) if panel.title.startswith("Log-prob gap"))
    assert not panel.empty
    axes = drawn(panel)
    low, high = axes.get_ylim()
    assert low < 0 < max(gaps) < high or low < 0 == max(gaps) < high
    places = axes.transData.transform([(1.0, gap) for gap in (low, *sorted(set(gaps)), high)])[:, 1]
    assert all(b - a > 5 for a, b in itertools.pairwise(places))  # pixels: no value lies upon another


def test_the_first_step_does_not_flatten_the_others(folder):
    seconds = [60.0] + [2.0] * 19
    run = Record(
        folder([record(step, step_seconds=seconds_of_step) for step, seconds_of_step in enumerate(seconds, 1)])
    )
    (panel,) = (panel for panel in panels(run) if panel.title == "Step time")
    axes = drawn(panel)
    assert axes.get_ylim() == (0, pytest.approx(2.4))
    assert [text.get_text() for text in axes.texts] == ["↑ step 1: 60 s"]


def test_a_long_curve_is_a_smoothed_line_over_its_points(folder):
    run = Record(folder([BRIEF | {"step": step, "reward_mean": step % 2} for step in range(1, 41)]))
    points, line = drawn(panels(run)[0]).lines
    assert list(points.get_ydata()) == [1, 0] * 20 and points.get_alpha() < 0.5
    assert all(0.3 < value < 0.7 for value in line.get_ydata())


def test_a_curve_leaves_out_steps_at_which_nothing_was_measured(folder):
    gaps = [None if step % 4 else 2e-7 for step in range(1, 41)]
    run = Record(folder([BRIEF | {"step": step, "logprob_gap": gap} for step, gap in enumerate(gaps, 1)]))
    (panel,) = (panel for panel in panels(run) if panel.title.startswith("Log-prob gap"))
    (line,) = drawn(panel).lines
    assert list(line.get_xdata()) == list(range(4, 41, 4)) and set(line.get_ydata()) == {2e-7}


def test_rates_are_per_second_and_step_time_is_split_in_work_weights_and_waiting(folder):
    first = record(1, snapshot_seconds=0.125, save_seconds=0.125)
    run = Record(folder([first, record(2, trainer_wait_seconds=9.0), record(3, step_seconds=0.0)], SUMMARY))
    by_title = {panel.title: panel for panel in panels(run)}
    assert by_title["Throughput"].lines[0][2][:2] == [500.0, 500.0]
    assert math.isnan(by_title["Throughput"].lines[0][2][2])
    stack = {label: values for label, values in by_title["Step time"].stack}
    assert list(stack) == ["training", "weights", "waiting", "other"]
    assert [stack[label][:2] for label in ("training", "weights")] == [[1.15, 0.0], [0.25, 0.0]]
    assert stack["waiting"][:2] == [0.6, 2.0] and stack["other"][:2] == pytest.approx([0.0, 0.0])
    assert by_title["Staleness"].bound == 8


def test_groups_are_counted_by_staleness_where_steps_differ_in_their_oldest_group(folder):
    run = Record(folder([record(1, staleness_histogram=[4, 1]), record(2, staleness_histogram=[2, 1, 2])], SUMMARY))
    panel = next(panel for panel in panels(run) if panel.title == "Groups by staleness")
    assert panel.stack == [("0", [4, 2]), ("1", [1, 1]), ("2", [0, 2])]


def test_a_run_that_filters_nothing_has_one_reward(folder):
    run = Record(folder([record(step, groups_filtered=0) for step in (1, 2)], SUMMARY, evaluations=EVALUATIONS))
    shown = [panel.title for panel in panels(run) if not panel.empty]
    assert not any(title.startswith("Groups filtered") for title in shown)
    assert "Reward, mean" in shown


def test_the_accuracy_of_every_evaluated_version_is_drawn_and_what_the_most_samples_solve(folder):
    run = Record(folder([record(1)], SUMMARY, evaluations=EVALUATIONS))
    (panel,) = [panel for panel in panels(run) if panel.title == "Held-out accuracy"]
    assert panel.lines == [("mean", [0, 3, 5], [0.025, 0.5, 0.913]), ("pass@4", [0, 3, 5], [0.1, 0.8, 1.0])]


def test_each_benchmark_is_a_line_and_a_headline(folder):
    def done(version, **benchmarks):
        scores = {name: {"accuracy": accuracy} for name, accuracy in benchmarks.items()}
        return {"version": version, "accuracy": None, "benchmarks": scores}

    evaluations = [done(0, aime24=0.25, gsm8k=0.5), done(3, gsm8k=None), done(5, aime24=0.5, gsm8k=0.75)]
    run = Record(folder([record(1)], {"evaluations": evaluations}, evaluations=evaluations))
    (panel,) = [panel for panel in panels(run) if panel.title == "Benchmarks, mean score"]
    assert [(name, x) for name, x, _ in panel.lines] == [("aime24", [0, 5]), ("gsm8k", [0, 3, 5])]
    assert panel.lines[0][2] == [0.25, 0.5]
    figures = dict(headlines(run.summary))
    assert (figures["aime24"], figures["gsm8k"]) == ("25.0% → 50.0%", "50.0% → 75.0%")


def test_with_one_sample_a_row_there_is_one_line_of_accuracy(folder):
    evaluations = [{"version": 0, "accuracy": 0.5, "pass_at": {"1": 0.5}}]
    run = Record(folder([record(1)], evaluations=evaluations))
    (panel,) = [panel for panel in panels(run) if panel.title == "Held-out accuracy"]
    assert panel.lines == [("", [0], [0.5])]


def test_the_same_run_gives_the_same_report(folder):
    run = folder([BRIEF, BRIEF | {"step": 2, "staleness_max": 1}], SUMMARY, evaluations=EVALUATIONS)
    assert write_report(run).read_text() == write_report(run).read_text()


def test_a_folder_without_a_run_is_the_users_mistake(tmp_path, capsys):
    with pytest.raises(UserError, match="is not the folder of a run"):
        write_report(tmp_path)
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", "{", r"summary\.json is not JSON"),
        ("summary.json", "[1]", r"summary\.json is of type list"),
        ("config.yaml", "a: [", r"config\.yaml is not YAML"),
        ("config.yaml", "- a", r"config\.yaml must contain keys"),
    ],
)
def test_a_file_of_a_run_that_is_none_is_named(folder, name, text, message):
    run = folder([BRIEF])
    (run / name).write_text(text)
    with pytest.raises(UserError, match=message):
        write_report(run)


def test_the_tool_prints_where_the_report_is(folder, capsys):
    run = folder([BRIEF], SUMMARY)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")


def test_importing_the_report_loads_no_plotting():
    code = "import sys, areal.extensions.desk.report, areal.__main__\n"
    code += "sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_last_minute_shows_who_did_what(folder):
    report = {"actor": "generator/0", "state": "healthy", "stats": {}}
    events = [
        report | {"time": 900.0, "activity": "generating at version 3"},
        {"time": 995.0, "actor": "generator/0", "span": "load", "seconds": 0.5},
        report | {"time": 1000.0, "activity": "loading version 4"},
        {"time": 999.0, "actor": "master/0", "state": "healthy", "activity": "nobody waits", "stats": {}},
    ]
    phases = {"train_seconds": 2.0, "trainer_wait_seconds": 1.0, "publish_wait_seconds": 0.0}
    run = folder([BRIEF | {"time": 1000.0} | phases])
    (run / "events.jsonl").write_text("".join(map(line_of, events)))
    shown = [(s.actor, s.name, s.begin, s.seconds, measured) for s, measured in timeline_of(Record(run))]
    assert shown == [
        ("generator/0", "generating at version", -60.0, 60.0, False),
        ("generator/0", "load", -5.0, 0.5, True),
        ("trainer/0", "trainer_wait", -3.0, 1.0, True),
        ("trainer/0", "train", -2.0, 2.0, True),
    ]
    assert "Timeline: the last minute of training, by actor" in write_report(run).read_text()


def test_an_activity_may_have_any_text(folder):
    activities = ["$\\frac{$", "a $ b", "$x$ and $", "\x1b[31m", "_", "", "$" * 99, "\\$"]
    events = [
        {"actor": f"generator/{activity}", "state": "healthy", "stats": {}, "time": at, "activity": activity}
        for activity in activities
        for at in (990.0, 995.0)
    ]
    run = folder([BRIEF | {"time": 1000.0}])
    (run / "events.jsonl").write_text("".join(map(line_of, events)))
    page = write_report(run).read_text()
    assert "Timeline: the last minute" in page and "a $ b" in page and "\x1b" not in page


def test_without_steps_and_events_there_is_no_timeline(folder):
    assert draw_timeline(Record(folder())) == ""


def test_few_points_are_joined_only_if_none_is_missing_and_there_are_more_than_two():
    def styles(*ys):
        steps = list(range(len(ys[0])))
        lines = drawn(Panel("Gap", lines=[("", steps, y) for y in ys], colours=["red"] * len(ys))).lines
        return [line.get_linestyle() for line in lines]

    assert styles([1.0, 2.0]) == ["None"] and styles([1.0, 2.0, 4.0]) == ["-"]
    assert styles([1.0, *[math.nan] * 80, 2.0, 3.0]) == ["None"]


def test_a_logarithmic_panel_shows_values_of_many_magnitudes():
    axes = drawn(Panel("Weight", lines=[("mean", [1, 2], [1.0, 1.0]), ("max", [1, 2], [3.0, 20_000.0])], log=True))
    assert axes.get_yscale() == "log" and 0.1 < axes.get_ylim()[0] < 1 and axes.get_ylim()[1] > 20_000


def test_a_first_step_that_costs_far_more_than_the_others_does_not_empty_its_panel():
    values = [9000.0] + [300.0, 400.0] * 10
    panel = Panel("Tokens", "tokens", lines=[("", list(range(1, 22)), values)], limits=(0, None))
    axes = drawn(panel)
    assert axes.get_ylim() == (0, pytest.approx(480)) and [text.get_text() for text in axes.texts] == [
        "↑ step 1: 9,000 tokens"
    ]


def test_a_report_names_no_folder_of_the_machine(folder):
    config = "name: demo\nrun_dir: /home/me/runs\nreward:\n  functions: ['/home/me/my own.py:score']\nurl: http://a/b\n"
    page = write_report(folder(config=config)).read_text()
    assert "/home" not in page and "run_dir: …/runs" in page and "…/my own.py:score" in page and "http://a/b" in page
