"""Reads kept rollouts (`areal.storage.rollout_files`) for the alerts: each file once, few columns, of many tokens."""

import functools
import json
import math
import re
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from areal.base.command_line import typed
from areal.base.errors import UserError
from areal.extensions.alerts.alerts import EARLY, PROMPTS, Alert, Digest, alerts
from areal.samples.table import NOT_SAMPLED
from areal.samples.tokenizer import tokenizer_in
from areal.samples.trajectory import differ
from areal.storage.record import Record
from areal.storage.rollout_files import files, opened
from areal.storage.run_files import ROLLOUTS

TOKEN_BYTES = 64 << 20
"""Uncompressed bytes of tokens read from a file. In a larger file only every n-th row group is read."""
ROLLOUTS_SECONDS = 20.0
"""After this time a report or a summary reads no further file."""
TOKENS_KEPT = 32
"""A digest keeps so many of the most frequent tokens."""
_INTEGER = re.compile(r"(?:.*####)?\s*-?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,99})\s*", re.DOTALL)
_WITHIN_NUMBERS = re.compile(r"(?<=\d)[,\s{}\\!]+(?=\d)")


def alerts_of(record: Record) -> list[tuple[Alert, str]]:
    """Return the alerts of a run, each with the command that prints its rollouts, or "" without rollouts."""
    digests = Digests(record.folder)
    alerts = digests.alerts(
        record.metrics.records, record.metrics.evaluations, record.configuration.settings, ROLLOUTS_SECONDS
    )
    return [(alert, digests.command(alert)) for alert in alerts]


