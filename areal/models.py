"""Finds the models of a run: the initial model, the reference model of the KL penalty, and those of scorers."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from areal.config import Config, LoraConfig, UserError, explain
from areal.processes import ROOT, cache_folder, tied

QUICKSTART_FOLDER = re.compile("quickstart-[0-9a-f]{12}")
# Where models say how long sequences may be.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


def quietly(doing: str) -> None:
    """Tells nobody what is being done."""


def resolve_model(config: Config, tell: Callable[[str], None] = quietly, *, weights: bool = True) -> Path:
    """Return the absolute folder of `config.model`, which names the quickstart's own model (made on first use), a
    folder, or a model on the model hub, of which `weights` may be left out. tell: is called with what is being done.
    Raises UserError."""
    return _resolve(config, config.model, "model", tell, weights)


def _resolve(config: Config, name: str, key: str, tell: Callable[[str], None], weights: bool) -> Path:
    if name == "quickstart":
        tell("it makes the quickstart's model")
        return _make_quickstart(config)
    return find_model(name, key, tell, weights=weights)


def resolve_reference(config: Config, tell: Callable[[str], None] = quietly, *, weights: bool = True) -> Path | None:
    """Return the absolute folder of `trainer.reference`. None: there is no KL penalty, or the reference model is the
    run's own model, or that of a scorer. Raises UserError."""
    if not config.trainer.kl_coef or config.trainer.reference is None or config.trainer.reference_scorer:
        return None
    return find_model(config.trainer.reference, "trainer.reference", tell, weights=weights)


def with_folders(config: Config, tell: Callable[[str], None] = quietly) -> Config:
    """Return the configuration with the names of its models replaced by their folders. Raises UserError."""
    trainer = config.trainer
    if reference := resolve_reference(config, tell):
        trainer = trainer.model_copy(update={"reference": str(reference)})
    scorers = {
        name: scorer.model_copy(
            update={"model": str(_resolve(config, scorer.model, f"scorers.{name}.model", tell, True))}
        )
        for name, scorer in config.scorers.items()
    }
    found = {"model": str(resolve_model(config, tell)), "trainer": trainer, "scorers": scorers}
    return config.model_copy(update=found)


def find_model(name: str, key: str, tell: Callable[[str], None] = quietly, *, weights: bool = True) -> Path:
    """Return the absolute folder of the model `name`, which is a folder or a model on the model hub. key: the
    configuration key that has this value, for error messages. tell: is called with what is being done, such as
    "it downloads NAME: 3.20 of 15.00 GB", from any thread. weights: whether they are downloaded, too. Raises
    UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve())
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"There is no model folder {name} ({key}): name one that holds a config.json.")
    return _checked(_from_hub(name, key, tell, weights))


def hub_id(model: str) -> str | None:
    """The model's name on the model hub, if its folder is one in the hub's cache."""
    cached = re.search(r"models--([^/]+)/snapshots/", model)
    return cached and cached[1].replace("--", "/")


def name_of(place: str) -> str:
    """The name of a model or data set: on the hub, or that of its file or folder."""
    if place.startswith("hf:"):
        return place.removeprefix("hf:").partition(":")[0]
    return hub_id(place) or Path(place).name


def label_of(place: str) -> str:
    """Its name as it may stand in a card on the hub: no Markdown, no HTML."""
    return re.sub(r"[^\w ./:@+-]", "?", name_of(place))


def check_trainable(folder: Path, ranks: int) -> None:
    """Raise UserError if the weights of the model in `folder` are quantized, if the log-probs of a sequence depend on
    those beside it, or if `ranks` ranks cannot divide its attention heads among them."""
    if _read_config(folder).get("quantization_config"):
        raise UserError(f"The model {folder} has quantized weights, which cannot be trained: name the original one.")
    sizes = _sizes(folder)
    if _rope(sizes)[0] == "dynamic":
        raise UserError(
            f"The model {folder} has the rope_type dynamic, which takes other positions beside a longer sequence, and "
            f"cannot be trained: set linear or yarn in its config.json, or leave it out."
        )
    heads = sizes.get("num_attention_heads", ranks)
    shared = sizes.get("num_key_value_heads") or heads
    if heads % ranks or (shared % ranks and ranks % shared):
        raise UserError(
            f"trainer.sequence_parallel is {ranks}, but the model {folder} has {heads} attention heads, and {shared} "
            f"for keys and values: set it to a divisor of {heads} that is a divisor or a multiple of {shared}."
        )


def context_of(folder: Path) -> int | None:
    """The most tokens of a sequence for which the model in `folder` is made; None if its config.json does not say."""
    sizes = _sizes(folder)
    longest = next((sizes[key] for key in _LENGTHS if isinstance(sizes.get(key), int)), None)
    kind, factor = _rope(sizes)
    # With other kinds, such as yarn, the length is that of the stretched positions, for vLLM as for transformers.
    return int(longest * factor) if longest and kind in ("linear", "dynamic") else longest


def _rope(sizes: Mapping[str, Any]) -> tuple[str | None, float]:
    """How rotary positions are scaled, and by what factor."""
    scaling = sizes.get("rope_scaling") or sizes.get("rope_parameters") or {}
    return scaling.get("rope_type", scaling.get("type")), scaling.get("factor") or 1


def architectures_of(folder: Path) -> list[str]:
    """The classes of the model in `folder`, such as Qwen3ForCausalLM."""
    return list(_read_config(folder).get("architectures") or ())


def check_adapters(model: object, weights: Iterable[str], lora: LoraConfig) -> None:
    """Raise UserError if a model with weights of these names lacks one of the layers that `lora` names; peft refuses
    only if it lacks all."""
    layers = {name.removesuffix(".weight").rpartition(".")[2] for name in weights if "." in name}
    names = [] if lora.target_modules == "all-linear" else lora.target_modules
    for name in names:
        last = name.rpartition(".")[2]
        if layers and last not in layers:
            close = difflib.get_close_matches(last, layers, 1)
            known = ", ".join(sorted(layer for layer in layers if layer.endswith("proj"))) or ", ".join(sorted(layers))
            raise UserError(
                f"trainer.lora.target_modules names {name!r}, but the model {model} has no such layer: "
                f"{f'did you mean {close[0]}?' if close else f'it has {known}.'}"
            )


def weight_sizes(folder: Path) -> dict[str, int]:
    """The numbers of elements of the weights in a model's folder, by name, without reading them; empty if it has none.
    Raises UserError if a file is damaged."""
    numbers: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with explain(
            (OSError, SafetensorError), f"The model's file {file} is damaged or incomplete: copy or download it again."
        ):
            shapes = shapes_in(file)
        numbers |= {name: math.prod(shape) for name, shape in shapes.items()}
    return numbers


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by name, from its header. Raises OSError, and SafetensorError if
    the file is damaged or cut short."""
    with safe_open(file, framework="np") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _sizes(folder: Path) -> dict[str, Any]:
    """What config.json says of the model of text. Raises UserError."""
    sizes = _read_config(folder)
    return sizes.get("text_config") or sizes


