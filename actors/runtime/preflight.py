"""Checks of the configuration before any process is started. Each mistake raises a UserError of one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from areal.config import Config, UserError
from areal.data.addition import ALPHABET
from areal.data.rows import Row, prompt_text
from areal.data.sources import PromptSource, open_benchmark, open_source
from areal.models import check_heads, resolve_model, resolve_reference
from areal.observe import tracking
from areal.processes import ROOT, tied
from areal.rewards import functions as rewards
from areal.rewards import math_answers
from areal.rewards.code_rows import read_tests
from areal.rewards.code_tests import CodeTests
from areal.rewards.result import RewardError
from areal.sandbox.outside import open_sandbox
from areal.tokens import load_tokenizer
from areal.workflows.builtin import rehearse as rehearse_workflow
from areal.workflows.builtin import resolve_workflow

# How long answers of rows are read; 40,000 plain numbers take a few seconds.
ANSWERS_SECONDS = 10.0
# How long programs that compute nothing are run on rows' tests: a row takes 0.1 to 0.5 s.
TESTS_SECONDS = 10.0
# How long vLLM may take to load its parsers: 6 s on a machine that is free.
PARSERS_SECONDS = 120.0
# Rows whose answers are read in one child process.
ROWS_AT_ONCE = 128
# Rows that are looked at if the source is endless, or if only rows themselves can name the reward.
FEW_ROWS = 512
_LOAD_PARSERS = """
import sys
from areal.config import UserError
from areal.tokens import load_tokenizer
from areal.workflows.parsers import Parsers
folder, tools, reasoning = sys.argv[1:]
try:
    Parsers(load_tokenizer(folder), tools, reasoning or None).load()
except UserError as error:
    sys.exit(str(error))
"""


def check(config: Config) -> None:
    """Check all that can be checked before the start: the number of ranks, the master's port, the tracking and weights
    settings, rewards, workflow, sandbox, objective, data, model folders, chat template, parsers. Raises UserError."""
    if config.trainer.ranks % config.trainer.sequence_parallel:
        raise UserError(
            f"trainer.ranks is {config.trainer.ranks}, but trainer.sequence_parallel is "
            f"{config.trainer.sequence_parallel}: make trainer.ranks a multiple of it."
        )
    check_port(config.master.address)
    tracking.check(config.observe)
    if config.weights.folder is not None:
        check_folder(config.weights.folder)
    for name in config.rewards | config.reward.options:
        rewards.check(name, config.reward.options.get(name, {}))
    resolve_workflow(config.rollout_manager.workflow, config.rollout_manager.workflow_options)
    rehearse_workflow(config.rollout_manager.workflow, config.rollout_manager.workflow_options)
    if "code" in config.rewards or config.rollout_manager.workflow == "python_tool":
        open_sandbox(config.sandbox).close()
    if ":" in config.trainer.objective:
        from areal.training.objectives import (
            rehearse,  # imports torch, which only a user-defined objective needs here
        )

        rehearse(config.trainer)
    source = open_source(config.data, config.seed)
    if config.model == "quickstart":
        if config.data.parts:
            check_characters(source.row(0))
    else:
        check_heads(resolve_model(config), config.trainer.sequence_parallel)
    resolve_reference(config)
    if config.data.sets_template:
        load_tokenizer(str(resolve_model(config)), config.data)
    if config.rollout_manager.names_parsers:
        check_parsers(config)
    check_rows(config, source)


def check_parsers(config: Config) -> None:
    """Raises UserError if the model's tokenizer lacks what the parsers need."""
    section = config.rollout_manager
    folder = str(resolve_model(config))
    # A process of its own: vLLM would stay in the memory of this one.
    command = tied(
        sys.executable, "-c", _LOAD_PARSERS, folder, section.tool_call_parser, section.reasoning_parser or ""
    )
    try:
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PARSERS_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"vLLM's parsers did not load within {PARSERS_SECONDS:g} s: leave out rollout_manager.tool_call_parser and "
            f"reasoning_parser, or start the run on a machine that is less busy."
        ) from None
    if process.returncode:
        raise UserError(
            (process.stderr.strip() or f"vLLM's parsers exited with {process.returncode}.").splitlines()[-1]
        )


def check_rows(config: Config, source: PromptSource) -> None:
    """Check answers and tests of some rows, as `check_answers` and `check_tests`."""
    check_answers(config, source)
    if "code" in config.rewards:
        check_tests(config, source)


def check_tests(config: Config, source: PromptSource) -> None:
    """Check whether tests of the reward `code` can be run and are worth something: of the held-out rows, then of the
    others in random order, for TESTS_SECONDS.

    Raises UserError if `data.weak_tests` is `refuse` and programs that compute nothing pass some, and prints a note if
    there are any such rows, or if programs cannot be run on this machine.
    """
    try:
        reward = CodeTests(**config.served_rewards.options["code"])
    except UserError as error:
        print(f"Note: the tests of rows are not checked here: {error}", file=sys.stderr)
        return
    with contextlib.closing(reward):
        checked, flaws = asyncio.run(_flaws_of_tests(config, reward, _rows(config, source)))
    if flaws:
        message = (
            f"of the {checked} rows of {config.data.named} that were checked, {len(flaws)} have tests worth nothing"
        )
        if config.data.weak_tests == "refuse":
            raise UserError(f"{message}, such as {flaws[0]}: remove these rows, or set data.weak_tests=drop.")
        print(f"Note: {message}, such as {flaws[0]}; such prompts will be discarded.", file=sys.stderr)


