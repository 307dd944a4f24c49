"""Audits, by the command a user types, of a small run whose record real parts have written: ledger, journal, rollouts,
checkpoints. Each forgery is planted in a copy of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_runs import ten_steps
from support.tiny_training import TEMPERATURE, VOCAB, make_model

from areal.__main__ import main
from areal.base.processes import ROOT
from areal.config import dump_config, load_config
from areal.data.warm_start import make_tokenizer
from areal.extensions.desk.audit import Audit, AuditFinding
from areal.extensions.recipes.run_archive import unpack
from areal.samples.trajectory import Group, Trajectory
from areal.staleness.ledger import Ledger
from areal.staleness.ledger_records import event_record
from areal.staleness.ledger_state import Batch, Event, LedgerSettings, LedgerState
from areal.storage.journal import Journal, event_checksum
from areal.storage.records import line_of, record_of
from areal.storage.rollouts import RolloutWriter
from areal.training.training_engine import TrainingEngine

STEPS = 4
TOKENS = min(VOCAB, len(make_tokenizer()))


def sampled(engine: TrainingEngine, permit, version: int, rng: np.random.Generator) -> Group:
    """A group with tokens that `engine` may have sampled at `version`."""
    samples = []
    for number in range(2):
        versions = np.full(int(rng.integers(6, 12)), version, np.int32)
        versions[:3] = -1
        tokens = rng.integers(0, TOKENS, len(versions)).astype(np.int32)
        reward = float(rng.integers(0, 4)) + number / 2
        samples.append(Trajectory(tokens, np.zeros(len(tokens), np.float32), versions, reward, "stop"))
    group = Group(permit.group_id, permit.prompt_index, tuple(samples))
    logprobs = engine.logprobs([group], temperature=TEMPERATURE)
    start = 0
    for sample in samples:
        sample.logprobs[:] = logprobs[start : (start := start + len(sample))]
    return group


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(make_model(folder / "model"))
    settings = {"model": str(folder / "model"), "run_dir": folder, "name": "run", "steps": STEPS, "max_staleness": 1}
    sampling, trainer = {"max_new_tokens": 8, "temperature": TEMPERATURE}, {"minibatches": 1, "lr": 0.01}
    config = ten_steps(**settings, sampling=sampling, trainer=trainer)
    run = config.folder
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    events: list[tuple[str, dict]] = []

    def keep(event: Event) -> None:
        events.append(event_record(event))

    ledger = Ledger(LedgerState(LedgerSettings.of(config), keep))
    ledger.change_settings(LedgerSettings.of(config))
    engine = TrainingEngine.of_run(config, keep_values=True)
    texts = lambda sequences: [tokenizer.decode(tokens.tolist()) for tokens in sequences]  # noqa: E731
    writer = RolloutWriter(run / "rollouts", "all", 1 << 30, texts)
    rng, groups, lines = np.random.default_rng(0), {}, []
    journal = Journal.open(run / "journal.db")
    for version in range(STEPS):
        for permit in ledger.admit("m", 9, 0.0, 60.0):
            group = groups[permit.group_id] = sampled(engine, permit, version, rng)
            if permit.prompt_index == 5:
                ledger.discard(group.id, "test")
                writer.add_untrained(group, "discarded", "test")
                continue
            ledger.ready(group.id, version)
            mean = float(np.mean([sample.reward for sample in group.trajectories]))
            events.append(("rewarded", {"group": group.id, "mean": mean}))
        batch = ledger.next_batch(version)
        assert isinstance(batch, Batch)
        of_step = [groups[group_id] for group_id in batch.group_ids]
        result = engine.step(of_step, version=version, temperature=TEMPERATURE)
        step = ledger.commit(version)
        rewards = [sample.reward for group in of_step for sample in group.trajectories]
        metrics = {
            "step": version + 1,
            "loss": result.loss,
            "logprob_gap": result.logprob_gap,
            "run": journal.run,
            "reward_mean": float(np.mean(rewards)),
            "staleness_max": step.max_staleness,
        }
        lines.append(line_of(metrics))
        writer.add_trained(version + 1, of_step, engine.values)
        writer.write()
        if version == 1:
            engine.storage.begin_save(run / "checkpoints" / "step_000002", journal.run).result()
    (run / "metrics.jsonl").write_text("".join(lines))

    async def write() -> None:
        for kind, body in events:
            journal.append(kind, body)
        await journal.durable()

    asyncio.run(write())
    journal.close()
    engine.storage.snapshot()
    stamp = engine.storage.begin_write(folder / "weights").result().stamp
    engine.close()
    summary = {"ok": True, "steps": STEPS, "weights": {"version": STEPS, "stamp": stamp}}
    summary |= {"groups_discarded": {"test": 1}, "prompts_open": ledger.state.open_prompts()}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def failures(run: Path, *arguments: str) -> dict[str, str]:
    """What the audit finds, by check: its faults, in one text."""
    code = main(["audit", str(run), "--json", str(run / "audit.json"), *arguments])
    report = json.loads((run / "audit.json").read_text())
    assert code == (0 if report["ok"] else 1)
    assert report["ok"] == all(finding["result"] == "holds" for finding in report["findings"])
    return {f["check"]: "; ".join(f["faults"] + f["unknown"]) for f in report["findings"] if f["result"] != "holds"}


def edit(run: Path, step: int, column: str, change: Callable[[list], None]) -> None:
    """Change a column of the trained rows of a step, in place."""
    path = run / "rollouts" / f"{step:06}.parquet"
    table = pq.read_table(path)
    number, values = table.schema.get_field_index(column), table[column].to_pylist()
    change(values)
    pq.write_table(
        table.set_column(number, table.schema.field(number), pa.array(values, table.schema.types[number])), path
    )


def test_a_run_is_what_its_record_says(run, capsys):
    assert failures(run) == {}
    printed = capsys.readouterr().out
    assert "2 of 4 steps drawn" in printed and "The run is what its record says" in printed
    assert failures(run, "--full") == {}
    report = json.loads((run / "audit.json").read_text())
    assert sorted(report["replayed"]) == [[0, 2], [2, 4]]


def test_checkpoints_that_hold_more_than_weights_that_are_published_are_trained_through(run, monkeypatch):
    monkeypatch.setattr("areal.extensions.desk.replay.is_wrapper", lambda folder: True)  # as of a model with vision
    assert list(Audit(run)._intervals(AuditFinding("check"))) == [(2, 4)]
    assert list(Audit(run, full=True)._intervals(AuditFinding("check"))) == [(0, 4)]


def change_token(run: Path) -> None:
    def change(tokens: list) -> None:
        tokens[0][-1] = (tokens[0][-1] + 1) % TOKENS

    edit(run, 3, "tokens", change)
    tokens = pq.read_table(run / "rollouts" / "000003.parquet")["tokens"].to_pylist()[0]
    edit(run, 3, "completion", lambda texts: texts.__setitem__(0, make_tokenizer().decode(tokens[3:])))


def repeat_batch(run: Path) -> None:
    table = pq.read_table(run / "rollouts" / "000002.parquet")
    steps = pa.array([3] * table.num_rows, pa.int32())
    pq.write_table(table.set_column(0, table.schema.field(0), steps), run / "rollouts" / "000003.parquet")


def swap_rewards(run: Path, a: int, b: int) -> None:
    """In the file of step 2, which begins with the two rows of the discarded group."""

    def change(rewards: list) -> None:
        rewards[a], rewards[b] = rewards[b], rewards[a]

    edit(run, 2, "reward", change)


def move_versions(run: Path) -> None:
    """Of one sample of a group: staleness, which is that of the oldest sample, stays as it was."""

    def change(versions: list) -> None:
        versions[-1] = [3 if version == 2 else version for version in versions[-1]]

    edit(run, 4, "versions", change)


def change_metrics(run: Path) -> None:
    file = run / "metrics.jsonl"
    records = [record_of(line) or {} for line in file.read_bytes().splitlines(keepends=True)]
    records[1]["reward_mean"] += 0.25
    file.write_text("".join(map(line_of, records)))


def change_weights(run: Path) -> None:
    (file,) = (run / "checkpoints" / "step_000002").glob("*.safetensors")
    tensors = load_file(file)
    tensors[min(tensors)].view(-1)[0] += torch.tensor(1e-3)
    save_file(tensors, file, {"format": "pt"})


def change_identity(run: Path) -> None:
    file = run / "checkpoints" / "step_000002" / "training" / "state.json"
    file.write_text(line_of((record_of(file.read_bytes()) or {}) | {"run": "another"}))


def change_stamp(run: Path) -> None:
    file = run / "summary.json"
    file.write_text(file.read_text().replace('"stamp": "', '"stamp": "0'))


def cut_journal(run: Path, where: str) -> None:
    connection = sqlite3.connect(run / "journal.db")
    (last,) = connection.execute("SELECT max(seq) FROM events WHERE kind = 'batch_logged'").fetchone()
    connection.execute(f"DELETE FROM events WHERE seq {where}", (last,))
    connection.commit()
    connection.close()


WEIGHTS, VERSIONS = "the record gives these weights", "each token has the right version"
ONCE, BOUND = "each prompt is trained once, or left out for a reason", "each batch is within the bound"
REWARDS, JOURNAL = (
    "rewards match the journal",
    "the journal is whole and each event follows from earlier events",
)
TEXTS = "texts match the tokens"


@pytest.mark.parametrize(
    ("forge", "faults"),
    [
        (
            change_token,
            {
                VERSIONS: "was not sampled by version",
                WEIGHTS: "the steps 3 to 4 give other weights, and another loss from step 3 on",
            },
        ),
        (repeat_batch, {ONCE: "was trained 2 times"}),
        (
            lambda run: shutil.copy(run / "rollouts/000002.parquet", run / "rollouts/000009.parquet"),
            {ONCE: "step 2 is there 2 times"},
        ),
        (lambda run: (run / "rollouts/000002.parquet").unlink(), {ONCE: "no rollouts of the steps 2"}),
        (lambda run: swap_rewards(run, 2, 3), {WEIGHTS: "the steps 1 to 2 give other weights"}),
        (move_versions, {VERSIONS: "was not sampled by version 3"}),
        (change_weights, {WEIGHTS: "the steps 1 to 2 give other weights"}),
        (change_identity, {WEIGHTS: "is damaged, or of another run"}),
        (change_stamp, {WEIGHTS: "the steps 3 to 4 give other weights"}),
    ],
)
def test_a_forgery_is_found(run, forge, faults):
    forge(run)
    found_faults = failures(run, "--full")
    assert {check: fault in found_faults[check] for check, fault in faults.items()} == dict.fromkeys(faults, True)


@pytest.mark.parametrize(
    ("forge", "check", "fault"),
    [
        (lambda run: edit(run, 1, "prompt", lambda texts: texts.__setitem__(0, "1+1=")), TEXTS, "of step 1"),
        (lambda run: swap_rewards(run, 2, 4), REWARDS, "has reward"),
        (change_metrics, REWARDS, "by metrics.jsonl"),
        (lambda run: edit(run, 4, "versions", lambda vs: vs[0].__setitem__(-1, 0)), BOUND, "over the bound 1"),
        (lambda run: edit(run, 4, "versions", lambda vs: vs[0].__setitem__(-1, 4)), BOUND, "which it was to make"),
        (lambda run: cut_journal(run, ">= ?"), JOURNAL, "is not whole: it ends at step 3"),
        (lambda run: cut_journal(run, "< ?"), JOURNAL, "event 1 is missing"),
        (lambda run: cut_journal(run, "= ?"), JOURNAL, "is missing"),
        (lambda run: (run / "journal.db").unlink(), JOURNAL, "journal.db is missing"),
    ],
)
def test_a_forgery_of_what_the_record_says_of_itself_is_found_without_training(run, monkeypatch, forge, check, fault):
    monkeypatch.setattr(Audit, "_check_training", lambda audit, run: None)
    forge(run)
    assert fault in failures(run)[check]


def test_steps_whose_metrics_were_removed_by_a_setting_are_not_shown_and_no_fault(run, monkeypatch):
    monkeypatch.setattr(Audit, "_check_training", lambda audit, run: None)
    metrics, file = run / "metrics.jsonl", run / "config.yaml"
    file.write_text(file.read_text().replace("metrics_mib: null", "metrics_mib: 1.0"))
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[1:]))
    audit = Audit(run)
    assert audit._check_journal() is not None
    (finding,) = [finding for finding in audit.findings.values() if finding.unknown]
    assert not finding.faults and "begins with step 2 (observe.metrics_mib)" in finding.unknown[0]


def test_a_group_is_judged_by_the_bound_of_its_admission_also_if_that_held_between_two_changes(run):
    """That of step 3 was admitted when the bound of step 2 held."""
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("max_staleness: 1", "max_staleness: 0"))
    changes = [{"step": 2, "before": 0, "now": 1}, {"step": 3, "before": 1, "now": 0}]
    lines = [line_of({"key": "max_staleness", **change}) for change in changes]
    (run / "changes.jsonl").write_text("".join(lines))
    assert failures(run) == {}


def test_a_run_that_is_not_over_is_refused_in_one_sentence(run, capsys):
    (run / "summary.json").unlink()
    assert main(["audit", str(run)]) == 2
    assert "is not over" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_several_ranks_is_trained_again_by_as_many(run, tmp_path):
    config = load_config(run / "config.yaml")
    trainer = config.trainer.model_copy(update={"ranks": 2})  # although one rank has trained it, which rounds otherwise
    (run / "config.yaml").write_text(dump_config(config.model_copy(update={"trainer": trainer})))
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "areal", "audit", str(run), "--json", str(report)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1, process.stderr
    findings = {finding["check"]: finding for finding in json.loads(report.read_text())["findings"]}
    weights = findings.pop("the record gives these weights")
    assert all(finding["result"] == "holds" for finding in findings.values())
    assert [fault for fault in weights["faults"] if "give other weights, with the losses of the run" in fault]


def exported(run: Path, file: Path, *options: str) -> Path:
    assert main(["export-record", str(run), "--out", str(file), *options]) == 0
    return file


def texts_in(run: Path) -> list[str]:
    """What a person may read in the files of a record, also in compressed columns and in the pages of the journal."""
    tables = [pq.read_table(file) for file in run.rglob("*.parquet")]
    columns = [f"{table.schema.metadata}{table.to_pylist()}" for table in tables]
    return columns + [file.read_bytes().decode(errors="replace") for file in run.rglob("*") if file.is_file()]


def test_a_record_in_one_file_names_no_place_of_the_machine_and_no_secret(run, finished, tmp_path):
    private = f"cannot read {Path.home()}/notes.txt, {run}/weights or /usr/lib/private/x.so: --api-key aaaaaaaa"
    event = {"time": 1.0, "actor": "master/0", "activity": private}
    (run / "events.jsonl").write_text(line_of(event))
    (run / "secrets.json").write_text('{"key": "secret-of-the-user"}')
    edit(run, 1, "row", lambda rows: rows.__setitem__(0, json.dumps({"image": f"{tmp_path}/a.png"})))
    journal = sqlite3.connect(run / "journal.db")
    body = json.dumps({"folder": f"{tmp_path}/weights"})
    journal.execute("INSERT INTO events (kind, body, crc) VALUES ('x', ?, ?)", (body, event_checksum("x", body)))
    journal.commit()
    journal.close()
    unpack(exported(run, tmp_path / "r.tar.zst"), opened := tmp_path / "opened")
    texts = "".join(texts_in(opened))
    assert "cannot read {elsewhere}/notes.txt, {record}/weights or {elsewhere}/x.so: --api-key (hidden)" in texts
    assert "{elsewhere}/a.png" in texts and "secret-of-the-user" not in texts
    for place in (tmp_path, finished.parent, Path.home(), "/usr/lib", ROOT):
        assert f"{place}/" not in texts, place


def test_a_record_in_one_file_is_audited_to_the_same_weights(run, tmp_path):
    file = exported(run, tmp_path / "r.tar.zst")
    shutil.rmtree(run)
    process = subprocess.run(
        [sys.executable, "-m", "areal", "audit", str(file), "--json", str(tmp_path / "audit.json")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    report = json.loads((tmp_path / "audit.json").read_text())
    assert process.returncode == 0 and report["ok"] and report["replayed"], process.stdout + process.stderr


def test_a_record_leaves_out_what_does_not_fit_and_says_so(run, tmp_path, capsys):
    exported(run, tmp_path / "r.tar.zst", "--most-mb", "0.02")
    assert "Left out: the model, " in capsys.readouterr().out
    assert main(["export-record", str(run), "--out", str(tmp_path / "s.tar.zst"), "--most-mb", "0.0001"]) == 2
    assert "lacks the account" in capsys.readouterr().err


def test_code_that_a_record_names_runs_only_if_its_reader_says_so(run, tmp_path, capsys):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("objective: decoupled_ppo", "objective: os.path:join"))
    file = exported(run, tmp_path / "r.tar.zst")
    assert main(["audit", str(file)]) == 2
    assert "os.path:join" in capsys.readouterr().err
