"""The configuration of a run: one pydantic model, read from YAML and dotted overrides.

Every value is set in exactly one place. Unknown keys and wrong types are errors that name the key.
This module imports neither torch nor vLLM, so a configuration can be checked before anything is started.
"""

import copy
import difflib
import inspect
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import jinja2
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from areal.engine_options import deepspeed_conflicts, devices_of, parser_conflicts, vllm_conflicts
from areal.hiding import reveal, without_secrets
from areal.text import reason_of

Causes = type[BaseException] | tuple[type[BaseException], ...]


class UserError(Exception):
    """A mistake by the user. The message is one sentence: what is wrong, where, and what to do."""


@contextmanager
def explain(causes: Causes, message: str, error: Callable[[str], Exception] = UserError) -> Iterator[None]:
    """Raise `error` in place of errors of these kinds. `{why}` in its message stands for what they say, in one line.

    If they are errors of all kinds, as of the user's code, their type comes first. `{strerror}` stands for what the
    system says, for a message that names the file itself.
    """
    try:
        yield
    except causes as cause:
        text = reason_of(cause) or type(cause).__name__
        if Exception in (causes if isinstance(causes, tuple) else (causes,)):
            text = f"{type(cause).__name__}: {text}"
        strerror = getattr(cause, "strerror", None) or text
        raise error(message.replace("{why}", text).replace("{strerror}", strerror)) from cause


# A name of a file or folder, whatever folder it is in: neither `.` nor `..`, without `/`, and no option of a command.
NAME = r"(?!\.+$|-)[\w.-]{1,100}"

# A link to the folder of a clone; in a wheel a copy of it.
CONFIGS = Path(__file__).with_name("configs")
# Benchmarks that `evaluator.benchmarks` names without a file.
BENCHMARKS = CONFIGS / "benchmarks"


class Section(BaseModel):
    """A section of keys. The meaning of each is its description, or the text below it (areal.desk.settings_list)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[str]:
        """What is wrong with the keys of this section: sentences for the user, who gets the first one."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflict(self) -> Self:
        if conflict := next(self.conflicts(), None):
            raise ValueError(conflict)
        return self


T = TypeVar("T", bound=Section)


def template_conflicts(key: str, template: str) -> Iterator[str]:
    """Whether the template of a key is none."""
    try:
        jinja2.Environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        yield f"{key} is not a Jinja template ({error}): correct it"


def _expanded(path: Path) -> Path:
    with suppress(RuntimeError):
        return path.expanduser()
    return path  # there is no such user


UserPath = Annotated[Path, AfterValidator(_expanded)]
"""A path, in which ~ is the user's folder."""


def reward_weights(value: Any) -> dict[str, float]:
    """The weight of each reward in `value`: a name, a list of names (weight 1 each) or a mapping of names to weights.
    A name with the weight None is left out. Raises ValueError."""
    names = [value] if isinstance(value, str) else value
    if isinstance(names, dict):
        weights = [(name, weight) for name, weight in names.items() if weight is not None]
    elif isinstance(names, list):
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"names {repeated[0]!r} twice: name it once, with a weight")
        weights = [(name, 1.0) for name in names]
    else:
        weights = []
    if not (weights and all(isinstance(name, str) and _is_finite(weight) for name, weight in weights)):
        raise ValueError("is neither a name, nor a list of names, nor a mapping of names to weights: correct it")
    return {name: float(weight) for name, weight in weights}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class SourceConfig(Section):
    """Where prompts come from. `source` is one of

    * `addition`: the long additions of the quickstart;
    * a file that ends in .jsonl (one object per line), .json (a list of objects), .csv, .tsv or .parquet, with `prompt`
      and `answer`; all but Parquet also compressed, as .jsonl.gz or .jsonl.zst;
    * `reasoning_gym:NAME`: a task of the reasoning_gym library, which receives `options`;
    * `verifiers:NAME`: a task set of the verifiers library, which receives `options`;
    * `harbor:FOLDER`: tasks in Harbor's folder layout;
    * `hf:NAME` or the path of a folder: a Hugging Face dataset (a hub id, a folder with files as the hub has them, or
      one written by `save_to_disk`); `hf:NAME:SPLIT` and `FOLDER:SPLIT` name the split, too.

    configs/data/ has these keys for known data sets, for use as a `base`. If another `source` replaces
    that of such a file, the run drops the `options`, `split` and `eval_source` of the old one."""

    source: str | None = Field(None, description="one of the sources listed above")
    eval_source: str | None = Field(None, description="source of the held-out rows; null: other rows of `source`")
    split: str = Field("train", description="split of a Hugging Face dataset")
    prompt_key: str = Field("prompt", description="field with the prompt")
    prompt_template: str | None = None
    """the prompt as a Jinja template with the fields of the row, such as `{{ problem }}`"""
    answer_key: str | None = "answer"
    """field with the answer, such as reward_model.ground_truth; null: rows have none"""
    reward: dict[str, float] | None = None
    """rewards of rows that name none, written as reward.functions; null: reward.functions"""
    options: dict[str, Any] = Field(default_factory=dict, description="options of the task or dataset")
    system_prompt: str | None = None
    """first message of a chat; empty: a chat without it; null: a prompt that is text is no chat. Chats need a tokenizer
    with a chat template"""
    size: int | None = Field(None, gt=0, description="rows of a generated task (addition, reasoning_gym); null: any")

    @field_validator("reward", mode="before")
    @classmethod
    def _weighted(cls, value: Any) -> dict[str, float] | None:
        with explain(ValueError, "data.reward {why}", ValueError):
            return None if value is None else reward_weights(value)

    def conflicts(self) -> Iterator[str]:
        yield from template_conflicts("data.prompt_template", self.prompt_template or "")


class PartConfig(SourceConfig):
    """One source of several. Its `weight` is its share of the rows, relative to the others'. Without weights, an epoch
    has every row of every source once."""

    source: str = Field(description="as data.source")
    weight: float | None = Field(None, gt=0, description="for all sources or for none")


class BenchmarkConfig(SourceConfig):
    """`benchmarks` is a list of names in configs/benchmarks/ and of YAML files (docs/evaluation.md), or a mapping of
    names to the keys below: those of `data` for one source, whose rows are the problems, and how they are sampled. For
    a name that is known, only the keys that differ have to be given."""

    eval_source: str | None = Field(None, description="must be null: `source` names the rows")
    size: int | None = Field(None, gt=0, description="number of rows, the first ones; a generated task needs it")
    date_key: str = Field("contest_date", description="field with the date of a row")
    dates: tuple[date, date] | None = None
    """only rows from the first to the last of these days, such as [2024-08-01, 2025-02-01]"""
    samples: int = Field(1, ge=1, description="completions per row")
    max_new_tokens: int | None = Field(None, gt=0, description="most tokens of a sample; null: sampling.max_new_tokens")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    pass_score: float = Field(1.0, description="least score of a solved completion (pass@k)")
    every: int = Field(1, ge=1, description="k: of evaluated versions, the first, the last, and those that k divides")

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.eval_source is not None:
            yield (
                f"the benchmark of source {self.source!r} has the eval_source {self.eval_source!r} too: set source to "
                f"the one with its rows, and eval_source to null"
            )
        if not self.temperature and self.samples > 1:
            yield (
                f"the benchmark of source {self.source!r} has {self.samples} samples, but at temperature 0 they are "
                f"all the same: set samples to 1, or a higher temperature"
            )


# What a chat template gets from whoever renders with it, and arguments of the function that renders.
_GIVEN_TO_TEMPLATES = (
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip

ONE_OR_SEVERAL = "data needs either a source or sources: set data.source, or data.sources, not both"


class RowsConfig(SourceConfig):
    sources: tuple[PartConfig, ...] = ()
    """several sources, in place of `source`: the same keys for each, and a `weight`"""
    eval_size: int = Field(256, ge=0, description="held-out rows; 0: no evaluation")
    chat_template: UserPath | None = Field(None, description="file with a Jinja chat template; null: the tokenizer's")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """variables of the chat template, such as {enable_thinking: false}"""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if taken := [name for name in self.chat_template_kwargs if name in _GIVEN_TO_TEMPLATES]:
            yield f"data.chat_template_kwargs.{taken[0]} cannot be set, it is no variable of a template"
        none = self.source is None and not self.sources
        if (none and self.eval_size != 0) or (self.source is not None and self.sources):
            yield ONE_OR_SEVERAL
        keys = [
            k
            for k, field in SourceConfig.model_fields.items()
            if getattr(self, k) != field.get_default(call_default_factory=True)
        ]
        if self.sources and keys:
            yield f"data.{keys[0]} has no effect beside data.sources: set it for each source"
        weights = [part.weight for part in self.sources]
        if None in weights and any(weights):
            yield "some of data.sources have a weight and some have none: give all a weight, or none"

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources: one, or several; none if there are no rows, as in an evaluation alone."""
        return self.sources or ((self,) if self.source is not None else ())

    @property
    def sets_template(self) -> bool:
        """Whether the chat template differs from the tokenizer's."""
        return self.chat_template is not None or bool(self.chat_template_kwargs)

    @property
    def named(self) -> str:
        """The source or sources, for messages."""
        return f"data.source {self.source!r}" if self.source else "data.sources"


class DataConfig(RowsConfig):
    __doc__ = SourceConfig.__doc__

    sampler: str = "shuffle"
    """chooses the row of each prompt: shuffle, difficulty, or package.module:function (docs/curriculum.md)"""
    sampler_options: dict[str, Any] = Field(default_factory=dict, description="options of the sampler")
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are discarded, for the cause `long`")
    weak_tests: Literal["drop", "refuse"] = "drop"
    """rows of the reward `code` whose tests pass a program that computes nothing. drop: they are not trained on.
    refuse: the run does not start if it finds one among the rows that it checks"""


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="0: greedy; training needs a value above 0")
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling; below 1 only if the objective does not use pi_behav (docs/objectives.md)"""
    top_k: int = Field(0, ge=0, description="draw from so many likeliest tokens; 0: all; above 0 only as for `top_p`")
    min_p: float = Field(0.0, ge=0, le=1)
    """draw from the tokens that are at least this times as likely as the likeliest; above 0 only as for `top_p`"""
    max_new_tokens: int = Field(gt=0, description="most tokens of a sample, over all its turns")
    min_new_tokens: int = Field(0, ge=0)
    """no stop token is drawn before a sample has this many tokens, over all its turns; above 0 only under the condition
    of `top_p`"""
    stop: list[str] = Field(default_factory=list)
    """texts that end a turn, besides the model's stop tokens; they remain in the turn"""

    def conflicts(self) -> Iterator[str]:
        if "" in self.stop:
            yield "sampling.stop has an empty text, which would end every turn at once: remove it"
        if self.min_new_tokens > self.max_new_tokens:
            yield (
                f"sampling.min_new_tokens is {self.min_new_tokens} but sampling.max_new_tokens is only "
                f"{self.max_new_tokens}: lower sampling.min_new_tokens"
            )


