"""Splits devices between generation and training, and computes the memory of both. Formulas only, no I/O.

Rates are completion tokens per second of a single device; the work on prompts and on proximal log-probs is included.
Memory is in bytes per device, lengths are in tokens.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from typing import Any

from areal.base.errors import UserError
from areal.config import Config
from areal.extensions.desk.activations import Activations
from areal.generation.engine_start import SHARED
from areal.training.head import AT_ONCE
from areal.training.optimizer import BUCKET, LARGEST_BUCKET
from areal.weights.packs import sending_bytes

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GENERATOR_SHARE = TRAINER_SHARE = 0.9
"""Share of a device's memory for an engine without neighbours on the device (vLLM's own default is 0.92), and for
training, where fragmentation loses the rest. Assumed."""
GENERATOR_OTHER, TRAINER_OTHER, HOST_OTHER = 1.5 * GIB, 2 * GIB, 4 * GIB
"""CUDA context and graphs of an engine; CUDA context and NCCL of a rank; host memory of a process with torch and CUDA.
Assumed."""
DEVICES_OF_A_HOST = 8
"""The most ranks that share the writing of weights. Assumed."""
LIVE_PARAMETERS = 10**9
"""The most parameters gathered at a time by DeepSpeed under ZeRO 3."""
LARGE_DEVICE, LARGE_STEP, STEP = 70 * GIB, 16384, 8192
"""Tokens of a vLLM step for throughput are LARGE_STEP on a device of LARGE_DEVICE bytes or more, else STEP."""
TOGETHER = (2, 4, 8)
"""Values of trainer.sequence_parallel to try."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model. `trained`: trained parameters, of the model or of adapters. `activations`, `checkpointed`: of
    the layers, without and with gradient checkpointing. `intermediate`: width of the MLP, of all experts of a token.
    `bucket`: elements of a bucket of gradients. `pinned`: bytes of a copy of the trained parameters in pinned host
    memory, where each tensor takes a power of two. `largest`: parameters of the largest tensor. `part`, `part_tensor`:
    parameters of the largest module in a layer, such as its experts, and of the largest tensor in it. `merged`:
    parameters of trained experts with two matrices in one tensor, stored apart as copies. `heads`: attention heads.
    `experts`, `inner`: parameters of experts, and of matrices divided by `trainer.tensor_parallel`. `chosen`: experts
    of a token in a layer."""

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
    experts: int = 0
    inner: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Completion tokens per second of a busy device, and lengths in tokens: the longest prompt, the mean completion and
    the longest completion."""

    generation_rate: float
    training_rate: float
    prompt: int
    mean: float
    longest: int

    @property
    def sequence(self) -> int:
        """The longest prompt and completion together."""
        return self.prompt + self.longest


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory of a rank, in bytes. `buckets`: buckets of gradients, parameters gathered under ZeRO 3, and weights on
    their way from rank 0 to generators. `host`: the rank's host memory, not in `total`."""

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
        return sum(asdict(self).values()) - self.host


@dataclass(frozen=True, slots=True)
class Plan:
    """A split of the devices. `memory_share`: share of a generator's device. `sequences`: sequences of the mean length
    at once in a generator, at most max_concurrent_rollouts; `longest_sequences`: sequences of the greatest length.
    `generated`, `trained`: tokens/s possible for generators and for the trainer; `throughput`: the lower of the two
    rates or, on a single device, the rate in turns. `received`: bytes received by a rank for a micro-batch (`traffic`).
    `changes`: further keys of `trainer` in the plan."""

    generators: int
    tensor_parallel: int
    ranks: int
    zero_stage: int
    gradient_checkpointing: bool
    training: TrainingMemory
    generation: Mapping[str, float]
    memory_share: float
    sequences: int
    longest_sequences: int
    generated: float
    trained: float
    throughput: float
    received: float
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generating_devices(self) -> int:
        return self.generators * self.tensor_parallel

    def __str__(self) -> str:
        keys = " ".join(f"trainer.{key}={value}" for key, value in self.changes.items())
        return f"{keys} ({self.generating_devices} + {self.ranks} devices, {self.throughput:,.0f} tokens/s)"

    @property
    def overrides(self) -> dict[str, str]:
        """The configuration keys of the plan, with their values."""
        trainer = {**self.changes, "ranks": self.ranks, "zero_stage": self.zero_stage}
        trainer["gradient_checkpointing"] = f"{self.gradient_checkpointing}".lower()
        generator = {"count": self.generators, "memory_share": self.memory_share}
        generator["max_concurrent_rollouts"] = self.sequences
        keys = {"generator": generator, "trainer": trainer}
        return {f"{part}.{key}": f"{value}" for part, values in keys.items() for key, value in values.items()}


