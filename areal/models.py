"""Finds the models of a run: the initial model, the reference model of the KL penalty, and the scorers' models."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal.base.errors import UserError, explain
from areal.base.hub import reach_hub
from areal.base.processes import ROOT, cache_folder, tied
from areal.config import Config
from areal.config.trainer_section import LoraConfig

MOST_KEPT, MOST_TOP_K = 256, 160
"""The most words stored with a token, 1 KiB of numbers, and the largest `sampling.top_k` if words are stored."""
QUICKSTART_FOLDER = re.compile("quickstart-[0-9a-f]{12}")
# Types of layers, by old and new names in transformers, without attention or with attention that the trainer computes.
COMPUTED = {
    *("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid", "hybrid_sliding"),
    *("linear_attention", "mamba", "conv", "moe", "sparse", "dense"),
}
# Types of text models in wrappers, and the types with a class in transformers that compute the same.
_TEXT_OF = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
TEXT_TYPES = {wrapper + suffix: text for wrapper, text in _TEXT_OF.items() for suffix in ("", "_text")}
# Types of models whose layers keep the trainer's arguments about a row from the attention function.
SILENT = {"nemotron", "stablelm"}
SHORTER = "set generator.max_model_len (for `areal sft`: max_length) to at most that"
# Types of models that see pictures, and the packages that vLLM needs for a type beside torchvision.
SEEING = {"qwen2_5_vl": (), "qwen3_vl": (), "smolvlm": ("num2words",)}
# Keys of config.json for the number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Where models say how long sequences may be.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


def quietly(doing: str) -> None:
    """Ignore a report of progress."""


def resolve_model(config: Config, tell: Callable[[str], None] = quietly, *, weights: bool = True) -> Path:
    """Return the absolute folder of `config.model`, which names the quickstart's own model (made on first use), a
    folder, or a model on the model hub. tell: called with reports of progress. weights: whether to download weights.
    Raises UserError."""
    return _resolve(config, config.model, "model", tell, weights)


def _resolve(config: Config, name: str, key: str, tell: Callable[[str], None], weights: bool) -> Path:
    if name == "quickstart":
        tell("it makes the quickstart's model")
        parent = config.run_dir.resolve() / "models"
        if (folder := quickstart_folder(parent, config.seed)).exists():
            return folder
        # Another process makes the model, because the master must not import torch.
        command = [sys.executable, "-m", "areal", "quickstart-model", str(parent), "--seed", str(config.seed)]
        # Threads that spin while waiting take six times the CPU time if engines are imported at the same time.
        waiting = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.run(tied(*command), stdout=subprocess.DEVNULL, cwd=ROOT, env=waiting)
        if process.returncode:
            raise UserError(
                f"The quickstart's model could not be made: {' '.join(command)} exited with {process.returncode}."
            )
        return folder
    return find_model(name, key, tell, weights=weights)


def resolve_reference(config: Config, tell: Callable[[str], None] = quietly, *, weights: bool = True) -> Path | None:
    """Return the absolute folder of `trainer.reference`. None: there is no KL penalty, or the reference model is the
    run's own model or a scorer's. Raises UserError."""
    if not config.trainer.kl_coef or config.trainer.reference is None or config.trainer.reference_scorer:
        return None
    return find_model(config.trainer.reference, "trainer.reference", tell, weights=weights)


def with_folders(config: Config, tell: Callable[[str], None] = quietly) -> Config:
    """Return the configuration with folders in place of the names of models. Raises UserError."""
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
    configuration key with this value, for error messages. tell: called with reports of progress, such as "it downloads
    NAME: 3.20 of 15.00 GB", from any thread. weights: whether to download weights, too. Raises UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve())
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"There is no model folder {name} ({key}): name one that holds a config.json.")
    return _checked(_from_hub(name, key, tell, weights))


def hub_id(model: str) -> str | None:
    """Return the model's name on the model hub, if its folder is in the hub's cache."""
    cached = re.search(r"models--([^/]+)/snapshots/", model)
    return cached and cached[1].replace("--", "/")


def name_of(place: str) -> str:
    """Return the name of a model or data set: on the hub, or of a file or folder."""
    if place.startswith("hf:"):
        return place.removeprefix("hf:").partition(":")[0]
    return hub_id(place) or Path(place).name


def label_of(place: str) -> str:
    """Return the name as it may stand in a card on the hub: no Markdown, no HTML."""
    return re.sub(r"[^\w ./:@+-]", "?", name_of(place))


def check_trainable(folder: Path, ranks: int = 1, longest: int | None = None) -> None:
    """Raise UserError if config.json shows that the trainer cannot train the model in `folder`, or computes it
    differently from generators. Neither weights nor torch are loaded.

    ranks: how many ranks compute a row together. longest: the most tokens of a sequence; None: the model's limit.
    """
    sizes, kind = sizes_of(folder), _text_type(folder)
    if why := _why_untrainable(_read_config(folder), sizes, kind, longest or context_of(folder) or sys.maxsize):
        raise UserError(f"The model {folder} cannot be trained: {why}.")
    heads = sizes.get("num_attention_heads", ranks)
    shared = sizes.get("num_key_value_heads") or heads
    if heads % ranks or (shared % ranks and ranks % shared):
        raise UserError(
            f"trainer.sequence_parallel is {ranks}, but the model {folder} has {heads} attention heads, and {shared} "
            f"for keys and values: set it to a divisor of {heads} that is a divisor or a multiple of {shared}."
        )


def _why_untrainable(facts: Mapping[str, Any], sizes: Mapping[str, Any], kind: str | None, longest: int) -> str | None:
    """Return why the trainer cannot train a model, and a remedy, or None. facts: of config.json. sizes: of the text."""
    if facts.get("quantization_config"):
        return "its weights are quantized: name the original one, or a copy of it in bf16"
    if _rope(sizes)[0] == "dynamic":
        return (
            "its rope_type, dynamic, takes other positions beside a longer sequence: set linear or yarn in its "
            "config.json, or leave it out"
        )
    if kind is not None and kind not in _causal_models():
        if facts.get("auto_map"):
            return "it needs Python code of its own, which is never run: take a model that transformers knows"
        return f"transformers has no causal language model of the type {kind}: name a model of text"
    if sizes.get("index_topk"):
        return "its attention is sparse, by an indexer that the trainer does not compute: take another model"
    kinds = sizes.get("layer_types") or ()
    if unknown := sorted({*kinds} - COMPUTED):
        return f"the trainer does not compute layers of the type {unknown[0]}: take another model"
    code = _code_of(kind)
    if kind in SILENT or ("ALL_ATTENTION_FUNCTIONS" not in code and "Attention(nn.Module)" in code):
        return f"transformers lets nobody replace the attention of models of the type {kind}: take another model"
    if "position_bias=position_bias" in code:
        return "its attention has a bias by position, which the trainer does not compute: take another model"
    window = sizes.get("sliding_window") if sizes.get("use_sliding_window", True) else None
    by_mask = "create_sliding_window_causal_mask" in code and not re.search(r"\bsliding_window=(?!config)", code)
    if window and window < longest and by_mask:
        return f"not all of its layers tell the attention function their window of {window} tokens, so {SHORTER}"
    return None


def packages_of_vision(folder: Path) -> Sequence[str]:
    """Return further packages that vLLM needs for the model in `folder`; none if the model sees no pictures."""
    kind = _read_config(folder).get("model_type")
    return ["torchvision", *SEEING[kind]] if kind in SEEING else []


def is_wrapper(folder: Path) -> bool:
    """Return whether the model in `folder` has parts beside text, such as vision."""
    facts = _read_config(folder)
    return "vision_config" in facts or isinstance(facts.get("text_config"), dict)


def _text_type(folder: Path) -> str | None:
    """Return the type of the text model in `folder`, as transformers computes it; None if config.json has no type."""
    kind, of_text = _read_config(folder).get("model_type"), sizes_of(folder).get("model_type")
    if kind is not None and of_text is None:
        of_text = f"{kind}_text"
    return TEXT_TYPES.get(of_text, of_text) if of_text else kind


def flash_computes(folder: Path) -> bool:
    """Return whether flash attention 2 computes the attention of the model in `folder`: without sinks and chunks."""
    sizes = sizes_of(folder)
    chunked = "chunked_attention" in (sizes.get("layer_types") or ()) or sizes.get("attention_chunk_size")
    return not chunked and "s_aux=" not in _code_of(_text_type(folder))


@cache
def _causal_models() -> frozenset[str]:
    """Return the types of models with a causal language model in the installed transformers.

    The types are read from the text of the file: importing the file would import torch into this process.
    """
    listed = _library_text("auto", "modeling_auto").partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2]
    return frozenset(re.findall(r'^ +\("([\w-]+)", "\w+"\)', listed.partition("\n)\n")[0], re.MULTILINE))


def _code_of(kind: str | None) -> str:
    """Return the code of transformers for models of a type; empty if the code is elsewhere."""
    package = (kind or "").replace("-", "_").removesuffix("_text")
    return _library_text(package, f"modeling_{package}") if package else ""


@cache
def _library_text(package: str, module: str) -> str:
    library = find_spec("transformers")
    assert library is not None and library.origin is not None  # a dependency of this project
    file = Path(library.origin).parent / "models" / package / f"{module}.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def is_mixture(folder: Path) -> bool:
    """Return whether the model in `folder` is a mixture of experts. Raises UserError if config.json cannot be read."""
    return mixture_of(folder)[1] > 1


def mixture_of(folder: Path) -> tuple[str | None, int]:
    """Return the kind of the model in `folder`, and the number of experts in a layer, or 0. Raises UserError."""
    counts = [sizes_of(folder).get(name) or 0 for name in EXPERTS]
    numbers = (max(count, default=0) if isinstance(count, list) else count for count in counts)  # a number per layer
    return _text_type(folder), max(numbers)


def kept_words_of(config: Config) -> int:
    """Return how many kept words are stored with a token at most; 0: none are needed. Raises UserError if the words may
    be too many.

    Words of equal logits are kept beyond `sampling.top_k`. In bf16 several words are equal, so there is room for half
    as many again.
    """
    if not config.keeps_words:
        return 0
    vocabulary, top_k = vocabulary_of(Path(config.model)), config.sampling.top_k
    if vocabulary > MOST_KEPT and not 0 < top_k <= MOST_TOP_K:
        raise UserError(
            f"With trainer.objective={config.trainer.objective} and these settings of sampling the words that a token "
            f"was drawn from are stored with it, and of a vocabulary of {vocabulary:,} they are too many: set "
            f"sampling.top_k from 1 to {MOST_TOP_K}."
        )
    return vocabulary if vocabulary <= MOST_KEPT else top_k + top_k // 2 + 8


def vocabulary_of(folder: Path) -> int:
    """How many words the model in `folder` has. Raises UserError."""
    size: int = sizes_of(folder).get("vocab_size", 0)
    return size


def ties_head(folder: Path) -> bool | None:
    """Return whether config.json ties the head to the embeddings; None: the key is missing. Raises UserError."""
    key, facts = "tie_word_embeddings", _read_config(folder)
    tied: bool | None = sizes_of(folder).get(key, facts.get(key))
    return tied


def context_of(folder: Path) -> int | None:
    """Return the most tokens of a sequence in the model in `folder`; None if config.json has no limit."""
    sizes = sizes_of(folder)
    longest = next((sizes[key] for key in _LENGTHS if isinstance(sizes.get(key), int)), None)
    kind, factor = _rope(sizes)
    # For other kinds, such as yarn, vLLM and transformers take the length of the stretched positions.
    return int(longest * factor) if longest and kind in ("linear", "dynamic") else longest


def default_context(folder: Path) -> int | None:
    """Return vLLM's limit without `max_model_len`: with LongRoPE, the length before the extension."""
    sizes = sizes_of(folder)
    if _rope(sizes)[0] in ("longrope", "su") and (length := sizes.get("original_max_position_embeddings")):
        return int(length)
    return context_of(folder)