Credit = Literal["sample", "return_to_go", "call"]
# The rewards that ask a model, and their option `url` where it is the policy of the run, or one of its scorers.
JUDGES = ("judge", "group_judge")
POLICY, SCORER = "policy", "scorer:"


def is_in_run(url: str) -> bool:
    """Whether a judge is the policy of the run or one of its scorers."""
    return url == POLICY or url.startswith(SCORER)


class RewardConfig(Section):
    """`functions` names the rewards of the run (areal.rewards.functions lists the built-in ones), with weights if you
    like: the score is the weighted sum. A row of the data may name its own rewards in the same way."""

    count: int = Field(1, ge=1, description="reward actors of a run on one machine")
    functions: dict[str, float] = Field(default_factory=dict)
    """a name, a list of names, or a mapping of names to weights"""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """keyword arguments of rewards that are classes, by name of the reward"""
    external: list[str] = Field(default_factory=list)
    """rewards that processes serve which join the run (areal.train, run.py --role reward); they are neither checked nor
    started here"""
    groups: list[str] = Field(default_factory=list)
    """rewards that score all completions of a group at once; a start adds those that it serves itself"""
    workers: int = Field(1, ge=1, description="worker processes of each reward actor")
    concurrent_calls: int = Field(64, ge=1)
    """most calls of async rewards that run at once in a reward actor, in one process"""
    timeout_seconds: float = Field(10.0, gt=0, description="time limit of one call")
    retries: int = Field(2, ge=0, description="further attempts after a failure, on another actor if there is one")
    quarantine_after: int = Field(3, ge=1, description="a completion is refused after so many dead or late workers")
    memory_gib: float | None = Field(None, gt=0, description="memory limit of a worker, GiB")
    cache_size: int = Field(4096, ge=0, description="scores that each reward actor caches; 0: off")
    credit: Credit = Field("sample", description="which rewards a sampled token is credited with (docs/agents.md)")
    turn_discount: float = Field(1.0, ge=0, le=1, description="return_to_go: factor on a reward for each call between")
    overlong_tokens: int = Field(0, ge=0)
    """a completion loses up to 1 of its reward over this many tokens before max_new_tokens; 0: off"""

    @field_validator("functions", mode="before")
    @classmethod
    def _weighted(cls, value: Any) -> dict[str, float]:
        with explain(ValueError, "reward.functions {why}", ValueError):
            return {} if value == {} else reward_weights(value)


def half_on_gpus(cuda: bool) -> str:
    """The type of weights that `auto` stands for."""
    return "bfloat16" if cuda else "float32"


class EngineConfig(Section):
    """A vLLM engine."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type of the weights in the engine; auto: bfloat16 on GPUs, else float32"""
    threads: int = Field(1, ge=1, description="OpenMP threads of the engine (CPU only)")
    max_model_len: int | None = Field(None, gt=0, description="most tokens of a sequence; null: the model's limit")
    memory_share: float | None = Field(None, gt=0, lt=1)
    """share of a GPU's memory for the engine (vLLM's gpu_memory_utilization); null: 0.9, or 0.3 if the trainer has the
    same GPU"""
    kv_cache_gib: float | None = Field(None, gt=0)
    """KV cache on each device, GiB; null: what memory_share leaves on a GPU, 1 on a CPU"""
    tensor_parallel: int = Field(1, ge=1, description="devices of one engine")
    enforce_eager: bool = Field(False, description="use no CUDA graphs and no compilation")
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """further arguments of vLLM's engine, such as {kv_cache_dtype: fp8} (docs/running.md)"""

    def conflicts(self) -> Iterator[str]:
        yield from vllm_conflicts(self.engine_options)

    @property
    def devices(self) -> int:
        """Number of devices of one engine; on a CPU, of its processes."""
        return self.tensor_parallel * devices_of(self.engine_options)

    def for_device(self, *, cuda: bool) -> Self:
        """This configuration for engines on GPUs (cuda) or CPUs, without `auto`."""
        return self.model_copy(update={"dtype": half_on_gpus(cuda) if self.dtype == "auto" else self.dtype})


class GeneratorConfig(EngineConfig):
    count: int = Field(1, ge=1, description="generators of a run on one machine")
    max_concurrent_rollouts: int = Field(64, ge=1)
    """most sequences that a generator runs at once; fewer if its KV cache is too small"""
    stream_interval: int = Field(16, ge=1, description="tokens per streamed chunk; a user's first comes at once")
    interrupt: bool = True
    """new weights interrupt the running sequences; false: these finish first, and no others begin"""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of interrupted samples: recomputed under the new weights (the paper), or kept as the old weights
    computed it (PipelineRL, arXiv 2509.19128), also for later turns"""


class ScorerConfig(EngineConfig):
    """`scorers` is a mapping of names to frozen models on engines of their own: teachers (`trainer.teacher`) and
    references (`trainer.reference: scorer:NAME`), which give the log-probs of the sampled tokens, reward models
    (`reward.functions`) and judges (`reward.options`)."""

    model: str
    """folder of a Hugging Face model, hub id, or `quickstart`; for log-probs with the run's tokenizer"""
    kind: Literal["logprobs", "reward_model", "judge"] = "logprobs"
    """logprobs: of the sampled tokens; reward_model: a sequence classifier, a reward by its name; judge: writes the
    verdicts of rewards with `url: scorer:NAME`"""
    count: int = Field(1, ge=0)
    """scorers of this name of a run on one machine; 0: they join it (run.py --role scorer)"""
    repeatable: bool = False
    """score one row at a time, without a prefix cache: its result is then the same to the last bit, whatever else is
    scored"""
    chat: bool = True
    """a reward model reads prompt and completion as a chat in its own template; false: as one text"""
    output: int = Field(0, ge=0, description="number of a reward model's output that is the score")
    activation: bool = Field(False, description="a reward model's outputs are those after its sigmoid or softmax")

    @property
    def engine(self) -> GeneratorConfig:
        """The settings of its engine."""
        config = GeneratorConfig(**{name: getattr(self, name) for name in EngineConfig.model_fields})
        options = dict(config.engine_options)
        changes: dict[str, Any] = {"engine_options": options}
        if self.kind == "reward_model":
            options["runner"] = "pooling"
        if self.repeatable:
            options["enable_prefix_caching"] = False
            changes["max_concurrent_rollouts"] = 1
        return config.model_copy(update=changes)


# Fits any tokenizer.
TOOL_CALL_PARSER = "hermes"


# The name of a workflow that is a function in a process which joins the run.
EXTERNAL = "external"


class RolloutManagerConfig(Section):
    count: int = Field(1, ge=1, description="rollout managers of a run on one machine")
    workflow: str = "single_turn"
    """a built-in workflow, or package.module:function (docs/workflows.md); external: that of a process that joins the
    run (areal.train)"""
    workflow_options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the workflow")
    endpoint_host: str = Field("127.0.0.1", description="interface at which agents reach the policy (docs/agents.md)")
    tool_call_parser: str = TOOL_CALL_PARSER
    """vLLM's parser of tool calls for agents, such as qwen3_xml"""
    reasoning_parser: str | None = None
    """vLLM's parser of thinking for agents, such as qwen3; null: thinking is text"""
    max_concurrent_groups: int = Field(64, ge=1, description="most groups that a manager runs at once")
    save_every_tokens: int = Field(2048, ge=0)
    """the trainer's disk gets what is sampled of an unfinished sample after every so many tokens of it, so that a
    killed rollout manager costs no more of it; 0: only finished samples are stored"""
    sample_seconds: float | None = Field(None, gt=0)
    """a sample fails whose workflow waits for so long for something else than the run's own actors; null: ten times as
    long as any before it, and at least 5 times master.hang_seconds (30 times until one ends)"""

    def conflicts(self) -> Iterator[str]:
        for key, name in ("tool_call_parser", self.tool_call_parser), ("reasoning_parser", self.reasoning_parser):
            yield from parser_conflicts(key, name)

    @property
    def external(self) -> bool:
        """Whether the workflow is that of a process which joins the run."""
        return self.workflow == EXTERNAL

    @property
    def is_own(self) -> bool:
        """Whether the workflow is code of the user's own."""
        return ":" in self.workflow or self.external

    @property
    def gives_rewards(self) -> bool:
        """Whether the workflow has rewards of its own, so that answers and tests of rows are not needed."""
        return self.workflow in ("environment", "sandbox_tools", "verifiers") or bool(
            self.workflow_options.get("agent_reward")
        )

    @property
    def names_parsers(self) -> bool:
        """Whether parsers are named that may not fit the tokenizer."""
        return self.reasoning_parser is not None or self.tool_call_parser != TOOL_CALL_PARSER


