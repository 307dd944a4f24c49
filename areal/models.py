"""Finding the model a run starts from."""

from __future__ import annotations

from pathlib import Path

from areal.config import Config, UserError


def resolve_model(config: Config) -> Path:
    """The folder of `config.model`, absolute: the quickstart's own model (made on first use), a folder, or what the
    model hub has by that name. Raises UserError."""
    if config.model == "quickstart":
        from areal import quickstart

        return quickstart.ensure(config.run_dir.resolve() / "models", seed=config.seed)
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve())
    if folder.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") != 1:
        raise UserError(f"There is no model folder {config.model}: set model=FOLDER to one that holds a config.json.")
    return _checked(_from_hub(config.model))


def _checked(folder: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"The model folder {folder} holds no {name}: give a folder in the Hugging Face format.")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are both; so is a machine without a network
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"The model {name} is no folder here and the model hub did not give it ({first}): set model=FOLDER."
        ) from None
