"""The report tells what a run folder holds, whatever is missing in it, and needs nothing from anywhere else."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from areal.__main__ import main
from areal.base.errors import UserError
from areal.extensions.desk.account import account, headlines
from areal.extensions.desk.report import write_report
from areal.extensions.desk.run_view import RunView
from areal.storage.record import Record
from areal.storage.records import line_of


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
    {"version": 5, "accuracy": 0.913, "standard_error": 0.01, "pass_at": {"1": 0.9, "2": 0.95, "4": 1.0}},
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


@pytest.fixture
def whole_run(folder):
    return folder([record(step) for step in range(1, 6)], SUMMARY, evaluations=EVALUATIONS)


class Page(HTMLParser):
    """The tags of a page, the addresses in it, its policy, and the data that its script shows."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.policy = [], [], ""
        self.feed(html)
        self.data = json.loads(re.search(r"REPORT = (.*), WINDOW", html)[1])

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.addresses += [values[name] for name in ("src", "href", "xlink:href", "action") if name in values]
        self.policy += values.get("content", "") if values.get("http-equiv") else ""


def report_of(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text())


def test_a_report_is_the_live_page_with_its_data_inside(whole_run):
    data = report_of(whole_run).data
    assert data == json.loads(json.dumps(RunView(whole_run).since()))
    assert [plot["title"] for plot in data["plots"]][:4] == [
        "Reward",
        "Held-out accuracy",
        "Staleness",
        "Groups by staleness",
    ]
    assert data["ended"] == "finished: the run reached its end" and "name: demo" in data["configuration"]


def test_the_page_stands_alone_and_may_reach_nothing(whole_run):
    page = report_of(whole_run)
    assert page.addresses == [] and not {"link", "img", "iframe"} & {*page.tags}
    assert page.policy.startswith("default-src 'none'") and "connect-src" not in page.policy
    html = (whole_run / "report.html").read_text()
    assert not re.search(r"url\(|@import|/\* (include|data|colours)|innerHTML|insertAdjacentHTML", html)
    assert "uPlot" in html and html.count("</script>") == 1


def test_no_name_stands_twice_in_the_page(whole_run):
    write_report(whole_run)
    names = re.findall(r'\bid="([^"]*)"', (whole_run / "report.html").read_text())
    assert names and len(names) == len({*names})


def test_what_a_model_wrote_is_text_and_nothing_else(folder):
    evil = "</pre></script><script>alert(1)</script><img src=x onerror=y>"
    summary = SUMMARY | {"samples_after": [sample(evil, 0.0, prompt=evil)], "ok": False, "reason": evil}
    run = folder([BRIEF], summary, config=f"name: '{evil}'")
    page = report_of(run)
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert page.data["run"] == page.data["samples"][1]["prompt"] == evil and evil in page.data["ended"]
    assert (run / "report.html").read_text().count("alert(1)") == json.dumps(page.data).count("alert(1)")


def test_the_numbers_that_count_come_first_and_what_the_text_says_is_not_repeated(whole_run):
    run = Record(whole_run)
    assert headlines(run) == [
        ("held-out accuracy", "2.5 % → 91.3 % ± 2.0 %"),
        ("samples a second", "37.2"),
        ("samples trained", "12,800"),
        ("trainer idle", "3.1 %"),
        ("log-prob gap, max", "1.5e-04"),
    ]
    assert account(run) == (
        "The model was trained for 5 steps in 10 s. Its mean reward was 0.100 in the first step and 0.500 in the "
        "last. No group was more than 3 versions behind the weights that it trained; 8 were allowed."
    )


def test_what_happened_to_a_run_and_to_sessions_of_users_is_said(folder):
    summary = SUMMARY | {
        "tokens_untrained_share": 0.25,
        "restarts": {"master": 3, "gateway": 5},
        "rollbacks": 1,
        "sessions": {"opened": 340, "trained": 220},
        "groups_discarded": {"expired": 96, "deleted": 21, "row": 2},
    }
    assert account(Record(folder([record(1)], summary))).endswith(
        "25.0 % of the generated tokens were not trained on. Processes were started again after a stop or a failure, "
        "or when the run was resumed: master 3, gateway 5. The run went back to a checkpoint once. Of 340 sessions of "
        "users that could be trained: 220 trained, 96 expired, 21 deleted."
    )


