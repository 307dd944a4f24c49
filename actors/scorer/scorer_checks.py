"""Checks of scorers before any process is started. A mistake raises a UserError of a sentence."""

from collections.abc import Mapping
from pathlib import Path

from areal.base.errors import UserError
from areal.config import Config
from areal.config.engine_sections import ScorerConfig
from areal.models import architectures_of, default_context
from areal.samples.tokenizer import load_tokenizer


def rooms_of(config: Config, models: Mapping[str, Path]) -> dict[str, int]:
    """Return the most tokens of a row for every scorer that gives log-probs, if known."""
    rooms = {name: _room(config.scorers[name], model) for name, model in models.items()}
    return {name: room for name, room in rooms.items() if room and name in config.scorer_uses.logprobs}


def _room(scorer: ScorerConfig, model: Path) -> int | None:
    return scorer.max_model_len or default_context(model)


def check_scorer(config: Config, name: str, model: Path, folder: Path | None) -> None:
    """Check whether a scorer's model can read the samples. folder: the run's model, if here. Raises UserError."""
    scorer = config.scorers[name]
    room = _room(scorer, model)
    if room and room <= config.sampling.max_new_tokens:
        raise UserError(
            f"scorers.{name} has room for {room} tokens, but sampling.max_new_tokens is "
            f"{config.sampling.max_new_tokens}, and a prompt comes before: lower it."
        )
    if scorer.kind == "reward_model":
        check_reward_model(scorer, name, model)
    if scorer.kind != "logprobs":
        return
    both = [load_tokenizer(str(of), config.data).get_vocab() for of in (folder, model) if of]
    if both[0] != both[-1]:
        raise UserError(
            f"scorers.{name}.model, {model}, has another tokenizer than the model {folder}, whose tokens it is to "
            f"score: name a model with the same tokenizer."
        )


def check_reward_model(scorer: ScorerConfig, name: str, model: Path) -> None:
    """Raises UserError if the model has no head that scores, or cannot read a chat."""
    if all(architecture.endswith("ForCausalLM") for architecture in architectures_of(model)):
        raise UserError(
            f"scorers.{name}.model, {model}, is a language model without a head that gives a score: name a sequence "
            f"classifier, or set scorers.{name}.kind=logprobs."
        )
    if scorer.chat and not load_tokenizer(str(model)).chat_template:
        raise UserError(
            f"scorers.{name}.model, {model}, has no chat template: set scorers.{name}.chat=false, and it reads prompt "
            f"and completion as one text."
        )
