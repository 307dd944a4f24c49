"""Finds the models of a run: the initial model, the reference model of the KL penalty, and those of scorers."""

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from areal.base.errors import UserError, explain
from areal.base.hub import reach_hub
from areal.base.processes import ROOT, cache_folder, tied
from areal.config import Config
from areal.config.trainer_section import LoraConfig

if TYPE_CHECKING:
    import numpy as np  # which starts threads when it is imported: see ENGINE_ENVIRONMENT in areal/config/roles.py

MOST_KEPT, MOST_TOP_K = 256, 160
"""The most words of which the identities are stored with a token, 1 KiB, and the largest `sampling.top_k` then."""
QUICKSTART_FOLDER = re.compile("quickstart-[0-9a-f]{12}")
# Types of layers, by their names in transformers, new and old, whose attention the trainer computes or that have none.
COMPUTED = {
    *("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid", "hybrid_sliding"),
    *("linear_attention", "mamba", "conv", "moe", "sparse", "dense"),
}
# Text models of wrappers that have no class of their own, and the types that compute the same.
_TEXT_OF = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
TEXT_TYPES = {wrapper + suffix: text for wrapper, text in _TEXT_OF.items() for suffix in ("", "_text")}
# Types of models whose layers do not pass on what the trainer's attention needs of a row.
SILENT = {"nemotron", "stablelm"}
SHORTER = "set generator.max_model_len (for `areal sft`: max_length) to at most that"
# Types of models that see pictures, and the packages that vLLM needs for each beside torchvision.
SEEING = {"qwen2_5_vl": (), "qwen3_vl": (), "smolvlm": ("num2words",)}
# Where models say how many experts they have.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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


def check_trainable(folder: Path, ranks: int = 1, longest: int | None = None) -> None:
    """Raise UserError if config.json shows that the trainer cannot train the model in `folder`, or not in the way that
    generators sample from it. Neither weights nor torch are loaded.

    ranks: those that compute a row together. longest: the most tokens of a sequence; None: the model's limit.
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
    """Why the trainer cannot train a model, and what to do instead; None: config.json shows no reason. sizes: what
    `facts`, config.json, says of the model of text."""
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
    """The packages that vLLM needs besides for the model in `folder`; none if the model does not see pictures."""
    kind = _read_config(folder).get("model_type")
    return ["torchvision", *SEEING[kind]] if kind in SEEING else []


def is_wrapper(folder: Path) -> bool:
    """Whether the model in `folder` has something beside text, such as vision."""
    facts = _read_config(folder)
    return "vision_config" in facts or isinstance(facts.get("text_config"), dict)


def _text_type(folder: Path) -> str | None:
    """The type of the text model in `folder`, as transformers computes it; None if config.json does not say."""
    kind, of_text = _read_config(folder).get("model_type"), sizes_of(folder).get("model_type")
    if kind is not None and of_text is None:
        of_text = f"{kind}_text"
    return TEXT_TYPES.get(of_text, of_text) if of_text else kind


def flash_computes(folder: Path) -> bool:
    """Whether flash attention 2 computes the attention of the model in `folder`: it has neither sinks nor chunks."""
    sizes = sizes_of(folder)
    chunked = "chunked_attention" in (sizes.get("layer_types") or ()) or sizes.get("attention_chunk_size")
    return not chunked and "s_aux=" not in _code_of(_text_type(folder))


@cache
def _causal_models() -> frozenset[str]:
    """The types of models for which the installed transformers has a causal language model.

    From the text of its file: this process must not import torch, which an import of the file does.
    """
    listed = _library_text("auto", "modeling_auto").partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2]
    return frozenset(re.findall(r'^ +\("([\w-]+)", "\w+"\)', listed.partition("\n)\n")[0], re.MULTILINE))


def _code_of(kind: str | None) -> str:
    """How transformers computes models of a type; empty if their code is elsewhere."""
    package = (kind or "").replace("-", "_").removesuffix("_text")
    return _library_text(package, f"modeling_{package}") if package else ""


@cache
def _library_text(package: str, module: str) -> str:
    library = find_spec("transformers")
    assert library is not None and library.origin is not None  # this project depends on it
    file = Path(library.origin).parent / "models" / package / f"{module}.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def is_mixture(folder: Path) -> bool:
    """Whether the model in `folder` is a mixture of experts. Raises UserError if its config.json cannot be read."""
    return mixture_of(folder)[1] > 1


def mixture_of(folder: Path) -> tuple[str | None, int]:
    """The kind of the model in `folder`, and the experts of a layer; 0 if it has none. Raises UserError."""
    counts = [sizes_of(folder).get(name) or 0 for name in EXPERTS]
    numbers = (max(count, default=0) if isinstance(count, list) else count for count in counts)  # that of each layer
    return _text_type(folder), max(numbers)


Gates = Literal["softmax", "sigmoid", "logits"]
GATES: dict[str, Gates] = {
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), "softmax"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), "sigmoid"),
    "gpt_oss": "logits",
}
"""What the weights of the chosen experts are made of, by model_type, in mixtures whose routers can be given them."""


class Routing(NamedTuple):
    """How a model routes: in each of `layers`, dense ones included, to `chosen` of `experts`.

    The routes of a token are the numbers of its experts, layer by layer, in a byte each or, beyond 256 experts, in two
    (little-endian): `width` bytes. A dense layer has zeros, and all are 0 without routes.
    """

    gates: Gates
    layers: int
    experts: int
    chosen: int

    @property
    def dtype(self) -> str:
        return "u1" if self.experts <= 256 else "<u2"

    @property
    def width(self) -> int:
        return self.layers * self.chosen * int(self.dtype[-1])

    def check(self, routes: "np.ndarray | None", sampled: "np.ndarray") -> None:
        """Raises ValueError if tokens do not have routes of this model. routes: uint8 [T, any]. sampled: bool [T]."""
        import numpy as np

        if routes is None:
            raise ValueError("its tokens have no routes, which trainer.routing=replay needs")
        if routes.shape[1] != self.width:
            raise ValueError(
                f"its tokens have {routes.shape[1]} bytes of routes, but the model has {self.width}: {self.chosen} "
                f"experts in each of {self.layers} layers"
            )
        if not routes[sampled].any(1).all():
            raise ValueError("one of its sampled tokens has no routes, which trainer.routing=replay needs")
        if routes.size and np.ascontiguousarray(routes).view(self.dtype).max() >= self.experts:
            raise ValueError(f"one of its routes names an expert that is not one of the model's {self.experts}")


def routing_of(folder: Path) -> Routing:
    """How the model in `folder` routes. Raises UserError if its experts cannot be replayed."""
    sizes = sizes_of(folder)
    experts = next((sizes[name] for name in EXPERTS if sizes.get(name)), 0)
    kind, chosen = sizes.get("model_type"), sizes.get("num_experts_per_tok") or 0
    if kind not in GATES or not chosen > 1 or not chosen < experts:
        raise UserError(
            f"trainer.routing is replay, but the model {folder} of the kind {kind} is no mixture of experts for which "
            f"that is possible ({', '.join(GATES)}, with at least two experts a token): set it to own."
        )
    return Routing(GATES[kind], sizes["num_hidden_layers"], experts, chosen)


def kept_words_of(config: Config) -> int:
    """How many of the words that a token was drawn from are stored with it, at the most; 0: none are needed. Raises
    UserError if they can be too many.

    Words of equal logits are kept beyond `sampling.top_k`. In bf16 those are some, so there is room for half as many.
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
    """Whether config.json says that the head is the embeddings; None: it does not say. Raises UserError."""
    key, facts = "tie_word_embeddings", _read_config(folder)
    tied: bool | None = sizes_of(folder).get(key, facts.get(key))
    return tied


