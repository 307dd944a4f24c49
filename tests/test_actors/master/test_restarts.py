"""A master or a trainer that dies and comes back, with the run where it was."""

from __future__ import annotations

import json

import pytest
from fakes.callers import (
    METRICS,
    Caller,
    callers,
    callers_of_several_masters,
    commit,
    make_ready,
    master_of,
    publish,
    recover,
    train,
    without_evaluation,
)

from areal.storage.journal import Journal
from areal.storage.run_folder import checkpoint_of
from protocols.attempt_messages import AskReuse, GroupFailed, RenewLeases
from protocols.bus_errors import FencedError
from protocols.membership_messages import AskStatus, Leave, Policy
from protocols.messages import AskBatch, AskPermits, CommitStep, GroupReady
from protocols.training_messages import AskRecovery, CheckpointSaved, PublishPolicy, TrainingFailed


async def test_a_master_started_again_goes_on_where_the_killed_one_was(config):
    config = without_evaluation(config)
    async with callers_of_several_masters("trainer", "rollout_manager", config=config) as (trainer, manager):
        async with master_of(config):
            before = await trainer.join()
            await manager.join()
            await recover(trainer)
            groups = await make_ready(manager, trainer, 0)
            await train(trainer, 0, "weights")
            late = (await manager.ask(AskPermits(count=100))).permits
            batchless = [permit.group for permit in late]
            status = (await trainer.ask(AskStatus())).values
        async with master_of(config):
            again = (await trainer.ask(AskStatus())).values
            for key in ("version", "alive", "ready", "capacity", "metrics", "lineage"):
                assert again[key] == status[key]
            assert [member["silent"] for member in again["members"]] == [None, None]  # by the journal alone
            assert (await manager.beat()).sequence > before.snapshot.sequence  # still members, with newer events
            members = (await trainer.ask(AskStatus())).values["members"]
            heard = {member["identity"].partition("/")[0]: member["silent"] is not None for member in members}
            assert heard == {"trainer": False, "rollout_manager": True}
            assert (await manager.ask(RenewLeases(groups=tuple(batchless)))).groups == ()
            # What was answered before is answered the same again.
            await commit(trainer, 1)
            await publish(trainer, 1)
            assert (await trainer.ask(AskBatch(version=0))).groups == tuple(groups)
    steps = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1]


async def test_a_long_journal_is_replaced_by_what_it_has_led_to(config, monkeypatch):
    monkeypatch.setattr("actors.master.run_state.COMPACT_EVENTS", 1)
    config = without_evaluation(config)
    async with callers_of_several_masters("trainer", "rollout_manager", config=config) as (trainer, manager):
        async with master_of(config):
            await trainer.join()
            await manager.join()
            await recover(trainer)
            await make_ready(manager, trainer, 0)
            await train(trainer, 0, "weights")
            status = (await trainer.ask(AskStatus())).values
        journal = Journal.open(config.folder / "journal.db")
        assert journal.size == 1  # the publication, which comes after what was replaced
        journal.close()
        async with master_of(config):
            again = (await trainer.ask(AskStatus())).values
            assert {k: again[k] for k in ("version", "alive", "metrics")} == {
                k: status[k] for k in ("version", "alive", "metrics")
            }
            assert (await trainer.beat()).policy.version == 1


async def test_a_run_whose_folder_was_moved_finds_its_checkpoint_and_its_weights_there(config, tmp_path):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await train(trainer, 0, str(config.weights_folder / "l0-v000001"))
        folder = str(checkpoint_of(config.folder, 1))
        await trainer.ask(CheckpointSaved(version=1, covered=1, folder=folder, spooled=""))
    moved = config.model_copy(update={"run_dir": tmp_path / "elsewhere"})
    moved.run_dir.mkdir()
    config.folder.rename(moved.folder)
    async with master_of(moved) as running, callers(moved, "trainer") as (trainer,):
        assert (await trainer.ask(AskRecovery(spooled=""))).checkpoint_version == 1
        assert (await trainer.beat()).policy.folder == str(moved.weights_folder / "l0-v000001")
        await trainer.ask(TrainingFailed(reason="loss is nan."))
        await trainer.ask(Leave(reason="done"))
        assert f"The last checkpoint is {checkpoint_of(moved.folder, 1)}:" in (await running).reason


