"""Writes the rollouts of a run as a data set for TRL and other libraries; or the run's model, for the hub.

`sft`: rows of `prompt` and `completion`. `preference`: `prompt`, `chosen` and `rejected`. The values are texts, or, if
the run sampled a single answer to chat messages, lists of messages. Rollouts are read and rows are written in parts.
`model`: areal.extensions.desk.model_folder writes the model.
"""

import json
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCard, DatasetCardData

from areal.base.errors import UserError
from areal.config import Config
from areal.data.prompt_forms import prompt_or_none
from areal.data.prompt_sources import with_system
from areal.extensions.desk.model_folder import write_model
from areal.extensions.desk.pieces import pieces
from areal.models import label_of
from areal.samples.tokenizer import load_tokenizer
from areal.storage.record import Record
from areal.storage.selection import COLUMNS, RolloutSample, chosen, groups_of, pair, rollouts_in
from areal.weights.folders import atomic_folder

Format = Literal["sft", "preference"]
ROWS_AT_ONCE = 1024
DATA_FILE = "data/train-00000-of-00001.parquet"
CARD = str(Path(__file__).with_name("data_set_card.jinja"))
ChatPrompt = tuple[list[dict[str, str]], str]
_CONTENT = "content-sampled-6f1d8a"  # no template changes this text
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


@dataclass
class Export:
    """The numbers of written rows, of read groups and samples, and of samples left out, by cause."""

    rows: int = 0
    groups: int = 0
    samples: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        left_out = "".join(f"; {count} {cause} left out" for cause, count in self.left_out.items() if count)
        return f"{self.rows} rows, from {self.samples} samples in {self.groups} groups{left_out}"


def export(options: Namespace) -> None:
    """`areal export`: write chosen rollouts of a run to a .jsonl or .parquet file, or a folder with a card; or write
    the run's model to such a folder."""
    run, output, kind, best = options.folder, options.output, options.format, not options.all
    if output.exists():
        raise UserError(f"{output} already exists: name another file or folder to write.")
    if kind == "model":
        write_model(Record(run), output)
        print(output)
        return
    if options.all and kind == "preference":
        raise UserError("--all is for --format sft, because a pair is the best and the worst of a group: leave it out.")
    if output.suffix and output.suffix not in (".jsonl", ".parquet") and not output.suffix[1:].isdigit():
        raise UserError(f"--output {output} is no kind of file to write: end it in .jsonl or .parquet, or in none.")
    rollouts = rollouts_in(run)
    if rollouts is None:
        raise UserError(f"There are no rollouts in {run}: give the folder of a run that has kept some.")
    record = Record(rollouts.parent)
    config = record.configuration.load()
    texts = Texts(load_tokenizer(str([config.model, *record.checkpoints.folders][-1]), config.data), config)
    texts.chat = all(row["turns"] == 1 and not row["branch"] for row in record.rollouts.rows(["turns", "branch"])) and (
        texts.chat_prompt(next(record.rollouts.rows(["row", "prompt"]))) is not None
    )
    groups = groups_of(record.rollouts.rows([*COLUMNS, "row", "prompt", "turns", "tokens", "versions"]))
    counts, schema = Export(), _schema(kind, texts.chat)
    least = options.min_reward
    rows = (
        _pairs(groups, texts, counts, least) if kind == "preference" else _answers(groups, texts, counts, best, least)
    )
    if output.suffix in (".jsonl", ".parquet"):
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f".{output.name}.tmp")
        try:
            _write(rows, partial, schema, counts, lines=output.suffix == ".jsonl")
            os.replace(partial, output)
        finally:
            partial.unlink(missing_ok=True)
    else:
        with atomic_folder(output, durable=False) as folder:
            (folder / DATA_FILE).parent.mkdir()
            _write(rows, folder / DATA_FILE, schema, counts)
            _card(counts, config, kind, best).save(folder / "README.md")
    print(f"{output}: {counts}")


class Texts:
    """The texts of tokens, without the special tokens added by tokenizers and trainers at the beginning and at the end.
    chat: prompts and answers are lists of messages."""

    def __init__(self, tokenizer: Any, config: Config) -> None:
        self.chat = False
        self._tokenizer = tokenizer
        self._first: list[int] = tokenizer.encode("")
        self._special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._systems = dict.fromkeys(part.system_prompt for part in config.data.parts)
        self._chat_prompt = lru_cache(maxsize=16)(self._find)

    def prompt(self, row: dict[str, Any], start: int) -> Any:
        """Return the prompt before token `start`, or None if the chat template makes a different prompt of the row."""
        if self.chat:
            return (self.chat_prompt(row) or (None,))[0]
        tokens, first = row["tokens"][:start].tolist(), self._first
        return self._tokenizer.decode(tokens[len(first) :] if tokens[: len(first)] == first else tokens)

    def answer(self, row: dict[str, Any], start: int, end: int) -> Any:
        """Return the sampled tokens from `start` to `end` as a text or a message."""
        tokens = row["tokens"][start:end].tolist()
        text = self._tokenizer.decode(tokens[:-1] if tokens[-1] in self._special else tokens)
        chat_prompt = self.chat_prompt(row) if self.chat else None
        return [{"role": "assistant", "content": chat_prompt[1] + text}] if chat_prompt else text

    def chat_prompt(self, row: dict[str, Any]) -> ChatPrompt | None:
        """Return the messages from which the chat template made the prompt, and the template's beginning of the answer,
        such as <think>. None: the messages are not known."""
        return self._chat_prompt(row["row"], row["prompt"])

    def _find(self, fields: str, prompt: str) -> ChatPrompt | None:
        prompt_field = prompt_or_none(json.loads(fields).get("prompt"))
        if not self._tokenizer.chat_template or prompt_field is None:
            return None
        for system in self._systems:
            chat = with_system(prompt_field, system)
            if isinstance(chat, list):
                messages = [{"role": message["role"], "content": message["content"]} for message in chat]
                if prompt == self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False):
                    answered = [*messages, {"role": "assistant", "content": _CONTENT}]
                    shown = self._tokenizer.apply_chat_template(answered, tokenize=False).partition(_CONTENT)[0]
                    return messages, prompt[len(shown) :] if prompt.startswith(shown) else ""
        return None


