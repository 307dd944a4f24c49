"""A conversation of several turns, as tokens. Sampled tokens are kept exactly as they were sampled.

Decoding tokens and encoding the text again need not give the same tokens. A chat template may also render an earlier
turn differently from how it was sampled (without its thinking, or with white space cut). Therefore sampled turns are
never rendered. The tokens between two sampled turns are what the template writes *after* the assistant's content for
the messages that came in between.
"""

import bisect
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from areal.data.rows import Prompt, prompt_text
from areal.samples.table import Generation, joined, unsampled
from areal.samples.trajectory import Trajectory
from areal.workflows.chat_templates import NO_TOOLS, ChatTemplate, Message, encoded_first

# Keys of a message that some agents send back as they got them, and others leave out.
THINKING = ("reasoning", "reasoning_content")
# Tokens that are decoded again together with new ones: the text of a token may depend on those before it.
OVERLAP_TOKENS = 8
# The most tokens that a character takes.
CHARACTER_TOKENS = 4
# What a decoder writes for a character of which it has not all bytes yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


Keep = Callable[[np.ndarray], int | None]
"""Gets all tokens sampled so far. Returns None to continue, or how many of these tokens to keep and end with."""


class Conversation:
    """The tokens of one sample. For each turn, call `prompt`, generate from its result, and `add` what was sampled.

        tokens = conversation.prompt(messages)
        messages.append(conversation.add(await session.generate(tokens)))
        messages.append({"role": "user", "content": "Are you sure?"})
        tokens = conversation.prompt(messages)  # begins with all tokens so far

    tools: passed to the chat template. plain: no chat template, even if the tokenizer has one; texts are joined as they
    are. `messages`: all messages up to the last sampled turn, that one included. `generations`: the sampled turns.
    """

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None = None, *, plain: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._template = None if plain or not tokenizer.chat_template else ChatTemplate(tokenizer, tools)
        self._last_prompt: tuple[list[Message], list[int]] | None = None
        self._openings: list[list[int]] = []  # the tokens before each of `generations` that were not sampled
        self.messages: list[Message] = []
        self.generations: list[Generation] = []

    def copy(self) -> "Conversation":
        """A conversation that goes on from here by itself."""
        branch = Conversation(self._tokenizer, self._tools, plain=self._template is None)
        branch._openings, branch.messages = self._openings.copy(), self.messages.copy()
        branch.generations = self.generations.copy()
        return branch

    def __len__(self) -> int:
        """The number of tokens so far."""
        return sum(map(len, self._openings)) + sum(map(len, self.generations))

    def continues(self, messages: Sequence[Message]) -> bool:
        """True if `messages` begin with all messages so far, sampled turns included. Keys whose value is None are
        ignored, and so are thinking, and whether a text comes whole or in parts."""
        begin = messages[: len(self.messages)]
        return [compared(m) for m in begin] == [compared(m) for m in self.messages]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens to generate the next assistant turn from. A second call before `add` replaces the first.

        Raises ValueError if `messages` do not continue this conversation (a branch needs another Conversation), or if
        the chat template does not show one of them.
        """
        if not self.continues(messages):
            raise ValueError("the messages do not begin with those of this conversation")
        new = self._between(messages[len(self.messages) :]) if self.messages else self._first(messages)
        self._last_prompt = list(messages), new
        turns = zip(self._openings, self.generations, strict=True)
        return [*chain.from_iterable([*opening, *turn.tokens.tolist()] for opening, turn in turns), *new]

    def add(self, sampled: Generation, message: Message | None = None) -> Message:
        """Add what was sampled from the last `prompt`. Returns the assistant's message with its text.

        message: the turn as the other side sees it, if that differs from the text (for example with tool calls parsed
        from it); `continues` then compares with this message.
        """
        if self._last_prompt is None:
            raise ValueError("nothing was asked that this could answer: call prompt first")
        messages, new = self._last_prompt
        self._last_prompt = None
        message = message or {"role": "assistant", "content": self.text(sampled)}
        self._openings.append(new)
        self.generations.append(sampled)
        self.messages = [*messages, message]
        return message

    def end(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that the chat template writes after an answer to these messages, if nothing follows."""
        return [] if self._template is None else self._template.end(messages)

    def text(self, sampled: Generation) -> str:
        """The sampled text, without special tokens."""
        return _decoded(self._tokenizer, sampled.tokens)

    def trajectory(self, reward: float) -> Trajectory:
        """All turns as one sample to train on. Raises ValueError if nothing was sampled, or the reward is no score."""
        if not any(map(len, self.generations)):
            raise ValueError("nothing was sampled")
        turns = zip(map(unsampled, self._openings), self.generations, strict=True)
        finish = self.generations[-1].finish or "length"
        return Trajectory(**joined(chain.from_iterable(turns)), reward=reward, finish=finish, branches=())

    def _first(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            if self._tools:
                raise ValueError(NO_TOOLS)
            return list(encoded_first(self._tokenizer, _plain_text(messages)))
        return self._template.first(messages)

    def _between(self, new: Sequence[Message]) -> list[int]:
        """The tokens between the last sampled turn and the next one."""
        if self._template is None:
            return self._tokenizer.encode(_plain_text(new), add_special_tokens=False)
        sampled = self.generations[-1]
        return self._template.between(self.messages, new, sampled.tokens.tolist(), sampled.finish == "stop")


def begin(
    tokenizer: Any, prompt: Prompt, tools: list[dict[str, Any]] | None = None
) -> tuple[Conversation, list[Message]]:
    """A new conversation and its first messages. Messages are rendered by the tokenizer's chat template, if it has one.
    If the prompt is text, it is used as it is, and so are all later messages. tools: of the row, which the template
    shows; nobody answers calls of them."""
    return Conversation(tokenizer, tools, plain=isinstance(prompt, str)), messages_of(prompt)


def messages_of(prompt: Prompt) -> list[Message]:
    """The prompt as messages. A text is one of the user."""
    return [user(prompt)] if isinstance(prompt, str) else list(prompt)


def check_shown(tokenizer: Any, messages: Sequence[Message], tools: list[dict[str, Any]]) -> None:
    """Raises ValueError if the chat template does not show the tools to the policy, or not the results of calls."""
    Conversation(tokenizer, tools).prompt(messages)
    _check_results(tokenizer, str(tokenizer.chat_template), json.dumps(tools))


@lru_cache(maxsize=64)
def _check_results(tokenizer: Any, template: str, tools: str) -> None:
    """Once for all samples with these tools, which are JSON."""
    ChatTemplate(tokenizer, json.loads(tools)).check()


def user(text: str) -> Message:
    """A message to the policy, with the role user."""
    return {"role": "user", "content": text}


def keep_until(tokenizer: Any, marks: Sequence[str], holds: Callable[[str], bool]) -> Keep:
    """A `Keep` that ends a turn after the fewest tokens whose text satisfies `holds`.

    If `holds` is true of a text, it must be true of every text that begins with it, and it can become true only where
    one of `marks` ends. So only new text is decoded and searched for these, and `holds` is asked when one is found. It
    has to be fast: a policy may write nothing but marks.
    """
    grown = GrownText(tokenizer)

    def keep(tokens: np.ndarray) -> int | None:
        old_length = grown.add(tokens)
        if not any(grown.text.find(mark, max(0, old_length - len(mark) + 1)) >= 0 for mark in marks):
            return None
        if not holds(grown.text) or not holds(_decoded(tokenizer, tokens)):
            return None
        return bisect.bisect_left(range(len(tokens)), True, key=lambda n: holds(_decoded(tokenizer, tokens[:n])))

    return keep


def keep_until_text(tokenizer: Any, texts: Sequence[str]) -> Keep:
    """A `Keep` that ends a turn after the fewest tokens whose text has one of `texts` in it."""
    return keep_until(tokenizer, texts, lambda text: any(stop in text for stop in texts))


def first_of(first: Keep | None, second: Keep) -> Keep:
    """A `Keep` that ends a turn where the first of two does."""
    if first is None:
        return second
    return lambda tokens: min((end for keep in (first, second) if (end := keep(tokens)) is not None), default=None)


class GrownText:
    """The text of a turn, decoded as its tokens come."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._settled = 0  # so many tokens are in the text

    def add(self, tokens: np.ndarray) -> int:
        """Add what is new in `tokens`, which are all of the turn; fewer tokens than before begin another turn. Returns
        how long the text was before. The tokens of an incomplete character at the end are left for the next call."""
        if len(tokens) < self._settled:
            self.text, self._settled = "", 0
        old_length = len(self.text)
        start = max(0, self._settled - OVERLAP_TOKENS)
        overlap = _decoded(self._tokenizer, tokens[start : self._settled])
        ends = range(len(tokens), max(self._settled, len(tokens) - CHARACTER_TOKENS), -1)
        for end in ends:
            window = _decoded(self._tokenizer, tokens[start:end])
            if not window.endswith(_INCOMPLETE):
                break
        else:
            if len(ends) < CHARACTER_TOKENS:
                return old_length
            end, window = len(tokens), _decoded(self._tokenizer, tokens[start:])  # this is no character at all
        self.text += window[len(overlap) :]
        self._settled = end
        return old_length


def _decoded(tokenizer: Any, tokens: np.ndarray) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)  # transformers looks at each item of a list
    return text


def _plain_text(messages: Sequence[Message]) -> str:
    contents = [_content(message) for message in messages]
    if any(isinstance(content, list) for content in contents):
        raise ValueError("the model has no chat template, which pictures need: set data.chat_template")
    return prompt_text([{"content": content} for content in contents])


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Text; or parts, if there is a picture among them. Clients of the OpenAI API send a turn of calls without any."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def compared(message: Message) -> Message:
    """What of a message counts when messages are compared."""
    content = _content(message)
    fields = {key: value for key, value in message.items() if value is not None and key not in THINKING}
    if message.get("role") == "assistant" and isinstance(content, str):
        content = content.strip()  # many agents strip what the policy said
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = _plain_numbers(calls)
    return fields | {"content": content}


def _plain_numbers(value: Any) -> Any:
    """The value with whole numbers in one form: JavaScript writes 60 where 60.0 was sampled."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_plain_numbers, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value