async def _flaws_of_tests(config: Config, reward: CodeTests, rows: Iterator[Row]) -> tuple[int, list[str]]:
    """How many rows were checked, and what is wrong with which."""
    checked, flaws = 0, []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TESTS_SECONDS):
            for row in rows:
                if "code" not in (row.reward or config.reward.functions):
                    continue
                try:
                    tests = read_tests(row.fields)
                    flaw = (weakness := await reward.weakness(tests)) and f"its tests are passed if {weakness}"
                except RewardError as error:
                    flaw = str(error)
                checked += 1
                if flaw:
                    flaws.append(f"the row of the prompt {prompt_text(row.prompt)[:80]!r} ({flaw})")
    return checked, flaws


def check_answers(config: Config, source: PromptSource) -> None:
    """Check whether the reward `math` can read the answers of the rows that it is to score: of the held-out rows, then
    of the others in random order, and of each benchmark, each for ANSWERS_SECONDS.

    Raises UserError if a larger share of them than `max_failed_share` cannot be read, or if a benchmark cannot be
    opened; prints a note if some answers cannot be read.
    """
    _check_answers(config, _rows(config, source), config.data.named, "such prompts will be discarded")
    for name, benchmark in config.evaluator.benchmarks.items():
        rows = iter(open_benchmark(name, benchmark, config.seed))
        _check_answers(config, rows, f"the benchmark {name}", "such rows will not be scored")


def _check_answers(config: Config, rows: Iterator[Row], named: str, fate: str) -> None:
    until, checked, flaws = time.monotonic() + ANSWERS_SECONDS, 0, []
    while (batch := list(islice(rows, ROWS_AT_ONCE))) and time.monotonic() < until:
        scored = [row for row in batch if "math" in (row.reward or config.reward.functions)]
        checked += len(scored)
        flaws += _flaws_of_answers(scored)
    if not flaws:
        return
    sentence = (
        f"the reward math cannot read the answers of {len(flaws)} of the {checked} rows of {named} that were checked, "
        f"such as {flaws[0]}"
    )
    if len(flaws) > config.max_failed_share * checked:
        raise UserError(f"{sentence}: correct or remove these rows, or name another reward (docs/rewards.md).")
    print(f"Note: {sentence}; {fate}.", file=sys.stderr)


def _rows(config: Config, source: PromptSource) -> Iterator[Row]:
    yield from map(source.heldout, range(config.data.eval_size))
    count = FEW_ROWS if source.size is None else source.size
    limit = count if "math" in config.rewards else min(count, FEW_ROWS)
    for index in random.Random(config.seed).sample(range(count), limit):
        with contextlib.suppress(UserError):  # a row that is not usable is discarded when it is met
            yield source.row(index)


def _flaws_of_answers(rows: list[Row]) -> list[str]:
    """For each row with an answer that cannot be read: that answer, or what is wrong."""
    flaws, answers = [], []
    for row in rows:
        try:
            answers.append(math_answers.answers_of(row.fields))
        except RewardError as error:
            flaws.append(f"the row of the prompt {prompt_text(row.prompt)[:80]!r} ({error})")
    bad = math_answers.unreadable([answer for row_answers in answers for answer in row_answers])
    for row_answers in answers:
        flaws += [repr(answer[-80:]) for answer in row_answers if answer in bad][:1]
    return flaws


def check_characters(row: Row) -> None:
    """Raises UserError if the row's prompt has a character that the quickstart's model cannot read."""
    if unknown := sorted(set(prompt_text(row.prompt)) - set(ALPHABET)):
        raise UserError(
            f"model=quickstart reads only the characters {ALPHABET}, but a prompt in data.source has {unknown[0]!r}: "
            f"use another model."
        )


def with_free_port(address: str) -> str:
    """`address`, with another port if its port is in use. Raises UserError if the master cannot listen at its host."""
    try:
        _try_to_listen(address)
    except OSError:
        host = address.rpartition(":")[0]
        try:
            return f"{host}:{_try_to_listen(f'{host}:0')}"
        except OSError:
            check_port(address)
    return address


def check_port(address: str) -> None:
    """Raises UserError if the master cannot listen at `address`."""
    try:
        _try_to_listen(address)
    except OSError as error:
        raise UserError(
            f"The master cannot listen at {address} ({error.strerror}): stop the process that uses it, "
            f"or choose another address with master.address=tcp://HOST:PORT."
        ) from None


def _try_to_listen(address: str) -> int:
    """The port at which a socket could listen; the system chooses one in place of 0. Raises OSError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]").replace("*", "0.0.0.0"), int(port))[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(target)
        chosen: int = probe.getsockname()[1]
        return chosen


def check_folder(folder: Path) -> None:
    """Raises UserError if weights cannot be written to `folder`."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(
            f"Weights cannot be written to {folder}: set weights.folder to a writable folder, "
            f"or leave it out to write the weights into the run folder."
        )
