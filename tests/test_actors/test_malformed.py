"""Real front doors under malformed frames: nothing ends them, and they go on answering."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from fuzz import Caller, flood_codec, flood_http
from support.malformed import Malformed
from support.networks import network
from support.small_runs import ten_steps

from actors.generator.generator import Generator
from actors.master.master import Master
from actors.reward import Reward
from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from actors.trainer.trainer import Trainer
from areal.config import Config
from areal.storage.journal import Journal
from areal.storage.run_folder import RunFolder
from protocols.bus import Bus
from protocols.bus_errors import BusError
from protocols.membership_messages import AskStatus, Join, Leave

FRAMES = 1500


class Idle:
    """A model that never gets to a step."""

    work_done = 0
    vocab_size = 100

    async def step(self, *_, **__):
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


async def idle(*_: object) -> Idle:
    return Idle()


async def never(*_, **__):
    await asyncio.Event().wait()


@pytest.fixture
def config(tmp_path, free_port) -> Config:
    folders = {"model": str(tmp_path), "run_dir": tmp_path}
    reward, master = {"functions": ["addition"], "workers": 1}, {"address": f"tcp://127.0.0.1:{free_port}"}
    return ten_steps(**folders, group_size=1, max_staleness=1, reward=reward, master=master | {"lease_seconds": 1000})


@contextlib.asynccontextmanager
async def running(*actors):
    """Fails where one of them has ended before the block does."""
    tasks = [asyncio.create_task(actor.run()) for actor in actors]
    try:
        yield
        assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def flood(address: str, malformed: Malformed) -> None:
    """Over one connection, beside the actors: they share this loop."""

    def send() -> bool:
        with Caller(address, Counter()) as caller:
            return caller.flood(malformed, FRAMES)

    assert await asyncio.to_thread(send)


def master_of(config: Config) -> Master:
    folder = RunFolder(config)
    journal = Journal.open(folder.path / "journal.db")
    return Master(Bus("master/0#m", network()), config, journal=journal, folder=folder)


@contextlib.asynccontextmanager
async def stranger():
    bus = Bus("stranger/0#1", network())
    try:
        yield bus
    finally:
        await bus.close()


async def test_the_master_goes_on_whatever_its_members_and_strangers_send(config):
    async with running(master_of(config)), stranger() as bus:
        master = bus.peer(config.master.address)
        senders = ["stranger/0#1"]
        for role in ("rollout_manager", "trainer", "generator"):
            bus.identity.name = f"{role}/?#{role}"
            senders.append((await master.ask(Join(role=role, index=None, address="tcp://127.0.0.1:1"), 10)).identity)
        await flood(config.master.address, Malformed(1, senders, token=master.token))
        assert (await master.ask(AskStatus(), 30)).values["ended"] is False


async def test_other_doors_go_on_too(config):
    def join(kind: type[Actor], **how) -> Membership:
        return Membership(kind, Bus(f"{kind.role}/?#{kind.role}", network()), config.master.address, **how)

    actors = [join(Trainer, start_learner=idle), join(Reward), join(Generator, start_engine=never)]
    async with running(master_of(config), *actors), stranger() as bus:
        while not all(actor.state == "healthy" for actor in actors[:2]):  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.05)
        for seed, actor in enumerate(actors):
            address = actor.bus.server.address
            await flood(address, Malformed(seed))
            with pytest.raises(BusError, match="does not answer"):
                await bus.peer(address).ask(Leave(reason=""), 30)


async def test_the_http_endpoint_answers_malformed_requests_with_4xx_and_logs_none_of_them(caplog):
    seen: Counter[str] = await flood_http(1000, seed=1)
    assert seen["400"] > 200 and seen["200"] > 10
    assert not seen["hung"] and not [status for status in seen if status.startswith("5")]
    assert not [record for record in caplog.records if record.name == "areal.extensions.agents.openai_endpoint"]


def test_what_the_codec_does_not_refuse_comes_out_the_same_when_it_is_sent_on():
    seen = flood_codec(FRAMES, seed=1)
    assert seen["refused"] > FRAMES // 2 and seen["decoded"] > FRAMES // 20
