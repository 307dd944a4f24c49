"""The configuration of a run: a single pydantic model, read from YAML and dotted overrides.

Every value is set in exactly one place. Unknown keys and wrong types are errors that name the key. This module imports
neither torch nor vLLM: a configuration can be checked before anything is started.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError, model_validator

from areal.base.errors import UserError, explain
from areal.base.secrets import reveal, without_secrets
from areal.config.data_section import DataConfig
from areal.config.engine_sections import GeneratorConfig, SamplingConfig, ScorerConfig, WeightsConfig
from areal.config.mistakes import is_about, other_names, sentence_of
from areal.config.overrides import forget_source, parsed, set_value, split_override
from areal.config.reading import read_values, with_bases, write_yaml
from areal.config.role_sections import (
    EvaluatorConfig,
    GatewayConfig,
    MasterConfig,
    NetworkConfig,
    ObserveConfig,
    RolloutManagerConfig,
)
from areal.config.scorer_uses import ScorerUses
from areal.config.scoring import RewardConfig, ScoringConfig
from areal.config.section import Section, T, UserPath
from areal.config.section_conflicts import conflicts_between, conflicts_of_rows
from areal.config.trainer_section import GuardConfig, TrainerConfig


class _Checked(type(BaseModel)):  # type: ignore[misc]
    """Raises UserError for a mistake in a call of Config, as for a mistake in a file."""

    def __call__(cls, **values: Any) -> Any:
        return validated(values, "the call", cls)


class Config(ScoringConfig, metaclass=_Checked):
    """A run. `batch_size` (B) and all bounds count groups; a group is a prompt with its `group_size` (G) samples."""

    name: str = Field("run", description="name of the run and of its folder")
    run_dir: UserPath = Field(Path("runs"), description="folder that contains the run folders")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the data order, of sampling and of training")
    model: str = Field(description="folder of a Hugging Face model, hub id, or `quickstart` (the run makes it)")
    steps: int = Field(ge=0, description="training steps; 0: the model is evaluated alone (areal docs evaluator)")
    batch_size: int = Field(ge=1, description="B: groups per training step")
    group_size: int = Field(ge=1, description="G: samples per prompt")
    oversample: int = Field(0, ge=0)
    """samples started beyond group_size. A group is complete with the first group_size scored samples, and all further
    samples are stopped. Training is then biased against long answers"""
    max_staleness: int = Field(8, ge=0, description="eta: most versions between a group's first token and its training")
    run_ahead: Literal["auto", "max"] = "auto"
    """auto: as few alive groups as keep the trainer busy; max: as many as max_staleness allows"""
    colocate: bool = False
    """trainer and generators use the same devices in turns: engines sleep while the trainer computes"""
    on_straggler: Literal["wait", "requeue", "mask", "admission_only"] = "wait"
    """wait, or the way out, if a step would leave an unfinished group past its deadline (areal docs staleness)"""
    on_failed_sample: Literal["requeue", "discard"] = "requeue"
    """fate of a group with a completion that could not be scored"""
    max_attempts: int = Field(3, ge=1)
    """a prompt is discarded after this many failures; of failures in a row only the first counts"""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """largest share of prompts discarded for failures; beyond, the run ends"""
    outage_seconds: float = Field(3600.0, gt=0)
    """time for which every group may fail before the run ends; meanwhile groups are tried singly"""
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
    cluster: dict[str, Any] = Field(default_factory=dict)
    """nodes for `areal launch`, the only reader of this section (areal docs deploy)"""

    @model_validator(mode="before")
    @classmethod
    def _settings_of_others(cls, values: Any) -> Any:
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
        yield from conflicts_of_rows(self)
        yield from super().conflicts()
        yield from conflicts_between(self)

    @property
    def keeps_words(self) -> bool:
        """Whether each token is stored with the words that it was drawn from, over which the loss compares policies."""
        compares = self.sampling.left_out and self.trainer.uses_behaviour
        return bool(self.steps and (compares or self.trainer.centres_scores))

    @property
    def max_sessions(self) -> int:
        """The most alive sessions of users. Beside them, rows have room for a batch."""
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
        """All rewards in the configuration, by name; rows may name further rewards."""
        rewards = dict(self.reward.functions)
        for part in [*self.data.parts, *self.evaluator.benchmarks.values()]:
            rewards = (part.reward or {}) | rewards
        return rewards

    @property
    def needs_reward(self) -> bool:
        """Whether the run learns from its own rewards, or shows them."""
        learns = not self.steps or not self.trainer.teacher_coef or self.data.eval_size > 0
        users = self.gateway.share == 1 and not self.evaluates
        return learns and not users and not self.rollout_manager.gives_rewards

    @property
    def scorer_uses(self) -> ScorerUses:
        is_own = self.rollout_manager.is_own
        any_teacher = bool(self.trainer.teacher_key or is_own)
        rewards = frozenset(self.rewards)
        return ScorerUses(self.scorers, self.trainer, self.judges, rewards, any_teacher, bool(self.steps or is_own))

    def for_device(self, *, cuda: bool) -> "Config":
        """Return this configuration with the values that `auto` has on GPUs (cuda) or CPUs."""
        scorers = {name: scorer.for_device(cuda=cuda) for name, scorer in self.scorers.items()}
        parts = {
            "trainer": self.trainer.for_device(cuda=cuda),
            "generator": self.generator.for_device(cuda=cuda),
            "scorers": scorers,
        }
        return self.model_copy(update=parts)

    @property
    def own_rewards(self) -> list[str]:
        """The rewards of `ScoringConfig.own_rewards` that run in reward workers. Scorers are left out."""
        return [name for name in super().own_rewards if name not in self.scorers]

    @property
    def served_rewards(self) -> RewardConfig:
        """`ScoringConfig.served_rewards`; in a run, `code` also refuses rows with weak tests."""
        served = super().served_rewards
        code = {"refuse_weak": True} | served.options["code"]
        return served.model_copy(update={"options": served.options | {"code": code}})

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
        """The folder with a folder for each published version and, with streamed weights, for each generator."""
        return self.folder / "weights" if self.weights.folder is None else self.weights.folder / self.name

    @property
    def pictures_folder(self) -> Path:
        """The folder with each picture of the run's prompts once, by digest."""
        return self.folder / "pictures"


