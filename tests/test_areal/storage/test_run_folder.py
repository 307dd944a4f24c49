"""What a run leaves behind, and with what it may go on."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tracemalloc
from pathlib import Path

import pytest
import structlog
from support.small_runs import read_jsonl

from areal.base.errors import UserError
from areal.base.secrets import secrets_in, without_secrets
from areal.config import Config, dump_config, load_config
from areal.storage.claim import ADDRESS, announce, check_free, claim, claimed_address
from areal.storage.database import try_lock
from areal.storage.record import Record
from areal.storage.records import NewRecords, line_of, move_records, read_records
from areal.storage.run_files import METRICS, OLDER
from areal.storage.run_folder import (
    RunFolder,
    changed_back,
    compare_record,
    config_of_run,
    configuration_to_resume,
    end_of,
    keep_changes,
    metrics_of,
    read_summary,
    steps_trained,
    store_configuration,
)
from areal.storage.spool import Spool

VALUES = """\
name: mine
run_dir: {runs}
model: {model}
steps: 4
batch_size: 2
group_size: 2
data: {{source: addition, options: {{}}}}
sampling: {{max_new_tokens: 8}}
reward: {{functions: [addition]}}
trainer: {{minibatches: 1}}
"""


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).touch()
    return folder


@pytest.fixture
def file(tmp_path, model) -> Path:
    """The configuration file of a run."""
    path = tmp_path / "mine.yaml"
    path.write_text(VALUES.format(runs=tmp_path / "runs", model=model))
    return path


@pytest.fixture
def config(file) -> Config:
    return load_config(file)


@pytest.fixture
def begun(config) -> Path:
    """The folder of a run that has begun."""
    folder = RunFolder(config).path
    (folder / "journal.db").touch()
    return folder


def record(step: int, staleness: int = 0, gap: float | None = 0.0, wait: float = 0.0, write: float = 0.0) -> dict:
    seconds = {"step_seconds": 2.0, "trainer_wait_seconds": wait, "publish_wait_seconds": write}
    return {"step": step, "staleness_max": staleness, "logprob_gap": gap, **seconds}


def test_a_new_run_moves_an_old_one_of_its_name_aside_and_says_where_it_is(config, capsys):
    for _ in range(3):
        lock = claim(config.folder)
        RunFolder(config).append_metrics(record(1))
        os.close(lock)
    notes = capsys.readouterr().err.splitlines()
    assert notes == [f"Note: the earlier run of {config.folder} is now in {config.folder}.{n}." for n in (1, 2)]
    check_free(config.folder, resume=False)
    assert f"the start of this one moves it to {config.folder}.3." in capsys.readouterr().err
    names = sorted(path.name for path in config.run_dir.iterdir())
    assert names == ["mine", "mine.1", "mine.2"]
    assert config_of_run(config.folder) == config


def test_metrics_of_a_bounded_size_are_the_newest_steps_and_whoever_follows_them_gets_each_once(file):
    config = load_config(file, [f"observe.metrics_mib={1 / 1024}"])
    folder, follower = RunFolder(config), NewRecords(config.folder / METRICS)
    followed = []
    for step in range(1, 41):
        folder.append_metrics(record(step, staleness=9 if step == 1 else 0))
        followed += [line["step"] for line in follower.read()]
    assert followed == list(range(1, 41))
    files = [config.folder / name for name in (OLDER[METRICS], METRICS)]
    assert all(0 < file.stat().st_size < 1024 + 256 for file in files)
    steps = [line["step"] for line in metrics_of(config.folder)]
    assert steps == Record(config.folder).metrics.steps == list(range(steps[0], 41)) and steps[0] > 20
    shutil.copy(files[1], files[0])  # as a crash does between the two
    folder = RunFolder(config)
    assert steps_trained(config.folder) == 40
    assert Record(config.folder).metrics.steps == [line["step"] for line in read_records(files[1])]
    folder.append_metrics(record(41))
    assert [line["step"] for line in metrics_of(config.folder)][-2:] == [40, 41]


SECRET = "s3cr3t"
SECRETS_GIVEN = [
    f"observe.prometheus_token={SECRET}",
    "observe.prometheus_port=9400",
    f"sandbox.url=https://me:{SECRET}@example.org",
    f"rollout_manager.workflow_options={{api_key: {SECRET}, stop: 3, nested: [{{password: {SECRET}}}]}}",
]


@pytest.fixture
def secretive(file) -> Config:
    return load_config(file, SECRETS_GIVEN)


def test_secrets_are_in_a_file_of_their_own_and_in_no_other(secretive):
    folder = RunFolder(secretive).path
    (folder / "journal.db").touch()
    holds = {path.name for path in folder.rglob("*") if path.is_file() and SECRET in path.read_text()}
    assert holds == {"secrets.json"}
    assert stat.S_IMODE((folder / "secrets.json").stat().st_mode) == 0o600
    assert SECRET not in dump_config(secretive)
    assert configuration_to_resume(folder, None, []) == secretive
    assert config_of_run(folder, secrets=True) == secretive
    shown = config_of_run(folder).rollout_manager.workflow_options
    assert (shown["api_key"], shown["stop"]) == ("(hidden)", 3)


def test_a_secret_that_the_configuration_has_no_more_is_on_no_disk(config, secretive):
    store_configuration(secretive)
    store_configuration(config)
    assert [path.name for path in config.folder.iterdir()] == ["config.yaml"]


def test_a_secret_that_is_lost_has_to_be_given_again(secretive):
    folder = RunFolder(secretive).path
    (folder / "journal.db").touch()
    (folder / "secrets.json").unlink()
    with pytest.raises(UserError, match="is hidden in .*config.yaml.*give it again"):
        configuration_to_resume(folder, None, [])
    assert configuration_to_resume(folder, None, SECRETS_GIVEN) == secretive


def test_a_configuration_without_secrets_is_shown_as_it_is(config):
    assert without_secrets(config.model_dump(mode="json")) == config.model_dump(mode="json")
    assert secrets_in(config.model_dump(mode="json")) == {}


def test_names_of_secrets_are_known_by_their_last_word():
    secret = ["key", "pwd", "auth", "cookie", "token", "db_pwd", "openai_key", "apiKey", "X-Api-Key", "APIKEY"]
    public = ["keys", "max_tokens", "kv_on_update", "prompt_key", "answer_key", "date_key", "monkey", "author"]
    shown = without_secrets(dict.fromkeys(secret + public, SECRET))
    assert [name for name, value in shown.items() if value == SECRET] == public
    values = {"auth": {"user": SECRET, "more": [{"n": SECRET}]}, "pwd": 1234, "pad_token": 0, "basic_auth": True}
    hidden = {"auth": {"user": "(hidden)", "more": [{"n": "(hidden)"}]}, "pwd": "(hidden)"}
    assert without_secrets(values) == values | hidden
    assert secrets_in(values) == {key: values[key] for key in hidden}


def test_no_message_shows_a_secret(file, begun):
    (wrong := file.with_name("wrong.yaml")).write_text(f"base: {file.name}\nobserve: {{prometheus_token: 1234}}\n")
    with pytest.raises(UserError, match=r"prometheus_token is '\(hidden\)'"):
        load_config(wrong)
    inputs = load_config(file, ["reward.options={addition: {pwd: before}}"])
    RunFolder(inputs)
    with pytest.raises(UserError, match=r"options.addition.pwd was '\(hidden\)'.* cannot become '\(hidden\)'"):
        configuration_to_resume(begun, None, ["reward.options.addition.pwd=after"])


@pytest.mark.parametrize("name", ["..", ".", "'...'", "''", "a/b", "/a", "../a", "a b", "'a\n'", "-", "-a", "a" * 101])
def test_a_name_that_leads_out_of_the_runs_is_refused(file, name):
    with pytest.raises(UserError, match="which no run folder can have"):
        load_config(file, [f"name={name}"])


@pytest.mark.parametrize("name", ["a", "..a", "a.1", "a-", "_", "é", "a" * 100])
def test_any_other_name_is_a_name(file, name):
    assert load_config(file, [f"name='{name}'"]).folder.parent == load_config(file).run_dir


def test_a_start_that_came_to_nothing_leaves_its_folder_to_the_next(config):
    for _ in range(2):
        os.close(claim(config.folder))
        store_configuration(config)
    assert [path.name for path in config.run_dir.iterdir()] == ["mine"]


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_in_progress_keeps_its_folder(config, monkeypatch, resume):
    monkeypatch.setattr("areal.storage.claim.LOCK_ATTEMPTS", 2)
    lock = claim(config.folder)
    RunFolder(config)
    announce(lock, "tcp://127.0.0.1:1")
    for take in claim, check_free:
        with pytest.raises(UserError, match=r"The run in .*mine is in progress: .* another name, name=NAME"):
            take(config.folder, resume)
    assert [path.name for path in config.run_dir.iterdir()] == ["mine"]
    os.close(lock)
    os.close(claim(config.folder, resume))


def test_a_run_that_took_the_folder_while_another_waited_for_it_keeps_it(config, monkeypatch):
    os.close(claim(config.folder))
    RunFolder(config)

    def late(lock: int, path: Path, attempts: int) -> bool:
        monkeypatch.setattr("areal.storage.claim.try_lock", try_lock)
        locks.append(claim(config.folder))  # moves the folder aside, whose file `lock` is
        RunFolder(config)
        return try_lock(lock, path, attempts)

    locks: list[int] = []
    monkeypatch.setattr("areal.storage.claim.try_lock", late)
    monkeypatch.setattr("areal.storage.claim.LOCK_ATTEMPTS", 2)
    with pytest.raises(UserError, match="is in progress"):
        claim(config.folder)
    assert sorted(path.name for path in config.run_dir.iterdir()) == ["mine", "mine.1"]
    os.close(*locks)


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    for take in claim, check_free:
        with pytest.raises(UserError, match=r"The run folder .*mine cannot be used \(.*\): choose another run_dir"):
            take(tmp_path / "file" / "mine", False)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_told_in_one_sentence(config, monkeypatch, code):
    def flock(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    config.folder.mkdir(parents=True)
    (config.folder / ADDRESS).touch()
    check_free(config.folder, resume=False)
    for use in claim, lambda folder: Spool.open(folder / "spool.db"):
        with pytest.raises(
            UserError, match=r"cannot be locked \(.*choose a folder on a file system that has"
        ) as refused:
            use(config.folder)
        assert "\n" not in str(refused.value)
    assert claimed_address(config.folder) is None


@pytest.mark.parametrize("resume", [True, False])
def test_only_its_user_enters_a_run_folder(config, resume):
    config.folder.mkdir(parents=True)
    config.folder.chmod(0o777)  # as an earlier start, or somebody else, may have left it
    os.close(claim(config.folder, resume))
    assert stat.S_IMODE(config.folder.stat().st_mode) == 0o700


def test_the_master_is_found_by_the_folder_while_the_run_is_in_progress(config):
    assert claimed_address(config.folder) is None
    lock = claim(config.folder)
    assert claimed_address(config.folder) is None
    announce(lock, "tcp://127.0.0.1:5999")
    assert claimed_address(config.folder) == "tcp://127.0.0.1:5999"
    os.close(lock)
    assert claimed_address(config.folder) is None
    lock = claim(config.folder, resume=True)
    assert claimed_address(config.folder) is None  # not that of the start before
    os.close(lock)


def test_a_step_has_one_record_however_often_it_is_handed_in(config):
    folder = RunFolder(config)
    for step in (1, 1, 2):
        folder.append_metrics(record(step))
    again = RunFolder(config)
    for step in (2, 3):
        again.append_metrics(record(step))
    assert [m["step"] for m in read_jsonl(config.folder / "metrics.jsonl")] == [1, 2, 3]


def test_an_evaluated_version_has_one_record_however_often_it_is_handed_in(config):
    folder = RunFolder(config)
    for version in (0, 0, 3):
        folder.append_evaluation({"version": version, "accuracy": 0.5})
    with (config.folder / "evaluations.jsonl").open("a") as evaluations:
        evaluations.write('{"version": 6, "accu')
    again = RunFolder(config)
    for version in (0, 3, 6):
        again.append_evaluation({"version": version, "accuracy": 0.75})
    records = read_jsonl(config.folder / "evaluations.jsonl")
    assert [(e["version"], e["accuracy"]) for e in records] == [(0, 0.5), (3, 0.5), (6, 0.75)]


@pytest.mark.parametrize("torn", ['{"step": 2, "stal', '{"step": 2}', "\0\0\0\0", "\n", '{"st\n'])
def test_a_record_that_was_not_written_to_its_end_is_written_anew(config, torn):
    RunFolder(config).append_metrics(record(1))
    with (config.folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(torn)
    assert [m["step"] for m in read_records(config.folder / "metrics.jsonl")] == [1]
    RunFolder(config).append_metrics(record(2))
    assert [m["step"] for m in read_jsonl(config.folder / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("place", range(0, 90, 7))
def test_a_damaged_byte_costs_the_line_that_has_it_and_not_the_later_ones(config, place):
    path = RunFolder(config).path / "metrics.jsonl"
    for step in range(1, 5):
        RunFolder(config).append_metrics(record(step, staleness=step))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:place] + bytes([lines[2][place] ^ 1]) + lines[2][place + 1 :]
    path.write_bytes(b"".join(lines))
    assert [m["step"] for m in read_records(path)] == [1, 2, 4]
    with structlog.testing.capture_logs() as logs:
        folder = RunFolder(config)
    (message,) = logs
    assert (message["file"], message["lines"], message["count"]) == (str(path), [3], 1)
    folder.append_metrics(record(5))
    assert [m["step"] for m in read_records(path)] == [m["step"] for m in NewRecords(path).read()] == [1, 2, 4, 5]
    assert [m["step"] for m in read_jsonl(path)] == [1, 2, 4, 5], "a plain reader of JSON reads it"
    assert (path.parent / "metrics.damaged.jsonl").read_bytes() == lines[2]
    with structlog.testing.capture_logs() as logs:
        RunFolder(config)
    assert logs == []


def test_damaged_evaluations_are_moved_aside_each_to_the_end_of_the_same_file(config):
    path = RunFolder(config).path / "evaluations.jsonl"
    for version, damaged in ((0, b"\xff\n"), (5, b'{"version": 5}\n'), (10, b""), (15, b"[" * 100_000 + b"\n")):
        RunFolder(config).append_evaluation({"version": version, "reward": 0.5})
        with path.open("ab") as file:
            file.write(damaged)
        RunFolder(config).append_evaluation({"version": version + 1, "reward": 0.5})
    assert [e["version"] for e in read_jsonl(path)] == [0, 1, 5, 6, 10, 11, 15, 16]
    assert not (path.parent / "evaluations.jsonl.tmp").exists()


def test_a_run_that_goes_back_moves_damaged_lines_aside_too(config, tmp_path):
    path = RunFolder(config).path / "metrics.jsonl"
    lines = [line_of(record(step)).encode() for step in range(1, 5)]
    path.write_bytes(lines[0] + b"\xff\n" + b"".join(lines[1:]))
    move_records(path, tmp_path / "abandoned" / "metrics.jsonl", lambda record: record["step"] > 2)
    assert path.read_bytes() == b"".join(lines[:2])
    assert (path.parent / "metrics.damaged.jsonl").read_bytes() == b"\xff\n"


@pytest.mark.parametrize("text", ["", "{", "null", "\0\0", "[" * 100_000])
def test_a_damaged_summary_is_none(config, text):
    folder = RunFolder(config).path
    (folder / "summary.json").write_text(text)
    assert read_summary(folder) is None


def test_the_memory_of_a_restart_does_not_grow_with_the_steps(begun, config):
    lines = [line_of(record(step) | {"more": "." * 500}) for step in range(1, 4001)]
    (begun / "metrics.jsonl").write_text("".join(lines))
    tracemalloc.start()
    folder = RunFolder(config)
    _, limit = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert folder._step == 4000
    assert limit < (begun / "metrics.jsonl").stat().st_size / 4


def test_the_extremes_of_a_summary_are_those_of_all_steps_also_of_earlier_starts(config):
    first = RunFolder(config)
    first.append_metrics(record(1, staleness=3, gap=0.5))
    second = RunFolder(config)
    second.append_metrics(record(2, staleness=1, gap=None))
    second.write_summary({"ok": True})
    extremes = {"staleness_max": 3, "logprob_gap_max": 0.5, "trainer_idle": None}
    assert read_summary(config.folder) == {"ok": True, **extremes}


def test_the_trainer_was_idle_where_it_waited_for_a_batch_or_a_write_the_first_two_steps_apart(config):
    first = RunFolder(config)
    for step in (1, 2):
        first.append_metrics(record(step, wait=2.0))
    first.append_metrics(record(3, wait=0.5))
    second = RunFolder(config)
    second.append_metrics(record(4, write=0.5))
    second.write_summary({"ok": True})
    assert read_summary(config.folder)["trainer_idle"] == 0.25


def test_a_run_that_goes_on_is_not_over(config):
    folder = RunFolder(config)
    folder.write_summary({"ok": False})
    (config.folder / "report.html").touch()
    RunFolder(config)
    assert read_summary(config.folder) is None
    assert not (config.folder / "report.html").exists()


def test_a_run_goes_on_with_its_own_configuration(begun, config):
    assert configuration_to_resume(begun, None, []) == config


def test_a_run_may_go_on_with_more_steps_and_other_machines(begun, config, file):
    overrides = [
        "steps=9",
        "generator.count=3",
        "reward.workers=2",
        "master.lease_seconds=5",
        "network.keys=keys",
        "trainer.lr=1e-6",
        "guard.patience=9",
        "max_staleness=3",
        "max_attempts=5",
        "max_failed_share=0.5",
        "outage_seconds=60",
        "weights.transport=stream",
        "trainer.ranks=2",
        "trainer.zero_stage=2",
        "trainer.offload=optimizer",
    ]
    changed = configuration_to_resume(begun, None, overrides)
    assert (changed.steps, changed.generator.count, changed.reward.workers, changed.trainer.lr) == (9, 3, 2, 1e-6)
    assert configuration_to_resume(begun, file, overrides) == changed
    RunFolder(changed)
    assert configuration_to_resume(begun, None, []) == changed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_in_the_precision_that_it_began_with_if_its_file_says_auto(begun, config, file, dtype):
    trainer = config.trainer.model_copy(update={"dtype": dtype})
    RunFolder(config.model_copy(update={"trainer": trainer}))
    for source, overrides in ((None, []), (None, ["trainer.dtype=auto"]), (file, [])):
        assert configuration_to_resume(begun, source, overrides).trainer.dtype == dtype
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    with pytest.raises(UserError, match=f"^trainer.dtype was '{dtype}' .* cannot become '{other}'"):
        configuration_to_resume(begun, file, [f"trainer.dtype={other}"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("batch_size=3", "batch_size"),
        ("on_straggler=mask", "on_straggler"),
        ("seed=1", "seed"),
        ("sampling.temperature=0.5", "sampling.temperature"),
        ("data.options={a: 1}", "data.options.a"),
        ("reward.functions=[mine:short]", "reward.functions"),
        ("trainer.minibatches=2", "trainer.minibatches"),
        ("name=other", "name"),
    ],
)
def test_what_shaped_the_run_so_far_cannot_change(begun, override, key):
    with pytest.raises(UserError, match=key):
        configuration_to_resume(begun, None, [override])


def test_another_model_is_refused_and_the_same_one_by_another_name_is_not(begun, config, model, file, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert configuration_to_resume(begun, file, ["model=./model", "run_dir=runs"]) == config
    second = shutil.copytree(model, model.with_name("other"))
    with pytest.raises(UserError, match=r"^model was .*/model' .* cannot become .*/other'"):
        configuration_to_resume(begun, file, [f"model={second}"])


def test_a_complete_run_says_so(begun, config):
    RunFolder(config).write_summary({"ok": True, "steps": 4})
    with pytest.raises(UserError, match="is complete: it has reached the end of its 4 steps.*, steps=N"):
        configuration_to_resume(begun, None, [])
    assert configuration_to_resume(begun, None, ["steps=5"]).steps == 5


def test_a_run_that_failed_may_go_on(begun, config):
    RunFolder(config).write_summary({"ok": False, "steps": 4})
    assert configuration_to_resume(begun, None, []) == config


@pytest.mark.parametrize("missing", ["config.yaml", "journal.db"])
def test_a_folder_without_a_run_says_so(begun, missing):
    (begun / missing).unlink()
    with pytest.raises(UserError, match="There is no run in .* that could be continued"):
        configuration_to_resume(begun, None, [])


@pytest.mark.parametrize("with_file", [False, True])
def test_a_run_that_was_moved_goes_on_where_it_is(begun, config, file, with_file, tmp_path):
    moved = begun.rename(tmp_path / "elsewhere")
    changed = configuration_to_resume(moved, file if with_file else None, [])
    assert changed == config.model_copy(update={"run_dir": tmp_path, "name": "elsewhere"})
    with pytest.raises(UserError, match="name was 'elsewhere'"):
        configuration_to_resume(moved, None, ["name=mine"])


def test_a_model_that_is_elsewhere_on_this_machine_is_named_anew(begun, config, model):
    second = model.rename(model.with_name("other"))
    assert configuration_to_resume(begun, None, [f"model={second}"]) == config.model_copy(update={"model": str(second)})


def test_changes_are_kept_with_the_step_from_which_they_hold(begun, config):
    def resume(trained: int, checkpoint: int, *overrides: str) -> list[str]:
        changed = configuration_to_resume(begun, None, overrides)
        sentences = keep_changes(changed, trained, checkpoint)
        RunFolder(changed)
        return sentences

    assert resume(9, 6) == []
    assert resume(9, 6, "trainer.lr=1e-6", "max_staleness=3") == [
        f"max_staleness was {config.max_staleness} and is 3 from step 10 on",
        f"trainer.lr was {config.trainer.lr} and is 1e-06 from step 7 on",
    ]
    resume(12, 12, "trainer.lr=2e-6")
    lr = config.trainer.lr
    by_step = {6: {"max_staleness": config.max_staleness, "trainer.lr": lr}, 7: {"trainer.lr": 1e-6}, 13: {}}
    by_step[7]["max_staleness"] = config.max_staleness
    assert {step: changed_back(begun, step) for step in by_step} == by_step
    assert changed_back(begun, 10) == {"trainer.lr": 1e-6}


def test_a_longer_decay_is_told_where_a_run_goes_on_and_its_old_end_can_be_kept(begun, config):
    settings = ["trainer.lr_schedule=linear", "trainer.lr_final=0.1"]
    RunFolder(configuration_to_resume(begun, None, [*settings, "steps=4"]))
    longer = configuration_to_resume(begun, None, ["steps=8"])
    changes = keep_changes(longer, 4, 4)
    steps, steps_of_longer = 4 * longer.trainer.minibatches, 8 * longer.trainer.minibatches
    share = 1 - 0.9 * (steps + 1) / steps_of_longer
    assert changes[1:] == [
        f"the decay of the learning rate ends later, so that the rate goes from 0.1 to {share:.2g} of trainer.lr: "
        f"resume with trainer.lr_schedule_steps=4 to keep the old end"
    ]
    resumed = configuration_to_resume(begun, None, ["steps=8", "trainer.lr_schedule_steps=4"])
    assert [line.split()[0] for line in keep_changes(resumed, 4, 4)] == ["steps", "trainer.lr_schedule_steps"]
    assert [resumed.trainer.lr_share(step, resumed.optimizer_steps) for step in (steps, steps_of_longer)] == [
        pytest.approx(0.1)
    ] * 2


def test_a_run_that_is_ended_early_redoes_its_steps_at_the_rates_that_they_had(begun, config):
    ended = configuration_to_resume(begun, None, end_of(begun, 1))
    assert ended.steps == 1 != config.steps
    assert ended.optimizer_steps == config.optimizer_steps
    assert configuration_to_resume(begun, None, end_of(begun, 0)).steps == 0


def test_records_are_read_once_each_and_when_they_are_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = NewRecords(path)
    assert records.read() == []
    first, second = (line_of({"step": step}) for step in (1, 2))
    path.write_text(first + second[:5])
    assert records.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write(second[5:])
    assert records.read() == [{"step": 2}]
    path.write_text(first)
    assert records.read() == [{"step": 1}]


def test_a_journal_that_is_older_than_the_rest_of_the_record_is_refused_with_the_ways_out(config):
    folder = RunFolder(config, "a")
    for step in range(1, 10):
        folder.append_metrics(record(step))
    for version in (9, 10):
        compare_record(folder.path, "a", version)
    with pytest.raises(
        UserError, match=r"journal.db is not whole: it ends at step 8, and .*metrics.jsonl is of a later"
    ):
        compare_record(folder.path, "a", 8)
    with pytest.raises(UserError, match=r"with its journal.db-wal, or put back a backup of"):
        compare_record(folder.path, "a", 0)
    (folder.path / "checkpoints" / "step_000010").mkdir(parents=True)
    compare_record(folder.path, "a", 9)  # killed before its step was in the journal
    (folder.path / "checkpoints" / "step_000011").mkdir()
    with pytest.raises(UserError, match=r"it ends at step 9, and .*step_000011 is of a later one"):
        compare_record(folder.path, "a", 9)


def test_a_copy_that_a_user_has_put_beside_the_checkpoints_is_none(tmp_path):
    for name in ("step_000009", "step_000010", "step_000010.bak", "step_000010 (copy)"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / METRICS).touch()
    assert Record(tmp_path).versions == [0, 9, 10]


def test_a_journal_of_another_run_is_refused(config):
    folder = RunFolder(config, "a")
    folder.append_metrics(record(1))
    with pytest.raises(UserError, match="has records of another run"):
        compare_record(folder.path, "b", 7)
