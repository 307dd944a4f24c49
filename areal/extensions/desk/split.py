"""Splits devices between generation and training, and computes the memory that each needs. Formulas only, no I/O.

Rates are completion tokens per second of one device, memory is in bytes per device, lengths are in tokens.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product

from areal.base.errors import UserError
from areal.config import Config
from areal.extensions.desk.activations import Activations
from areal.generation.engine_start import SHARED
from areal.training.head import AT_ONCE
from areal.training.optimizer import BUCKET, LARGEST_BUCKET
from areal.weights.packs import sending_bytes

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Assumed: an engine that has a device to itself leaves a tenth (vLLM's own default is 0.08), training loses a tenth to
# fragmentation. CUDA context and graphs of an engine; CUDA context and NCCL of a rank.
GENERATOR_SHARE = TRAINER_SHARE = 0.9
GENERATOR_OTHER, TRAINER_OTHER = 1.5 * GIB, 2 * GIB
LIVE_PARAMETERS = 10**9  # that DeepSpeed keeps gathered at once under ZeRO 3, at most
# Tokens of a step that vLLM takes for throughput, on a device of so much memory and on smaller devices.
LARGE_DEVICE, LARGE_STEP, STEP = 70 * GIB, 16384, 8192


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, most as numbers of parameters. `trained`: of the model or its adapters. `activations`,
    `checkpointed`: of its layers, without and with gradient checkpointing. `intermediate`: width of the MLP, of all
    experts of a token. `bucket`: of gradients. `largest`: tensor. `part`, `part_tensor`: largest module of a layer,
    such as its experts, and its tensor. `experts`, `inner`: divided by trainer.expert_parallel and tensor_parallel."""

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
    largest: int = 0
    part: int = 0
    part_tensor: int = 0
    experts: int = 0
    inner: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Completion tokens per second of one device while it has work, and lengths in tokens: the longest prompt, the mean
    completion and the longest completion."""

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
    """Bytes of one rank. `buckets`: gradients, parameters gathered under ZeRO 3, and weights sent to generators."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    buckets: float
    overhead: float = TRAINER_OTHER

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True)
class Plan:
    """A split of the devices. `memory_share`: of a generator's device. `sequences`: sequences of the mean length that
    one generator can run at once, at most max_concurrent_rollouts. `generated`, `trained`, `throughput`: tokens/s of
    generators, trainer and run at most."""

    generators: int
    tensor_parallel: int
    ranks: int
    zero_stage: int
    gradient_checkpointing: bool
    training: TrainingMemory
    generation: Mapping[str, float]
    memory_share: float
    sequences: int
    generated: float
    trained: float
    throughput: float

    @property
    def generating_devices(self) -> int:
        return self.generators * self.tensor_parallel

    @property
    def overrides(self) -> dict[str, str]:
        """The keys of the configuration that this plan sets."""
        values = {
            "generator.count": self.generators,
            "generator.memory_share": self.memory_share,
            "generator.max_concurrent_rollouts": self.sequences,
            "trainer.ranks": self.ranks,
            "trainer.zero_stage": self.zero_stage,
            "trainer.gradient_checkpointing": f"{self.gradient_checkpointing}".lower(),
        }
        return {key: f"{value}" for key, value in values.items()}


def row_tokens(config: Config, ranks: int, longest: int) -> int:
    """Tokens of the longest row that the ranks of a sequence group compute together. longest: of one sequence. A fixed
    number of micro-batches has no cap: a micro-batch may hold only sequences of this length."""
    trainer = config.trainer
    if not trainer.microbatches:
        return max(trainer.max_tokens_per_microbatch, longest)
    sequences = config.batch_size * config.group_size / trainer.minibatches
    return longest * math.ceil(sequences * trainer.sequence_parallel / ranks / trainer.microbatches)


def training_memory(
    config: Config, model: ModelSizes, ranks: int, stage: int, checkpointing: bool, longest: int
) -> TrainingMemory:
    """The memory of one rank. longest: tokens of the longest sequence, its prompt included.

    ZeRO (arXiv 1910.02054, section 3) divides Adam's states among the ranks from stage 1 on, gradients from stage 2 on,
    and weights at stage 3. Bytes per trained parameter in bf16: 12 for the fp32 master weights and the moments, 4 for
    fp32 gradients, below stage 2 also 2 for bf16 gradients. In fp32: 8 for the moments, from stage 1 on also 4 for
    master weights. With offload the optimizer takes nothing and gradients have the weights' type; with `all` the
    weights of two layers are on the device at a time (assumed).
    """
    trainer = config.trainer
    size = BYTES[trainer.dtype]
    of_weights, of_gradients, of_optimizer = (_divisor(config, model, ranks, stage >= least) for least in (3, 2, 1))
    half, offload = trainer.dtype != "float32", trainer.offload != "none"
    elsewhere = trainer.reference_scorer or (trainer.lora and trainer.reference is None)
    return TrainingMemory(
        weights=size * model.parameters * (2 / model.layers if trainer.offload == "all" else 1 / of_weights),
        gradients=(size if offload else 6 if half and stage < 2 else 4) * model.trained / of_gradients,
        optimizer=0.0 if offload else (12 if stage else 8) * model.trained / of_optimizer,
        reference=size * model.parameters / of_weights if trainer.kl_coef and not elsewhere else 0.0,
        activations=_activations(config, model, ranks, checkpointing, longest),
        buckets=_buckets(config, model, ranks, stage),
    )


