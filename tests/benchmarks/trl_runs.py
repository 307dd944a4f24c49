"""One run of a TRL trainer, in a process of its own: `vs_trl.py` and `time_to_accuracy.py` start it.

    python tests/benchmarks/trl_runs.py generate --model FOLDER --steps 20 --eval-size 256 --port 5790 --out FOLDER

The settings are those of --config, the quickstart's by default, where both sides have them; the rest are TRL's
defaults, but for what would slow it down here (mixed precision, gradient checkpointing). What makes it run on a CPU at
all stands under "for the CPU". Leaves in the folder steps.jsonl, with running totals after every training step (as many
optimizer steps as the configuration has minibatches), result.json, and checkpoint-N after every N optimizer steps if
--checkpoint-every is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
# Threads of the trainer's process: with two processes each has one of two cores, else OpenMP's barriers spin.
THREADS = {"generate": 2, "colocate": 2, "colocate-1": 1, "async": 1, "async-unbiased": 1}
# They have to stand before torch and vLLM are imported, also by TRL's child process, which imports this file.
os.environ["OMP_NUM_THREADS"] = str(THREADS.get(sys.argv[1] if len(sys.argv) > 1 else "", 1))
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
# vLLM's sampler would compile a helper at the first request; in the trainer's process its engine has to stay there.
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import areal  # noqa: E402, F401  # before torch, so that TRL's matrix products use AVX-512 on AMD, as ours do

# isort: split
import requests  # noqa: E402
import torch  # noqa: E402
import trl.generation.vllm_generation as vllm_generation  # noqa: E402
from datasets import Dataset  # noqa: E402
from runs import reward_of, score  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.experimental.async_grpo import (  # noqa: E402
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient  # noqa: E402

from areal.config import Config, load_config  # noqa: E402
from areal.data.rows import Prompt, Row, prompt_text  # noqa: E402
from areal.data.sources import open_source  # noqa: E402
from areal.training.attention import packed_sdpa  # noqa: E402

# Small, since it pads less: with vLLM colocated 8 was faster than 32 by a quarter.
MICRO_BATCH = 8
# Samples in a row of the asynchronous trainer.
ROW = 16
# Of prompts that the asynchronous trainer may take: it throws many samples away.
SPARE_PROMPTS = 6
SERVER_SECONDS = 600
MAX_LENGTH = 512
# Of a model that knows no chats.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Where weights are handed over: in memory, if there is such a file system.
MEMORY = Path("/dev/shm")


@dataclass
class Totals:
    """`generated` are the samples that reached the trainer, `trained` those it learnt from."""

    samples_generated: int = 0
    tokens_generated: int = 0
    samples_trained: int = 0
    tokens_trained: int = 0


TOTALS = Totals()


class Recorder(TrainerCallback):
    """Writes the totals at the beginning and after every training step."""

    def __init__(self, file: Path, every: int) -> None:
        self._file = file.open("w", buffering=1)
        self._every = every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._write()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._every == 0:
            self._write()

    def _write(self) -> None:
        self._file.write(json.dumps({"time": time.perf_counter()} | asdict(TOTALS)) + "\n")


def reward(
    prompts: list[Prompt], completions: list[Prompt], name: list[str], row: list[str], completion_ids: Any, **_: Any
) -> list[float]:
    """The task's own reward, as TRL asks for it: text, or chats of one message."""
    TOTALS.samples_generated += len(completions)
    TOTALS.tokens_generated += sum(map(len, completion_ids))
    samples = zip(name, map(json.loads, row), prompts, map(prompt_text, completions), strict=True)
    return [score(*sample) for sample in samples]


# --- for the CPU: weights go to vLLM through a file in memory, where NCCL would carry them


def publish(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors}, folder / "model.safetensors")


def loading(folder: Path) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls of a `PolicyWorker` that load the weights in a folder."""
    return [("open_policy", (str(folder), None)), ("load_policy", ())]


def sync_weights(self: vllm_generation.VLLMGeneration, folder: Path) -> None:
    """In place of TRL's own: vLLM packs what it loads on the CPU, and `load_weights` knows nothing of it."""
    publish(self._iter_named_params(), folder)
    for method, arguments in loading(folder):
        self.llm.collective_rpc(method, args=arguments)
    self.llm.reset_prefix_cache()