# Settings that a named objective (areal.training.objectives.LOSSES) brings along, unless the configuration sets them.
_GROUP = {"advantage_mean": "group", "advantage_std": "group"}
_GSPO = {**_GROUP, "behaviour_weight_level": "geometric", "eps_clip": 3e-4, "eps_clip_higher": 4e-4}
OBJECTIVE_SETTINGS: dict[str, dict[str, Any]] = {
    "decoupled_ppo": {},
    "ppo": {"behaviour_weight": "none", "proximal": "interpolate"},
    "grpo": {**_GROUP, "loss_mean": "sequence"},
    "dr_grpo": {"advantage_mean": "group", "advantage_std": "none", "loss_mean": "constant"},
    "rloo": {
        "advantage_mean": "leave_one_out",
        "advantage_std": "none",
        "loss_mean": "constant",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce_pp": {"kl_in": "reward", "kl_estimator": "k1"},
    "dapo": {**_GROUP, "eps_clip_higher": 0.28},
    "gspo": {**_GSPO, "loss_mean": "sequence"},
    "luspo": {**_GSPO, "loss_mean": "constant"},
    "gmpo": {**_GROUP, "loss_mean": "sequence", "behaviour_weight_level": "geometric", "eps_clip": 0.4},
    "cispo": {**_GROUP, "eps_clip": 1.0, "eps_clip_higher": 4.0},
    "sapo": {**_GROUP, "loss_mean": "sequence"},
    "dppo": {**_GROUP, "loss_mean": "constant", "eps_clip": 0.15},
    "dppo_kl": {**_GROUP, "loss_mean": "constant", "eps_clip": 0.05},
    "vespo": dict(_GROUP),
    "tis": {"behaviour_weight": "truncated", "behaviour_weight_bounds": (0.0, 2.0)},
    "seq_tis": {
        "behaviour_weight": "truncated",
        "behaviour_weight_level": "sequence",
        "behaviour_weight_bounds": (0.0, 2.0),
    },
    "seq_mis": {
        "behaviour_weight": "masked",
        "behaviour_weight_level": "sequence",
        "behaviour_weight_bounds": (0.0, 2.0),
    },
    "icepop": {**_GROUP, "loss_mean": "sequence", "behaviour_weight": "masked", "behaviour_weight_bounds": (0.5, 5.0)},
    "kpop": {**_GROUP, "behaviour_weight": "masked_kl", "behaviour_weight_bounds": (0.0, 2.0)},
    "m2po": dict(_GROUP),
    "distill": {"teacher_coef": 1.0},
}


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): W + alpha / rank * B A. Only A and B are trained and published.

    Adapters are used only if a key of this section is given."""

    rank: int = Field(16, ge=1, description="rank of A and B")
    alpha: int = Field(32, ge=1, description="the update is scaled by alpha / rank")
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """linear layers that get an adapter, such as q_proj"""


class CriticConfig(Section):
    """A critic: a value head on the policy's body, with generalised advantage estimates by token (docs/objectives.md).

    There is a critic only if a key of this section is given."""

    coef: float = Field(1.0, ge=0)
    """weight of the value loss in the gradient of the body; 0: only the head learns from it"""
    lr: float = Field(0.2, gt=0, description="learning rate of the head: about how far a value moves in a step")
    gamma: float = Field(1.0, gt=0, le=1, description="discount for each sampled token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda; 1: returns minus values, 0: one-step differences")
    value_clip: float | None = Field(0.2, gt=0)
    """a value is held within so much of that before the training step; null: it is not"""
    warmup_steps: int = Field(0, ge=0)
    """first optimizer steps of the run, which train the head alone; the others of the schedule follow"""


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainerConfig(Section):
    """`objective` is a name, or `package.module:function` for your own objective (areal.training.objectives says how it
    is called). A named objective also sets the keys that belong to it, such as `advantage_mean` and `behaviour_weight`.
    Values that you give here take precedence."""

    ranks: int = Field(1, ge=1, description="DeepSpeed ranks on this machine")
    zero_stage: Literal[0, 1, 2, 3] = 0
    """what the ranks partition: nothing (0), Adam's moments (1), also gradients (2), also weights (3)"""
    offload: Literal["none", "optimizer", "all"] = "none"
    """what host memory holds in place of the devices: nothing; gradients, master weights and Adam's moments, with Adam
    on the CPU (at least ZeRO 1); or also the weights, layer by layer (ZeRO 3)"""
    sequence_parallel: int = Field(1, ge=1)
    """ranks that compute each row together (Ulysses), for sequences too long for one device; max_tokens_per_microbatch
    counts the whole row (docs/packing.md)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """type of the weights that are computed with and published; auto: bfloat16 on GPUs, else float32"""
    threads: int = Field(1, ge=1, description="OpenMP threads of each rank (on a CPU, and for Adam with offload)")
    lr: float = Field(2e-5, gt=0, description="learning rate of Adam")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up: constant, or a decay from lr to lr_final * lr at the last optimizer step"""
    lr_final: float = Field(0.1, ge=0, le=1, description="share of lr after a decay")
    lr_schedule_steps: int | None = Field(None, gt=0)
    """training steps of the schedule, with which a decay ends; null: `steps`"""
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="of Adam")
    adam_eps: float = Field(1e-8, gt=0, description="epsilon of Adam")
    weight_decay: float = Field(0.05, ge=0, description="decoupled weight decay (AdamW), not of norms and biases")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient; larger ones are scaled down")
    minibatches: int = Field(4, ge=1, description="optimizer steps per training step, each on its share of the batch")
    max_tokens_per_microbatch: int = Field(16384, ge=1, description="most tokens of a micro-batch (C in Algorithm 1)")
    microbatches: int | None = Field(None, ge=1)
    """micro-batches per minibatch and rank, with equally many sequences and any number of tokens (baseline of the
    paper's figure 6a); null: by Algorithm 1"""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """recompute activations in the backward pass, which saves memory; auto: on GPUs"""
    lora: LoraConfig | None = Field(None, description="train adapters instead of all weights")
    peak_tflops: float | None = Field(None, gt=0)
    """dense TFLOP/s of a device, for `mfu`; null: known for common GPUs, measured on a CPU"""
    deepspeed_options: dict[str, Any] = Field(default_factory=dict)
    """further keys of DeepSpeed's configuration, such as {zero_optimization: {overlap_comm: false}}
    (docs/running.md)"""
    prefix_tree: bool = Field(True, description="compute the prefix that samples of a group share only once")
    fused_head: bool = False
    """on GPUs: take the log-probs of logits, and their gradients, in one pass each, by Triton kernels (not tried on a
    GPU; the self-test with it compares both with float64)"""
    objective: str = Field("decoupled_ppo", description="the policy loss (docs/objectives.md)")
    eps_clip: float = Field(0.2, gt=0, description="pi_theta / pi_prox is clipped at 1 - eps_clip and 1 + eps_clip")
    eps_clip_higher: float | None = Field(None, gt=0, description="upper clip at 1 + eps_clip_higher; null: eps_clip")
    eps_clip_dual: float | None = Field(None, gt=1)
    """dual clip: largest ratio of a token with a negative advantage; null: none"""
    behaviour_weight: Literal["full", "truncated", "masked", "masked_kl", "none"] = "full"
    """w = pi_prox / pi_behav: as it is, cut at the upper bound, 0 outside the bounds, 0 where the binary KL of the two
    is above the upper bound, or always 1"""
    behaviour_weight_level: Literal["token", "sequence", "geometric"] = "token"
    """w is that of each token, or of its sequence: the product, or the geometric mean"""
    behaviour_weight_bounds: tuple[float, float] = (0.5, 2.0)
    """lower and upper bound of w; truncated and masked_kl use only the upper one"""
    sequence_mask: Literal["none", "product", "geometric"] = "none"
    """leave a sequence out of the loss if the product, or the geometric mean, of its w is outside
    sequence_mask_bounds"""
    sequence_mask_bounds: tuple[float, float] = Field((0.5, 2.0), description="lower and upper bound of sequence_mask")
    mask_cut: bool = False
    """leave samples that were cut at sampling.max_new_tokens out of the loss; their rewards still count in the
    advantages of the others"""
    m2_threshold: float = Field(0.04, gt=0, description="m2po: limit for the mean of (log pi_prox / pi_behav)^2")
    sapo_temperatures: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)
    """sapo: how fast a token's gradient falls as u leaves 1, with A > 0 and with A <= 0"""
    vespo_positive: tuple[float, PositiveFloat] = Field((2.0, 3.0), description="vespo: k and lambda where A >= 0")
    vespo_negative: tuple[float, PositiveFloat] = Field((3.0, 2.0), description="vespo: k and lambda where A < 0")
    routing: Literal["own", "replay"] = "own"
    """experts of a mixture in training: those that its router chooses, or, for sampled tokens, those of sampling
    (docs/objectives.md)"""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """pi_prox by a forward pass, or interpolated between behaviour and current policy (A-3PO)"""
    advantage_mean: Literal["batch", "group", "leave_one_out", "none"] = "batch"
    """mean that a reward is compared with: of the global batch (the paper), of the group, or of the group's other
    samples"""
    advantage_std: Literal["batch", "group", "none"] = "batch"
    """standard deviation that divides the difference: of the global batch, if there is a mean, or of the group, if the
    mean is of the group, too"""
    critic: CriticConfig | None = Field(None, description="estimate advantages with a value head")
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    """mean over tokens; over sequences of their token means; or over sequences of their token sums / loss_tokens"""
    loss_tokens: int = Field(1, ge=1, description="divisor of loss_mean=constant; of a run: sampling.max_new_tokens")
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus: this times a token's entropy (nats) is taken from its loss"""
    kl_coef: float = Field(0.0, ge=0, description="weight of the penalty for leaving the reference model; 0: none")
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 for kl_in=reward; k2 and k3 for either (docs/objectives.md)"""
    kl_in: Literal["loss", "reward"] = Field("loss", description="the penalty is part of the loss, or of the reward")
    reference: str | None = None
    """the reference model: its folder, or `scorer:NAME`, one of `scorers`, off the trainer; null: the run's model (with
    adapters, without a second copy)"""
    teacher: str | None = None
    """the name in `scorers` of the teacher, whose log-probs each sampled token is compared with"""
    teacher_key: str | None = None
    """field of a row with the name of its teacher, in place of `teacher`, for rows that have it"""
    teacher_coef: float = Field(0.0, ge=0)
    """weight of log teacher - log pi_prox in the advantage of a token; 0: it is only measured"""
    teacher_top_k: int = Field(
        0,
        ge=0,
        le=20,  # vLLM's own limit
        description="k: teacher_coef is the weight of KL(teacher || pi) in the loss, over the teacher's k likeliest "
        "tokens and all others as one, and not of a gain in the advantage",
    )
    checkpoint_every: int = Field(20, ge=1)
    """steps between checkpoints; a restarted trainer redoes the steps since the last one"""
    checkpoints_kept: int = Field(3, ge=1, description="how many of the newest checkpoints are kept")

    def for_device(self, *, cuda: bool) -> "TrainerConfig":
        """This configuration for trainers on GPUs (cuda) or CPUs, without `auto`."""
        values = {"dtype": half_on_gpus(cuda), "gradient_checkpointing": cuda}
        values = {key: value for key, value in values.items() if getattr(self, key) == "auto"}
        return self.model_copy(update={**values, "fused_head": self.fused_head and cuda})

    def lr_share(self, step: int, steps: int) -> float:
        """The share of `lr` with which the optimizer step number `step`, from 0, is made. steps: the optimizer steps of
        the schedule. Warm-up rises from 1 / warmup_steps to 1. A decay has ended at the last step. With a critic, whose
        rate is constant, all this begins after the steps that train it alone."""
        alone = self.critic.warmup_steps if self.critic else 0
        number = step - alone + 1
        if number <= self.warmup_steps or number <= 0:
            return max(number, 0) / max(self.warmup_steps, 1)
        if self.lr_schedule == "constant":
            return 1.0
        share = 1 - min((number - self.warmup_steps) / max(1, steps - alone - self.warmup_steps), 1.0)
        if self.lr_schedule == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.lr_final + (1 - self.lr_final) * share

    def schedule_conflicts(self, steps: int) -> Iterator[str]:
        """Why the policy would never be trained at the rate `lr` in so many optimizer steps."""
        alone = self.critic.warmup_steps if self.critic else 0
        if alone + max(self.warmup_steps, 1) > steps:
            keys = " and ".join(["trainer.critic.warmup_steps"] * bool(alone) + ["trainer.warmup_steps"])
            yield (
                f"the warm-up takes {alone + self.warmup_steps} optimizer steps, but there are only {steps}, so that "
                f"trainer.lr is never reached: lower {keys}"
            )

    @property
    def reference_scorer(self) -> str | None:
        """The name of the scorer that has the reference model; None: the trainer has it, or there is no penalty."""
        kind, _, name = (self.reference or "").partition(":")
        return name if kind == "scorer" and self.kl_coef else None

    @property
    def uses_behaviour(self) -> bool:
        """Whether the loss compares pi_behav with a policy of the trainer. A user's own: by its settings."""
        return (
            self.objective in ("ppo", "m2po", "dppo", "dppo_kl")
            or self.behaviour_weight != "none"
            or self.sequence_mask != "none"
            or self.proximal != "recompute"
            or (self.kl_coef > 0 and self.kl_in == "reward")
        )

    @model_validator(mode="before")
    @classmethod
    def _settings_of_objective(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        objective = values.get("objective")
        return OBJECTIVE_SETTINGS.get(objective, {}) | values if isinstance(objective, str) else values

    def conflicts(self) -> Iterator[str]:
        if self.offload == "all" and self.zero_stage != 3:
            yield (
                f"trainer.offload is all, but trainer.zero_stage is {self.zero_stage}, which leaves the weights on the "
                f"devices: set trainer.zero_stage=3, or trainer.offload=optimizer"
            )
        yield from deepspeed_conflicts(self.deepspeed_options, self.offload)
        if self.eps_clip > 1 and self.objective in OBJECTIVE_SETTINGS and self.objective not in ("gmpo", "dppo_kl"):
            yield (
                f"trainer.eps_clip is {self.eps_clip:g}, but no ratio is below 0, so that 1 - eps_clip would clip "
                f"none: set trainer.eps_clip to at most 1"
            )
        if self.advantage_std != "none" and self.advantage_mean in ("none", *{"batch"} - {self.advantage_std}):
            yield (
                f"trainer.advantage_std={self.advantage_std} divides by 0 where the rewards of a {self.advantage_std} "
                f"are all the same, but less trainer.advantage_mean={self.advantage_mean} they are not 0: set both to "
                f"group or both to batch, or trainer.advantage_std=none"
            )
        for key in ("behaviour_weight_bounds", "sequence_mask_bounds"):
            low, high = getattr(self, key)
            if not 0 <= low < high:
                yield f"trainer.{key} is [{low:g}, {high:g}]: write the lower bound, 0 or more, first"
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "trainer.kl_estimator is k1, whose gradient in the loss is 0 on average: set trainer.kl_in=reward, or "
                "trainer.kl_estimator=k2"
            )
        if self.objective == "m2po" and self.proximal != "recompute":
            yield (
                f"trainer.proximal is {self.proximal}, but the mask of m2po compares pi_prox and pi_behav over the "
                f"whole minibatch, before it is trained: set trainer.proximal=recompute"
            )
        if self.objective == "vespo" and self.behaviour_weight_level != "token":
            yield (
                "trainer.objective=vespo takes the product over each sequence itself: leave out "
                "trainer.behaviour_weight_level"
            )
        if self.teacher_coef and not self.teacher:
            yield "trainer.objective=distill and trainer.teacher_coef need a teacher: set trainer.teacher to a scorer"
        if self.teacher_key and not self.teacher:
            yield "trainer.teacher_key needs a teacher for the other rows: set trainer.teacher to a scorer"
        if self.teacher_top_k and not self.teacher_coef:
            yield "trainer.teacher_top_k has no weight: set trainer.teacher_coef, or trainer.objective=distill"
        if ":" not in self.objective and self.objective not in OBJECTIVE_SETTINGS:
            yield (
                f"Unknown objective {self.objective!r} in trainer.objective: known are "
                f"{', '.join(OBJECTIVE_SETTINGS)}, or write package.module:function"
            )