def _divisor(config: Config, model: ModelSizes, ranks: int, by_zero: bool) -> float:
    """By how much the parameters of a rank are fewer than the model's. by_zero: whether ZeRO divides them, too."""
    n, m = config.trainer.expert_parallel, config.trainer.tensor_parallel
    divided = model.experts if n > 1 else model.inner if m > 1 else 0
    parts, holders = (ranks, ranks // m) if by_zero else (n * m, 1)
    return model.parameters / (divided / parts + (model.parameters - divided) / holders)


def _buckets(config: Config, model: ModelSizes, ranks: int, stage: int) -> float:
    """DeepSpeed copies gradients into a bucket before it sends them: in fp32, at stage 2 in the weights' type, with a
    copy in fp32. A larger tensor is sent alone. The copied gradient exists besides, in the weights' type. At stage 3
    DeepSpeed also keeps up to LIVE_PARAMETERS gathered, but never less than a module, such as a layer's experts."""
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
    """The most that exists at once, in the backward pass either of the layers (activations.py) or of the output layer.
    The output layer takes AT_ONCE logits at a time, and makes a gradient of the hidden states in fp32 (head.py)."""
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
        """The split with the highest throughput, among the splits in which training fits, at the lowest ZeRO stage that
        fits, with checkpointing if it must. Raises UserError if training fits in no split.

        Throughput is min(x g, (n - x) t) if x of n devices generate, or g t / (g + t) on one device in turns."""
        n, share = self.config.generator.tensor_parallel, SHARED if self._alone else GENERATOR_SHARE
        generation, most = self.generation_memory(share), self.config.generator.max_concurrent_rollouts
        *_, room, of_sequence = generation.values()
        sequences = min(most, int(room / of_sequence * self.work.sequence / (self.work.prompt + self.work.mean)))
        plans = []
        for count, ranks in self._splits():
            if way := next(self._ways(ranks), None):
                g, t = count * n * self.work.generation_rate, ranks * self.work.training_rate
                throughput = g * t / (g + t) if self._alone else min(g, t)
                plans.append(Plan(count, n, ranks, *way, generation, share, sequences, g, t, throughput))
        if not plans:
            raise UserError(self._refusal())
        return max(plans, key=lambda split: split.throughput)

    def _refusal(self) -> str:
        """The sentence for the user if training fits in no split."""
        if not (splits := self._splits()):
            return (
                f"{self.devices} devices cannot be split into generators of {self.config.generator.tensor_parallel} "
                f"devices and trainer ranks in multiples of {self._together} (trainer.sequence_parallel, "
                f"trainer.expert_parallel, trainer.tensor_parallel): take another number of devices."
            )
        ranks = splits[0][1]
        needed = training_memory(self.config, self.model, ranks, 3, True, self.work.sequence).total
        untried = "trainer.offload=optimizer, " * (self.config.trainer.offload == "none")
        untried += "trainer.lora, " * (self.config.trainer.lora is None)
        return (
            f"Training does not fit: on {ranks} devices each needs {needed / GIB:.1f} GiB of its "
            f"{self._room / GIB:.1f} at ZeRO 3 with checkpointing: take {untried}more "
            f"trainer.sequence_parallel, a lower trainer.max_tokens_per_microbatch, or more devices."
        )

    def generation_memory(self, share: float = GENERATOR_SHARE) -> dict[str, float]:
        """Bytes of one device of a generator, which has a `share` of the device. Raises UserError if the weights, or
        the KV of one sequence, do not fit.

        The KV of a token is divided among at most as many devices as it has heads. A token of a step takes its hidden
        states and three times the width of the MLP, which is divided; a sampled sequence its logits in fp32."""
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
    def _alone(self) -> bool:  # whether one device has both a generator and the trainer
        return self.devices == self.config.generator.tensor_parallel == 1

    @property
    def _together(self) -> int:  # the number of ranks is a multiple
        trainer = self.config.trainer
        return math.lcm(trainer.sequence_parallel, trainer.expert_parallel, trainer.tensor_parallel)

    @property
    def _room(self) -> float:  # bytes of a device for training
        return (TRAINER_SHARE - (SHARED if self._alone else 0)) * self.device_bytes

    def _splits(self) -> list[tuple[int, int]]:
        """Numbers of generators and of ranks. Ranks are whole groups that compute together."""
        n, together = self.config.generator.tensor_parallel, self._together
        pairs = [(count, self.devices - n * count) for count in range(1, (self.devices - 1) // n + 1)]
        return [(count, ranks) for count, ranks in ([(1, 1)] if self._alone else pairs) if not ranks % together]

    def _ways(self, ranks: int) -> Iterator[tuple[int, bool, TrainingMemory]]:
        """ZeRO stage, checkpointing and memory of the ways to train that fit on so many ranks, the cheapest first."""
        trainer = self.config.trainer
        first = 1 if trainer.dtype == "bfloat16" else 0  # areal.training.optimizer explains why
        stages = range(max(first, trainer.zero_stage), 4) if ranks > 1 else [first]
        for checkpointing, stage in product(sorted({trainer.gradient_checkpointing is True, True}), stages):
            memory = training_memory(self.config, self.model, ranks, stage, checkpointing, self.work.sequence)
            if memory.total <= self._room:
                yield stage, checkpointing, memory
