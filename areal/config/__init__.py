"""The configuration of a run: one pydantic model, read from YAML and dotted overrides.

Every value is set in exactly one place. Unknown keys and wrong types are errors that name the key.
This module imports neither torch nor vLLM, so a configuration can be checked before anything is started.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError, model_validator

from areal.base.errors import UserError, explain
from areal.base.secrets import reveal, without_secrets
from areal.config.data_section import ONE_OR_SEVERAL, DataConfig, SourceConfig
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
from areal.config.scoring import POLICY, SCORER, RewardConfig, ScoringConfig
from areal.config.section import NAME, Section, T, UserPath
from areal.config.trainer_section import GuardConfig, TrainerConfig


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
    steps: int = Field(ge=0, description="training steps; 0: the model is evaluated alone (areal docs evaluator)")
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
    """what happens if a step would leave an unfinished group past its deadline (areal docs staleness)"""
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
    cluster: dict[str, Any] = Field(default_factory=dict)
    """nodes for `areal launch`, which alone reads it (areal docs deploy)"""

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
        if self.trainer.compares_group:
            yield from self.conflicts_of_groups(f"trainer.advantage_mean={self.trainer.advantage_mean}")

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
        if self.weights.direct and self.trainer.lora:
            yield (
                "weights.transport=direct sends whole models, but trainer.lora publishes adapters: "
                "set weights.transport to folder or stream"
            )
        if self.colocate and not self.generator.interrupt:
            yield "colocate=true interrupts running sequences, but generator.interrupt is false: leave one of them out"
        if self.colocate and self.weights.direct:
            yield (
                "colocate=true puts engines to sleep, but weights.transport=direct sends weights "
                "straight into them: set weights.transport to folder or stream"
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
        yield from self._conflicts_of_kept_words()
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
            yield ("filter_zero_signal discards every group if group_size is 1: raise group_size, or set it to false")

    @property
    def keeps_words(self) -> bool:
        """Whether tokens are stored with the words that they were drawn from: the loss compares policies over them."""
        compares = self.sampling.left_out and self.trainer.uses_behaviour
        return bool(self.steps and (compares or self.trainer.centres_scores))

    def _conflicts_of_kept_words(self) -> Iterator[str]:
        others = {
            "trainer.teacher": (self.trainer.teacher, "gives log-probs among all words"),
            "trainer.reference": (self.trainer.reference_scorer, "gives log-probs among all words"),
            "trainer.sequence_parallel": (self.trainer.sequence_parallel > 1, "computes log-probs among all words"),
            "trainer.tensor_parallel": (self.trainer.tensor_parallel > 1, "was never tried with words left out"),
            "generator.engine_options.speculative_config": (
                self.generator.engine_options.get("speculative_config"),
                "was never tried with words left out",
            ),
        }
        for key, (value, why) in others.items():
            if value and self.keeps_words:
                left = f"sampling.{(*self.sampling.left_out, '')[0]}"
                left = "trainer.objective=score_centring" if self.trainer.centres_scores else left
                yield f"{key} {why}, but with {left} losses are over the words that were kept: leave out one of the two"

    def conflicts_of_groups(self, estimator: str) -> Iterator[str]:
        """What advantages that compare the samples of a group conflict with. estimator: the setting that chose them."""
        if self.steps and self.group_size == 1 and self.reward.credit == "sample":
            yield (
                f"{estimator} compares the samples of a group, but group_size is 1, so nothing is learned: raise "
                f"group_size"
            )
        if self.gateway.share and not self.trainer.critic:
            yield (
                f"{estimator} compares the samples of a group, and a session is a group of one: set gateway.share=0, "
                f"trainer.advantage_mean=batch or trainer.critic"
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
    file: Path | str | None,
    overrides: Sequence[str] = (),
    kind: type[T] = Config,  # type: ignore[assignment]
) -> T:
    """The configuration from a YAML file, if one is given, with overrides such as `generator.count=2`.

    Any mapping in a file may name a `base`: another YAML file, or a list of them, relative to its own file. It changes
    their values. Mappings are merged, all other values are replaced; of two bases the later one wins. Paths in a file
    are those of files beside it, if there are such, else relative to the working directory; paths and bases in an
    override are relative to the working directory. Raises UserError, which names the key, its place and what to do.
    """
    values = {} if file is None else read_values(Path(file))
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
    """The configuration with these values. file: their source, for messages. overrides: key, text. Raises UserError."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        if any(is_about(error, name) for name, _ in overrides):
            file = "the overrides"
        raise UserError(sentence_of(error, file, kind)) from None


def stored_config(file: Path, overrides: Sequence[str] = (), secrets: Mapping[str, Any] | None = None) -> Config:
    """The configuration that a run has stored, as `load_config` reads it. A key that this version does not know is left
    out if it is off (null, false, 0, or empty): the version that stored it had a setting that this one does not have,
    and the run does not use it. secrets: values for the places in the file where they are hidden, as `secrets_in`
    returned them. Raises UserError."""
    values = read_values(file, beside=False)
    try:
        Config.model_validate(values)
    except ValidationError as error:
        for mistake in error.errors():
            *places, key = mistake["loc"]
            if mistake["type"] == "extra_forbidden" and not mistake["input"]:
                with suppress(LookupError, TypeError):  # inside of a union the place has the name of a choice
                    del reduce(getitem, places, cast(Any, values))[key]
    reveal(values, secrets or {})
    return validated(overridden(values, overrides), file, Config, [*map(split_override, overrides)])


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, with HIDDEN in place of secrets."""
    return write_yaml(without_secrets(config.model_dump(mode="json")))


def advice(option: str, line: Sequence[str]) -> str:
    """What to write in place of an option of a command line that is none."""
    name, _, value = option.partition("=")
    key = name.lstrip("-").replace("-", "_")
    key = other_names().get(key, key)
    is_key = option.startswith("--") and key.split(".")[0] in Config.model_fields
    following = [word for word in line[line.index(option) + 1 :][:1] if not word.startswith("-") and "=" not in word]
    value = value or "".join(following) or "VALUE"
    return f"; settings have no dashes, write {key}={value}" if is_key else ""
