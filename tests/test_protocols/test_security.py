"""Links with keys: who is let in, who is not, what that looks like from outside, and how keys are made and changed."""

import asyncio
import contextlib
import socket as sockets
import stat

import pytest
import structlog
import zmq

from protocols import network, security
from protocols.bus import Bus
from protocols.bus_errors import DeadlineError
from protocols.codec import Header, encode
from protocols.membership_messages import AskStatus, Leave, Shutdown, Status
from protocols.messages import Completion, Done, Score
from protocols.network import SHARED_BYTES, ZmqNetwork
from protocols.security import Approach, KeyGeneration, Keys, KeysError, Refusals, make_keys, retire_keys, rotate_keys

LOOPBACK = "tcp://127.0.0.1:*"
# Long enough for any machine: a test that needs it has failed.
PATIENCE = 20
# Time enough for what should not come.
A_WHILE = 1.0


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
async def bus():
    buses = []

    def make(identity, keys):
        buses.append(Bus(identity, ZmqNetwork(Keys(keys))))
        return buses[-1]

    yield make
    for first in buses:
        await first.close()


@pytest.fixture
def serve(bus, folder):
    """A server with the keys: its network and its address."""

    def start(keys=folder, address=LOOPBACK):
        async def handle(request):
            runs.append(request)
            return Done()

        runs = []
        server = bus("master/0#a", keys)
        return server.network, server.serve(address, handle, pytest.fail), runs

    return start


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for is a plain value
            await asyncio.sleep(0.005)


def other_keys(tmp_path):
    make_keys(tmp_path / "other")
    return tmp_path / "other"


# --- who is let in


async def test_holders_of_the_same_keys_talk(bus, serve, folder):
    _, address, _ = serve()
    assert await bus("reward/0#b", folder).peer(address).ask(AskStatus(), PATIENCE) == Done()


async def test_events_reach_holders_of_the_keys_alone(bus, folder, tmp_path):
    publisher = bus("master/0#a", folder).publisher(LOOPBACK)
    got = {"holder": [], "stranger": []}
    for name, keys in (("holder", folder), ("stranger", other_keys(tmp_path))):
        bus(name, keys).subscribe(publisher.address, lambda sequence, event, name=name: got[name].append(sequence))
    with zmq.Context() as context, context.socket(zmq.SUB) as nobody:
        nobody.linger = 0
        nobody.subscribe(b"")
        nobody.connect(publisher.address)
        while len(got["holder"]) < 20:
            publisher.publish(Shutdown(ok=True, reason=""))
            await asyncio.sleep(0.01)
        assert not got["stranger"] and not nobody.poll(0)


async def test_one_without_the_keys_gets_nothing_and_reaches_nobody(bus, serve, tmp_path):
    network, address, runs = serve()
    with pytest.raises(DeadlineError):
        await bus("reward/0#b", other_keys(tmp_path)).peer(address).ask(AskStatus(), A_WHILE)
    with zmq.Context() as context, context.socket(zmq.DEALER) as nobody:
        nobody.linger = 0
        nobody.connect(address)
        nobody.send_multipart(encode(ASKED, AskStatus()))
        await asyncio.sleep(A_WHILE)
        assert not nobody.poll(0)
    assert not runs
    assert network._refusals.counts["wrong handshake protocol"] >= 2


async def test_knowing_whom_to_expect_there_is_not_enough(bus, serve, folder, tmp_path):
    # One who has learned the server's public key, but not the secret of those who connect.
    network, address, runs = serve()
    known_values = Keys(folder).generations[0]
    stranger = tmp_path / "stranger"
    make_keys(stranger)
    security._write(
        stranger / security.FILE_NAME, [KeyGeneration.make().model_copy(update={"server": known_values.server})]
    )
    with pytest.raises(DeadlineError):
        await bus("reward/0#b", stranger).peer(address).ask(AskStatus(), A_WHILE)
    assert not runs
    assert network._refusals.counts["unknown key"] >= 1


async def test_a_server_without_the_keys_is_told_nothing(bus, serve, folder, tmp_path):
    _, address, runs = serve(other_keys(tmp_path))
    with pytest.raises(DeadlineError):
        await bus("reward/0#b", folder).peer(address).ask(AskStatus(), A_WHILE)
    assert not runs
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(DeadlineError):
            await bus("reward/1#b", folder).peer(f"tcp://127.0.0.1:{port}").ask(AskStatus(), A_WHILE)
        assert not listener.poll(0)


