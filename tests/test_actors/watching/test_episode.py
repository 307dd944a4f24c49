"""What `areal agent try` shows of an episode."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from actors.watching.episode import LONGEST, CompletionScore, Episode, Turn, show
from areal.extensions.agents.parsers import Parsed
from areal.rewards.functions import Result
from areal.samples.table import Generation
from areal.workflows.forest import Forest

CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}
NOTHING = Parsed("", None, [], stopped=False)


def tokens(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


def decode(of: np.ndarray) -> str:
    return "".join(map(chr, of))


def said(text: str, version: int = 0, finish: str = "stop") -> Generation:
    n = len(text)
    return Generation(tokens(text), np.zeros(n, np.float32), np.full(n, version, np.int32), finish)


def printed(
    *calls: tuple[str, Generation], reads=(), rewards=(), tools=False, credit="sample", scores=(), warnings=()
) -> str:
    """What is shown of a sample with these calls: prompt and answer."""
    forest = Forest()
    for prompt, sampled in calls:
        forest.add(tokens(prompt), sampled)
    for number, value in rewards:
        forest.reward(forest.calls[number], value)
    turns = [
        Turn(n + 1, forest.calls[n], reads[n] if reads else None, tools, forest.rewards.get(n)) for n in forest.places()
    ]
    trajectory = forest.trajectory(0.0, credit, 1.0)
    episode = Episode("mine", trajectory, turns, trajectory.reward, scores, warnings)
    show(episode, decode, "hermes", Console(file=(out := io.StringIO()), width=200))
    return out.getvalue()


def test_a_conversation_is_shown_turn_by_turn_with_versions_and_parsed_calls():
    read = Parsed("Let me add", "hm", [CALL], stopped=False)
    out = printed(("<user>2+2", said("<call>", version=3)), ("<user>2+2<call>=4", said("4.")), reads=[read, NOTHING])
    expected = [
        "conversation: 19 tokens",
        "not sampled: 9 tokens",
        "<user>2+2",
        "call 1: 6 tokens of version 3, finish stop",
        "<call>",
        "reasoning: hm",
        "content: Let me add",
        'tool call: add({"a": 1})',
        "not sampled: 2 tokens",
        "=4",
        "call 2: 2 tokens of version 0, finish stop",
        "4.",
        "calls 2, branches 1, tokens 19, of which 8 sampled",
    ]
    places = [out.index(text) for text in expected]
    assert places == sorted(places) and "!" not in out


def test_a_branch_says_where_it_leaves_what_is_above_it():
    out = printed(("abc", said("de")), ("abcdx", said("y")), ("zz", said("z")))
    assert "branch: 2 tokens after the first 4 of those above, which go on with 'e'" in out
    assert out.count("conversation: ") == 2
    assert "! There are branches." in out
    assert "There are branches" not in printed(("ab", said("c")), ("xy", said("z")))  # two agents, say


def test_rewards_and_credits_of_calls_are_shown_with_the_scores():
    score = CompletionScore("mine.py:judge", "4", Result(0.5, {"form": 1.0}))
    calls = ("a", said("b")), ("ab", said("c"))
    out = printed(*calls, rewards=[(0, 0.25), (1, 1.0)], credit="call", scores=[score])
    assert "finish stop, reward 0.25, credited with 0.25" in out and "reward 1, credited with 1\n" in out
    assert "reward 1.25 (scored: mine.py:judge 0.5 of '4', mine.py:judge/form 1; rewards of calls:" in out


def test_what_may_be_wrong_with_a_call_is_a_warning():
    text = '<tool_call>{"name": "add"}'
    assert "Call 1 looks like a tool call, but rollout_manager.tool_call_parser=hermes reads none." in printed(
        ("a", said(text)), reads=[NOTHING], tools=True
    )
    assert "Call 1 looks like a tool call, but no tools were offered." in printed(("a", said(text)), reads=[NOTHING])
    assert "! Call 1 was cut" in printed(("a", said("b", finish="length")))
    assert "! The endpoint" in printed(("a", said("b")), warnings=["The endpoint refused a request: ..."])


def test_long_texts_lose_their_middle_and_none_steers_the_terminal_or_is_markup():
    out = printed(("a" * LONGEST + "b", said("[bold]\x1b[31m[/bold]")))
    assert "… 1 characters …" in out
    assert "[bold]\\x1b[31m[/bold]" in out
