"""Requests, streams and events over real sockets, with peers that lie, die, stall and flood."""

import asyncio
import contextlib
import math
import threading
from importlib.metadata import version

import msgpack
import numpy as np
import pytest
import zmq
from support.networks import find_free_port, keys, network

import protocols.network
from protocols import bus_errors as errors
from protocols import transport
from protocols.bus import Bus
from protocols.bus_errors import (
    BusError,
    BusyError,
    ConnectionLostError,
    DeadlineError,
    MalformedError,
    ProtocolVersionError,
    RefusedError,
    StreamBrokenError,
)
from protocols.codec import PROTOCOL_VERSION, Header, decode_body, decode_header, encode
from protocols.membership_messages import AskStatus, Shutdown, Status
from protocols.messages import AskPermits, Cancel, Credit, Done, Failure, Permits
from protocols.network import DRAIN, MAX_SUBSCRIPTION_BYTES, SHARED_BYTES
from protocols.transport import STREAM_CREDIT
from protocols.weight_messages import FetchWeights, WeightChunk

LOOPBACK = "tcp://127.0.0.1:*"
# Long enough for any machine: a test that needs it has failed.
PATIENCE = 20


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for is a plain value
            await asyncio.sleep(0.002)


def score(number=0):
    return AskStatus(since=number)


def scored(number):
    return Status(values={"score": number})


def fetch():
    return FetchWeights(lineage=0, version=1, first=0, base=None)


def chunk(number):
    return WeightChunk(number=number, data=np.zeros(1, np.uint8), difference=False)


def number_of(part):
    return part.number


class Net:
    """Buses that are closed at the end, and what their actors reported as crashes."""

    def __init__(self):
        self.crashes = []
        self.context = zmq.Context()
        self._buses = []

    def bus(self, identity):
        self._buses.append(Bus(identity, network()))
        return self._buses[-1]

    def serve(self, handle, address=LOOPBACK, identity="master/0#a"):
        bus = self.bus(identity)
        return bus, bus.serve(address, handle, self.crashes.append)

    def peer(self, address, identity="reward/0#b"):
        return self.bus(identity).peer(address)

    def raw(self, kind, address):
        """A socket that says what it likes, with the keys: bound for a ROUTER or an XPUB, else connected."""
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)
        if kind in (zmq.ROUTER, zmq.XPUB):
            socket.curve_server, socket.curve_secretkey = True, keys().generations[0].server.encode()
            socket.bind(address)
        else:
            keys().connect(socket, keys().generations[0])
            socket.connect(address)
        return socket

    async def close(self):
        for bus in self._buses:
            await bus.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def net():
    net = Net()
    yield net
    await net.close()


@pytest.fixture
def decoded(monkeypatch):
    """An entry for each message that any bus has received."""
    entries = []

    def decode(frames):
        entries.append(frames[0])
        return decode_header(frames)

    monkeypatch.setattr(transport, "decode_header", decode)
    return entries


def unused_address():
    return f"tcp://127.0.0.1:{find_free_port()}"


async def received(socket):
    await until(lambda: socket.poll(0))
    return socket.recv_multipart(zmq.DONTWAIT)


def frames(message, **fields):
    header = {"kind": message.kind, "sender": "reward/0#b", "token": b"t"} | fields
    return encode(Header(**header), message)


def of_another_version(program=""):
    return [msgpack.packb({"v": PROTOCOL_VERSION ^ 1, "of": "another kind", "program": program}), b""]


async def echo(request):
    return scored(request.message.since)


def numbers(count):
    """A handler that streams `count` parts."""

    async def handle(request):
        for number in range(count):
            yield chunk(number)

    return handle


# --- asking


async def test_an_answer_comes_back_to_the_one_who_asked(net):
    _, address = net.serve(echo)
    peers = [net.peer(address, f"reward/{i}#x") for i in range(3)]
    requests = [(peer.ask(score(10 * i + j), PATIENCE), 10 * i + j) for i, peer in enumerate(peers) for j in range(10)]
    answers = await asyncio.gather(*(answer for answer, _ in requests))
    assert answers == [scored(number) for _, number in requests]


