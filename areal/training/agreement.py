"""Work of all ranks beside training: agreeing on the outcome of a task, sending messages, writing folders together.

Several folders may be written at a time, each in its own thread and process group.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgpack
import numpy as np
import structlog
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from areal.base.errors import UserError, explain
from areal.storage.disk import DiskRetry, DiskShortageError, mebibytes, shortage
from areal.weights.chunks import Manifest
from areal.weights.folders import atomic_folder

log = structlog.get_logger()

SILENCE = timedelta(days=7)
"""How long a rank waits for other ranks. A run may wait long for data or a disk; a lost peer is noticed at once."""


def agree(task: Callable[[], str | None], group: dist.ProcessGroup | None) -> list[str]:
    """Do `task` on every rank of a CPU process group, and return the results by rank (all ranks).

    If the task fails on any rank, all ranks raise the same error: DiskShortageError if a disk is full, UserError if a
    file cannot be read or written or `task` raised UserError, else RuntimeError. group: None if there is one rank.
    """
    cause: Exception | None = None
    try:
        answer = f"+{task() or ''}"
    except (OSError, SafetensorError, UserError) as error:
        why = shortage(error)
        answer, cause = f"~{why}" if why else f"-{error}", error
    except Exception as error:  # the other ranks have to hear of any error
        log.exception("failed", rank=dist.get_rank())
        answer, cause = f"!{type(error).__name__}: {error}", error
    answers = [answer] if group is None else _exchange(answer, group)
    for kind, raised in {"!": RuntimeError, "-": UserError, "~": DiskShortageError}.items():
        if failed := next((answer for answer in answers if answer[0] == kind), None):
            raise raised(failed[1:]) from cause
    return [answer[1:] for answer in answers]


def _exchange(text: str, group: dist.ProcessGroup) -> list[str]:
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [bytes(text[:size].numpy()).decode() for text, size in zip(texts, sizes, strict=True)]


class RankMessages:
    """Messages among all ranks, in host memory. group: a gloo group of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def broadcast(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Return rank 0's message on all ranks (all ranks; ranks other than 0 pass None).

        The message consists of types that msgpack can encode. Other ranks wait until rank 0 sends a message.
        """
        packed = msgpack.packb(message) if dist.get_rank() == 0 else b""
        size = self.send(np.array([len(packed)], dtype=np.int64))
        return msgpack.unpackb(self.send(np.frombuffer(packed.ljust(int(size[0]), b"\0"), dtype=np.uint8)))

    def send(self, array: np.ndarray) -> np.ndarray:
        """Return rank 0's array on all ranks; other ranks pass an array of equal shape and type."""
        if dist.get_world_size() == 1 or not array.size:
            return array
        tensor = torch.from_numpy(array.copy())
        dist.broadcast(tensor, src=0, group=self.group)
        return tensor.numpy()

    def sum(self, tensor: Tensor, *, counts: bool) -> np.ndarray:
        """Return the sum of the ranks' tensors, in host memory, on all ranks (all ranks). counts: whether this rank's
        tensor counts. Among ranks that computed a tensor together, a single rank counts.
        """
        if not counts:
            tensor.zero_()
        if dist.get_world_size() > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor.numpy()


class Contents(Protocol):
    """The files of a folder that all ranks write, perhaps more than once. `size`: about this rank's bytes."""

    @property
    def size(self) -> int: ...

    def prepare(self, folder: Path) -> None:
        """Write the files that must exist before the ranks write (rank 0)."""

    def write(self, folder: Path) -> str | None:
        """Write this rank's files to disk. Returns an entry for rank 0."""

    def finish(self, folder: Path, entries: list[str]) -> Manifest | None:
        """Write the files that depend on the files of all ranks (rank 0). entries: the results of `write`, by rank.
        Returns the manifest of all files, if the caller needs a manifest."""


class Writer:
    """Writes folders, one after another, in a thread on every rank (all ranks). disk_retry: of rank 0."""

    def __init__(self, disk_retry: DiskRetry) -> None:
        self._disk_retry = disk_retry
        self._group = dist.new_group(backend="gloo", timeout=SILENCE) if dist.get_world_size() > 1 else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")

    def begin(self, folder: Path, contents: Contents) -> Future[Manifest | None]:
        """Write `folder` in the background (all ranks, in the same order).

        A folder of that name is replaced. Once the result is there, the folder is complete and on disk; on rank 0 the
        result is the result of `contents.finish`. If the disk is full, the folder is written again until there is room.
        If a file cannot be written for another reason, the result is a UserError on all ranks, and nothing is changed.
        """
        what = f"{folder.name} ({mebibytes(contents.size)})"
        write = partial(self._write, folder, contents)
        return self._thread.submit(self._disk_retry.write_in_thread, write, what, folder.parent)

    def _write(self, folder: Path, contents: Contents) -> Manifest | None:
        first = dist.get_rank() == 0
        manifests: list[Manifest | None] = [None]
        with explain(UserError, f"{folder} cannot be written: {{why}}."), ExitStack() as stack:

            def prepare() -> str | None:
                if not first:
                    return None
                partial = stack.enter_context(atomic_folder(folder))
                contents.prepare(partial)
                return str(partial)

            partial = Path(agree(prepare, self._group)[0])
            entries = agree(lambda: contents.write(partial), self._group)

            def finish() -> None:
                if first:
                    manifests[0] = contents.finish(partial, entries)
                    stack.close()

            agree(finish, self._group)
            return manifests[0]

    def close(self) -> None:
        """Wait until all folders are written."""
        self._thread.shutdown()
