"""A run goes back to a checkpoint, or a fork goes on from it: real journal, spool and files of rollouts.
tests/simulation has runs that go on."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.small_runs import ten_steps
from support.stored_samples import put

from actors.gateway.ledger_sessions import LedgerSessions
from actors.gateway.session_requests import SessionRequests
from actors.master import changes
from actors.master.run_state import RunState
from actors.record.completeness import check_record
from actors.ways_back import rollback
from actors.ways_back.fork import OTHER_DATA, configuration_of_fork, fork
from areal.base.errors import UserError
from areal.config import Config, dump_config
from areal.samples.trajectory import Group, Trajectory
from areal.staleness.invariants import check_invariants
from areal.staleness.ledger_state import LOST_WITH_THE_SPOOL, ROLLED_BACK, GroupState
from areal.storage import rollouts, stored_groups
from areal.storage.journal import Journal
from areal.storage.records import line_of, read_records, record_of, set_aside
from areal.storage.run_files import CHANGES, ROLLOUTS
from areal.storage.run_folder import RunFolder, checkpoint_of, first_version, metrics_of, origins_of
from areal.storage.spool import Spool
from areal.storage.spool_file import SpoolDamage
from protocols.session_messages import DiscardSession

STEPS, EVERY, B = 20, 2, 2


def group_of(name: str) -> Group:
    tokens, logprobs, versions = np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32)
    sample = Trajectory(tokens=tokens, logprobs=logprobs, versions=versions, reward=1.0, finish="stop")
    return Group(name, int(name[1:].partition(".")[0]), (sample,))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run that has trained five steps: a batch each, with a batch left over that is ready and one that is begun."""
    trainer, sizes = {"checkpoint_every": EVERY, "minibatches": 1}, {"batch_size": B, "group_size": 1}
    config = ten_steps(run_dir=tmp_path, name="run", steps=STEPS, max_staleness=3, trainer=trainer, **sizes)
    config.folder.mkdir()
    journal, spool = Journal.open(config.folder / "journal.db"), Spool.open(config.folder / "spool.db")
    folder = RunFolder(config, journal.run)
    state = RunState(config, journal)
    writer = rollouts.RolloutWriter(config.folder / ROLLOUTS, "all", 1 << 30, lambda texts: [""] * len(texts))
    for name in [permit.group_id for permit in state.ledger.admit("manager", 3 * B, 0.0, 60.0)][: 2 * B]:
        ready(state, spool, name)
    for step in range(1, 6):
        assert len(state.ledger.admit("manager", B, 0.0, 60.0)) == B
        batch = state.ledger.next_batch(step - 1).group_ids
        state.ledger.commit(step - 1)
        writer.add_trained(step, spool.get(batch), None)
        stepped(state, folder, batch)
        if step == 3:
            state.emit(changes.RewardAdded(prompt=state.ledger.state.prompts.next_prompt, name="own:late", weight=0.5))
        if step % EVERY == 0:
            journal.keep(step, state.dump(), 5)
            checkpoint_of(folder.path, step).mkdir(parents=True)
            state.ledger.checkpointed(step - EVERY)
            state.emit(changes.CheckpointSavedChange(version=step, folder=str(checkpoint_of(folder.path, step))))
        for name in [group.group_id for group in state.ledger.state.groups.leased("manager")][:B]:
            ready(state, spool, name)
    writer.write()
    (folder.path / CHANGES).write_text("".join(line_of({"step": n, "key": "steps"}) for n in (2, 5)))
    asyncio.run(journal.durable())
    journal.close()
    spool.close()
    return config


def stepped(state: RunState, folder: RunFolder, batch: tuple[str, ...]) -> None:
    numbers = "starved_seconds", "groups_left_over", "staleness_max", "trainer_wait_seconds", "publish_wait_seconds"
    metrics = dict.fromkeys(numbers, 0.0) | {"step": state.ledger.version, "step_seconds": 1.0}
    state.emit(changes.Stepped(metrics=metrics, groups=batch))
    folder.append_metrics(metrics)


def ready(state: RunState, spool: Spool, name: str) -> None:
    put(spool, group_of(name))
    version, row = state.ledger.version, state.ledger.state.groups.get(name).row
    state.ledger.ready(name, version)
    state.emit(
        changes.Rewarded(
            group=name, row=row, version=version, mean=0.5, spread=0.5, signal=True, parts={}, tokens=3, discarded=0
        )
    )


def state_of(config: Config) -> RunState:
    journal = Journal.open(config.folder / "journal.db")
    try:
        return RunState(config, journal)
    finally:
        journal.close()


