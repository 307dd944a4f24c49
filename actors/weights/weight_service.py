"""Weight transfer: generators read weights from a shared folder, or receive weights as a stream from other actors.

With streaming, `areal.weights.relay` chooses the actor from which a generator fetches. The generator serves received
chunks to other generators while it still receives the rest. A generator accepts a chunk only with the published
checksum, no matter which actor sent the chunk. If a source fails, the generator continues with the next source, after
the last good chunk.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import structlog

from actors.runtime.actor import HandlesRequests, M, Notifier, handles
from areal.base.errors import explain
from areal.config.engine_sections import WeightsConfig
from areal.weights.chunks import CHECKING_THREADS, Data, FileSums, HeldVersion, Manifest, TornWeights, apply, difference
from areal.weights.folders import atomic_folder, remove_folder
from areal.weights.relay import Sources
from protocols.bus import Bus
from protocols.bus_errors import BusError, BusyError, RefusedError, StreamBrokenError
from protocols.membership_messages import Member, Policy
from protocols.messages import Message
from protocols.transport import Request
from protocols.weight_messages import FetchWeights, WeightChunk, WeightFile, WeightFiles

# How long a server waits for a version that it does not have yet. A generator that still loads the version before has
# to begin to fetch the next version within this time; otherwise the asker tries another source.
PATIENCE_SECONDS = 10.0
# A receiver without a chunk for this long tries another source: the sender is alive, but gets no chunks. Has to be
# longer than PATIENCE_SECONDS, for which the sender waits.
STALL_SECONDS = 20.0
RETRY_SECONDS = 1.0
# Timeout of a stream. A stream without any message breaks much earlier.
FETCH_SECONDS = 24 * 3600.0
# The most chunks to read, compare, check or write at once in a thread: large batches mean few hand-overs.
CHUNKS_AT_ONCE = 8
PACKERS = ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="packer")
# Versions that a generator keeps: the version in use, and the next version, which arrives as a difference.
KEPT_BY_GENERATOR = 2

Version = tuple[int, int]
"""(lineage, version)."""

log = structlog.get_logger()


class WeightServer(HandlesRequests):
    """Sends weights to other actors. Keeps `limit` versions (at least two): the last offered and the newest."""

    def __init__(self, limit: int) -> None:
        self.bytes_sent = 0
        self._limit = limit
        self._held_versions: dict[Version, HeldVersion] = {}
        self._progress = Notifier()

    def offer(self, version: Version, held_version: HeldVersion) -> None:
        """Serve this version from now on: the present chunks, and further chunks as they arrive."""
        self._held_versions[version] = held_version
        for old in sorted(self._held_versions.keys() - {version})[: 1 - self._limit]:
            self._drop(old)
        self._progress.notify()

    @handles(FetchWeights)
    async def serve(self, request: Request[FetchWeights]) -> AsyncGenerator[Message, None]:
        """The answer to FetchWeights: the list of files, then the chunks. Raises BusError: BusyError for a version that
        does not arrive in time, RefusedError for a version no longer kept, StreamBrokenError if a chunk cannot be sent.
        """
        message = request.message
        held_version = await self._held_version((message.lineage, message.version))
        base = self._base(message.base, held_version)
        yield WeightFiles(files=tuple(_file_message(file) for file in held_version.manifest.files))
        first = message.first
        while first < held_version.chunks:
            await self._progress.until(lambda: held_version.ready > first or held_version.given_up)  # noqa: B023 - awaited here
            if held_version.ready <= first:
                raise StreamBrokenError(f"this actor has given up receiving version {message.version}")
            numbers = range(first, min(held_version.ready, first + CHUNKS_AT_ONCE))
            with explain((TornWeights, OSError), "{why}", StreamBrokenError):
                chunks = await asyncio.to_thread(_packed, held_version, base, numbers)
            for chunk in chunks:
                self.bytes_sent += chunk.data.nbytes
                yield chunk
            first = numbers.stop

    async def _held_version(self, version: Version) -> HeldVersion:
        def decide() -> HeldVersion | bool:
            return self._held_versions.get(version) or any(offered > version for offered in self._held_versions)

        with explain(TimeoutError, f"this actor does not have version {version[1]} yet", BusyError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                held_version = await self._progress.until(decide)
        if not isinstance(held_version, HeldVersion):
            raise RefusedError(f"this actor no longer has version {version[1]}")
        return held_version

    def _base(self, version: Version | None, held_version: HeldVersion) -> HeldVersion | None:
        base = self._held_versions.get(version) if version else None
        return base if base and base.complete and base.manifest.is_laid_out_like(held_version.manifest) else None

    def _drop(self, version: Version) -> None:
        held_version = self._held_versions.pop(version)
        held_version.given_up = not held_version.complete
        self._progress.notify()


class WeightFetcher(WeightServer):
    """Brings the weights of policies to the machine of the generator `index`, into `folder`, and serves the weights to
    other generators. members: returns the run's members of a role. newest: returns the newest published policy."""

    def __init__(
        self,
        bus: Bus,
        index: int,
        config: WeightsConfig,
        folder: Path,
        members: Callable[[str], Sequence[Member]],
        newest: Callable[[], Policy],
    ) -> None:
        super().__init__(KEPT_BY_GENERATOR)
        self.bytes_received = 0
        self.seconds = 0.0
        self._bus = bus
        self._config = config
        self._all_members = members
        self._newest = newest
        self._sources = Sources(index)
        self._removals: list[asyncio.Future[None]] = []
        mark = bus.identity.name.rpartition("#")[2]
        # With the incarnation in the name: a replaced generator of the same index may still be running.
        self._folder = folder / f"generator-{index}-{mark}"
        if self._config.transport != "folder":
            for leftover in self._folder.parent.glob(f"generator-{index}-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    async def fetch(self, policy: Policy) -> Path:
        """The folder with the policy's weights, after a check of the checksums. Raises TornWeights if no source has the
        complete weights; a newer policy may be available."""
        if not policy.stamp:
            return Path(policy.folder)
        started = time.perf_counter()
        folder = await (self._fetch_files(policy) if self._streams else self._read_shared(policy))
        self.seconds += time.perf_counter() - started
        return folder

    def close(self) -> None:
        """Remove all fetched weights."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _streams(self) -> bool:
        return self._config.transport == "stream"

    async def _read_shared(self, policy: Policy) -> Path:
        """The trainer's folder or, after a failed direct transfer, a copy of the folder unless the folder is shared."""
        try:
            return await _checked(policy)
        except TornWeights:
            if not self._config.direct:
                raise
        return await self._fetch_files(policy)

    async def _fetch_files(self, policy: Policy) -> Path:
        version = policy.identity
        folder = self._folder_of(version)
        if version in self._held_versions:
            return folder
        try:
            with atomic_folder(folder, durable=False) as partial:
                try:
                    await self._fetch_into(partial, policy)
                finally:
                    if version in self._held_versions and not self._held_versions[version].complete:
                        self._drop(version)
        finally:
            await asyncio.gather(*self._removals)
            self._removals.clear()
        return folder

    async def _fetch_into(self, partial: Path, policy: Policy) -> None:
        version = policy.identity
        base = max(self._held_versions, default=None) if self._config.delta else None
        while version not in self._held_versions or not self._held_versions[version].complete:
            now = asyncio.get_running_loop().time()
            # After a direct transfer no generator has files to pass on.
            senders = self._members("generator") if self._streams else ()
            addresses = {m.index: m.address for m in senders}
            source = self._sources.choose(addresses, now)
            sender = "the trainer" if source is None else f"generator {source}"
            try:
                await self._receive(addresses[source] if source is not None else self._trainer(), partial, policy, base)
            except (BusError, TornWeights, TimeoutError) as error:
                log.warning(
                    "weights did not arrive", version=policy.version, sender=sender, error=str(error) or "stalled"
                )
                if isinstance(error, TornWeights):
                    base = None  # perhaps the base version is torn, not the new version
                overtaken = self._newest().identity > version
                if not (overtaken and isinstance(error, RefusedError)):  # otherwise the sender just has a newer version
                    self._sources.failed(source, now)
                if overtaken:
                    raise TornWeights(f"version {policy.version} did not arrive, and there is a newer one") from None
                if source is None:
                    await asyncio.sleep(RETRY_SECONDS)
        log.info("weights arrived", version=policy.version, sender=sender, bytes_received=self.bytes_received)

    async def _receive(self, address: str, partial: Path, policy: Policy, base: Version | None) -> None:
        """Receive the missing chunks. Raises BusError, TornWeights, TimeoutError after STALL_SECONDS."""
        version = policy.identity
        held_version = self._held_versions.get(version)
        ask = FetchWeights(
            lineage=policy.lineage, version=policy.version, first=held_version.ready if held_version else 0, base=base
        )
        older = self._held_versions.get(base) if base else None
        async with contextlib.aclosing(self._bus.peer(address).stream(ask, FETCH_SECONDS)) as parts:
            manifest = _manifest(await _next(parts, WeightFiles))
            if manifest.stamp != policy.stamp:
                raise TornWeights(f"the files of version {policy.version} at {address} are not the published ones")
            if held_version is None:
                held_version = HeldVersion(partial, manifest, arriving=True)
                self.offer(version, held_version)
            intake = _ChunkIntake(held_version, older, self._progress)
            try:
                for _ in range(held_version.chunks - held_version.ready):
                    part = await _next(parts, WeightChunk)
                    self.bytes_received += part.data.nbytes
                    await intake.add(part)
            finally:
                await intake.end()

    def _members(self, role: str) -> list[Member]:
        return [m for m in self._all_members(role) if m.state != "draining"]

    def _trainer(self) -> str:
        if trainers := self._members("trainer"):
            return trainers[0].address
        raise BusyError("the run has no trainer now")

    def _folder_of(self, version: Version) -> Path:
        return self._folder / f"l{version[0]}-v{version[1]:06}"

    def _drop(self, version: Version) -> None:
        super()._drop(version)
        # In a thread: freeing the memory or the blocks of many gigabytes takes seconds.
        removal = asyncio.to_thread(remove_folder, self._folder_of(version))
        self._removals.append(asyncio.ensure_future(removal))


async def _checked(policy: Policy) -> Path:
    folder = Path(policy.folder)
    with explain(OSError, f"{folder} cannot be read: {{why}}", TornWeights):
        manifest = await asyncio.to_thread(Manifest.of, folder)
    if manifest.stamp != policy.stamp:
        raise TornWeights(f"the files in {folder} are not the published ones, or not all of them are written yet")
    return folder


async def _next(parts: AsyncIterator[Message], kind: type[M]) -> M:
    """The next part of the stream, which has to be a `kind`. Raises BusError, TimeoutError."""
    async with asyncio.timeout(STALL_SECONDS):
        part = await anext(parts, None)
    if not isinstance(part, kind):
        raise StreamBrokenError(f"expected {kind.kind!r}, got {'the end' if part is None else part.kind!r}")
    return part


class _ChunkIntake:
    """Adds received chunks to `held_version`, in a thread, while more arrive. base: the version below differences."""

    def __init__(self, held_version: HeldVersion, base: HeldVersion | None, progress: Notifier) -> None:
        self._held_version = held_version
        self._base = base
        self._progress = progress
        self._waiting: list[WeightChunk] = []
        self._adding: asyncio.Task[None] | None = None

    async def add(self, part: WeightChunk) -> None:
        """Take a chunk over; waits while too many chunks are not added yet. Raises TornWeights if this chunk or an
        earlier chunk is not as published, and OSError."""
        self._waiting.append(part)
        if self._adding is None or self._adding.done():
            await self.end()
            self._adding = asyncio.create_task(self._add_waiting())
        elif len(self._waiting) >= CHUNKS_AT_ONCE:
            await self._adding

    async def end(self) -> None:
        """Wait until all chunks are added. Raises as `add` does."""
        if self._adding is not None:
            await self._adding

    async def _add_waiting(self) -> None:
        while self._waiting:
            parts, self._waiting = self._waiting, []
            await asyncio.to_thread(_add, self._held_version, self._base, parts)
            self._progress.notify()


def _packed(held_version: HeldVersion, base: HeldVersion | None, numbers: Sequence[int]) -> list[WeightChunk]:
    def chunk(number: int) -> WeightChunk:
        data = held_version.read(number)
        packed = difference(data, base.read(number)) if base else None
        payload = data if packed is None else packed
        return WeightChunk(number=number, data=np.frombuffer(payload, np.uint8), difference=packed is not None)

    return list((PACKERS.map if base else map)(chunk, numbers))


def _add(held_version: HeldVersion, base: HeldVersion | None, parts: Sequence[WeightChunk]) -> None:
    """Add received chunks to `held_version`. Raises TornWeights."""
    for part in parts:
        data: Data = part.data.data
        if part.difference:
            if base is None or not base.manifest.is_laid_out_like(held_version.manifest):
                raise TornWeights("received a chunk as a difference from a version that this generator does not have")
            data = apply(data, base.read(held_version.ready))
        held_version.put(part.number, data)


def _file_message(file: FileSums) -> WeightFile:
    return WeightFile(name=file.name, size=file.size, checksums=np.array(file.checksums, np.int64))


def _manifest(files: WeightFiles) -> Manifest:
    """The manifest of the files. Raises TornWeights if a folder cannot have such files."""
    manifest = Manifest(tuple(FileSums(f.name, f.size, tuple(f.checksums.tolist())) for f in files.files))
    if not all(file.is_sound for file in manifest.files):
        raise TornWeights("received a list of files with an invalid name, size or number of checksums")
    return manifest