async def test_the_handler_sees_who_asks_and_how_long_he_waits(net):
    seen = []

    async def handle(request):
        seen.append((request.sender, 0 < request.remaining <= PATIENCE))
        return Done()

    _, address = net.serve(handle)
    await net.peer(address, "evaluator/3#c").ask(AskStatus(), PATIENCE)
    assert seen == [("evaluator/3#c", True)]


async def test_no_message_waits_for_the_next_one_to_be_noticed(net, monkeypatch):
    # A message that arrives while the other side of the link is sending is not announced by libzmq again.
    monkeypatch.setattr(transport, "RESEND_SECONDS", 10 * PATIENCE)

    async def handle(request):
        await asyncio.sleep(0.001)
        return Done()

    _, address = net.serve(handle)

    async def ask_often(peer):
        for _ in range(50):
            await peer.ask(AskStatus(), PATIENCE)

    peers = [net.peer(address, f"reward/{i}#x") for i in range(3)]
    await asyncio.gather(*(ask_often(peer) for peer in peers for _ in range(6)))


async def test_a_request_sent_again_runs_the_handler_once(net, decoded, monkeypatch):
    monkeypatch.setattr(transport, "RESEND_SECONDS", 0.02)
    runs = []

    async def handle(request):
        runs.append(request)
        await until(lambda: len(decoded) > 2)
        return scored(len(runs))

    _, address = net.serve(handle)
    assert await net.peer(address).ask(score(), PATIENCE) == scored(1)
    assert len(runs) == 1


async def test_a_repeated_request_gets_the_first_answer(net):
    runs = []

    async def handle(request):
        runs.append(request)
        return scored(len(runs))

    bus, address = net.serve(handle)
    socket = net.raw(zmq.DEALER, address)
    for attempt in range(3):
        socket.send_multipart(frames(score(), id="5", attempt=attempt))
        answer = await received(socket)
        assert decode_header(answer).reply_to == "5"
        assert decode_body("status", answer) == scored(1)
    assert len(runs) == 1


async def test_the_same_id_of_another_sender_is_another_request(net):
    _, address = net.serve(echo)
    socket = net.raw(zmq.DEALER, address)
    for number, sender in enumerate(("reward/0#b", "reward/0#c")):
        socket.send_multipart(frames(score(number), id="5", sender=sender))
        assert decode_body("status", await received(socket)) == scored(number)


async def test_what_is_kept_for_a_request_belongs_to_its_token_alone(net):
    runs, release = [], asyncio.Event()

    async def handle(request):
        runs.append(request)
        await release.wait()
        return scored(len(runs))

    bus, address = net.serve(handle)
    owner, thief = net.raw(zmq.DEALER, address), net.raw(zmq.DEALER, address)
    owner.send_multipart(frames(score(), id="5"))
    await until(lambda: runs)
    thief.send_multipart(frames(Cancel(), reply_to="5", token=b"guessed"))
    thief.send_multipart(frames(score(), id="5", token=b"guessed"))
    await until(lambda: len(runs) == 2)  # not taken for a repeat of the other's, which would have its answer sent there
    assert not [call for call in bus.server._calls.values() if call.task.cancelling()]
    release.set()
    assert decode_body("status", await received(owner)) == decode_body("status", await received(thief)) == scored(2)
    owner.close()
    owner = net.raw(zmq.DEALER, address)  # the owner, connected again
    owner.send_multipart(frames(score(), id="5"))
    assert decode_body("status", await received(owner)) == scored(2)
    assert len(runs) == 2
    assert runs[0].sender == runs[1].sender and runs[0].owner != runs[1].owner


async def test_a_request_without_a_token_is_not_heard(net):
    _, address = net.serve(echo)
    socket = net.raw(zmq.DEALER, address)
    socket.send_multipart(frames(score(), id="5", token=b""))
    socket.send_multipart(frames(score(), id="6"))
    assert decode_header(await received(socket)).reply_to == "6"


async def test_an_asker_has_one_token_for_each_server_which_no_other_server_learns(net):
    seen = []

    async def handle(request):
        seen.append(request.token)
        return Done()

    (_, first), (_, second) = net.serve(handle), net.serve(handle)
    bus = net.bus("reward/0#b")
    for address in (first, second, first):
        await bus.peer(address).ask(AskStatus(), PATIENCE)
        bus.forget(address)
    assert seen[0] == seen[2] != seen[1] and len(seen[0]) == len(seen[1]) == 16


