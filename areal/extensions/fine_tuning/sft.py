"""Supervised fine-tuning: trains a model for a run to start from, or on a run's samples.

The rows have a prompt and a completion. The training engine of runs trains on the rows, with all of its features. The
loss is -log pi of the completion's tokens and of the end, averaged according to `trainer.loss_mean`. The end of a chat
is the template's text after an answer, up to the first token that ends a sequence; the end of a text is the
end-of-sequence token. On rollouts, the loss covers exactly the sampled tokens. Under torchrun every rank reads the same
rows, and only rank 0 prints.
"""

import json
import math
import re
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field
from rich.console import Console

from areal.base.errors import UserError
from areal.config import load_config
from areal.config.data_section import RowsConfig
from areal.config.section import Section
from areal.config.trainer_section import TrainerConfig
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.devices import set_allocator
from areal.models import context_of, find_model
from areal.samples.pictures import find, pictures_of
from areal.samples.table import NOT_SAMPLED
from areal.samples.tokenizer import load_tokenizer, reads_as_kept, special_tokens, stop_tokens
from areal.samples.trajectory import Group, Trajectory
from areal.storage.run_files import PICTURES
from areal.storage.selection import COLUMNS, chosen, groups_of, read_rows, rollouts_in
from areal.training.guard import not_finite
from areal.workflows.chat_templates import parts_of
from areal.workflows.conversation import begin

if TYPE_CHECKING:
    from areal.training import TokenLoss, Tokens
    from areal.training.training_engine import TrainingEngine

HELD_OUT_SHARE = 20
LINES_AN_EPOCH = 10


class SftData(RowsConfig):
    """As in a run; `source` may also be the folder of a run's rollouts. Prompts are encoded as in a run with the same
    `system_prompt`. Samples of rollouts cut at the limit of tokens are left out."""

    answer_key: str = Field("completion", description="field with the completion")
    eval_size: int | None = Field(None, ge=1, description="held-out rows; null: a twentieth of all")  # type: ignore[assignment]
    best_of_group: bool = Field(True, description="of rollouts: only the sample of each group with the highest reward")
    min_reward: float | None = Field(
        None, description="of rollouts: only samples with at least this reward; null: above 0"
    )


class SftConfig(Section):
    """Supervised fine-tuning. The keys of `trainer` for reinforcement learning have no effect."""

    model: str = Field(description="folder of a Hugging Face model, or hub id")
    output: Path = Field(description="folder for the trained model")
    data: SftData
    epochs: int = Field(1, ge=1, description="passes over the rows")
    batch_size: int = Field(32, ge=1, description="rows per optimizer step")
    max_length: int = Field(2048, ge=2, description="tokens of a row, at most the model's limit; longer are left out")
    seed: int = Field(0, description="seed of the order of rows")
    trainer: TrainerConfig = TrainerConfig()


def run(options: Namespace) -> None:
    """`areal sft`."""
    set_allocator()
    settings = {"model": options.model, "data.source": options.data, "output": options.output}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(options.config, [*overrides, *options.overrides], SftConfig)
    with tempfile.TemporaryDirectory(prefix="areal-pictures-") as pictures:
        fine_tune(config, Path(pictures), Console())


def fine_tune(config: SftConfig, pictures: Path, console: Console) -> None:
    """Train `config.model` on the rows and write the Hugging Face folder `config.output` (all ranks). pictures: a
    folder for the rows' pictures.

    Raises UserError, before anything is loaded, if a row is not usable or the output folder already exists, and in
    training if a loss or a gradient is not finite.
    """
    if config.output.exists():
        raise UserError(f"{config.output} already exists: name another folder for the trained model.")
    model = find_model(config.model, "model")
    config = config.model_copy(update={"max_length": min(config.max_length, context_of(model) or config.max_length)})
    tokenizer = load_tokenizer(str(model), config.data)
    rollouts = rollouts_in(Path(config.data.source)) if config.data.source else None
    rows, held_out, notes = _read_rows(config, model, tokenizer, rollouts, pictures)
    steps = math.ceil(len(rows) / config.batch_size)

    from areal.training.training_engine import TrainingEngine

    engine = TrainingEngine(
        model,
        _trainer(config, steps),
        seed=config.seed,
        optimizer_steps=steps * config.epochs,
        longest=config.max_length,
        pictures=rollouts.parent / PICTURES if rollouts else pictures,
    )
    console.quiet = engine.rank != 0
    for note in notes:
        console.print(note)
    console.print(
        f"{len(rows)} rows to train on, {len(held_out)} held out; held-out loss {_loss(engine, held_out):.4f}"
    )
    for epoch in range(config.epochs):
        shuffled = Random(f"{config.seed}/{epoch}").sample(rows, len(rows))
        for step in range(1, steps + 1):
            batch = shuffled[(step - 1) * config.batch_size : step * config.batch_size]
            result = engine.step(batch if engine.rank == 0 else None, version=0, temperature=1.0)
            numbers = {"loss": result.loss, "grad_norm": result.grad_norm}
            _check_finite(numbers, f"in step {step} of epoch {epoch + 1}")
            if step == steps or step % math.ceil(steps / LINES_AN_EPOCH) == 0:
                console.print(f"epoch {epoch + 1}/{config.epochs}, step {step}/{steps}: loss {result.loss:.4f}")
        loss = _loss(engine, held_out)
        _check_finite({"loss": loss}, f"of held-out rows after epoch {epoch + 1}")
        console.print(f"epoch {epoch + 1}/{config.epochs}: held-out loss {loss:.4f}")
    engine.storage.export(config.output)
    if engine.rank == 0:
        _end_where_trained(config.output, tokenizer, {int(row.trajectories[0].tokens[-1]) for row in rows})
    engine.close()
    console.print(f"the model is in {config.output}", soft_wrap=True)


