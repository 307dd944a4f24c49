"""Checks the rows of a data set before a run: `areal score --check-data`.

A row is good if a completion that computes nothing does not get the full score, and the row's own solution, if any,
does. For `code`, such completions are programs whose functions return None, [], 0, their first argument and so on
(`areal.extensions.programs.code_rows.TRIVIAL`), and `solutions_of` there has the solutions. For rewards that compare
with the row's `answer`, the completion is empty, and the solution is the answer.

Line n of the output is the result of line n of the input:

    {"line": 3, "status": "bad", "reason": "if functions return [], the score is full", "solution": "passed",
     "inside": false}

`status` is `ok` or `bad`; a bad row has a `reason`. `solution` is `passed`, `failed`, or null without a solution.
`inside`: tests of the row run beside the program, and the program can forge the verdict (areal docs sandbox).
"""

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from areal.base.errors import UserError
from areal.base.text import shown
from areal.config.scoring import ScoringConfig
from areal.data.rows import prompt_text
from areal.extensions.programs import code_rows
from areal.extensions.programs.code_tests import FAILS, REFUSED_OUTSIDE
from areal.extensions.scoring.score import Judge, Line, judge_rows, read_rows
from areal.rewards.functions import RewardError, passing
from areal.rewards.pool import RewardPool
from areal.rewards.worker import RewardFailed
from areal.samples.pictures import FIELDS, find

WITH_ANSWERS = {"math", "exact_match", "addition", "reasoning_gym"}
# The most bad rows that are shown on the console. The output has all bad rows.
SHOWN = 20


def check_file(config: ScoringConfig, file: Path, output: Path | None, console: Console) -> bool:
    """Return whether all rows of a .jsonl file are good for the reward in `config.reward`. Raises UserError."""
    names = list(config.reward.functions)
    if len(names) != 1 or names[0] not in {"code", *WITH_ANSWERS}:
        raise UserError(
            f"--check-data checks rows for one reward of code, {', '.join(sorted(WITH_ANSWERS))}, "
            f"not for {', '.join(names)}: name one of them"
        )
    rows, check = read_rows(file), partial(_check, file.parent)
    results, seconds = judge_rows(config, rows, output, console, "checking", check)
    bad = [result for result in results if result["status"] == "bad"]
    for result in bad[:SHOWN]:
        line = shown(f"line {result['line']}: {result['reason']}")
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(bad) > SHOWN:
        console.print(f"and {len(bad) - SHOWN} more")
    if inside := sum(result["inside"] for result in results):
        console.print(
            f"the tests of {inside} of {len(results)} rows run beside the program, which can forge their verdict",
            soft_wrap=True,
        )
    if names == ["code"]:
        _print_settings(config, rows, results, check, console)
    solutions = Counter(result["solution"] for result in results)
    console.print(
        f"{len(bad)} of {len(results)} rows are bad ({seconds:.1f} s); own solutions: {solutions['passed']} passed, "
        f"{solutions['failed']} failed, {solutions[None]} rows have none or were not tried",
        soft_wrap=True,
    )
    return not bad


def _print_settings(
    config: ScoringConfig, rows: Sequence[Line], results: Sequence[dict[str, Any]], check: Judge, console: Console
) -> None:
    """Print how many rows each setting of sandbox.tests takes, and the setting to choose. Rows refused outside are
    checked again inside."""
    good = Counter(result["inside"] for result in results if result["status"] == "ok")
    outside, inside = good[False], good[True]
    refused = [
        row for row, result in zip(rows, results, strict=True) if result.get("reason", "").startswith(REFUSED_OUTSIDE)
    ]
    if refused:
        settings = config.sandbox.model_copy(update={"tests": "inside_where_needed"})
        other = config.model_copy(update={"sandbox": settings})
        again, _ = judge_rows(other, refused, Path(os.devnull), console, "checking inside", check)
        inside = sum(result["status"] == "ok" for result in again)
    choice = "inside_where_needed, unless a program may forge the verdict of a row" if inside else "outside"
    console.print(
        f"sandbox.tests=outside takes {outside} of {len(results)} rows, inside_where_needed {outside + inside}: choose "
        f"{choice}",
        soft_wrap=True,
    )


async def _check(folder: Path, pool: RewardPool, config: ScoringConfig, row: dict[str, Any]) -> dict[str, Any]:
    (name,) = config.reward.functions
    if reason := _flaw_of_pictures(row, folder):
        return {"status": "bad", "reason": reason, "solution": None, "inside": False}
    prompt = prompt_text(row.get("prompt") or "")

    parts: dict[str, float] = {}

    async def score(completion: str) -> float:
        result = await pool.score(name, prompt, completion, row)
        parts.update(result.parts)
        return result.score

    try:
        trivial = await passing(_trivial(name, row), score)
        solutions = _solutions(name, row)
    except RewardError as error:
        solution = "failed" if FAILS in str(error) else None
        return {"status": "bad", "reason": str(error), "solution": solution, "inside": False}
    reasons = [f"if {trivial}, the score is full"] if trivial else []
    if failure := await _failure(pool, name, prompt, solutions, row):
        reasons.append(f"its own solution does not pass: {failure}")
    facts = {"solution": ("failed" if failure else "passed") if solutions else None, "inside": "inside" in parts}
    if reasons:
        return {"status": "bad", "reason": "; ".join(reasons), **facts}
    return {"status": "ok", **facts}


def _flaw_of_pictures(row: dict[str, Any], folder: Path) -> str | None:
    """Return an error of a row's pictures, or None. Paths begin at `folder`. Pictures are decoded. Raises UserError."""
    if not isinstance(row.get("prompt"), list) and not any(row.get(name) for name in FIELDS):
        return None
    flaw: str | None = find("flaw")(row, folder)
    return flaw


def _trivial(name: str, row: dict[str, Any]) -> dict[str, str]:
    """Return completions that compute nothing, by a description of the completion. Raises RewardError."""
    return code_rows.read_tests(row).trivial_programs() if name == "code" else {"the completion is empty": ""}


def _solutions(name: str, row: dict[str, Any]) -> list[str]:
    """Return completions that should get the full score. Raises RewardError."""
    if name == "code":
        return code_rows.solutions_of(row)
    answers = row.get("answer")
    answers = answers if isinstance(answers, list) else [answers]
    return [text for answer in answers if answer is not None for text in (str(answer), rf"\boxed{{{answer}}}")]


async def _failure(pool: RewardPool, name: str, prompt: str, solutions: list[str], row: dict[str, Any]) -> str:
    """Return the result of the last solution if no solution gets the full score; else an empty text."""
    reason = ""
    for solution in solutions:
        try:
            result = await pool.score(name, prompt, solution, row)
        except RewardFailed as error:
            reason = str(error)
            continue
        if result.score >= 1:
            return ""
        reason = ", ".join(f"{part} {score:.3g}" for part, score in {"score": result.score, **result.parts}.items())
    return reason
