"""The master on a real bus, with the test in the place of the other actors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
import zmq
from conftest import ROOT
from pydantic import ValidationError
from support.networks import dealer, keys_folder, network
from support.small_disks import fill_disk, mounted_small_disk

from actors.generator import Generator
from actors.master import master as master_module
from actors.master import members as members_module
from actors.master.master import EVENTS_OF_ONE_MASTER, Master
from actors.master.members import next_event
from actors.runtime.membership import Membership
from areal.__main__ import main as areal_tool
from areal.config import Config
from areal.data.history import History
from areal.data.sources import open_source
from areal.extensions.desk.timeline import spans
from areal.staleness.failures import UNSCORED_LIMIT
from areal.storage import disk
from areal.storage import journal as journal_module
from areal.storage.journal import Journal
from areal.storage.record import Record
from areal.storage.records import read_records
from areal.storage.run_folder import RunFolder, checkpoint_of
from protocols.bus_errors import (
    BusError,
    BusyError,
    DeadlineError,
    FencedError,
    ForgedError,
    MalformedError,
    PreparingError,
    RefusedError,
)
from protocols.codec import Header, decode_body, decode_header, encode, encode_body
from protocols.messages import (
    AddReward,
    AskBatch,
    AskEvaluation,
    AskPermits,
    AskRecovery,
    AskReuse,
    AskSnapshot,
    AskStatus,
    BenchmarkScores,
    CheckpointSaved,
    CommitStep,
    ConnectionLost,
    DiskShortage,
    Done,
    Engagement,
    EvaluationAbandoned,
    EvaluationDone,
    GroupFailed,
    GroupReady,
    Heartbeat,
    Join,
    Leave,
    Member,
    MembersChanged,
    Permit,
    Policy,
    PolicyPublished,
    PublishPolicy,
    RenewLeases,
    RowScores,
    RowsScored,
    ScoringFailed,
    Shutdown,
    Span,
    StepFailed,
    TrainingFailed,
    TrainingFinished,
    actor_name,
)
from protocols.network import ZmqNetwork
from protocols.security import Keys, make_keys
from protocols.transport import Bus, Publisher

SECONDS = 60.0
UNUSED = "tcp://127.0.0.1:1"
METRICS = {
    "trainer_wait_seconds": 0.0,
    "publish_wait_seconds": 0.0,
    "tokens_trained": 10.0,
    "logprob_gap": 1e-6,
}


@pytest.fixture
def config(tmp_path, free_port) -> Config:
    return Config.model_validate(
        {
            "model": str(tmp_path),
            "run_dir": tmp_path,
            "steps": 2,
            "batch_size": 2,
            "group_size": 1,
            "max_staleness": 1,
            "data": {"source": "addition", "eval_size": 4},
            "sampling": {"max_new_tokens": 8},
            "reward": {"functions": ["addition"]},
            "trainer": {"minibatches": 1},
            "master": {"address": f"tcp://127.0.0.1:{free_port}", "lease_seconds": 30},
        }
    )


@pytest.fixture(autouse=True)
def nobody_to_wait_for(monkeypatch) -> None:
    """The test does not leave when the run ends."""
    monkeypatch.setattr(master_module, "FAREWELL_SECONDS", 0.5)


class Caller:
    """Someone who has joined."""

    def __init__(self, role: str, address: str, mark: str = "") -> None:
        self.role = role
        self.bus = Bus(f"{role}/?#{mark or role}", network())
        self.address = address

    async def ask(self, message, seconds: float = 20.0):
        return await self.bus.peer(self.address).ask(message, seconds)

    async def join(self, index: int | None = None, listens: str | None = None):
        """listens: where, if this is not to be an address at which somebody does."""
        welcome = await self.ask(Join(role=self.role, index=index, address=listens or self.address))
        self.bus.identity.name = welcome.identity
        return welcome

    async def beat(self, shortage: DiskShortage | None = None, alert: str = "", **stats: float):
        serves = {"reward": ("addition",), "scorer": ("wise",)}.get(self.role, ())
        more = {"shortage": shortage, "alert": alert}
        return await self.ask(Heartbeat(state="healthy", serves=serves, activity="testing", stats=stats, **more))


@contextlib.asynccontextmanager
async def master_of(config: Config) -> AsyncIterator[asyncio.Task]:
    folder = RunFolder(config)
    journal = Journal.open(folder.path / "journal.db")
    source = open_source(config.data, config.seed)
    master = Master(Bus("master/0#m", network()), config, journal=journal, folder=folder, source=source)
    running = asyncio.create_task(master.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def callers(config: Config, *roles: str) -> AsyncIterator[list[Caller]]:
    made = [Caller(role, config.master.address, mark=f"{n}") for n, role in enumerate(roles)]
    try:
        for caller in made:
            await caller.join()
        yield made
    finally:
        for caller in made:
            await caller.bus.close()


def without_evaluation(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"eval_size": 0})})


@pytest.fixture
def small_disk(config, monkeypatch) -> Iterator[Path]:
    """The run folder, on a disk of its own."""
    monkeypatch.setattr(disk, "RESERVE_BYTES", 300_000)
    config.folder.mkdir()
    with mounted_small_disk(config.folder, inodes=100):
        yield config.folder


async def test_what_a_member_tells_the_user_is_an_alert_until_it_takes_it_back(config):
    async with master_of(without_evaluation(config)), callers(config, "trainer", "reward") as (trainer, reward):
        for said in ["the newest checkpoint is damaged", ""]:
            await trainer.beat(alert=said)
            await reward.beat()
            assert [*(await reward.ask(AskStatus())).values["alerts"]] == [said] * bool(said)


async def test_a_master_with_a_full_disk_is_heard_and_its_run_can_be_ended_in_order(config, small_disk):
    async with master_of(without_evaluation(config)) as running, callers(config, "rollout_manager") as (manager,):
        fill_disk(small_disk)
        assert (await manager.ask(AskStatus())).values["capacity"]
        with pytest.raises(PreparingError, match=r"waits to write the journal: the disk of .* is full"):
            while True:  # the log of the journal has room for some
                await manager.ask(AskPermits(count=1))
                await manager.ask(RenewLeases(groups=()))
        assert (await manager.ask(AskStatus())).values["capacity"] == 0
        elsewhere = DiskShortage(folder="/weights", cause="read-only", free=9 << 20, waits="a trainer waits")
        with pytest.raises(PreparingError):
            await manager.beat(shortage=elsewhere)
        while not (alerts := (await manager.ask(AskStatus())).values["alerts"]):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        assert list(alerts) == [
            f"The disk of {small_disk} is full (0.0 MiB free): the master waits to write the journal; the disk of "
            "/weights is read-only (9.0 MiB free): a trainer waits. Free some room there, or make it writable, and the "
            "run goes on by itself; Ctrl-C ends it, and --resume continues it."
        ]
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await running).reason == "told to stop by SIGTERM"
    assert json.loads((small_disk / "summary.json").read_text())["reason"] == "told to stop by SIGTERM"


async def test_who_stops_a_run_on_a_disk_that_takes_nothing_at_all_is_heard_by_its_actors(config, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(master_module, "FAREWELL_SECONDS", 0.5)
    heard: list[object] = []
    async with master_of(without_evaluation(config)) as running, callers(config, "rollout_manager") as (manager,):
        events = (await manager.ask(AskSnapshot())).events
        subscriber = manager.bus.subscribe(events, lambda sequence, event: heard.append(event))
        await asyncio.sleep(0.5)  # a subscription takes its time
        monkeypatch.setattr(Journal, "_write", refuse)
        monkeypatch.setattr(RunFolder, "write_summary", refuse)
        with pytest.raises(PreparingError, match="read-only"):
            while True:
                await manager.ask(AskPermits(count=1))
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await running).reason == "told to stop by SIGTERM"
        await subscriber.close()
    assert any(isinstance(event, Shutdown) for event in heard)


async def test_a_master_whose_disk_does_not_answer_is_heard_and_goes_on_with_it(config, monkeypatch):
    monkeypatch.setattr(journal_module, "SILENT_SECONDS", 0.05)
    answers, write = threading.Event(), Journal._write
    monkeypatch.setattr(Journal, "_write", lambda self, *changes: answers.wait() and write(self, *changes))
    answers.set()
    async with master_of(without_evaluation(config)), callers(config, "rollout_manager") as (manager,):
        answers.clear()
        try:
            for ask in (manager.ask(AskPermits(count=1)), manager.beat()):
                with pytest.raises(PreparingError, match=r"waits to write the journal: the disk of .* not answering"):
                    await ask
            assert (await manager.ask(AskStatus())).values["capacity"] == 0
        finally:
            answers.set()
        permits: tuple[Permit, ...] = ()
        while not permits:
            with contextlib.suppress(PreparingError):
                permits = (await manager.ask(AskPermits(count=1))).permits
        assert permits[0].prompt_index == 0


async def test_permits_that_a_full_disk_kept_from_their_asker_are_granted_again(config, small_disk):
    config = without_evaluation(config).model_copy(update={"batch_size": 8})
    async with master_of(config), callers(config, "rollout_manager") as (manager,):
        prompts: set[int] = set()

        async def ask(count: int) -> None:
            permits = (await manager.ask(AskPermits(count=count))).permits
            assert permits, f"all but {16 - len(prompts)} groups were granted to those who know"
            prompts.update(permit.prompt_index for permit in permits)

        hog = fill_disk(small_disk)
        with pytest.raises(PreparingError):
            while True:  # the log of the journal has room for some
                await ask(1)
        assert len(prompts) < 8
        hog.unlink()
        while prompts != set(range(16)):
            with contextlib.suppress(PreparingError):
                await ask(16)


FULL = tuple(f"{n:0256}" for n in range(32))


async def test_what_members_tell_of_themselves_cannot_make_a_message_too_large_to_send(config, monkeypatch):
    monkeypatch.setattr(members_module, "MAX_DIRECTORY_BYTES", 50_000)
    monkeypatch.setattr(members_module, "MAX_STATUS_BYTES", 5_000)
    async with master_of(without_evaluation(config)), callers(config, *["generator"] * 8) as members:
        stats = {f"{n:0256}": 1e100 for n in range(256)}
        beat = Heartbeat(state="healthy", serves=FULL, activity="\u2028" * 512, stats=stats)
        answers = await asyncio.gather(*(member.ask(beat) for member in members), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BusyError)]
        assert 0 < len(refused) < 8 and all("no room for what generator/" in str(answer) for answer in refused)
        snapshot = await members[0].ask(AskSnapshot())
        assert sum(len(member.serves) for member in snapshot.members) <= 50_000 / 256
        status = (await members[0].ask(AskStatus(since=0))).values
        assert [bool(member["stats"]) for member in status["members"]].count(True) == 0
        for member in members:  # those that tell less of themselves are heard again
            await member.beat(work_done=1.0)
        status = (await members[0].ask(AskStatus())).values
        assert all(member["stats"] == {"work_done": 1.0} for member in status["members"])


def test_events_are_merged_only_while_they_fit_into_one_message():
    def joined(n):
        return Member(
            identity=f"reward/{n}#x", role="reward", index=n, address="tcp://a:1", state="healthy", serves=FULL
        )

    outbox = deque(MembersChanged(changed=(joined(n),), gone=("generator/0#x",)) for n in range(300))
    merged = []
    while outbox:
        merged.append(next_event(outbox))
        encode_body(merged[-1])  # it can be sent
    assert len(merged) == 4
    assert [m.index for event in merged for m in event.changed] == list(range(300))


async def test_an_event_that_cannot_be_sent_is_logged_and_noticed_as_a_gap(config, monkeypatch):
    def publish(self, event):
        self.sequence += 1
        raise MalformedError("too large")

    monkeypatch.setattr(Publisher, "publish", publish)
    async with master_of(config) as running, callers(config, "generator") as (generator,):
        async with asyncio.timeout(20):
            while not (await generator.beat()).sequence % EVENTS_OF_ONE_MASTER:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not running.done()


async def test_loads_whose_sum_is_beyond_64_bits_are_refused_and_the_master_goes_on(config):
    async with master_of(config) as running, callers(config, "generator", "rollout_manager") as (generator, manager):
        for count in (1 << 48, 1 << 53):
            load = {"sequences": {f"rollout_manager/{n}#x": count for n in range(3000)}, "limit": 1, "version": 0}
            with contextlib.suppress(ValidationError, BusError):
                await generator.ask(
                    Heartbeat(state="healthy", serves=(), activity="", stats={}, engagement=Engagement(**load))
                )
            assert (await manager.beat()).loads.names
        assert not running.done()


async def test_without_keys_nobody_joins_on_this_machine_either(config, tmp_path):
    join = Join(role="generator", index=None, address="tcp://127.0.0.1:4000")
    async with master_of(config), callers(config, "reward") as (member,):
        stranger = Bus("generator/?#x", ZmqNetwork(Keys(make_keys(tmp_path / "others").parent)))
        with pytest.raises(DeadlineError):
            await stranger.peer(config.master.address).ask(join, 1.0)
        await stranger.close()
        with zmq.Context() as context, context.socket(zmq.DEALER) as nobody:
            nobody.linger = 0
            nobody.connect(config.master.address)
            nobody.send_multipart(encode(Header(join.kind, "generator/?#x", id="0", token=b"t"), join))
            await asyncio.sleep(1.0)
            assert not nobody.poll(0)
        assert [m.role for m in (await member.ask(AskSnapshot())).members] == ["reward"]


async def evaluate(evaluator: Caller, version: int, accuracy: float) -> None:
    assert (await evaluator.ask(AskEvaluation())).version == version
    await evaluator.ask(result(version, accuracy))


def result(version: int, accuracy: float = 0.5) -> EvaluationDone:
    return EvaluationDone(
        version=version,
        accuracy=accuracy,
        pass_at={"1": accuracy},
        rows=4,
        failed=0,
        completion_tokens_mean=7.5,
        samples=(),
    )


async def train(trainer: Caller, version: int, folder: str) -> None:
    batch = await trainer.ask(AskBatch(version=version))
    assert batch.status == "ready"
    await commit(trainer, version + 1)
    await publish(trainer, version + 1, folder)


async def commit(trainer: Caller, version: int, lineage: int = 0) -> None:
    await trainer.ask(CommitStep(lineage=lineage, version=version, metrics=METRICS))


async def publish(trainer: Caller, version: int, folder: str = "weights", lineage: int = 0) -> None:
    await trainer.ask(PublishPolicy(policy=Policy(lineage=lineage, version=version, folder=folder)))


async def recover(trainer: Caller):
    return await trainer.ask(AskRecovery(spooled=""))


async def make_ready(manager: Caller, trainer: Caller, version: int) -> list[str]:
    groups = [permit.group for permit in (await manager.ask(AskPermits(count=2))).permits]
    for group in groups:
        await trainer.ask(GroupReady(group=group, start_version=version, reward_mean=0.5, signal=True))
    return groups


async def test_a_run_goes_from_the_first_evaluation_to_the_last(config):
    roles = ("trainer", "rollout_manager", "evaluator", "generator")
    async with master_of(config) as running, callers(config, *roles) as actors:
        trainer, manager, evaluator, generator = actors
        await generator.beat()
        await recover(trainer)
        await evaluate(evaluator, 0, 0.25)
        for version in range(2):
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
        assert (await trainer.ask(AskBatch(version=2))).status == "ended"
        await trainer.ask(CheckpointSaved(version=2, covered=2, folder="checkpoint", spooled=""))
        await trainer.ask(TrainingFinished())
        await evaluate(evaluator, 2, 0.75)
        for actor in actors:
            await actor.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert ending.ok
    summary = json.loads((config.folder / "summary.json").read_text())
    assert (summary["steps"], summary["accuracy_before"], summary["accuracy_after"]) == (2, 0.25, 0.75)
    assert summary["samples_trained"] == 4
    steps = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward_mean"] == 0.5 for step in steps)


async def test_no_more_groups_are_alive_than_eta_plus_one_batches(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "rollout_manager") as (manager,):
        first = await manager.ask(AskPermits(count=100))
        assert len(first.permits) == (config.max_staleness + 1) * config.batch_size
        assert (await manager.ask(AskPermits(count=1), 1.5)).permits == ()


async def test_a_parked_request_is_answered_as_soon_as_it_can_be(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "rollout_manager", "trainer") as (manager, trainer):
        groups = [permit.group for permit in (await manager.ask(AskPermits(count=100))).permits]
        parked = asyncio.create_task(manager.ask(AskPermits(count=100), 60.0))
        await manager.ask(GroupFailed(group=groups[0], cause="reward", reason="a test"))
        assert len((await parked).permits) == 1


async def test_groups_of_a_manager_that_leaves_are_admitted_again(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "rollout_manager", "rollout_manager") as (first, second):
        left = {permit.prompt_index for permit in (await first.ask(AskPermits(count=100))).permits}
        await first.ask(Leave(reason="a test"))
        again = {permit.prompt_index for permit in (await second.ask(AskPermits(count=100))).permits}
        assert again == left


@pytest.mark.parametrize("lives", ["listens", "beats", "neither"])
async def test_an_actor_that_another_cannot_reach_is_removed_before_its_lease_ends_if_it_neither_listens_nor_beats(
    config, monkeypatch, lives
):
    monkeypatch.setattr(master_module, "SILENT_SECONDS", 0.5)

    async def refuse(request):
        raise RefusedError("this generator does not answer 'ask_status'")

    async with master_of(without_evaluation(config)), callers(config, "rollout_manager") as (manager,):
        generator = Caller("generator", config.master.address)
        address = generator.bus.serve("tcp://127.0.0.1:*", refuse, print) if lives == "listens" else UNUSED
        lost = (await generator.join(listens=address)).identity
        asking = asyncio.create_task(manager.ask(ConnectionLost(identity=lost)))
        while lives == "beats" and not asking.done():
            await generator.beat()
        assert isinstance(await asking, Done)
        members = {member["identity"] for member in (await manager.ask(AskStatus())).values["members"]}
        assert (lost in members) == (lives != "neither")
        if lives == "neither":
            with pytest.raises(FencedError, match="nobody listens at tcp://127.0.0.1:1"):
                await generator.beat()
        await generator.bus.close()


async def test_a_silent_actor_that_nobody_calls_is_removed_before_its_lease_ends_if_it_does_not_listen(
    config, monkeypatch
):
    monkeypatch.setattr(master_module, "SILENT_SECONDS", 0.1)
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, lives):
        dead = Caller("rollout_manager", config.master.address)
        await dead.join(listens=UNUSED)
        members = {"trainer/0", "rollout_manager/0", "rollout_manager/1"}
        while "rollout_manager/1" in members:
            await trainer.beat()
            members = {actor_name(member.identity) for member in (await trainer.ask(AskSnapshot())).members}
        assert members == {"trainer/0", actor_name(lives.bus.identity.name)}
        await dead.bus.close()


async def test_an_actor_that_fell_silent_is_removed_and_then_refused(config):
    config = without_evaluation(config)
    config = config.model_copy(update={"master": config.master.model_copy(update={"lease_seconds": 0.5})})
    async with master_of(config), callers(config, "rollout_manager", "generator") as (manager, generator):
        while (await manager.ask(AskSnapshot())).members:  # noqa: ASYNC110 - the master is what changes
            await asyncio.sleep(0.05)
        with pytest.raises(RefusedError, match="not a member"):
            await manager.beat()
        with pytest.raises(RefusedError, match="not a member"):
            await manager.ask(AskPermits(count=1))


async def test_a_role_that_there_is_not_does_not_join(config):
    with pytest.raises(RefusedError, match="there is no role 'referee'"):
        async with master_of(config), callers(config, "referee"):
            pass


async def test_who_joins_in_the_place_of_another_replaces_it(config):
    async with master_of(config), callers(config, "generator") as (old,):
        new = Caller("generator", config.master.address)
        welcome = await new.join(index=0)
        assert [member.identity for member in welcome.snapshot.members] == [new.bus.identity.name]
        assert new.bus.identity.name != old.bus.identity.name
        with pytest.raises(RefusedError, match="not a member"):
            await old.beat()
        await new.bus.close()


async def seed_of_start(config, index: int) -> int:
    """The seed that a generator which joins gives its engine. The engine does not start."""
    seeds = []

    async def start_engine(*_, seed: int, **__):
        seeds.append(seed)
        raise ConnectionError

    bus = Bus("generator/?#g", network())
    generator = Membership(Generator, bus, config.master.address, index, own_process=False, start_engine=start_engine)
    with pytest.raises(ConnectionError):
        await generator.run()
    return seeds[0]


async def test_an_engine_that_is_started_again_does_not_draw_the_random_numbers_again_that_it_began_with(config):
    async with master_of(config):
        seeds = [await seed_of_start(config, index) for index in (0, 1, 0, 0)]
    async with master_of(config):  # of the same run
        seeds += [await seed_of_start(config, index) for index in (0, 1)]
    fresh = [config.model_copy(update={"run_dir": config.run_dir / f"seed-{seed}", "seed": seed}) for seed in (0, 1)]
    async with master_of(fresh[0]):
        assert await seed_of_start(fresh[0], 0) == seeds[0]  # the same run begins alike
    async with master_of(fresh[1]):
        seeds.append(await seed_of_start(fresh[1], 0))
    assert len(set(seeds)) == 7
    assert all(0 <= seed < 2**32 for seed in seeds)


async def test_a_trainer_whose_model_is_another_one_than_the_masters_takes_the_place_of_no_other(config):
    model = Path(config.model)
    (model / "config.json").write_text('{"vocab_size": 5}')
    async with master_of(config), callers(config, "trainer") as (trainer,):
        (model / "config.json").write_text('{"vocab_size": 6}')  # as on another machine
        words = ["--role", "trainer", "--master", config.master.address, "--keys", keys_folder()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, ROOT / "run.py", *words, stderr=asyncio.subprocess.PIPE
        )
        _, printed = await process.communicate()
        await trainer.beat()
    assert process.returncode == 2
    assert "is not the model of the run, its config.json differs: copy it from" in printed.decode()


# --- whose request it is


@contextlib.asynccontextmanager
async def thief_of(owner: Caller) -> AsyncIterator[Caller]:
    """Another process with valid keys, which calls itself what the owner calls itself."""
    thief = Caller(owner.role, owner.address)
    thief.bus.identity.name = owner.bus.identity.name
    try:
        yield thief
    finally:
        await thief.bus.close()


async def reconnect(caller: Caller) -> None:
    """The same process, over a new connection."""
    caller.bus.forget(caller.address)


async def test_a_request_in_the_name_of_another_member_is_refused(config):
    config = without_evaluation(config)
    async with callers_of_several_masters("trainer", "reward", config=config) as (trainer, reward):
        for first in (True, False):  # and by the next master, before the owner has said a word to it
            async with master_of(config):
                if first:
                    await trainer.join()
                    await reward.join()
                async with thief_of(trainer) as thief:
                    for message in (Leave(reason="stolen"), TrainingFailed(reason="stolen"), AskBatch(version=0)):
                        with pytest.raises(ForgedError, match=f"not from {trainer.bus.identity.name}"):
                            await thief.ask(message)
                reward.bus.identity.name, name = trainer.bus.identity.name, reward.bus.identity.name
                with pytest.raises(ForgedError):  # a member has no more right to it
                    await reward.ask(Leave(reason="stolen"))
                reward.bus.identity.name = name
                await reward.beat()
                await trainer.beat()
                await reconnect(trainer)
                await trainer.beat()
                assert trainer.bus.identity.name in [m.identity for m in (await reward.ask(AskSnapshot())).members]


async def test_a_welcome_is_told_again_to_the_one_it_was_made_for_alone(config):
    async with master_of(without_evaluation(config)):
        joins = Caller("trainer", config.master.address)
        name = joins.bus.identity.name
        welcome = await joins.join()
        with zmq.Context() as context:
            for token, same in ((joins.bus.peer(joins.address).token, True), (b"guessed", False)):
                with dealer(context, config.master.address) as socket:
                    header = Header(AskStatus.kind, name, id="0", remaining_ms=9000, token=token)
                    socket.send_multipart(encode(header, AskStatus()))
                    while not socket.poll(0):  # noqa: ASYNC110 - a socket that is no part of a bus
                        await asyncio.sleep(0.01)
                    answer = socket.recv_multipart()
                kind = decode_header(answer).kind
                assert kind == ("welcome" if same else "status")
                assert (decode_body(kind, answer) == welcome) is same
        await joins.bus.close()


async def test_actors_that_other_hosts_cannot_reach_are_told_of_as_soon_as_there_are_other_hosts(config):
    with structlog.testing.capture_logs() as logs:
        async with master_of(config), callers(config, "trainer", "reward"):
            assert not [line for line in logs if line["log_level"] == "warning"]
            elsewhere = Caller("generator", config.master.address)
            await elsewhere.join(listens="tcp://10.0.0.7:1")
            await elsewhere.bus.close()
    warned = [line for line in logs if "no other host reaches" in line["event"]]
    assert [line["joined"] for line in warned] == [elsewhere.bus.identity.name]


async def test_a_run_in_which_nothing_moves_says_who_waits_for_whom(config):
    config = config.model_copy(update={"master": config.master.model_copy(update={"stall_seconds": 0.5})})
    async with master_of(config) as running, callers(config, "trainer") as (trainer,):
        await trainer.beat()
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert "the run has made no progress" in ending.reason
    assert "generator" in ending.reason


async def test_a_stalled_run_takes_the_remedies_there_are_before_it_gives_up(config):
    config = without_evaluation(config)
    config = config.model_copy(
        update={"master": config.master.model_copy(update={"stall_seconds": 3.0, "lease_seconds": 8.0})}
    )
    roles = ("trainer", "generator", "reward", "rollout_manager")
    async with master_of(config) as running, callers(config, *roles) as actors:
        trainer, *_, manager = actors
        permits = (await manager.ask(AskPermits(count=1))).permits
        lost = ()
        while not lost:  # the unfinished group starts anew
            for actor in actors:  # while one is silent, no time counts
                await actor.beat()
            lost = (await manager.ask(RenewLeases(groups=(permits[0].group,)))).groups
            await asyncio.sleep(0.1)
        assert not running.done()
        beats = asyncio.create_task(beat_on(trainer))
        with pytest.raises(FencedError):  # then those waited for do
            await beat_on(manager)
        ending = await asyncio.wait_for(running, SECONDS)
        beats.cancel()
    assert not ending.ok
    assert "the run has made no progress" in ending.reason


async def beat_on(actor: Caller) -> None:
    while True:
        await actor.beat()
        await asyncio.sleep(0.1)


# --- rewards


async def test_the_parts_of_rewards_are_averaged_over_the_groups_of_a_step(config):
    config = without_evaluation(config)
    async with callers_of_several_masters("trainer", "rollout_manager", config=config) as (trainer, manager):
        async with master_of(config):
            await trainer.join()
            await manager.join()
            await recover(trainer)
            for parts in ({"math": 1.0, "format": 0.5}, {"math": 0.0}):
                (permit,) = (await manager.ask(AskPermits(count=1))).permits
                ready = GroupReady(
                    group=permit.group, start_version=0, reward_mean=0.5, signal=True, reward_parts=parts
                )
                assert (await trainer.ask(ready)).accepted
        async with master_of(config):
            await train(trainer, 0, "weights")
    (step,) = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert step["reward_parts"] == {"math": 0.5, "format": 0.5}


async def test_a_run_ends_where_no_completion_at_all_can_be_scored(config):
    async with master_of(config) as running, callers(config, "evaluator", "rollout_manager") as (evaluator, manager):
        for number in range(UNSCORED_LIMIT - 1):
            await evaluator.ask(ScoringFailed(cause="workflow", reason=f"{number}"))
        assert not running.done()
        await evaluator.ask(Leave(reason="it failed too"))
        await manager.ask(ScoringFailed(cause="reward", reason="reward 'own:short': KeyError:\n'x'"))
        await manager.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert "20 have failed. The last failure: reward 'own:short': KeyError: 'x'. Correct" in ending.reason


async def test_a_reward_that_hangs_needs_fewer_failures_to_end_the_run_but_some_time(config, monkeypatch):
    monkeypatch.setattr("areal.staleness.failures.UNSCORED_SECONDS", 0.3)
    async with master_of(config) as running, callers(config, "evaluator") as (evaluator,):
        for _ in range(4):
            await evaluator.ask(ScoringFailed(cause="reward", reason="no score within 10 s"))
        assert not running.done()
        await asyncio.sleep(0.3)
        await evaluator.ask(ScoringFailed(cause="reward", reason="no score within 10 s"))
        await evaluator.ask(Leave(reason="done"))
        assert "no score within 10 s" in (await asyncio.wait_for(running, SECONDS)).reason


async def test_failures_end_no_run_in_which_anybody_has_scored_anything(config):
    async with master_of(config) as running, callers(config, "evaluator", "rollout_manager") as (evaluator, manager):
        await manager.beat(samples_scored=1)
        for number in range(2 * UNSCORED_LIMIT):
            await evaluator.ask(ScoringFailed(cause="workflow", reason=f"{number}"))
        assert (await evaluator.ask(AskStatus())).values["ended"] is False
        assert not running.done()


async def test_the_status_has_the_first_failure_of_each_cause(config):
    async with master_of(config), callers(config, "evaluator", "rollout_manager") as (evaluator, manager):
        await manager.ask(ScoringFailed(cause="workflow", reason="the workflow raised KeyError:\n'b'"))
        await manager.ask(ScoringFailed(cause="workflow", reason="the workflow raised KeyError: 'c'"))
        await evaluator.ask(ScoringFailed(cause="reward", reason="reward 'own:short': no score"))
        (permit,) = (await manager.ask(AskPermits(count=1))).permits
        await manager.ask(GroupFailed(group=permit.group, cause="row", reason="row 0 of the data cannot be used"))
        alerts = (await evaluator.ask(AskStatus())).values["alerts"]
    logs = config.folder / "logs"
    assert [*alerts] == [
        f"first failure (workflow), at rollout_manager/0: the workflow raised KeyError: 'b'. More is in "
        f"{logs}/rollout_manager-0.jsonl",
        f"first failure (reward), at evaluator/0: reward 'own:short': no score. More is in {logs}/reward-* or "
        f"evaluator-0.jsonl",
        f"first failure (row), at rollout_manager/0: row 0 of the data cannot be used. More is in "
        f"{logs}/rollout_manager-0.jsonl",
    ]


# --- groups without signal


def filtering(config: Config) -> Config:
    return without_evaluation(config).model_copy(update={"group_size": 2, "filter_zero_signal": True})


async def report(trainer: Caller, manager: Caller, signal: bool, mean: float) -> bool:
    """One more group is ready; whether it is accepted."""
    permit = (await manager.ask(AskPermits(count=1))).permits[0]
    ready = GroupReady(group=permit.group, start_version=permit.min_version, reward_mean=mean, signal=signal)
    return (await trainer.ask(ready)).accepted


def after_the_dull(history: History, prompt: int) -> int:
    """A sampler: it takes the next row once one was dull, and else the row that it took before."""
    return max(4, history.last) + any(row.flat for row in history.rows.values() if row.index == history.last)


async def test_a_filtered_group_is_replaced_and_still_counts_in_the_reward_of_all(config):
    config = filtering(config)
    sampled = {"sampler": f"{__file__}:{after_the_dull.__name__}", "size": 8}
    config = config.model_copy(update={"data": config.data.model_copy(update=sampled)})
    async with callers_of_several_masters("trainer", "rollout_manager", config=config) as (trainer, manager):
        async with master_of(config):
            await trainer.join()
            await manager.join()
            await recover(trainer)
            permits = (await manager.ask(AskPermits(count=100))).permits
            dull = GroupReady(group=permits[0].group, start_version=0, reward_mean=0.0, signal=False)
            parked = asyncio.create_task(manager.ask(AskPermits(count=1), 60.0))
            assert not (await trainer.ask(dull)).accepted
            (replacement,) = (await parked).permits
            assert [permit.row for permit in (*permits, replacement)] == [4, 4, 4, 4, 5]
            for permit in permits[1:3]:
                ready = GroupReady(group=permit.group, start_version=0, reward_mean=0.75, signal=True)
                assert (await trainer.ask(ready)).accepted
        async with master_of(config):
            assert not (await trainer.ask(dull)).accepted, "a repeat is no second group"
            await train(trainer, 0, "weights")
            for permit in (permits[3], replacement):
                await trainer.ask(GroupReady(group=permit.group, start_version=0, reward_mean=0.5, signal=True))
            await train(trainer, 1, "weights")
    first, second = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [first[key] for key in ("reward_mean", "reward_mean_all", "groups_filtered")] == [0.75, 0.5, 1]
    assert [second[key] for key in ("reward_mean", "reward_mean_all", "groups_filtered")] == [0.5, 0.5, 0]
    assert [step["coverage"] for step in (first, second)] == [2 / 8, 2 / 8]
    assert (first["discarded"], second["discarded"]) == ([[0, "zero signal"]], [])
    assert (first["staleness_histogram"], second["staleness_histogram"]) == ([2], [0, 2])


async def test_a_run_that_filters_nothing_but_dull_groups_ends_and_says_so(config, monkeypatch):
    monkeypatch.setattr("areal.staleness.failures.FILTERED_LIMIT", 2)
    config = filtering(config)
    async with master_of(config) as running, callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        for _ in range(4):
            await report(trainer, manager, signal=False, mean=1.0)
        assert await report(trainer, manager, signal=True, mean=0.5)  # then the count begins anew
        for _ in range(4):
            assert not await report(trainer, manager, signal=False, mean=1.0)
        assert not running.done()
        await report(trainer, manager, signal=False, mean=1.0)
        for actor in (trainer, manager):
            await actor.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert "discarded 5 groups in a row" in ending.reason
    assert "0.950 on average" in ending.reason
    assert "filter_zero_signal=false" in ending.reason


# --- a training that failed


@pytest.mark.parametrize("saved", [None, "checkpoints/step_1"])
async def test_a_training_that_failed_ends_the_run_with_its_reason_and_the_last_checkpoint(config, saved):
    config = without_evaluation(config)
    async with master_of(config) as running, callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await train(trainer, 0, "weights")
        if saved:
            await trainer.ask(CheckpointSaved(version=1, covered=1, folder=saved, spooled=""))
        for _ in range(2):  # it says so until it hears of the end
            await trainer.ask(TrainingFailed(reason="loss is nan."))
        assert (await trainer.beat()).ended
        for actor in (trainer, manager):
            await actor.ask(Leave(reason="done"))
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    assert ending.reason.startswith("loss is nan. ")
    assert (f"The last checkpoint is {saved}: resume" if saved else "No checkpoint was saved") in ending.reason
    assert json.loads((config.folder / "summary.json").read_text())["reason"] == ending.reason


async def test_a_step_that_fails_twice_in_the_same_way_ends_the_run(config):
    config = without_evaluation(config)

    def failed(rank: Caller, reason: str, version: int = 0):
        return rank.ask(StepFailed(version=version, reason=reason))

    async with master_of(config) as running, callers(config, "trainer", "rollout_manager") as (trainer, manager):
        restarted = Caller("trainer", config.master.address, mark="restarted")
        other_rank = Caller("trainer", config.master.address, mark="other")  # which is no member
        await recover(trainer)
        for rank in (trainer, other_rank):
            await failed(rank, "ValueError: at 0x7f0a, 12 tokens")
        await restarted.join()
        await recover(restarted)
        await failed(restarted, "ValueError: at 0x7f0a, 12 tokens", version=1)
        await failed(restarted, "KeyError: at 0x7f0a, 12 tokens")
        with pytest.raises(RefusedError, match="has no step 10 to compute"):
            await failed(restarted, "ValueError", version=9)
        with pytest.raises(RefusedError, match="rollout_manager/0#.* has no step 1 to compute"):
            await failed(manager, "ValueError: at 0x7f0a, 12 tokens")
        assert not (await manager.beat()).ended
        await failed(other_rank, "ValueError: at 0x55d1, 8 tokens")  # only numbers differ
        assert (await manager.beat()).ended
        for actor in (restarted, manager):
            await actor.ask(Leave(reason="done"))
        for rank in (restarted, other_rank):
            await rank.bus.close()
        ending = await asyncio.wait_for(running, SECONDS)
    assert not ending.ok
    reason = "Step 1 failed twice alike: ValueError: at 0x55d1, 8 tokens. The traceback is in "
    assert ending.reason == f"{reason}{config.folder}/logs. No checkpoint was saved before that."


# --- the evaluation of a version while the run goes on


def evaluating(config: Config, **evaluator: float) -> Config:
    """Every version is due."""
    own = config.evaluator.model_copy(update={"every": 1, **evaluator})
    return config.model_copy(update={"steps": 4, "evaluator": own})


@contextlib.asynccontextmanager
async def evaluated_at_0(config: Config, generators: int = 2) -> AsyncIterator[list[Caller]]:
    """A run of which version 0 is evaluated, and the trainer, the rollout manager, the evaluator and the generators."""
    roles = ["trainer", "rollout_manager", "evaluator"] + ["generator"] * generators
    async with master_of(config), callers(config, *roles) as actors:
        await recover(actors[0])
        for actor in actors:
            await actor.beat()
        await evaluate(actors[2], 0, 0.25)
        yield actors


async def step(actors: list[Caller], version: int) -> None:
    """Train the step that leads from `version` to the next."""
    trainer, manager, *_ = actors
    await make_ready(manager, trainer, version)
    await train(trainer, version, f"v{version + 1}")


async def holds(caller: Caller) -> dict[int, int]:
    """The versions that are held, by the generators' index."""
    members = (await caller.ask(AskSnapshot())).members
    return {member.index: member.held.version for member in members if member.held is not None}


