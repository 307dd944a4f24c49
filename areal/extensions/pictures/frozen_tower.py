"""The vision of a model in training: the frozen tower, and the positions of pictures.

The trainer computes only the text model of the wrapper. Hooks do the wrapper's part: vectors of a picture replace the
embeddings of its placeholders, further vectors are added to the outputs of the first layers at the placeholders
(DeepStack, arXiv 2406.04334), and rotary angles follow time, height and width.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.training.packed import FlatBatch, PackedRow
from areal.weights.wrappers import beside_text


class FrozenTower:
    """The tower of the model in `folder`; `module` is the model's text part. A picture's vectors are computed once for
    a batch, one picture at a time, so that the rest of the batch cannot change them."""

    def __init__(self, module: torch.nn.Module, folder: Path, device: torch.device) -> None:
        self._row: PackedRow | None = None
        embedding = module.get_input_embeddings()
        self._dtype, self._device = next(module.parameters()).dtype, device
        self.module, rotary = _read_tower(folder, self._dtype)
        self.module.to(device)
        layers = [part for part in module.modules() if type(part).__name__.endswith("DecoderLayer")]
        levels = len(getattr(self.module, "deepstack_visual_indexes", ()))
        for level, part in enumerate([embedding, *layers[:levels]]):
            part.register_forward_hook(partial(self._put_vectors, level))
        if "mrope_section" not in rotary:
            return
        self._axis = _axes(rotary).to(device)
        for part in module.modules():
            if type(part).__name__.endswith("RotaryEmbedding"):
                part.register_forward_hook(self._rotate)

    def look(self, batch: FlatBatch) -> None:
        """Set the pictures of the rows that follow."""
        self._grids = batch.pictures["grids"]
        self._patches = np.split(batch.pictures["patches"], np.cumsum(self._grids.prod(1))[:-1])
        self._vectors: dict[int, list[Tensor]] = {}

    def follow(self, row: PackedRow) -> None:
        """Set the row of the next forward pass, and of the recomputation in its backward pass."""
        self._row = row

    def _put_vectors(self, level: int, part: Any, inputs: Any, output: Tensor) -> Tensor | None:
        """Return the output of embeddings (level 0) or a layer, [1, T, H], with the tower's vectors of the level."""
        row = self._row
        if row is None or "pictures" not in row.inputs:
            return None
        vectors = output.clone()
        pictures, parts = row.inputs["pictures"], row.inputs["parts"]
        for number in pictures.unique().tolist():
            if number >= 0:
                places = pictures == number
                of_tower = self._of_picture(number)[level][parts[places].cpu()].to(output)
                vectors[0, places] = output[0, places] + of_tower if level else of_tower
        return vectors

    def _of_picture(self, number: int) -> list[Tensor]:
        """Return the vectors of a picture of the batch, a tensor [parts, H] for each level, in host memory."""
        if number not in self._vectors:
            patches = torch.from_numpy(self._patches[number]).to(self._device, self._dtype)
            grid = torch.from_numpy(self._grids[number : number + 1]).long().to(self._device)
            with torch.no_grad():
                features = self.module(patches, grid_thw=grid)
            levels = [features.pooler_output, *(features.get("deepstack_features") or ())]
            self._vectors[number] = [vectors.cpu() for vectors in levels]
        return self._vectors[number]

    def _rotate(self, rotary: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return the cosines and sines, [1, T, D], of the angles. An angle follows time, height or width."""
        row = self._row
        if row is None or "places" not in row.inputs:
            return None
        angles = row.inputs["places"].float()[:, self._axis] * rotary.inv_freq.float()
        angles = torch.cat([angles, angles], -1)[None]
        return tuple((turn(angles) * rotary.attention_scaling).to(output[0].dtype) for turn in (torch.cos, torch.sin))


class _Tiles(torch.nn.Module):
    """The tower of SmolVLM, with the connector that brings its vectors to the width of the text."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        from transformers import AutoModel
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector

        super().__init__()
        self.vision_model = AutoModel.from_config(config.vision_config, dtype=dtype)
        self.connector = SmolVLMConnector(config).to(dtype)

    def forward(self, tiles: Tensor, grid_thw: Tensor) -> Any:
        """Return the vectors, [n parts, H], of tiles, [n, 3 side side]."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        sizes = self.vision_model.config
        pixels, rows = tiles.view(len(tiles), 3, sizes.image_size, -1), sizes.image_size // sizes.patch_size
        whole = torch.ones(len(tiles), rows, rows, dtype=torch.bool, device=tiles.device)
        hidden = self.vision_model(pixel_values=pixels, patch_attention_mask=whole).last_hidden_state
        return BaseModelOutputWithPooling(pooler_output=self.connector(hidden).flatten(0, 1))


def _axes(rotary: dict[str, Any]) -> Tensor:
    """Return the axis (0 time, 1 height, 2 width) of a head's angles, int64 [D / 2]. rotary: parameters of the text."""
    _, height, width = sections = rotary["mrope_section"]
    if not rotary.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    axes[1 : 3 * height : 3], axes[2 : 3 * width : 3] = 1, 2
    return axes


def _read_tower(folder: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the tower, and the rotary parameters of the text."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tiles = config.model_type == "smolvlm"
    tower = _Tiles(config, dtype) if tiles else AutoModel.from_config(config.vision_config, dtype=dtype)
    name_in_files = re.compile(r"^.*\b(visual\.|(?=(vision_model|connector)\.))")
    stored = {name_in_files.sub("", name): tensor for name, tensor in beside_text(folder, 0, 1)}
    tower.load_state_dict(stored)
    return tower.requires_grad_(False).eval(), config.get_text_config().rope_parameters