async def test_a_run_is_resumed_with_fewer_steps_than_it_has_admitted_groups_for(config):
    config = without_evaluation(config).model_copy(update={"steps": 9, "max_staleness": 3})
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        for _ in range(2):
            await make_ready(manager, trainer, 0)
        await train(trainer, 0, "weights")
    for steps in (1, 2):  # the second start replays what the first one has changed
        shorter = config.model_copy(update={"steps": steps, "max_staleness": 0})
        async with master_of(shorter), callers(shorter, "trainer", "rollout_manager") as (trainer, manager):
            await recover(trainer)
            answer = await trainer.ask(AskBatch(version=1))
            assert answer.status == ("ended" if steps == 1 else "ready")
            assert (await manager.ask(AskStatus())).values["capacity"] == 0


async def test_a_new_trainer_is_told_what_to_redo_and_the_old_one_is_fenced(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (old, manager):
        await recover(old)
        groups = await make_ready(manager, old, 0)
        await train(old, 0, "weights")
        ready = await make_ready(manager, old, 1)
        logged = (await old.ask(AskBatch(version=1))).groups
        new = Caller("trainer", config.master.address, mark="new")
        await new.join()
        recovery = await new.ask(AskRecovery(spooled="\n".join([*groups, *ready, "g999.0"])))
        assert (recovery.lineage, recovery.version, recovery.checkpoint_version) == (1, 1, 0)
        assert recovery.drop == "g999.0"
        assert (await new.ask(AskBatch(version=0))).groups == tuple(groups)
        await publish(new, 1, "again", lineage=1)
        assert (await new.beat()).policy.lineage == 1
        assert (await new.ask(AskBatch(version=1))).groups == logged  # a logged batch never changes
        for asked in (
            CommitStep(lineage=0, version=2, metrics=METRICS),
            PublishPolicy(policy=Policy(lineage=0, version=2, folder="dead")),
            GroupReady(group=ready[0], start_version=1, reward_mean=0.0, signal=True),
            TrainingFailed(reason="long ago"),
            CheckpointSaved(version=1, covered=1, folder="dead", spooled=""),
        ):
            with pytest.raises(FencedError):
                await old.ask(asked)
        await new.bus.close()


async def test_a_checkpoint_shortens_what_has_to_be_redone(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        groups = await make_ready(manager, trainer, 0)
        await train(trainer, 0, "weights")
        await trainer.ask(CheckpointSaved(version=1, covered=1, folder="step_1", spooled=""))
        ready = await make_ready(manager, trainer, 1)
        recovery = await trainer.ask(AskRecovery(spooled="\n".join([*groups, *ready])))
        assert (recovery.checkpoint_version, recovery.version) == (1, 1)
        assert recovery.drop == "\n".join(groups)


async def test_what_is_stored_of_a_group_stays_while_an_attempt_may_go_on_with_it(config):
    """So long as it is sampled, or after its manager has died; not once a sample has failed, or it is discarded."""
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        ready, begun, failed = [permit.group for permit in (await manager.ask(AskPermits(count=3))).permits]
        await trainer.ask(GroupReady(group=ready, start_version=0, reward_mean=0.5, signal=True))
        await manager.ask(GroupFailed(group=failed, cause="reward", reason="a sample failed"))
        spooled = f"{ready}\n{begun}\n{failed}"
        assert (await trainer.ask(AskRecovery(spooled=spooled))).drop == failed
        assert (await trainer.ask(AskReuse(group=begun, versions=(0,)))).oldest is None  # it is no later attempt
        await manager.ask(Leave(reason="its machine is shut down"))
        assert (await trainer.ask(CheckpointSaved(version=0, covered=0, folder="", spooled=spooled))).drop == failed
        async with callers(config, "rollout_manager") as (other,):
            permits = {p.prompt_index: p for p in (await other.ask(AskPermits(count=8))).permits}
            again = permits[int(begun[1:-2])]
            assert again.resumed and not permits[int(failed[1:-2])].resumed
            assert (await trainer.ask(AskReuse(group=again.group, versions=(0, 0)))).oldest == 0
            await trainer.ask(GroupReady(group=again.group, start_version=0, reward_mean=0.5, signal=True))
        assert (await trainer.ask(AskRecovery(spooled=spooled))).drop == f"{begun}\n{failed}"