def _answers(
    groups: Iterable[list[RolloutSample]], texts: Texts, counts: Export, best: bool, least: float | None
) -> Iterator[dict[str, Any]]:
    for group in _counted(groups, counts):
        for sample in chosen(group, best=best, least=least):
            for row in sample.rows:
                for start, end in _turns(row):
                    prompt = texts.prompt(row, start)
                    if prompt is None:
                        counts.left_out[_OTHER_PROMPT] += 1
                        continue
                    answer = texts.answer(row, start, end)
                    yield {"prompt": prompt, "completion": answer, "reward": sample.reward, "group": row["group"]}


def _pairs(
    groups: Iterable[list[RolloutSample]], texts: Texts, counts: Export, least: float | None
) -> Iterator[dict[str, Any]]:
    for group in _counted(groups, counts):
        single = [sample for sample in group if len(sample.rows) == sample.rows[0]["turns"] == 1]
        counts.left_out[_SEVERAL_TURNS] += len(group) - len(single)
        if not single or (samples := pair(single, least=least)) is None:
            continue
        rows = [sample.rows[0] for sample in samples]
        (start, _), _ = places = [next(_turns(row)) for row in rows]
        prompt = texts.prompt(rows[0], start)
        if prompt is None or rows[0]["prompt"] != rows[1]["prompt"]:
            counts.left_out[_OTHER_PROMPT] += len(rows)
            continue
        good, bad = (texts.answer(row, *place) for row, place in zip(rows, places, strict=True))
        scores = {"score_chosen": samples[0].reward, "score_rejected": samples[1].reward}
        yield {"prompt": prompt, "chosen": good, "rejected": bad, **scores, "group": rows[0]["group"]}


_SEVERAL_TURNS = "samples of several turns or branches"
_OTHER_PROMPT = "answers to a prompt that is not what the chat template makes of the row's messages"


def _counted(groups: Iterable[list[RolloutSample]], counts: Export) -> Iterator[list[RolloutSample]]:
    for group in groups:
        counts.groups += 1
        counts.samples += len(group)
        yield group


def _turns(row: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each piece of sampled tokens."""
    return ((start, end) for sampled, start, end in pieces(row["versions"]) if sampled)


def _schema(kind: Format, chat: bool) -> pa.Schema:
    text, number = _MESSAGES if chat else pa.string(), pa.float64()
    names = {"prompt": text, "completion": text, "reward": number, "group": pa.string()}
    if kind == "preference":
        names = {
            "prompt": text,
            "chosen": text,
            "rejected": text,
            "score_chosen": number,
            "score_rejected": number,
            "group": pa.string(),
        }
    return pa.schema(names)


def _write(
    rows: Iterable[dict[str, Any]], path: Path, schema: pa.Schema, counts: Export, *, lines: bool = False
) -> None:
    """Write the rows as lines of JSON, or as Parquet. Raises UserError if there are no rows."""
    with ExitStack() as opened:
        if lines:
            text = opened.enter_context(path.open("w", encoding="utf-8"))
        else:
            parquet = opened.enter_context(pq.ParquetWriter(path, schema, compression="zstd"))
        while some := list(islice(rows, ROWS_AT_ONCE)):
            counts.rows += len(some)
            if lines:
                text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in some)
            else:
                parquet.write_table(pa.Table.from_pylist(some, schema))
    if not counts.rows:
        raise UserError(
            f"None of the {counts.samples} samples was chosen, because of their rewards, or because they were cut at "
            f"the limit of tokens: give a lower --min-reward."
        )


def _card(counts: Export, config: Config, kind: Format, best: bool) -> DatasetCard:
    data = DatasetCardData(
        pretty_name=f"{config.name}, {kind}",
        task_categories=["text-generation"],
        tags=["reinforcement-learning", "trl", "areal-as-actors"],
        size_categories=_SIZES[len(str(counts.rows)) - 1],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": "data/*.parquet"}]}],
    )
    return DatasetCard.from_template(
        data,
        template_path=CARD,
        config=config,
        counts=counts,
        kind=kind,
        best=best,
        name_of=label_of,
        model=label_of(config.model),
        rewards=[label_of(reward) for reward in config.reward.functions],
        sources=[label_of(str(part.source)) for part in config.data.parts],
    )


_SIZES = ["n<1K"] * 3 + ["1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B"]
