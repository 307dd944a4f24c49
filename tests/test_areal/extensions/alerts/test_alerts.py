"""What goes wrong in a run is named, with the rollouts that show it; a run that learns has no alerts."""

import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from areal.__main__ import main
from areal.extensions.alerts import alert_inputs as digests
from areal.extensions.alerts.alert_inputs import Digests
from areal.extensions.alerts.alerts import Alert, alerts
from areal.samples.trajectory import Group, Trajectory, row_text
from areal.storage.records import line_of
from areal.storage.rollout_files import SCHEMA, files
from areal.storage.rollouts import RolloutWriter
from areal.storage.run_files import ROLLOUTS

STEPS, GROUPS, SAMPLES, BREAKS = 30, 4, 8, 21
"""From step BREAKS on, each run here is broken in its own way."""
PLAIN = [name for name in SCHEMA.names if not str(SCHEMA.field(name).type).startswith("list")]


def sample(random: np.random.Generator, reward: float, length: int = 40, finish: str = "stop", token: float = 0.0):
    """A sample of about `length` random tokens, of which a share `token` is number 7."""
    n = max(2, length + int(random.integers(-4, 5)))
    tokens_here = np.where(random.random(n) < token, 7, random.integers(10, 1000, n))
    tokens = np.concatenate([[1, 2], tokens_here]).astype(np.int32)
    versions = np.array([-1, -1] + [0] * n, np.int32)
    return Trajectory(tokens, np.zeros(n + 2, np.float32), versions, reward, finish)


def write_run(folder: Path, broken=None, steps: int = STEPS) -> list[dict]:
    """Write the rollouts of a run, and return its metrics of them. broken: makes the group of a prompt in its place."""
    random = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    writer = RolloutWriter(
        folder / ROLLOUTS, "all", 1 << 30, lambda sequences: [str(list(tokens)) for tokens in sequences]
    )
    records = []
    for step in range(1, steps + 1):
        results = []
        for place in range(GROUPS):
            sound = [sample(random, float(n % 2)) for n in range(SAMPLES)]
            tokens = broken(random, place) if broken and step >= BREAKS else sound
            prompt = GROUPS * step + place
            results.append(Group(f"g{prompt}.0", prompt, tuple(tokens)))
        writer.add_trained(step, results, None)
        if step % 10 == 0 or step == steps:
            writer.write()
        every = [trajectory for group in results for trajectory in group.trajectories]
        records.append(
            {
                "step": step,
                "completion_tokens_mean": float(np.mean([trajectory.sampled.sum() for trajectory in every])),
                "cut_share": float(np.mean([trajectory.finish == "length" for trajectory in every])),
                "reward_mean": float(np.mean([trajectory.reward for trajectory in every])),
                "mixed_groups": float(
                    np.mean([len({trajectory.reward for trajectory in g.trajectories}) > 1 for g in results])
                ),
                "entropy": 0.5,
                "effective_sample_size": 0.95,
                "optimizer_steps": 4,
                "weight_mean": 1.0,
                "logprob_gap": 0.001 if step % 3 else None,
                "engine_gap": 1e-6,
            }
        )
    return records


def shown_by(alert: Alert, folder: Path) -> list[dict]:
    """The rollouts that its SQL condition selects."""
    rows = [row for path in files(folder / ROLLOUTS) for row in pq.read_table(path, columns=PLAIN).to_pylist()]
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    database.execute(f"create table rollouts ({', '.join(json.dumps(name) for name in PLAIN)})")
    database.executemany(
        f"insert into rollouts values ({', '.join('?' * len(PLAIN))})", [[row[name] for name in PLAIN] for row in rows]
    )
    return [dict(row) for row in database.execute(f"select * from rollouts where {alert.where}")]


def found_in(folder: Path, records: list[dict], **keywords) -> list[Alert]:
    return Digests(folder).alerts(records, keywords.get("evaluations", ()), keywords.get("config", {}), 60.0)


def copies(random, place):
    first, *remainder = [sample(random, n % 2) for n in range(3)]
    return [Trajectory(first.tokens, first.logprobs, first.versions, n % 2, "stop") for n in range(6)] + remainder


