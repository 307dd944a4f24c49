"""Splits devices between generation and training, and computes the memory that each needs. Formulas only, no I/O.

Rates are completion tokens per second of one device; the work on prompts and on proximal log-probs is included. Memory
is in bytes per device, lengths are in tokens.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal.base.errors import UserError
from areal.config import Config
from areal.extensions.desk.activations import Activations
from areal.generation.generation_engine import SHARED
from areal.training.head import AT_ONCE
from areal.training.optimizer import BUCKET, LARGEST_BUCKET
from areal.weights.packs import sending_bytes

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GENERATOR_SHARE = 0.9
"""Share of a device's memory for an engine that has the device to itself. vLLM's own default is 0.92."""
TRAINER_SHARE = 0.9
"""Share of a device's memory that training can use; the rest is lost to fragmentation. Assumed."""
GENERATOR_OTHER = 1.5 * GIB
"""CUDA context and graphs of an engine. Assumed."""
TRAINER_OTHER = 2 * GIB
"""CUDA context and NCCL. Assumed."""
HOST_OTHER = 4 * GIB
"""Host memory of a process with torch and CUDA. Assumed."""
DEVICES_OF_A_HOST = 8
"""Ranks that share the writing of weights, at most. Assumed."""
LIVE_PARAMETERS = 10**9
"""Parameters that DeepSpeed keeps gathered at once under ZeRO 3, at most."""
LARGE_DEVICE, LARGE_STEP, STEP = 70 * GIB, 16384, 8192
"""Tokens of a step that vLLM takes for throughput, on a device of so much memory and on smaller ones."""
TOGETHER = (2, 4, 8)
"""Values of trainer.sequence_parallel that are tried."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model. `trained`: parameters that are, all or those of adapters. `activations`, `checkpointed`: of its
    layers, without and with gradient checkpointing. `intermediate`: width of the MLP, of all experts of a token.
    `bucket`: elements of a bucket of gradients. `pinned`: bytes of a copy of the trained parameters in pinned host
    memory, of which each tensor takes a power of two. `largest`: parameters of the largest tensor. `part`,
    `part_tensor`: those of the largest module in a layer, such as its experts, and of a tensor there. `merged`: those
    of trained experts that are two matrices in one, which are stored apart, as copies. `heads`: of attention."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    vocabulary: int
    kv_heads: int
    head_size: int
    activations: Activations
    checkpointed: Activations
    intermediate: int = 0
    bucket: int = BUCKET
    pinned: int = 0
    largest: int = 0
    part: int = 0
    part_tensor: int = 0
    merged: int = 0
    heads: int = 0

    @property
    def kv_values(self) -> int:
        """Values in the KV cache for one token: a key and a value in each layer."""
        return 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class Rates:
    """Completion tokens per second of one device while it has work."""

    generating: float
    training: float


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Lengths in tokens: the longest prompt, the mean completion and the longest completion."""

    prompt: int
    mean: float
    longest: int


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory of one rank, in bytes. `buckets`: of gradients, of parameters gathered under ZeRO 3, and of weights that
    rank 0 sends to generators. `host`: the rank's host memory, which is not in `total`."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    buckets: float
    host: float
    overhead: float = TRAINER_OTHER

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer + self.reference
        return states + self.activations + self.buckets + self.overhead


@dataclass(frozen=True, slots=True)
class GenerationMemory:
    """Memory of one device of a generator, in bytes. `share`: of the device. `step`: activations of a step with as many
    tokens as vLLM takes at once, and the log-probs of all sequences. `room`: for the KV cache. `full_kv`: that of
    max_concurrent_rollouts sequences of the greatest length. `sequences`: how many of the mean length one generator can
    run at once, at most max_concurrent_rollouts. `sequences_longest`: how many of the greatest length."""

    weights: float
    room: float
    full_kv: float
    sequences: int
    sequences_longest: int
    step: float
    share: float
    overhead: float = GENERATOR_OTHER