def _read_config(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises UserError."""
    with explain(
        (OSError, ValueError), f"The model's {folder / 'config.json'} cannot be read ({{why}}): copy it again."
    ):
        sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(sizes, dict):
        raise UserError(f"The model's {folder / 'config.json'} has no keys and values: copy it again.")
    return sizes


def quickstart_folder(parent: Path, seed: int = 0) -> Path:
    """The folder of the quickstart's model in `parent`, whether it exists or not.

    Its name has a hash of the seed and of the source files that shape the model: a change of one makes another model.
    """
    shaped_by = hashlib.sha256(f"{seed}".encode())
    for source in ("quickstart.py", "addition.py"):
        shaped_by.update((ROOT / "areal" / "data" / source).read_bytes())
    return parent / f"quickstart-{shaped_by.hexdigest()[:12]}"


def lacks_quickstart(config: Config) -> bool:
    """Whether the run has to make the quickstart's model first."""
    places = config.run_dir.resolve() / "models", cache_folder() / "areal"
    return config.model == "quickstart" and not any(quickstart_folder(p, config.seed).exists() for p in places)


def _make_quickstart(config: Config) -> Path:
    parent = config.run_dir.resolve() / "models"
    if (folder := quickstart_folder(parent, config.seed)).exists():
        return folder
    # A process of its own makes the model, because the master must not import torch.
    command = [sys.executable, "-m", "areal", "quickstart-model", str(parent), "--seed", str(config.seed)]
    # Threads that spin while they wait take six times the CPU time where engines are imported beside them.
    waiting = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.run(tied(*command), stdout=subprocess.DEVNULL, cwd=ROOT, env=waiting)
    if process.returncode:
        raise UserError(
            f"The quickstart's model could not be made: {' '.join(command)} exited with {process.returncode}."
        )
    return folder


def _checked(folder: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"The model folder {folder} has no {name}: give a folder in the Hugging Face format.")
    return folder


def _from_hub(name: str, key: str, tell: Callable[[str], None], weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class ReportedProgress(tqdm):
        """A progress bar that is told and not drawn."""

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                tell(f"it downloads {name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    tell(f"it downloads {name}")
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"] + ["*.safetensors"] * weights
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=ReportedProgress))
    except (OSError, ValueError) as error:  # huggingface_hub raises both, also without a network
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"The model {name} ({key}) is not a folder here, and it could not be downloaded ({first}): name a folder."
        ) from None