class FileTransfer:
    """TRL's `WeightTransferProtocol` without NCCL."""

    def __init__(self, client: VLLMClient, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self.pause, self.resume = client.pause, client.resume

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        publish(iterator, self._folder)
        for method, arguments in loading(self._folder):
            call = {"method": method, "args": arguments}
            requests.post(f"{self._client.server_url}/collective_rpc", json=call, timeout=60).raise_for_status()

    def destroy(self) -> None:
        pass


# --- for the CPU: vLLM


# What it needs there, as in areal.cpu.vllm_on_cpu; and the float32 of the checkpoint, which it would round.
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 30,
    "worker_extension_cls": "areal.generation.vllm_worker.PolicyWorker",
}


class CpuLoop(async_rollout_worker._AsyncRolloutLoop):
    """Without a seed of its own for every request: vLLM's engine dies of them on the CPU."""

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> dict[str, Any]:
        payload.pop("seed", None)
        return await super()._post(path, payload, timeout, max_retries)


async_rollout_worker.AsyncRolloutWorker._loop_cls = CpuLoop
# TRL asks the template how to read an answer: its text is all of it.
async_rollout_worker.add_response_schema = lambda tokenizer: tokenizer
async_rollout_worker.parse_response = lambda tokenizer, ids, **_: {
    "role": "assistant",
    "content": tokenizer.decode(ids, skip_special_tokens=True),
}


# --- for the CPU: what the asynchronous trainer does with CUDA


def tree_attention(module, query, key, value, attention_mask, *, tree_kv_index, scaling=None, **lengths: Any):
    """In place of a kernel for GPUs that attends from every segment of a prefix tree to its path: our own, which does
    the same."""
    added, complete, mask = segments(lengths["tree_cu_seqlens_q"], lengths["tree_cu_seqlens_k"])
    row = SimpleNamespace(added=added, lengths=complete, paths=tree_kv_index)
    return packed_sdpa(module, query, key, value, None, row=row, mask=mask, scaling=scaling)