@pytest.mark.parametrize(
    ("name", "broken", "says", "rows"),
    [
        (
            "length collapse",
            lambda r, _: [sample(r, n % 2, 8) for n in range(SAMPLES)],
            "from 40 to 8 tokens",
            lambda row: row["completion_tokens"] <= 20,
        ),
        (
            "length explosion",
            lambda r, _: [sample(r, n % 2, 120) for n in range(SAMPLES)],
            "from 40 to 120 tokens",
            lambda row: row["completion_tokens"] >= 80,
        ),
        (
            "cut completions",
            lambda r, _: [sample(r, n % 2, finish=["stop", "length"][n // 4]) for n in range(SAMPLES)],
            "50% of the completions",
            lambda row: row["finish"] == "length",
        ),
        (
            "one token dominates",
            lambda r, _: [sample(r, n % 2, token=0.6) for n in range(SAMPLES)],
            "Token 7 has made",
            lambda row: True,
        ),
        ("copies in groups", copies, "62% of the samples", lambda row: True),
        (
            "no signal",
            lambda r, place: [sample(r, place == 0) for _ in range(SAMPLES)],
            "(75% always 0 and 25% always 1; the newest are of prompts 120, 121",
            lambda row: row["reward"] == 0,
        ),
    ],
)
def test_what_rollouts_show_is_named_once_it_goes_wrong(tmp_path, name, broken, says, rows):
    records = write_run(tmp_path, broken)
    (alert,) = found_in(tmp_path, records)
    assert alert.name == name and says in alert.sentence
    assert (alert.first, alert.last) == (BREAKS, STEPS)
    results = shown_by(alert, tmp_path)
    assert results and all(rows(row) and alert.first <= row["step"] <= STEPS for row in results)


def test_a_run_with_a_teacher_is_judged_by_it_and_not_by_rewards(tmp_path):
    records = write_run(tmp_path, lambda r, place: [sample(r, 0.0, 120) for _ in range(SAMPLES)])
    config = {"trainer": {"teacher_coef": 1.0}}
    for record in records:  # longer answers, but more and more like the teacher's
        record |= {"teacher_agreement": 0.5 + record["step"] / 100, "kl_teacher": 0.5 - record["step"] / 100}
    assert not found_in(tmp_path, records, config=config)
    for record in records:
        record |= {"teacher_agreement": 0.5, "kl_teacher": 0.1 + record["step"] / 100}
    length, teacher = found_in(tmp_path, records, config=config)
    assert length.name == "length explosion" and "and the agreement with the teacher has not risen" in length.sentence
    assert teacher.name == "away from the teacher" and "lower trainer.lr or max_staleness" in teacher.sentence


def test_a_healthy_run_has_no_alerts_at_any_step_and_a_recovered_one_none_any_more(tmp_path):
    records = write_run(tmp_path)
    for steps in range(STEPS + 1):
        assert not found_in(tmp_path, records[:steps])
    for record in records[10:20]:
        record["completion_tokens_mean"] = 5.0
    assert [alert.name for alert in alerts(records[:20])] == ["length collapse"] and not alerts(records)


@pytest.mark.parametrize(
    ("name", "says", "changes"),
    [
        ("entropy collapse", "at 0.01 nats", {"entropy": 0.01}),
        ("small effective sample size", "at 0.30 since", {"effective_sample_size": 0.3}),
        ("weights far from 1", "at 1.50 since", {"weight_mean": 1.5}),
        ("nothing trained", "No step has moved the weights since step 21", {"optimizer_steps": 0}),
        ("log-prob gap", "ends the run above 0.5", {"logprob_gap": 0.3}),
        ("log-prob gap", "0.0004 nats apart", {"engine_gap": 4e-4}),
        (
            "reward parts diverge",
            "part form from 0.2 to 0.9 has risen, part right from 0.6 to 0.3 has fallen",
            {"reward_parts": {"form": 0.9, "right": 0.3}},
        ),
        (
            "reward parts diverge",
            "part form from 0.2 to 0.9 has risen, the reward from 0.5 to 0.25 has fallen",
            {"reward_parts": {"form": 0.9, "right": 0.6, "judge/tokens": 900.0}, "reward_mean": 0.25},
        ),
    ],
)
def test_what_the_metrics_show_is_named(tmp_path, name, says, changes):
    records = write_run(tmp_path)
    for record in records:
        record["reward_parts"] = {"form": 0.2, "right": 0.6}
        record |= changes if record["step"] >= BREAKS else {}
    (alert,) = found_in(tmp_path, records, config={"guard": {"logprob_gap": 0.5, "effective_sample_size": 0.1}})
    assert alert.name == name and says in alert.sentence
    assert alert.first in (BREAKS, BREAKS + 1) and alert.last == STEPS  # the gap is not measured at each step
    (alert,) = found_in(tmp_path, records, config={"guard": {"logprob_gap": None, "effective_sample_size": 0.1}})
    assert alert.name == name


def test_held_out_accuracy_that_falls_as_the_reward_rises_is_named(tmp_path):
    records = write_run(tmp_path)
    evaluations = [{"version": v, "accuracy": a, "standard_error": 0.02} for v, a in ((0, 0.5), (10, 0.7), (20, 0.5))]
    assert not found_in(tmp_path, records, evaluations=evaluations)
    for record in records[15:]:
        record["reward_mean"] = 0.9
    (alert,) = found_in(tmp_path, records, evaluations=evaluations)
    assert alert.name == "held-out accuracy falls"
    assert "from 70.0% (version 10) to 50.0% (version 20)" in alert.sentence


def test_lengths_and_copies_that_come_with_more_reward_are_no_alert(tmp_path):
    records = write_run(tmp_path, copies)
    for record in records[BREAKS - 1 :]:
        record["reward_mean"] += 0.3
        record["completion_tokens_mean"] *= 2.5
    assert not found_in(tmp_path, records)


@pytest.mark.parametrize(
    ("answer", "completion", "functions", "is_alert"),
    [
        ("4 - 1 = 3\n#### 3", "The problem is 4 - 1", ["math"], True),
        ("1,203", "It is 41,203", {"math": 1.0}, True),
        ("1,203", "It is $1{,}203$", ["math"], False),
        ("3", "4 - 1 = 3.0", ["math"], False),
        ("3", "4 - 1", ["exact_match"], False),
        ("\\frac{1}{2}", "0.5", ["math"], False),
    ],
)
def test_samples_that_are_rewarded_without_the_rows_answer_are_named(tmp_path, answer, completion, functions, is_alert):
    random = np.random.default_rng(0)
    writer = RolloutWriter(tmp_path / ROLLOUTS, "all", 1 << 30, lambda sequences: [completion for _ in sequences])
    for step in range(1, 8):
        samples = tuple(sample(random, float(n == 0)) for n in range(4))
        writer.add_trained(step, [Group(f"g{step}.0", step, samples, row_text({"answer": answer}))], None)
    writer.write()
    records = [{"step": step} for step in range(1, 8)]
    results = found_in(tmp_path, records, config={"reward": {"functions": functions}})
    named = [item for item in results if item.name == "rewarded without the answer"]
    assert bool(named) is is_alert
    if named:
        assert "100% of the rewarded samples" in named[0].sentence and named[0].first == 5
        assert {row["reward"] for row in shown_by(named[0], tmp_path)} == {1.0}


def test_groups_that_were_filtered_count_as_groups_without_signal(tmp_path):
    records = write_run(tmp_path)
    for record in records:
        filtered = 40 if record["step"] >= BREAKS else 2
        record |= {"mixed_groups": 1.0, "groups_trained": 10, "groups_filtered": filtered, "reward_mean_all": 0.5}
    (alert,) = found_in(tmp_path, records)
    assert alert.name == "no signal" and "80% of the groups" in alert.sentence
    assert alert.where == "fate = 'filtered' and start_version >= 20"


def test_sessions_of_users_that_expire_are_named_and_have_no_signal_to_lack(tmp_path):
    records = write_run(tmp_path)
    for record in records:
        expired = 3 if record["step"] >= BREAKS else 1
        record |= {"mixed_groups": None, "sessions_trained": 1, "sessions_expired": expired}
    (alert,) = found_in(tmp_path, records)
    assert alert.name == "sessions expire" and "75% of the sessions of users" in alert.sentence


def test_a_file_is_read_once_and_a_broken_one_is_left_out(tmp_path):
    def broken(random, place):
        return [sample(random, n % 2, token=0.6) for n in range(SAMPLES)]

    records = write_run(tmp_path, broken, steps=20)
    reader = Digests(tmp_path)
    assert not reader.alerts(records, (), {}, 60.0)
    for path in files(tmp_path / ROLLOUTS):
        path.write_bytes(b"PAR1")
    (tmp_path / ROLLOUTS / "000009.parquet").write_bytes(b"PAR1")
    again = write_run(tmp_path / "other", broken)
    files(tmp_path / "other" / ROLLOUTS)[-1].rename(tmp_path / ROLLOUTS / "000010.parquet")
    assert [alert.name for alert in reader.alerts(again, (), {}, 60.0)] == ["one token dominates"]


def test_of_many_tokens_a_part_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("areal.storage.rollouts.ROWS_AT_ONCE", 16)
    write_run(tmp_path)
    (complete, *_) = (digests.digest(path) for path in files(tmp_path / ROLLOUTS))
    monkeypatch.setattr(digests, "TOKEN_BYTES", 16 << 10)
    (part, *_) = (digests.digest(path) for path in files(tmp_path / ROLLOUTS))
    assert all(item.tokens and item.copies == 0 for item in complete)
    read = [item for item in part if item.tokens]
    assert 0 < len(read) < len(complete) and [item.flat for item in part] == [item.flat for item in complete]


def test_the_report_names_the_alerts_and_the_command_for_their_rollouts(tmp_path, capsys):
    records = write_run(tmp_path, lambda r, _: [sample(r, n % 2, 8) for n in range(SAMPLES)])
    drawn = ("step", "completion_tokens_mean", "reward_mean")  # drawing every metric takes seconds
    lines = [line_of({name: record[name] for name in drawn}) for record in records]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert main(["report", str(tmp_path)]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    (alert,) = json.loads(re.search(r"REPORT = (.*), WINDOW", page)[1])["alerts"]
    assert alert["name"] == "length collapse" and "have shrunk from 40 to 8 tokens" in alert["text"]
    assert f'areal rollouts {tmp_path} --where "step >= 21 and step <= 30' in alert["command"]
