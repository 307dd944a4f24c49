"""Replays, and what is found by them, by the commands a user types, of a run whose trainer is played by its engine.
tests/test_chaos.py replays whole runs, tests/test_actors/test_redo.py one of a real trainer."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from support.small_runs import read_jsonl
from support.tiny_training import TEMPERATURE, make_batch, make_model, run_worker, weights_of

from areal.__main__ import main
from areal.config import Config, dump_config, load_config
from areal.extensions.desk.replay import weight_metrics
from areal.samples.trajectory import Group, Trajectory
from areal.staleness.ledger_state import oldest_in_loss
from areal.storage.records import line_of
from areal.storage.rollouts import RolloutWriter
from areal.storage.stored_groups import batches
from areal.training.training_engine import TrainingEngine

ROOT = Path(__file__).parents[4]
STEPS = 5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("recorded"))


def record(folder: Path, **trainer) -> Path:
    """The folder of a run, as far as a replay needs it."""
    config = Config.model_validate(
        {
            "model": str(make_model(folder / "model")),
            "run_dir": folder,
            "name": "run",
            "steps": STEPS,
            "batch_size": 4,
            "group_size": 4,
            "max_staleness": 1,
            "on_straggler": "mask",
            "data": {"source": "addition"},
            "sampling": {"max_new_tokens": 8, "temperature": TEMPERATURE},
            "reward": {"functions": ["addition"]},
            "trainer": {"minibatches": 2, "lr": 1e-3, "lr_schedule": "linear", "advantage_mean": "group", **trainer},
        }
    )
    run = config.folder
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    engine = TrainingEngine.of_run(config, keep_values=True)
    writer = RolloutWriter(run / "rollouts", "all", 1 << 30, lambda sequences: ["" for _ in sequences])
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(1, STEPS + 1):
            batch = make_batch(version=max(2, step - 1), seed=step)
            result = engine.step(
                batch, version=step - 1, temperature=TEMPERATURE, mask_older_than=oldest_in_loss("mask", 1, step - 1)
            )
            rewards = [sample.reward for group in batch for sample in group.trajectories]
            metrics.write(line_of({"step": step, "reward_mean": float(np.mean(rewards)), **asdict(result)}))
            writer.add_trained(step, batch, engine.values)
            writer.write()
            if step in (2, 4):
                engine.storage.save(run / "checkpoints" / f"step_{step:06}")
    engine.storage.snapshot()
    stamp = engine.storage.begin_write(folder / "weights").result().stamp
    engine.close()
    (run / "summary.json").write_text(json.dumps({"ok": True, "weights": {"version": STEPS, "stamp": stamp}}))
    return run


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_replay_ends_with_the_same_weights(run, capsys):
    assert main(["replay", str(run)]) == 0
    assert "unchanged: the same weights, bit by bit" in capsys.readouterr().out
    again, metrics_before = (read_jsonl(folder / "metrics.jsonl") for folder in (run / "replays" / "unchanged", run))
    assert [m["loss"] for m in again] == [m["loss"] for m in metrics_before]
    assert not summary_of(run / "replays" / "unchanged")["off_policy"]


def test_a_critic_goes_on_from_its_checkpoint_in_a_replay(tmp_path, capsys):
    run = record(tmp_path, critic={"warmup_steps": 6, "coef": 1.0})
    assert main(["replay", str(run), "--steps", "2:"]) == 0
    assert "the same weights, bit by bit" in capsys.readouterr().out
    again, metrics_before = (read_jsonl(folder / "metrics.jsonl") for folder in (run / "replays" / "steps-2-5", run))
    assert [m["value_loss"] for m in again] == [m["value_loss"] for m in metrics_before[2:]]


def test_a_checkpoint_with_vision_is_not_compared_with_the_weights_of_the_text_alone(run, monkeypatch, capsys):
    monkeypatch.setattr("areal.extensions.desk.replay.is_wrapper", lambda folder: True)
    assert main(["replay", str(run), "--steps", "2:4"]) == 0
    assert "nothing is known of the run's weights after step 4" in capsys.readouterr().out


def test_a_replay_may_begin_and_end_at_a_checkpoint(run, capsys):
    assert main(["replay", str(run), "--steps", "2:4"]) == 0
    assert "steps-2-4: the same weights, bit by bit" in capsys.readouterr().out
    assert [m["step"] for m in read_jsonl(run / "replays" / "steps-2-4" / "metrics.jsonl")] == [3, 4]
    assert main(["replay", str(run), "--steps", ":3"]) == 0
    assert "nothing is known of the run's weights after step 3" in capsys.readouterr().out


def test_groups_are_left_out_and_a_replay_ends_once_a_condition_holds(run, capsys):
    assert main(["replay", str(run), "--without", "step = 2 and prompt_index < 3 or step = 4"]) == 0
    assert "Off-policy" in capsys.readouterr().out
    (folder,) = (run / "replays").iterdir()
    assert folder.name.startswith("without-7-groups-")
    without, metrics_before = (read_jsonl(place / "metrics.jsonl") for place in (folder, run))
    assert [m["step"] for m in without] == [1, 2, 3, 5]  # of step 4 no group remains
    assert without[0]["loss"] == metrics_before[0]["loss"] and without[1]["loss"] != metrics_before[1]["loss"]
    assert summary_of(folder)["same_weights"] is None
    limit = (metrics_before[0]["loss"] + metrics_before[1]["loss"]) / 2
    comparison = "<=" if metrics_before[1]["loss"] < limit else ">="
    assert main(["replay", str(run), "--until", f"loss{comparison}{limit:.9f}"]) == 0
    assert "first at step 2; the same weights, bit by bit" in capsys.readouterr().out
    assert main(["replay", str(run), "--until", "entropy<-1"]) == 0
    assert "entropy<-1 at no step; the same weights, bit by bit" in capsys.readouterr().out


def test_a_run_that_was_resumed_with_other_settings_is_replayed_with_those_of_each_step(run, tmp_path, capsys):
    resumed = load_config(run / "config.yaml", ["trainer.lr=2e-3", "steps=9"])
    changes = [("trainer.lr", 1e-3, 2e-3), ("steps", STEPS, 9), ("max_staleness", 1, 2), ("generator.count", 1, 7)]
    lines = [line_of({"step": 3, "key": key, "before": value_before, "now": now}) for key, value_before, now in changes]
    (run / "changes.jsonl").write_text("".join(lines))
    resumed = resumed.model_copy(update={"max_staleness": 2})
    (run / "config.yaml").write_text(dump_config(resumed))
    engine = TrainingEngine.of_run(resumed, keep_values=True)
    engine.storage.load(run / "checkpoints" / "step_000002")
    for step, batch in batches(run / "rollouts", 3):
        mask = oldest_in_loss("mask", 2, step - 1)
        engine.step(batch, version=step - 1, temperature=TEMPERATURE, mask_older_than=mask)
    engine.storage.snapshot()
    stamp = engine.storage.begin_write(tmp_path / "weights").result().stamp
    engine.close()
    (run / "summary.json").write_text(json.dumps({"weights": {"version": STEPS, "stamp": stamp}}))
    for steps in (":", "2:"):
        assert main(["replay", str(run), "--steps", steps]) == 0
        assert "the same weights, bit by bit" in capsys.readouterr().out
    assert main(["replay", str(run), "trainer.lr=2e-3"]) == 0


def test_other_weights_than_the_runs_are_an_error(run, capsys):
    (run / "summary.json").write_text(json.dumps({"weights": {"version": STEPS, "stamp": "another"}}))
    assert main(["replay", str(run)]) == 1
    assert "unchanged: other weights" in capsys.readouterr().out


def test_a_variant_that_has_left_the_data_is_called_worthless(run, capsys):
    assert main(["replay", str(run), "trainer.lr=0.03"]) == 0
    printed = capsys.readouterr().out
    assert "Off-policy" in printed
    assert "trainer.lr-0.03: worthless from step " in printed
    summary = summary_of(run / "replays" / "trainer.lr-0.03")
    assert summary["off_policy"] and summary["changes"] == {"trainer.lr": 0.03} and summary["same_weights"] is None
    shares = [m["effective_samples"] for m in read_jsonl(run / "replays" / "trainer.lr-0.03" / "metrics.jsonl")]
    means = [np.mean(shares[: n + 1]) for n in range(STEPS)]
    first = summary["worthless_from"]
    assert all(mean < 0.25 for mean in means[first - 1 :])
    assert first == 1 or means[first - 2] >= 0.25


def test_a_variant_that_computes_no_numbers_any_more_is_given_up(run, capsys):
    assert main(["replay", str(run), "trainer.lr=1e30"]) == 1
    assert "trainer.lr-1e30: stopped, step " in capsys.readouterr().out
    assert not summary_of(run / "replays" / "trainer.lr-1e30")["ok"]


def test_a_sweep_compares_objectives_with_their_own_settings_and_leaves_their_models(run, tmp_path):
    objectives = "decoupled_ppo,ppo,gspo,reinforce_pp"
    inputs = ["--sweep", f"trainer.objective={objectives}", "--output", str(tmp_path / "models")]
    # It forks, which a process with threads may not.
    printed = run_worker(ROOT / "areal" / "__main__.py", "replay", run, *inputs, ranks=0)
    names = [f"trainer.objective-{objective}" for objective in objectives.split(",")]
    assert f"{names[0]}: the same weights, bit by bit" in printed
    assert all(name in printed for name in names)
    trained = [path.name for path in sorted((tmp_path / "models").iterdir())]
    assert trained == sorted(names[:3])  # without a KL penalty, reinforce_pp is decoupled_ppo
    weights = [weights_of(tmp_path / "models" / name) for name in names[:3]]
    assert all(any(not item[name].equal(weights[0][name]) for name in item) for item in weights[1:])
    gspo = load_config(run / "replays" / names[2] / "config.yaml").trainer
    assert (gspo.eps_clip, gspo.loss_mean) == (3e-4, "sequence")
    assert (gspo.advantage_mean, gspo.advantage_std) == ("group", "group")  # the run's own, and the objective's
    firsts = [read_jsonl(run / "replays" / name / "metrics.jsonl")[0] for name in names[:3]]
    # On the weights that all begin with; also where pi_prox is not computed.
    assert [m["effective_samples"] for m in firsts] == pytest.approx([firsts[0]["effective_samples"]] * 3, rel=1e-4)
    assert [m["reward_weighted"] for m in firsts] == pytest.approx([firsts[0]["reward_weighted"]] * 3, rel=1e-4)


def test_samples_count_by_how_much_likelier_they_have_become():
    def sample(reward: float) -> Trajectory:
        versions = np.array([-1, 0, 0], np.int32)
        return Trajectory(np.zeros(3, np.int32), np.array([0, -1, -1], np.float32), versions, reward, "stop")

    batch = [Group("a", 0, (sample(1.0), sample(0.0)))]
    logp = np.array([0, -1 + np.log(3), -1, 0, -1, -1])
    assert weight_metrics(batch, logp, None, mask_cut=False) == pytest.approx(
        {"effective_samples": 16 / (2 * 10), "reward_weighted": 0.75}
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sampling.temperature=0.5"], "sampling.temperature cannot be changed in a replay"),
        (["batch_size=8"], "batch_size cannot be changed"),
        (["model=other"], "model cannot be changed"),
        (["trainer.checkpoint_every=1"], "trainer.checkpoint_every cannot be changed"),
        (["trainer.objektive=ppo"], "did you mean 'trainer.objective'?"),
        (["trainer.objective=nothing"], "Unknown objective 'nothing'"),
        (["--steps", "3:5"], "No checkpoint of step 3 is in"),
        (["--steps", "1:2"], "begin --steps at 2 or 4 or 0, the run's model"),
        (["--steps", "4:2"], "--steps 4:2 is not in the 5 steps"),
        (["--steps", "4"], "write A:B"),
        (["--steps", "0:9"], "--steps 0:9 is not in the 5 steps"),
        (["--sweep", "trainer.lr"], "'trainer.lr' is not of the form key=value"),
        (["--sweep", "trainer.lr=1e-3,1e-3"], "twice: write each value once"),
        (["--sweep", "trainer.lr=[1e-3"], "'trainer.lr=[1e-3' sets is not YAML"),
        (["--sweep", "trainer.ranks=1,2"], "trainer.ranks differs in the sweep"),
        (["--output", "."], ". already exists"),
        (["--without", "step > 9"], "leaves out no group of the steps 1 to 5"),
        (["--without", "step > 0"], "leaves out all groups"),
        (["--without", "stepp > 0"], "The rollouts cannot be queried"),
        (["--until", "entropy=1"], "'entropy=1' is no condition"),
        (["--until", "entrophy<1"], "A replay has no metric 'entrophy'"),
    ],
)
def test_a_mistake_gets_one_sentence_before_anything_is_loaded(run, monkeypatch, capsys, arguments, sentence):
    monkeypatch.setitem(sys.modules, "areal.training.training_engine", None)  # importing it would be an error
    assert main(["replay", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1


def test_rollouts_that_are_not_complete_are_told(run, tmp_path, capsys):
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not the folder of a run" in capsys.readouterr().err
    (run / "rollouts" / "000001.parquet").unlink()
    assert main(["replay", str(run)]) == 2
    assert "has 0 of 4 groups of step 1, since the oldest files were removed" in capsys.readouterr().err
    (run / "rollouts" / "000004.parquet").unlink()
    assert main(["replay", str(run), "--steps", "2:"]) == 2
    assert "has 0 of 4 groups of step 4, since they were not written" in capsys.readouterr().err
    config = load_config(run / "config.yaml", ["observe.rollouts=sample"])
    (run / "config.yaml").write_text(dump_config(config))
    assert main(["replay", str(run)]) == 2
    assert "observe.rollouts was sample" in capsys.readouterr().err
