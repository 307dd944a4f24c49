"""The bus over a network in memory that loses what it is told to lose, on a clock that jumps from timer to timer."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from protocols.bus import Bus
from protocols.bus_errors import DeadlineError, FencedError, RefusedError, StreamBrokenError
from protocols.codec import decode_header
from protocols.membership_messages import AskStatus, Policy, PolicyPublished, Status
from protocols.messages import Done
from protocols.network import Full, Unreachable
from protocols.transport import RESEND_SECONDS, STREAM_SILENCE_SECONDS
from protocols.weight_messages import FetchWeights, WeightChunk

DOOR = "tcp://master:1"
PATIENCE = 60.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Where nothing is ready, it is at once the time of the next timer."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


class FakeLink:
    closed = False

    def __init__(self, network, carry):
        self._network = network
        self._carry = carry

    def send(self, frames):
        if self.closed:
            raise Unreachable
        self._carry(frames)

    async def send_when_possible(self, frames):
        while not self.closed:
            try:
                return self.send(frames)
            except Full:
                await self._network.changed.wait()

    async def close(self):
        self.closed = True


class FakeNetwork:
    """One front door, one publisher. `loses(header)` says of each message in between whether it is lost."""

    def __init__(self):
        self.loses = lambda header: False
        self.carried = []
        self.changed = asyncio.Event()
        self._door = None
        self._askers = {}
        self._listeners = []

    def bind(self, address, receive, on_crash):
        self._door = receive
        self.changed.set()
        return FakeLink(self, lambda frames: self._carry(self._askers[frames[0]], frames[1:], frames[1:])), address

    def connect(self, address, receive, on_crash, on_lost):
        route = b"%d" % len(self._askers)
        self._askers[route] = receive

        def carry(frames):
            if self._door is None:
                raise Full
            self._carry(self._door, frames, [route, *frames])

        return FakeLink(self, carry)

    def publish(self, address, on_crash):
        return FakeLink(
            self, lambda frames: [self._carry(receive, frames, frames) for receive in self._listeners]
        ), address

    def subscribe(self, address, receive, on_crash):
        self._listeners.append(receive)
        return FakeLink(self, None)

    def close(self):
        pass

    def _carry(self, receive, frames, delay):
        header = decode_header(frames)
        self.carried.append((asyncio.get_running_loop().time(), header))
        if not self.loses(header):
            asyncio.get_running_loop().call_soon(receive, delay)


def run(behaviour):
    """The result of `behaviour(network)` on a jumping clock."""

    async def main():
        return await behaviour(FakeNetwork())

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main())


def now():
    return asyncio.get_running_loop().time()


def bus_of(network, identity="reward/0#b"):
    return Bus(identity, network)


def serve(network, handle):
    bus = bus_of(network, "master/0#a")
    bus.serve(DOOR, handle, pytest.fail)
    return bus


def counting(runs):
    """A handler that answers with how often it ran."""

    async def handle(request):
        runs.append(request)
        return scored(len(runs))

    return handle


def scored(number):
    return Status(values={"score": number})


def fetch():
    return FetchWeights(lineage=0, version=1, first=0, base=None)


def part():
    return WeightChunk(number=0, data=np.zeros(0, np.uint8), difference=False)


def lose_first(count, belongs):
    """Loses the first `count` of the messages that `belongs` picks."""
    lost = []

    def loses(header):
        if belongs(header) and len(lost) < count:
            lost.append(header)
            return True
        return False

    return loses


# --- asking


def test_a_lost_answer_is_repeated_from_what_was_kept():
    async def behaviour(network):
        runs = []
        serve(network, counting(runs))
        network.loses = lose_first(2, lambda header: header.reply_to)
        answer = await bus_of(network).peer(DOOR).ask(AskStatus(), PATIENCE)
        return answer, len(runs), network.carried

    answer, runs, carried = run(behaviour)
    assert (answer, runs) == (scored(1), 1)
    requests = [(time, header.attempt, header.remaining_ms) for time, header in carried if not header.reply_to]
    assert requests == [(n * RESEND_SECONDS, n, 1000 * int(PATIENCE - n * RESEND_SECONDS)) for n in range(3)]
    assert len({header.id for _, header in carried if not header.reply_to}) == 1


def test_a_lost_request_is_sent_again():
    async def behaviour(network):
        runs = []
        serve(network, counting(runs))
        network.loses = lose_first(3, lambda header: not header.reply_to)
        await bus_of(network).peer(DOOR).ask(AskStatus(), PATIENCE)
        return len(runs), now()

    assert run(behaviour) == (1, 3 * RESEND_SECONDS)


def test_no_answer_is_a_deadline_error_at_the_deadline():
    async def behaviour(network):
        serve(network, counting([]))
        network.loses = lambda header: True
        with pytest.raises(DeadlineError, match="within 7 s"):
            await bus_of(network).peer(DOOR).ask(AskStatus(), 7.0)
        return now(), len(network.carried)

    assert run(behaviour) == (7.0, 3)


def test_an_answer_that_takes_long_is_asked_for_again_and_comes_once():
    async def behaviour(network):
        async def handle(request):
            await asyncio.sleep(20.0)
            return Done()

        serve(network, handle)
        asker = bus_of(network)
        answers = await asyncio.gather(*(asker.peer(DOOR).ask(AskStatus(), PATIENCE) for _ in range(5)))
        counts = Counter(bool(header.reply_to) for _, header in network.carried)
        return answers, now(), counts[False], counts[True]

    assert run(behaviour) == ([Done()] * 5, 20.0, 5 * 7, 5)


def test_deadlines_of_any_length_share_a_link():
    async def behaviour(network):
        serve(network, counting([]))
        network.loses = lambda header: True
        peer = bus_of(network).peer(DOOR)

        async def gives_up_after(seconds):
            with pytest.raises(DeadlineError):
                await peer.ask(AskStatus(), seconds)
            return now()

        return await asyncio.gather(*(gives_up_after(seconds) for seconds in (9.0, 0.5, 4.0, 0.25, 3.0)))

    assert run(behaviour) == [9.0, 0.5, 4.0, 0.25, 3.0]


def test_a_request_waits_for_a_server_that_starts_late():
    async def behaviour(network):
        asking = asyncio.create_task(bus_of(network).peer(DOOR).ask(AskStatus(), PATIENCE))
        await asyncio.sleep(10.0)
        serve(network, counting([]))
        return await asking, now()

    assert run(behaviour) == (scored(1), 10.0)


def test_each_bus_counts_its_own_requests():
    async def behaviour(network):
        serve(network, counting([]))
        buses = [bus_of(network, f"reward/{i}#b") for i in range(2)]
        for bus in (buses[0], buses[0], buses[1]):
            await bus.peer(DOOR).ask(AskStatus(), PATIENCE)
        return [(header.sender, header.id) for _, header in network.carried if header.id]

    assert run(behaviour) == [("reward/0#b", "0"), ("reward/0#b", "1"), ("reward/1#b", "0")]


def test_one_bus_counts_over_all_its_links():
    # A server knows a request by its sender and id, and a link that was forgotten may be made anew.
    async def behaviour(network):
        serve(network, counting([]))
        bus = bus_of(network)
        first = await bus.peer(DOOR).ask(AskStatus(), PATIENCE)
        bus.forget(DOOR)
        return first, await bus.peer(DOOR).ask(AskStatus(), PATIENCE)

    assert run(behaviour) == (scored(1), scored(2))


def test_forgetting_a_link_tells_all_who_wait_there_at_once():
    async def behaviour(network):
        serve(network, counting([]))
        network.loses = lambda header: True
        bus = bus_of(network)
        peer = bus.peer(DOOR)
        asking = [asyncio.create_task(peer.ask(AskStatus(), PATIENCE)) for _ in range(3)]
        streaming = asyncio.create_task(anext(peer.stream(fetch(), PATIENCE)))
        await asyncio.sleep(1.0)
        bus.forget(DOOR)
        bus.forget(DOOR)
        ends = await asyncio.gather(*asking, streaming, return_exceptions=True)
        return [type(end) for end in ends], now()

    assert run(behaviour) == ([DeadlineError] * 3 + [StreamBrokenError], 1.0)


def test_one_who_is_fenced_off_hears_a_refusal_of_its_own_kind():
    async def behaviour(network):
        async def handle(request):
            raise FencedError("another has your place")

        serve(network, handle)
        with pytest.raises(RefusedError) as raised:
            await bus_of(network).peer(DOOR).ask(AskStatus(), PATIENCE)
        return type(raised.value)

    assert run(behaviour) is FencedError


# --- streams


def test_a_stream_of_slow_parts_is_not_silent():
    async def behaviour(network):
        async def handle(request):
            for _ in range(5):
                await asyncio.sleep(0.9 * STREAM_SILENCE_SECONDS)
                yield part()

        serve(network, handle)
        network.loses = lambda header: header.kind == "keep_alive"
        parts = [got async for got in bus_of(network).peer(DOOR).stream(fetch(), PATIENCE)]
        return len(parts), now()

    assert run(behaviour) == (5, pytest.approx(4.5 * STREAM_SILENCE_SECONDS))


def test_a_stream_is_silent_some_time_after_its_last_part():
    async def behaviour(network):
        async def handle(request):
            for _ in range(3):
                await asyncio.sleep(4.0)
                yield part()
            await asyncio.sleep(PATIENCE)

        serve(network, handle)
        network.loses = lambda header: header.kind == "keep_alive"
        with pytest.raises(StreamBrokenError, match="stopped responding"):
            async for _ in bus_of(network).peer(DOOR).stream(fetch(), PATIENCE):
                pass
        return now()

    assert run(behaviour) == 12.0 + STREAM_SILENCE_SECONDS


def test_a_stream_that_is_kept_alive_ends_at_its_deadline():
    async def behaviour(network):
        async def handle(request):
            await asyncio.sleep(2 * PATIENCE)
            yield part()

        bus = serve(network, handle)
        with pytest.raises(DeadlineError, match="did not end in time"):
            await anext(bus_of(network).peer(DOOR).stream(fetch(), PATIENCE))
        ended = now()
        await asyncio.sleep(1.0)
        return ended, bus.server._calls

    assert run(behaviour) == (PATIENCE, {})


# --- events


def test_events_go_on_after_the_number_they_are_told():
    async def behaviour(network):
        got = []
        bus_of(network).subscribe(DOOR, lambda sequence, event: got.append((sequence, event.policy.version)))
        publisher = bus_of(network, "master/0#a").publisher(DOOR, first=1 << 32)
        for version in range(2):
            publisher.publish(PolicyPublished(policy=Policy(lineage=0, version=version, folder="f")))
        await asyncio.sleep(0)
        return got

    assert run(behaviour) == [((1 << 32) + 1, 0), ((1 << 32) + 2, 1)]
