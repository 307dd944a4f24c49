"""Tensor parallelism by DeepSpeed's AutoTP: the ranks of a group share out the heads and the columns of each layer.

Each rank of a group computes the same rows with its part of the weights: some output features (columns) of q, k, v,
gate and up projections, and some input features (rows) of o and down projections. Norms, embeddings and the head stay
whole on every rank.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.config.trainer_section import TrainerConfig
from areal.extensions.parallel.checks import check_tensors
from areal.extensions.parallel.norms import clip_divided
from areal.training.division import Division
from areal.training.row_groups import RowGroup

COLUMNS = r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"
ROWS = r".*\.(o_proj|down_proj)\.weight$"
NORMS_OF_HEADS = r".*\.[qk]_norm\.weight$"
"""Norms of Qwen3. Each rank has the gradient of its own heads."""


class SameRows(RowGroup):
    """The ranks with parts of the same weights. All ranks compute whole rows of the same group."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.count = dist.get_world_size() // size
        self.number, rank = divmod(dist.get_rank(), size)
        self.first = rank == 0


class DividedTensors(Division):
    """The division of a model's tensors. Raises UserError if the model in `folder` cannot be divided."""

    def __init__(self, config: TrainerConfig, folder: Path) -> None:
        check_tensors(config, folder, dist.get_world_size())
        self.ranks_a_row = self._size = config.tensor_parallel

    @property
    def options(self) -> dict[str, Any]:
        specs = [
            {"patterns": [COLUMNS], "partition_type": "column"},
            {"patterns": [ROWS], "partition_type": "row"},
            {"patterns": [NORMS_OF_HEADS], "partition_type": "skip", "grad_allreduce": True},
        ]
        layers = {"use_default_specs": False, "layer_specs": specs}
        return {"tensor_parallel": {"autotp_size": self._size, "partition_config": layers}}

    def together(self, size: int) -> RowGroup:
        return SameRows(self._size)

    def find(self, engine: Any) -> None:
        from deepspeed.utils import groups

        engine.first_dataloader_check.remove()  # sends the first batch pickled, for a comparison
        named = engine.module.named_parameters()
        self._divided = {name for name, parameter in named if _dimension(parameter) is not None}
        self._group = groups.get_tensor_model_parallel_group()
        self._rank = dist.get_rank(self._group)

    def whole_size(self, tensor: Tensor) -> int:
        return super().whole_size(tensor) * (1 if _dimension(tensor) is None else self._size)

    def whole(self, tensor: Tensor) -> Tensor:
        if (dimension := _dimension(tensor)) is None:
            return tensor
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self._size)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=self._group)
        return torch.cat(parts, dimension)

    def clip(self, parameters: Iterable[torch.nn.Parameter], largest: float) -> Tensor:
        return clip_divided(parameters, lambda p: _dimension(p) is not None, largest, self._group)

    def holders(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        if _dimension(parameter) is None:
            return super().holders(parameter)
        return dist.get_rank() // self._size, dist.get_world_size() // self._size

    def saves(self, parameter: torch.nn.Parameter) -> bool:
        # A model read in partitions, at ZeRO 3, stays partitioned where AutoTP divides nothing.
        group = getattr(parameter, "ds_process_group", None)
        by_all = group is not None and dist.get_world_size(group) == dist.get_world_size()
        return by_all or self._rank == 0 or _dimension(parameter) is not None

    def shapes(self, name: str, parameter: torch.nn.Parameter) -> dict[str, list[int]]:
        (shape,) = super().shapes(name, parameter).values()
        parts = range(self._size) if name in self._divided else [self._rank]
        return {self._part(name, rank): shape for rank in parts}

    def name(self, parameter: str) -> str:
        return self._part(parameter, self._rank)

    def _part(self, name: str, rank: int) -> str:
        """Return the name of a rank's part in a checkpoint. Parts of input features lie in as many pieces as a tensor
        has rows, so checkpoints keep parts: a run goes on with the same `trainer.tensor_parallel`."""
        return f"{name}[{rank} of {self._size}]" if name in self._divided else name


def _dimension(parameter: Tensor) -> int | None:
    """Return the dimension in which AutoTP has divided a parameter, or None for an undivided parameter."""
    if (gather := getattr(parameter, "gather_params", None)) is None:
        return None
    return 1 if type(gather.__self__).__name__ == "LinearAllreduce" else 0
