"""Scores existing completions exactly as a run does: `areal score`.

A line of the input is an object with `prompt`, `completion`, and the fields that the reward needs (`answer`, `tests`,
...). A row without a completion is scored with its `canonical_solution`, as in HumanEval. Line n of the output is the
result of line n of the input:

    {"line": 1, "score": 1.0, "status": "ok", "seconds": 0.002, "parts": {}}

`status` is `ok`, or the kind of failure (areal.rewards.pool.RewardFailed) with a `reason`.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from areal.base.errors import UserError, explain
from areal.config.scoring import ScoringConfig
from areal.data.files import read_file, unit_of
from areal.data.prompt_forms import prompt_or_none, read_prompt
from areal.data.rows import prompt_text
from areal.rewards.functions import all_scored, combined
from areal.rewards.pool import RewardPool
from areal.rewards.worker import RewardFailed

Line = tuple[int, dict[str, Any]]
Judge = Callable[[RewardPool, ScoringConfig, dict[str, Any]], Awaitable[dict[str, Any]]]


def score_file(config: ScoringConfig, file: Path, output: Path | None, console: Console) -> bool:
    """Score all rows of a .jsonl file with the weighted sum of the rewards in `config.reward`. Progress and a summary
    go to the console. Return False if no row could be scored. Raises UserError before scoring if a row is not usable.
    """
    rows = _read(file)
    results, seconds = judge_rows(config, rows, output, console, "scoring", _score)
    scores = [result["score"] for result in results if result["status"] == "ok"]
    summary = f"{len(scores)} of {len(rows)} completions scored in {seconds:.1f} s ({len(rows) / seconds:.1f}/s)"
    if scores:
        summary += f", mean score {sum(scores) / len(scores):.4f}, {sum(s >= 1 for s in scores)} of them 1 or more"
    console.print(summary, soft_wrap=True)
    for status, count in Counter(result["status"] for result in results if result["status"] != "ok").items():
        console.print(f"{status}: {count}")
    return bool(scores)


def judge_rows(
    config: ScoringConfig, rows: Sequence[Line], output: Path | None, console: Console, what: str, judge: Judge
) -> tuple[list[dict[str, Any]], float]:
    """Return the result of `judge` for each row, with the row's line, and the seconds in all. Results are written to
    `output`, or printed, in the order of the rows. Raises UserError if `output` cannot be written."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with explain(OSError, f"{output} cannot be written ({{strerror}}): name another --output."):
        opened = nullcontext(sys.stdout) if output is None else output.open("w")
    with opened as lines, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=len(rows))
        return asyncio.run(_judge_all(config, rows, lines, judge, lambda: progress.advance(bar)))


def read_rows(file: Path) -> list[Line]:
    """Return the rows of a file with their lines. Raises UserError."""
    rows = list(read_file(file, f"--input {file}"))
    if not rows:
        raise UserError(f"--input {file} has no rows: name another file")
    for number, row in rows:
        if row.get("prompt") not in (None, "", []):
            where = f"{file}, {unit_of(file)} {number},"
            with explain(ValueError, f"{where} has a prompt that cannot be read ({{why}}): correct it"):
                read_prompt(row["prompt"])
    return rows


def _read(file: Path) -> list[Line]:
    rows = read_rows(file)
    for number, row in rows:
        where, fields = f"{file}, {unit_of(file)} {number},", ", ".join(row)
        row.setdefault("completion", row.get("canonical_solution"))
        for key in "prompt", "completion":
            if row.get(key) is None:
                advice = ", or check the rows with --check-data" * (key == "completion")
                raise UserError(f"{where} has no {key!r}, only {fields}: add it{advice}")
        if not isinstance(row["completion"], str):
            raise UserError(f"{where} has a completion that is not text: correct it")
    return rows


async def _judge_all(
    config: ScoringConfig, rows: Sequence[Line], output: TextIO, judge: Judge, judged: Callable[[], None]
) -> tuple[list[dict[str, Any]], float]:
    """Return the results, and the seconds in all. A result is written once all earlier results are written."""
    async with RewardPool(list(config.reward.functions), config.served_rewards) as pool:
        began = time.monotonic()
        # At most as many calls as run at once: `seconds` of a call would otherwise include the time in the queue.
        free = asyncio.Semaphore(pool.places)

        async def judge_row(number: int, row: dict[str, Any]) -> dict[str, Any]:
            async with free:
                result = {"line": number, **await judge(pool, config, row)}
            judged()
            return result

        async with asyncio.TaskGroup() as tasks:
            results = []
            for task in [tasks.create_task(judge_row(*line)) for line in rows]:
                results.append(await task)
                print(json.dumps(results[-1]), file=output, flush=True)
        return results, time.monotonic() - began


async def _score(pool: RewardPool, config: ScoringConfig, row: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    weights = config.reward.functions
    try:
        prompt, completion = prompt_text(prompt_or_none(row["prompt"]) or ""), row["completion"]
        results = await all_scored(weights, lambda name: pool.score(name, prompt, completion, row))
    except RewardFailed as failure:
        outcome: dict[str, Any] = {"score": None, "status": failure.kind, "reason": str(failure)}
    else:
        score, parts = combined(weights, results)
        outcome = {"score": score, "status": "ok", "parts": parts}
    return outcome | {"seconds": round(time.monotonic() - began, 6)}
