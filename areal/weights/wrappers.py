"""The text model in a wrapper: a model with vision beside text (Mistral-Small 3.1, Gemma 3, Qwen-VL, Qwen3.5).

The trainer loads the text model alone. Engines run the wrapper, so published weights have the wrapper's names:
transformers restores names that it changed when loading. Saved weights include the wrapper's vision, unchanged.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.base.errors import UserError, explain
from areal.base.text import without_code
from areal.models import TEXT_TYPES, is_wrapper, ties_head
from areal.weights.folders import saved_buffers, stored_tensors
from areal.weights.model_files import Shapes, model_files, only_model

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head."


def text_config(model: str | Path) -> Any:
    """The text model's config in a model, a folder or a name on the hub. Raises OSError and ValueError."""
    from transformers import AutoConfig

    with without_code():
        config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    if config.model_type not in TEXT_TYPES:
        return config
    values = config.to_dict()
    # All three parts of a text position are equal, so any division of the head among the parts gives the same result.
    values["rope_parameters"] = {k: v for k, v in values["rope_parameters"].items() if not k.startswith("mrope")}
    return AutoConfig.for_model(**values | {"model_type": TEXT_TYPES[config.model_type]})


def arguments_for_text(folder: Path) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for the text model in `folder`; none if `folder` has no wrapper."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    if not is_wrapper(folder):
        return {}
    body, head = _prefixes(folder)
    config = text_config(folder)
    config.tie_word_embeddings = head is None or bool(ties_head(folder))
    own_changes = get_checkpoint_conversion_mapping(config.model_type) or []
    if any(type(change).__name__ == "PrefixChange" for change in own_changes):
        return {"config": config}  # transformers knows the wrapper, and would rename the weights twice
    renamed = {body: "model.", head or HEAD: HEAD}
    return {"config": config, "key_mapping": {f"^{re.escape(old)}": new for old, new in renamed.items() if old != new}}


@lru_cache(maxsize=1)
def published_shapes(model: Path) -> Shapes:
    """Return the tensors that a trainer of the model folder `model` publishes: the tensors that transformers reads. The
    folder's files may have more, such as rotary frequencies or layers for speculative decoding.

    No weights are read. Raises OSError or ValueError if transformers cannot read the folder.
    """
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the trainer reports weights that transformers ignores
    how = arguments_for_text(model)
    with only_model(model) as view:
        module = AutoModelForCausalLM.from_pretrained(
            view, trust_remote_code=False, device_map="meta", ignore_mismatched_sizes=True, **how
        )
    tensors = dict(module.named_parameters()) | saved_buffers(module)
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(module, tensors).items()}


def check_names(folder: Path) -> None:
    """Raise UserError if a trainer of the model in `folder` would publish weights with names or shapes that its files,
    and so engines, lack. No weights are read."""
    with explain((OSError, ValueError), f"{folder} does not hold a model that transformers can load: {{why}}"):
        published = published_shapes(folder)
    stored = model_files(folder).shapes
    wrong = [name for name, shape in published.items() if stored.get(name) != shape and name != f"{HEAD}weight"]
    if wrong:
        raise UserError(
            f"The trainer would publish {len(wrong)} weights of {folder} by names or in shapes that its files, and so "
            f"the engines, do not have, the first is {wrong[0]}: save the model again with transformers' "
            f"save_pretrained, and name that folder."
        )


def beside_text(folder: Path, shard: int, shards: int) -> "Iterator[tuple[str, Tensor]]":
    """Return the tensors of the wrapper in `folder` outside its text model, or a part of them as in `stored_tensors`;
    none if it is no wrapper."""
    if not is_wrapper(folder):
        return iter(())
    body, head = _prefixes(folder)
    text = (f"{body}layers.", f"{body}norm.", f"{body}embed_tokens", head or HEAD)
    return ((name, tensor) for name, tensor in stored_tensors(folder, shard, shards) if not name.startswith(text))


def _prefixes(folder: Path) -> tuple[str, str | None]:
    """Return the prefixes of the names of the text model's weights and of its head in a wrapper's files, or None."""
    names = sorted(model_files(folder).shapes, key=len)
    body = next((name for name in names if name.endswith("embed_tokens.weight")), "model.embed_tokens.weight")
    head = next((name for name in names if name.endswith("lm_head.weight")), None)
    return body.removesuffix("embed_tokens.weight"), head and head.removesuffix("weight")
