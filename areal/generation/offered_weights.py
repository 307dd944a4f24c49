"""Checks that weights offered to an engine fit the engine's model."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from areal.base.errors import UserError, explain
from areal.config.trainer_section import LoraConfig
from areal.models import ties_head
from areal.weights.model_files import ADAPTER_FILE, WEIGHTS_FILE, Shapes, model_files, tensors_in
from areal.weights.wrappers import published_shapes

HEAD = "lm_head.weight"


class WeightLoadError(Exception):
    """The weights offered to `load` do not fit the model; the engine keeps its current weights."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    folder: Path
    shapes: Shapes
    tied: bool
    lora: LoraConfig | None
    stop_tokens: list[int]
    vocab_size: int
    max_len: int
    kept_words: int
    kept_logprobs: bool


def read_model_folder(model: Path) -> tuple[Shapes, bool]:
    """Return the shapes of the tensors that `load` expects, from the headers of the weight files in a Hugging Face
    folder, and whether the head is tied. Raises UserError if the folder does not hold a readable model."""
    if not (model / "config.json").is_file():
        raise UserError(f"{model} is not the folder of a Hugging Face model: it has no config.json.")
    with explain(OSError, f"The model in {model} cannot be read: {{why}}."):
        shapes = model_files(model).shapes
    if not shapes:
        raise UserError(f"{model} has no weights in safetensors format (*.safetensors).")
    tied = ties_head(model)
    return shapes, HEAD not in shapes if tied is None else tied


def check_offer(folder: Path, model: EngineModel) -> None:
    """Raise WeightLoadError if the weights in `folder` do not fit the model."""
    with explain((OSError, UserError), f"{folder} cannot be read: {{why}}", WeightLoadError):
        is_adapter = (folder / ADAPTER_FILE).is_file()
        tensors = tensors_in(folder / ADAPTER_FILE) if is_adapter else model_files(folder).tensors
        if not tensors:
            raise FileNotFoundError(f"it has neither {WEIGHTS_FILE} nor {ADAPTER_FILE}")
    check_shapes({tensor.name: tensor.shape for tensor in tensors}, model, str(folder))


def check_shapes(shapes: Shapes, model: EngineModel, named: str) -> None:
    """Raise WeightLoadError if tensors of these shapes do not fit the model."""
    if model.lora:
        wrong = _differences(shapes, _factors(model.lora.rank, shapes, model.shapes), ())
    else:
        optional = (HEAD,) if model.tied else ()  # files may store or omit a tied head
        # A trainer of most models publishes exactly the tensors of the files. Then transformers is not needed.
        wrong = _differences(shapes, model.shapes, optional)
        if wrong:
            with explain((OSError, KeyError, ValueError), f"{model.folder} cannot be read: {{why}}", WeightLoadError):
                wrong = _differences(shapes, published_shapes(model.folder), optional)
    if wrong:
        raise WeightLoadError(f"{named} does not fit the model: {len(wrong)} tensors differ, the first is {wrong[0]}")


def _differences(shapes: Shapes, expected: Shapes, optional: Collection[str]) -> list[str]:
    """Describe the tensors, except the `optional` tensors, whose shape differs from the expected shape."""
    return [
        f"{name} (expected {expected.get(name)}, found {shapes.get(name)})"
        for name in sorted(shapes.keys() | expected.keys())
        if name not in optional and shapes.get(name) != expected.get(name)
    ]


def _factors(rank: int, names: Iterable[str], weights: Shapes) -> Shapes:
    """Return the expected shapes of peft's factors A and B for the adapter tensors `names`."""
    adapted = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    shapes: Shapes = {}
    for weight in adapted:
        if len(shape := weights.get(f"{weight}.weight", ())) == 2:
            shapes[f"base_model.model.{weight}.lora_A.weight"] = (rank, shape[1])
            shapes[f"base_model.model.{weight}.lora_B.weight"] = (shape[0], rank)
    return shapes
