"""Checks of rows before a run: prompts, answers and tests. A mistake raises a UserError of one sentence."""

import contextlib
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from areal.base.errors import UserError
from areal.config import Config
from areal.data.prompt_sources import PromptSource
from areal.data.rows import Row, prompt_text
from areal.data.sources import open_benchmark
from areal.rewards.first_call import check_own_rewards
from areal.rewards.lookup import hook
from areal.samples.pictures import find
from areal.samples.tokenizer import missing_character
from areal.workflows import named_workflows as workflows
from areal.workflows.conversation import begin

# How long answers of rows are read; 40,000 plain numbers take a few seconds.
ANSWERS_SECONDS = 10.0
# How long the prompts of at most PROMPTS rows are made into tokens.
PROMPTS_SECONDS, PROMPTS = 3.0, 512
# Rows per child process that reads answers: many plain rows, or few rows with tests, which are large.
ANSWERS_AT_ONCE, ROWS_AT_ONCE = 128, 16
# Built-in workflows that show the policy their own tools, not the row's tools.
OFFER_THEIR_OWN = ("tools", "sandbox_tools", "verifiers")
# Rows to look at if the source is endless, or if only rows can name the reward.
FEW_ROWS = 512


def check_rows(config: Config, source: PromptSource) -> None:
    """Check answers and tests of some rows, by the functions below, and the user's own rewards."""
    check_answers(config, source)
    for row in source.held_out[:1] if source.size == 0 else [source.row(0)]:  # an evaluation has held-out rows alone
        if row.pictures:
            find("check")(config)
        check_own_rewards(config, row)
    for name in () if config.rollout_manager.gives_rewards else config.rewards:
        if examine := hook(name, "examine"):
            examine(config, partial(_rows, config, source))
    manager = config.rollout_manager
    if manager.workflow in OFFER_THEIR_OWN:
        few = [*islice(_rows(config, source), FEW_ROWS)]
        if with_tools := sum(bool(row.tools) for row in few):
            print(
                f"Note: {with_tools} of {len(few)} rows of {config.data.named} have tools, but the workflow "
                f"{manager.workflow} shows its own alone.",
                file=sys.stderr,
            )
    workflows.examine(manager.workflow, manager.workflow_options, islice(_rows(config, source), FEW_ROWS))


def check_prompts(
    config: Config, source: PromptSource, tokenizer: Any, context: int | None, rooms: Mapping[str, int]
) -> None:
    """Check the prompts of some rows, as the model gets them: first held-out rows, then training rows in random order.
    context: the most tokens of a sequence of the model. rooms: the most tokens of a sequence, by scorer.

    Raises UserError if all prompts are longer than `data.max_prompt_tokens` or than the model takes, if a scorer has no
    room for the longest sample, or if a larger share than `max_failed_share` cannot be made into tokens; prints a note
    about a smaller share.
    """
    lengths, flaws = _lengths(config, source, tokenizer)
    checked = len(lengths) + len(flaws)
    if flaws:
        sentence = (
            f"{len(flaws)} of the {checked} prompts of {config.data.named} that were checked cannot be made into "
            f"tokens, such as {flaws[0]}"
        )
        if len(flaws) > config.max_failed_share * checked:
            raise UserError(f"{sentence}: correct these rows or the chat template, or choose another model.")
        print(f"Note: {sentence}.", file=sys.stderr)
    longest = config.sampling.max_new_tokens
    limits_of_prompts = config.data.max_prompt_tokens, (config.generator.max_model_len or context or math.inf) - longest
    _check_rooms(rooms, min([max(lengths, default=0), *filter(None, limits_of_prompts)]), longest)
    if lengths and context and min(lengths) + longest > context:
        print(
            f"Note: the model has room for {context} tokens, so after prompts of {min(lengths)} or more tokens "
            f"completions end before sampling.max_new_tokens={longest}.",
            file=sys.stderr,
        )
    limits = {"data.max_prompt_tokens": config.data.max_prompt_tokens, "the most that the model takes": context}
    for name, limit in limits.items():
        over = [length for length in lengths if limit is not None and length > limit]
        if over and len(over) == len(lengths):
            raise UserError(
                f"All {len(lengths)} prompts of {config.data.named} that were checked are longer than {name}, {limit} "
                f"tokens; the shortest has {min(over)}: "
                f"{'raise it' if name.startswith('data.') else 'shorten them, or choose another model'}."
            )
        if over:
            fate = "will be left out" if name.startswith("data.") else "will fail: set data.max_prompt_tokens"
            print(
                f"Note: {len(over)} of {len(lengths)} prompts are longer than {name}, {limit}; they {fate}.",
                file=sys.stderr,
            )