@dataclass(frozen=True, slots=True)
class Plan:
    """A split of the devices. `changes`: keys of `trainer` that it takes besides. `generated`, `trained`: tokens/s that
    generators and trainer can do; `throughput`: the slower of both limits both, and on one device they take turns."""

    generators: int
    tensor_parallel: int
    ranks: int
    zero_stage: int
    gradient_checkpointing: bool
    generation: GenerationMemory
    training: TrainingMemory
    generated: float
    trained: float
    throughput: float
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generating_devices(self) -> int:
        return self.generators * self.tensor_parallel

    @property
    def share(self) -> float:
        """The share of the devices that generate."""
        return self.generating_devices / (self.generating_devices + self.ranks)

    def __str__(self) -> str:
        keys = " ".join(f"trainer.{key}={value}" for key, value in self.changes.items())
        return f"{keys} ({self.generating_devices} + {self.ranks} devices, {self.throughput:,.0f} tokens/s)"

    @property
    def overrides(self) -> dict[str, str]:
        """The keys of the configuration that this plan sets."""
        return {
            "generator.count": f"{self.generators}",
            "generator.memory_share": f"{self.generation.share:g}",
            "generator.max_concurrent_rollouts": f"{self.generation.sequences}",
            **{f"trainer.{key}": f"{value}" for key, value in self.changes.items()},
            "trainer.ranks": f"{self.ranks}",
            "trainer.zero_stage": f"{self.zero_stage}",
            "trainer.gradient_checkpointing": f"{self.gradient_checkpointing}".lower(),
        }


def balanced_share(rates: Rates) -> float:
    """The share of generating devices at which both pools are equally fast: x g = (1 - x) t, so x = t / (g + t). It is
    the paper's 0.75 if a device trains three times as many tokens per second as it generates."""
    return rates.training / (rates.generating + rates.training)


def row_tokens(config: Config, ranks: int, longest: int) -> int:
    """Tokens of the longest row that the ranks of a sequence group compute together. longest: of one sequence."""
    trainer = config.trainer
    if not trainer.microbatches:
        return max(trainer.max_tokens_per_microbatch, longest)
    sequences = config.batch_size * config.group_size / trainer.minibatches
    return longest * math.ceil(sequences * trainer.sequence_parallel / ranks / trainer.microbatches)


def training_memory(
    config: Config, model: ModelSizes, ranks: int, stage: int, checkpointing: bool, longest: int
) -> TrainingMemory:
    """The memory of one rank. longest: tokens of the longest sequence, its prompt included. A fixed number of
    micro-batches has no cap: one of them may hold nothing but the longest.

    * Model states: ZeRO (arXiv 1910.02054, section 3) divides Adam's states among the ranks from stage 1 on, gradients
      from stage 2 on, and weights at stage 3. In bf16, the fp32 master weights and the two moments take 12 bytes per
      trained parameter. Gradients are accumulated in fp32; below stage 2 a rank also keeps the bf16 gradients. In fp32
      the moments take 8 bytes; from stage 1 on DeepSpeed also keeps its own master weights. With offload the optimizer
      takes nothing and the gradients are those of the weights' type, and with `all` two layers' weights are fetched at
      a time (assumed). The reference model has weights alone.
    * Host memory: the copies of the weights that are published, and those of a checkpoint that is written meanwhile,
      both divided among the ranks of a host, with `merged` once more; a checkpoint's fp32 weights and moments, and
      what is offloaded.
    """
    trainer = config.trainer
    size = BYTES[trainer.dtype]
    of_weights, of_gradients, of_optimizer = (ranks if stage >= least else 1 for least in (3, 2, 1))
    half = trainer.dtype != "float32"
    offload = trainer.offload != "none"
    elsewhere = trainer.reference_scorer or (trainer.lora and trainer.reference is None)
    writers = 1 if trainer.lora else min(ranks, DEVICES_OF_A_HOST)
    host = HOST_OTHER + 2 * (model.pinned + size * model.merged) / writers + 12 * model.trained / ranks
    if offload:
        host += (12 + 4) * model.trained / of_optimizer
    if trainer.offload == "all":
        host += size * model.parameters / of_weights
    return TrainingMemory(
        weights=size * model.parameters * (2 / model.layers if trainer.offload == "all" else 1 / of_weights),
        gradients=(size if offload else 6 if half and stage < 2 else 4) * model.trained / of_gradients,
        optimizer=0.0 if offload else (12 if stage else 8) * model.trained / of_optimizer,
        reference=size * model.parameters / of_weights if trainer.kl_coef and not elsewhere else 0.0,
        activations=_activations(config, model, ranks, checkpointing, longest),
        buckets=_buckets(config, model, ranks, stage),
        host=host,
    )


def _buckets(config: Config, model: ModelSizes, ranks: int, stage: int) -> float:
    """DeepSpeed copies gradients into a bucket before it sends them: in fp32, at stage 2 in the weights' type, with a
    copy in fp32; a tensor of a layer that is larger than the bucket is sent alone. The gradient that is copied exists
    besides, in the weights' type. At stage 3 DeepSpeed also keeps up to LIVE_PARAMETERS gathered, but never less than a
    module: the experts of a layer are one, and so are their gradients where one is sent alone. Weights that are sent
    straight into engines take what `sending_bytes` says."""
    size = BYTES[config.trainer.dtype]
    buckets: float = sending_bytes(size * model.largest) if config.weights.direct else 0
    if stage or ranks > 1:
        elements = min(max(model.bucket, model.part_tensor) if stage else LARGEST_BUCKET, model.trained)
        buckets += elements * (size + 4 if stage == 2 and size < 4 else 4)
    if stage > 1 and model.part_tensor <= model.trained:
        alone = model.part if stage == 3 else 0
        buckets += size * (alone if model.bucket < model.part_tensor else model.part_tensor)
    return buckets + (size * max(model.part, min(model.parameters, LIVE_PARAMETERS)) if stage == 3 else 0)