async def test_what_was_overheard_can_be_neither_read_nor_said_again(bus, serve, folder):
    server, address, runs = serve()
    overheard, carrying = [], []

    async def carry(reader, writer):
        carrying.append(asyncio.current_task())
        there, back = await asyncio.open_connection("127.0.0.1", port_of(address))

        async def copy(source, target, note):
            while part := await source.read(65536):
                note(part)
                target.write(part)
            target.close()

        await asyncio.gather(copy(reader, back, overheard.append), copy(there, writer, len))

    between = await asyncio.start_server(carry, "127.0.0.1", 0)
    secret = Leave(reason="a very particular reason")
    asker = bus("reward/0#b", folder)
    await asker.peer(f"tcp://127.0.0.1:{between.sockets[0].getsockname()[1]}").ask(secret, PATIENCE)
    await asker.close()
    between.close()
    await asyncio.gather(*carrying)
    words = b"".join(overheard)
    assert b"particular" not in words and b"leave" not in words
    with raw(address) as peer:
        peer.sendall(words)
        await hears_until_cut_off(peer)
    await until(lambda: server._refusals.counts["wrong handshake protocol"] == 1)
    assert len(runs) == 1


async def test_nobody_is_let_in_where_nobody_keeps_the_door(bus, serve, folder):
    server, address, runs = serve()
    server._doorkeeping.close()
    with pytest.raises(DeadlineError):
        await bus("reward/0#b", folder).peer(address).ask(AskStatus(), A_WHILE)
    assert not runs


async def test_who_connects_before_the_server_is_there_is_let_in_later(bus, serve, folder, free_port):
    address = f"tcp://127.0.0.1:{free_port}"
    asking = asyncio.create_task(bus("reward/0#b", folder).peer(address).ask(AskStatus(), PATIENCE))
    await asyncio.sleep(0.3)
    serve(address=address)
    assert await asking == Done()


async def test_a_large_array_arrives_whole(bus, folder):
    async def handle(request):
        return Status(values={"length": len(request.message.completions[0].completions[0])})

    address = bus("master/0#a", folder).serve(LOOPBACK, handle, pytest.fail)
    text = "x" * (4 * SHARED_BYTES)
    first = Completion(job=0, function="f", prompt="p", completions=(text,), row=0)
    message = Score(flow=0, rows=({},), completions=(first,))
    assert await bus("reward/0#b", folder).peer(address).ask(message, PATIENCE) == Status(values={"length": len(text)})


# --- keys that change


async def test_old_and_new_actors_talk_in_both_directions_while_keys_rotate(bus, serve, folder):
    _, old_server, _ = serve()
    old = bus("reward/0#b", folder)
    assert await old.peer(old_server).ask(AskStatus(), PATIENCE) == Done()
    rotate_keys(folder)
    _, new_server, _ = serve()
    new = bus("reward/1#b", folder)
    assert await new.peer(new_server).ask(AskStatus(), PATIENCE) == Done()
    async with contextlib.aclosing(new.peer(old_server).stream(AskStatus(), PATIENCE)) as parts:
        assert await anext(parts) == Done()  # a handshake with other keys first is no lost connection
    assert await old.peer(new_server).ask(AskStatus(), PATIENCE) == Done()


async def test_an_attempt_that_the_change_of_keys_ends_is_no_lost_connection(folder, monkeypatch):
    ended, events, lost = Approach._ended, [], []
    monkeypatch.setattr(Approach, "_ended", lambda self, event: (ended(self, event), events.append(event)))
    network = ZmqNetwork(Keys(folder))
    with contextlib.closing(network), sockets.create_server(("127.0.0.1", 0), backlog=0) as listener:
        listener.setblocking(False)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        link = network.connect(address, pytest.fail, pytest.fail, lambda: lost.append(events[:]))
        first, _ = await asyncio.get_running_loop().sock_accept(listener)
        with raw(address):  # fills the queue, so that the next attempt is still going on when other keys are tried
            first.close()
            await until(lambda: zmq.Event.CLOSED in events)
        assert zmq.Event.HANDSHAKE_FAILED_NO_DETAIL in events and not lost
        await link.close()