async def test_nobody_there_is_a_deadline_error(net):
    socket = net.raw(zmq.ROUTER, LOOPBACK)
    address = socket.last_endpoint.decode()
    with pytest.raises(DeadlineError, match="ask_status"):
        await net.peer(address).ask(AskStatus(), 0.2)
    with pytest.raises(DeadlineError):
        await net.peer(unused_address(), "reward/1#b").ask(AskStatus(), 0.05)


@pytest.mark.parametrize("error", errors._BY_CODE.values(), ids=lambda error: error.code)
async def test_a_typed_error_comes_back_as_itself(net, error):
    async def handle(request):
        raise error("the reason")

    _, address = net.serve(handle)
    with pytest.raises(BusError, match="^the reason$") as raised:
        await net.peer(address).ask(AskStatus(), PATIENCE)
    assert type(raised.value) is error
    assert not net.crashes


@pytest.mark.parametrize("text", ["boom", "x" * 100_000, "\udc80"], ids=["short", "long", "not Unicode"])
async def test_a_bug_of_the_handler_is_told_to_the_asker_and_to_the_actor(net, text):
    async def handle(request):
        raise ZeroDivisionError(text)

    _, address = net.serve(handle)
    with pytest.raises(BusError, match="ZeroDivisionError"):
        await net.peer(address).ask(AskStatus(), PATIENCE)
    await until(lambda: net.crashes)
    assert isinstance(net.crashes[0], ZeroDivisionError)


async def test_an_answer_that_cannot_travel_is_told_to_the_asker(net):
    async def handle(request):
        return Status(values={"x": object()})

    _, address = net.serve(handle)
    with pytest.raises(MalformedError, match="cannot be sent"):
        await net.peer(address).ask(AskStatus(), PATIENCE)


async def test_no_answer_at_all_is_a_bug_of_the_handler(net):
    async def handle(request):
        return None

    _, address = net.serve(handle)
    with pytest.raises(BusError):
        await net.peer(address).ask(AskStatus(), PATIENCE)
    await until(lambda: net.crashes)


async def test_a_cancelled_ask_leaves_the_link_usable_and_its_answer_is_dropped(net, decoded):
    release, arrived = asyncio.Event(), asyncio.Event()

    async def handle(request):
        if isinstance(request.message, AskPermits):
            arrived.set()
            await release.wait()
            return Permits(permits=())
        return Done()

    _, address = net.serve(handle)
    peer = net.peer(address)
    asking = asyncio.create_task(peer.ask(AskPermits(count=1), PATIENCE))
    await arrived.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    release.set()
    await until(lambda: len(decoded) == 2)  # the request, and the answer that nobody waits for
    assert await peer.ask(AskStatus(), PATIENCE) == Done()


async def test_a_server_restarted_on_its_port_is_asked_again(net, monkeypatch):
    monkeypatch.setattr(transport, "RESEND_SECONDS", 0.05)
    arrived = asyncio.Event()

    async def never(request):
        arrived.set()
        await asyncio.Event().wait()

    first, address = net.serve(never)
    asking = asyncio.create_task(net.peer(address).ask(score(7), PATIENCE))
    await arrived.wait()
    await first.close()
    net.serve(echo, address, identity="master/0#b")
    assert await asking == scored(7)


async def test_too_many_open_requests_of_one_peer_are_busy(net, monkeypatch):
    monkeypatch.setattr(transport, "MAX_PENDING_PER_PEER", 3)
    release, running = asyncio.Event(), []

    async def handle(request):
        running.append(request)
        await release.wait()
        return Done()

    _, address = net.serve(handle)
    peer = net.peer(address)
    open_ones = [asyncio.create_task(peer.ask(AskStatus(), PATIENCE)) for _ in range(3)]
    await until(lambda: len(running) == 3)
    with pytest.raises(BusyError, match="reward/0#b"):
        await peer.ask(AskStatus(), PATIENCE)
    release.set()
    assert await asyncio.gather(*open_ones) == [Done()] * 3
    assert await peer.ask(AskStatus(), PATIENCE) == Done()