def row_tokens(config: Config, ranks: int, longest: int) -> int:
    """Return the tokens of the longest row computed by the ranks of a sequence group. longest: tokens of a sequence. A
    fixed number of micro-batches has no cap: a micro-batch may hold nothing but the longest sequences."""
    trainer = config.trainer
    if not trainer.microbatches:
        return max(trainer.max_tokens_per_microbatch, longest)
    sequences = config.batch_size * config.group_size / trainer.minibatches
    return longest * math.ceil(sequences * trainer.sequence_parallel / ranks / trainer.microbatches)


def training_memory(
    config: Config, model: ModelSizes, ranks: int, stage: int, checkpointing: bool, longest: int
) -> TrainingMemory:
    """Return the memory of a rank. longest: tokens of the longest sequence, its prompt included.

    * Model states: ZeRO (arXiv 1910.02054, section 3) divides Adam's states among the ranks from stage 1 on, gradients
      from stage 2 on, and weights at stage 3. In bf16, the fp32 master weights and the two moments take 12 bytes per
      trained parameter. Gradients are accumulated in fp32; below stage 2 a rank also keeps the bf16 gradients. In fp32
      the moments take 8 bytes; from stage 1 on DeepSpeed also keeps its own master weights. With offload the optimizer
      takes nothing and gradients have the weights' type; with `all`, two layers' weights are fetched at a time
      (assumed). The reference model has only weights.
    * Experts or tensors are divided at every stage, and ZeRO divides each part among the ranks with the same part.
    * Host memory: the copies of the published weights, and of the weights in a checkpoint written meanwhile, both
      divided among a host's ranks, with `merged` once more; a checkpoint's fp32 weights and moments; offloaded states.
    """
    trainer = config.trainer
    size = BYTES[trainer.dtype]
    of_weights, of_gradients, of_optimizer = (_divisor(config, model, ranks, stage >= least) for least in (3, 2, 1))
    half = trainer.dtype != "float32"
    offload = trainer.offload != "none"
    elsewhere = trainer.reference_scorer or (trainer.lora and trainer.reference is None)
    writers = 1 if trainer.lora else min(ranks, DEVICES_OF_A_HOST)
    host = HOST_OTHER + 2 * (model.pinned + size * model.merged) / writers + 12 * model.trained / ranks
    host += (12 + 4) * model.trained / of_optimizer * offload
    host += size * model.parameters / of_weights * (trainer.offload == "all")
    return TrainingMemory(
        weights=size * model.parameters * (2 / model.layers if trainer.offload == "all" else 1 / of_weights),
        gradients=(size if offload else 6 if half and stage < 2 else 4) * model.trained / of_gradients,
        optimizer=0.0 if offload else (12 if stage else 8) * model.trained / of_optimizer,
        reference=size * model.parameters / of_weights if trainer.kl_coef and not elsewhere else 0.0,
        activations=_activations(config, model, ranks, checkpointing, longest),
        buckets=_buckets(config, model, ranks, stage),
        host=host,
    )


