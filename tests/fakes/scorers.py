"""Scorers without a run around them, a reward model, and a judge whose verdicts are known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from zlib import crc32

import numpy as np
from support.networks import network

from actors.runtime.bound_addresses import ListenAddress
from actors.runtime.membership import Membership
from actors.scorer.scorer import Scorer
from areal.config import Config
from areal.samples.trajectory import TokenScores
from protocols.bus import Bus
from protocols.messages import Completion

TEMPLATE = "{% for m in messages %}{{ {'user': 0, 'assistant': 1, 'system': 2}[m.role] }}{{ m.content }}={% endfor %}"
"""The chat template of the reward model, in the alphabet of the quickstart's model."""
Asked = tuple[str, str, Mapping[str, Any]]
"""A prompt, a completion and their row."""


def write_classifier(folder: Path, model: Path) -> None:
    """A tiny classifier with three outputs and a chat template of its own. model: has its tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = json.loads((model / "config.json").read_text())
    config = Qwen3Config(
        **{name: sizes[name] for name in ("vocab_size", "max_position_embeddings")},
        hidden_size=64,
        head_dim=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=3,
        initializer_range=0.3,
        pad_token_id=0,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)


def write_brief(folder: Path, model: Path, ends: str = "0123456789") -> None:
    """A copy of a model that ends what it writes with the first of these characters."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokens = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids([*ends])
    for file in folder / "config.json", folder / "generation_config.json":
        values = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(values | {"eos_token_id": tokens}))


@contextlib.asynccontextmanager
async def scorer_of(config: Config, name: str) -> Any:
    """A scorer of this name, with its engine, that no run disturbs."""
    bus, listen_address = Bus("scorer/0#1", network()), ListenAddress("127.0.0.1", "127.0.0.1")
    member = Membership(Scorer, bus, "tcp://127.0.0.1:1", 0, listen_address)
    member.config = config
    async with member.used:
        yield await Scorer.start(member, name=name)


async def scores_of(actor: Scorer, questions: Sequence[Asked], reward: str = "") -> list[tuple[float, float]]:
    """The scores that a scorer gives for a reward, by default one of its own name, and the numbers of tokens that it
    read, by the code that a flow calls."""
    added: list[Any] = []
    jobs = [
        actor.score_completions(
            f"{job}",
            Completion(job=job, function=reward or actor._name, prompt=prompt, completions=(completion,), row=0),
            row,
            added.append,
        )
        for job, (prompt, completion, row) in enumerate(questions)
    ]
    await asyncio.gather(*jobs)
    added.sort(key=lambda scored: scored.job)
    return [(*scored.scores, scored.parts[0]["tokens"]) for scored in added]


async def token_scores_of(actor: Scorer, rows: Sequence[np.ndarray]) -> list[TokenScores]:
    """What a scorer gives rows of tokens, likewise."""
    added: list[Any] = []
    await asyncio.gather(*(actor._score(f"{job}", job, row.tolist(), added.append) for job, row in enumerate(rows)))
    return [row.scores for row in sorted(added, key=lambda row: row.job)]


def verdict(text: str) -> float:
    """What the judge thinks of a text."""
    return crc32(text.encode()) % 11 / 10


@contextlib.contextmanager
def judging() -> Iterator[str]:
    """The address of a judge."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = f"{10 * verdict(asked['messages'][0]['content']):g}"
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            body = json.dumps(answer | {"usage": None}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
