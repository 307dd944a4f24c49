"""Sampling, the engines that sample, and the way of new weights to the engines."""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr

from areal.config.engine_options import devices_of, vllm_conflicts
from areal.config.section import Section, UserPath, temperature_conflicts


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="0: greedy; training needs a value above 0")
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling; below 1 often only with `top_k` (areal docs objectives)"""
    top_k: int = Field(0, ge=0, description="draw from so many likeliest tokens; 0: all")
    min_p: float = Field(0.0, ge=0, le=1)
    """draw from tokens at least this times as likely as the likeliest; above 0 as for `top_p`"""
    max_new_tokens: int = Field(gt=0, description="most tokens of a sample, over all its turns")
    min_new_tokens: int = Field(0, ge=0)
    """no stop token is drawn before a sample has so many tokens, over all turns; above 0 as for `top_p`"""
    stop: list[str] = Field(default_factory=list)
    """texts that end a turn, besides the model's stop tokens; the texts remain in the turn"""

    _seed: int | None = PrivateAttr(None)

    @property
    def seed(self) -> int | None:
        """The seed of a single request's random numbers, from 0; None: a stream for all requests of the engine."""
        return self._seed

    def with_seed(self, seed: int | None) -> Self:
        """Return the same sampling with this seed."""
        seeded = self.model_copy()
        seeded._seed = seed
        return seeded

    @property
    def left_out(self) -> tuple[str, ...]:
        """The keys that leave words out of the distributions of tokens."""
        neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "min_new_tokens": 0}
        return tuple(key for key, value in neutral.items() if getattr(self, key) != value)

    def conflicts(self) -> Iterator[str]:
        yield from temperature_conflicts("sampling.temperature", self.temperature)
        if "" in self.stop:
            yield "sampling.stop has an empty text, which would end every turn at once: remove it"
        if self.min_new_tokens > self.max_new_tokens:
            yield (
                f"sampling.min_new_tokens is {self.min_new_tokens} but sampling.max_new_tokens is only "
                f"{self.max_new_tokens}: lower sampling.min_new_tokens"
            )


def half_on_gpus(cuda: bool) -> str:
    """Return the type of weights for `auto`."""
    return "bfloat16" if cuda else "float32"


class EngineConfig(Section):
    """A vLLM engine."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type of the weights in the engine; auto: bfloat16 on GPUs, else float32"""
    threads: int = Field(1, ge=1, description="OpenMP threads of the engine (CPU only)")
    max_model_len: int | None = Field(None, gt=0, description="most tokens of a sequence; null: the model's limit")
    memory_share: float | None = Field(None, gt=0, lt=1)
    """share of a GPU's memory for the engine (vLLM's gpu_memory_utilization); null: 0.9, or 0.3 beside the trainer"""
    kv_cache_gib: float | None = Field(None, gt=0)
    """KV cache on each device, GiB; null: the rest of memory_share on a GPU, 1 on a CPU"""
    tensor_parallel: int = Field(1, ge=1, description="devices of one engine")
    enforce_eager: bool = Field(False, description="use no CUDA graphs and no compilation")
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """further arguments of vLLM's engine, such as {kv_cache_dtype: fp8} (areal docs running)"""

    def conflicts(self) -> Iterator[str]:
        yield from vllm_conflicts(self.engine_options)

    @property
    def devices(self) -> int:
        """The number of an engine's devices; on a CPU, of its processes."""
        return self.tensor_parallel * devices_of(self.engine_options)

    def for_device(self, *, cuda: bool) -> Self:
        """Return this configuration for engines on GPUs (cuda) or CPUs, without `auto`."""
        return self.model_copy(update={"dtype": half_on_gpus(cuda) if self.dtype == "auto" else self.dtype})


class GeneratorConfig(EngineConfig):
    count: int = Field(1, ge=1, description="generators of a run on one machine")
    max_concurrent_rollouts: int = Field(64, ge=1)
    """most sequences that a generator runs at once; fewer if the KV cache is too small"""
    stream_interval: int = Field(
        16, ge=1, description="tokens per chunk, if parts are read; a user's first comes at once"
    )
    interrupt: bool = True
    """new weights interrupt the running sequences; false: running sequences finish first, and no new sequences begin"""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of interrupted samples: recomputed under the new weights (the paper), or kept as the old weights
    computed it (PipelineRL, arXiv 2509.19128), also for later turns"""


class ScorerConfig(EngineConfig):
    """`scorers` is a mapping of names to frozen models on their own engines: teachers (`trainer.teacher`) and
    references (`trainer.reference: scorer:NAME`), which give the log-probs of the sampled tokens, reward models
    (`reward.functions`) and judges (`reward.options`)."""

    model: str
    """folder of a Hugging Face model, hub id, or `quickstart`; for log-probs with the run's tokenizer"""
    kind: Literal["logprobs", "reward_model", "judge"] = "logprobs"
    """logprobs: log-probs of the sampled tokens; reward_model: a classifier; judge: the model of `url: scorer:NAME`"""
    count: int = Field(1, ge=0)
    """processes of the scorer in a run on one machine; 0: they join the run (areal run --role scorer)"""
    repeatable: bool = False
    """score rows singly, without a prefix cache: a row's result is then the same to the last bit"""
    chat: bool = True
    """a reward model reads prompt and completion as a chat in its own template; false: as a single text"""
    output: int = Field(0, ge=0, description="number of a reward model's output that is the score")
    activation: bool = Field(False, description="a reward model's outputs are those after its sigmoid or softmax")

    @property
    def engine(self) -> GeneratorConfig:
        """Return the settings of the scorer's engine."""
        config = GeneratorConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})
        options = dict(config.engine_options)
        changes: dict[str, Any] = {"engine_options": options}
        if self.kind == "reward_model":
            options["runner"] = "pooling"
        if self.repeatable:
            options["enable_prefix_caching"] = False
            changes["max_concurrent_rollouts"] = 1
        return config.model_copy(update=changes)


class WeightsConfig(Section):
    """The way of new weights to the generators; docs/generation.md says when to use which setting."""

    transport: Literal["folder", "stream", "direct"] = "folder"
    """folder: all nodes share weights.folder; stream: over the bus, from generator to generator; direct: from the
    trainer straight into each engine's weights, by vLLM's weight transfer (NCCL; without a GPU gloo)"""
    folder: UserPath | None = None
    """holds a folder of weights per run, for example /dev/shm; null: the run folder"""
    delta: bool = Field(True, description="stream only what has changed, bit-exactly, if that is smaller")

    @property
    def direct(self) -> bool:
        """Whether the trainer sends weights straight into engines."""
        return self.transport == "direct"