def alive_at(config: Config, version: int) -> dict[str, str]:
    journal = Journal.open(config.folder / "journal.db")
    alive = {group["group_id"]: group["state"] for group in journal.kept(version)["ledger"]["groups"]}
    journal.close()
    return alive


def steps_in(folder: Path) -> tuple[list[int], list[int]]:
    metrics = [record["step"] for record in read_records(folder / "metrics.jsonl")]
    return metrics, sorted(stored_groups.groups_by_step(folder / ROLLOUTS))


def test_what_came_after_is_moved_away_and_what_was_ready_then_is_still(config):
    alive = alive_at(config, 4)
    held = [name for name, state in alive.items() if state == GroupState.READY]
    assert held and len(held) < len(alive)
    (line,) = check_record(config, from_step=4)
    assert f"from step 5 to step 4; what came after is in {config.folder / 'abandoned/1'}." in line
    state = state_of(config)
    assert state.ledger.version == state.checkpoint_version == 4 and state.policy.version == 0
    assert [name for name in alive if state.ledger.state.groups.get(name)] == held
    assert state.ledger.state.counters.requeued == {ROLLED_BACK: len(alive) - len(held)}
    assert state.ledger.next_batch(4).group_ids == tuple(held[:B])
    spool = Spool.open(config.folder / "spool.db")
    assert spool.ids() == held  # the ids of the others are given again
    spool.close()
    assert steps_in(config.folder) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert steps_in(config.folder / "abandoned" / "1") == ([5], [5])
    assert [change["step"] for change in read_records(config.folder / CHANGES)] == [2, 5]


@pytest.fixture
def served(tmp_path: Path) -> Config:
    """A run with sessions alone, two for a step. Its checkpoint of step 2 has s4 and s5 ready, and s6 open. Afterwards
    s4 and s5 are trained, s6 and s7 are ready, and the users of s5 and s6 have them deleted."""
    keys = {"anna": {"sha256": "0" * 64}}
    trainer = {"checkpoint_every": EVERY, "minibatches": 1, "advantage_mean": "batch"}
    settings = {"trainer": trainer, "gateway": {"keys": keys, "share": 1}, "run_dir": tmp_path, "name": "run"}
    config = ten_steps(steps=STEPS, batch_size=B, group_size=1, max_staleness=3, **settings)
    config.folder.mkdir()
    journal, spool = Journal.open(config.folder / "journal.db"), Spool.open(config.folder / "spool.db")
    folder, state = RunFolder(config, journal.run), RunState(config, journal)

    def session(number: int, rewarded: bool = True) -> None:
        group = LedgerSessions(state.ledger.state).open(f"anna:{number}", "gateway", 0.0, 60.0)
        if rewarded:
            ready(state, spool, group.group_id)

    def step() -> None:
        batch = state.ledger.next_batch(state.ledger.version).group_ids
        state.ledger.commit(state.ledger.version)
        stepped(state, folder, batch)

    for number in range(4):
        session(number)
    step()
    step()
    session(4)
    session(5)
    session(6, rewarded=False)
    journal.keep(2, state.dump(), 5)
    checkpoint_of(folder.path, 2).mkdir(parents=True)
    state.emit(changes.CheckpointSavedChange(version=2, folder=str(checkpoint_of(folder.path, 2))))
    step()
    ready(state, spool, "s6.0")
    session(7)
    requests = SessionRequests(Mock(state=state, ledger=state.ledger))
    for number in (5, 6):
        message = DiscardSession(session=f"anna:{number}", reason="deleted")
        asyncio.run(requests.dispatch(Mock(sender="gateway/0#1", message=message)))
    asyncio.run(journal.durable())
    journal.close()
    spool.close()
    return config


def test_acknowledged_rewards_of_users_are_undone_only_where_that_is_agreed_and_their_samples_are_kept(served):
    before = state_of(served).dump()
    with pytest.raises(UserError, match="undoes 1 rewards of users that were acknowledged since.*add --yes"):
        check_record(served, from_step=2)
    assert state_of(served).dump() == before, "nothing is changed"
    assert not (served.folder / "abandoned").exists()
    went_back, undone = check_record(served, from_step=2, agreed=True)
    assert "0 are ready in the spool, and the prompts of 0 are generated anew" in went_back, "of rows there are none"
    assert undone.startswith("1 rewards of users") and f"1 are in {served.folder / 'abandoned/1/sessions.db'}" in undone
    kept = Spool.open(served.folder / "abandoned/1/sessions.db")
    assert kept.ids() == ["s7.0"] and kept.get(["s7.0"])[0].trajectories[0].reward == 1.0
    kept.close()


