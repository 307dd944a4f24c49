"""Direct transfer: the trainer sends weights straight into the engines of generators, by vLLM's weight transfer.

    generator ── SendWeights ──▶ trainer
              ◀─ TransferCall ──          a stream: join the group, start, update, finish
              ── TransferDone ──▶         after each call
              ◀═══ tensors ═════          during the update, over the group of this generator and the trainer

A generator asks when ready. In the trainer every generator has a group, a thread and a stream of the GPU. Two transfers
run at once; further generators sample on until their turn comes. A generator that comes, goes or dies does not affect
other generators, but a generator that does not answer keeps its turn until it gives the transfer up. The trainer sends
the tensors that it has written: the files stay the truth, and after a failed transfer a generator loads the files.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib
import json
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog

from actors.runtime.actor import CONTROL_SECONDS, HandlesRequests, handles
from actors.runtime.directory import Directory
from actors.runtime.membership import Membership
from areal.base.errors import explain
from areal.devices import transfer_backend
from areal.generation.engine_weights import FINISH
from areal.generation.offered_weights import WeightLoadError
from areal.weights.packs import SENDS_AT_ONCE
from protocols.addresses import host_of
from protocols.bus import Bus
from protocols.bus_errors import BusError, RefusedError, StreamBrokenError
from protocols.membership_messages import Policy
from protocols.messages import Done, Message
from protocols.transport import Request
from protocols.weight_messages import SendWeights, TransferCall, TransferDone

if TYPE_CHECKING:
    from actors.direct.transfer import Sender

# Timeout of a whole transfer. A stuck transfer ends much earlier.
TRANSFER_SECONDS = 3600.0

log = structlog.get_logger()


async def load_transport() -> None:
    """Load vLLM's part of the trainer's end, which takes seconds."""
    await asyncio.to_thread(importlib.import_module, "actors.direct.transfer")


class DirectSender(HandlesRequests):
    """The trainer's end. Offers the last `limit` versions.

    backend: of vLLM's weight transfer. host: the address of this process for the engines."""

    @classmethod
    async def start(cls, member: Membership, limit: int) -> Self:
        """Serve the generators of a trainer's run."""
        await load_transport()
        host = host_of(member.listen_address.reached_at(""))
        sender = cls(transfer_backend(), member.directory, host, limit)
        member.used.callback(sender.close)
        member.serve(sender)
        return sender

    def __init__(self, backend: str, directory: Directory, host: str, limit: int) -> None:
        self.bytes_sent = 0
        self._backend = backend
        self._directory = directory
        self._host = host.strip("[]")
        self._limit = limit
        self._folders: dict[tuple[int, int], Path] = {}
        self._links: dict[str, _Link] = {}
        self._turns = asyncio.Semaphore(SENDS_AT_ONCE)

    def offer(self, policy: Policy) -> None:
        """Send this version to generators that ask for the version."""
        self._folders[policy.identity] = Path(policy.folder)
        for old in sorted(self._folders)[: -self._limit]:
            del self._folders[old]

    @handles(SendWeights)
    async def serve(self, request: Request[SendWeights]) -> AsyncGenerator[TransferCall, None]:
        """The answer to SendWeights: the calls, each after the answer to the call before. Raises RefusedError for a
        version that is not offered, StreamBrokenError if sending fails."""
        self._link(request)  # refuses, or ends the transfer that the asker has given up
        with explain(TimeoutError, "other generators took the time of this transfer", StreamBrokenError):
            await asyncio.wait_for(self._turns.acquire(), request.remaining)
        try:
            async with contextlib.aclosing(self._send(request)) as calls:
                async for call in calls:
                    yield call
        finally:
            self._turns.release()

    async def _send(self, request: Request[SendWeights]) -> AsyncGenerator[TransferCall, None]:
        message, link = request.message, self._link(request)
        folder = self._folders.get((message.lineage, message.version))
        if folder is None:
            raise RefusedError(f"this trainer does not have version {message.version}")
        sending = link.send(folder)
        try:
            while (call := await asyncio.wait_for(link.calls.get(), request.remaining)) is not None:
                yield call
            self.bytes_sent += sending.result()
        except Exception as error:  # whatever vLLM or torch raises, only this transfer fails
            log.warning(
                "weights were not sent", version=message.version, to=request.sender, error=str(error) or "timeout"
            )
            raise StreamBrokenError(f"version {message.version} was not sent: {error}"[:1000]) from None
        finally:
            if link.busy or sending.cancelled() or sending.exception():
                self._drop(request.owner, link)

    def _link(self, request: Request[SendWeights]) -> "_Link":
        """The link to this generator: the link of the last transfer, or a new link. Raises RefusedError."""
        if request.sender not in self._directory.members:
            raise RefusedError(f"{request.sender} is no member of this run")
        for owner, link in [*self._links.items()]:
            # A generator that asks while its last transfer is open has given that transfer up.
            gone = owner.rpartition(" ")[0] not in self._directory.members
            if gone or (owner == request.owner and link.busy):
                self._drop(owner, link)
        if request.owner not in self._links:
            self._links[request.owner] = _Link(self._backend, self._host, request.message.workers)
        return self._links[request.owner]

    @handles(TransferDone)
    async def done(self, request: Request[TransferDone]) -> Done:
        """The asker's engine has done a call."""
        if link := self._links.get(request.owner):
            link.acknowledge(request.message.number)
        return Done()

    def close(self) -> None:
        """End all transfers."""
        for owner, link in [*self._links.items()]:
            self._drop(owner, link)

    def _drop(self, owner: str, link: "_Link") -> None:
        link.close()
        if self._links.get(owner) is link:
            del self._links[owner]