class GuardConfig(Section):
    """Stops a run that has gone wrong, before the result is saved. docs/observe.md explains the metrics."""

    effective_sample_size: float = Field(0.1, ge=0, le=1, description="minimum, share of the tokens; 0: off")
    entropy: float = Field(0.0, ge=0, description="minimum, nats; 0: off")
    logprob_gap: float | None = Field(None, gt=0)
    """maximum, nats: how far generators and trainer differ on the same weights; null: as far as their dtypes and
    settings explain (docs/observe.md)"""
    advantage_max: float = Field(1000.0, gt=0, description="maximum of abs(A) of a token")
    patience: int = Field(3, ge=1, description="steps in a row beyond a limit that stop the run")


class WeightsConfig(Section):
    """How new weights reach the generators; docs/generation.md says when to use which setting."""

    transport: Literal["folder", "stream", "nccl", "gloo"] = "folder"
    """folder: all nodes share weights.folder; stream: over the bus, from generator to generator; nccl, gloo: from the
    trainer straight into each engine's weights, by vLLM's weight transfer"""
    folder: UserPath | None = None
    """holds a folder of weights per run, for example /dev/shm; null: the run folder"""
    delta: bool = Field(True, description="stream only what has changed, bit-exactly, if that is smaller")

    @property
    def backend(self) -> str | None:
        """The backend of vLLM's weight transfer by which the trainer sends to engines directly; None: it does not."""
        return None if self.transport in ("folder", "stream") else self.transport


class SandboxConfig(Section):
    """Limits of a program that a model wrote, with all that it starts. docs/sandbox.md says what they protect.

    Programs run on this machine, or on the SandboxFusion server at `url` if that is given."""

    mode: Literal["namespaces", "none"] = "namespaces"
    """none: no protection at all, only for programs that you trust"""
    tests: Literal["outside", "inside_where_needed"] = "outside"
    """outside: tests in Python run in another process than the program; rows that need more are refused.
    inside_where_needed: such rows' tests run beside the program, which can forge their verdict"""
    url: str | None = Field(None, pattern=r"^https?://.+", description="a SandboxFusion server, without /run_code")
    cpu_seconds: float = Field(4.0, gt=0, description="CPU time of a program's processes together")
    wall_seconds: float = Field(8.0, gt=0)
    """elapsed time of a program's tests together; above cpu_seconds, since machines are busy"""
    memory_mib: int = Field(1024, ge=16, description="memory of a program's processes together, MiB")
    processes: int = Field(64, ge=1, description="processes and threads at once")
    disk_mib: int = Field(64, ge=1, description="size of all files together, which are kept in memory, MiB")
    output_kib: int = Field(1024, ge=1, description="size of stdout, and of stderr, KiB")
    cgroup: UserPath | None = None
    """folder of a control group (version 2) delegated to the sandbox; the kernel then counts memory and CPU time
    exactly"""
    folders: list[UserPath] = Field(default_factory=list)
    """folders that programs may read besides those of the system and of Python"""