def _trainer(config: SftConfig, steps: int) -> TrainerConfig:
    """Return the trainer's settings for `steps` steps an epoch. Raises UserError."""
    trainer = config.trainer.model_copy(update=_OBJECTIVE)
    if conflict := next(trainer.schedule_conflicts(steps * config.epochs), None):
        raise UserError(f"Of `areal sft` {conflict}.")
    return trainer


def likelihood(tokens: "Tokens", config: TrainerConfig) -> "TokenLoss":
    """Return -log pi of each token: an objective for the engine."""
    from areal.training import TokenLoss

    return TokenLoss(loss=-tokens.logp, clipped=tokens.logp.new_zeros(len(tokens.logp), dtype=bool))


_OBJECTIVE = {
    "objective": "areal.extensions.fine_tuning.sft:likelihood",
    "minibatches": 1,
    "advantage_mean": "none",
    "advantage_std": "none",
    "proximal": "recompute",
    "kl_coef": 0.0,
    "critic": None,
    "entropy_coef": 0.0,
    "sequence_mask": "none",
    "teacher": None,
}


def _loss(engine: "TrainingEngine", rows: Sequence[Group]) -> float:
    return engine.loss(rows if engine.rank == 0 else None, temperature=1.0)


def _check_finite(numbers: Mapping[str, float], where: str) -> None:
    if wrong := not_finite(numbers):
        raise UserError(f"{wrong} {where}: set a lower trainer.lr. No model is written.")


def _end_where_trained(folder: Path, tokenizer: Any, ends: set[int]) -> None:
    """Make the special tokens among `ends`, the last tokens of rows, ends of sequences of the model in `folder`."""
    if unlisted := (ends & special_tokens(tokenizer)) - stop_tokens(tokenizer):
        file = folder / "generation_config.json"
        settings = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(settings | {"eos_token_id": sorted(stop_tokens(tokenizer) | unlisted)}, indent=2))