def _activations(config: Config, model: ModelSizes, ranks: int, checkpointing: bool, longest: int) -> float:
    """The most that exists at once, in the backward pass either of the layers (activations.py) or of the
    output layer, while all that the layers saved still exists. The output layer takes AT_ONCE logits at a time, and
    makes a gradient of the hidden states in fp32 and one of its weight (areal.training.head)."""
    trainer, layers = config.trainer, model.checkpointed if checkpointing else model.activations
    size = BYTES[trainer.dtype]
    tokens = math.ceil(row_tokens(config, ranks, longest) / trainer.sequence_parallel)
    logits = min(AT_ONCE, tokens * model.vocabulary)
    states = size * tokens * model.hidden
    backward = 2 * states + 4 * tokens * model.hidden + logits * (8 if size < 4 else 4)
    if not trainer.lora:
        backward += size * model.vocabulary * model.hidden
    return max(tokens * layers.peak, tokens * layers.saved + max(states + logits * 8, backward))


def step_tokens(device_bytes: float) -> int:
    """The most tokens that vLLM takes in a step on such a device."""
    return LARGE_STEP if device_bytes >= LARGE_DEVICE else STEP


def generation_memory(
    config: Config, model: ModelSizes, lengths: TokenLengths, device_bytes: float, share: float = GENERATOR_SHARE
) -> GenerationMemory:
    """The memory of one device of a generator, of which it has a `share`. The KV of a token is divided among at most as
    many devices as it has heads. A token of a step takes its hidden states, and three times the width of the MLP, which
    is divided; a sequence that is sampled its logits and log-probs in fp32.

    Raises UserError if the weights, or the KV of one sequence, do not fit."""
    generator = config.generator
    n, size = generator.tensor_parallel, BYTES[generator.dtype]
    weights = size * model.parameters / n
    tokens = generator.engine_options.get("max_num_batched_tokens") or step_tokens(device_bytes)
    step = size * tokens * (4 * model.hidden + 3 * model.intermediate / n)
    step += 12 * model.vocabulary * generator.max_concurrent_rollouts
    room = share * device_bytes - weights - step - GENERATOR_OTHER
    of_token = size * model.kv_values / min(n, model.kv_heads)
    longest = int(room / (of_token * (lengths.prompt + lengths.longest)))
    if longest < 1:
        raise UserError(
            f"A generator of {n} devices with {device_bytes / GIB:g} GiB has no room for the weights "
            f"({weights / GIB:.1f} GiB on each) and one sequence of {lengths.prompt + lengths.longest} tokens: raise "
            f"generator.tensor_parallel or lower sampling.max_new_tokens."
        )
    full_kv = generator.max_concurrent_rollouts * of_token * (lengths.prompt + lengths.longest)
    fitting = int(room / (of_token * (lengths.prompt + lengths.mean)))
    sequences = min(generator.max_concurrent_rollouts, fitting)
    return GenerationMemory(weights, room, full_kv, sequences, longest, step, share)


def plan(
    config: Config, model: ModelSizes, rates: Rates, lengths: TokenLengths, devices: int, device_bytes: float
) -> Plan:
    """The split with the highest throughput among those in which training fits.

    Throughput is min(x g, (n - x) t) if x of n devices generate, in whole generators. A single device has both, and is
    g t / (g + t) fast. Training has the lowest ZeRO stage that fits, with checkpointing if it must.

    Raises UserError if nothing fits. It names the keys with which training would fit, the least change first.
    """
    if found := _best(config, model, rates, lengths, devices, device_bytes):
        return found
    ranks, room = _ranks(config, devices)[0][1], _room(device_bytes, devices == 1)
    least = training_memory(config, model, ranks, 3, True, lengths.prompt + lengths.longest)
    others = alternatives(config, model, rates, lengths, devices, device_bytes)
    smaller = "a lower trainer.max_tokens_per_microbatch, or more trainer.microbatches"
    advice = (
        f"it fits with {', or '.join(map(str, others))}" if others else f"take more devices, trainer.lora, {smaller}"
    )
    raise UserError(
        f"Training does not fit: on {ranks} devices each needs {least.total / GIB:.1f} GiB of its {room / GIB:.1f} at "
        f"ZeRO 3 with checkpointing: {advice}."
    )