def fates(config: Config) -> tuple[list[int], dict[int, str]]:
    """The versions with a result, and why others have none."""
    journal = Journal.open(config.folder / "journal.db")
    _, events = journal.read()
    journal.close()
    results = [body["evaluation"]["version"] for kind, body in events if kind == "evaluated"]
    return results, {body["version"]: body["reason"] for kind, body in events if kind == "evaluation_dropped"}


async def test_a_version_that_is_due_is_held_by_one_generator_until_it_is_evaluated(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        for version, index in ((1, 1), (2, 0), (3, 1)):  # another generator each time
            await step(actors, version - 1)
            assert await holds(evaluator) == {index: version}
            due = await evaluator.ask(AskEvaluation())
            assert (due.version, due.holder.index, due.holder.held.folder) == (version, index, f"v{version}")
            await evaluator.ask(result(version))
            assert await holds(evaluator) == {}
        await step(actors, 3)
        due = await evaluator.ask(AskEvaluation())
        assert (due.version, due.holder) == (4, None)  # nothing newer will come
    assert fates(config) == ([0, 1, 2, 3], {})
    records = list(read_records(config.folder / "evaluations.jsonl"))
    assert [record["version"] for record in records] == [0, 1, 2, 3]
    assert records[1].pop("time") > 0
    assert records[1].pop("run") == ""
    assert records[1] == {
        "version": 1,
        "accuracy": 0.5,
        "standard_error": None,
        "pass_at": {"1": 0.5},
        "rows": 4,
        "failed": 0,
        "unfinished": 0,
        "completion_tokens_mean": 7.5,
        "benchmarks": {},
    }


async def test_a_generator_hears_that_it_holds_a_version_before_there_is_that_version(config):
    async with evaluated_at_0(evaluating(config)) as actors:
        heard: list[object] = []
        events = (await actors[2].ask(AskSnapshot())).events
        subscriber = actors[2].bus.subscribe(events, lambda sequence, event: heard.append(event))
        await asyncio.sleep(0.5)  # a subscription takes its time
        await step(actors, 0)
        while not any(isinstance(event, PolicyPublished) for event in heard):  # noqa: ASYNC110 - the bus calls back
            await asyncio.sleep(0.05)
        before = heard[: [isinstance(event, PolicyPublished) for event in heard].index(True)]
        changed = [member for event in before if isinstance(event, MembersChanged) for member in event.changed]
        assert [member.held.version for member in changed if member.held] == [1]
        await subscriber.close()


def alone(config: Config) -> Config:
    benchmark = {"source": "addition", "size": 2, "reward": "addition"}
    values = {"steps": 0, "data": {"eval_size": 0}, "evaluator": {"benchmarks": {"sums": benchmark}}}
    return Config.model_validate(config.model_dump() | values)


async def test_an_evaluation_alone_ends_with_its_result_and_without_a_trainer(config):
    config = alone(config)
    async with master_of(config) as running, callers(config, "generator", "reward", "evaluator") as actors:
        for actor in actors:
            await actor.beat()
        status = (await actors[2].ask(AskStatus())).values
        assert "everyone waits for the evaluation" in status["waiting"]
        scores = {"accuracy": 0.5, "pass_at": {}, "rows": 2, "failed": 0, "completion_tokens_mean": 4.0}
        sums = BenchmarkScores(**scores, samples=1, scored=2, cut_share=0.0)
        nothing = scores | {"accuracy": None, "rows": 0, "completion_tokens_mean": None}
        due = await actors[2].ask(AskEvaluation())
        assert (due.version, due.holder) == (0, None)
        await actors[2].ask(EvaluationDone(version=0, **nothing, samples=(), benchmarks={"sums": sums}))
        assert (await asyncio.wait_for(running, SECONDS)).ok
    summary = json.loads((config.folder / "summary.json").read_text())
    assert summary["evaluations"][0]["benchmarks"]["sums"]["accuracy"] == 0.5
    async with master_of(config) as again:
        assert (await asyncio.wait_for(again, SECONDS)).ok


async def test_an_evaluation_alone_that_is_given_up_fails_and_may_be_started_again(config):
    config = alone(config)
    async with master_of(config) as running, callers(config, "evaluator") as (evaluator,):
        await evaluator.ask(EvaluationAbandoned(version=0, reason="none of the rows of sums could be scored"))
        ending = await asyncio.wait_for(running, SECONDS)
        assert not ending.ok and "none of the rows of sums could be scored" in ending.reason
    async with master_of(config), callers(config, "evaluator") as (evaluator,):
        assert (await evaluator.ask(AskEvaluation())).version == 0


async def test_training_does_not_wait_for_the_evaluation_of_version_0(config):
    roles = ["trainer", "rollout_manager", "evaluator", "generator", "generator"]
    async with master_of(config), callers(config, *roles) as actors:
        trainer, manager, evaluator, *generators = actors
        await recover(trainer)
        assert await holds(manager) == {0: 0}
        assert (await evaluator.ask(AskEvaluation(), 6.0)).version is None  # the generator is still starting
        for generator in generators:
            await generator.beat()
        for version in range(2):
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
        due = await evaluator.ask(AskEvaluation())
        assert (due.version, due.holder.index, due.holder.held.version) == (0, 0, 0)
        await evaluator.ask(result(0, 0.25))
        assert await holds(manager) == {}
        due = await evaluator.ask(AskEvaluation())
        assert (due.version, due.holder) == (2, None)


async def test_version_0_passes_to_another_generator_that_still_has_it(config):
    config = config.model_copy(update={"steps": 4})
    roles = ["trainer", "rollout_manager", "evaluator", "generator", "generator"]
    async with master_of(config), callers(config, *roles) as actors:
        trainer, manager, evaluator, *generators = actors
        await recover(trainer)
        await generators[1].beat()
        await generators[0].ask(Leave(reason="a test"))
        assert await holds(manager) == {1: 0}
        await step(actors, 0)
        await generators[0].join()
        assert await holds(manager) == {1: 0}
        await generators[1].ask(Leave(reason="a test"))
        assert await holds(manager) == {}  # the other one may have version 1 by now
        await generators[1].join()
        assert await holds(manager) == {1: 0}
        await generators[1].beat()
        trainer = Caller("trainer", config.master.address, mark="new")
        await trainer.join()
        await recover(trainer)
        await trainer.bus.close()
        assert await holds(manager) == {1: 0}  # a lineage changes nothing for version 0
        await evaluate(evaluator, 0, 0.25)
        assert await holds(manager) == {}
    assert fates(config) == ([0], {})


async def test_a_run_whose_generators_have_all_left_version_0_ends_without_its_result(config):
    async with (
        master_of(config) as running,
        callers(config, "trainer", "rollout_manager", "evaluator", "generator") as actors,
    ):
        trainer, _, evaluator, generator = actors
        await recover(trainer)
        await generator.beat()
        for version in range(2):
            await step(actors, version)
        await generator.ask(Leave(reason="a test"))
        await generator.join()
        assert await holds(trainer) == {}  # training is over: only the last version is evaluated
        await trainer.ask(CheckpointSaved(version=2, covered=2, folder="checkpoint", spooled=""))
        await trainer.ask(TrainingFinished())
        await evaluate(evaluator, 2, 0.75)
        for actor in actors:
            await actor.ask(Leave(reason="done"))
        assert (await asyncio.wait_for(running, SECONDS)).ok
    summary = json.loads((config.folder / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, 0.75)
    assert list(summary["not_evaluated"]) == ["0"]


async def test_only_every_kth_version_is_due(config):
    async with evaluated_at_0(evaluating(config, every=2)) as actors:
        await step(actors, 0)
        assert await holds(actors[2]) == {}
        await step(actors, 1)
        assert list((await holds(actors[2])).values()) == [2]


async def test_a_version_that_comes_while_another_is_evaluated_is_skipped(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        await step(actors, 0)
        await step(actors, 1)
        assert list((await holds(evaluator)).values()) == [1]
        await evaluate(evaluator, 1, 0.5)
        await step(actors, 2)
        assert list((await holds(evaluator)).values()) == [3]
        await step(actors, 3)
        assert (await evaluator.ask(AskEvaluation())).version == 3
        await evaluate(evaluator, 3, 0.5)
        await evaluate(evaluator, 4, 0.5)  # the last one waits, and is never skipped
    assert fates(config) == ([0, 1, 3, 4], {2: "version 1 is still being evaluated"})


@pytest.mark.parametrize("who", ["evaluator", "holder", "trainer"])
async def test_an_evaluation_that_cannot_be_finished_is_abandoned_and_the_next_one_is_tried(config, who):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        _, manager, evaluator, *generators = actors
        await step(actors, 0)
        await evaluator.ask(AskEvaluation())
        match who:
            case "evaluator":
                await evaluator.ask(EvaluationAbandoned(version=1, reason="tokens of other versions came"))
            case "holder":
                await generators[1].ask(Leave(reason="a test"))
            case "trainer":
                trainer = Caller("trainer", config.master.address, mark="new")
                await trainer.join()
                await recover(trainer)
                await trainer.bus.close()
        assert await holds(manager) == {}
        await evaluator.ask(result(1))  # too late
        if who != "trainer":
            await step(actors, 1)
            assert list((await holds(manager)).values()) == [2]
    results, dropped = fates(config)
    assert results == [0]
    assert list(dropped) == [1]


async def score_rows(evaluator: Caller, version: int, rows: dict[int, tuple[list[float], int]]) -> None:
    await evaluator.ask(RowsScored(version=version, scored=RowScores.of(rows)))


async def known(evaluator: Caller) -> dict[int, tuple[list[float], int]]:
    """The rows that an evaluator which asks now does not have to score."""
    due = await evaluator.ask(AskEvaluation())
    return due.scored.by_row() if due.scored else {}


async def test_an_evaluator_that_is_started_again_gets_the_scores_of_the_one_before(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        await step(actors, 0)
        assert await known(evaluator) == {}
        await score_rows(evaluator, 1, {2: ([0.1, 1.0], 17)})
        await score_rows(evaluator, 1, {2: ([0.0], 1), 3: ([0.7], 5)})  # the first score of a row counts
        await score_rows(evaluator, 0, {1: ([1.0], 5)})  # of a version that is not due
        await evaluator.ask(Leave(reason="a test"))
        await evaluator.join()
        await evaluator.beat()
        assert await holds(evaluator) == {1: 1}
        assert await known(evaluator) == {2: ([0.1, 1.0], 17), 3: ([0.7], 5)}
        await evaluator.ask(result(1))
        await step(actors, 1)
        assert [*(await holds(evaluator)).values()] == [2]
        assert await known(evaluator) == {}  # another version
        with pytest.raises(RefusedError, match="held-out rows"):
            await score_rows(evaluator, 2, {4: ([1.0], 1)})


async def test_a_generator_is_not_held_for_evaluators_that_die_before_they_score_a_row(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        evaluator = actors[2]
        await step(actors, 0)
        for row in range(2):
            await score_rows(evaluator, 1, {row: ([1.0], 1)})
            await evaluator.ask(Leave(reason="a test"))
            await evaluator.join()
            assert await holds(evaluator) == {1: 1}
        await evaluator.ask(Leave(reason="a test"))
        await evaluator.join()
        assert await holds(evaluator) == {}
    assert "none of them has scored another row" in fates(config)[1][1]


async def test_no_generator_is_held_where_there_is_no_evaluator_for_long(config):
    config = evaluating(config)
    config = config.model_copy(update={"master": config.master.model_copy(update={"lost_seconds": 0.5})})
    async with evaluated_at_0(config) as actors:
        await step(actors, 0)
        await actors[2].ask(Leave(reason="a test"))
        while await holds(actors[0]):  # noqa: ASYNC110 - the master is what changes
            await asyncio.sleep(0.05)
    assert "no evaluator" in fates(config)[1][1]


async def test_scores_outlive_the_master_but_not_a_change_of_how_rows_are_sampled(config, monkeypatch):
    config = evaluating(config, samples=2)
    roles = ("trainer", "rollout_manager", "evaluator", "generator")
    async with callers_of_several_masters(*roles, config=config) as actors:
        trainer, _, evaluator, generator = actors
        async with master_of(config):
            for actor in actors:
                await actor.join()
            await generator.beat()
            await recover(trainer)
            await score_rows(evaluator, 0, {2: ([0.5, 1.0], 9)})
        monkeypatch.setattr("actors.master.run_state.COMPACT_EVENTS", 1)
        for _ in range(2):  # from events, and from a snapshot
            async with master_of(config):
                assert await known(evaluator) == {2: ([0.5, 1.0], 9)}
                await asyncio.sleep(1.5)  # the journal is compacted
        greedy = config.model_copy(update={"evaluator": config.evaluator.model_copy(update={"top_p": 0.5})})
        async with master_of(greedy):
            assert await known(evaluator) == {}
            await score_rows(evaluator, 0, {3: ([0.0, 1.0], 9)})
            assert await known(evaluator) == {3: ([0.0, 1.0], 9)}


async def test_nothing_is_held_where_nobody_could_evaluate(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        await actors[2].ask(Leave(reason="a test"))
        await step(actors, 0)
        assert await holds(actors[1]) == {}
    assert list(fates(config)[1]) == [1]


async def test_no_generator_is_held_beyond_the_deadline(config, monkeypatch):
    monkeypatch.setattr("actors.master.evaluations.GRACE_SECONDS", 0.0)
    config = evaluating(config, timeout_seconds=0.5)
    async with evaluated_at_0(config) as actors:
        await step(actors, 0)
        while await holds(actors[2]):  # noqa: ASYNC110 - the master is what changes
            await asyncio.sleep(0.05)
    assert "longer than evaluator.timeout_seconds (0.5 s)" in fates(config)[1][1]


async def test_a_master_started_again_knows_what_is_held_and_has_each_result_once(config):
    config = evaluating(config)
    roles = ("trainer", "rollout_manager", "evaluator", "generator")
    async with callers_of_several_masters(*roles, config=config) as actors:
        evaluator = actors[2]
        async with master_of(config):
            for actor in actors:
                await actor.join()
                await actor.beat()
            await recover(actors[0])
            await evaluate(evaluator, 0, 0.25)
            await step(actors, 0)
        async with master_of(config):
            assert list((await holds(evaluator)).values()) == [1]
            await evaluator.ask(result(1))
            assert await holds(evaluator) == {}
        async with master_of(config):
            await evaluator.ask(result(1, accuracy=0.75))  # an answer that was lost is asked for again
            assert (await evaluator.ask(AskStatus())).values["accuracy"] == {"0": 0.25, "1": 0.5}
    records = [json.loads(line) for line in (config.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(record["version"], record["accuracy"]) for record in records] == [(0, 0.25), (1, 0.5)]


async def test_no_step_is_committed_before_the_metrics_of_the_one_before_are_on_disk(config, monkeypatch):
    def refuse(*_) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    config, roles = without_evaluation(config), ("trainer", "rollout_manager")
    async with callers_of_several_masters(*roles, config=config) as (trainer, manager):
        async with master_of(config):
            for actor in (trainer, manager):
                await actor.join()
            await recover(trainer)
            await make_ready(manager, trainer, 0)
            await trainer.ask(AskBatch(version=0))
            with monkeypatch.context() as full:
                full.setattr(RunFolder, "append_metrics", refuse)
                with pytest.raises(DeadlineError):
                    await trainer.ask(CommitStep(lineage=0, version=1, metrics=METRICS), 1.0)
                with pytest.raises(PreparingError, match=r"waits to write the metrics: the disk of .* is full"):
                    await commit(trainer, 1)
        async with master_of(config):
            while True:
                with contextlib.suppress(PreparingError):
                    await commit(trainer, 1)
                    break
    assert [record["step"] for record in read_records(config.folder / "metrics.jsonl")] == [1]


async def test_what_actors_say_and_measure_is_recorded(config, monkeypatch):
    monkeypatch.setattr("areal.storage.events.FLUSH_SECONDS", 0.0)
    async with master_of(config), callers(config, "trainer", "generator") as (trainer, generator):
        await generator.beat(running=3.0)
        said = {"state": "healthy", "serves": (), "activity": "training step 1", "stats": {}}
        await trainer.ask(Heartbeat(**said, clock=70.0, spans=(Span(name="train", began=68.0, seconds=1.5),)))
        await trainer.ask(Leave(reason="done"))
    events = Record(config.folder).events
    (span,) = spans(events)
    assert (span.actor, span.name, span.seconds) == ("trainer/0", "train", 1.5)
    heard = [(e["actor"], e["state"], e["activity"], e["stats"]) for e in events if "activity" in e]
    assert ("generator/0", "healthy", "testing", {"running": 3.0}) in heard
    assert [activity for actor, _, activity, _ in heard if actor == "trainer/0"] == ["training step 1", "done"]


async def test_a_reward_that_no_actor_serves_is_what_a_run_waits_for(config):
    config = without_evaluation(config)
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"functions": {"own:mine": 1.0}})})
    roles = ("trainer", "generator", "rollout_manager", "reward")
    async with master_of(config), callers(config, *roles) as everybody:
        for caller in everybody:
            await caller.beat()
        waiting = (await everybody[0].ask(AskStatus())).values["waiting"]
    assert waiting.startswith("everyone waits for a reward that serves 'own:mine' to be ready (for ")


async def test_a_reward_is_added_from_the_next_prompt_on_for_all_masters(config, monkeypatch):
    monkeypatch.setenv("AREAL_KEYS", keys_folder())
    config = without_evaluation(config)
    rewards = "own:mine", "own:late"
    async with callers_of_several_masters("rollout_manager", "reward", config=config) as (manager, reward):
        async with master_of(config):
            await manager.join()
            await reward.join()
            with pytest.raises(RefusedError, match=r"no actor serves 'own:mine' \(served: none\): start one"):
                await reward.ask(AddReward(name="own:mine", weight=0.5))
            for name in rewards:
                await reward.ask(Heartbeat(state="healthy", serves=rewards, activity="", stats={}))
                before = (await manager.ask(AskPermits(count=1))).permits
                assert name not in before[0].rewards
                await reward.ask(AddReward(name=name, weight=0.5))
            words = ["reward", "add", config.master.address, "own:late", "2"]
            assert await asyncio.to_thread(areal_tool, words) == 0
            (newest,) = (await manager.ask(AskPermits(count=1))).permits
            assert newest.rewards == {"own:mine": 0.5, "own:late": 2.0}
            # A prompt of which a group was admitted before keeps its weights.
            await manager.ask(GroupFailed(group=before[0].group, cause="workflow", reason=""))
        async with master_of(config):
            (again,) = (await manager.ask(AskPermits(count=1))).permits
            assert (again.prompt_index, again.rewards) == (1, {"own:mine": 0.5})
            assert (await manager.ask(AskStatus())).values["rewards"] == {
                "addition": 1.0,
                "own:mine": 0.5,
                "own:late": 2.0,
            }
            assert "reward that serves 'addition'" in (await manager.ask(AskStatus())).values["waiting"]


@pytest.mark.parametrize("role", ["reward", "scorer"])
async def test_admission_pauses_while_a_reward_or_a_scorer_has_gone(config, monkeypatch, role):
    monkeypatch.setattr("actors.master.progress.ABSENT_SECONDS", 0.0)
    config = without_evaluation(config)
    if role == "scorer":
        values = {"trainer": {"teacher": "wise", "minibatches": 1}, "scorers": {"wise": {"model": "m"}}}
        config = Config.model_validate(config.model_dump() | values)
    name = "addition" if role == "reward" else "wise"
    async with master_of(config), callers(config, "rollout_manager", role) as (manager, reward):
        assert (await manager.ask(AskStatus())).values["capacity"] > 0  # nobody has served it yet
        await reward.beat()
        await asyncio.sleep(1.5)
        await reward.ask(Leave(reason="the kernel was restarted"))

        async def status(alerts: int):
            async with asyncio.timeout(20):
                # The master looks every second.
                while len((values := (await manager.ask(AskStatus())).values)["alerts"]) != alerts:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            return values

        paused = await status(alerts=1)
        assert paused["capacity"] == 0
        assert paused["alerts"][0].startswith(f"admission pauses: no actor serves the {role} {name!r} any more.")
        await reward.join()
        await reward.beat()
        assert (await status(alerts=0))["capacity"] > 0


async def test_a_monitor_is_told_the_steps_it_has_not_seen(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        for version in (0, 1):
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
        for since, steps in ((None, []), (0, [1, 2]), (1, [2]), (2, [])):
            recent = (await trainer.ask(AskStatus(since=since))).values["recent"]
            assert [step["step"] for step in recent] == steps


# --- a master that dies and comes back


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


@contextlib.asynccontextmanager
async def callers_of_several_masters(*roles: str, config: Config) -> AsyncIterator[list[Caller]]:
    made = [Caller(role, config.master.address, mark=f"{n}") for n, role in enumerate(roles)]
    try:
        yield made
    finally:
        for caller in made:
            await caller.bus.close()


# --- a trainer that dies and comes back


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


# --- a version is committed first, and published once its files stand


async def test_what_is_committed_and_not_published_yet_is_asked_of_new_groups_and_told_to_nobody(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await trainer.ask(AskBatch(version=0))
        await commit(trainer, 1)
        assert (await trainer.beat()).policy.version == 0
        assert {permit.min_version for permit in (await manager.ask(AskPermits(count=1))).permits} == {1}
        await publish(trainer, 1)
        assert (await trainer.beat()).policy.version == 1


async def test_no_step_is_committed_before_the_last_one_is_published_nor_anything_published_before_its_commit(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await trainer.ask(AskBatch(version=0))
        with pytest.raises(RefusedError, match="version 1 cannot be published: the run is at version 0"):
            await publish(trainer, 1)
        await commit(trainer, 1)
        await make_ready(manager, trainer, 1)
        await trainer.ask(AskBatch(version=1))
        with pytest.raises(RefusedError, match="version 1 is not published"):
            await commit(trainer, 2)


async def test_a_batch_may_be_asked_for_before_the_step_that_leads_to_it_is_committed(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager") as (trainer, manager):
        await recover(trainer)
        await make_ready(manager, trainer, 0)
        await trainer.ask(AskBatch(version=0))
        groups = await make_ready(manager, trainer, 0)
        asked = asyncio.create_task(trainer.ask(AskBatch(version=1), 60.0))
        await trainer.beat()  # comes after it
        assert not asked.done()
        await commit(trainer, 1)
        assert (await asked).groups == tuple(groups)


async def test_a_trainer_that_takes_over_publishes_what_the_dead_one_had_only_committed(config):
    config = evaluating(config)
    async with evaluated_at_0(config) as actors:
        old, manager = actors[:2]
        await make_ready(manager, old, 0)
        await old.ask(AskBatch(version=0))
        await commit(old, 1)
        new = Caller("trainer", config.master.address, mark="new")
        await new.join()
        assert (await recover(new)).version == 1
        await publish(new, 1, "again", lineage=1)
        policy = (await new.beat()).policy
        assert (policy.lineage, policy.version, policy.folder) == (1, 1, "again")
        holders = [member.held for member in (await new.ask(AskSnapshot())).members if member.held]
        assert holders == [policy]  # what is due at version 1 is decided when it is published
        await new.bus.close()


async def test_what_weight_updates_cost_is_summed_over_the_generators_and_told_step_by_step(config):
    config = without_evaluation(config)
    async with master_of(config), callers(config, "trainer", "rollout_manager", "generator", "generator") as actors:
        trainer, manager, *generators = actors
        await recover(trainer)
        for version, reloads in enumerate((1, 3)):
            for generator in generators:
                await generator.beat(
                    reloads=reloads,
                    pause_seconds=0.25 * reloads,
                    load_seconds=0.5 * reloads,
                    resume_seconds=0.0,
                    sequences_interrupted=4 * reloads,
                    tokens_recomputed=100 * reloads,
                )
            await make_ready(manager, trainer, version)
            await train(trainer, version, "weights")
    steps = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    names = ("reloads", "pause_seconds", "load_seconds", "resume_seconds", "sequences_interrupted", "tokens_recomputed")
    assert [[step[name] for name in names] for step in steps] == [[2, 0.5, 1, 0, 8, 200], [4, 1, 2, 0, 16, 400]]
