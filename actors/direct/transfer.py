"""Sends weights straight into the engines of generators, by vLLM's weight transfer.

vLLM has the two ends of `nccl`. `gloo`, for machines without a GPU, is defined here: `nccl` with another process group
and without streams of a GPU. Every generator has its own group, with the trainer as rank 0 and a rank for each process
of the engine.

The trainer's end packs tensors without vLLM. vLLM's packing has every tensor twice in the GPU's memory, and all groups
of a process share two streams: a generator that does not answer would hold the transfers to all other generators.

The trainer uses `Sender`. vLLM imports `GlooEngine` by name in its workers (`areal.generation.vllm_worker`).
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import prod
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Work
from vllm.distributed.utils import create_tcp_store
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from areal.base.network_interfaces import own_address
from areal.weights.folders import stored_tensors
from areal.weights.packs import PACKED_BYTES, packs

# Timeout of a broadcast, and of joining a group. The death of a peer is noticed at once.
COLLECTIVE_SECONDS = 30.0

Call = Callable[[str, dict[str, Any]], None]
"""Has the engine make a call of vLLM's weight transfer, and waits for the end. Raises if the call fails."""


class Sender:
    """Sends versions into the engine of a generator. After a failure a new sender is needed.

    host: the address of this machine for the generator. workers: processes of the generator's engine.
    """

    def __init__(self, backend: str, host: str, workers: int, call: Call) -> None:
        self._backend = backend
        self._host = host
        self._workers = workers
        self._client = _Client(call)
        self._engine: Any = None

    def send(self, folder: Path) -> int:
        """Send the weights in `folder`, which may be removed meanwhile. Returns their bytes. Raises whatever vLLM, the
        process group or the call raises; a collective that does not end within COLLECTIVE_SECONDS raises RuntimeError
        (gloo), and only `close` ends it otherwise (nccl)."""
        source = self._client.source = _Stored(folder)
        with contextlib.nullcontext() if self._backend == "gloo" else _stream():
            if self._engine is None:
                kind = _ENDS[self._backend]
                self._engine = kind.trainer_init(self._init_info(), client=self._client, source=source)
            self._engine.source = source
            self._engine.send_weights()
        return source.size

    def close(self) -> None:
        """End the group, also while a thread is sending."""
        if self._engine is not None:
            self._engine.shutdown()

    def _init_info(self) -> NCCLTrainerInitInfo:
        return NCCLTrainerInitInfo(
            rank=0,
            master_address=self._host,
            master_port=_free_port(self._host),
            world_size=1 + self._workers,
            packed=True,
            packed_buffer_size_bytes=PACKED_BYTES,
        )


_streams: SimpleQueue[torch.cuda.Stream] = SimpleQueue()  # streams that no transfer uses


@contextlib.contextmanager
def _stream() -> Iterator[None]:
    """A stream for this transfer: the stream waits neither for training nor for other transfers. Later transfers use
    the stream again, since torch keeps freed memory for a stream. The stream of a failed transfer may never end.
    """
    try:
        stream = _streams.get_nowait()
    except Empty:
        stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
    _streams.put(stream)


class _Stored(WeightSource):
    """The tensors of a folder, in host memory. Sending reads the tensors from the page cache."""

    def __init__(self, folder: Path) -> None:
        self._tensors = list(stored_tensors(folder))  # views of the files' memory: nothing is read yet

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._tensors)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)


class _Client:
    """vLLM's VLLMWeightSyncClient."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.source: _Stored

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """The engine compares the shapes with its model's shapes before the engine stops."""
        self._call("start_weight_update", {meta.name: meta.shape for meta in self.source.metadata()})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", {})


