"""The division of a model's weights over ranks, beside ZeRO's partitions.

Without a division, every rank has all weights, or a partition of them. An extension (`areal.extensions.parallel`)
divides experts or tensors: a subclass of `Division` tells the engine about the difference.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from areal.base import extensions
from areal.config.trainer_section import TrainerConfig
from areal.training.row_groups import RowGroup


class Fragment(NamedTuple):
    """The elements [start, stop) of a flattened parameter."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Division:
    """No division. ranks_a_row: how many ranks compute the same rows, each with a part of the weights."""

    ranks_a_row = 1

    @property
    def options(self) -> dict[str, Any]:
        """Keys of DeepSpeed's configuration for the trained model."""
        return {}

    def name_groups(self, groups: list[dict[str, Any]]) -> None:
        """Give names to Adam's groups of parameters, if DeepSpeed needs names."""

    def together(self, size: int) -> RowGroup:
        """Return the ranks that compute rows together (all ranks). size: `trainer.sequence_parallel`."""
        if size == 1:
            return RowGroup()
        group: RowGroup = extensions.need("parallel", "sequences", "trainer.sequence_parallel").load()(size)
        return group

    def begin(self, module: torch.nn.Module) -> None:
        """Note the parameters of the model before DeepSpeed divides it."""

    def find(self, engine: Any) -> None:
        """Find the parts that DeepSpeed's `engine` has divided."""

    def route_replay(self, module: torch.nn.Module, routing: Any) -> Any:
        """Return an object that gives the model's routers the experts of sampling (areal.extensions.routing)."""
        return extensions.need("routing", "replay", "trainer.routing=replay").load()(module, routing)

    def whole_size(self, tensor: Tensor) -> int:
        """Return the number of elements of the whole tensor. tensor: this rank's part."""
        return int(getattr(tensor, "ds_numel", tensor.numel()))

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor, [...] as in the undivided model (all ranks). tensor: this rank's part."""
        return tensor

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors by name in the undivided model. tensors: by name in the divided model."""
        return dict(tensors)

    def clip(self, parameters: Iterable[torch.nn.Parameter], largest: float) -> Tensor:
        """Scale gradients down to the norm `largest`. Returns the norm over all ranks before scaling (all ranks)."""
        return torch.nn.utils.clip_grad_norm_(parameters, largest)

    def holders(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Return this rank's number among the ranks with the same part of a parameter, and the number of such ranks."""
        return dist.get_rank(), dist.get_world_size()

    def saves(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this rank saves its ZeRO partition of a parameter. Of equal partitions, one is saved."""
        return True

    def name(self, parameter: str) -> str:
        """Return the name, in a checkpoint, of the tensor that contains this rank's parameter."""
        return parameter

    def shapes(self, name: str, parameter: torch.nn.Parameter) -> dict[str, list[int]]:
        """Return the shapes, by name in a checkpoint, of the tensors that contain the ranks' parameters `name`."""
        return {self.name(name): list(getattr(parameter, "ds_shape", parameter.shape))}

    def place(self, part: Fragment) -> Iterator[Fragment]:
        """Yield the places of the elements of a part in the tensors of the checkpoint, in order."""
        yield part._replace(name=self.name(part.name))


def division_of(config: TrainerConfig, folder: Path) -> Division:
    """Return the division of the configuration. Raises UserError if the model in `folder` cannot be divided."""
    for key, name in {"expert_parallel": "experts", "tensor_parallel": "tensors"}.items():
        if getattr(config, key) > 1:
            division: Division = extensions.find("division", name, f"trainer.{key}")(config, folder)
            return division
    return Division()
