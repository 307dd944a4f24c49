"""The sources of rows: rows for training, held-out rows and benchmarks."""

import math
from collections.abc import Iterator
from datetime import date
from typing import Any, Literal

from pydantic import Field, field_validator

from areal.base.errors import explain
from areal.config.section import Section, UserPath, temperature_conflicts, template_conflicts


def reward_weights(value: Any) -> dict[str, float]:
    """Return the weight of each reward in `value`: a name, a list of names (weight 1 each) or a mapping of names to
    weights. A name with the weight None is left out. Raises ValueError."""
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
    """The source of prompts. `source` is one of

    * `addition`: the long additions of the quickstart;
    * a file that ends in .jsonl (one object per line), .json (a list of objects), .csv, .tsv or .parquet, with `prompt`
      and `answer`; all but Parquet also compressed, as .jsonl.gz or .jsonl.zst;
    * `reasoning_gym:NAME`: a task of the reasoning_gym library, which receives `options`;
    * `verifiers:NAME`: a task set of the verifiers library, which receives `options`;
    * `harbor:FOLDER`: tasks in Harbor's folder layout;
    * `hf:NAME` or the path of a folder: a Hugging Face dataset (a hub id, a folder with files as the hub has them, or
      a folder by `save_to_disk`); `hf:NAME:SPLIT` and `FOLDER:SPLIT` name the split, too.

    configs/data/ has these keys for known data sets, for use as a `base`. If another `source` replaces the source of
    such a file, the run drops the `options`, `split` and `eval_source` of the old source."""

    source: str | None = Field(None, description="one of the sources listed above")
    eval_source: str | None = Field(None, description="source of the held-out rows; null: other rows of `source`")
    split: str = Field("train", description="split of a Hugging Face dataset")
    prompt_key: str = Field("prompt", description="field with the prompt")
    prompt_template: str | None = None
    """the prompt as a Jinja template with the fields of the row, such as `{{ problem }}`"""
    answer_key: str | None = "answer"
    """field with the answer, such as reward_model.ground_truth; null: rows have no answer"""
    tools_key: str | None = "tools"
    """field beside the prompt's field, with tools that the chat template shows to the policy; null: no tools"""
    reward: dict[str, float] | None = None
    """rewards of rows that name no reward, written as reward.functions; null: reward.functions"""
    options: dict[str, Any] = Field(default_factory=dict, description="options of the task or dataset")
    system_prompt: str | None = None
    """first message of a chat; empty: a chat without a system message; null: a text prompt is no chat. Chats need a
    tokenizer with a chat template"""
    size: int | None = Field(None, gt=0, description="rows of a generated task (addition, reasoning_gym); null: any")

    @field_validator("reward", mode="before")
    @classmethod
    def _weighted(cls, value: Any) -> dict[str, float] | None:
        with explain(ValueError, "data.reward {why}", ValueError):
            return None if value is None else reward_weights(value)

    def conflicts(self) -> Iterator[str]:
        yield from template_conflicts("data.prompt_template", self.prompt_template or "")


class PartConfig(SourceConfig):
    """A source among several. `weight` is the source's share of the rows, relative to the weights of the other sources.
    Without weights, an epoch has every row of every source once."""

    source: str = Field(description="as data.source")
    weight: float | None = Field(None, gt=0, description="for all sources or for none")


class BenchmarkConfig(SourceConfig):
    """`benchmarks` is a list of names in configs/benchmarks/ and of YAML files (areal docs evaluator), or a mapping of
    names to keys: the keys of `data` for a single source, whose rows are the problems, and the keys of sampling. A name
    of configs/benchmarks/ needs only the keys that differ."""

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
        yield from temperature_conflicts(
            f"the temperature of the benchmark of source {self.source!r}", self.temperature
        )
        if not self.temperature and self.samples > 1:
            yield (
                f"the benchmark of source {self.source!r} has {self.samples} samples, but at temperature 0 they are "
                f"all the same: set samples to 1, or a higher temperature"
            )


# Variables that the renderer of a chat template sets, and arguments of the rendering function.
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
        """The sources; empty without rows, as in an evaluation alone."""
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
    """chooses the row of each prompt: shuffle, or package.module:function (areal docs data)"""
    sampler_options: dict[str, Any] = Field(default_factory=dict, description="options of the sampler")
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are discarded, for the cause `long`")
    weak_tests: Literal["drop", "refuse"] = "drop"
    """rows of the reward `code` whose tests pass a program that computes nothing. drop: leave the rows out of training.
    refuse: do not start if the checked rows have such a row"""