@lru_cache(maxsize=1)  # all layers of a forward pass share them
def segments(queries: torch.Tensor, keys: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
    """Lengths of the segments, lengths of their paths, and the triangle that `packed_sdpa` takes its masks from."""
    longest = int(keys.diff().max())
    return queries.diff().tolist(), keys.diff().tolist(), torch.ones(longest, longest, dtype=torch.bool).tril()


async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
packing.tree_attention = tree_attention


class CountingQueue:
    """The trainer's queue of samples: all that were generated pass here, also those it then drops as too old."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.qsize = queue.qsize

    def get(self, **options: Any) -> Any:
        sample = self._queue.get(**options)
        TOTALS.samples_generated += 1
        TOTALS.tokens_generated += int(sample.completion_mask.sum())
        return sample


class CpuAsyncTrainer(AsyncGRPOTrainer):
    def compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
        TOTALS.samples_trained += int(inputs["segment_id"].max()) + 1
        TOTALS.tokens_trained += int((inputs["token_index"] >= 0).sum())
        return super().compute_loss(model, inputs, **options)


# --- runs


def common(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of both trainers."""
    trainer = config.trainer
    return {
        "output_dir": str(options.out),
        "max_steps": options.steps * trainer.minibatches,
        "num_generations": config.group_size,
        "max_completion_length": config.sampling.max_new_tokens,
        "learning_rate": trainer.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": trainer.weight_decay,
        "adam_beta1": trainer.betas[0],
        "adam_beta2": trainer.betas[1],
        "adam_epsilon": trainer.adam_eps,
        "max_grad_norm": trainer.grad_clip,
        "epsilon": trainer.eps_clip,
        "seed": config.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "steps" if options.checkpoint_every else "no",
        "save_steps": options.checkpoint_every * trainer.minibatches,
        "save_only_model": True,
        "disable_tqdm": True,
    }


class SyncTrainer(GRPOTrainer):
    """Learns from all that it generates."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> torch.Tensor:
        TOTALS.samples_trained += len(inputs["completion_mask"])
        TOTALS.tokens_trained += int(inputs["completion_mask"].sum())
        return super().compute_loss(model, inputs, *arguments, **options)


def sync_trainer(mode: str, config: Config, options: argparse.Namespace, **shared: Any) -> GRPOTrainer:
    samples = config.batch_size * config.group_size
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": MAX_LENGTH}
    settings = GRPOConfig(
        **common(config, options),
        **(vllm if mode.startswith("colocate") else {}),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=samples // config.trainer.minibatches // MICRO_BATCH,
        generation_batch_size=samples,
        shuffle_dataset=False,
    )
    if settings.use_vllm:
        vllm_generation.LLM = partial(vllm_generation.LLM, **ENGINE)
        vllm_generation.VLLMGeneration.sync_weights = lambda self: sync_weights(self, options.weights)
    rows = dataset(config, options.steps, lambda prompt: prompt)
    return SyncTrainer(model=str(options.model), args=settings, train_dataset=rows, **shared)


def async_trainer(mode: str, config: Config, options: argparse.Namespace, **shared: Any) -> AsyncGRPOTrainer:
    minibatch = config.batch_size * config.group_size // config.trainer.minibatches
    # Its version counts as ours does: new weights after every training step.
    settings = AsyncGRPOConfig(
        **common(config, options),
        **({"max_inflight_tasks": 256, "max_staleness": 16} if mode == "async-unbiased" else {}),
        per_device_train_batch_size=ROW,
        gradient_accumulation_steps=minibatch // ROW,
        token_budget=0,  # rows of as many samples, so that minibatches are as large as ours
        weight_sync_steps=config.trainer.minibatches,
        vllm_server_base_url=f"http://127.0.0.1:{options.port}",
        vllm_server_timeout=SERVER_SECONDS,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
    trainer = CpuAsyncTrainer(
        model=str(options.model),
        args=settings,
        train_dataset=dataset(config, SPARE_PROMPTS * options.steps, as_chat),
        processing_class=tokenizer,
        weight_transfer=FileTransfer(VLLMClient(settings.vllm_server_base_url, SERVER_SECONDS), options.weights),
        **shared,
    )
    trainer.rollout_queue = CountingQueue(trainer.rollout_queue)
    return trainer


def serve(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """A vLLM server for the asynchronous trainer, with one thread."""
    flags = {name.replace("_", "-"): value for name, value in ENGINE.items() if name != "enforce_eager"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    command += ["--host", "127.0.0.1", "--port", str(options.port), "--enforce-eager", "--max-num-seqs", "256"]
    command += ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log", "--disable-log-stats"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return subprocess.Popen(
        command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    )


def as_chat(prompt: Prompt) -> Prompt:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def dataset(config: Config, steps: int, form: Callable[[Prompt], Prompt]) -> Dataset:
    """The prompts that our run would see, in its order."""
    source = open_source(config.data, config.seed)
    rows = [source.row(i) for i in range(steps * config.batch_size)]
    return Dataset.from_list([columns(config, row) | {"prompt": form(row.prompt)} for row in rows])


def columns(config: Config, row: Row) -> dict[str, str]:
    """What `reward` wants to know of a row."""
    return {"name": reward_of(config), "row": json.dumps(row.fields)}


@torch.no_grad()
def accuracy(folder: Path, config: Config, count: int) -> float:
    """On the held-out rows that our run is judged by, one sample each at temperature 1. For prompts that are text."""
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval_size": count})})
    source = open_source(config.data, config.seed)
    rows = [source.heldout(i) for i in range(count)]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = tokenizer([row.prompt for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(
        **prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=config.sampling.max_new_tokens
    )
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    name = reward_of(config)
    return sum(score(name, r.fields, r.prompt, text) for r, text in zip(rows, texts, strict=True)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=THREADS)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--eval-size", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, required=True, help="for the vLLM server of the asynchronous trainer")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = load_config(options.config).model_copy(update={"seed": options.seed})
    torch.set_num_threads(THREADS[options.mode])
    server = serve(options) if options.mode.startswith("async") else None
    try:
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as weights:
            options.weights = Path(weights)
            make = async_trainer if server else sync_trainer
            recorder = Recorder(options.out / "steps.jsonl", config.trainer.minibatches)
            trainer = make(options.mode, config, options, reward_funcs=reward, callbacks=[recorder])
            trainer.train()
    finally:
        if server:
            server.terminate()
            server.wait(60)
    trainer.save_model(str(options.out / "model"))
    trainer.processing_class.save_pretrained(options.out / "model")
    accuracy_after = accuracy(options.out / "model", config, options.eval_size) if options.eval_size else None
    (options.out / "result.json").write_text(json.dumps({"accuracy_after": accuracy_after}))


if __name__ == "__main__":
    main()
