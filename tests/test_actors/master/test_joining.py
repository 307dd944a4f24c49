"""Who may join a run, who is removed from it, and in whose name a request may be."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
import zmq
from conftest import ROOT
from fakes.callers import Caller, callers, callers_of_several_masters, master_of, without_evaluation
from support.networks import dealer, keys_folder, network

from actors.generator.generator import Generator
from actors.master import membership_requests
from actors.runtime.membership import Membership
from protocols.bus import Bus
from protocols.bus_errors import DeadlineError, FencedError, ForgedError, RefusedError
from protocols.codec import Header, decode_body, decode_header, encode
from protocols.membership_messages import AskSnapshot, AskStatus, ConnectionLost, Join, Leave, actor_name
from protocols.messages import AskBatch, AskPermits, Done
from protocols.network import ZmqNetwork
from protocols.security import Keys, make_keys
from protocols.training_messages import TrainingFailed

UNUSED = "tcp://127.0.0.1:1"


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


@pytest.mark.parametrize("lives", ["listens", "beats", "neither"])
async def test_an_actor_that_another_cannot_reach_is_removed_before_its_lease_ends_if_it_neither_listens_nor_beats(
    config, monkeypatch, lives
):
    monkeypatch.setattr(membership_requests, "SILENT_SECONDS", 0.5)

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
    monkeypatch.setattr(membership_requests, "SILENT_SECONDS", 0.1)
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
