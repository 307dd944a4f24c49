"""The reward `code`: `CodeTests` with hooks. Before a run, the hooks check for weak tests, and for prompts without
the names of the functions that tests call."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import islice

from areal.base.errors import UserError
from areal.config import Config
from areal.data.rows import Row, flawed, prompt_text
from areal.extensions.programs.code_rows import read_tests, unnamed
from areal.extensions.programs.code_tests import CodeTests
from areal.extensions.programs.outside import open_sandbox
from areal.rewards.functions import RewardError

# Time to run programs that compute nothing on the tests of rows, before a run. A row takes 0.1 to 0.5 s.
TESTS_SECONDS = 10.0
# The most rows with a check of the prompt.
FEW_ROWS = 512
# Built-in workflows that show the policy only the prompt of a row.
SHOW_PROMPT_ALONE = ("single_turn", "multi_turn", "python_tool")


class CodeReward(CodeTests):
    """See the module, and areal.rewards.functions for the hooks."""

    @staticmethod
    def rehearse(config: Config) -> None:
        open_sandbox(config.sandbox).close()

    @staticmethod
    def flaws(rows: list[Row]) -> list[str]:
        flaws = []
        for row in rows:
            try:
                read_tests(row.fields)
            except RewardError as error:
                flaws.append(flawed(row, error))
        return flaws

    @staticmethod
    def examine(config: Config, rows: Callable[[], Iterator[Row]]) -> None:
        check_tests(config, rows())
        if config.rollout_manager.workflow in SHOW_PROMPT_ALONE:
            check_prompts_name_calls(config, rows())


def check_tests(config: Config, rows: Iterator[Row]) -> None:
    """Check whether the reward `code` can run the tests of rows, and whether the tests are weak: passed by programs
    that compute nothing. Held-out rows come first, then training rows in random order, for TESTS_SECONDS. Raises
    UserError if tests are weak and `data.weak_tests` is `refuse`. Prints a note about weak tests, or if programs cannot
    be run on this machine."""
    try:
        reward = CodeTests(**config.served_rewards.options["code"])
    except UserError as error:
        print(f"Note: the tests of rows are not checked here: {error}", file=sys.stderr)
        return
    with contextlib.closing(reward):
        checked, inside, flaws = asyncio.run(_flaws_of_tests(config, reward, rows))
    if inside:
        print(
            f"Note: the tests of {inside} of the {checked} rows of {config.data.named} that were checked run beside "
            f"the program, which can forge their verdict (areal docs sandbox).",
            file=sys.stderr,
        )
    if flaws:
        message = (
            f"of the {checked} rows of {config.data.named} that were checked, {len(flaws)} have tests worth nothing"
        )
        if len(flaws) == checked:
            raise UserError(f"{message}, as {flaws[0]}: give rows with tests (areal docs sandbox), or another reward.")
        if config.data.weak_tests == "refuse":
            raise UserError(f"{message}, such as {flaws[0]}: remove these rows, or set data.weak_tests=drop.")
        print(f"Note: {message}, such as {flaws[0]}; such prompts will be discarded.", file=sys.stderr)


def check_prompts_name_calls(config: Config, rows: Iterator[Row]) -> None:
    """Check whether prompts name the functions that the tests call: without the name hardly a program passes. Raises
    UserError if no prompt does; prints a note if some prompts do not."""
    checked, flaws = 0, []
    for row in islice(rows, FEW_ROWS):
        if "code" not in (row.reward or config.reward.functions):
            continue
        with contextlib.suppress(RewardError):  # other checks report unreadable rows
            name = unnamed(row.fields, prompt_text(row.prompt))
            checked += 1
            flaws += [flawed(row, f"its tests use {name}")] if name else []
    if flaws:
        sentence = (
            f"{len(flaws)} of the {checked} prompts of {config.data.named} that were checked do not name what their "
            f"tests call, such as that of {flaws[0]}"
        )
        if len(flaws) == checked:
            raise UserError(f"{sentence}: let data.prompt_template show the tests or the starter code.")
        print(f"Note: {sentence}; hardly a program passes them.", file=sys.stderr)


async def _flaws_of_tests(config: Config, reward: CodeTests, rows: Iterator[Row]) -> tuple[int, int, list[str]]:
    """Return the number of checked rows, the number of rows judged inside, and the flaws by row."""
    checked, inside, flaws = 0, 0, []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TESTS_SECONDS):
            for row in rows:
                if "code" not in (row.reward or config.reward.functions):
                    continue
                try:
                    inside += await reward.way(row.fields) == "inside"
                    flaw = (weakness := await reward.weakness(row.fields)) and f"its tests are passed if {weakness}"
                except RewardError as error:
                    flaw = str(error)
                checked += 1
                if flaw:
                    flaws.append(flawed(row, flaw))
    return checked, inside, flaws
