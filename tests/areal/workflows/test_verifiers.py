"""Environments of the verifiers library (0.1), where that is installed."""

from __future__ import annotations

import importlib.util
import signal
import sys
import types

import pytest
from scripted_policy import Session, byte_tokenizer

from areal.config import DataConfig, UserError
from areal.data import verifiers_tasks
from areal.data.sources import open_source
from areal.workflows.builtin import resolve_workflow

is_installed = importlib.util.find_spec("verifiers") is not None
installed = pytest.mark.skipif(not is_installed or verifiers_tasks.has_tasks(), reason="verifiers 0.1 is not installed")


@pytest.mark.skipif(is_installed, reason="verifiers is installed")
def test_without_the_library_the_user_is_told_how_to_install_it():
    with pytest.raises(UserError, match="pip install 'verifiers"):
        open_source(DataConfig(source="verifiers:echo-twice"), seed=0)


@pytest.fixture
def echo_twice(monkeypatch):
    """An environment that wants the word of its row said in two turns."""
    import verifiers
    from datasets import Dataset

    class EchoTwice(verifiers.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "again"}]

    async def said(completion, answer) -> float:
        return sum(message["content"] == answer for message in completion if message["role"] == "assistant") / 2

    def load_environment(count: int = 4):
        rows = [{"question": f"say {i}", "answer": str(i)} for i in range(count)]
        return EchoTwice(max_turns=2, dataset=Dataset.from_list(rows), rubric=verifiers.Rubric(funcs=[said]))

    monkeypatch.setitem(sys.modules, "echo_twice", types.SimpleNamespace(load_environment=load_environment))


@installed
async def test_an_environment_plays_with_the_policy_and_scores_by_its_own_rubric(echo_twice):
    handlers_before = signal.getsignal(signal.SIGTERM)
    source = open_source(DataConfig(source="verifiers:echo-twice", options={"count": 6}, eval_size=2), seed=0)
    row = source.row(0)
    session = Session(row.answer, "no")
    outcome = await resolve_workflow("verifiers", {})(session, row)
    assert session.prompts == [f"say {row.answer}", f"say {row.answer}{row.answer}again"]
    assert (outcome.reward, int(outcome.sampled.sum())) == (0.5, 5)
    assert signal.getsignal(signal.SIGTERM) is handlers_before


@pytest.fixture
def shop(monkeypatch):
    """An environment with a tool: the policy has to ask for the price and to tell it."""
    import verifiers
    from datasets import Dataset

    def price(fruit: str) -> int:
        """The price of a fruit."""
        return {"fig": 7}[fruit]

    async def told(completion) -> float:
        return float(completion[-1]["content"] == "7")

    def load_environment():
        rows = Dataset.from_list([{"question": "How much is a fig?"}])
        return verifiers.ToolEnv(tools=[price], max_turns=4, dataset=rows, rubric=verifiers.Rubric(funcs=[told]))

    monkeypatch.setitem(sys.modules, "shop", types.SimpleNamespace(load_environment=load_environment))


@installed
async def test_the_policy_calls_the_tools_of_an_environment_and_is_told_their_errors(shop):
    row = open_source(DataConfig(source="verifiers:shop", eval_size=0), seed=0).row(0)
    calls = [
        f'<tool_call>{{"name": "price", "arguments": {{"fruit": "{fruit}"}}}}</tool_call>' for fruit in ("x", "fig")
    ]
    session = Session(f"Let me see. {calls[0]}", calls[1], "7", tokenizer=byte_tokenizer())
    outcome = await resolve_workflow("verifiers", {})(session, row)
    assert session.prompts[0] == "tools priceuser How much is a fig?assistant "
    assert session.prompts[1].endswith("</tool_call>tool 'x'assistant ")
    assert session.prompts[2].endswith("</tool_call>tool 7assistant ")
    assert outcome.reward == 1.0
    assert session.tokenizer.decode(outcome.tokens[outcome.sampled]).count("<end>") == 3


@installed
async def test_a_tokenizer_whose_template_shows_no_tools_is_refused(shop):
    row = open_source(DataConfig(source="verifiers:shop", eval_size=0), seed=0).row(0)
    with pytest.raises(ValueError, match="shows it no tools"):
        await resolve_workflow("verifiers", {})(Session("7"), row)


@installed
async def test_an_environment_that_fails_is_no_score(echo_twice):
    source = open_source(DataConfig(source="verifiers:echo-twice", options={"count": 3}, eval_size=0), seed=0)
    with pytest.raises(IndexError):
        await resolve_workflow("verifiers", {})(Session(), source.row(0))


@pytest.mark.skipif(not is_installed, reason="verifiers is not installed")
def test_an_environment_that_does_not_load_is_a_mistake_of_the_users():
    with pytest.raises(UserError, match="does not load"):
        open_source(DataConfig(source="verifiers:no-such-thing"), seed=0)
