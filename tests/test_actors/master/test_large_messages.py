"""What many members say together never makes a message that cannot be sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from fakes.callers import callers, master_of, without_evaluation
from pydantic import ValidationError

from actors.master import members as members_module
from actors.master.master import EVENTS_OF_ONE_MASTER
from actors.master.members import next_event
from protocols.bus import Publisher
from protocols.bus_errors import BusError, BusyError, MalformedError
from protocols.codec import encode_body
from protocols.membership_messages import AskSnapshot, AskStatus, Engagement, Heartbeat, Member, MembersChanged

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