async def test_a_link_outlives_a_server_that_comes_back_with_new_keys(bus, serve, folder):
    async def handle(request):
        return Done()

    first = bus("master/0#a", folder)
    address = first.serve(LOOPBACK, handle, pytest.fail)
    peer = bus("reward/0#b", folder).peer(address)
    assert await peer.ask(AskStatus(), PATIENCE) == Done()
    await first.close()
    rotate_keys(folder)
    serve(address=address)
    assert await peer.ask(AskStatus(), PATIENCE) == Done()


async def test_a_retired_key_lets_nobody_in(bus, serve, folder, tmp_path):
    stored = tmp_path / "kept"
    stored.mkdir()
    security._write(stored / security.FILE_NAME, list(Keys(folder).generations))
    server, address, runs = serve()
    rotate_keys(folder)
    retire_keys(folder)
    with pytest.raises(DeadlineError):
        await bus("reward/0#b", stored).peer(address).ask(AskStatus(), A_WHILE)
    assert not runs
    assert server._refusals.counts["unknown key"] >= 1


def test_keys_that_cannot_be_read_any_more_stay_as_they_were(folder):
    keys = Keys(folder)
    value_before = keys.generations
    file = folder / security.FILE_NAME
    file.write_text("half a f")
    assert keys.generations == value_before
    file.unlink()
    assert keys.generations == value_before


# --- what never gets so far


def raw(address):
    return sockets.create_connection(("127.0.0.1", port_of(address)), timeout=PATIENCE)


def port_of(address):
    return int(address.rpartition(":")[2])


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
NO_SECURITY = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)


async def hears_until_cut_off(peer):
    """All that the other side says before it closes the connection."""
    peer.setblocking(False)
    heard = b""
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionResetError):
            while part := await asyncio.get_running_loop().sock_recv(peer, 4096):
                heard += part
    return heard


