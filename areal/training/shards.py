"""Shards of the model's weights: the ranks of rank 0's host share the writing.

Published weights may be in a folder of rank 0's host alone. Each rank of the host keeps and writes a shard. The tensors
of a layer stay together, because the files may cut and join tensors in another way than the model.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.base import extensions
from areal.storage.records import line_of
from areal.storage.run_folder import STATE_FILE
from areal.training.agreement import RankMessages
from areal.training.checkpoint import FOLDER as STATE
from areal.training.checkpoint import Share
from areal.training.division import Division
from areal.weights.chunks import FileSums, Manifest
from areal.weights.folders import copy_model_files, saved_buffers, sums_of, sync, write_weights
from areal.weights.model_files import write_index
from areal.weights.wrappers import beside_text

ADAPTER = "adapter"
"""The adapter's folder in a checkpoint. Beside the merged weights, transformers would add the adapter again."""


def ranks_of_this_host() -> int:
    """Return the number of ranks on this rank's host. Under torchrun, the first ranks are on rank 0's host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the rank that writes each tensor, with about equal bytes per rank. sizes: of the tensors, by name."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in sizes:
        numbered = re.match(r".*?\.\d+\.", name)
        layers[numbered[0] if numbered else name].append(name)
    weigh = {layer: sum(sizes[name] for name in names) for layer, names in layers.items()}
    loads = [0] * ranks
    writers: dict[str, int] = {}
    for layer in sorted(weigh, key=weigh.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += weigh[layer]
        writers |= dict.fromkeys(layers[layer], rank)
    return writers


@dataclass(frozen=True, slots=True)
class Copied:
    """Weights that this rank has copied to host memory, by the names in `module`, and may write.

    division: of the module. writers: the number of ranks that write. adapters: whether the weights belong to adapters,
    which rank 0 writes alone.
    """

    module: torch.nn.Module
    tensors: Mapping[str, Tensor]
    division: Division
    writers: int
    adapters: bool

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def stored(self) -> Mapping[str, Tensor]:
        """Return the weights by their Hugging Face names."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.module, self.division.joined(self.tensors))

    def write_shard(self, tensors: Mapping[str, Tensor], folder: Path) -> Path | None:
        """Write this rank's `tensors`, if any, to disk. Returns the file."""
        if not tensors:
            return None
        file = write_weights(tensors, folder, dist.get_rank(), self.writers)
        sync(file)
        return file


class WeightCopies:
    """Copies weights of a model to host memory, each on the rank that writes it (all ranks).

    parameters: the parameters of `module` to write. division: of the module. adapters: whether only adapters are
    written.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        messages: RankMessages,
        division: Division,
        adapters: bool,
    ) -> None:
        self._module, self._division = module, division
        self._parameters = parameters
        self._adapters = adapters
        self._buffers = {} if adapters else saved_buffers(module)
        sizes = {name: division.whole_size(tensor) for name, tensor in {**parameters, **self._buffers}.items()}
        here = {"ranks": ranks_of_this_host()} if dist.get_rank() == 0 else None
        self._writers: int = messages.broadcast(here)["ranks"]
        self._written_by = share_out(sizes, 1 if adapters else self._writers)

    def copy(
        self, copies: dict[str, Tensor], whole: Callable[[torch.nn.Parameter], AbstractContextManager[Tensor]]
    ) -> Copied:
        """Copy the weights that this rank writes into `copies`, made if missing. whole: gives a parameter to all ranks.

        Parameters are gathered one after another, all ranks in step. Nothing may be sent or written in between: under
        ZeRO-3 a rank that is late for a gather blocks the other ranks. Tied parameters appear once.
        """
        for name, parameter in self._parameters.items():
            with whole(parameter) as tensor:
                self._keep(copies, name, tensor)
        for name, buffer in self._buffers.items():
            self._keep(copies, name, buffer)
        return Copied(self._module, copies, self._division, self._writers, self._adapters)

    def _keep(self, copies: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if dist.get_rank() != self._written_by[name]:
            return
        if name not in copies:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name].copy_(tensor.detach())


@dataclass(frozen=True, slots=True)
class Published:
    """The files of weights for generators: shards, or an adapter in peft's format without the weights it belongs to."""

    copied: Copied

    @property
    def size(self) -> int:
        return self.copied.size

    def prepare(self, folder: Path) -> None:
        if self.copied.adapters:
            _of_adapters("write")(self.copied.module, self.copied.tensors, folder)

    def write(self, folder: Path) -> str | None:
        """Write this rank's shard. Returns the file's name, size and checksums as JSON."""
        if self.copied.adapters:
            return None
        stored = self.copied.stored()
        file = self.copied.write_shard(stored, folder)
        return json.dumps(astuple(sums_of(file, stored))) if file else None

    def finish(self, folder: Path, entries: list[str]) -> Manifest:
        if self.copied.adapters:
            return Manifest.of(folder)
        files = (json.loads(shard) for shard in entries if shard)
        return Manifest(tuple(FileSums(name, size, tuple(checksums)) for name, size, checksums in sorted(files)))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files of a model folder that loads without further files. Adapters are merged into the weights of `source`,
    and also stored in a subfolder. dtype: of trained weights; others keep their type. share: the state, or None."""

    copied: Copied
    source: Path
    dtype: str
    share: Share | None

    @property
    def size(self) -> int:
        return self.copied.size + sum(tensor.nbytes for tensor in (self.share.tensors if self.share else {}).values())

    def prepare(self, folder: Path) -> None:
        copy_model_files(self.source, folder, dtype=self.dtype)
        if self.copied.adapters:
            (folder / ADAPTER).mkdir()
            _of_adapters("write")(self.copied.module, self.copied.tensors, folder / ADAPTER)
        if self.share:
            (folder / STATE).mkdir()
            (folder / STATE_FILE).write_text(line_of(self.share.facts))

    def write(self, folder: Path) -> None:
        if self.share:
            self.share.write(folder)
        self.copied.write_shard(self._tensors(folder), folder)

    def _tensors(self, folder: Path) -> Mapping[str, Tensor]:
        shard = dist.get_rank(), self.copied.writers
        if not self.copied.adapters:
            return {**self.copied.stored(), **dict(beside_text(self.source, *shard))}
        return dict(_of_adapters("merge")(self.source, folder / ADAPTER, *shard, dtype=getattr(torch, self.dtype)))

    def finish(self, folder: Path, entries: list[str]) -> None:
        if self.copied.writers > 1:
            write_index(folder)


def _of_adapters(name: str) -> Any:
    return extensions.need("lora", name, "trainer.lora").load()