class ScoringConfig(Section):
    """What is needed to score completions."""

    reward: RewardConfig = RewardConfig()
    sandbox: SandboxConfig = SandboxConfig()

    def conflicts(self) -> Iterator[str]:
        if "code" in self.own_rewards and self.sandbox.wall_seconds >= self.reward.timeout_seconds:
            yield (
                f"reward.timeout_seconds is {self.reward.timeout_seconds:g}, but a program of the reward code may run "
                f"for sandbox.wall_seconds, {self.sandbox.wall_seconds:g}: raise reward.timeout_seconds above that, or "
                f"lower sandbox.wall_seconds"
            )
        if self.needs_reward and not self.rewards:
            yield "reward.functions is missing: set it there or as an override, reward.functions=NAME"

    @property
    def needs_reward(self) -> bool:
        return True

    @property
    def rewards(self) -> dict[str, float]:
        """All rewards that the configuration names, by name."""
        return self.reward.functions

    @property
    def judges(self) -> dict[str, str]:
        """The addresses of the judges in the run, by the reward's name; also of those that only rows name."""
        options = self.reward.options.items()
        urls = {name: str(values.get("url")) for name, values in options if name.partition("/")[0] in JUDGES}
        return {name: url for name, url in urls.items() if is_in_run(url)}

    @property
    def policy_judges(self) -> list[str]:
        """The rewards for which the run's own policy is asked, by whoever samples."""
        return [name for name, url in self.judges.items() if url == POLICY]

    @property
    def own_rewards(self) -> list[str]:
        """The rewards of the configuration that actors serve which the run starts."""
        return [name for name in self.rewards if name not in {*self.reward.external, *self.judges}]

    @property
    def served_rewards(self) -> RewardConfig:
        """`reward`, with the settings of the sandbox as the options of `code`."""
        options = {"code": self.sandbox.model_dump(mode="json")} | self.reward.options
        return self.reward.model_copy(update={"options": options})


class EvaluatorConfig(Section):
    """Scores held-out rows and benchmarks at the first and the last version, and at every k-th version between them.
    For a version in between, one generator stays at that version until the scoring is done; everything else continues.
    """

    every: int = Field(0, ge=0, description="k: also evaluate every k-th version; 0: only the first and the last")
    samples: int = Field(1, ge=1, description="completions per row")
    pass_score: float = Field(1.0, description="least score of a solved completion (pass@k)")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    timeout_seconds: float | None = Field(None, gt=0)
    """time limit of one evaluation, which then reports what is scored"""
    benchmarks: dict[str, BenchmarkConfig] = Field(default_factory=dict)

    @field_validator("benchmarks", mode="before")
    @classmethod
    def _benchmarks_are_known(cls, value: Any) -> dict[str, Any]:
        with explain(UserError, "{why}", lambda text: ValueError(text.rstrip("."))):
            return benchmarks_in(value)

    def conflicts(self) -> Iterator[str]:
        if not self.temperature and self.samples > 1:
            yield (
                f"evaluator.samples is {self.samples}, but at evaluator.temperature 0 they are all the same: "
                f"set evaluator.samples=1 or a higher temperature"
            )


def benchmarks_in(value: Any) -> dict[str, Any]:
    """The keys of each benchmark in `value`, as BenchmarkConfig describes it: names are replaced by what their files
    say. Raises UserError, and ValueError for a value of another kind."""
    named = {Path(name).stem: {"base": name} for name in value} if _is_list_of_names(value) else value
    if not isinstance(named, dict) or not all(isinstance(keys, dict | None) for keys in named.values()):
        raise ValueError("evaluator.benchmarks is neither a list of names nor a mapping of names to keys: correct it")
    return {name: _benchmark(name, dict(keys or {})) for name, keys in named.items()}


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _benchmark(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of the benchmark `name`, with those of its file, if it has one, where `keys` has none."""
    if not re.fullmatch(NAME, name):
        raise UserError(f"The benchmark {name!r} in evaluator.benchmarks has a name that no file can have: rename it.")
    base = keys.pop("base", name)
    file = Path(base) if base.endswith((".yaml", ".yml")) else BENCHMARKS / f"{base}.yaml"
    if not file.is_file():
        if "source" in keys:
            return keys
        names = ", ".join(sorted(path.stem for path in BENCHMARKS.glob("*.yaml")))
        raise UserError(
            f"There is no benchmark {base!r} (evaluator.benchmarks): known are {names}; write the path of a YAML file "
            f"for one of your own."
        )
    return merged(read_values(file), keys)


class KeyConfig(Section):
    """A key with which users reach the policy. The key itself is stored nowhere."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of the key: printf %s KEY | sha256sum")
    rights: list[Literal["serve", "reward", "reward_all"]] = ["serve"]
    """serve: calls; reward: rewards of its own sessions; reward_all: of those of all keys"""
    train: bool = Field(True, description="whether its sessions may be trained")
    calls_per_minute: int | None = Field(None, ge=1, description="most calls a minute at a gateway; null: any number")
    tokens_per_minute: int | None = Field(None, ge=1)
    """most sampled tokens a minute at each gateway; null: any number"""
    sessions: int | None = Field(None, ge=1, description="most sessions at a time at each gateway; null: any number")


class GatewayConfig(Section):
    """Gateways serve the policy to users while it learns, and train on their sessions (docs/gateway.md)."""

    count: int = Field(0, ge=0, description="gateways of a run on one machine; others may join (--role gateway)")
    share: float = Field(0.0, ge=0, le=1)
    """share of all groups alive that sessions of users may be; 0: sessions are served, and none is trained; 1: sessions
    alone are trained, and no rows"""
    host: str = Field("127.0.0.1", description="interface at which users reach the gateways")
    port: int = Field(0, ge=0, le=65535, description="port of gateway 0, those of others follow; 0: any free port")
    certificate: UserPath | None = Field(None, description="file of the certificate for TLS, PEM; null: no TLS")
    private_key: UserPath | None = Field(None, description="file of its private key, PEM")
    keys: dict[str, KeyConfig] = Field(default_factory=dict, description="who may do what, by name")
    serve: Literal["newest", "evaluated"] = "newest"
    """newest: the version in training; evaluated: one generator keeps the last version whose held-out accuracy is at
    most accuracy_drop below that of the one served before, and takes the calls of users alone"""
    accuracy_drop: float = Field(0.02, ge=0, description="see gateway.serve")
    without_permit: Literal["serve", "wait"] = "serve"
    """what a new session gets if as many are open as may be: it is served and not trained, or has to wait (HTTP status
    429)"""
    idle_seconds: float = Field(600.0, gt=0, description="a session ends so long after its last call")
    session_seconds: float = Field(3600.0, gt=0)
    """a session whose reward has not come so long after its first call expires"""
    max_session_tokens: int = Field(4096, ge=1, description="most tokens of a session; the next call begins another")
    max_messages: int = Field(1024, ge=1, description="most messages of a call")
    reward_range: tuple[float, float] = Field((-1.0, 1.0), description="lowest and highest reward that a key may give")
    score: bool = False
    """whether reward.functions score a session that ends without a reward; else it waits for one"""

    def conflicts(self) -> Iterator[str]:
        if self.count and not self.keys:
            yield "gateway.keys is empty, so that nobody could make a call: add one with its sha256 (docs/gateway.md)"
        if (self.certificate is None) != (self.private_key is None):
            yield "TLS needs two files: set gateway.certificate and gateway.private_key, or neither"
        if not self.reward_range[0] < self.reward_range[1]:
            yield f"gateway.reward_range is {list(self.reward_range)}: write the lowest reward first"
        for name in self.keys:
            if not re.fullmatch(NAME, name):
                yield f"a key of gateway.keys has the name {name[:120]!r}: use up to 100 letters, digits, `_` and `-`"


class ObserveConfig(Section):
    """How a run is watched while it goes on; docs/observe.md lists the tools. Their failure cannot fail the run."""

    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """each actor serves its metrics at the first free port from this one on; null: off"""
    prometheus_host: str = Field("127.0.0.1", description="interface for the metrics")
    prometheus_token: str | None = Field(None, min_length=1)
    """readers send it as `Authorization: Bearer`; required if the interface is not loopback"""
    tensorboard: bool = Field(True, description="write TensorBoard event files to the run folder")
    rollouts: Literal["all", "sample", "none"] = "all"
    """rollouts kept in the run folder, as Parquet; sample: those of one group in 16"""
    rollouts_gib: float = Field(20.0, gt=0, description="above this size the oldest files of rollouts are removed")
    metrics_mib: float | None = Field(None, gt=0)
    """at this size metrics.jsonl replaces metrics.1.jsonl, and TensorBoard's newest file its older ones; null: all
    steps are kept"""
    events_mib: float = Field(32.0, gt=0, description="as metrics_mib, of events.jsonl and events.1.jsonl")
    wandb: str | None = Field(None, description="Weights & Biases project to log to")
    trackio: str | None = Field(None, description="trackio project to log to")
    mlflow: str | None = None
    """MLflow experiment to log to, at MLFLOW_TRACKING_URI or else in mlflow.db beside the run folder"""
    profile: bool = False
    """each actor, engine and rank 0 writes its CPU time by function into the folder profile"""

    def conflicts(self) -> Iterator[str]:
        beyond = self.prometheus_host not in ("127.0.0.1", "::1", "localhost")
        if self.prometheus_port and beyond and not self.prometheus_token:
            yield (
                f"observe.prometheus_host is {self.prometheus_host}, where other machines can read the metrics: set "
                f"observe.prometheus_token, and give it to Prometheus as authorization.credentials"
            )


class MasterConfig(Section):
    address: str = Field("tcp://127.0.0.1:5555", pattern=r"^tcp://.+:\d+$")
    """address at which the master listens; host *: all interfaces. If it is not set and the port is in use, a run on
    one machine takes another one"""
    lease_seconds: float = Field(60.0, gt=0, description="silence after which an actor is fenced and its leases end")
    lost_seconds: float = Field(60.0, gt=0, description="time without the master's answer after which an actor exits")
    stall_seconds: float = Field(300.0, gt=0)
    """time without progress after which the run ends; the master tries to recover before that"""
    hang_seconds: float = Field(120.0, ge=0)
    """an actor whose work stands still for so long, and for ten times as long as such work ever did, is fenced and its
    engine killed; 30 times as long if such work has never ended; 0: never"""
    drain_seconds: float = Field(60.0, gt=0)
    """time that an actor has to hand over its work, and the trainer to save a checkpoint, when it is told to leave;
    less than the grace that your scheduler gives"""

    def conflicts(self) -> Iterator[str]:
        if int(self.address.rpartition(":")[2]) > 65535:
            yield f"master.address is {self.address}, but ports end at 65535: write another one"


