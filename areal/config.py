"""The configuration of a run: one pydantic model, read from YAML and dotted overrides.

Every value is set in exactly one place. Unknown keys and wrong types are errors that name the key.
This module imports neither torch nor vLLM, so that a configuration is checked before anything is started.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict


class UserError(Exception):
    """A mistake of the user's, told in one sentence: what is wrong, where, and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DataConfig(Section):
    """Where prompts come from. `source` is one of

    * `addition`: the quickstart's long additions;
    * a path ending in .jsonl: one object a line with `prompt` and `answer`;
    * `reasoning_gym:NAME`: a task of the reasoning_gym library, with `options` handed to it;
    * `hf:NAME` or the path of a folder: a Hugging Face dataset (hub id, or `save_to_disk` folder).
    """

    source: str
    eval_source: str | None = Field(None, description="held-out rows; default: the source itself, with other rows")
    split: str = Field("train", description="split of a Hugging Face dataset")
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    options: dict[str, Any] = Field(default_factory=dict, description="options of the task or dataset")
    system_prompt: str | None = Field(None, description="first message, where the tokenizer has a chat template")
    size: int | None = Field(None, gt=0, description="rows to make of a generated task (addition, reasoning_gym)")
    eval_size: int = Field(256, ge=0, description="held-out rows; 0: no evaluation")


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(gt=0)


class RewardConfig(Section):
    """`functions` are names of built-in rewards or `package.module:function`; a row may name its own."""

    count: int = Field(1, ge=1)
    functions: list[str] = Field(min_length=1)
    workers: int = Field(1, ge=1, description="worker processes of each reward actor")
    timeout_seconds: float = Field(10.0, gt=0, description="deadline of one call")
    retries: int = Field(2, ge=0, description="further attempts after a failure, on another actor where there is one")


class GeneratorConfig(Section):
    count: int = Field(1, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    threads: int = Field(1, ge=1, description="OpenMP threads of the engine (CPU only)")
    max_concurrent_rollouts: int = Field(64, ge=1, description="sequences one generator runs at once")
    max_model_len: int | None = Field(None, gt=0, description="prompt and completion; default: the model's own")
    memory_share: float = Field(0.3, gt=0, lt=1, description="vLLM's gpu_memory_utilization; of RAM on the CPU")
    kv_cache_gib: float = Field(1.0, gt=0, description="KV cache on the CPU, GiB")
    tensor_parallel: int = Field(1, ge=1)
    stream_interval: int = Field(16, ge=1, description="tokens of a sequence in one streamed chunk")
    enforce_eager: bool = Field(False, description="no CUDA graphs, no compilation")


class RolloutManagerConfig(Section):
    count: int = Field(1, ge=1)
    workflow: str = Field("single_turn", description="built-in name or package.module:function")
    max_concurrent_groups: int = Field(64, ge=1, description="groups one manager runs at once")


class TrainerConfig(Section):
    ranks: int = Field(1, ge=1, description="DeepSpeed ranks on this machine")
    zero_stage: Literal[0, 1, 2, 3] = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(1, ge=1, description="OpenMP threads of each rank (CPU only)")
    lr: float = Field(2e-5, gt=0)
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up; then constant")
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.05, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    minibatches: int = Field(4, ge=1, description="optimizer steps a training step, each on its share of the batch")
    max_tokens_per_microbatch: int = Field(16384, ge=1, description="cap C of Algorithm 1")
    objective: Literal["decoupled_ppo", "ppo"] = "decoupled_ppo"
    eps_clip: float = Field(0.2, gt=0)
    eps_clip_higher: float | None = Field(None, gt=0, description="upper clip, where it differs from eps_clip")
    advantage_norm: Literal["batch", "group"] = Field(
        "batch", description="batch: over the global batch (the paper); group: over the samples of a prompt"
    )
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints; 0: only the last")


class MasterConfig(Section):
    address: str = Field("tcp://127.0.0.1:5555", pattern=r"^tcp://.+:\d+$")
    lease_seconds: float = Field(30.0, gt=0, description="silence after which an actor's leases return")
    stall_seconds: float = Field(300.0, gt=0, description="time without any progress after which the run gives up")


class Config(BaseSettings):
    """A run. `batch_size` (B) and all bounds count groups: prompts with their `group_size` (G) samples."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    name: str = Field("run", pattern=r"^[\w.-]+$", description="the run's folder below run_dir")
    run_dir: Path = Path("runs")
    seed: int = 0
    model: str = Field(description="folder of a Hugging Face model, hub id, or `quickstart` (made here)")
    steps: int = Field(ge=1, description="training steps")
    batch_size: int = Field(ge=1, description="B, groups a training step")
    group_size: int = Field(ge=1, description="G, samples a prompt")
    max_staleness: int = Field(8, ge=0, description="eta: versions between a group's first token and its training")
    on_straggler: Literal["wait", "requeue", "mask", "admission_only"] = "wait"
    on_failed_sample: Literal["requeue", "discard"] = Field(
        "requeue", description="what becomes of a group whose completion could not be scored"
    )
    max_attempts: int = Field(3, ge=1, description="times a prompt is admitted before its group is discarded")

    data: DataConfig
    sampling: SamplingConfig
    reward: RewardConfig
    generator: GeneratorConfig = GeneratorConfig()
    rollout_manager: RolloutManagerConfig = RolloutManagerConfig()
    trainer: TrainerConfig = TrainerConfig()
    master: MasterConfig = MasterConfig()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # no environment variables: nothing is configured twice

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Config:
        if self.trainer.minibatches > self.batch_size:
            raise ValueError(
                f"trainer.minibatches is {self.trainer.minibatches} but batch_size is only {self.batch_size}: "
                f"lower trainer.minibatches"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir / self.name
