"""A session whose policy says what a test has written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.config.engine_sections import SamplingConfig
from areal.config.scoring import Credit, SandboxConfig
from areal.extensions.agents.parsers import Parsers
from areal.extensions.pictures.picture_files import part_of
from areal.extensions.pictures.vision import sight_of
from areal.extensions.programs.slots import Programs
from areal.extensions.sandboxes.sandbox_owner import Sandboxes
from areal.samples.table import Generation
from areal.samples.trajectory import Trajectory
from areal.workflows.forest import Forest

EOS = 0
END = "<end>"
CHATML = (
    "{% if tools %}<start>tools {{ tools | map(attribute='function') | map(attribute='name') | join }}<end>{% endif %}"
    "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, with a chat template."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<start>", END]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=["<start>", END])
    tokenizer.chat_template = CHATML
    return tokenizer


class Characters:
    """A tokenizer: a character is its code point; nothing ends a turn but EOS."""

    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if token != EOS)


class Recorded:
    """The part of a session that keeps all calls."""

    sampling = SamplingConfig(max_new_tokens=64)

    def __init__(self, credit: Credit = "sample", discount: float = 1.0) -> None:
        self.forest = Forest()
        self.agents: list[tuple[str, float | None]] = []
        self.shown: dict[str, Any] = {}
        self.sandboxes = Sandboxes("test", Programs(SandboxConfig()))
        self._credit = credit, discount

    def tool(self, name: str) -> Parsers:
        return {"parsers": Parsers(self.tokenizer)}[name]

    @property
    def calls(self) -> list[Generation]:
        return self.forest.calls

    def show(self, content: bytes) -> dict[str, Any]:
        part = part_of(content)
        return self.shown.setdefault(part["digest"], part)

    def reward(self, call: Generation, value: float) -> None:
        self.forest.reward(call, value)

    def credit(self, calls: Sequence[Generation], value: float | None, agent: str = "") -> None:
        for call in calls:
            self.forest.credit(call, value, agent)
        self.agents.append((agent, value))

    def trajectory(self, reward: float | None = None) -> Trajectory:
        return self.forest.trajectory(reward, *self._credit)


class Session(Recorded):
    """The policy says what the test has written down; a turn that ends in … is cut."""

    def __init__(self, *turns: str, scores: dict[str, float] | None = None, tokenizer=None, sandboxes=None) -> None:
        super().__init__()
        self.tokenizer = tokenizer or Characters()
        self.end = tokenizer.convert_tokens_to_ids(END) if tokenizer else EOS
        self.turns = list(turns)
        self.scores = scores or {}
        self.prompts: list[str] = []
        self.ran: list[str] = []
        self.sandboxes = sandboxes or self.sandboxes

    async def generate(self, tokens, max_new_tokens=None, keep=None, pictures=None) -> Generation:
        self.prompts.append(self.tokenizer.decode(tokens, skip_special_tokens=True))
        text = self.turns.pop(0)
        words = self.tokenizer.encode(text.rstrip("…"), add_special_tokens=False)
        words += [] if text.endswith("…") else [self.end]
        finish = "length" if text.endswith("…") else "stop"
        words = words[: keep and keep(np.array(words, np.int32))]
        n = len(words)
        versions = np.full(n, 7, np.int32)
        sampled = Generation(np.array(words, np.int32), np.zeros(n, np.float32), versions, finish)
        prompt = np.array(tokens, np.int32)
        seen = sight_of(self.tokenizer.name_or_path).column(prompt, pictures) if pictures else None
        self.forest.add(prompt, sampled, seen)
        return sampled

    async def score(self, completion: str, tokens=None) -> float:
        return self.scores.get(completion, 0.0)

    async def run_python(self, code: str) -> str:
        self.ran.append(code)
        return f"ran {len(code)}"
