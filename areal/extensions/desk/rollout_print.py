"""`areal rollouts`: prints rollouts in a terminal."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from areal.base.command_line import output
from areal.base.errors import UserError
from areal.extensions.desk.account import notation
from areal.extensions.desk.pieces import pieces
from areal.extensions.desk.rollout_queries import SORTED_BY, QueryStuck, Rollouts, Where, pictures_of, sql_condition
from areal.samples.tokenizer import token_texts
from areal.storage.record import Record
from areal.storage.run_files import PICTURES


def print_rollouts(options: Namespace) -> None:
    """`areal rollouts`: print the number of rollouts, and some rollouts."""
    column, _, direction = options.sort.strip().partition(" ")
    if direction.strip().lower() not in ("", "asc", "desc"):
        raise UserError(f"--sort {options.sort!r} is not COLUMN or COLUMN desc: use one of {', '.join(SORTED_BY)}.")
    condition = Where() if options.where is None else sql_condition(options.where)
    order = (None if options.random else column or None), direction.strip().lower() == "desc"
    record = Record(options.folder)
    try:
        page = Rollouts(record).page(condition, *order, options.show, all_columns=True)
    except QueryStuck as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
    console = output(120)
    total = sum(page.fates.values())
    shares = ", ".join(f"{fate} {count / total:.1%}" for fate, count in page.fates.items())
    console.print(f"{total:,} rollouts of {page.steps:,} steps{': ' * bool(shares)}{shares}", highlight=False)
    if (words := notation(record)) and page.rows:
        console.print(words, highlight=False, soft_wrap=True)
    tokenizer = record.configuration.tokenizer() if any(len(pieces(row["versions"])) > 2 for row in page.rows) else None
    for row in page.rows:
        _print(row, tokenizer, [record.folder / PICTURES / name for name in pictures_of(row)], console)


def _print(row: dict[str, Any], tokenizer: Any, pictures: list[Path], console: Console) -> None:
    branch = f", branch {row['branch']}" if row["branch"] or row["shared"] else ""
    step = row["fate"] if row["step"] is None else f"step {row['step']}"
    title = f"{step} · group {row['group']} · prompt {row['prompt_index']} · sample {row['sample']}{branch}"
    console.print()
    console.print(Rule(Text(title), align="left"))
    console.print(Text(" · ".join(_about(row))))
    for file in pictures:
        console.print(Text(f"── picture {file}", style="dim"), soft_wrap=True)
    for heading, text, style in _texts(row, tokenizer):
        console.print(Text(f"── {heading}", style="dim"))
        console.print(Text(text, style=style), soft_wrap=True)  # unwrapped text can be copied


def _about(row: dict[str, Any]) -> Iterator[str]:
    parts = ", ".join(f"{name} {value:g}" for name, value in json.loads(row["reward_parts"]).items())
    yield f"reward {row['reward']:g}" + f" ({parts})" * bool(parts)
    if row["reason"]:
        yield f"{row['fate']}: {row['reason']}"
    if row["advantage"] is not None:
        yield f"advantage {row['advantage']:.3g}"
    yield f"version {row['start_version']}"
    if row["staleness"] is not None:
        yield f"staleness {row['staleness']}"
    yield f"finish {row['finish']}"
    yield f"{row['prompt_tokens']} + {row['completion_tokens']} tokens"
    if row["generators"]:
        yield row["generators"]
    if row["seconds"] is not None:
        yield f"{row['seconds']:.1f} s"


def _texts(row: dict[str, Any], tokenizer: Any) -> Iterator[tuple[str, str, str]]:
    """Yield a heading, a text and a style for each turn, given to the policy or sampled by it."""
    turns = pieces(row["versions"])
    if tokenizer is None:
        yield "prompt", row["prompt"], ""
        note = f", {row['turns']} turns, which only the model's tokenizer can separate" if len(turns) > 2 else ""
        yield f"completion{note}", row["completion"], "green"
        return
    texts = token_texts(tokenizer, row["tokens"])
    for n, (sampled, start, end) in enumerate(turns):
        heading = "sampled" if sampled else "given" if n else "prompt"
        yield f"{heading}, {end - start} tokens", "".join(texts[start:end]), "green" if sampled else ""