async def test_a_request_cancelled_before_it_ran_leaves_nothing_behind(net):
    bus, address = net.serve(echo)
    socket = net.raw(zmq.DEALER, address)
    for id in range(50):
        socket.send_multipart(frames(score(), id=f"{id}"))
        socket.send_multipart(frames(Cancel(), reply_to=f"{id}"))
    socket.send_multipart(frames(score(), id="last"))
    while decode_header(await received(socket)).reply_to != "last":
        pass
    await until(lambda: not bus.server._calls and not bus.server._pending)


@pytest.mark.parametrize("connected", [True, False])
async def test_whoever_waits_on_a_link_that_is_closed_is_told(net, connected):
    socket = net.raw(zmq.ROUTER, LOOPBACK)
    address = socket.last_endpoint.decode()
    if not connected:
        address = unused_address()
    bus = net.bus("reward/0#b")
    peer = bus.peer(address)
    asking = asyncio.create_task(peer.ask(AskStatus(), PATIENCE))
    streaming = asyncio.create_task(anext(peer.stream(fetch(), PATIENCE)))
    if connected:
        await received(socket)
    await asyncio.sleep(0)
    bus.forget(address)
    with pytest.raises(DeadlineError, match="was closed"):
        await asking
    with pytest.raises(StreamBrokenError, match="was closed" if connected else "was closed|cannot be reached"):
        await streaming
    with pytest.raises(DeadlineError, match="was closed"):
        await peer.ask(AskStatus(), PATIENCE)


# --- peers that do not speak the protocol


async def test_a_flood_of_garbage_reaches_no_handler_and_a_proper_request_still_gets_its_answer(net):
    runs = []

    async def handle(request):
        runs.append(request.message)
        return await echo(request)

    _, address = net.serve(handle)
    socket = net.raw(zmq.DEALER, address)
    valid = frames(score(1), id="1")
    garbage = [
        [b""],
        [b"", b"", b""],
        [b"\xff" * 100, b"x"],
        [b"\x81\xa1v" + b"\x91" * 900 + b"\x01", b"x"],
        [b"x" * 10_000, valid[1]],
        [valid[0]],
        frames(score(1)),
    ]
    for message in 100 * garbage + [[b""] * 5000]:
        socket.send_multipart(message)
    refused = [[valid[0], b"\xc1"], frames(score(1), id="2", kind="no_such_kind")]
    for message in refused:
        socket.send_multipart(message)
        assert decode_body("failure", await received(socket)).code == MalformedError.code
    assert await net.peer(address).ask(score(5), PATIENCE) == scored(5)
    assert runs == [score(5)]
    assert not net.crashes


async def test_an_asker_of_another_version_is_told_in_one_sentence(net):
    _, address = net.serve(echo)
    socket = net.raw(zmq.DEALER, address)
    socket.send_multipart(of_another_version())
    answer = await received(socket)
    failure = decode_body("failure", answer)
    assert failure.code == ProtocolVersionError.code
    assert "install the same version" in failure.text and "\n" not in failure.text
    # The asker cannot read that header, but it reads from it which version of the package has sent it.
    assert msgpack.unpackb(answer[0])["program"] == version("areal-as-actors")


async def test_an_asker_whose_version_is_not_understood_learns_it_at_once(net):
    socket = net.raw(zmq.ROUTER, LOOPBACK)
    peer = net.peer(socket.last_endpoint.decode())
    asking = asyncio.create_task(peer.ask(AskStatus(), PATIENCE))
    route, *_ = await received(socket)
    refusal = Failure(code=ProtocolVersionError.code, text="this actor speaks another")
    socket.send_multipart([route, *frames(refusal)])  # its header cannot be read, so the answer names no request
    with pytest.raises(ProtocolVersionError, match="another"):
        await asking


async def test_a_server_of_another_version_is_noticed_by_the_asker(net):
    socket = net.raw(zmq.ROUTER, LOOPBACK)
    peer = net.peer(socket.last_endpoint.decode())
    asking = asyncio.create_task(peer.ask(AskStatus(), PATIENCE))
    streaming = asyncio.create_task(anext(peer.stream(fetch(), PATIENCE)))
    route, *_ = await received(socket)
    socket.send_multipart([route, *of_another_version("0.0.3")])
    for task in (asking, streaming):
        with pytest.raises(ProtocolVersionError, match=r"the peer has version 0\.0\.3 of the project, older than this"):
            await task


