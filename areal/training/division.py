"""How the weights of a model are divided over ranks, beside ZeRO's partitions.

Where they are not, every rank has all weights, or its partition of them. An extension (`areal.extensions.parallel`)
divides experts or tensors: a subclass of `Division` tells the engine what is different then.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from areal.base import extensions
from areal.config.trainer_section import TrainerConfig
from areal.models import Routing
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
    """No division. ranks_a_row: how many ranks compute the same rows, each with its part of the weights."""

    ranks_a_row = 1

    @property
    def options(self) -> dict[str, Any]:
        """Keys of DeepSpeed's configuration, for the model that is trained alone."""
        return {}

    def name_groups(self, groups: list[dict[str, Any]]) -> None:
        """Give names to Adam's groups of parameters, if DeepSpeed needs names."""

    def together(self, size: int) -> RowGroup:
        """The ranks that compute rows together (all ranks). size: `trainer.sequence_parallel`."""
        if size == 1:
            return RowGroup()
        group: RowGroup = extensions.need("parallel", "sequences", "trainer.sequence_parallel").load()(size)
        return group

    def begin(self, module: torch.nn.Module) -> None:
        """Note the parameters of the model before DeepSpeed divides it."""

    def find(self, engine: Any) -> None:
        """Find the parts of the model that DeepSpeed's `engine` has divided."""

    def route_replay(self, module: torch.nn.Module, routing: Routing) -> Any:
        """What gives the model's routers the experts of sampling (areal.extensions.routing)."""
        return extensions.need("routing", "replay", "trainer.routing=replay").load()(module, routing)

    def whole_size(self, tensor: Tensor) -> int:
        """The number of elements of the whole tensor of which this rank has `tensor`."""
        return int(getattr(tensor, "ds_numel", tensor.numel()))

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor, [...] as in the undivided model (all ranks). tensor: what this rank has of it."""
        return tensor

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by their names in the undivided model. tensors: by the names in the divided one."""
        return dict(tensors)

    def clip(self, parameters: Iterable[torch.nn.Parameter], largest: float) -> Tensor:
        """Scale gradients down to the norm `largest`. Returns their norm over all ranks, before that (all ranks)."""
        return torch.nn.utils.clip_grad_norm_(parameters, largest)

    def holders(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """The number of this rank among the ranks that have the same part of a parameter, and how many these are."""
        return dist.get_rank(), dist.get_world_size()

    def saves(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank saves its partition of a parameter by ZeRO. Of ranks with the same one, one does."""
        return True

    def name(self, parameter: str) -> str:
        """The name, in a checkpoint, of the tensor that this rank's parameter is a part of."""
        return parameter

    def shapes(self, name: str, parameter: torch.nn.Parameter) -> dict[str, list[int]]:
        """The shapes of the tensors in a checkpoint, by name, of which all ranks' parameters of this name are parts."""
        return {self.name(name): list(getattr(parameter, "ds_shape", parameter.shape))}

    def place(self, part: Fragment) -> Iterator[Fragment]:
        """Where the elements of a part of this rank's parameter lie in these tensors, in their order."""
        yield part._replace(name=self.name(part.name))


def division_of(config: TrainerConfig, folder: Path) -> Division:
    """The division that the configuration asks for. Raises UserError if the model in `folder` cannot be divided so."""
    for key, name in {"expert_parallel": "experts", "tensor_parallel": "tensors"}.items():
        if getattr(config, key) > 1:
            division: Division = extensions.find("division", name, f"trainer.{key}")(config, folder)
            return division
    return Division()
