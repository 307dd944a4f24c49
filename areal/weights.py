"""Weights on disk: folders that are there complete, or not at all.

A reader never sees half a folder: it is written beside its place, synced, and renamed into it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write files into; it becomes `folder`, complete and on disk, when the block ends.

    A block that raises leaves nothing behind. Raises FileExistsError where `folder` exists: a published version never
    changes under its readers.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already and is not overwritten")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes it private, but generators may run as another user
        yield partial
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync(folder.parent)


def write_weights(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """Write `tensors`, by their Hugging Face names, as `folder`/model.safetensors. Returns the file."""
    from safetensors.torch import save_file

    file = folder / WEIGHTS_FILE
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    file.chmod(0o644)  # written privately, but generators may run as another user
    return file


def copy_model_files(source: Path, folder: Path, *, dtype: str) -> None:
    """Copy everything of the model in `source` but its weights (configuration, tokenizer) into `folder`.

    dtype: what the weights beside it are stored in, e.g. "float32"; config.json is made to say so, since loaders
    believe it.
    """
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older spelling of the same key
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
