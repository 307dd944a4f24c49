"""What a person sees of a run, from anywhere."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from actors.terminal import display, monitor
from actors.terminal.display import Display
from actors.terminal.monitor import Feed, follow
from areal.base.command_line import typed
from areal.extensions.desk.run_summary import print_summary
from areal.storage.records import line_of
from protocols.bus_errors import DeadlineError
from protocols.membership_messages import AskStatus, Shutdown, Status


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {
        "step": number,
        "reward_mean": number / 10,
        "reward_mean_all": None,
        "groups_filtered": 0,
        "groups_ready": 3,
        "staleness_mean": 1.5,
        "staleness_max": 2,
        "staleness_histogram": [1, 0, 3],
        "tokens_generated": 1000,
        "tokens_trained": 800,
        "completion_tokens_mean": 30.0,
        "step_seconds": 2.0,
        "train_seconds": 1.5,
        "trainer_wait_seconds": 0.5,
        "publish_wait_seconds": 0.0,
    } | metrics


SCORES = {
    "accuracy": 0.25,
    "standard_error": 0.05,
    "pass_at": {"1": 0.25, "16": 0.5},
    "rows": 30,
    "failed": 0,
    "unfinished": 0,
    "completion_tokens_mean": 9.0,
    "samples": 16,
    "scored": 470,
    "cut_share": 0.125,
}


def printed(folder, **benchmarks: dict[str, Any]) -> str:
    evaluations = [{"version": int(v[1:]), "benchmarks": scores} for v, scores in benchmarks.items()]
    nothing = {"steps": 0, "accuracy_after": None, "samples_before": [], "samples_after": []}
    (folder / "summary.json").write_text(json.dumps(nothing | {"evaluations": evaluations}))
    out = io.StringIO()
    print_summary(folder, Console(file=out, width=80))
    return out.getvalue()


def test_the_benchmarks_of_a_model_are_a_table(tmp_path):
    unscored = SCORES | {"accuracy": None, "standard_error": None, "pass_at": {}, "scored": 0, "cut_share": None}
    lines = printed(tmp_path, v0={"aime24": SCORES, "none": unscored})
    (line,) = (line for line in lines.splitlines() if "aime24" in line)
    assert line.split() == ["aime24", "30", "×", "16", "25.0", "±", "5.0", "pass@16", "50.0%", "12.5%", "10"]
    (line,) = (line for line in lines.splitlines() if "none" in line)
    assert line.split() == ["none", "30", "×", "16", "–", "±", "–", "–", "–", "480"]
    assert "before" not in lines and "Summary" not in lines


def drawn(**metrics: Any) -> list[str]:
    """The live view at 80 columns, without its frame."""
    counts = {"alive": 37, "ready": 3, "capacity": 11, "max_staleness": 4, "accuracy": {"0": 0.4, "60": 0.7}}
    status = {"run": "demo", "version": 37, "steps": 120, "members": [], "waiting": "", "alerts": []} | counts
    out = io.StringIO()
    Console(file=out, width=80).print(monitor.render(status | metrics))
    return [line[2:-2].rstrip() for line in out.getvalue().splitlines()[1:-1]]


def test_at_80_columns_each_number_has_its_label_and_its_words_on_one_line():
    metrics = step(37, step_seconds_median=2.0, reloads=1, pause_seconds=0.0, load_seconds=0.25, resume_seconds=0.0)
    lines = drawn(metrics=metrics | {"sequences_interrupted": 123456, "tokens_recomputed": 12345678})
    assert lines[: lines.index("")] == [
        "progress            █████████░░░░░░░░░░░░░░░░░░░░░   about 3 min left",
        "held-out accuracy   0.400 at version 0, 0.700 at version 60",
        "groups              37 admitted, 3 of them ready; room for 11 more",
        "reward              3.700",
        "staleness           1.5 on average, 2 at most; the bound is 4",
        "tokens a second     500 generated, 400 trained",
        "last step           2.00 s, of which 0.50 s waiting for data",
        "weight updates      1, 0.250 s each",
        "interrupted         123,456 sequences, 12,345,678 tokens recomputed",
    ]


def test_the_time_left_is_that_of_the_steps_to_come_and_is_left_out_where_there_are_none():
    assert monitor.step_line(step(8, step_seconds_median=30.0), 10, 4).endswith("  about 60 s left")
    assert monitor.step_line(step(10, step_seconds_median=30.0), 10, 4).endswith("ready 3")
    assert "left" not in drawn(metrics={})[0]


def test_a_step_that_no_heartbeat_fell_into_shows_no_rate_of_generation():
    short = step(3, tokens_generated=0, step_seconds=0.3)
    assert "  – tok/s generated, " in monitor.step_line(short, 10, 4)
    assert "  0 tok/s generated, " in monitor.step_line(short | {"step_seconds": 3.0}, 10, 4)


def test_the_end_shows_rows_that_changed_and_says_where_to_look(tmp_path):
    def samples(**scores: float) -> list[dict[str, Any]]:
        return [{"prompt": p, "completion": f"{p}!", "answer": p, "score": score} for p, score in scores.items()]

    summary = {
        "steps": 5,
        "accuracy_before": 0.5,
        "accuracy_after": 1.0,
        "staleness_max": 3,
        "max_staleness": 4,
        "seconds": 9,
        "logprob_gap_max": None,
        "samples_trained": 40,
        "samples_per_second": None,
        "evaluations": [],
        "samples_before": samples(same=1.0, risen=0.0, little=0.5, fallen=1.0),
        "samples_after": samples(same=1.0, risen=1.0, little=0.75, fallen=0.0),
        "groups_requeued": {"reward": 26, "released by its owner": 2},
        "groups_discarded": {},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.yaml").write_text("data: {source: addition}\n")
    out = io.StringIO()
    print_summary(tmp_path, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    rows = [line for line in lines if "answer:" in line or "(score" in line]
    assert rows == [
        "  risen   [answer: risen]",
        "  before risen!   (score 0)",
        "  after  risen!   (score 1)",
        "  fallen   [answer: fallen]",
        "  before fallen!   (score 1)",
        "  after  fallen!   (score 0)",
    ]
    assert "For each column, the model writes its letter, its two digits," in " ".join(out.getvalue().split())
    for words in (f"dashboard {tmp_path}", f"rollouts {tmp_path}", f"run --resume {tmp_path} steps=10"):
        assert typed(words) in out.getvalue()
    assert f"{tmp_path}/report.html" in out.getvalue()
    assert "│ groups sampled again │ 26 (reward), 2 (released by its owner) │" in lines
    assert "groups discarded" not in out.getvalue()


def test_alerts_are_named_when_a_run_has_ended(tmp_path):
    records = [{"step": step, "cut_share": 0.5 if step > 20 else 0.0} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(line_of, records)))
    assert "cut completions: 50% of the completions have been cut off" in " ".join(printed(tmp_path).split())


def test_benchmarks_of_a_run_are_shown_at_their_first_and_their_last_version(tmp_path):
    last = SCORES | {"accuracy": 0.75}
    lines = printed(tmp_path, v10={"aime24": last}, v0={"aime24": SCORES}, v5={"aime24": SCORES | {"accuracy": 0.5}})
    (line,) = (line for line in lines.splitlines() if "aime24" in line)
    assert line.split()[4:10] == ["25.0", "±", "5.0", "75.0", "±", "5.0"]


async def test_what_actors_report_cannot_steer_the_terminal():
    evil = "\x1b]52;c;aGFjaw==\x07"

    class Evil(FakeMaster):
        async def ask(self, message, seconds):
            values = (await super().ask(message, seconds)).values
            members = [member | {"activity": evil, "stats": {evil: 1.0}} for member in values["members"]]
            return Status(values=values | {"run": evil, "waiting": f"[red]{evil}", "members": members})

        def subscribe(self, address, heard):
            heard(1, Shutdown(ok=False, reason=f"failed: {evil} [/nothing]"))
            return self

    master = Evil(step(1))
    out = io.StringIO()
    console = Console(file=out, width=200)
    feed = Feed(master, "tcp://master")
    status = await feed.look()
    console.print(monitor.actors_table(status["members"]), status["run"], status["waiting"], markup=False)
    await follow(master, "tcp://master", console)
    assert "\x1b" not in out.getvalue() and "\x07" not in out.getvalue()
    assert "failed: \\x1b]52;c;" in out.getvalue()


def test_an_evaluation_alone_prints_what_its_evaluator_does_when_that_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(display, "PROGRESS_SECONDS", 0.0)
    out, said = Console(file=io.StringIO()), []
    shown = Display(out, SimpleNamespace(folder=tmp_path, steps=0), 0, said.append)
    for activity in ("sums 3 of 9", "sums 3 of 9", "sums 9 of 9"):
        member = {"identity": "evaluator/0#e", "state": "healthy", "activity": activity}
        shown.show({"members": [member], "version": 0, "steps": 0})
    assert [line for line in said if "sums" in line] == ["sums 3 of 9", "sums 9 of 9"]


class FakeMaster:
    """A bus with a master that has trained `steps`, and what it tells its subscribers."""

    address = "tcp://events"

    def __init__(self, *steps: dict[str, Any]) -> None:
        self.steps = list(steps)
        self.silent = False
        self.asked: list[int | None] = []
        self.subscribers: list = []

    def peer(self, address: str) -> FakeMaster:
        return self

    def subscribe(self, address: str, heard) -> FakeMaster:
        self.subscribers.append(heard)
        return self

    async def ask(self, message: AskStatus, seconds: float) -> Status:
        self.asked.append(message.since)
        if self.silent:
            raise DeadlineError("no answer")
        recent = [step for step in self.steps if step["step"] > (message.since or 0)]
        members = [
            {
                "identity": "generator/0#a",
                "state": "healthy",
                "activity": "generating",
                "stats": {"running": 7.0, "limit": 8.0, "waiting": 2.0, "kv_use": 0.25},
            },
            {"identity": "trainer/0#b", "state": "stale", "activity": "loading [1/2]", "stats": {}},
        ]
        return Status(
            values={
                "run": "demo",
                "version": len(self.steps),
                "steps": 9,
                "max_staleness": 4,
                "alive": 5,
                "ready": 3,
                "capacity": 2,
                "waiting": "the trainer waits: 3 of 4 groups are ready",
                "accuracy": {"0": 0.25},
                "alerts": ["first failure (reward)"],
                "members": members,
                "recent": recent,
                "ended": False,
                "events": self.address,
                "metrics": {},
            }
        )

    def end(self) -> None:
        for heard in self.subscribers:
            heard(1, Shutdown(ok=True, reason="the run reached its end"))


async def test_on_a_terminal_a_live_view_shows_who_does_what_and_survives_a_silent_master(monkeypatch):
    monkeypatch.setattr(monitor, "REFRESH_SECONDS", 0.0)
    master = FakeMaster(step(1), step(2))
    screens: list[str] = []
    acts = [lambda: setattr(master, "silent", True), lambda: setattr(master, "silent", False), master.end]

    def see(live, shown_now, **_):
        out = io.StringIO()
        Console(file=out, width=140).print(shown_now)
        screens.append(out.getvalue())
        acts[len(screens) - 1]()

    monkeypatch.setattr(monitor.Live, "update", see)
    out = io.StringIO()
    assert await follow(master, "tcp://m:1", Console(file=out, force_terminal=True)) == 0
    first, silent, again = screens
    assert "generating, 7 running of 8, 2 queued, KV 25%" in first and "loading [1/2]" in first
    assert (
        "the trainer waits: 3 of 4 groups are ready" in first
        and "step 2 of 9" in first
        and "0.250 at version 0" in first
    )
    assert "first failure (reward)" in first
    assert "The master does not answer: no answer" in silent and "the trainer waits" in again
    assert "the run reached its end" in out.getvalue()


def test_a_run_that_was_started_here_shows_its_steps_after_those_of_an_earlier_start_also_at_its_end(tmp_path):
    said: list[str] = []
    (file := tmp_path / "metrics.jsonl").write_text(line_of(step(1)) + line_of(step(2)))
    config = SimpleNamespace(folder=tmp_path, steps=9, max_staleness=4)
    shown = Display(Console(file=io.StringIO()), config, 1, said.append)
    shown.begin()
    shown.show({"members": [], "version": 2, "steps": 9})
    with file.open("a") as more:
        more.write(line_of(step(3)))
    shown.end()
    assert [line.partition("  ")[0] for line in said] == ["step 2/9", "step 3/9"]


async def test_each_step_is_asked_for_once():
    master = FakeMaster(step(1), step(2))
    feed = Feed(master, "tcp://m:1")
    assert [s["step"] for s in (await feed.look())["recent"]] == [1, 2]
    master.steps.append(step(3))
    assert [s["step"] for s in (await feed.look())["recent"]] == [3]
    assert master.asked == [0, 2]


async def test_without_a_terminal_each_step_and_each_alert_is_a_line_and_the_end_ends_it(monkeypatch):
    monkeypatch.setattr(monitor, "REFRESH_SECONDS", 0.0)
    master, out = FakeMaster(step(1), step(2)), io.StringIO()

    class EndsAfterThree(Console):
        def print(self, *args, **kwargs):
            super().print(*args, **kwargs)
            if out.getvalue().count("\n") == 3:
                master.end()

    assert await follow(master, "tcp://m:1", EndsAfterThree(file=out)) == 0
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        "step 1/9",
        "step 2/9",
        "first failure (reward)",
        "the run reached its end",
    ]


async def test_a_master_that_is_not_heard_of_any_more_is_a_failure(monkeypatch):
    monkeypatch.setattr(monitor, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "LOST_SECONDS", 0.0)
    master = FakeMaster()
    master.silent = True
    assert await follow(master, "tcp://m:1", Console(file=io.StringIO())) == 1
