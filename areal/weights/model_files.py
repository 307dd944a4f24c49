"""Finds a model's weights among the files of a folder: one answer for trainers, engines, adapters, exports and checks.

Libraries differ. Without an index vLLM reads all files, transformers `model.safetensors` alone. With Mistral's
`consolidated.safetensors` vLLM reads nothing else. transformers adds an adapter in the folder. Some libraries keep a
head beside tied embeddings, some drop the head. Here the weights are `model.safetensors`, the files in the index, or a
complete set of numbered shards. A folder that libraries would read as different models is refused. `only_model` hides
all other files from libraries.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from areal.base.errors import UserError, explain
from areal.models import read_json, ties_head

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
Shapes = dict[str, tuple[int, ...]]
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_HEAD, _EMBEDDINGS = re.compile(r"(.*\.)?lm_head\.weight"), re.compile(r".*\b(embed_tokens|wte|embed_in)\.weight")
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
# Keys of config.json that programs change when they copy a model.
_WRITTEN_ANEW = {"transformers_version", "_name_or_path", "torch_dtype", "dtype"}
# Bytes of a tensor that are compared at once.
_BYTES_AT_ONCE = 1 << 24


class StoredTensor(NamedTuple):
    """A tensor of a model. dtype: in the words of safetensors, such as BF16. tied: whether the tensor is a copy of the
    embeddings; loaders take the embeddings instead."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    tied: bool = False


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The tensors of a model, file by file in order; none without weights. beside: the files of weights in the folder
    that do not belong to the model."""

    tensors: tuple[StoredTensor, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        return list(dict.fromkeys(tensor.file for tensor in self.tensors))

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def shapes(self) -> Shapes:
        return {tensor.name: tensor.shape for tensor in self.tensors}


def model_files(folder: Path) -> ModelFiles:
    """Return the weights of the model in `folder`, also of a published folder. Raises UserError if a file is missing or
    damaged, or if libraries would read different models; OSError."""
    present = {path.name for path in folder.iterdir() if path.name.endswith(".safetensors")} - {ADAPTER_FILE}
    weight_map = read_json(folder / INDEX_FILE).get("weight_map", {}) if (folder / INDEX_FILE).is_file() else {}
    names = _names_of_files(folder, present, {*weight_map.values()})
    tensors = [tensor for name in names for tensor in tensors_in(folder / name)]
    if not tensors:
        return ModelFiles()
    counts = Counter(tensor.name for tensor in tensors)
    for name in {*weight_map, *counts}:
        if counts[name] != 1:
            raise UserError(f"The files of the model in {folder} have {name} {counts[name]} times: copy it again.")
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        raise UserError(
            f"{folder} has an adapter beside its model, which transformers would add and vLLM would not: remove its "
            f"{ADAPTER_CONFIG_FILE}, or merge the adapter into the model."
        )
    if (folder / "config.json").is_file() and (named := read_json(folder / "config.json").get("transformers_weights")):
        raise UserError(
            f"The config.json of {folder} has transformers_weights={named}, a file that transformers would read in "
            f"place of {names[0]}, and vLLM would not: remove this key."
        )
    return ModelFiles(_with_ties(folder, tensors), tuple(sorted(present - {*names})))


def _names_of_files(folder: Path, present: set[str], indexed: set[str]) -> list[str]:
    """Return the names of the model's files of weights."""
    if indexed & present:
        if missing := sorted(indexed - present):
            raise UserError(f"{folder} lacks {missing[0]}, which its {INDEX_FILE} names: copy or download it again.")
        if WEIGHTS_FILE in present - indexed:
            raise UserError(
                f"{folder} has two models, {WEIGHTS_FILE} and the files that {INDEX_FILE} names: remove one of them."
            )
        return sorted(indexed)
    if WEIGHTS_FILE in present:
        return [WEIGHTS_FILE]
    shards = {name: int(numbered[1]) for name in sorted(present) if (numbered := _SHARD.fullmatch(name))}
    if (shards and {*shards.values()} != {len(shards)}) or (present and not shards):
        raise UserError(
            f"{folder} has {min(present)}, but neither {WEIGHTS_FILE} nor all shards of a model: copy or download it "
            f"again, or rename the file to {WEIGHTS_FILE} if it is the whole model."
        )
    return list(shards)


