"""Makes and scores the tasks of the reasoning_gym library. No other module uses the library.

Importing the library takes seconds: the first use of a task imports it.

Five of its tasks iterate over sets of strings (polynomial_multiplication, isomorphic_strings, ransom_note, word_ladder,
knight_swap). Two processes make the same entries for these tasks only with the same PYTHONHASHSEED. Scoring does not
depend on this, because the row contains the entry.
"""

import ast
import dataclasses
import difflib
import functools
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from areal.base.errors import UserError
from areal.config.data_section import SourceConfig
from areal.data.prompt_sources import Draw, make_row
from areal.data.rows import Row, without
from areal.data.sources import derived_seed, with_first_row
from areal.rewards.functions import RewardError

# Entries in a data set of the library: its default, which every task supports.
CHUNK = 500

# Tasks with scorers that call eval() on the output of the model, where only a literal is expected.
EVALUATING = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")

# Errors that some scorers raise for an answer of the wrong form instead of a score.
_STUMBLES = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


def check(task: str, options: Mapping[str, Any], where: str) -> None:
    """Raise UserError, with a message that begins with `where`, for an unknown task or an unknown option of it."""
    tasks = load()
    if task not in tasks:
        close = difflib.get_close_matches(task, tasks, 3)
        advice = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(sorted(tasks))}"
        raise UserError(f"{where}: reasoning_gym has no task {task!r}: {advice}")
    option_names = {field.name for field in dataclasses.fields(tasks[task][1])} - {"seed", "size"}
    unknown = [name for name in options if name not in option_names]
    if unknown:
        raise UserError(f"{where} has no option {unknown[0]!r}: choose from {', '.join(sorted(option_names))}")


def make(task: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    """Return the library's data set: `size` entries by index. The same seed, in [0, 2**32), gives the same entries.

    Raises AssertionError, LookupError, TypeError or ValueError for bad options, as the library does.
    """
    dataset, config = load()[task]
    options = dict(options)
    if task == "composite":
        from reasoning_gym.composite import DatasetSpec

        options["datasets"] = [DatasetSpec(**part) for part in options.get("datasets", ())]
    settings = config(**options, size=size, seed=seed)
    if hasattr(settings, "validate"):
        settings.validate()
    return dataset(config=settings)


def row(task: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an entry: `question`, `answer`, and for `score` also `task`, `options` and `entry`.

    The entry is stored as a Python literal, because JSON would lose its tuples and integer keys.
    """
    plain = _plain(entry)
    return {
        "question": plain["question"],
        "answer": plain["answer"],
        "task": task,
        "options": dict(options),
        "entry": repr(plain),
    }


def score(answer: str, row: Mapping[str, Any]) -> float:
    """Return the task's own score of `answer`, usually in [0, 1].

    The score is 0.0 if the scorer raises one of `_STUMBLES` for this answer but not for the right answer. If the scorer
    raises an error for the right answer too, that error is raised. Raises KeyError if the row was not made by `row`.
    """
    scorer = _scorer(row["task"], json.dumps(row["options"], sort_keys=True))
    entry = ast.literal_eval(row["entry"])
    try:
        return scorer.score_answer(answer, entry)
    except _STUMBLES:
        scorer.score_answer(entry["answer"], entry)
        return 0.0


def reasoning_gym(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return the task's own score of the text in the last <answer> tags, or of a whole completion without tags."""
    if "entry" not in row:
        raise RewardError("the row has no entry of reasoning_gym: use this reward with data.source reasoning_gym:NAME")
    _, opened, tail = completion.rpartition("<answer>")
    answer, closed, _ = tail.partition("</answer>")
    return score((answer if opened and closed else completion).strip(), row)


@functools.cache
def load() -> dict[str, tuple[Any, Any]]:
    """Return the library's registry: the classes (data set, configuration) by task."""
    with warnings.catch_warnings():
        # Python prints syntax warnings about the library's source when it compiles it for the first time.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS

    for task in EVALUATING:
        # A name in the module shadows the builtin: the model's output is parsed as a literal and never executed.
        vars(sys.modules[DATASETS[task][0].__module__])["eval"] = ast.literal_eval
    return DATASETS


@functools.lru_cache(maxsize=32)
def _scorer(task: str, options: str) -> Any:
    return make(task, json.loads(options), size=1, seed=0)


def _plain(value: Any) -> Any:
    """Return the value in Python's own types; its repr is a literal. Raises TypeError if that is not possible."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return {list: list, tuple: tuple, set: set}[type(value)](map(_plain, value))
    if isinstance(value, Fraction):  # a variable of gsm_symbolic, unused in scoring
        return float(value)
    if hasattr(value, "item"):  # a NumPy number
        return value.item()
    raise TypeError(f"an entry holds a value of type {type(value).__name__}")


def _flaws(rows: Sequence[Row]) -> list[str]:
    return without("entry", rows)


vars(reasoning_gym).update(warm=load, flaws=_flaws)


def open_source(config: SourceConfig, name: str, options: Mapping[str, Any], seed: int, what: str) -> Draw:
    """Open the source `reasoning_gym:NAME`: tasks without end."""
    check(name, options, what)
    chunk = config.size or CHUNK
    config = config.model_copy(update={"prompt_key": "question", "answer_key": "answer"})

    @functools.lru_cache(maxsize=8)
    def dataset(side: str, number: int, attempt: int) -> Any:
        return make(name, options, chunk, derived_seed(seed, side, number, attempt))

    def draw(side: str, number: int, attempt: int) -> Row:
        entry = dataset(side, number // chunk, attempt)[number % chunk]
        return make_row(row(name, options, entry), config, f"{what}, row {number},")

    return with_first_row(draw, (AssertionError, LookupError, TypeError, ValueError), what)
