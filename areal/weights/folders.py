"""Writes folders of weights, complete or not at all, and reads the tensors of a folder.

A reader never sees an incomplete folder: a folder is written under a hidden name, synced, and renamed.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from areal.weights.chunks import FileSums
from areal.weights.model_files import ADAPTER_CONFIG_FILE, WEIGHT_SUFFIXES, WEIGHTS_FILE, model_files

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty folder to write files into. When the block ends, it becomes `folder`, complete and on disk.

    durable: False if the folder need not survive a crash of the machine; then nothing waits for the disk.

    An existing folder of that name is replaced and removed. A killed process leaves the old folder, the new folder, or
    no folder of the name; the next writer of the name removes other leftovers. If the block raises, nothing is changed.
    Only one writer of a name may be active at a time.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    partial = _hidden(folder)
    try:
        partial.mkdir()
        partial.chmod(0o755)  # generators may run as another user
        yield partial
        if durable:
            for path in partial.rglob("*"):
                sync(path)
            sync(partial)
        if folder.exists():
            os.replace(folder, _hidden(folder))  # a folder can only be renamed onto an empty folder
        os.replace(partial, folder)
        if durable:
            sync(folder.parent)
    finally:
        _remove_leftovers(folder)


def link(source: str | Path, target: str | Path) -> None:
    """Link a file that is never written again, or copy the file to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove_folder(folder: Path) -> None:
    """Remove a folder in one step: no reader sees a part of the folder. A missing folder is no error.

    The leftovers of a killed writer of the name are removed too. No writer of the name may be active.
    """
    if folder.exists():
        os.replace(folder, _hidden(folder))  # a rename takes no room on a full disk
    if folder.parent.exists():
        _remove_leftovers(folder)


def _hidden(folder: Path) -> Path:
    """Return an unused path beside `folder`, on the same file system."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")


def _remove_leftovers(folder: Path) -> None:
    prefix = f".{folder.name}."
    for path in folder.parent.iterdir():
        # The rest of the name must have no dot: ".7.5.x" belongs to "7.5" and not to "7".
        if path.name.startswith(prefix) and "." not in path.name.removeprefix(prefix):
            shutil.rmtree(path, ignore_errors=True)


def write_tensors(tensors: "Mapping[str, Tensor]", file: Path, **facts: str) -> None:
    """Write `tensors` as a safetensors file, and `facts` into its header."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt", **facts})
    file.chmod(0o644)  # save_file makes the file private, but generators may run as another user


def write_weights(tensors: "Mapping[str, Tensor]", folder: Path, shard: int = 0, shards: int = 1) -> Path:
    """Write `tensors`, with Hugging Face names, as a shard of the weights in `folder`. Returns the file."""
    file = folder / (f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else WEIGHTS_FILE)
    write_tensors(tensors, file)
    return file


def sums_of(file: Path, tensors: "Mapping[str, Tensor]") -> FileSums:
    """Return the checksums of a safetensors file that was just written from `tensors`. The sums are of the tensors in
    memory, so a reader notices errors on the way to the disk."""
    import torch

    with file.open("rb") as written:
        size = written.read(8)
        header = written.read(int.from_bytes(size, "little"))
    places = {name: value["data_offsets"] for name, value in json.loads(header).items() if name in tensors}
    in_order = (tensors[name] for name in sorted(places, key=places.__getitem__))
    stored = (tensor.contiguous().view(-1).view(torch.uint8).numpy().data for tensor in in_order)
    return FileSums.of_parts(file.name, chain([memoryview(size + header)], stored))


def saved_buffers(module: "Module") -> "dict[str, Tensor]":
    """Return the buffers, by name, that a model's files contain beside parameters."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def copy_model_files(source: Path, folder: Path, *, dtype: str) -> None:
    """Copy all files of the model in `source` except weights (configuration, tokenizer) into `folder`.

    dtype: the stored type of the weights in `folder`, e.g. "float32". Loaders read the type from config.json.
    """
    for path in source.iterdir():
        if path.is_file() and path.name != ADAPTER_CONFIG_FILE and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older spelling of the key
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def stored_tensors(folder: Path, shard: int = 0, shards: int = 1) -> "Iterator[tuple[str, Tensor]]":
    """Return the tensors of a model folder by name, as `model_files` lists them: all tensors, or, if `shards` is given,
    part `shard` of `shards` parts of about equal size.

    Every file is open on return, so the folder may be removed afterwards. Raises OSError, SafetensorError, UserError.
    """
    model = model_files(folder)
    if not model.tensors:
        raise FileNotFoundError(f"{folder} holds no model")
    opened: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in model.files}
    sizes = [prod(tensor.shape) for tensor in model.tensors]
    parts = [offset * shards // sum(sizes) for offset in accumulate(sizes, initial=0)]
    chosen = [tensor for tensor, part in zip(model.tensors, parts, strict=False) if part == shard]
    return ((tensor.name, opened[tensor.file].get_tensor(tensor.name)) for tensor in chosen)
