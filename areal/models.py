"""Finds the models of a run: the initial model, and the reference model of the KL penalty."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.config import Config, UserError
from areal.processes import ROOT, tied


def quietly(doing: str) -> None:
    """Tells nobody what is being done."""


def resolve_model(config: Config, tell: Callable[[str], None] = quietly) -> Path:
    """Return the absolute folder of `config.model`, which names the quickstart's own model (made on first use), a
    folder, or a model on the model hub. tell: is called with what is being done. Raises UserError."""
    if config.model == "quickstart":
        tell("it makes the quickstart's model")
        return _make_quickstart(config)
    return find_model(config.model, "model", tell)


def resolve_reference(config: Config, tell: Callable[[str], None] = quietly) -> Path | None:
    """Return the absolute folder of `trainer.reference`. None: there is no KL penalty, or the reference model is the
    run's own model. Raises UserError."""
    if not config.trainer.kl_coef or config.trainer.reference is None:
        return None
    return find_model(config.trainer.reference, "trainer.reference", tell)


def with_folders(config: Config, tell: Callable[[str], None] = quietly) -> Config:
    """Return the configuration with the names of its models replaced by their folders. Raises UserError."""
    trainer = config.trainer
    if reference := resolve_reference(config, tell):
        trainer = trainer.model_copy(update={"reference": str(reference)})
    return config.model_copy(update={"model": str(resolve_model(config, tell)), "trainer": trainer})


def find_model(name: str, key: str, tell: Callable[[str], None] = quietly) -> Path:
    """Return the absolute folder of the model `name`, which is a folder or a model on the model hub. key: the
    configuration key that has this value, for error messages. tell: is called with what is being done, such as
    "it downloads NAME: 3.20 of 15.00 GB", from any thread. Raises UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve())
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"There is no model folder {name}: set {key}=FOLDER to one that holds a config.json.")
    return _checked(_from_hub(name, key, tell))


def hub_id(model: str) -> str | None:
    """The model's name on the model hub, if its folder is one in the hub's cache."""
    cached = re.search(r"models--([^/]+)/snapshots/", model)
    return cached and cached[1].replace("--", "/")


def name_of(place: str) -> str:
    """The name of a model or data set: on the hub, or that of its file or folder."""
    if place.startswith("hf:"):
        return place.removeprefix("hf:").partition(":")[0]
    return hub_id(place) or Path(place).name


def check_heads(folder: Path, ranks: int) -> None:
    """Raise UserError if `ranks` ranks cannot divide the attention heads of the model in `folder` among them."""
    if ranks == 1:
        return
    sizes = json.loads((folder / "config.json").read_text())
    sizes = sizes.get("text_config") or sizes
    heads = sizes.get("num_attention_heads", ranks)
    shared = sizes.get("num_key_value_heads") or heads
    if heads % ranks or (shared % ranks and ranks % shared):
        raise UserError(
            f"trainer.sequence_parallel is {ranks}, but the model {folder} has {heads} attention heads, and {shared} "
            f"for keys and values: set it to a divisor of {heads} that is a divisor or a multiple of {shared}."
        )


def quickstart_folder(parent: Path, seed: int = 0) -> Path:
    """The folder of the quickstart's model in `parent`, whether it exists or not.

    Its name has a hash of the seed and of the source files that shape the model: a change of one makes another model.
    """
    shaped_by = hashlib.sha256(f"{seed}".encode())
    for source in ("quickstart.py", "addition.py"):
        shaped_by.update((ROOT / "areal" / "data" / source).read_bytes())
    return parent / f"quickstart-{shaped_by.hexdigest()[:12]}"


def _make_quickstart(config: Config) -> Path:
    parent = config.run_dir.resolve() / "models"
    if (folder := quickstart_folder(parent, config.seed)).exists():
        return folder
    # A process of its own makes the model, because the master must not import torch.
    command = [sys.executable, "-m", "areal", "quickstart-model", str(parent), "--seed", str(config.seed)]
    process = subprocess.run(tied(*command), stdout=subprocess.DEVNULL, cwd=ROOT)
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


def _from_hub(name: str, key: str, tell: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class ReportedProgress(tqdm):
        """A progress bar that is told and not drawn."""

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                tell(f"it downloads {name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    tell(f"it downloads {name}")
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=ReportedProgress))
    except (OSError, ValueError) as error:  # huggingface_hub raises both, also without a network
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"The model {name} is not a folder here, and it could not be downloaded ({first}): set {key}=FOLDER."
        ) from None