class _Link:
    """The trainer's end of a generator's group, for a single thread."""

    def __init__(self, backend: str, host: str, workers: int) -> None:
        self.calls: asyncio.Queue[TransferCall | None] = asyncio.Queue()
        self._backend, self._host, self._workers = backend, host, workers
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._sender: Sender | None = None
        self._sending: asyncio.Future[int] | None = None
        self._pending: dict[int, concurrent.futures.Future[None]] = {}
        self._number = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        return self._sending is not None and not self._sending.done()

    def send(self, folder: Path) -> asyncio.Future[int]:
        """Begin to send the version in `folder`: `calls` gets the calls to make, then None. Returns the bytes sent."""
        self._sending = self._loop.run_in_executor(self._thread, self._send, folder)
        self._sending.add_done_callback(lambda _: self.calls.put_nowait(None))
        return self._sending

    def acknowledge(self, number: int) -> None:
        if future := self._pending.pop(number, None):
            future.set_result(None)

    def close(self) -> None:
        """End the group. A thread in a collective is left behind if the collective does not end."""
        self._closed = True
        for future in self._pending.values():
            future.set_exception(StreamBrokenError("the generator ended the transfer"))
        self._pending.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._sender is not None:
            # In a thread: leaving a group may take as long as the group's collective.
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights").submit(self._sender.close)

    def _send(self, folder: Path) -> int:
        from actors.direct.transfer import Sender

        if self._sender is None:
            self._sender = Sender(self._backend, self._host, self._workers, self._call)
        return self._sender.send(folder)

    def _call(self, call: str, info: dict[str, Any]) -> None:
        """Called in threads of the sender."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        text = json.dumps(info)
        self._loop.call_soon_threadsafe(self._queue_call, call, text, future)
        future.result(TRANSFER_SECONDS)

    def _queue_call(self, call: Any, info: str, future: concurrent.futures.Future[None]) -> None:
        if self._closed:
            return future.set_exception(StreamBrokenError("the generator ended the transfer"))
        self._number += 1
        self._pending[self._number] = future
        self.calls.put_nowait(TransferCall(number=self._number, call=call, info=info))


class DirectReceiver:
    """The generator's end. `lost` is set if the trainer goes, or gives up, while the engine makes a call."""

    def __init__(self, bus: Bus, directory: Directory, workers: int) -> None:
        """workers: number of the engine's devices."""
        self.lost = asyncio.Event()
        self._bus = bus
        self._directory = directory
        self._workers = workers

    async def calls(self, policy: Policy) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Ask the trainer for the weights of `policy`. Yields the calls of the trainer's end with their arguments, one
        after another. Raises WeightLoadError if the transfer fails before the last call has ended."""
        trainers = [m for m in self._directory.with_role("trainer", healthy=False) if m.state != "draining"]
        if not trainers:
            raise WeightLoadError("the run has no trainer now")
        trainer = self._bus.peer(trainers[0].address)
        ask = SendWeights(lineage=policy.lineage, version=policy.version, workers=self._workers)
        complete = False
        self.lost.clear()
        try:
            stream = trainer.stream(ask, TRANSFER_SECONDS)
            async with contextlib.aclosing(self._watched(stream)) as parts:
                async for part in parts:
                    if not isinstance(part, TransferCall):
                        raise StreamBrokenError(f"expected a call, got {part.kind!r}")
                    yield part.call, _info(part)
                    complete = part.call == FINISH
                    await trainer.ask(TransferDone(number=part.number), CONTROL_SECONDS)
        except BusError as error:
            if not complete:
                raise WeightLoadError(f"the trainer did not send version {policy.version}: {error}") from None

    async def _watched(self, stream: AsyncGenerator[Message, None]) -> AsyncGenerator[Message, None]:
        """The parts of the stream. The stream is also read while a part is in use: the trainer sends the next part only
        after the answer to a part, so an end of the stream meanwhile is the end of the transfer."""

        def note(read: asyncio.Future[Message | None]) -> None:
            if not read.cancelled() and read.exception():
                self.lost.set()

        reading = asyncio.ensure_future(anext(stream, None))
        try:
            while True:
                part = await reading
                if part is None:
                    return
                reading = asyncio.ensure_future(anext(stream, None))
                reading.add_done_callback(note)
                yield part
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.aclose()


def _info(part: TransferCall) -> dict[str, Any]:
    """Raises StreamBrokenError if the argument is not valid."""
    with explain(ValueError, "a call whose argument cannot be read: {why}", StreamBrokenError):
        info = json.loads(part.info)
    if not isinstance(info, dict):
        raise StreamBrokenError("a call whose argument is no mapping")
    return info