def tensors_in(file: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file. Raises UserError if the file is damaged; OSError."""
    damaged = f"The model's file {file} is damaged: copy or download it again."
    with explain(SafetensorError, damaged), safe_open(file, framework="np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        return [StoredTensor(name, file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()]


def _with_ties(folder: Path, tensors: list[StoredTensor]) -> tuple[StoredTensor, ...]:
    """Return the tensors, with a mark on a head that is a copy of the embeddings. Raises UserError if the head differs
    from the embeddings, although config.json ties both."""
    head = next((tensor for tensor in tensors if _HEAD.fullmatch(tensor.name)), None)
    embeddings = [tensor for tensor in tensors if _EMBEDDINGS.fullmatch(tensor.name)]
    if head is None or not embeddings or not (folder / "config.json").is_file() or not ties_head(folder):
        return tuple(tensors)
    if not _are_equal(head, min(embeddings, key=lambda tensor: len(tensor.name))):
        raise UserError(
            f"The model {folder} has a head, {head.name}, that differs from its embeddings, but its config.json has "
            f"tie_word_embeddings=true, so libraries read different models: set that to false to have the head, or "
            f"remove the head."
        )
    return tuple(tensor._replace(tied=tensor is head) for tensor in tensors)


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    same_kind = (first.dtype, first.shape) == (second.dtype, second.shape)
    return same_kind and all(map(eq, _pieces(first), _pieces(second)))


def _pieces(tensor: StoredTensor) -> Iterator[bytes]:
    with tensor.file.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(header))[tensor.name]["data_offsets"]
        file.seek(8 + header + start)
        while start < stop:
            yield (piece := file.read(min(_BYTES_AT_ONCE, stop - start)))
            start += len(piece)


def write_index(folder: Path) -> None:
    """Write the index that loaders need for weights in several files."""
    model = model_files(folder)
    described = {
        "metadata": {"total_size": model.size},
        "weight_map": {tensor.name: tensor.file.name for tensor in model.tensors},
    }
    (folder / INDEX_FILE).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


@contextmanager
def only_model(folder: Path) -> Iterator[Path]:
    """Yield a folder from which libraries read only the model in `folder`: `folder` itself, or links to its files for
    the time of the block. Raises as `model_files` does."""
    model = model_files(folder)
    names = [file.name for file in model.files]
    if not model.beside and (len(names) < 2 or (folder / INDEX_FILE).is_file()):
        yield folder
        return
    with TemporaryDirectory(prefix="areal-model-") as place:
        view, linked = Path(place), (path for path in folder.iterdir() if not path.name.endswith(WEIGHT_SUFFIXES))
        for path in [*linked, *model.files]:
            (view / path.name).symlink_to(path.absolute())
        if names != [WEIGHTS_FILE]:
            write_index(view)
        yield view


def weight_sizes(folder: Path) -> dict[str, int]:
    """Return the numbers of elements of a model's weights, by name; empty without weights. Raises UserError."""
    if not folder.is_dir():
        return {}
    with explain(OSError, f"The model in {folder} cannot be read ({{why}}): copy or download it again."):
        return {name: math.prod(shape) for name, shape in model_files(folder).shapes.items()}


def digests_of(folder: Path) -> dict[str, str]:
    """Return digests of the parts of a model that are equal in all copies: the configuration, names and sizes of the
    weights, the tokenizer, the chat template. Missing parts are left out. Keys that copying programs change, and the
    type of the weights, do not count. Raises UserError if a file is damaged."""
    names = [name for name in ("config.json", "tokenizer.json", "tokenizer_config.json") if (folder / name).is_file()]
    values = {name: read_json(folder / name) for name in names}
    config, tokenizer = values.get("config.json", {}), values.get("tokenizer.json", {})
    template, in_tokenizer = folder / "chat_template.jinja", values.get("tokenizer_config.json", {})
    facts = {
        "config.json": {key: value for key, value in config.items() if key not in _WRITTEN_ANEW},
        "list of weights": weight_sizes(folder),
        "tokenizer.json": [tokenizer[key] for key in ("model", "added_tokens", "pre_tokenizer") if key in tokenizer],
        "chat template": template.read_text() if template.is_file() else in_tokenizer.get("chat_template"),
    }
    texts = {name: json.dumps(fact, sort_keys=True) for name, fact in facts.items() if fact}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def check_same(folder: Path, digests: Mapping[str, str]) -> None:
    """Raise UserError if the model in a folder of this machine differs from the run's model. digests: of the latter."""
    for name, digest in digests_of(folder).items():
        if digests.get(name, digest) != digest:
            raise UserError(
                f"{folder} on this machine is not the model of the run, its {name} differs: copy it from the master's "
                f"machine."
            )