class NetworkConfig(Section):
    """How actors reach each other (docs/security.md). Roles started by hand have command-line options for the same."""

    keys: UserPath | None = None
    """folder made by `python -m areal keys`, required if the master listens beyond this machine; null: AREAL_KEYS, or
    on one machine keys of the run's own"""
    ports: tuple[int, int] | None = Field(None, description="first and last port to listen at; null: any free port")

    def conflicts(self) -> Iterator[str]:
        if self.ports is not None and not 0 < self.ports[0] <= self.ports[1] < 65536:
            yield f"network.ports is {list(self.ports)}: write the first and the last port, such as [20000, 20100]"

    @property
    def ports_text(self) -> str:
        """The ports as they are written in an address."""
        return "*" if self.ports is None else f"{self.ports[0]}-{self.ports[1]}"


class _Checked(type(BaseModel)):  # type: ignore[misc]
    """Mistakes in a call of Config are told as those in a file."""

    def __call__(cls, **values: Any) -> Any:
        return validated(values, "the call", cls)


class Config(ScoringConfig, metaclass=_Checked):
    """A run. `batch_size` (B) and all bounds count groups; a group is a prompt with its `group_size` (G) samples."""

    name: str = Field("run", description="name of the run and of its folder")
    run_dir: UserPath = Field(Path("runs"), description="folder that contains the run folders")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the data order, of sampling and of training")
    model: str = Field(description="folder of a Hugging Face model, hub id, or `quickstart` (the run makes it)")
    steps: int = Field(ge=0, description="training steps; 0: the model is evaluated alone (docs/evaluation.md)")
    batch_size: int = Field(ge=1, description="B: groups per training step")
    group_size: int = Field(ge=1, description="G: samples per prompt")
    oversample: int = Field(0, ge=0)
    """samples started beyond group_size. A group is complete with the first group_size scored samples; the others are
    stopped. Training is then biased against long answers"""
    max_staleness: int = Field(8, ge=0, description="eta: most versions between a group's first token and its training")
    run_ahead: Literal["auto", "max"] = "auto"
    """auto: as few alive groups as keep the trainer busy; max: as many as max_staleness allows"""
    colocate: bool = False
    """trainer and generators use the same devices in turns: engines sleep while the trainer computes"""
    on_straggler: Literal["wait", "requeue", "mask", "admission_only"] = "wait"
    """what happens if a step would leave an unfinished group past its deadline (docs/staleness.md)"""
    on_failed_sample: Literal["requeue", "discard"] = "requeue"
    """what happens to a group with a completion that could not be scored"""
    max_attempts: int = Field(3, ge=1)
    """a prompt is discarded after this many failures; of failures in a row only the first counts"""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """largest share of prompts discarded for failures; beyond, the run ends"""
    outage_seconds: float = Field(3600.0, gt=0)
    """time for which every group may fail before the run ends; meanwhile one group at a time is tried"""
    filter_zero_signal: bool = False
    """replace groups whose samples all have the same reward (dynamic sampling, arXiv 2503.14476); with
    trainer.advantage_mean=group their advantage is 0. On by default with trainer.objective=dapo"""

    data: DataConfig
    sampling: SamplingConfig
    generator: GeneratorConfig = GeneratorConfig()
    rollout_manager: RolloutManagerConfig = RolloutManagerConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    guard: GuardConfig = GuardConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    master: MasterConfig = MasterConfig()
    gateway: GatewayConfig = GatewayConfig()
    scorers: dict[str, ScorerConfig] = Field(default_factory=dict)
    observe: ObserveConfig = ObserveConfig()
    network: NetworkConfig = NetworkConfig()

    @model_validator(mode="before")
    @classmethod
    def _settings_of_others(cls, values: Any) -> Any:
        """Defaults that one section takes from another."""
        sections = values if isinstance(values, dict) else {}
        sampling, trainer = sections.get("sampling"), sections.get("trainer", {})
        if not isinstance(sampling, dict) or not isinstance(trainer, dict) or "max_new_tokens" not in sampling:
            return values
        filters = trainer.get("objective") == "dapo"
        return (
            {"filter_zero_signal": filters}
            | sections
            | {"trainer": {"loss_tokens": sampling["max_new_tokens"]} | trainer}
        )

    def conflicts(self) -> Iterator[str]:
        yield from self._conflicts_of_rows()
        yield from super().conflicts()
        yield from self._conflicts_of_sections()
        yield from self._conflicts_of_training()
        yield from self._conflicts_of_scorers()
        yield from self._conflicts_of_sessions()

    def _conflicts_of_rows(self) -> Iterator[str]:
        if self.steps and not self.data.parts and self.gateway.share < 1:
            yield ONE_OR_SEVERAL
        if not self.steps and not self.evaluates:
            yield "steps is 0 and there is nothing to evaluate: set steps, or evaluator.benchmarks, or data.eval_size"
        for part in self.data.parts:
            if self.rollout_manager.workflow == "verifiers" and not str(part.source).startswith("verifiers:"):
                yield (
                    f"rollout_manager.workflow=verifiers needs the rows of a task set of verifiers, but the source is "
                    f"{part.source!r}: set data.source=verifiers:NAME"
                )
        if self.reward.functions or self.rollout_manager.gives_rewards:
            return
        for part in self.data.parts:
            if self.needs_reward and not part.reward:
                yield (
                    f"the rows of data.source {part.source!r} have no reward: set reward.functions, or the reward of "
                    f"the source"
                )
        for name, benchmark in self.evaluator.benchmarks.items():
            if not benchmark.reward:
                yield f"the benchmark {name} has no reward: set evaluator.benchmarks.{name}.reward, or it in its file"

    def _conflicts_of_sections(self) -> Iterator[str]:
        if not re.fullmatch(NAME, self.name):
            yield (
                f"name is {self.name[:120]!r}, which no run folder can have: use up to 100 letters, digits, `_`, "
                f"`-` and dots, not only dots and no `-` first"
            )
        if self.weights.backend and self.trainer.lora:
            yield (
                f"weights.transport={self.weights.transport} sends whole models, but trainer.lora publishes adapters: "
                f"set weights.transport to folder or stream"
            )
        if self.colocate and not self.generator.interrupt:
            yield "colocate=true interrupts running sequences, but generator.interrupt is false: leave one of them out"
        if self.colocate and self.weights.backend:
            yield (
                f"colocate=true puts engines to sleep, but weights.transport={self.weights.transport} sends weights "
                f"straight into them: set weights.transport to folder or stream"
            )
        if self.colocate and self.trainer.offload != "none":
            yield (
                f"colocate=true moves what the trainer has on its devices itself, but trainer.offload is "
                f"{self.trainer.offload}: leave out trainer.offload"
            )

    def _conflicts_of_scorers(self) -> Iterator[str]:
        keys = {"trainer.teacher": self.trainer.teacher, "trainer.reference": self.trainer.reference_scorer}
        for key, name in keys.items():
            if name is not None and name not in self.logprob_scorers:
                names = ", ".join(self.logprob_scorers) or "none"
                yield f"{key} names the scorer {name!r}, but scorers has {names} that gives log-probs: add it"
            if name is not None and self.sampling.temperature != 1:
                yield (
                    f"sampling.temperature is {self.sampling.temperature:g}, but the scorer of {key} gives log-probs "
                    f"at temperature 1: set sampling.temperature=1"
                )
        if self.trainer.teacher_coef and self.filter_zero_signal:
            yield (
                "filter_zero_signal discards groups whose rewards are the same, but trainer.teacher teaches with them, "
                "too: set filter_zero_signal=false"
            )
        for name, scorer in self.scorers.items():
            if not re.fullmatch(NAME, name) or (name in self.rewards and scorer.kind != "reward_model"):
                yield f"a scorer cannot have the name {name!r}, that of a reward or of no file: rename it in scorers"
            if name not in self.used_scorers:
                uses = {"logprobs": "trainer.teacher=", "judge": f"reward.options.judge.url={SCORER}"}
                use = f"{uses.get(scorer.kind, 'reward.functions=')}{name}"
                yield f"the scorer {name!r} is not used: set {use}, or leave it out of scorers"
        for reward, name in self.reward_scorers.items():
            if name not in self.scorers or (name != reward and self.scorers[name].kind != "judge"):
                yield f"reward {reward} has the url {SCORER}{name}, but scorers has no {name} of kind judge: add it"

    def _conflicts_of_training(self) -> Iterator[str]:
        if self.steps:
            yield from self.trainer.schedule_conflicts(max(self.steps * self.trainer.minibatches, self.optimizer_steps))
        if self.trainer.minibatches > self.batch_size:
            yield (
                f"trainer.minibatches is {self.trainer.minibatches} but batch_size is only {self.batch_size}: "
                f"lower trainer.minibatches"
            )
        if not self.sampling.temperature:
            yield "sampling.temperature is 0, but identical samples teach nothing: raise sampling.temperature"
        for key, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("min_new_tokens", 0)):
            value = getattr(self.sampling, key)
            if value != neutral and self.trainer.uses_behaviour:
                yield (
                    f"sampling.{key} is {value:g}, but trainer.objective={self.trainer.objective} compares the "
                    f"log-probs of the truncated distribution with the trainer's, which are of the whole one: set "
                    f"sampling.{key}={neutral}"
                )
        if (
            self.steps
            and self.group_size == 1
            and self.reward.credit == "sample"
            and self.trainer.advantage_mean in ("group", "leave_one_out")
        ):
            yield (
                f"trainer.advantage_mean={self.trainer.advantage_mean} compares the samples of a group, but group_size "
                "is 1, so nothing is learned: raise group_size"
            )
        longest = self.generator.max_model_len
        if self.steps and longest and longest <= self.sampling.max_new_tokens:
            yield (
                f"sampling.max_new_tokens is {self.sampling.max_new_tokens}, but generator.max_model_len has room for "
                f"{longest} tokens of prompt and completion: lower it"
            )
        if self.reward.overlong_tokens > self.sampling.max_new_tokens:
            yield (
                f"reward.overlong_tokens is {self.reward.overlong_tokens} but sampling.max_new_tokens is only "
                f"{self.sampling.max_new_tokens}: lower reward.overlong_tokens"
            )
        if self.filter_zero_signal and self.group_size == 1:
            yield (
                "filter_zero_signal discards every group if group_size is 1: raise group_size or set "
                "filter_zero_signal=false"
            )

    def _conflicts_of_sessions(self) -> Iterator[str]:
        if self.gateway.serve == "evaluated" and not (self.data.eval_size and self.evaluator.every):
            yield "gateway.serve=evaluated serves what is evaluated: set evaluator.every and data.eval_size"
        if self.gateway.serve == "evaluated" and self.gateway.share == 1:
            yield "gateway.serve=evaluated needs rows to train when no version is good enough: lower gateway.share"
        if self.gateway.serve == "evaluated" and self.generator.count < 2:
            yield "gateway.serve=evaluated keeps a generator for users, and training needs others: set generator.count"
        if not self.gateway.share:
            return
        if self.gateway.max_session_tokens < self.sampling.max_new_tokens:
            yield (
                f"gateway.max_session_tokens is {self.gateway.max_session_tokens}, but one answer may have "
                f"sampling.max_new_tokens, {self.sampling.max_new_tokens}: raise it"
            )
        if not self.max_sessions:
            yield (
                f"gateway.share is {self.gateway.share:g}, but beside a batch of rows no session has room: raise "
                f"gateway.share or max_staleness, or set gateway.share=1 to train sessions alone"
            )
        if self.trainer.advantage_mean in ("group", "leave_one_out") and not self.trainer.critic:
            yield (
                f"trainer.advantage_mean={self.trainer.advantage_mean} compares the samples of a group, and a session "
                f"is a group of one: set gateway.share=0, trainer.advantage_mean=batch or trainer.critic"
            )
        if self.trainer.teacher or self.trainer.teacher_key or self.trainer.reference_scorer:
            yield "no scorer scores the tokens of sessions: leave out gateway.share, or trainer.teacher and reference"
        if self.gateway.score and not self.reward.functions:
            yield "gateway.score is true, but there are no reward.functions: set them, or gateway.score=false"

    @property
    def max_sessions(self) -> int:
        """The most sessions of users that may be alive. Beside them rows have room for a batch."""
        groups = self.batch_size * (self.max_staleness + 1)
        if self.gateway.share == 1:
            return groups
        return min(int(self.gateway.share * groups), groups - self.batch_size)

    @property
    def optimizer_steps(self) -> int:
        """The optimizer steps of the schedule of the learning rate."""
        return (self.trainer.lr_schedule_steps or self.steps) * self.trainer.minibatches

    @property
    def rewards(self) -> dict[str, float]:
        """All rewards that the configuration names, by name; rows may name others."""
        rewards = dict(self.reward.functions)
        for part in self._sources:
            rewards = (part.reward or {}) | rewards
        return rewards

    @property
    def needs_reward(self) -> bool:
        """Whether the run learns from rewards of its own, or shows them."""
        learns = not self.steps or not self.trainer.teacher_coef or self.data.eval_size > 0
        users = self.gateway.share == 1 and not self.evaluates
        return learns and not users and not self.rollout_manager.gives_rewards

    @property
    def logprob_scorers(self) -> list[str]:
        """The names of the scorers that give log-probs; the others are rewards."""
        return [name for name, scorer in self.scorers.items() if scorer.kind == "logprobs"]

    @property
    def reward_scorers(self) -> dict[str, str]:
        """The scorers that give rewards, by the reward's name: reward models have that themselves."""
        urls = {name: url.removeprefix(SCORER) for name, url in self.judges.items() if url != POLICY}
        return urls | {name: name for name in self.scorers if self.scorers[name].kind == "reward_model"}

    def top_k_of(self, scorer: str) -> int:
        """How many of its likeliest tokens a scorer that gives log-probs adds at each place."""
        teaches = scorer == self.trainer.teacher or self.trainer.teacher_key
        return self.trainer.teacher_top_k if teaches else 0

    @property
    def used_scorers(self) -> list[str]:
        """The names of the scorers of the run. All that give log-probs, if rows or a workflow may ask."""
        anyone = self.trainer.teacher_key or self.rollout_manager.is_own
        teachers = self.logprob_scorers if anyone else [self.trainer.teacher]
        return [name for name in self.scorers if name in {*teachers, self.trainer.reference_scorer, *self._asked}]

    @property
    def needed_scorers(self) -> list[str]:
        """The `used_scorers` that the run cannot lack; an evaluation needs rewards and what the workflow asks."""
        anyone = self.steps or self.rollout_manager.is_own
        return [name for name in self.used_scorers if anyone or name in self._asked]

    @property
    def _asked(self) -> set[str]:
        """The scorers that give the rewards of the run."""
        return {scorer for name, scorer in self.reward_scorers.items() if name in self.rewards or name != scorer}

    def for_device(self, *, cuda: bool) -> "Config":
        """This configuration with what `auto` stands for on GPUs (cuda) or CPUs."""
        scorers = {name: scorer.for_device(cuda=cuda) for name, scorer in self.scorers.items()}
        parts = {
            "trainer": self.trainer.for_device(cuda=cuda),
            "generator": self.generator.for_device(cuda=cuda),
            "scorers": scorers,
        }
        return self.model_copy(update=parts)

    @property
    def started_scorers(self) -> list[str]:
        """The names of the scorers that a run on one machine starts, one entry for each process."""
        return [name for name in self.needed_scorers for _ in range(self.scorers[name].count)]

    @property
    def own_rewards(self) -> list[str]:
        """As of a ScoringConfig, without those that are scorers."""
        return [name for name in super().own_rewards if name not in self.scorers]

    @property
    def served_rewards(self) -> RewardConfig:
        """As of a ScoringConfig. In a run `code` also refuses rows whose tests are weak."""
        served = super().served_rewards
        code = {"refuse_weak": True} | served.options["code"]
        return served.model_copy(update={"options": served.options | {"code": code}})

    @property
    def _sources(self) -> list[SourceConfig]:
        return [*self.data.parts, *self.evaluator.benchmarks.values()]

    @property
    def evaluates(self) -> bool:
        """Whether versions are evaluated."""
        return bool(self.data.eval_size or self.evaluator.benchmarks)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir / self.name

    @property
    def weights_folder(self) -> Path:
        """Holds one folder per published version and, if weights are streamed, per generator with its versions."""
        return self.folder / "weights" if self.weights.folder is None else self.weights.folder / self.name

    @property
    def pictures_folder(self) -> Path:
        """Holds each picture of the run's prompts once, by its digest."""
        return self.folder / "pictures"