def test_a_session_that_its_user_had_deleted_is_not_trained_after_the_run_has_gone_back_to_before(served):
    check_record(served, from_step=2, agreed=True)
    state = state_of(served)
    assert {group.session: group.state for group in state.ledger.state.groups} == {"anna:4": GroupState.READY}
    assert state.ledger.state.counters.discarded == {"deleted": 2}
    assert {*state.sessions.receipts} == {"anna:0", "anna:1", "anna:2", "anna:3", "anna:4"}, (
        "no receipt of what is undone"
    )


def test_steps_of_before_that_are_in_another_file_are_moved_and_forked_like_those_in_this_one(config):
    set_aside(config.folder / "metrics.jsonl", config.folder / "metrics.1.jsonl")
    assert [line["step"] for line in metrics_of(forked(config, 4).folder)] == [1, 2, 3, 4]
    check_record(config, from_step=2)
    assert [line["step"] for line in metrics_of(config.folder)] == [1, 2]
    assert [line["step"] for line in metrics_of(config.folder / "abandoned" / "1")] == [3, 4, 5]


def test_an_older_checkpoint_makes_the_newer_ones_history(config):
    check_record(config, from_step=2)
    assert [path.name for path in (config.folder / "checkpoints").iterdir()] == ["step_000002"]
    assert [path.name for path in (config.folder / "abandoned/1/checkpoints").iterdir()] == ["step_000004"]
    assert steps_in(config.folder) == ([1, 2], [1, 2])
    assert steps_in(config.folder / "abandoned" / "1") == ([3, 4, 5], [3, 4, 5])
    assert [change["step"] for change in read_records(config.folder / CHANGES)] == [2, 3]
    with pytest.raises(UserError, match=r"no checkpoint of step 4 to go back to: choose --from-step from 2\.$"):
        check_record(config, from_step=4)


@pytest.mark.parametrize(("version", "weights"), [(4, {"own:late": 0.5}), (2, {})])
def test_the_run_has_the_added_rewards_of_the_checkpoint_that_it_goes_back_to(config, version, weights):
    check_record(config, from_step=version)
    state = state_of(config)
    assert state.rewards_of(state.ledger.state.prompts.next_prompt) == weights
    assert state.reward_names == {"addition", *weights}


@pytest.mark.parametrize("loss", ["missing", "no database", "a flipped bit"])
def test_groups_that_the_spool_has_lost_are_generated_anew(config, loss):
    spool = config.folder / "spool.db"
    held = [name for name, state in alive_at(config, 4).items() if state == GroupState.READY]
    lost = held
    if loss == "a flipped bit":
        group = held[:1]
        opened = Spool.open(spool)
        opened._file.connection.execute("UPDATE parts SET crc = crc + 1 WHERE id = ?", group)
        opened._file.connection.commit()
        with pytest.raises(SpoolDamage, match=rf"--resume {config.folder} --from-step 4\.$"):
            opened.get(group)
        opened.close()
        lost = group
    else:
        for file in config.folder.glob("spool.db*"):
            file.unlink()
        if loss == "no database":
            spool.write_bytes(b"no database, but as long as the header of one is: " * 30)
    (line,) = check_record(config, from_step=4)
    assert f"({len(lost)} were lost with the spool)" in line
    state = state_of(config)
    assert state.ledger.state.counters.requeued[LOST_WITH_THE_SPOOL] == len(lost)
    assert state.ledger.state.groups.count(GroupState.READY) == len(held) - len(lost)
    assert not any(map(state.tally.tokens.get, lost))
    assert (config.folder / "abandoned/1/spool.db").exists() == (loss == "no database")


def test_a_spool_that_a_full_disk_keeps_from_being_opened_stays_where_it_is(config, monkeypatch):
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def open_spool(path):
        raise UserError("the spool cannot be used") from full

    monkeypatch.setattr(rollback.Spool, "open", open_spool)
    with pytest.raises(UserError, match="the spool cannot be used"):
        check_record(config, from_step=4)
    assert (config.folder / "spool.db").exists() and not (config.folder / "abandoned/1/spool.db").exists()


class Killed(Exception):
    pass


@pytest.mark.parametrize("stop_at", ["_move", "move_records", "hold_changes_from", "move_rollouts"])
@pytest.mark.parametrize("again", [None, 2])
def test_a_run_that_is_killed_meanwhile_finishes_when_it_is_resumed(config, monkeypatch, stop_at, again):
    work = getattr(rollback, stop_at)
    calls = []

    def die(*arguments):
        work(*arguments)
        calls.append(arguments)
        if len(calls) == (2 if stop_at == "move_records" else 1):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rollback, stop_at, die)
        with pytest.raises(Killed):
            check_record(config, from_step=2)
    check_record(config, from_step=again)
    assert state_of(config).abandoning is None
    assert steps_in(config.folder) == ([1, 2], [1, 2])
    assert steps_in(config.folder / "abandoned" / "1") == ([3, 4, 5], [3, 4, 5])
    assert [path.name for path in (config.folder / "abandoned/1/checkpoints").iterdir()] == ["step_000004"]