def _check_rooms(rooms: Mapping[str, int], prompt: float, completion: int) -> None:
    """Raises UserError if a scorer has no room for a prompt and a completion of these lengths in tokens."""
    for name, room in rooms.items():
        if prompt + completion >= room:
            raise UserError(
                f"scorers.{name} has room for {room} tokens, but a prompt of {prompt} and sampling.max_new_tokens="
                f"{completion} need one more than {prompt + completion}: raise scorers.{name}.max_model_len, or lower "
                f"data.max_prompt_tokens."
            )


def _lengths(config: Config, source: PromptSource, tokenizer: Any) -> tuple[list[int], list[str]]:
    """The numbers of tokens of the prompts of some rows, and the errors of other rows."""
    lengths, flaws, answered = [], [], 0
    until = time.monotonic() + PROMPTS_SECONDS
    for row in islice(_rows(config, source), PROMPTS):
        if time.monotonic() > until:
            break
        talk, messages = begin(tokenizer, row.prompt, row.tools)
        answered += messages[-1]["role"] == "assistant"
        shown = f"that of the prompt {prompt_text(row.prompt)[:80]!r}"
        try:
            lengths.append(len(talk.prompt(messages)))
        except Exception as error:  # chat templates and tokenizers may raise anything
            character = missing_character(tokenizer, prompt_text(row.prompt))
            reason = f"the tokenizer has no token for {character!r}" if character else " ".join(str(error).split())
            flaws.append(f"{shown} ({reason})")
    if answered:
        print(
            f"Note: {answered} of {len(lengths) + len(flaws)} prompts of {config.data.named} end with a turn of the "
            f"assistant, after which the policy begins another one.",
            file=sys.stderr,
        )
    return lengths, flaws


def check_answers(config: Config, source: PromptSource) -> None:
    """Check whether rewards can read the answers of rows: first of held-out rows, then of training rows in random order
    unless the workflow gives the rewards, and of every benchmark. Each of these checks takes at most ANSWERS_SECONDS.

    Raises UserError if a larger share of answers than `max_failed_share` cannot be read, or if a benchmark cannot be
    opened; prints a note about a smaller share.
    """
    if not config.rollout_manager.gives_rewards:
        _check_answers(config, _rows(config, source), config.data.named, "such prompts will be discarded")
    for name, benchmark in config.evaluator.benchmarks.items():
        rows = iter(open_benchmark(name, benchmark, config.seed))
        _check_answers(config, rows, f"the benchmark {name}", "such rows will not be scored")


def _check_answers(config: Config, rows: Iterator[Row], named: str, fate: str) -> None:
    until, scored, flaws = time.monotonic() + ANSWERS_SECONDS, Counter[str](), defaultdict[str, list[str]](list)
    at_once = ANSWERS_AT_ONCE if {*config.rewards} == {"math"} else ROWS_AT_ONCE
    while (batch := list(islice(rows, at_once))) and time.monotonic() < until:
        by_reward = defaultdict(list)
        for row in batch:
            for name in row.reward or config.reward.functions:
                by_reward[name].append(row)
        for name, of_reward in by_reward.items():
            if flaws_of := hook(name, "flaws"):
                scored[name] += len(of_reward)
                flaws[name] += flaws_of(of_reward)
    for name, bad in flaws.items():
        if not bad:
            continue
        sentence = (
            f"the reward {name} cannot score {len(bad)} of the {scored[name]} rows of {named} that were checked, such "
            f"as {bad[0]}"
        )
        if len(bad) > config.max_failed_share * scored[name]:
            raise UserError(f"{sentence}: correct or remove these rows, or name another reward (areal docs rewards).")
        print(f"Note: {sentence}; {fate}.", file=sys.stderr)


def _rows(config: Config, source: PromptSource) -> Iterator[Row]:
    yield from map(source.heldout, range(config.data.eval_size))
    count = FEW_ROWS if source.size is None else source.size
    limit = count if "math" in config.rewards else min(count, FEW_ROWS)
    for index in random.Random(config.seed).sample(range(count), limit):
        with contextlib.suppress(UserError):  # an unusable row is discarded when its turn comes
            yield source.row(index)