class GlooGroup:
    """A process group of gloo, with the used part of the interface of vLLM's PyNcclCommunicator."""

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        """Rank 0 listens at the address. Returns once all ranks have joined; RuntimeError if a rank is missing."""
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        listening = socket.create_server((host, port), family=_family(host)) if rank == 0 else None
        store = create_tcp_store(
            host,
            port,
            listening,
            world_size=size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            use_libuv=False,
        )
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(host, port))]
        self._group = ProcessGroupGloo(PrefixStore("weights", store), rank, size, options)
        self._store = store  # rank 0's is the server

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Work:
        """Begin to send rank 0's tensor, or to receive it. The result raises RuntimeError if a rank dies or is late."""
        options = BroadcastOptions()
        options.rootRank = src
        return self._group.broadcast([tensor], options)

    def destroy(self) -> None:
        self._group.abort()


class NcclTrainerEngine(NCCLTrainerWeightTransferEngine):
    """The trainer's end of `nccl`."""

    device: ClassVar[str] = "cuda"

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        sending: Work | None = None  # while the next tensors are packed; on a GPU the stream keeps the order
        pairs = self._checked_iter(source, meta)
        for pack in packs(pairs, lambda pair: pair[1].nbytes, self.packed_buffer_size_bytes):
            packed = _joined([tensor for _, tensor in pack], self.device)
            if sending:
                sending.wait()
            sending = self.model_update_group.broadcast(packed, src=0)
            del packed  # the next pack takes the place
        if sending:
            sending.wait()


def _joined(tensors: list[torch.Tensor], device: str) -> torch.Tensor:
    """The bytes of tensors in host memory, uint8 [n], on `device`."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    joined = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=device)
    for place, part in zip(joined.split([*map(len, parts)]), parts, strict=True):
        place.copy_(part)
    return joined


class GlooTrainerEngine(NcclTrainerEngine):
    """The trainer's end of `gloo`."""

    device = "cpu"

    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: Any, source: Any = None) -> "GlooTrainerEngine":
        geometry = {
            "packed": init_info.packed,
            "packed_buffer_size_bytes": init_info.packed_buffer_size_bytes,
            "packed_num_buffers": init_info.packed_num_buffers,
        }
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, **geometry)
        address, size = (init_info.master_address, init_info.master_port), init_info.world_size
        workers = NCCLWeightTransferInitInfo(
            master_address=address[0], master_port=address[1], rank_offset=1, world_size=size, **geometry
        )
        with ThreadPoolExecutor(max_workers=1) as thread:  # the workers answer once all have joined
            joining = thread.submit(client.init_weight_transfer_engine, worker_init_payload(workers))
            engine.model_update_group = GlooGroup(*address, 0, size)
            joining.result()
        return engine


_ENDS = {"nccl": NcclTrainerEngine, "gloo": GlooTrainerEngine}


class GlooEngine(NCCLWeightTransferEngine):
    """The end of `gloo` in each worker of an engine."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # nothing is left to be waited for, as on a GPU

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        with disable_mtp_completeness_check():
            for packed, names, shapes, dtypes, sizes in self._received(update_info):
                self.model.load_weights(unpack_tensor(packed, names, shapes, dtypes, sizes))

    def _received(self, info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[Any, ...]]:
        """The packs, with their bytes. The next pack arrives while a pack is loaded."""
        coming: tuple[Work, tuple[Any, ...]] | None = None
        tensors = zip(info.names, info.shapes, (getattr(torch, name) for name in info.dtype_names), strict=True)
        sized = ((*tensor, prod(tensor[1]) * tensor[2].itemsize) for tensor in tensors)
        for pack in packs(sized, itemgetter(3), self.packed_buffer_size_bytes):
            packed = torch.empty(sum(size for *_, size in pack), dtype=torch.uint8, device="cpu")
            columns = map(list, zip(*pack, strict=True))  # names, shapes, types and sizes in bytes
            previous, coming = coming, (self.model_update_group.broadcast(packed), (packed, *columns))
            if previous:
                previous[0].wait()
                yield previous[1]
        if coming:
            coming[0].wait()
            yield coming[1]


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as probe:
        port: int = probe.getsockname()[1]
        return port
