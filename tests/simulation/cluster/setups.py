"""The set-up of a run of the scaling model: the hardware, the model, and the devices for generation and training."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.base.errors import UserError

# One token in a message stands for this many tokens of the model. The control plane does not depend on tokens, and with
# all tokens a batch of the paper would be 0.7 GB.
GRAIN = 64
GENERATING_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Hardware:
    """An H800, as in the paper: 8 per node, with NVLink within a node and RoCE with 3.2 Tb/s per node between nodes."""

    peak_flops: float = 989e12
    """bf16, dense: NVIDIA's data sheet of the H100/H800 SXM."""
    memory: float = 80e9
    memory_bandwidth: float = 3.35e12
    """Bytes/s, the same data sheet."""
    memory_share: float = 0.85
    """Share of the memory for weights and KV cache of an engine."""
    bandwidth_reached: float = 0.8
    """Share of the memory bandwidth that decoding kernels reach. STREAM-like tests reach 0.87 on an H100."""
    decode_overhead: float = 8e-3
    """Seconds of a decoding step besides reading memory (scheduling, sampling, launches). Fitted to the paper's 1.5B
    run at eta 0 (see docs/generation.md)."""
    allreduce: float = 15e-6
    """Seconds of one all-reduce of a decoding step between the devices of an engine. There are two per layer."""
    prefill_utilisation: float = 0.5
    """Share of the peak that prefill reaches: it is compute-bound, with large matrices."""
    network_bandwidth: float = 50e9
    """Bytes/s per device: 400 Gb/s."""
    devices_a_node: int = 8
    write_bandwidth: float = 5e9
    """Bytes/s at which rank 0 writes a file of weights, as one client of a parallel file system. Assumed."""
    read_bandwidth: float = 10e9
    """Bytes/s at which a node reads a file of weights. The engines of a node share the page cache. Assumed."""
    storage_bandwidth: float = 400e9
    """Bytes/s of the shared file system, for all nodes together. Assumed."""
    pause_seconds: float = 0.05
    """Time to stop and start an engine around a load."""
    spool_bandwidth: float = 2e9
    """Bytes/s at which the trainer reads its batch from the spool."""


@dataclass(frozen=True, slots=True)
class Llm:
    """A model of the paper, DeepSeek-R1-Distill-Qwen. The sizes are from its config.json."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_size: int
    training_utilisation: float
    """MFU of training, fitted to the paper (docs/generation.md): 1.5B: 371.7 k tokens/s on 128 devices; 7B: 250 steps
    in 25.4 h on 192."""
    devices_an_engine: int
    """Tensor-parallel size of generation, our own choice."""

    @property
    def weight_bytes(self) -> float:
        return 2.0 * self.parameters

    @property
    def kv_bytes(self) -> float:
        """Bytes of the KV cache for one token."""
        return 2.0 * 2 * self.layers * self.kv_heads * self.head_size

    def training_flops(self, tokens: int) -> float:
        """FLOPs to train on one sequence with causal attention: a forward pass for the proximal log-probs, then a
        forward and a backward pass."""
        return 8.0 * self.parameters * tokens + 8.0 * self.layers * self.hidden * tokens**2


MODELS = {
    "1.5b": Llm("1.5b", 1.54e9, 28, 1536, 2, 128, training_utilisation=0.20, devices_an_engine=1),
    "7b": Llm("7b", 7.6e9, 28, 3584, 4, 128, training_utilisation=0.31, devices_an_engine=2),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """One run. The defaults are the paper's settings for mathematics: 512 prompts x 16 samples, 4 minibatches, eta 8,
    16k tokens of context."""

    devices: int
    llm: Llm = MODELS["7b"]
    max_staleness: int = 8
    run_ahead: str = "auto"
    warm_up: int = 4
    """Number of steps before the measured ones."""
    steps: int = 8
    """Number of measured steps."""
    batch_size: int = 512
    group_size: int = 16
    minibatches: int = 4
    prompt_tokens: int = 1024
    max_new_tokens: int = 15 * 1024
    length_median: float = 6200.0
    length_sigma: tuple[float, float] = (0.5, 0.62)
    """Sigma of the log-normal lengths: between prompts, and between the samples of a prompt; together 0.8. With the
    paper's limit of 27k, 9.3k tokens per sample are trained, which agrees with the paper's step times and
    throughput."""
    concurrent: int = 128
    """Number of sequences that an engine runs at once."""
    seed: int = 0
    hardware: Hardware = field(default_factory=Hardware)

    @property
    def generators(self) -> int:
        return max(1, round(self.devices * GENERATING_SHARE / self.llm.devices_an_engine))

    @property
    def trainer_devices(self) -> int:
        return max(1, self.devices - self.generators * self.llm.devices_an_engine)

    @property
    def chunk(self) -> int:
        """Tokens of a sequence in one message. The default of `generator.stream_interval` is 16, which only means more
        messages to the rollout managers. The larger values save simulation time."""
        return 1024 if self.devices <= 1024 else 4096

    @property
    def managers(self) -> int:
        """One for every 32 devices."""
        return max(1, self.devices // 32)

    @property
    def rewards(self) -> int:
        return max(1, self.devices // 128)

    @property
    def groups_a_manager(self) -> int:
        return max(1, self.generators * self.concurrent // self.group_size // self.managers + 1)


def parse_devices(text: str) -> list[int]:
    """The numbers of devices in a text such as `8,32,128`. Raises UserError."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 4:
        raise UserError(f"--devices {text!r} is not a list of numbers, each at least 4, such as 8,32,128,512.")
    return sizes


def devices_for(generators: int, llm: Llm) -> int:
    """The number of devices of a run with this number of engines."""
    return max(4, round(generators * llm.devices_an_engine / GENERATING_SHARE))