async def test_garbage_from_a_server_harms_nobody(net):
    socket = net.raw(zmq.ROUTER, LOOPBACK)
    peer = net.peer(socket.last_endpoint.decode())
    asking = asyncio.create_task(peer.ask(AskStatus(), PATIENCE))
    route, *request = await received(socket)
    id = decode_header(request).id
    for message in ([b"\xff", b""], [b""], [b"\x80", b"\x80"], frames(Done(), reply_to="other")):
        socket.send_multipart([route, *message])
    socket.send_multipart([route, *frames(Done(), reply_to=id)])
    assert await asking == Done()
    assert not net.crashes


async def test_a_flood_does_not_starve_the_other_tasks(net, decoded):
    _, address = net.serve(echo)
    count, seen = 50_000, []

    async def tick():
        while len(decoded) < count:
            seen.append(len(decoded))
            await asyncio.sleep(0)

    socket = net.raw(zmq.DEALER, address)
    flood = threading.Thread(target=lambda: [socket.send_multipart([b"x", b"y"]) for _ in range(count)])
    flood.start()
    async with asyncio.timeout(PATIENCE):
        await tick()
    flood.join()
    assert max(end - start for start, end in zip(seen, seen[1:], strict=False)) <= DRAIN
    assert len(seen) >= count // DRAIN


# --- streams


async def test_a_stream_arrives_whole_and_in_order(net):
    _, address = net.serve(numbers(5 * STREAM_CREDIT + 1))
    got = [number_of(part) async for part in net.peer(address).stream(fetch(), PATIENCE)]
    assert got == list(range(5 * STREAM_CREDIT + 1))


async def test_many_streams_share_a_link(net):
    _, address = net.serve(numbers(2 * STREAM_CREDIT))
    peer = net.peer(address)

    async def take():
        return [number_of(part) async for part in peer.stream(fetch(), PATIENCE)]

    assert await asyncio.gather(*(take() for _ in range(10))) == [list(range(2 * STREAM_CREDIT))] * 10


async def test_an_empty_stream_ends(net):
    _, address = net.serve(numbers(0))
    assert [part async for part in net.peer(address).stream(fetch(), PATIENCE)] == []


