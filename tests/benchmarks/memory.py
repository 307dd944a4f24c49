"""The most memory that the step from hidden states to log-probs takes, and back, beyond its activations.

For each shape a process of its own makes hidden states, a head and targets in bf16, and then computes log-probs and
gradients, once with `areal.training.head` and once as PyTorch does it on whole logits. What is printed is how far the
process's resident memory rose above what it had before, at its peak: it includes the gradients of the hidden states and
of the head, which any method returns.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from results import show, write
from torch import Tensor
from torch.nn.functional import linear

from areal.amx import avoid_broken_amx
from areal.training.head import linear_logprobs

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


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(method: str, tokens: int, vocabulary: int, hidden_units: int) -> dict[str, float]:
    """Run `method` in this process, while a thread looks at its memory."""
    avoid_broken_amx()
    torch.set_num_threads(1)
    hidden = torch.randn(tokens, hidden_units, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_units, dtype=torch.bfloat16) / hidden_units**0.5).requires_grad_()
    place, targets = torch.arange(tokens), torch.randint(0, vocabulary, (tokens,))
    METHODS[method](hidden[:8], weight, place[:8], targets[:8]).sum()  # what libraries allocate at first use
    before, highest, done = resident(), 0, threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    started = time.process_time()
    METHODS[method](hidden, weight, place, targets).sum().backward()
    seconds = time.process_time() - started
    done.set()
    watcher.join()
    return {"bytes": highest - before, "cpu_seconds": seconds}


def compare(options: argparse.Namespace) -> None:
    results, rows = {}, []
    for name, shape in (QUICK if options.quick else SHAPES).items():
        tokens, vocabulary, hidden_units = shape
        returned = 2 * hidden_units * (tokens + vocabulary)
        for method in METHODS:
            if method == "whole logits" and 2 * 2 * tokens * vocabulary > LARGEST:
                continue
            command = [sys.executable, __file__, "--measure", method, *map(str, shape)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            results[f"{name}, {method}"] = found | {"gradients": returned}
            peak = found["bytes"]
            rows.append([name, method, peak / 1e9, (peak - returned) / 1e9, found["cpu_seconds"]])
    show(
        "Peak memory beyond hidden states and head, bf16, one core",
        ["shape", "method", "GB", "GB without the returned gradients", "CPU s"],
        rows,
        [],
    )
    write(results, options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--quick", action="store_true", help="one small shape: does it run?")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        method, *shape = options.measure
        print(json.dumps(measure(method, *map(int, shape))))
    else:
        compare(options)