def from_message(values: Any) -> Config:
    """The configuration as a message brings it. Its tuples are lists again, also in options of the user's code. Raises
    UserError if another version of this program has made it."""
    with explain(UserError, "Install the version of this program that the master has: {why}"):
        return validated(json.loads(json.dumps(values)), "the master's configuration")


def load_config(
    file: Path | None,
    overrides: Sequence[str] = (),
    kind: type[T] = Config,  # type: ignore[assignment]
    secrets: Mapping[str, Any] | None = None,
) -> T:
    """The configuration from a YAML file, if one is given, with overrides such as `generator.count=2`.

    Any mapping in a file may name a `base`: another YAML file, or a list of them, relative to its own file. It changes
    their values. Mappings are merged, all other values are replaced; of two bases the later one wins. In an override a
    base is relative to the working directory.
    secrets: values for the places in the file where they are hidden, as `secrets_in` returned them. Raises UserError,
    which names the key, its place and what to do.
    """
    values = {} if file is None else read_values(file)
    reveal(values, secrets or {})
    return validated(overridden(values, overrides, kind=kind), file, kind, [*map(split_override, overrides)])


def overridden(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    kind: type[Section] | None = None,
) -> dict[str, Any]:
    """`values` with overrides such as `generator.count=2`, and with settings by such keys. kind: whose keys they are,
    by default those of Config. Raises UserError."""
    values = copy.deepcopy(values)
    pairs = [(*parsed(override, kind or Config), override) for override in overrides]
    pairs += [(key, value, f"{key}={value}") for key, value in (settings or {}).items()]
    for key, value, _ in pairs:
        _forget_source(values, key, value)
    for key, value, override in pairs:
        _set(values, key, value, override)
    return _with_bases(values, Path(), ())


