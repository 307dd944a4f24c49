"""The reference for sampled sequences: transformers in fp32, with eager attention, a sequence at a time."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal.config import Config
from areal.devices import host_memory
from areal.extensions.selftest.sequences import Sampled
from areal.weights.folders import copy_model_files, write_weights
from areal.weights.model_files import ADAPTER_FILE, model_files, write_index

GPU_SHARE, HOST_SHARE = 0.8, 0.5
"""The reference's largest share of the GPU's free memory, and, if the GPU has no room, of the host's memory."""


def reference_logprobs(folder: Path, sequences: Sequence[Sampled], config: Config) -> list[np.ndarray] | None:
    """Return log-probs [n] of each sequence's sampled tokens under the model in `folder`, in fp32. None: no room."""
    import torch

    from areal.extensions.selftest.references import logprobs_alone

    if (model := _reference(folder)) is None:
        return None
    logprobs = []
    with torch.no_grad():
        for sequence in sequences:
            logps = logprobs_alone(model, _tokens(sequence, model.device), config.sampling.temperature)
            logprobs.append(logps[len(sequence.prompt) - 1 :].cpu().numpy())
    return logprobs


def kept_logprobs(old: Path, new: Path, sequences: Sequence[Sampled], config: Config) -> list[np.ndarray] | None:
    """Return log-probs of each sequence's tokens of version 2 under the model in `new`, in fp32. The KV cache of the
    earlier tokens comes from the model in `old`. None: no room."""
    import torch

    ends = [len(s.prompt) + int((s.versions < 2).sum()) - 1 for s in sequences]  # the last token has no KV yet
    caches = []
    with torch.no_grad():
        if (model := _reference(old)) is None:
            return None
        for sequence, end in zip(sequences, ends, strict=True):
            tokens = _tokens(sequence, model.device)[None, :end]
            caches.append(model(input_ids=tokens, use_cache=True).past_key_values if end else None)
        del model
        model = _reference(new)
        logprobs = []
        for sequence, end, cache in zip(sequences, ends, caches, strict=True):
            tokens = _tokens(sequence, model.device)
            logits = model(input_ids=tokens[None, end:], past_key_values=cache, use_cache=True).logits[0, :-1]
            logps = torch.log_softmax(logits / config.sampling.temperature, -1)
            logprobs.append(logps.gather(1, tokens[end + 1 :, None])[:, 0].cpu().numpy())
    return logprobs


def _reference(folder: Path) -> Any:
    """Load the model in `folder` in fp32, on the GPU or else on the CPU. None: no room."""
    import torch
    from transformers import AutoModelForCausalLM

    from areal.extensions.desk.bare_models import count_parameters

    size = 4 * count_parameters(str(folder))
    device = torch.device("cpu")
    if torch.cuda.is_available() and size <= GPU_SHARE * torch.cuda.mem_get_info()[0]:
        device = torch.device("cuda")
    elif size > HOST_SHARE * host_memory():
        return None
    torch.set_num_threads(os.cpu_count() or 1)
    how = {"trust_remote_code": False, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **how)
    return model.to(device).eval()


def _tokens(sequence: Sampled, device: Any) -> Any:
    """Return prompt and completion, int64 [T]."""
    import torch

    return torch.from_numpy(np.concatenate([sequence.prompt, sequence.tokens])).long().to(device)


def model_of(base: Path, published: Path, folder: Path) -> Path:
    """Make `folder` a model folder with the published weights."""
    copy_model_files(base, folder, dtype="float32")
    if (published / ADAPTER_FILE).is_file():
        from areal.extensions.lora.lora import merged_tensors

        write_weights(dict(merged_tensors(base, published)), folder)
    else:
        files = model_files(published.absolute()).files
        for file in files:
            (folder / file.name).symlink_to(file)
        if len(files) > 1:  # several ranks have written a shard each
            write_index(folder)
    return folder
