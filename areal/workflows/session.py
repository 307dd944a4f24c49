"""A session: what a workflow may use for one sample."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from areal.trajectory import Tokens
from areal.workflows.conversation import Policy
from areal.workflows.openai_api import Access


class Session(Policy, Protocol):
    """What a workflow may use for one sample. If the actor that serves a call is lost, another one takes it over."""

    async def score(self, completion: str, tokens: Tokens | None = None) -> float:
        """The weighted sum of the row's rewards on this completion; `tokens` are for rewards that take them."""

    async def run_python(self, code: str) -> str:
        """Runs code in a sandbox. Returns its output, errors included."""

    def endpoint(self) -> AbstractAsyncContextManager[Access]:
        """An endpoint for agents that samples in this session, open until the end of the block."""