def _divided(config: Config, model: ModelSizes) -> int:
    """Return the number of parameters divided by `trainer.expert_parallel` or `tensor_parallel`."""
    if config.trainer.expert_parallel > 1:
        return model.experts
    return model.inner if config.trainer.tensor_parallel > 1 else 0


def _divisor(config: Config, model: ModelSizes, ranks: int, by_zero: bool) -> float:
    """Return the model's parameters divided by a rank's parameters. by_zero: whether ZeRO divides them too."""
    trainer, apart = config.trainer, _divided(config, model)
    parts = ranks if by_zero else trainer.expert_parallel * trainer.tensor_parallel
    holders = ranks // trainer.tensor_parallel if by_zero else 1
    return model.parameters / (apart / parts + (model.parameters - apart) / holders)


def traffic(config: Config, model: ModelSizes, ranks: int, stage: int, checkpointing: bool, longest: int) -> float:
    """Return the bytes received by a rank for a micro-batch, and without ZeRO 3 for its share of an optimizer step.

    ZeRO 3 gathers the weights of a layer forward and backward, and sends fp32 gradients. Experts divided over all ranks
    stay in place: each token goes to its experts and comes back, and so do gradients. Ranks with parts of tensors sum
    the hidden states twice in a layer. Checkpointing repeats a pass."""
    trainer, size = config.trainer, BYTES[config.trainer.dtype]
    tokens, passes = row_tokens(config, ranks, longest) / trainer.sequence_parallel, 3 if checkpointing else 2
    states = size * tokens * model.hidden * model.layers * passes
    n, m = trainer.expert_parallel, trainer.tensor_parallel
    volume = states * model.chosen * 2 * (n - 1) / n + states * 2 * 2 * (m - 1) / m
    apart = _divided(config, model)
    of_weights = 2 * size + 4 if stage == 3 else 4
    for parameters, holders in ((apart / (n * m), ranks // (n * m)), (model.parameters - apart, ranks // m)):
        volume += of_weights * parameters * (holders - 1) / holders
    return volume


def _buckets(config: Config, model: ModelSizes, ranks: int, stage: int) -> float:
    """Return the bytes of buckets and gathered parameters. DeepSpeed copies gradients into a bucket before it sends
    them: in fp32, at stage 2 in the weights' type with a copy in fp32. A layer's tensor above the bucket's size is sent
    alone. The copied gradient exists besides, in the weights' type. At stage 3 DeepSpeed also keeps up to
    LIVE_PARAMETERS gathered, and at least a module: the experts of a layer are a module, and so are their gradients
    when sent alone. For weights sent straight into engines `sending_bytes` counts."""
    size, parts = BYTES[config.trainer.dtype], config.trainer.expert_parallel * config.trainer.tensor_parallel
    model = replace(model, part=model.part // parts, part_tensor=model.part_tensor // parts)
    buckets: float = sending_bytes(size * model.largest) if config.weights.direct else 0
    if stage or ranks > 1:
        elements = min(max(model.bucket, model.part_tensor) if stage else LARGEST_BUCKET, model.trained)
        buckets += elements * (size + 4 if stage == 2 and size < 4 else 4)
    if stage > 1 and model.part_tensor <= model.trained:
        alone = model.part if stage == 3 else 0
        buckets += size * (alone if model.bucket < model.part_tensor else model.part_tensor)
    return buckets + (size * max(model.part, min(model.parameters, LIVE_PARAMETERS)) if stage == 3 else 0)


def _activations(config: Config, model: ModelSizes, ranks: int, checkpointing: bool, longest: int) -> float:
    """Return the peak of the backward pass, in the layers (activations.py) or in the output layer, where the saved
    activations of all layers still exist. The output layer takes AT_ONCE logits at a time, and makes fp32 gradients of
    the hidden states and of its weight (areal.training.head)."""
    trainer, layers = config.trainer, model.checkpointed if checkpointing else model.activations
    size = BYTES[trainer.dtype]
    tokens = math.ceil(row_tokens(config, ranks, longest) / trainer.sequence_parallel)
    logits = min(AT_ONCE, tokens * model.vocabulary)
    states = size * tokens * model.hidden
    backward = 2 * states + 4 * tokens * model.hidden + logits * (8 if size < 4 else 4)
    if not trainer.lora:
        backward += size * model.vocabulary * model.hidden
    return max(tokens * layers.peak, tokens * layers.saved + max(states + logits * 8, backward))


@dataclass(frozen=True)
class Planner:
    """Finds the fastest split of `devices`, each with `device_bytes` of memory, for a run of `config`."""

    config: Config
    model: ModelSizes
    work: Workload
    devices: int
    device_bytes: float

    def plan(self) -> Plan:
        """Return the fastest split with room for training. Raises UserError if no split has room. The message names the
        changes of keys that would make training fit, the least change first."""
        if found := self.fastest():
            return found
        if not (splits := self._splits()):
            raise UserError(
                f"{self.devices} devices cannot be split into generators of {self.config.generator.tensor_parallel} "
                f"devices and trainer ranks in multiples of {self._together} "
                f"(trainer.sequence_parallel, trainer.expert_parallel, trainer.tensor_parallel): take another number "
                f"of devices."
            )
        needed = training_memory(self.config, self.model, splits[0][1], 3, True, self.work.sequence).total
        others = ", ".join(map(str, self.alternatives()))
        more = (
            "take more devices, trainer.lora, a lower trainer.max_tokens_per_microbatch, or more trainer.microbatches"
        )
        raise UserError(
            f"Training does not fit: on {splits[0][1]} devices each needs {needed / GIB:.1f} GiB of its "
            f"{self._room / GIB:.1f} at ZeRO 3 with checkpointing: {f'it fits with {others}' if others else more}."
        )

    def fastest(self) -> Plan | None:
        """Return the split with the highest throughput among the splits with room for training, or None.

        Throughput is min(x g, (n - x) t) if x of n devices generate, in whole generators. A single device does both, at
        the rate g t / (g + t). Training has the lowest ZeRO stage that fits, with checkpointing if it must."""
        n, share = self.config.generator.tensor_parallel, SHARED if self._alone else GENERATOR_SHARE
        generation, most = self.generation_memory(share), self.config.generator.max_concurrent_rollouts
        *_, room, of_sequence = generation.values()
        of_mean = of_sequence * (self.work.prompt + self.work.mean) / self.work.sequence
        sequences = min(most, int(room / of_mean)), int(room / of_sequence)
        plans = []
        for count, ranks in self._splits():
            for way in islice(self._ways(ranks), 1):
                g, t = count * n * self.work.generation_rate, ranks * self.work.training_rate
                throughput = g * t / (g + t) if self._alone else min(g, t)
                received = traffic(self.config, self.model, ranks, *way[:2], self.work.sequence)
                plans.append(Plan(count, n, ranks, *way, generation, share, *sequences, g, t, throughput, received))
        return max(plans, key=lambda split: split.throughput, default=None)

    def alternatives(self) -> list[Plan]:
        """Return the plans with room for training under changed keys of `trainer`, the least change first. A larger
        value of a key, or a further key, is left out if it gives no more tokens/s."""
        plans: list[Plan] = []
        for changes in self._changes():
            trainer = self.config.trainer.model_copy(update=changes)
            found = replace(self, config=self.config.model_copy(update={"trainer": trainer})).fastest()
            if found and not any(changes.keys() & p.changes.keys() and found.throughput <= p.throughput for p in plans):
                plans.append(replace(found, changes={k: v for k, v in changes.items() if k != "zero_stage"}))
        return plans

    def generation_memory(self, share: float = GENERATOR_SHARE) -> dict[str, float]:
        """Return the bytes of a generator's device, by part. share: the generator's share of the device. The KV of a
        token is divided among at most as many devices as it has heads. A token of a step takes its hidden states, and
        three times the MLP's divided width; a sampled sequence takes its logits and log-probs in fp32.

        Raises UserError if the weights, or the KV of a single sequence, do not fit."""
        generator, model, longest = self.config.generator, self.model, self.work.sequence
        n, size = generator.tensor_parallel, BYTES[generator.dtype]
        weights = size * model.parameters / n
        usual = LARGE_STEP if self.device_bytes >= LARGE_DEVICE else STEP
        tokens = generator.engine_options.get("max_num_batched_tokens") or usual
        step = size * tokens * (4 * model.hidden + 3 * model.intermediate / n)
        step += 12 * model.vocabulary * generator.max_concurrent_rollouts
        room = share * self.device_bytes - weights - step - GENERATOR_OTHER
        of_sequence = size * 2 * model.layers * model.kv_heads * model.head_size / min(n, model.kv_heads) * longest
        if room < of_sequence:
            raise UserError(
                f"A generator of {n} devices with {self.device_bytes / GIB:g} GiB has no room for the weights "
                f"({weights / GIB:.1f} GiB on each) and one sequence of {longest} tokens: raise "
                f"generator.tensor_parallel or lower sampling.max_new_tokens."
            )
        parts = {"weights": weights, "step": step, "overhead": GENERATOR_OTHER, "room for the KV cache": room}
        return parts | {"KV cache of a sequence of full length": of_sequence}

    @property
    def _alone(self) -> bool:
        """Whether generator and trainer share a single device."""
        return self.devices == self.config.generator.tensor_parallel == 1

    @property
    def _together(self) -> int:
        """The least number of ranks that compute together. The number of ranks is a multiple of it."""
        trainer = self.config.trainer
        return math.lcm(trainer.sequence_parallel, trainer.expert_parallel, trainer.tensor_parallel)

    @property
    def _room(self) -> float:
        """Bytes of a device for training."""
        return (TRAINER_SHARE - (SHARED if self._alone else 0)) * self.device_bytes

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Yield changes of the trainer's settings that take memory from a device: single changes, then pairs."""
        trainer, model = self.config.trainer, self.model
        if not trainer.microbatches and self.work.sequence < trainer.max_tokens_per_microbatch:
            yield {"max_tokens_per_microbatch": self.work.sequence}
        optimizer: list[dict[str, Any]] = [{"offload": "optimizer"}] if trainer.offload == "none" else []
        several = [n for n in TOGETHER if n > trainer.sequence_parallel and model.heads and not model.heads % n]
        together = [{"sequence_parallel": n} for n in several if not (model.kv_heads % n and n % model.kv_heads)]
        yield from (*optimizer, *together, *(one | other for one in optimizer for other in together))
        if trainer.offload != "all":
            yield {"offload": "all", "zero_stage": 3}

    def _splits(self) -> list[tuple[int, int]]:
        """Return pairs of the numbers of generators and ranks. Ranks are whole groups that compute together."""
        n, together = self.config.generator.tensor_parallel, self._together
        pairs = [(count, self.devices - n * count) for count in range(1, (self.devices - 1) // n + 1)]
        return [(count, ranks) for count, ranks in ([(1, 1)] if self._alone else pairs) if not ranks % together]

    def _ways(self, ranks: int) -> Iterator[tuple[int, bool, TrainingMemory]]:
        """Yield ZeRO stage, checkpointing and memory of each way to train with `ranks` ranks, cheapest first."""
        trainer = self.config.trainer
        first = 1 if trainer.dtype == "bfloat16" else 0  # areal.training.optimizer explains why
        stages = range(max(first, trainer.zero_stage), 4) if ranks > 1 else [first]
        for checkpointing, stage in product(sorted({trainer.gradient_checkpointing is True, True}), stages):
            memory = training_memory(self.config, self.model, ranks, stage, checkpointing, self.work.sequence)
            if memory.total <= self._room:
                yield stage, checkpointing, memory