async def test_a_slow_consumer_holds_the_server_back(net):
    parts, taken = 0, 0

    async def handle(request):
        nonlocal parts
        if isinstance(request.message, AskStatus):
            return
        for number in range(6 * STREAM_CREDIT):
            yield chunk(number)
            parts += 1
            assert outstanding() <= STREAM_CREDIT

    def outstanding():
        return parts - taken

    _, address = net.serve(handle)
    peer = net.peer(address)
    async for _ in peer.stream(fetch(), PATIENCE):
        if taken % STREAM_CREDIT == 0:
            await until(lambda: outstanding() > STREAM_CREDIT // 2)
            for _ in range(5):  # time enough for what should not come
                assert [part async for part in peer.stream(score(), PATIENCE)] == []
        taken += 1
    assert parts == taken == 6 * STREAM_CREDIT
    assert not net.crashes


async def test_an_asker_cannot_grant_itself_more_parts_than_anybody_else(net):
    produced = 0

    async def endless(request):
        nonlocal produced
        while True:
            produced += 1
            yield chunk(produced)

    _, address = net.serve(endless)
    socket = net.raw(zmq.DEALER, address)
    socket.send_multipart(frames(fetch(), id="1"))
    await until(lambda: produced > STREAM_CREDIT)
    socket.send_multipart(frames(Credit(parts=1_000_000), reply_to="1"))
    await until(lambda: produced > 2 * STREAM_CREDIT)
    for _ in range(20):  # time enough for what should not come
        await asyncio.sleep(0.01)
    assert produced == 2 * STREAM_CREDIT + 1


async def test_closing_a_stream_cancels_the_handler(net):
    ended = []

    async def handle(request):
        try:
            for number in range(10):
                yield chunk(number)
            await asyncio.Event().wait()
        finally:
            ended.append(request)

    bus, address = net.serve(handle)
    peer = net.peer(address)
    async with contextlib.aclosing(peer.stream(fetch(), PATIENCE)) as parts:
        assert number_of(await anext(parts)) == 0
    await until(lambda: ended and not bus.server._calls)
    assert not peer._waiting and not net.crashes


async def test_a_server_that_is_silent_in_the_middle_breaks_the_stream(net, monkeypatch):
    monkeypatch.setattr(transport, "STREAM_SILENCE_SECONDS", 0.5)
    socket = net.raw(zmq.ROUTER, LOOPBACK)
    taking = asyncio.create_task(collect(net.peer(socket.last_endpoint.decode()).stream(fetch(), PATIENCE)))
    route, *request = await received(socket)
    socket.send_multipart([route, *frames(chunk(0), reply_to=decode_header(request).id, part=0)])
    with pytest.raises(StreamBrokenError, match="stopped responding"):
        await taking


async def test_a_server_that_dies_in_the_middle_breaks_the_stream_at_once(net, monkeypatch):
    monkeypatch.setattr(transport, "STREAM_SILENCE_SECONDS", math.inf)

    async def handle(request):
        yield chunk(0)
        await asyncio.Event().wait()

    bus, address = net.serve(handle)
    peer = net.peer(address)
    parts = peer.stream(fetch(), PATIENCE)
    assert number_of(await anext(parts)) == 0
    await bus.close()
    with pytest.raises(ConnectionLostError, match="was lost"):
        await anext(parts)
    assert not peer._waiting


async def test_a_server_that_refuses_connections_breaks_the_stream_at_once_and_a_request_waits_for_it(net, monkeypatch):
    monkeypatch.setattr(transport, "STREAM_SILENCE_SECONDS", math.inf)
    address = unused_address()
    peer = net.peer(address)
    asking = asyncio.create_task(peer.ask(score(), PATIENCE))
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        await anext(peer.stream(fetch(), PATIENCE))

    async def handle(request):
        return Done()

    net.serve(handle, address)
    assert isinstance(await asking, Done)


async def test_a_server_with_nothing_to_say_yet_keeps_the_stream_alive(net, monkeypatch):
    monkeypatch.setattr(transport, "KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(transport, "STREAM_SILENCE_SECONDS", 2.0)
    silent = transport.STREAM_SILENCE_SECONDS * 1.5

    async def handle(request):
        await asyncio.sleep(silent)
        yield chunk(0)

    _, address = net.serve(handle)
    assert [number_of(part) async for part in net.peer(address).stream(fetch(), PATIENCE)] == [0]


async def test_a_stream_that_does_not_end_in_time_is_a_deadline_error(net):
    async def handle(request):
        yield chunk(0)
        await asyncio.Event().wait()

    bus, address = net.serve(handle)
    parts = net.peer(address).stream(fetch(), 2.0)
    await anext(parts)
    with pytest.raises(DeadlineError, match="did not end in time"):
        await anext(parts)
    await until(lambda: not bus.server._calls)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_part_breaks_the_stream(net, lost):
    socket = net.raw(zmq.ROUTER, LOOPBACK)
    parts = net.peer(socket.last_endpoint.decode()).stream(fetch(), PATIENCE)
    taking = asyncio.create_task(collect(parts))
    route, *request = await received(socket)
    id = decode_header(request).id
    for part, message in enumerate((chunk(0), chunk(1), chunk(2), transport.StreamEnd())):
        if part != lost:
            socket.send_multipart([route, *frames(message, reply_to=id, part=part)])
    with pytest.raises(StreamBrokenError, match=f"part {lost} "):
        await taking
    _, *cancel = await received(socket)
    assert (decode_header(cancel).kind, decode_header(cancel).reply_to) == (Cancel.kind, id)


async def collect(parts):
    return [part async for part in parts]


async def test_an_asker_that_vanishes_ends_the_handler(net, monkeypatch):
    monkeypatch.setattr(transport, "KEEP_ALIVE_SECONDS", 0.02)
    ended = []

    async def handle(request):
        try:
            while True:
                yield chunk(0)
        finally:
            ended.append(request)

    bus, address = net.serve(handle)
    socket = net.raw(zmq.DEALER, address)
    socket.send_multipart(frames(fetch(), id="1"))
    await received(socket)
    socket.close()
    await until(lambda: ended and not bus.server._calls)
    assert not net.crashes


@pytest.mark.parametrize("error", [RefusedError("no"), ZeroDivisionError("bug")], ids=["typed", "bug"])
async def test_an_error_in_a_stream_comes_after_its_parts(net, error):
    async def handle(request):
        yield chunk(0)
        yield chunk(1)
        raise error

    _, address = net.serve(handle)
    got = []
    with pytest.raises(RefusedError if isinstance(error, RefusedError) else BusError):
        async for part in net.peer(address).stream(fetch(), PATIENCE):
            got.append(number_of(part))
    assert got == [0, 1]
    assert net.crashes == ([] if isinstance(error, RefusedError) else [error])


async def test_a_stream_goes_on_under_the_name_it_was_asked_with(net):
    # An actor learns its index from the master: credit for a stream that is older must still be its own.
    _, address = net.serve(numbers(3 * STREAM_CREDIT))
    bus = net.bus("generator/?#b")
    got = []
    async for part in bus.peer(address).stream(fetch(), PATIENCE):
        bus.identity.name = "generator/4#b"
        got.append(number_of(part))
    assert got == list(range(3 * STREAM_CREDIT))


# --- events


async def test_events_come_without_a_gap_once_subscribed(net):
    got = []
    publisher = net.bus("master/0#a").publisher(LOOPBACK)
    address = publisher.address
    net.bus("reward/0#b").subscribe(address, lambda sequence, event: got.append((sequence, event.reason)))
    while not got:  # a subscription takes effect some time after it was made
        publisher.publish(Shutdown(ok=True, reason=f"{publisher.sequence + 1}"))
        await asyncio.sleep(0.005)
    for _ in range(2000):
        publisher.publish(Shutdown(ok=True, reason=f"{publisher.sequence + 1}"))
    await until(lambda: got[-1][0] == publisher.sequence)
    first = got[0][0]
    assert got == [(sequence, f"{sequence}") for sequence in range(first, publisher.sequence + 1)]


async def test_garbage_among_events_is_not_delivered(net):
    got = []
    socket = net.raw(zmq.XPUB, LOOPBACK)
    net.bus("reward/0#b").subscribe(socket.last_endpoint.decode(), lambda sequence, event: got.append(sequence))
    assert await received(socket) == [b"\x01"]  # it subscribes to everything
    socket.send_multipart([b"garbage", b""])
    socket.send_multipart(frames(Shutdown(ok=True, reason=""), part=2))
    await until(lambda: got)
    assert got == [2]
    assert not net.crashes


async def test_a_publisher_that_comes_back_is_heard_again(net):
    got = []
    first = net.bus("master/0#a")
    address = first.publisher(LOOPBACK).address
    net.bus("reward/0#b").subscribe(address, lambda sequence, event: got.append(event.reason))
    await first.close()
    again = net.bus("master/0#b").publisher(address)
    while not got:
        again.publish(Shutdown(ok=True, reason="again"))
        await asyncio.sleep(0.02)
    assert set(got) == {"again"}


async def test_whatever_else_a_subscriber_says_harms_nobody(net):
    got = []
    publisher = net.bus("master/0#a").publisher(LOOPBACK)
    net.bus("reward/0#b").subscribe(publisher.address, lambda sequence, event: got.append(sequence))
    subscriber, picky = net.raw(zmq.XSUB, publisher.address), net.raw(zmq.SUB, publisher.address)
    picky.subscribe(b"topic 1")
    for i in range(500):
        subscriber.send_multipart([b"\x01topic %d" % i, b"more"])
        subscriber.send(b"no subscription")
    subscriber.send(b"\x01" + bytes(2 * MAX_SUBSCRIPTION_BYTES))  # ends the connection
    while not got or got[-1] < 20:
        publisher.publish(Shutdown(ok=True, reason=""))
        await asyncio.sleep(0.01)
    assert got == list(range(got[0], got[-1] + 1))
    assert not subscriber.poll(0) and not picky.poll(0)


async def test_events_are_sent_by_an_xpub_and_received_by_a_sub(net):
    publisher = net.bus("master/0#a").publisher(LOOPBACK)
    subscriber = net.bus("reward/0#b").subscribe(publisher.address, lambda sequence, event: None)
    assert (publisher._link._socket.type, subscriber._link._socket.type) == (zmq.XPUB, zmq.SUB)


async def test_who_reads_too_slowly_misses_events_and_sees_the_gap_and_the_others_miss_none(net, monkeypatch):
    monkeypatch.setattr(protocols.network, "HIGH_WATER_MARK", 10)
    events, got = 3000, []
    publisher = net.bus("master/0#a").publisher(LOOPBACK)
    slow = net.raw(zmq.SUB, publisher.address)
    slow.rcvhwm = 10
    slow.subscribe(b"")
    net.bus("reward/0#b").subscribe(publisher.address, lambda sequence, event: got.append(sequence))
    while not (got and slow.poll(0)):
        publisher.publish(Shutdown(ok=True, reason=""))
        await asyncio.sleep(0.01)
    for _ in range(events):
        publisher.publish(Shutdown(ok=True, reason="x" * 4000))
        await until(lambda: got[-1] == publisher.sequence)
    parts = []
    while slow.poll(100):
        parts.append(decode_header(slow.recv_multipart()).part)
    assert got == list(range(got[0], publisher.sequence + 1))
    assert parts == sorted(parts) and len(parts) < events


async def test_an_event_handler_that_fails_is_a_crash_of_its_actor(net):
    def fail(sequence, event):
        raise ZeroDivisionError

    publisher = net.bus("master/0#a").publisher(LOOPBACK)
    address = publisher.address
    bus, _ = net.serve(echo, identity="reward/0#b")
    bus.subscribe(address, fail)
    while not net.crashes:
        publisher.publish(Shutdown(ok=True, reason=""))
        await asyncio.sleep(0.005)
    assert isinstance(net.crashes[0], ZeroDivisionError)


# --- the end


async def test_closing_a_bus_ends_its_tasks_and_frees_its_port(net):
    old_tasks = asyncio.all_tasks()
    ended = asyncio.Event()

    async def handle(request):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    bus, address = net.serve(handle)
    asker = net.bus("reward/0#b")
    asking = asyncio.create_task(asker.peer(address).ask(AskStatus(), PATIENCE))
    await until(lambda: bus.server._calls)
    await bus.close()
    await asker.close()
    assert ended.is_set()
    with pytest.raises(DeadlineError):
        await asking
    assert asyncio.all_tasks() == old_tasks
    net.serve(echo, address)


async def test_an_address_in_use_is_said_so(net):
    _, address = net.serve(echo)
    with pytest.raises(OSError, match="Address already in use"):
        net.serve(echo, address)


def test_a_failure_of_an_unknown_code_is_still_a_bus_error():
    assert type(transport.from_code("of a later version", "x")) is BusError
    assert Failure(code="x", text="y").kind == "failure"


async def test_a_large_array_arrives_whole_and_cannot_be_changed(net):
    array = np.arange(SHARED_BYTES) % 251
    array = array.astype(np.uint8)

    async def handle(request):
        return request.message.model_copy(update={"data": request.message.data[::-1]})

    _, address = net.serve(handle)
    answer = await net.peer(address).ask(WeightChunk(number=0, data=array, difference=False), PATIENCE)
    assert np.array_equal(answer.data, array[::-1])
    assert not answer.data.flags.writeable


async def test_who_is_asked_until_it_answers_is_asked_no_longer_than_that_can_help():
    errors_to_come = [BusyError("later"), DeadlineError("silent"), RefusedError("never")]

    async def ask():
        if errors_to_come:
            raise errors_to_come.pop(0)
        return "the answer"

    with pytest.raises(DeadlineError, match="silent"):
        await transport.ask_until(ask, lambda error: isinstance(error, BusyError), pause=0)
    with pytest.raises(RefusedError, match="never"):
        await transport.ask_until(ask, pause=10 * PATIENCE, seconds=PATIENCE)
    errors_to_come += [BusyError("later"), RefusedError("never")]
    assert await transport.ask_until(ask, pause=0) == "the answer"