def test_each_benchmark_is_a_headline_from_its_first_to_its_newest_score(folder):
    def done(version, **benchmarks):
        return {"version": version, "accuracy": None, "benchmarks": {n: {"accuracy": a} for n, a in benchmarks.items()}}

    evaluations = [done(0, aime24=0.25, gsm8k=0.5), done(3, gsm8k=None), done(5, aime24=0.5, gsm8k=0.75)]
    assert headlines(Record(folder([record(1)], evaluations=evaluations))) == [
        ("aime24", "25.0 % → 50.0 %"),
        ("gsm8k", "50.0 % → 75.0 %"),
    ]


def test_samples_of_one_prompt_stand_side_by_side(folder):
    summary = SUMMARY | {
        "samples_before": [sample("a", 0.0, "p"), sample("b", 0.0, "q")],
        "samples_after": [sample("c", 1.0, "q"), sample("d", 1.0, "r")],
    }
    pairs = report_of(folder([BRIEF], summary)).data["samples"]
    shown = {
        pair["prompt"]: [pair[when] and pair[when]["completion"] for when in ("before", "after")] for pair in pairs
    }
    assert shown == {"q": ["b", "c"], "p": ["a", None], "r": [None, "d"]}


def test_the_sums_of_the_quickstart_are_explained_where_they_are_shown(folder):
    run = folder([BRIEF], SUMMARY, config="name: demo\ndata: {source: addition}\n")
    assert report_of(run).data["notation"].startswith("Columns of a sum have letters")


def test_a_run_without_a_step_or_a_summary_still_has_a_report(folder, tmp_path):
    data = report_of(folder(summary={"steps": 0, "accuracy_before": None, "samples_before": None})).data
    assert (data["plots"], data["step"], data["cards"], data["lanes"]) == ([], 0, [], [])
    data = report_of(make_folder(tmp_path / "killed", [BRIEF])).data
    assert data["ended"] is None and [plot["title"] for plot in data["plots"]] == ["Reward"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "events.jsonl"])
def test_records_of_few_keys_damaged_bytes_and_half_a_line_break_nothing(folder, name):
    run = folder([{"step": 1}, {"step": 2, "reward_mean": 0.5}, {"loss": 1.0}], {})
    with (run / name).open("ab") as file:
        file.write(b'{"step": 3, "reward_mean\xff": 0.5}\n{"step": 4, "rew')
    assert [plot["title"] for plot in report_of(run).data["plots"]] == ["Reward"]


def test_the_same_run_gives_the_same_report(whole_run):
    assert write_report(whole_run).read_text() == write_report(whole_run).read_text()


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


def test_a_report_is_written_without_torch_or_a_library_of_plots(whole_run):
    code = "import sys; from areal.__main__ import main; main(['report', sys.argv[1]])\n"
    code += "sys.exit('matplotlib' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, whole_run]).returncode == 0


def test_an_activity_may_have_any_text(folder):
    activities = ["a $ b", "\x1b[31m", "_", "", "$" * 99, "\\$"]
    events = [
        {"actor": f"generator/{activity}", "state": "healthy", "stats": {}, "time": at, "activity": activity}
        for activity in activities
        for at in (990.0, 995.0)
    ]
    run = folder([BRIEF | {"time": 1000.0}])
    (run / "events.jsonl").write_text("".join(map(line_of, events)))
    page = write_report(run).read_text()
    assert "a $ b" in page and "\x1b" not in page and "u001b" not in page


def test_a_report_names_no_folder_of_the_machine(folder):
    config = "name: demo\nrun_dir: /home/me/runs\nreward:\n  functions: ['/home/me/my own.py:score']\nurl: http://a/b\n"
    page = report_of(folder(config=config))
    assert "/home" not in json.dumps(page.data) and "run_dir: …/runs" in page.data["configuration"]
    assert "…/my own.py:score" in page.data["configuration"] and "http://a/b" in page.data["configuration"]
