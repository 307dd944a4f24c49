"""How a model sees: the number of tokens of a picture, their places and their positions.

A model that sees has a *placeholder*, a token that stands for a part of a picture. The model's tower makes a vector of
the part, and the vector replaces the placeholder's embedding. This module knows Qwen2.5-VL, Qwen3-VL and SmolVLM.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from areal.base.errors import UserError, explain
from areal.config import Config
from areal.extensions.pictures.picture_files import decode
from areal.models import SEEING, packages_of_vision
from areal.samples.pictures import digest_of
from areal.samples.trajectory import DIGEST_BYTES

# Names and defaults of a processor's sizes, and of the sizes of SmolVLM's tower.
SIZES = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
SQUARE = {"image_size": 224, "patch_size": 32}
PLACEHOLDER = "<|image_pad|>"


class Picture(NamedTuple):
    """A picture as the tower takes it. name: the digest. patches: float32 [P, D]. grid, parts: numbers of patches, and
    of vectors from the tower, in time, height and width. `tokens`: the number of vectors."""

    name: str
    patches: np.ndarray
    grid: tuple[int, int, int]
    parts: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        return math.prod(self.parts)


@dataclass(frozen=True)
class Sight:
    """How the model in `folder` sees. token: the placeholder's id. sizes: the processor's, by the names in SIZES."""

    folder: str
    token: int
    sizes: dict[str, int]
    placeholder: ClassVar[str] = PLACEHOLDER

    def tokens(self, width: int, height: int) -> int:
        """Return the number of placeholders for a picture of this size in pixels. Raises ValueError."""
        unit = self.sizes["patch_size"] * self.sizes["merge_size"]
        if max(width, height) > 200 * min(width, height):
            raise ValueError(f"a picture of {width} x {height} pixels is too narrow for the model")
        rows, columns = (round(side / unit) * unit for side in (height, width))
        lower, upper = self.sizes["min_pixels"], self.sizes["max_pixels"]
        if rows * columns > upper:
            shrunk = math.sqrt(height * width / upper)
            rows, columns = (max(unit, math.floor(side / shrunk / unit) * unit) for side in (height, width))
        elif rows * columns < lower:
            grown = math.sqrt(lower / (height * width))
            rows, columns = (math.ceil(side * grown / unit) * unit for side in (height, width))
        return rows // unit * (columns // unit)

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Return the text of a chat with a placeholder for each part of the pictures. Raises ValueError if the chat
        template does not write exactly one placeholder for a picture."""
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(sizes):
            raise ValueError(f"the text of the chat has {len(parts) - 1} placeholders for {len(sizes)} pictures")
        return parts[0] + "".join(self._text(*size) + part for size, part in zip(sizes, parts[1:], strict=True))

    def _text(self, width: int, height: int) -> str:
        """Return the text that stands for a picture of this size."""
        return self.placeholder * self.tokens(width, height)

    def look(self, content: bytes) -> Picture:
        """Return the output of the model's own processor for a picture. Raises ValueError."""
        features = self._processor(images=[decode(content)], return_tensors="np")
        time, height, width = (int(count) for count in features["image_grid_thw"][0])
        merge = self.sizes["merge_size"]
        patches: np.ndarray = features["pixel_values"]
        return Picture(digest_of(content), patches, (time, height, width), (time, height // merge, width // merge))

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil.from_pretrained(self.folder)

    def features(self, picture: Picture) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return a picture as vLLM's model takes it: arrays by patch, and arrays of the whole picture."""
        return {"pixel_values": picture.patches}, {"image_grid_thw": np.array(picture.grid)}

    def column(self, tokens: np.ndarray, parts: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
        """Return the column `pictures` of a prompt's tokens, or None without a placeholder. parts: message parts with
        the pictures at the first placeholders. Raises ValueError if placeholders and pictures do not fit."""
        runs = self._runs(tokens, [self.tokens(part["width"], part["height"]) for part in parts])
        column = np.zeros((len(tokens), DIGEST_BYTES), np.uint8)
        for run, part in zip(runs, parts, strict=False):
            column[run] = np.frombuffer(bytes.fromhex(part["digest"]), np.uint8)
        return column if runs else None

    def starts(self, tokens: np.ndarray, pictures: Sequence[Picture]) -> list[int]:
        """Return the first place of each picture's placeholders, int [n]; empty without placeholders. Placeholders
        after the last picture are ordinary tokens. Raises ValueError if they do not fit the pictures."""
        return [int(run[0]) for run in self._runs(np.asarray(tokens), [picture.tokens for picture in pictures])]

    def _runs(self, tokens: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
        """Return the places of each picture's placeholders, int [count]; empty without placeholders. counts: parts of
        each picture. Raises ValueError if the first placeholders do not fit the pictures."""
        places, end, runs = np.flatnonzero(tokens == self.token), 0, list[np.ndarray]()
        for count in counts if len(places) else ():
            run, end = places[end : end + count], end + count
            if len(run) < count or run[-1] - run[0] != count - 1:
                raise ValueError(f"the placeholders of a prompt are not those of its {len(counts)} pictures")
            runs.append(run)
        return runs


class SquareSight(Sight):
    """How SmolVLM sees: a picture is a square. `sizes` has its side `image_size` and the number of parts `tokens`."""

    placeholder = "<image>"

    def tokens(self, width: int, height: int) -> int:
        return self.sizes["tokens"]

    def _text(self, width: int, height: int) -> str:
        around = "<fake_token_around_image>"
        return f"{around}<global-img>{super()._text(width, height)}{around}"

    def look(self, content: bytes) -> Picture:
        (square,) = self._processor(images=[decode(content)], return_tensors="np")["pixel_values"][0]
        return Picture(digest_of(content), square.reshape(1, -1), (1, 1, 1), (1, self.sizes["tokens"], 1))

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        return SmolVLMImageProcessorPil.from_pretrained(self.folder)

    def features(self, picture: Picture) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        side = self.sizes["image_size"]
        square = picture.patches.reshape(1, 3, side, side)
        every = np.ones((1, side, side), np.int64)
        return {"pixel_values": square, "pixel_attention_mask": every}, {"num_patches": np.array(1)}


def check_pictures(config: Config) -> None:
    """Raise UserError if prompts of the run may not have pictures."""
    sight_of(config.model)
    trainer = config.trainer
    blind = {
        "trainer.kl_coef": trainer.kl_coef and not trainer.lora,
        "trainer.reference": trainer.reference,
        "trainer.teacher": trainer.teacher,
        "trainer.sequence_parallel": trainer.sequence_parallel > 1,
        "generator.engine_options.language_model_only": config.generator.engine_options.get("language_model_only"),
    }
    if setting := next((name for name, is_set in blind.items() if is_set), None):
        raise UserError(f"Prompts have pictures, which {setting} does not take: leave the pictures or the setting out.")


@lru_cache(maxsize=8)
def sight_of(folder: str) -> Sight:
    """Return how the model in `folder` sees. Raises UserError if the model does not see, or sees in an unknown way."""
    config = _read(Path(folder) / "config.json")
    if not packages_of_vision(Path(folder)):
        raise UserError(f"the model {folder} sees no pictures here, which {', '.join(SEEING)} alone do: leave them out")
    settings = _read(Path(folder) / "preprocessor_config.json")
    settings |= _read(Path(folder) / "processor_config.json").get("image_processor") or {}
    if config["model_type"] == "smolvlm":
        if settings.get("do_image_splitting", True):
            raise UserError(
                f"the model {folder} sees a picture in tiles, which is not trained here: set do_image_splitting to "
                f"false in its preprocessor_config.json"
            )
        tower = SQUARE | (config.get("vision_config") or {})
        sizes = {"image_size": tower["image_size"]}
        sizes["tokens"] = (tower["image_size"] // tower["patch_size"] // config.get("scale_factor", 2)) ** 2
        return SquareSight(folder, int(config["image_token_id"]), sizes)
    of_size = settings.get("size") or {}
    settings = {"min_pixels": of_size.get("shortest_edge"), "max_pixels": of_size.get("longest_edge")} | settings
    sizes = {name: int(settings.get(name) or default) for name, default in SIZES.items()}
    return Sight(folder, int(config["image_token_id"]), sizes)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    with explain((OSError, ValueError), f"The model's {file} cannot be read ({{why}}): copy it again."):
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return values
