"""TensorBoard and the others: every record once, and no failure of theirs is one of the run."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from support.small_disks import fill_disk, mounted_small_disk

from areal.base.errors import UserError
from areal.base.processes import ROOT, tied
from areal.config import load_config
from areal.config.role_sections import ObserveConfig
from areal.extensions.trackers import tracking
from areal.extensions.trackers.tracking import Tracker, TrackingProcess, open_sinks
from areal.storage import disk
from areal.storage.records import flat, line_of


def write(folder, *steps: int, versions=(), end: str = "\n") -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(line_of({"step": step, "loss": step / 2, "time": 9.0})[:-1] + end for step in steps))
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write("".join(line_of({"version": v, "accuracy": 0.5, "time": 9.0}) for v in versions))


class Sink:
    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float], float]] = []

    def __call__(self, *record) -> None:
        self.told.append(record)


def broken(*record) -> None:
    raise ConnectionError("the service is down")


def test_every_record_is_told_once_however_often_one_looks(tmp_path):
    sink = Sink()
    tracker = Tracker(tmp_path, {"sink": sink})
    write(tmp_path, 1, versions=[0])
    tracker.look()
    tracker.look()
    write(tmp_path, 2)
    tracker.look()
    assert sink.told == [
        (1, {"step/loss": 0.5}, 9.0),
        (0, {"evaluation/accuracy": 0.5}, 9.0),
        (2, {"step/loss": 1.0}, 9.0),
    ]


def test_benchmarks_are_told_by_their_names(tmp_path):
    sink = Sink()
    scores = {"accuracy": 0.25, "pass_at": {"2": 0.5}, "cut_share": None}
    record = {"version": 4, "accuracy": None, "benchmarks": {"aime24": scores, "none": {"accuracy": None}}}
    (tmp_path / "evaluations.jsonl").write_text(line_of(record | {"time": 9.0}))
    Tracker(tmp_path, {"sink": sink}).look()
    numbers = {"eval/aime24": 0.25, "eval/aime24/accuracy": 0.25, "eval/aime24/pass_at/2": 0.5}
    assert sink.told == [(4, numbers, 9.0)]


def test_a_run_that_goes_on_tells_only_what_is_new(tmp_path):
    write(tmp_path, 1, 2, versions=[0])
    Tracker(tmp_path, {"sink": Sink()}).look()
    write(tmp_path, 3)
    again = Sink()
    Tracker(tmp_path, {"sink": again}).look()
    assert [step for step, _, _ in again.told] == [3]


def test_a_record_that_is_still_being_written_is_told_once_it_is_whole(tmp_path):
    sink = Sink()
    tracker = Tracker(tmp_path, {"sink": sink})
    write(tmp_path, 1, end="")
    tracker.look()
    assert not sink.told
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    tracker.look()
    assert [step for step, _, _ in sink.told] == [1]


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(tmp_path):
    sink = Sink()
    tracker = Tracker(tmp_path, {"broken": broken, "sink": sink})
    write(tmp_path, 1, 2)
    tracker.look()
    assert [step for step, _, _ in sink.told] == [1, 2]


def test_it_ends_with_the_run_and_has_told_everything_by_then(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "summary.json").write_text("{}")
    sink = Sink()
    Tracker(tmp_path, {"sink": sink}).run()
    assert len(sink.told) == 1


def test_numbers_within_a_record_are_told_by_their_path():
    record = {"reward_parts": {"format": 1}, "discarded": [], "kl": None, "ok": True}
    assert flat(record) == {"reward_parts/format": 1.0}


def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    config = SimpleNamespace(observe=ObserveConfig())
    write(tmp_path, 1, 2)
    Tracker(tmp_path, open_sinks(config, tmp_path)).look()
    (file,) = (tmp_path / "tensorboard").iterdir()
    results = [
        (v.tag, e.step, v.tensor.float_val[0]) for e in EventFileLoader(str(file)).Load() for v in e.summary.value
    ]
    assert results == [("step/loss", 1, 0.5), ("step/loss", 2, 1.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of its thread
def test_tensorboard_has_every_record_also_of_a_while_in_which_its_disk_was_full(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    monkeypatch.setattr(disk, "RETRY_SECONDS", 0.05)
    board = tmp_path / "board"
    board.mkdir()
    with mounted_small_disk(board, inodes=100):
        tracker = Tracker(
            tmp_path, {"tensorboard": tracking._tensorboard(SimpleNamespace(observe=ObserveConfig()), board)}
        )
        write(tmp_path, 1)
        tracker.look()
        hog, refusals_before = fill_disk(board), disk.DiskRetry.refusals
        write(tmp_path, *range(2, 200))  # more than the last block of its file takes
        looking = threading.Thread(target=tracker.look)
        looking.start()
        while disk.DiskRetry.refusals == refusals_before and looking.is_alive():
            time.sleep(0.01)
        hog.unlink()
        looking.join()
        files = sorted((board / "tensorboard").iterdir())
        results = {e.step for file in files for e in EventFileLoader(str(file)).Load() if e.summary.value}
    assert len(files) == 2 and results == set(range(1, 200))


def test_tensorboard_keeps_the_newest_records_alone_where_metrics_are_bounded(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    most = 4096
    config = SimpleNamespace(observe=ObserveConfig(metrics_mib=most / (1 << 20)))
    write(tmp_path, *range(1, 500))
    Tracker(tmp_path, open_sinks(config, tmp_path)).look()
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    steps = [e.step for file in files for e in EventFileLoader(str(file)).Load() if e.summary.value]
    assert sum(file.stat().st_size for file in files) < 2 * most + 1024
    assert len(files) == 2 and steps == list(range(steps[0], 500)) and steps[0] > 1


def test_a_sink_that_cannot_be_opened_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_tensorboard", broken)
    assert open_sinks(SimpleNamespace(observe=ObserveConfig()), tmp_path) == {}


def test_what_is_configured_and_not_installed_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"observe.wandb is set, but wandb is not installed"):
        TrackingProcess.check(ObserveConfig(wandb="mine"))
    TrackingProcess.check(ObserveConfig())


def test_a_process_that_cannot_be_started_is_no_failure_of_the_run(tmp_path):
    assert TrackingProcess.begin(SimpleNamespace(observe=ObserveConfig(), folder=tmp_path / "missing")) is None


def test_a_process_that_ends_too_early_starts_again_until_the_run_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "RESTART_SECONDS", 0.0)
    (tmp_path / "logs").mkdir()
    process = TrackingProcess(tmp_path)  # the folder has no run: it ends at once, each time
    while (tmp_path / "logs" / "track.out").read_text().count("There is no run") < 2:
        assert process._thread.is_alive()
        time.sleep(0.05)
    process.finish()
    assert not process._thread.is_alive() and process._process.returncode is not None


def test_a_full_disk_that_takes_not_even_the_log_of_the_process_does_not_end_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    sink = Sink()
    monkeypatch.setattr(os, "nice", lambda by: None)
    monkeypatch.setattr(disk, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "open_sinks", lambda config, folder: {"sink": sink})
    with mounted_small_disk(folder, inodes=100), (folder / "track.out").open("w", buffering=1) as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        shutil.copy(ROOT / "configs" / "quickstart.yaml", folder / "config.yaml")
        write(folder, 1)
        hog, refusals_before = fill_disk(folder), disk.DiskRetry.refusals
        following = threading.Thread(target=tracking.track, args=[SimpleNamespace(folder=folder)])
        following.start()
        while disk.DiskRetry.refusals < refusals_before + 2 and following.is_alive():
            time.sleep(0.01)
        hog.unlink()
        (folder / "summary.json").write_text("{}")
        following.join()
        assert json.loads((folder / "tracked.json").read_text())["metrics.jsonl"] == 1


def test_a_process_that_does_not_end_in_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "tied", lambda *command: tied(sys.executable, "-c", "import time; time.sleep(600)"))
    (tmp_path / "logs").mkdir()
    process = TrackingProcess(tmp_path)
    process.finish()
    assert process._process.returncode == -signal.SIGKILL


def test_mlflow_gets_all_numbers_under_names_that_it_takes_and_a_resumed_run_stays_one(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "journal.db").touch()
    overrides = ["name=demo", "observe.mlflow=sums", "reward.functions={'my_rewards.py:digits': 1.0}"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    numbers = {"step/loss": 0.5, "step/reward_parts/my_rewards.py:digits": math.nan, "evaluation/pass_at/1@(x)": 1.0}
    for step in (1, 2):  # it is resumed for the second
        tracking._mlflow(config, folder)(step, numbers, 9.0 + step)
        mlflow.end_run()
    (run,) = mlflow.search_runs(experiment_names=["sums"], output_format="list")
    assert run.info.run_name == "demo" and run.data.params["trainer.lr"] == "3e-05"
    assert {"step/reward_parts/my_rewards.py_digits", "evaluation/pass_at/1__x_"} <= run.data.metrics.keys()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step/loss")
    assert [(metric.step, metric.timestamp) for metric in history] == [(1, 10_000), (2, 11_000)]
    assert (tmp_path / "runs" / "mlflow.db").exists()