def alternatives(
    config: Config, model: ModelSizes, rates: Rates, lengths: TokenLengths, devices: int, device_bytes: float
) -> list[Plan]:
    """The plans with other keys of `trainer` with which training fits, the least change first. More of a key, or one
    key more, is left out if it gives no more tokens/s."""
    plans: list[Plan] = []
    for changes in _tried(config, model, lengths):
        changed = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
        if not (_ranks(changed, devices) and (found := _best(changed, model, rates, lengths, devices, device_bytes))):
            continue
        if not any(changes.keys() & other.changes.keys() and found.throughput <= other.throughput for other in plans):
            plans.append(replace(found, changes={key: value for key, value in changes.items() if key != "zero_stage"}))
    return plans


def _tried(config: Config, model: ModelSizes, lengths: TokenLengths) -> Iterator[dict[str, Any]]:
    """Changes to the trainer's settings that take memory from a device, each alone, and then two together."""
    trainer, longest = config.trainer, lengths.prompt + lengths.longest
    if not trainer.microbatches and longest < trainer.max_tokens_per_microbatch:
        yield {"max_tokens_per_microbatch": longest}
    optimizer: dict[str, Any] = {"offload": "optimizer"} if trainer.offload == "none" else {}
    if optimizer:
        yield optimizer
    several = [n for n in TOGETHER if n > trainer.sequence_parallel and model.heads and not model.heads % n]
    together = [{"sequence_parallel": n} for n in several if not (model.kv_heads % n and n % model.kv_heads)]
    yield from together
    if optimizer:
        yield from (optimizer | both for both in together)
    if trainer.offload != "all":
        yield {"offload": "all", "zero_stage": 3}


def _ranks(config: Config, devices: int) -> list[tuple[int, int]]:
    """The splits: numbers of generators and of ranks, which are whole groups that compute rows together."""
    n, together = config.generator.tensor_parallel, config.trainer.sequence_parallel
    pairs = (
        [(1, 1)] if devices == n == 1 else [(count, devices - n * count) for count in range(1, (devices - 1) // n + 1)]
    )
    return [(count, ranks) for count, ranks in pairs if not ranks % together]


def _room(device_bytes: float, alone: bool) -> float:
    """Bytes of a device for training. alone: the device has a generator, too."""
    return (TRAINER_SHARE - (SHARED if alone else 0)) * device_bytes


def _best(
    config: Config, model: ModelSizes, rates: Rates, lengths: TokenLengths, devices: int, device_bytes: float
) -> Plan | None:
    """The fastest split in which training fits; None if it fits in none. Raises UserError if there is no split."""
    n = config.generator.tensor_parallel
    alone = devices == n == 1
    if devices < n + 1 and not alone:
        raise UserError(f"{devices} devices are too few: a generator needs {n}, and the trainer at least one more.")
    generation = generation_memory(config, model, lengths, device_bytes, SHARED if alone else GENERATOR_SHARE)
    if not (splits := _ranks(config, devices)):
        raise UserError(
            f"{devices} devices cannot be split into generators of {n} devices and a number of trainer ranks that is a "
            f"multiple of trainer.sequence_parallel={config.trainer.sequence_parallel}: take another number of devices."
        )
    plans = []
    for count, ranks in splits:
        if fit := _fitting(config, model, ranks, lengths, _room(device_bytes, alone)):
            generated, trained = count * n * rates.generating, ranks * rates.training
            throughput = generated * trained / (generated + trained) if alone else min(generated, trained)
            plans.append(Plan(count, n, ranks, *fit[:2], generation, fit[2], generated, trained, throughput))
    return max(plans, key=lambda split: split.throughput, default=None)


def _fitting(
    config: Config, model: ModelSizes, ranks: int, lengths: TokenLengths, room: float
) -> tuple[int, bool, TrainingMemory] | None:
    """ZeRO stage, checkpointing and memory of the cheapest training that fits into `room` bytes on each of so many
    ranks; None if none fits."""
    first = 1 if config.trainer.dtype == "bfloat16" else 0  # areal.training.optimizer explains why
    stages = range(max(first, config.trainer.zero_stage), 4) if ranks > 1 else [first]
    for checkpointing in sorted({config.trainer.gradient_checkpointing is True, True}):
        for stage in stages:
            memory = training_memory(config, model, ranks, stage, checkpointing, lengths.prompt + lengths.longest)
            if memory.total <= room:
                return stage, checkpointing, memory
    return None