def _rope(sizes: Mapping[str, Any]) -> tuple[str | None, float]:
    """Return the kind of scaling of rotary positions, and its factor."""
    scaling = sizes.get("rope_scaling") or sizes.get("rope_parameters") or {}
    return scaling.get("rope_type", scaling.get("type")), scaling.get("factor") or 1


def architectures_of(folder: Path) -> list[str]:
    """Return the classes of the model in `folder`, such as Qwen3ForCausalLM."""
    return list(_read_config(folder).get("architectures") or ())


def check_mixture(folder: Path, lora: LoraConfig | None, *, cuda: bool) -> None:
    """Raise UserError if the model in `folder` is a mixture of experts that engines cannot run with these adapters, on
    GPUs (cuda) or CPUs, or whose experts can have no adapters."""
    if not cuda and _text_type(folder) == "gpt_oss":
        raise UserError(f"vLLM computes the experts of gpt-oss on GPUs alone: {folder} cannot generate here.")
    if not is_mixture(folder):
        return
    kind, sizes = f"the model {folder} is a mixture of experts", sizes_of(folder)
    dense = sizes.get("first_k_dense_replace") or 0
    if not cuda and sizes.get("kv_lora_rank") and dense < (sizes.get("num_hidden_layers") or 1):
        raise UserError(
            f"On CPUs vLLM and the trainer compute other log-probs where, as here, {kind} with latent attention: take "
            f"another model, or GPUs, on which it is untried."
        )
    if lora is None:
        return
    if not cuda:
        raise UserError(f"trainer.lora is set and {kind}, whose adapters vLLM computes on GPUs alone: leave it out.")
    if lora.target_modules == "all-linear":
        raise UserError(
            f"trainer.lora.target_modules is all-linear, but {kind}, and experts and their router take no adapters "
            f"here: set it to the layers of its attention, such as [q_proj, k_proj, v_proj, o_proj]."
        )