def test_only_a_checkpoint_that_is_kept_is_gone_back_to_and_nothing_is_changed_otherwise(config):
    state_before = json.dumps(state_of(config).dump())
    with pytest.raises(UserError, match=r"no checkpoint of step 3 to go back to: choose --from-step from 2, 4\.$"):
        check_record(config, from_step=3)
    shutil.rmtree(config.folder / "checkpoints")
    with pytest.raises(UserError, match=r"no checkpoint of step 4 to go back to: it has none with its state\.$"):
        check_record(config, from_step=4)
    assert json.dumps(state_of(config).dump()) == state_before
    assert not (config.folder / "abandoned").exists()


def forked(config: Config, step: int, *overrides: str) -> Config:
    for checkpoint in (config.folder / "checkpoints").iterdir():
        (checkpoint / "training").mkdir(exist_ok=True)
        (checkpoint / "training" / "state.json").write_text(line_of({"run": "its own", "shares": 1}))
        (checkpoint / "model.safetensors").write_bytes(b"weights")
    new = configuration_of_fork(config.folder, step, overrides)
    new.folder.mkdir()
    (new.folder / "config.yaml").write_text(dump_config(new))
    fork(new, config.folder, step)
    return new


def test_a_fork_begins_with_the_state_of_a_checkpoint_and_changes_nothing_of_the_other_run(config):
    alive, state_before = alive_at(config, 4), json.dumps(state_of(config).dump())
    new = forked(config, 4, "trainer.lr=1e-3", "batch_size=3")
    assert (new.name, new.trainer.lr, new.batch_size) == ("run-fork-4", 1e-3, 3)
    state, (origin,) = state_of(new), origins_of(new.folder)
    assert state.ledger.version == state.checkpoint_version == first_version(new.folder) == 4
    assert len(state.ledger.state.groups) == 0 and len(state.ledger.state.open_prompts()) == len(alive)
    assert {permit.prompt_index for permit in state.ledger.admit("m", 3, 0.0, 60.0)} <= {
        group_of(n).prompt_index for n in alive
    }
    assert state.journal.run != origin.run and (origin.name, origin.step) == ("run", 4)
    checkpoint = checkpoint_of(new.folder, 4)
    assert (record_of((checkpoint / "training" / "state.json").read_bytes()) or {})["run"] == state.journal.run
    assert (checkpoint / "model.safetensors").samefile(checkpoint_of(config.folder, 4) / "model.safetensors")
    assert {record["run"] for record in read_records(new.folder / "metrics.jsonl")} == {state.journal.run}
    assert steps_in(new.folder) == ([1, 2, 3, 4], [])
    assert json.dumps(state_of(config).dump()) == state_before
    again = forked(new, 4, "name=again")
    assert [(origin.name, origin.step) for origin in origins_of(again.folder)] == [("run", 4), ("run-fork-4", 4)]


def test_a_fork_with_other_data_discards_the_prompts_that_were_open(config):
    new = forked(config, 2, "seed=7")
    state = state_of(new)
    assert state.ledger.state.counters.discarded == {OTHER_DATA: len(alive_at(config, 2))}
    check_invariants(state.ledger.state)
    first = state.ledger.state.prompts.next_prompt
    assert [permit.prompt_index for permit in state.ledger.admit("m", 2, 0.0, 60.0)] == [first, first + 1]


@pytest.mark.parametrize(
    ("step", "override", "sentence"),
    [
        (3, "steps=9", r"no checkpoint of step 3 to fork from: choose --at-step from 2, 4\.$"),
        (4, "name=run", r"needs a folder of its own: give it another name"),
        (4, "steps=4", r"begins with 4 steps and is to have 4: give it more, steps=N"),
        (4, "model=other", r"^model says what the checkpoint is of that a fork of .* begins with: keep it\.$"),
        (4, "trainer.lora.rank=4", r"^trainer.lora says what the checkpoint is of"),
        (4, "trainer.lrr=4", r"did you mean 'trainer.lr'"),
    ],
)
def test_a_fork_that_cannot_be_is_told_in_one_sentence(config, step, override, sentence):
    with pytest.raises(UserError, match=sentence):
        configuration_of_fork(config.folder, step, [override])