class Digests:
    """The digests of the run in `folder`, read file by file. `has_rollouts`: whether the run keeps rollouts."""

    def __init__(self, folder: Path) -> None:
        self.has_rollouts = False
        self._folder = folder / ROLLOUTS
        self._steps: list[Digest] = []
        self._read: set[Path] = set()
        self._seen: tuple[int, ...] = ()
        self._alerts: list[Alert] = []
        self._tokenizer = functools.cache(tokenizer_in)

    def command(self, alert: Alert) -> str:
        """Return the command that prints the rollouts of an alert; empty if the run keeps none."""
        words = f'rollouts {shlex.quote(str(self._folder.parent))} --where "{alert.where}"'
        return typed(words) if self.has_rollouts else ""

    def alerts(
        self,
        records: Sequence[Mapping[str, Any]],
        evaluations: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        seconds: float,
    ) -> list[Alert]:
        """Return the alerts of the run. New files of rollouts are read first, but no file is begun after `seconds`.
        config: the values of config.yaml; each may be missing."""
        self._read_new(seconds)
        seen = len(records), len(evaluations), len(self._read)
        if seen != self._seen:
            self._seen = seen
            names = functools.partial(self._name, str(config.get("model")))
            is_math = any("math" in (named or ()) for named in _rewards(config))
            taught = bool((config.get("trainer") or {}).get("teacher_coef"))
            self._alerts = alerts(records, self._steps, evaluations, config.get("guard"), names, is_math, taught)
        return self._alerts

    def _name(self, model: str, token: int) -> str:
        """Return a token's number, and its text if the folder of the model is here."""
        tokenizer = self._tokenizer(model)
        return f"{token} ({tokenizer.decode([token])!r})" if tokenizer else str(token)

    def _read_new(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        paths = files(self._folder)
        self.has_rollouts = bool(paths)
        new = [path for path in paths if path not in self._read]
        while new:
            # The early level first, then the newest steps: the steps between take long in a long run.
            path = new.pop(0 if len(self._steps) < EARLY else -1)
            self._read.add(path)
            with suppress(UserError):  # such as a file just removed to make room
                self._steps += digest(path)
            if time.monotonic() > end:
                break
        self._steps.sort(key=attrgetter("step"))


def _rewards(config: Mapping[str, Any]) -> list[Any]:
    """Return the rewards that the configuration names for the run and for its data."""
    data = config.get("data") or {}
    parts = [data, *(data.get("sources") or ())]
    return [(config.get("reward") or {}).get("functions"), *(part.get("reward") for part in parts)]


def digest(path: Path) -> list[Digest]:
    """Return the digests of the steps in a file. Raises UserError if the file cannot be read."""
    with opened(path) as file:
        all_rows = _trained_rows(file.read(["step", "group", "prompt_index", "sample", "reward"]))
        some = range(file.parquet.num_row_groups)[:: _every(file.parquet)]
        rows_of_tokens = _trained_rows(file.read(["step", "group", "sample", "tokens", "versions"], some))
        rows_of_texts = _trained_rows(file.read(["step", "row", "completion", "reward", "reward_parts"], some))
    unanswered = _unanswered_by_step(rows_of_texts)
    about_tokens = _tokens_by_step(rows_of_tokens)
    digests = []
    for step, rows in groupby(all_rows.to_pylist(), key=itemgetter("step")):
        flat: Counter[float] = Counter()
        prompts, groups = [], 0
        for _, of_group in groupby(rows, key=itemgetter("group")):
            first, *remaining = of_group
            groups += 1
            if any(row["sample"] != first["sample"] for row in remaining) and not any(
                differ(row["reward"], first["reward"]) for row in remaining
            ):
                flat[first["reward"]] += 1
                prompts.append(first["prompt_index"])
        shares = {reward: n / groups for reward, n in flat.most_common()}
        tokens, copies = about_tokens.get(step, (None, None))
        digests.append(Digest(step, tokens, copies, shares, tuple(prompts[:PROMPTS]), unanswered.get(step)))
    return digests


def _unanswered_by_step(rows: pa.Table) -> dict[int, float]:
    """Return by step the share of rewarded samples without the row's answer, among rows with integer answers."""
    absences: dict[int, list[bool]] = defaultdict(list)
    for row in rows.to_pylist():
        integer = _INTEGER.fullmatch(str(json.loads(row["row"]).get("answer")))
        if integer and json.loads(row["reward_parts"]).get("math", row["reward"]) > 0:
            digits = integer[1].replace(",", "")
            text = _WITHIN_NUMBERS.sub("", row["completion"])
            absences[row["step"]].append(not re.search(rf"(?<![0-9]){digits}(?![0-9])", text))
    return {step: fmean(absent) for step, absent in absences.items()}


def _every(file: pq.ParquetFile) -> int:
    """Return n so that every n-th row group together has about TOKEN_BYTES of tokens."""
    columns = [i for i in range(len(file.schema)) if file.schema.column(i).path.split(".")[0] in ("tokens", "versions")]
    groups = [file.metadata.row_group(n) for n in range(file.num_row_groups)]
    return max(1, math.ceil(sum(g.column(i).total_uncompressed_size for g in groups for i in columns) / TOKEN_BYTES))


def _trained_rows(table: pa.Table) -> pa.Table:
    """Return the rows with a step, in the order of the steps; the rows of a group stay together."""
    rows = table.filter(pc.is_valid(table["step"]))
    return rows.take(pa.array(np.argsort(rows["step"].to_numpy(), kind="stable")))


def _tokens_by_step(rows: pa.Table) -> dict[int, tuple[dict[int, float], float | None]]:
    """Return by step the most frequent tokens with their shares, and the share of copies (None without a pair)."""
    by_step = {}
    places = zip(*(rows[name].to_pylist() for name in ("step", "group", "sample")), _sampled_tokens(rows), strict=True)
    for step, of_step in groupby(places, key=itemgetter(0)):
        tokens, samples, distinct = [], 0, 0
        for _, of_group in groupby(of_step, key=itemgetter(1)):
            answers = [np.concatenate([row[3] for row in parts]) for _, parts in groupby(of_group, key=itemgetter(2))]
            tokens += answers
            if len(answers) > 1:
                samples += len(answers)
                distinct += len({answer.tobytes() for answer in answers})
        ids, counts = np.unique(np.concatenate(tokens), return_counts=True)
        frequent = np.argsort(-counts)[:TOKENS_KEPT]
        shares = dict(zip(ids[frequent].tolist(), (counts[frequent] / max(1, counts.sum())).tolist(), strict=True))
        by_step[step] = shares, 1 - distinct / samples if samples else None
    return by_step


def _sampled_tokens(rows: pa.Table) -> Sequence[np.ndarray]:
    """Return the sampled tokens of each row."""
    lists = [rows[name].combine_chunks() for name in ("tokens", "versions")]
    tokens, versions = (column.flatten().to_numpy(zero_copy_only=False) for column in lists)
    ends = np.cumsum(pc.list_value_length(lists[0]).to_numpy(zero_copy_only=False), dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(versions != NOT_SAMPLED)])[np.concatenate([[0], ends])]
    sampled = tokens[versions != NOT_SAMPLED]
    return [sampled[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