def _read_rows(
    config: SftConfig, model: Path, tokenizer: Any, rollouts: Path | None, pictures: Path
) -> tuple[list[Group], list[Group], list[str]]:
    """Return rows to train on, held-out rows, and notes for the user. The folder `pictures` gets the rows' pictures."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"{model}'s tokenizer has no end-of-sequence token: set eos_token in tokenizer_config.json.")
    data = config.data
    if rollouts:
        parts, notes = sampled(tokenizer, model, rollouts, config), list[str]()
    else:
        parts, notes = _demonstrations(tokenizer, config, pictures)
    if config.trainer.sequence_parallel > 1 and any(pictures_of(row) for part in parts for row in part):
        raise UserError(f"Rows of {data.named} have pictures, but trainer.sequence_parallel takes none: set it to 1.")
    rows, held_out = ([row for row in part if len(row.trajectories[0]) <= config.max_length] for part in parts)
    if not rows or not held_out:
        raise UserError(f"{data.named} has too few rows of at most max_length={config.max_length} tokens: raise it.")
    if too_long := sum(map(len, parts)) - len(rows) - len(held_out):
        notes.append(f"{too_long} rows are left out: they have more than max_length={config.max_length} tokens")
    return rows, held_out, notes


def _demonstrations(tokenizer: Any, config: SftConfig, pictures: Path) -> tuple[list[list[Group]], list[str]]:
    """Return the source's rows to train on and its held-out rows, and notes for the user."""

    def put(row: Row) -> Row:
        if row.pictures:
            find("store")(pictures).put_all(row.pictures)
        return replace(row, pictures=())  # pictures may be more than fit into memory

    data, eval_size = config.data, config.data.eval_size
    if eval_size is None:
        size = open_source(data.model_copy(update={"eval_size": 0}), config.seed).size or 0
        eval_size = max(1, size // HELD_OUT_SHARE)
    source = open_source(data.model_copy(update={"eval_size": eval_size}), config.seed)
    if source.size is None:
        raise UserError(f"{data.named} generates an unlimited number of rows: set data.size.")
    read = [put(source.row(i)) for i in range(source.size)], [put(source.heldout(i)) for i in range(eval_size)]
    names = tokenizer.convert_ids_to_tokens(sorted(special_tokens(tokenizer)))
    spell = re.compile("|".join(map(re.escape, names)) or "(?!)")
    matches = [match for rows in read for row in rows if (match := spell.search(_text(row, data)))]
    notes = [
        f"{len(matches)} completions spell special tokens, such as {match[0]}, and train these" for match in matches[:1]
    ]
    return [[_encode(tokenizer, row, data) for row in rows] for rows in read], notes


def _text(row: Row, data: SftData) -> str:
    match row.fields["answer"]:
        case [{"role": "assistant", "content": str(text), **rest}] if not rest.get("tool_calls"):
            pass  # a chat, as areal export writes it
        case list():
            raise UserError(
                f"The row of {data.named} with the prompt {row.prompt!r:.60} has a {data.answer_key} that is neither "
                f"text nor a single message of the assistant with text: correct it."
            )
        case _:
            text = row.answer or ""
    if not text:
        raise UserError(f"The row of {data.named} with the prompt {row.prompt!r:.60} has no {data.answer_key}: add it.")
    return text


def _encode(tokenizer: Any, row: Row, data: SftData) -> Group:
    talk, messages = begin(tokenizer, row.prompt, row.tools)
    prompt, text, end = talk.prompt(messages), _text(row, data), _end(tokenizer, talk.end(messages))
    ends = stop_tokens(tokenizer) | (special_tokens(tokenizer) & {*end})
    completion, trimmed = (tokenizer.encode(t, add_special_tokens=False) for t in (text, text.rstrip()))
    if not ends.isdisjoint(trimmed[-1:]):  # the row has its own end, and needs no second end
        completion = trimmed[: max((i + 1 for i, token in enumerate(trimmed) if token not in ends), default=0)]
    written = next((n for n in range(len(end), 0, -1) if completion[-n:] == end[:n]), 0)  # such as white space
    completion += end[written:]
    is_sampled = np.repeat([False, True], [len(prompt), len(completion)])
    tokens, parts = np.array([*prompt, *completion], np.int32), parts_of(messages)
    of_prompt = np.where(is_sampled, NOT_SAMPLED, tokens)
    pictures = find("sight")(tokenizer.name_or_path).column(of_prompt, parts) if parts else None
    return _alone(row.index, tokens, is_sampled, pictures)


def _end(tokenizer: Any, written: Sequence[int]) -> list[int]:
    """Return the end of an answer. written: the template's tokens after the answer. The end is `written` up to the
    first token that ends a sequence or, without such a token, up to the last special token."""
    stops, special = stop_tokens(tokenizer), special_tokens(tokenizer)
    places = [i for i, token in enumerate(written) if token in stops][:1]
    places = places or [i for i, token in enumerate(written) if token in special][-1:]
    return [*written[: places[0] + 1]] if places else [tokenizer.eos_token_id]


def _alone(number: int, tokens: np.ndarray, is_sampled: np.ndarray, pictures: np.ndarray | None) -> Group:
    """Return a group of a single sequence. is_sampled: bool [T], the tokens in the loss. pictures: as in Trajectory."""
    versions = np.where(is_sampled, 0, NOT_SAMPLED).astype(np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    return Group(f"{number}", number, (Trajectory(tokens, logprobs, versions, 1.0, "stop", pictures=pictures),))


def sampled(tokenizer: Any, model: Path, rollouts: Path, config: SftConfig) -> list[list[Group]]:
    """Return the chosen rollouts, each branch by itself: the sequences to train on, and the held-out sequences. No
    prompt is in both. Raises UserError if there are too few, or if the tokenizer of `model` reads the rollouts
    differently from the run's.
    """
    data, by_prompt, highest, n = config.data, dict[str, list[Group]](), -math.inf, 0
    for group in groups_of(
        read_rows(rollouts, [*COLUMNS, "prompt", "completion", "prompt_tokens", "tokens", "versions", "pictures"])
    ):
        highest = max([highest, *(sample.reward for sample in group)])
        for sample in chosen(group, best=data.best_of_group, least=data.min_reward):
            for row in sample.rows:
                if not reads_as_kept(tokenizer, row):
                    raise UserError(
                        f"The model {model} has another tokenizer than the run of these rollouts: write their texts to "
                        f"a file with areal export RUN --output rows.jsonl, and train on that."
                    )
                tokens = np.array(row["tokens"], np.int32)  # a copy: the row is part of a larger block of memory
                pictures = None if row["pictures"] is None else np.array(row["pictures"]).reshape(len(tokens), -1)
                sequence = _alone(n, tokens, row["versions"] != NOT_SAMPLED, pictures)
                by_prompt.setdefault(sample.rows[0]["prompt"], []).append(sequence)
                n += 1
    if len(by_prompt) < 2:
        least = "above 0" if data.min_reward is None else f"of at least {data.min_reward:g}"
        raise UserError(
            f"Only {len(by_prompt)} prompts of {rollouts} have a sample with a reward {least} that was not cut at the "
            f"limit of tokens, and the highest reward is {highest:g}: set data.min_reward."
        )
    eval_size, held_out = data.eval_size or max(1, n // HELD_OUT_SHARE), list[Group]()
    for prompt in Random(f"{config.seed}/held_out").sample(list(by_prompt), len(by_prompt) - 1):
        if len(held_out) >= eval_size:
            break
        held_out += by_prompt.pop(prompt)
    return [[row for rows in by_prompt.values() for row in rows], held_out]