async def test_one_who_never_finishes_his_handshake_is_cut_off_and_counted(serve, monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_MS", 200)
    server, address, _ = serve()
    with raw(address) as peer:
        peer.sendall(GREETING[:4])
        await hears_until_cut_off(peer)
    await until(lambda: server._refusals.counts["handshake aborted or too slow"] == 1)


def posted(frames):
    """An HTTP request, as a web page can have a browser send it to any port, that is a message of ZMTP 1.0. There a
    frame is its size (one byte), flags (one byte) and a body; lines of the request are frames by chance."""
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1:5555\r\nOrigin: https://example.org\r\nContent-Length: %d\r\n\r\n"
    message = b"".join(bytes([len(frame) + 1, i + 1 < len(frames)]) + frame for i, frame in enumerate(frames))
    length = 1000  # any length of the same number of digits gives the same alignment
    head = head % length
    at = 0
    while at < len(head):
        at += 1 + head[at]
    # The rest of the last frame by chance; an empty last part ends the message of which it is one; then the forged one.
    return head + bytes(at - len(head)) + b"\x01\x00" + message + bytes(64)


ASKED = Header(AskStatus.kind, "monitor/0#web", id="1", remaining_ms=9000, token=b"t")


async def test_a_web_page_that_posts_a_form_to_the_port_is_not_heard(serve):
    _, address, runs = serve()
    with raw(address) as peer:
        peer.sendall(posted(encode(ASKED, AskStatus())))
        await hears_until_cut_off(peer)
    assert not runs


async def test_a_socket_that_takes_no_part_in_security_hears_the_request_of_that_web_page():
    """So the test above would notice."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with raw(f"tcp://127.0.0.1:{port}") as peer:
            peer.sendall(posted(encode(ASKED, AskStatus())))
            heard = []
            while heard[1:] != encode(ASKED, AskStatus()):
                await until(lambda: socket.poll(0))
                heard = socket.recv_multipart()


async def test_one_who_wants_no_encryption_hears_a_greeting_and_no_more(serve):
    server, address, _ = serve()
    with raw(address) as peer:
        peer.sendall(
            NO_SECURITY + b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
        )
        heard = await hears_until_cut_off(peer)
    assert len(heard) <= 64
    await until(lambda: server._refusals.counts.total() == 1)


async def test_one_who_sends_too_large_a_frame_is_cut_off_and_the_others_are_not(bus, serve, folder, monkeypatch):
    monkeypatch.setattr(network, "MAX_FRAME_BYTES", 10_000)
    server, address, runs = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        Keys(folder).connect(stranger, Keys(folder).generations[0])
        stranger.connect(address)
        stranger.send_multipart([b"x", bytes(10_001)])
        assert await bus("reward/0#b", folder).peer(address).ask(AskStatus(), PATIENCE) == Done()
        stranger.send_multipart([b"x", b"y"])
        await asyncio.sleep(0)
    assert len(runs) == 1


def test_one_who_keeps_on_trying_is_counted_each_time_and_logged_once_a_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(security.time, "monotonic", lambda: now[0])
    refusals = Refusals()
    with structlog.testing.capture_logs() as logs:
        for tenth in range(30):
            now[0] = tenth / 10
            refusals.add("10.0.0.1", "unknown key")
            refusals.add("10.0.0.2", "unknown key")
    assert refusals.counts["unknown key"] == 60
    assert [line["address"] for line in logs] == ["10.0.0.1", "10.0.0.2"] * 3


def test_addresses_without_end_take_no_memory_without_end():
    refusals = Refusals()
    with structlog.testing.capture_logs():
        for number in range(3 * security.ADDRESSES_KEPT):
            refusals.add(f"{number}", "unknown key")
    assert len(refusals._quiet) <= security.ADDRESSES_KEPT


# --- the folder


def test_a_folder_of_keys_is_for_its_owner_alone(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / security.FILE_NAME).stat().st_mode) == 0o600
    rotate_keys(folder)
    assert stat.S_IMODE((folder / security.FILE_NAME).stat().st_mode) == 0o600


def test_keys_that_others_can_read_are_refused(folder):
    (folder / security.FILE_NAME).chmod(0o640)
    with pytest.raises(KeysError, match="chmod 600"):
        Keys(folder)


def test_keys_of_another_user_are_read_by_the_group_that_has_them_and_refused_if_everybody_has(folder, monkeypatch):
    monkeypatch.setattr(security.os, "geteuid", lambda: (folder / security.FILE_NAME).stat().st_uid + 1)
    (folder / security.FILE_NAME).chmod(0o440)
    assert Keys(folder).generations
    (folder / security.FILE_NAME).chmod(0o444)
    with pytest.raises(KeysError, match="Other users"):
        Keys(folder)


def test_keys_are_not_made_over_others(folder):
    with pytest.raises(KeysError, match="--rotate"):
        make_keys(folder)


def test_no_keys_are_told_how_to_be_made(tmp_path):
    for change in (Keys, rotate_keys, retire_keys):
        with pytest.raises(KeysError, match=f"areal keys {tmp_path}"):
            change(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '[{"server": "x", "client": "y"}]', '[{"server": "%s", "client": "%s"}]']
)
def test_what_is_not_keys_is_said_to_be_none(folder, text):
    (folder / security.FILE_NAME).write_text(text.replace("%s", "~" * 40))
    with pytest.raises(KeysError, match="does not hold keys"):
        Keys(folder)


def test_rotating_adds_and_retiring_leaves_the_newest(folder):
    first = Keys(folder).generations
    rotate_keys(folder)
    pair = Keys(folder).generations
    assert pair[1:] == first
    retire_keys(folder)
    assert Keys(folder).generations == pair[:1]


# --- addresses


async def test_a_port_of_a_range_is_taken_and_a_full_range_said_so(bus, folder, free_port):
    async def handle(request):
        return Done()

    range_of_one = f"tcp://127.0.0.1:{free_port}-{free_port}"
    assert port_of(bus("master/0#a", folder).serve(range_of_one, handle, pytest.fail)) == free_port
    with pytest.raises(OSError, match="Address already in use"):
        bus("reward/0#b", folder).serve(range_of_one, handle, pytest.fail)


@pytest.mark.skipif(not sockets.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize(("listens", "asked"), [("[::1]", "[::1]"), ("*", "127.0.0.1"), ("[::]", "127.0.0.1")])
async def test_both_families_of_addresses_work(bus, serve, folder, listens, asked):
    _, address, _ = serve(address=f"tcp://{listens}:*")
    port = address.rpartition(":")[2]
    assert await bus("reward/0#b", folder).peer(f"tcp://{asked}:{port}").ask(AskStatus(), PATIENCE) == Done()
