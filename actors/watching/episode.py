"""Shows an episode of a workflow as a tree: the prompt, the sampled tokens, the parsed answers, and the rewards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from areal.base.text import shown
from areal.extensions.agents.parsers import Parsed
from areal.rewards.functions import Result
from areal.samples.table import Generation
from areal.samples.trajectory import Branch, Trajectory, paths

# Longer texts are shown without their middle.
LONGEST, QUOTED = 2000, 60
# Tokens of the branch above, shown where a branch leaves it.
BEYOND = 16
# Words in the calls of most models, and rarely in other text.
_OF_CALLS = ("tool_call", "<function", "[TOOL_CALLS]", "<|python_tag|>", '"arguments"')

Decode = Callable[[np.ndarray], str]
"""The text of tokens, with special tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call. number: place among the answers, from 1. read: the answer for the agent, None if the workflow took the
    tokens unparsed. tools: tools were offered. reward: of the call alone, if any."""

    number: int
    sampled: Generation
    read: Parsed | None = None
    tools: bool = False
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class CompletionScore:
    """The score and the parts that a reward function gave a completion."""

    name: str
    completion: str
    result: Result


@dataclass(frozen=True, slots=True)
class Episode:
    """title: the tried agent and row. sample: None if nothing was sampled. turns: in the order of their tokens in
    `sample`. reward: of the sample, None after a failure. warnings: sentences on possible mistakes."""

    title: str
    sample: Trajectory | None
    turns: Sequence[Turn]
    reward: float | None
    scores: Sequence[CompletionScore]
    warnings: Sequence[str]


def show(episode: Episode, decode: Decode, parser: str, console: Console) -> None:
    """Print the episode. parser: the name of the parser of tool calls."""
    if episode.sample is not None:
        console.print(tree(episode.title, episode.sample, episode.turns, decode))
    console.print(Text("\n".join(_result(episode))))
    for warning in [*episode.warnings, *warnings(episode.turns, episode.sample, decode, parser)]:
        console.print(Text(f"! {shown(warning)}", style="yellow"))


def tree(title: str, sample: Trajectory, turns: Sequence[Turn], decode: Decode) -> Tree:
    """The sample's conversations and branches with their turns, in the order of the sample's tokens."""
    root, remaining = Tree(Text(shown(title), style="bold")), iter(turns)
    branches = sample.branches or (Branch(0, len(sample)),)
    every = [np.zeros(0, np.int64), *paths(branches)]
    start = 0
    for (parent, path), branch in zip(pairwise(every), branches, strict=True):
        calls, end = root.add(Text(_place(branch, sample.tokens[parent], decode), style="bold")), start + branch.new
        while start < end:
            turn = next(remaining)
            begin = start + int(sample.sampled[start:end].argmax())
            stop = begin + len(turn.sampled.tokens)
            if begin > start:
                text = Text(f"not sampled: {_tokens(begin - start)}\n")
                calls.add(text.append(_cut(decode(sample.tokens[start:begin])), style="dim"))
            credit = None if sample.returns is None else float(sample.returns[begin])
            calls.add(_turn(turn, credit, decode))
            start = stop
        assert len(path) == branch.shared + branch.new
    return root


def warnings(turns: Sequence[Turn], sample: Trajectory | None, decode: Decode, parser: str) -> list[str]:
    """Sentences on possible mistakes in the calls."""
    sentences = []
    if sample is not None and any(branch.shared for branch in sample.branches):
        sentences.append(
            "There are branches. If the agent only appends to its messages, it has changed what it was told: compare "
            "the beginnings of the branches."
        )
    for turn in sorted(turns, key=lambda turn: turn.number):
        if turn.sampled.finish == "length":
            sentences.append(
                f"Call {turn.number} was cut: by its own limit of tokens, sampling.max_new_tokens (of the whole "
                f"sample) or generator.max_model_len."
            )
        text = decode(turn.sampled.tokens)
        if turn.read is not None and not turn.read.calls and any(mark in text for mark in _OF_CALLS):
            why = f"rollout_manager.tool_call_parser={parser} reads none" if turn.tools else "no tools were offered"
            sentences.append(f"Call {turn.number} looks like a tool call, but {why}.")
    return sentences


def _place(branch: Branch, above: np.ndarray, decode: Decode) -> str:
    if not branch.shared:
        return f"conversation: {_tokens(branch.new)}"
    then = shown(decode(above[branch.shared :][:BEYOND]))
    return f"branch: {_tokens(branch.new)} after the first {branch.shared} of those above, which go on with {then!r}"


def _turn(turn: Turn, credit: float | None, decode: Decode) -> Text:
    sampled, read = turn.sampled, turn.read
    versions = sorted(set(sampled.versions.tolist()))
    of = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    facts = [f"call {turn.number}: {_tokens(len(sampled.tokens))} of {of}", f"finish {sampled.finish}"]
    facts += [] if turn.reward is None else [f"reward {turn.reward:g}"]
    facts += [] if credit is None else [f"credited with {credit:g}"]
    label = Text(f"{', '.join(facts)}\n", style="bold").append(_cut(decode(sampled.tokens)), style="not bold green")
    if read is None:
        return label
    parts = [f"reasoning: {_cut(read.reasoning)}"] if read.reasoning else []
    parts += [f"content: {_cut(read.content)}"] if read.content and (read.reasoning or read.calls) else []
    parts += [_cut(f"tool call: {c['function']['name']}({c['function']['arguments']})") for c in read.calls]
    parts += ["ended by a stop text"] if read.stopped else []
    return label.append("".join(f"\n{part}" for part in parts), style="not bold cyan")


def _result(episode: Episode) -> list[str]:
    by = [f"{s.name} {s.result.score:g} of {_cut(s.completion, QUOTED)!r}" for s in episode.scores]
    parts = [f"{s.name}/{part} {value:g}" for s in episode.scores for part, value in s.result.parts.items()]
    of_calls = [f"call {turn.number} {turn.reward:g}" for turn in episode.turns if turn.reward is not None]
    source = [f"scored: {', '.join([*by, *parts])}"] if by else []
    source += [f"rewards of calls: {', '.join(of_calls)}"] if of_calls else []
    lines = []
    if episode.reward is not None:
        lines.append(f"reward {episode.reward:g} ({'; '.join(source) or 'the workflow or its agent gave it'})")
    if episode.sample is not None:
        sampled = int(episode.sample.sampled.sum())
        lines.append(
            f"calls {len(episode.turns)}, branches {len(episode.sample.branches) or 1}, tokens {len(episode.sample)}, "
            f"of which {sampled} sampled"
        )
    return lines


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _cut(text: str, limit: int = LONGEST) -> str:
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    return shown(text)