def sizes_of(folder: Path) -> dict[str, Any]:
    """Return the part of config.json about the text model. Raises UserError."""
    sizes = _read_config(folder)
    return sizes.get("text_config") or sizes


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises UserError."""
    return read_json(folder / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a model's JSON file. Raises UserError."""
    with explain((OSError, ValueError), f"The model's {file} cannot be read ({{why}}): copy it again."):
        values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"The model's {file} has no keys and values: copy it again.")
    return values


def quickstart_folder(parent: Path, seed: int = 0) -> Path:
    """Return the folder of the quickstart's model in `parent`, whether it exists or not.

    The name has a hash of the seed and of the source files that shape the model: a change makes another model.
    """
    shaped_by = hashlib.sha256(f"{seed}".encode())
    for source in ("warm_start.py", "addition.py"):
        shaped_by.update((ROOT / "areal" / "data" / source).read_bytes())
    return parent / f"quickstart-{shaped_by.hexdigest()[:12]}"


def lacks_quickstart(config: Config) -> bool:
    """Whether the run has to make the quickstart's model first."""
    places = config.run_dir.resolve() / "models", cache_folder() / "areal"
    return config.model == "quickstart" and not any(quickstart_folder(p, config.seed).exists() for p in places)


def _checked(folder: Path) -> Path:
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"The model folder {folder} has no {name}: give a folder in the Hugging Face format.")
    return folder


def _from_hub(name: str, key: str, tell: Callable[[str], None], weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class ReportedProgress(tqdm):
        """A progress bar that reports instead of drawing."""

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                tell(f"it downloads {name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    offline = reach_hub()
    tell(f"it downloads {name}")
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"] + ["*.safetensors"] * weights
    copies = ["consolidated*.safetensors", "*/*.safetensors"]  # copies of the weights, for other programs
    try:
        return Path(
            snapshot_download(name, allow_patterns=patterns, ignore_patterns=copies, tqdm_class=ReportedProgress)
        )
    except (OSError, ValueError) as error:  # huggingface_hub raises both, also without a network
        first = offline or str(error).strip().splitlines()[0]
        raise UserError(
            f"The model {name} ({key}) is not a folder here, and it could not be downloaded ({first}): name a folder."
        ) from None