def context_of(folder: Path) -> int | None:
    """The most tokens of a sequence for which the model in `folder` is made; None if its config.json does not say."""
    sizes = sizes_of(folder)
    longest = next((sizes[key] for key in _LENGTHS if isinstance(sizes.get(key), int)), None)
    kind, factor = _rope(sizes)
    # With other kinds, such as yarn, the length is that of the stretched positions, for vLLM as for transformers.
    return int(longest * factor) if longest and kind in ("linear", "dynamic") else longest


def default_context(folder: Path) -> int | None:
    """The same as vLLM takes it where no `max_model_len` is set: with LongRoPE, the length before its extension."""
    sizes = sizes_of(folder)
    if _rope(sizes)[0] in ("longrope", "su") and (length := sizes.get("original_max_position_embeddings")):
        return int(length)
    return context_of(folder)


def _rope(sizes: Mapping[str, Any]) -> tuple[str | None, float]:
    """How rotary positions are scaled, and by what factor."""
    scaling = sizes.get("rope_scaling") or sizes.get("rope_parameters") or {}
    return scaling.get("rope_type", scaling.get("type")), scaling.get("factor") or 1


def architectures_of(folder: Path) -> list[str]:
    """The classes of the model in `folder`, such as Qwen3ForCausalLM."""
    return list(_read_config(folder).get("architectures") or ())


def check_adapters(model: object, weights: Iterable[str], lora: LoraConfig) -> None:
    """Raise UserError if weights of these names lack a layer of `lora`; peft refuses only if all are lacking."""
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


def check_mixture(folder: Path, lora: LoraConfig | None, *, cuda: bool) -> None:
    """Raise UserError if the model in `folder` is a mixture of experts that engines on these devices, GPUs (cuda) or
    CPUs, cannot have with such adapters, or that has no place for all of them."""
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
    """What config.json says of the model of text. Raises UserError."""
    sizes = _read_config(folder)
    return sizes.get("text_config") or sizes


def _read_config(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises UserError."""
    return read_json(folder / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """What a file of a model says. Raises UserError."""
    with explain((OSError, ValueError), f"The model's {file} cannot be read ({{why}}): copy it again."):
        values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"The model's {file} has no keys and values: copy it again.")
    return values


def quickstart_folder(parent: Path, seed: int = 0) -> Path:
    """The folder of the quickstart's model in `parent`, whether it exists or not.

    Its name has a hash of the seed and of the source files that shape the model: a change of one makes another model.
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
        """A progress bar that is told and not drawn."""

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                tell(f"it downloads {name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    offline = reach_hub()
    tell(f"it downloads {name}")
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"] + ["*.safetensors"] * weights
    copies = ["consolidated*.safetensors", "*/*.safetensors"]  # of the same weights, for other programs
    try:
        return Path(
            snapshot_download(name, allow_patterns=patterns, ignore_patterns=copies, tqdm_class=ReportedProgress)
        )
    except (OSError, ValueError) as error:  # huggingface_hub raises both, also without a network
        first = offline or str(error).strip().splitlines()[0]
        raise UserError(
            f"The model {name} ({key}) is not a folder here, and it could not be downloaded ({first}): name a folder."
        ) from None
