"""Finding the models of a run: the one it starts from, and the one it is not to leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from areal.config import Config, UserError
from areal.processes import ROOT


def resolve_model(config: Config) -> Path:
    """The folder of `config.model`, absolute: the quickstart's own model (made on first use), a folder, or what the
    model hub has by that name. Raises UserError."""
    if config.model == "quickstart":
        return _make_quickstart(config)
    return find_model(config.model, "model")


def resolve_reference(config: Config) -> Path | None:
    """The folder of `trainer.reference`, absolute; None where there is no penalty or none but the run's own model.

    Raises UserError."""
    if not config.trainer.kl_coef or config.trainer.reference is None:
        return None
    return find_model(config.trainer.reference, "trainer.reference")


def with_folders(config: Config) -> Config:
    """The configuration with folders in place of the names of its models. Raises UserError."""
    trainer = config.trainer
    if reference := resolve_reference(config):
        trainer = trainer.model_copy(update={"reference": str(reference)})
    return config.model_copy(update={"model": str(resolve_model(config)), "trainer": trainer})


def find_model(name: str, key: str) -> Path:
    """The absolute folder of a model, given as the value of the configuration's `key`: a folder, or what the model hub
    has by that name. Raises UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve())
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"There is no model folder {name}: set {key}=FOLDER to one that holds a config.json.")
    return _checked(_from_hub(name, key))


def _make_quickstart(config: Config) -> Path:
    # In a process of its own: torch is no business of the master's.
    parent = str(config.run_dir.resolve() / "models")
    command = [sys.executable, "-m", "areal", "quickstart-model", parent, "--seed", str(config.seed)]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if made.returncode:
        raise UserError(f"The quickstart's model could not be made: {' '.join(command)} exited with {made.returncode}.")
    return Path(made.stdout.splitlines()[-1])


def _checked(folder: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"The model folder {folder} holds no {name}: give a folder in the Hugging Face format.")
    return folder


def _from_hub(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are both; so is a machine without a network
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"The model {name} is no folder here and the model hub did not give it ({first}): set {key}=FOLDER."
        ) from None