def from_message(values: Any) -> Config:
    """Return the configuration in a message, in which JSON has made lists of all tuples. Raises UserError if another
    version of this program has made the message."""
    with explain(UserError, "Install the version of this program that the master has: {why}"):
        return validated(json.loads(json.dumps(values)), "the master's configuration")


def load_config(
    file: Path | str | None,
    overrides: Sequence[str] = (),
    kind: type[T] = Config,  # type: ignore[assignment]
) -> T:
    """Return the configuration in a YAML file, if `file` is given, with overrides such as `generator.count=2`.

    Any mapping in a file may name a `base`: another YAML file, or a list of files, relative to the mapping's own file.
    The mapping changes the base's values: mappings are merged, other values replaced, and of two bases the later wins.
    Paths in a file are relative to the file if they exist there, else to the working directory; paths and bases in an
    override are relative to the working directory. Raises UserError, which names the key, its place and the remedy.
    """
    values = {} if file is None else read_values(Path(file))
    return validated(overridden(values, overrides, kind=kind), file, kind, [*map(split_override, overrides)])


def overridden(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    kind: type[Section] | None = None,
) -> dict[str, Any]:
    """Return `values` with overrides such as `generator.count=2`, and with `settings`, by key. kind: the class with the
    keys, Config by default. Raises UserError."""
    values = copy.deepcopy(values)
    pairs = [(*parsed(override, kind or Config), override) for override in overrides]
    pairs += [(key, value, f"{key}={value}") for key, value in (settings or {}).items()]
    for key, value, _ in pairs:
        forget_source(values, key, value)
    for key, value, override in pairs:
        set_value(values, key, value, override)
    return with_bases(values, Path(), ())


def validated(
    values: dict[str, Any],
    file: Path | str | None,
    kind: type[T] = Config,  # type: ignore[assignment]
    overrides: Sequence[tuple[str, str]] = (),
) -> T:
    """Return the configuration with these values. file: for messages. overrides: key, text. Raises UserError."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        if any(is_about(error, name) for name, _ in overrides):
            file = "the overrides"
        raise UserError(sentence_of(error, file, kind)) from None


def stored_config(file: Path, overrides: Sequence[str] = (), secrets: Mapping[str, Any] | None = None) -> Config:
    """Return a run's stored configuration, read as by `load_config`. An unknown key is left out if it is off (null,
    false, 0, or empty): the run does not use the setting, which only the version that stored the file has. secrets: the
    hidden values in the file, by place, as from `secrets_in`. Raises UserError."""
    values = read_values(file, beside=False)
    try:
        Config.model_validate(values)
    except ValidationError as error:
        for mistake in error.errors():
            *places, key = mistake["loc"]
            if mistake["type"] == "extra_forbidden" and not mistake["input"]:
                with suppress(LookupError, TypeError):  # within a union the place has the name of a choice
                    del reduce(getitem, places, cast(Any, values))[key]
    reveal(values, secrets or {})
    return validated(overridden(values, overrides), file, Config, [*map(split_override, overrides)])


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML, with HIDDEN in place of secrets."""
    return write_yaml(without_secrets(config.model_dump(mode="json")))


def advice(option: str, line: Sequence[str]) -> str:
    """Return advice about an unknown option of a command line: the setting to write instead."""
    name, _, value = option.partition("=")
    key = name.lstrip("-").replace("-", "_")
    key = other_names().get(key, key)
    is_key = option.startswith("--") and key.split(".")[0] in Config.model_fields
    following = [word for word in line[line.index(option) + 1 :][:1] if not word.startswith("-") and "=" not in word]
    value = value or "".join(following) or "VALUE"
    return f"; settings have no dashes, write {key}={value}" if is_key else ""