def validated(
    values: dict[str, Any],
    file: Path | str | None,
    kind: type[T] = Config,  # type: ignore[assignment]
    overrides: Sequence[tuple[str, str]] = (),
) -> T:
    """The configuration with these values. file: their source, for messages. overrides: key, text. Raises UserError."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        if any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name, _ in overrides):
            file = "the overrides"
        raise UserError(_sentence_of(error, file, kind)) from None


# The most values of a configuration, of which each use of an alias counts: nine levels of nine would stop every reader.
MOST_VALUES = 100_000


class _RepeatedKeyError(yaml.YAMLError):
    """A mapping has a key twice."""


# YAML 1.2's numbers, with `_` between digits. By YAML 1.1, as in `safe_load`, 1e-3 is text, 010 is 8, 1:30 is 90.
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_NUMBERS = {"tag:yaml.org,2002:int": _INTEGER, "tag:yaml.org,2002:float": _FLOAT}


class _Loader(yaml.SafeLoader):
    """Reads YAML as `safe_load` does, but numbers as YAML 1.2 has them, and refuses a key that a mapping has twice."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if tag not in _NUMBERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if _size(node, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _RepeatedKeyError(f"has the key {key.value!r} twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that are numbers by YAML 1.1 or 1.2."""


for _tag, _form in _NUMBERS.items():
    # Each resolver is compared with a whole scalar, by its first character.
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(f"(?:{_form.pattern})$"), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def read_yaml(text: str) -> Any:
    """The values in the text. Raises yaml.YAMLError, also for a key that a mapping has twice, too deep nesting, and
    aliases that stand for more than MOST_VALUES values; ValueError for a date that cannot be."""
    with explain(RecursionError, "it is nested too deeply", yaml.YAMLError):
        return yaml.load(text, _Loader)


def _size(node: yaml.Node | None, sizes: dict[int, float]) -> float:
    """How many values the node holds, its aliases written out; infinite if it holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = itertools.chain(*parts) if isinstance(node, yaml.MappingNode) else parts
        sizes[id(node)] = 1 + sum(_size(child, sizes) for child in children)
    return sizes[id(node)]


def write_yaml(values: Any) -> str:
    """The text in YAML that `read_yaml` reads as `values`, with keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_values(file: Path, bases: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values in a YAML file and in its bases, unchecked. bases: the files that name this one as a base, outermost
    first. `configs/NAME` is also there outside a clone. Raises UserError if the file cannot be read."""
    if file.parts[:1] == ("configs",) and not file.is_file() and (CONFIGS.parent / file).is_file():
        file = CONFIGS.parent / file
    if not file.is_file():
        how = f"correct the base in {bases[-1]}" if bases else "correct its path"
        raise UserError(f"There is no configuration file {file}: {how}.")
    if file.resolve() in [base.resolve() for base in bases]:
        raise UserError(f"{file} is a base of itself, by way of {bases[-1]}: remove one of these bases.")
    no_yaml = yaml.YAMLError, ValueError  # the latter: bytes that are no text, or a date that cannot be
    with (
        explain(
            no_yaml, f"{file} is not YAML: {{why}}.", lambda text: UserError(text.replace('"<unicode string>", ', ""))
        ),
        explain(_RepeatedKeyError, f"{file} {{why}}: remove one."),
        explain(OSError, f"{file} cannot be read ({{strerror}}): give another one."),
    ):
        values = read_yaml(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"{file} must contain keys and values, as configs/quickstart.yaml does.")
    return _with_bases(values, file.parent, (*bases, file))


def _with_bases(values: Any, folder: Path, files: tuple[Path, ...]) -> Any:
    """`values` with every `base` in it replaced by what the base, relative to `folder`, holds."""
    if isinstance(values, list):
        return [_with_bases(value, folder, files) for value in values]
    if not isinstance(values, dict):
        return values
    names = values.get("base")
    names = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name.endswith((".yaml", ".yml")) for name in names):
        names = []  # `base` is an option of a reward, a task or the like
    resolved = {key: _with_bases(value, folder, files) for key, value in values.items() if key != "base" or not names}
    for name in reversed(names):
        resolved = merged(read_values(folder / name, files), resolved)
    return resolved


def _is_replaced(section: Mapping[str, Any], source: Any) -> bool:
    """Whether `source` is another data set than that of the section; not if it is another split of it."""
    names = [name.split(":")[:2] for name in (section.get("source"), source) if isinstance(name, str)]
    return len(names) == 2 and names[0] != names[1]


# Keys beside `source` that hold for it alone.
_OF_SOURCE = ("options", "split", "eval_source")


def merged(below: Any, above: Any) -> Any:
    """`above`, and the keys of `below` that it lacks; if it names another `source`, without those of the old one."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if _is_replaced(below, above.get("source")):
        below = {key: value for key, value in below.items() if key not in _OF_SOURCE}
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, with HIDDEN in place of secrets."""
    return write_yaml(without_secrets(config.model_dump(mode="json")))


def parsed(override: str, kind: type[Section]) -> tuple[str, Any]:
    """The key and the value of an override such as `generator.count=2`; `kind` has the keys. Where the key is text, the
    value is the text as it is, without a pair of quotes around it; else it is YAML. Raises UserError."""
    key, text = split_override(override)
    annotation = _annotation(kind, key)
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts}
    if kinds <= {str, Path, type(None)}:
        return key, None if text in ("null", "~") and type(None) in kinds else _unquoted(text)
    return key, _yaml(text, override)


def parsed_values(override: str) -> tuple[str, list[Any]]:
    """The key and the values of a text such as `generator.count=1,2`. Raises UserError."""
    key, text = split_override(override)
    return key, _yaml(f"[{text}]", override)


def split_override(override: str) -> tuple[str, str]:
    """The key of `key=value`, and its text. Raises UserError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"The override {override!r} is not of the form key=value, such as generator.count=2.")
    return key, text


def _yaml(text: str, override: str) -> Any:
    with (
        explain((yaml.YAMLError, ValueError), f"What the override {override!r} sets is not YAML: quote it."),
        explain(_RepeatedKeyError, f"The override {override!r} {{why}}: remove one."),
    ):
        return read_yaml(text)


def _unquoted(text: str) -> str:
    quote, inner = text[:1], text[1:-1]
    if len(text) < 2 or quote not in ("'", '"') or text[-1] != quote or quote in inner.replace("''", ""):
        return text
    return inner.replace("''", "'") if quote == "'" else inner


def _parts(key: str) -> list[str]:
    """The parts of a key. The name of a reward is one, whatever dots it has: reward.options.judges.py:Judge.model."""
    named = re.fullmatch(r"(reward|data)\.(options|functions|reward)\.([^:]+:[^.]+)(.*)", key)
    return [*named.groups()[:3], *named[4].split(".")[1:]] if named else key.split(".")


def _annotation(kind: type[Section], key: str) -> Any:
    """The type of a key with dots; None if it is not known."""
    annotation: Any = kind
    for part in _parts(key):
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif (section := section_in(annotation)) and part in section.model_fields:
            annotation = section.model_fields[part].annotation
        else:
            return None
    return annotation


def _forget_source(values: dict[str, Any], key: str, value: Any) -> None:
    """If an override replaces a `source`, remove what belongs to the old one."""
    section: Any = values
    *names, last = key.split(".")
    for name in names:
        section = section.get(name) if isinstance(section, dict) else None
    if last == "source" and isinstance(section, dict) and _is_replaced(section, value):
        for name in _OF_SOURCE:
            section.pop(name, None)


def _set(values: dict[str, Any], key: str, value: Any, override: str) -> None:
    *sections, last = _parts(key)
    for section in sections:
        if values.get(section) is None:  # left out, or written as null
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UserError(f"The override {override!r} sets a key inside {section!r}, which is no section.")
    values[last] = value


# So many keys are named where one is not known.
FEW_KEYS = 12


def other_names() -> dict[str, str]:
    """Names of other libraries (docs/examples.md), and what they are here."""
    names: dict[str, str] = read_yaml(Path(__file__).with_name("other_names.yaml").read_text())
    return names


def advice(option: str, line: Sequence[str]) -> str:
    """What to write in place of an option of a command line that is none."""
    name, _, value = option.partition("=")
    key = name.lstrip("-").replace("-", "_")
    key = other_names().get(key, key)
    is_key = option.startswith("--") and key.split(".")[0] in Config.model_fields
    following = [word for word in line[line.index(option) + 1 :][:1] if not word.startswith("-") and "=" not in word]
    value = value or "".join(following) or "VALUE"
    return f"; settings have no dashes, write {key}={value}" if is_key else ""


def _sentence_of(error: ValidationError, file: Path | str | None, kind: type[Section]) -> str:
    place = str(file or "the command line").removeprefix(f"{CONFIGS.parent}/")
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            section: Any = kind
            for part in first["loc"][:-1]:
                if part in section.model_fields:  # else the place in a list, or the name in a mapping
                    section = section_in(section.model_fields[part].annotation)
            close = difflib.get_close_matches(str(first["loc"][-1]), section.model_fields, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(section.model_fields)}."
            if len(section.model_fields) > FEW_KEYS and not close:
                hint = f"`areal config {key.rpartition('.')[0]}".rstrip() + "` lists those that are known."
            if first["loc"][-1] in (others := other_names()):
                hint = f"here it is {others[first['loc'][-1]]}."
            if "." in str(first["loc"][-1]):
                hint = "keys with dots are for the command line; in a file write one section inside the other."
            if key == "grid":
                hint = f"a configuration with a grid is a sweep, areal sweep {place}."
            return f"Unknown key {key!r} in {place}: {hint}"
        case "missing" if isinstance(first["loc"][-1], str):
            return f"The key {key!r} is missing in {place}: set it there or as an override, {key}=VALUE."
        case "value_error":
            return f"{first['msg'].removeprefix('Value error, ')} ({place})."
        case "model_type" | "model_attributes_type":
            return f"{key} is a section, but has a value in {place}: `areal config {key}` lists its keys."
        case _:
            value = without_secrets(first["input"], key.rpartition(".")[2])
            rule = first["msg"].removeprefix("Input ").partition(", unable to parse")[0]
            if callable(value):  # a loss, in a notebook
                return f"{key} is a function of this process, but another calls it: write it to a file, FILE.py:NAME."
            return f"{key} is {value!r:.80} in {place}, but {rule[0].lower() + rule[1:]}."


def section_in(annotation: Any) -> type[Section] | None:
    """The section class of a key, also where the annotation is `Section | None`, or a list or mapping of sections. None
    if it holds no section."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)), None)
