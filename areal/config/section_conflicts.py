"""Conflicts between the sections of a configuration, as sentences for the user.

A conflict within a section is found by the section (`Section.conflicts`).
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from areal.config.data_section import ONE_OR_SEVERAL
from areal.config.scoring import SCORER
from areal.config.section import NAME

if TYPE_CHECKING:
    from areal.config import Config


def conflicts_between(config: "Config") -> Iterator[str]:
    """Yield a sentence for each conflict; the user gets the first sentence."""
    yield from _of_sections(config)
    yield from _of_training(config)
    yield from _of_scorers(config)
    yield from _of_sessions(config)
    if config.trainer.compares_group:
        yield from conflicts_of_groups(config, f"trainer.advantage_mean={config.trainer.advantage_mean}")


def conflicts_of_rows(config: "Config") -> Iterator[str]:
    if config.steps and not config.data.parts and config.gateway.share < 1:
        yield ONE_OR_SEVERAL
    if not config.steps and not config.evaluates:
        yield "steps is 0 and there is nothing to evaluate: set steps, or evaluator.benchmarks, or data.eval_size"
    for part in config.data.parts:
        if config.rollout_manager.workflow == "verifiers" and not str(part.source).startswith("verifiers:"):
            yield (
                f"rollout_manager.workflow=verifiers needs the rows of a task set of verifiers, but the source is "
                f"{part.source!r}: set data.source=verifiers:NAME"
            )
    if config.reward.functions or config.rollout_manager.gives_rewards:
        return
    for part in config.data.parts:
        if config.needs_reward and not part.reward:
            yield (
                f"the rows of data.source {part.source!r} have no reward: set reward.functions, or the reward of "
                f"the source"
            )
    for name, benchmark in config.evaluator.benchmarks.items():
        if not benchmark.reward:
            yield f"the benchmark {name} has no reward: set evaluator.benchmarks.{name}.reward, or it in its file"


def _of_sections(config: "Config") -> Iterator[str]:
    if not re.fullmatch(NAME, config.name):
        yield (
            f"name is {config.name[:120]!r}, which no run folder can have: use up to 100 letters, digits, `_`, "
            f"`-` and dots, not only dots and no `-` first"
        )
    if config.weights.direct and config.trainer.lora:
        yield (
            "weights.transport=direct sends whole models, but trainer.lora publishes adapters: "
            "set weights.transport to folder or stream"
        )
    if config.colocate and not config.generator.interrupt:
        yield "colocate=true interrupts running sequences, but generator.interrupt is false: leave one of them out"
    if config.colocate and config.weights.direct:
        yield (
            "colocate=true puts engines to sleep, but weights.transport=direct sends weights "
            "straight into them: set weights.transport to folder or stream"
        )
    if config.colocate and config.trainer.offload != "none":
        yield (
            f"colocate=true moves what the trainer has on its devices itself, but trainer.offload is "
            f"{config.trainer.offload}: leave out trainer.offload"
        )


def _of_training(config: "Config") -> Iterator[str]:
    if config.steps:
        yield from config.trainer.schedule_conflicts(
            max(config.steps * config.trainer.minibatches, config.optimizer_steps)
        )
    if config.trainer.minibatches > config.batch_size:
        yield (
            f"trainer.minibatches is {config.trainer.minibatches} but batch_size is only {config.batch_size}: "
            f"lower trainer.minibatches"
        )
    if not config.sampling.temperature:
        yield "sampling.temperature is 0, but identical samples teach nothing: raise sampling.temperature"
    yield from _of_kept_words(config)
    longest = config.generator.max_model_len
    if config.steps and longest and longest <= config.sampling.max_new_tokens:
        yield (
            f"sampling.max_new_tokens is {config.sampling.max_new_tokens}, but generator.max_model_len has room for "
            f"{longest} tokens of prompt and completion: lower it"
        )
    if config.reward.overlong_tokens > config.sampling.max_new_tokens:
        yield (
            f"reward.overlong_tokens is {config.reward.overlong_tokens} but sampling.max_new_tokens is only "
            f"{config.sampling.max_new_tokens}: lower reward.overlong_tokens"
        )
    if config.filter_zero_signal and config.group_size == 1:
        yield ("filter_zero_signal discards every group if group_size is 1: raise group_size, or set it to false")


def _of_kept_words(config: "Config") -> Iterator[str]:
    others = {
        "trainer.teacher": (config.trainer.teacher, "gives log-probs among all words"),
        "trainer.reference": (config.trainer.reference_scorer, "gives log-probs among all words"),
        "trainer.sequence_parallel": (config.trainer.sequence_parallel > 1, "computes log-probs among all words"),
        "trainer.tensor_parallel": (config.trainer.tensor_parallel > 1, "was never tried with words left out"),
        "generator.engine_options.speculative_config": (
            config.generator.engine_options.get("speculative_config"),
            "was never tried with words left out",
        ),
    }
    for key, (value, why) in others.items():
        if value and config.keeps_words:
            left = f"sampling.{(*config.sampling.left_out, '')[0]}"
            left = "trainer.objective=score_centring" if config.trainer.centres_scores else left
            yield f"{key} {why}, but with {left} losses are over the words that were kept: leave out one of the two"


def _of_scorers(config: "Config") -> Iterator[str]:
    keys = {"trainer.teacher": config.trainer.teacher, "trainer.reference": config.trainer.reference_scorer}
    for key, name in keys.items():
        if name is not None and name not in config.scorer_uses.logprobs:
            names = ", ".join(config.scorer_uses.logprobs) or "none"
            yield f"{key} names the scorer {name!r}, but scorers has {names} that gives log-probs: add it"
        if name is not None and config.sampling.temperature != 1:
            yield (
                f"sampling.temperature is {config.sampling.temperature:g}, but the scorer of {key} gives log-probs "
                f"at temperature 1: set sampling.temperature=1"
            )
    if config.trainer.teacher_coef and config.filter_zero_signal:
        yield (
            "filter_zero_signal discards groups whose rewards are the same, but trainer.teacher teaches with them, "
            "too: set filter_zero_signal=false"
        )
    for name, scorer in config.scorers.items():
        if not re.fullmatch(NAME, name) or (name in config.rewards and scorer.kind != "reward_model"):
            yield f"a scorer cannot have the name {name!r}, that of a reward or of no file: rename it in scorers"
        if name not in config.scorer_uses.used:
            uses = {"logprobs": "trainer.teacher=", "judge": f"reward.options.judge.url={SCORER}"}
            use = f"{uses.get(scorer.kind, 'reward.functions=')}{name}"
            yield f"the scorer {name!r} is not used: set {use}, or leave it out of scorers"
    for reward, name in config.scorer_uses.rewards.items():
        if name not in config.scorers or (name != reward and config.scorers[name].kind != "judge"):
            yield f"reward {reward} has the url {SCORER}{name}, but scorers has no {name} of kind judge: add it"


def _of_sessions(config: "Config") -> Iterator[str]:
    if config.gateway.serve == "evaluated" and not (config.data.eval_size and config.evaluator.every):
        yield "gateway.serve=evaluated serves what is evaluated: set evaluator.every and data.eval_size"
    if config.gateway.serve == "evaluated" and config.gateway.share == 1:
        yield "gateway.serve=evaluated needs rows to train when no version is good enough: lower gateway.share"
    if config.gateway.serve == "evaluated" and config.generator.count < 2:
        yield "gateway.serve=evaluated keeps a generator for users, and training needs others: set generator.count"
    if not config.gateway.share:
        return
    if config.gateway.max_session_tokens < config.sampling.max_new_tokens:
        yield (
            f"gateway.max_session_tokens is {config.gateway.max_session_tokens}, but one answer may have "
            f"sampling.max_new_tokens, {config.sampling.max_new_tokens}: raise it"
        )
    if not config.max_sessions:
        yield (
            f"gateway.share is {config.gateway.share:g}, but beside a batch of rows no session has room: raise "
            f"gateway.share or max_staleness, or set gateway.share=1 to train sessions alone"
        )
    if config.trainer.teacher or config.trainer.teacher_key or config.trainer.reference_scorer:
        yield "no scorer scores the tokens of sessions: leave out gateway.share, or trainer.teacher and reference"
    if config.gateway.score and not config.reward.functions:
        yield "gateway.score is true, but there are no reward.functions: set them, or gateway.score=false"


def conflicts_of_groups(config: "Config", estimator: str) -> Iterator[str]:
    """Yield the conflicts of advantages that compare a group's samples. estimator: the setting that chose them."""
    if config.steps and config.group_size == 1 and config.reward.credit == "sample":
        yield (
            f"{estimator} compares the samples of a group, but group_size is 1, so nothing is learned: raise group_size"
        )
    if config.gateway.share and not config.trainer.critic:
        yield (
            f"{estimator} compares the samples of a group, and a session is a group of one: set gateway.share=0, "
            f"trainer.advantage_mean=batch or trainer.critic"
        )
