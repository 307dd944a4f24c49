"""The most memory that a training step takes, beside what `areal plan` says, and what its output layer takes.

Everything is measured in processes of their own, as how far the resident memory rose above what it was before.

* A training engine makes two steps on one row, in several settings. The plan's figure comes without what the plan
  assumes for CUDA and NCCL.
* From hidden states to log-probs and back in bf16, once with `areal.training.head` and once as PyTorch does it on whole
  logits. This includes the gradients of the hidden states and of the head, which any method returns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from results import show, write
from torch import Tensor
from torch.nn.functional import linear

from areal.config import Config
from areal.cpu.processor import avoid_broken_amx
from areal.extensions.desk.plan import read_model
from areal.extensions.desk.split import training_memory
from areal.extensions.selftest.memory_peaks import peak
from areal.training.head import linear_logprobs
from areal.training.model_checks import random_groups
from areal.training.training_engine import TrainingEngine

MODELS = {  # tokens of the row, and the model
    "Qwen2.5-0.5B, 2 layers": (
        512,
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 2,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 32_768,
            "tie_word_embeddings": True,
        },
    ),
    "a narrow Qwen2, 8 layers": (
        2048,
        {
            "model_type": "qwen2",
            "hidden_size": 256,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "vocab_size": 16_384,
            "tie_word_embeddings": True,
        },
    ),
    "a narrow Llama, 8 layers": (
        2048,
        {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 4096,
            "tie_word_embeddings": False,
        },
    ),
}
SETTINGS = {
    "fp32": {},
    "fp32, checkpointing": {"gradient_checkpointing": True},
    "bf16": {"dtype": "bfloat16"},
    "bf16, checkpointing, LoRA": {"dtype": "bfloat16", "gradient_checkpointing": True, "lora": {}},
}

SHAPES = {  # tokens, vocabulary, hidden units
    "Qwen2.5-0.5B, 8k": (8192, 151_936, 896),
    "Qwen2.5-1.5B, 8k": (8192, 151_936, 1536),
    "Qwen2.5-1.5B, 32k": (32_768, 151_936, 1536),
}
QUICK = {"tiny": (512, 8192, 64)}
LARGEST = 1 << 33
"""Bytes of logits beyond which whole logits are not tried: they and their gradient would not fit into this machine."""


def chunked(hidden: Tensor, weight: Tensor, place: Tensor, targets: Tensor) -> Tensor:
    return linear_logprobs(hidden, weight, None, place, targets, 1.0)[0]


def whole(hidden: Tensor, weight: Tensor, place: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(linear(hidden, weight).float(), -1)[place, targets]


METHODS = {"areal.training.head": chunked, "whole logits": whole}


def measure(method: str, tokens: int, vocabulary: int, hidden_units: int) -> dict[str, float]:
    """Run `method` in this process."""
    avoid_broken_amx()
    torch.set_num_threads(1)
    hidden = torch.randn(tokens, hidden_units, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_units, dtype=torch.bfloat16) / hidden_units**0.5).requires_grad_()
    place, targets = torch.arange(tokens), torch.randint(0, vocabulary, (tokens,))
    METHODS[method](hidden[:8], weight, place[:8], targets[:8]).sum()  # what libraries allocate at first use
    with peak() as results:
        METHODS[method](hidden, weight, place, targets).sum().backward()
    return results


def measure_step(name: str, setting: str) -> dict[str, float]:
    """Train the model `name` in this process, and return the measured and the planned bytes."""
    tokens, sizes = MODELS[name]
    with tempfile.TemporaryDirectory() as parent:
        tiny = {
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 16,
        }
        warm_up = config_of(Path(parent, "tiny"), sizes | tiny, SETTINGS[setting], 16)
        train(warm_up, 16, 16)  # what libraries allocate at first use
        config = config_of(Path(parent, "model"), sizes, SETTINGS[setting], tokens)
        planned = training_memory(
            config, read_model(config), 1, config.trainer.dtype == "bfloat16", config.trainer.gradient_checkpointing, 1
        )
        with peak() as results:
            train(config, tokens, sizes["vocab_size"])
    return results | {"planned": planned.total - planned.overhead}


def config_of(folder: Path, sizes: dict[str, Any], trainer: dict[str, Any], tokens: int) -> Config:
    """A run that trains a random model, which this writes to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    model.to(getattr(torch, trainer.get("dtype", "float32"))).save_pretrained(folder)
    return Config.model_validate(
        {
            "model": str(folder),
            "steps": 1,
            "batch_size": 1,
            "group_size": 2,
            "data": {"source": "none.jsonl"},
            "reward": {"functions": ["math"]},
            "sampling": {"max_new_tokens": tokens},
            "trainer": {"dtype": "float32", "gradient_checkpointing": False, "minibatches": 1, "threads": 1}
            | {"max_tokens_per_microbatch": tokens}
            | trainer,
        }
    )


def train(config: Config, tokens: int, vocabulary: int) -> None:
    """Two steps, each on two random sequences in one row of `tokens` tokens."""
    engine = TrainingEngine(Path(config.model), config.trainer, seed=0)
    groups = random_groups(vocabulary, [[tokens // 2] * 2])
    for _ in range(2):
        engine.step(groups, version=0, temperature=1.0)
    engine.close()


def compare_steps(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The measured and the planned memory of a training step for each model and setting, or with --quick for some."""
    results, rows = {}, []
    pairs = zip(MODELS, SETTINGS, strict=False) if options.quick else product(MODELS, SETTINGS)
    for name, setting in pairs:
        figures = results[f"{name}, {setting}"] = in_a_process("--measure-step", name, setting)
        of_plan = figures["bytes"] / figures["planned"]
        rows.append([name, setting, figures["bytes"] / 1e9, figures["planned"] / 1e9, of_plan, figures["cpu_seconds"]])
    show(
        "Peak memory of a training step, one core",
        ["model", "setting", "GB", "GB as planned", "measured / planned", "CPU s"],
        rows,
        [],
    )
    return results


def in_a_process(*arguments: str) -> dict[str, float]:
    # glibc gives large blocks that are freed back to the system at once only below a threshold that it raises itself.
    fixed = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, *arguments]
    words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=fixed).stdout
    return json.loads(words.splitlines()[-1])  # after what the engine logs


def compare_heads(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The memory from hidden states to log-probs and back for each shape and method."""
    results, rows = {}, []
    for name, shape in (QUICK if options.quick else SHAPES).items():
        tokens, vocabulary, hidden_units = shape
        returned = 2 * hidden_units * (tokens + vocabulary)
        for method in METHODS:
            if method == "whole logits" and 2 * 2 * tokens * vocabulary > LARGEST:
                continue
            figures = in_a_process("--measure", method, *map(str, shape))
            results[f"{name}, {method}"] = figures | {"gradients": returned}
            limit = figures["bytes"]
            rows.append([name, method, limit / 1e9, (limit - returned) / 1e9, figures["cpu_seconds"]])
    show(
        "Peak memory beyond hidden states and head, bf16, one core",
        ["shape", "method", "GB", "GB without the returned gradients", "CPU s"],
        rows,
        [],
    )
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one setting of each model, one small shape")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--measure-step", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        method, *shape = options.measure
        print(json.dumps(measure(method, *map(int, shape))))
    elif options.measure_step:
        print(json.dumps(measure_step(*options.measure_step)))
    else:
        write(compare_steps(options) | compare_heads(options), options.json)
