"""A conversation of several turns, as tokens. Sampled tokens are kept exactly as they were sampled.

Decoding tokens and encoding the text again need not give the same tokens. A chat template may also render an earlier
turn differently from the sampled turn (without thinking, or with white space cut). Therefore sampled turns are never
rendered. Between two sampled turns stand the tokens that the template writes *after* the assistant's content for the
messages in between.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from areal.data.rows import Prompt, prompt_text
from areal.samples.table import Generation, joined, unsampled
from areal.samples.trajectory import Trajectory
from areal.workflows.chat_templates import NO_TOOLS, ChatTemplate, Message, encoded_first

# Keys of a message that some agents send back unchanged, and other agents leave out.
THINKING = ("reasoning", "reasoning_content")


class Conversation:
    """The tokens of a sample. For each turn, call `prompt`, generate from the result, and `add` the sampled turn.

        tokens = conversation.prompt(messages)
        messages.append(conversation.add(await session.generate(tokens)))
        messages.append({"role": "user", "content": "Are you sure?"})
        tokens = conversation.prompt(messages)  # begins with all tokens so far

    tools: passed to the chat template. plain: no chat template, even if the tokenizer has a template; texts are joined
    unchanged. `messages`: all messages up to and including the last sampled turn. `generations`: the sampled turns.
    """

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None = None, *, plain: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._template = None if plain or not tokenizer.chat_template else ChatTemplate(tokenizer, tools)
        self._last_prompt: tuple[list[Message], list[int]] | None = None
        self._openings: list[list[int]] = []  # the unsampled tokens before each of `generations`
        self.messages: list[Message] = []
        self.generations: list[Generation] = []

    def copy(self) -> "Conversation":
        """Return an independent conversation that continues from here."""
        branch = Conversation(self._tokenizer, self._tools, plain=self._template is None)
        branch._openings, branch.messages = self._openings.copy(), self.messages.copy()
        branch.generations = self.generations.copy()
        return branch

    def __len__(self) -> int:
        """The number of tokens so far."""
        return sum(map(len, self._openings)) + sum(map(len, self.generations))

    def continues(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` begin with all messages so far, sampled turns included. The comparison ignores keys with
        the value None, thinking, and the split of a text into parts."""
        begin = messages[: len(self.messages)]
        return [compared(m) for m in begin] == [compared(m) for m in self.messages]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens to generate the next assistant turn from. A second call before `add` replaces the first.

        Raises ValueError if `messages` do not continue this conversation (a branch needs another Conversation), or if
        the chat template does not show a message.
        """
        if not self.continues(messages):
            raise ValueError("the messages do not begin with the messages of this conversation")
        new = self._between(messages[len(self.messages) :]) if self.messages else self._first(messages)
        self._last_prompt = list(messages), new
        turns = zip(self._openings, self.generations, strict=True)
        return [*chain.from_iterable([*opening, *turn.tokens.tolist()] for opening, turn in turns), *new]

    def add(self, sampled: Generation, message: Message | None = None) -> Message:
        """Add a turn sampled from the last `prompt`. Returns the assistant's message with the text of the turn.

        message: the turn as the other side sees it, if different from the text (for example with parsed tool calls);
        `continues` then compares with this message.
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
        """Return the tokens that the chat template writes after an answer to these messages, if nothing follows."""
        return [] if self._template is None else self._template.end(messages)

    def text(self, sampled: Generation) -> str:
        """Return the sampled text, without special tokens."""
        return decoded(self._tokenizer, sampled.tokens)

    def trajectory(self, reward: float) -> Trajectory:
        """Return all turns as a sample. Raises ValueError if nothing was sampled, or if the reward is no score."""
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
        """Return the tokens between the last sampled turn and the next turn."""
        if self._template is None:
            return self._tokenizer.encode(_plain_text(new), add_special_tokens=False)
        sampled = self.generations[-1]
        return self._template.between(self.messages, new, sampled.tokens.tolist(), sampled.finish == "stop")


def begin(
    tokenizer: Any, prompt: Prompt, tools: list[dict[str, Any]] | None = None
) -> tuple[Conversation, list[Message]]:
    """Return a new conversation and the first messages. The tokenizer's chat template, if any, renders messages. A
    prompt that is text is used unchanged, and so are all later messages. tools: tools of the row, for the template to
    show; calls of these tools get no answer."""
    return Conversation(tokenizer, tools, plain=isinstance(prompt, str)), messages_of(prompt)


def messages_of(prompt: Prompt) -> list[Message]:
    """Return the prompt as messages. A text becomes a message of the user."""
    return [user(prompt)] if isinstance(prompt, str) else list(prompt)


def user(text: str) -> Message:
    """Return a message to the policy, with the role user."""
    return {"role": "user", "content": text}


def decoded(tokenizer: Any, tokens: np.ndarray) -> str:
    """Return the text of tokens, without special tokens."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)  # transformers looks at each item of a list
    return text


def _plain_text(messages: Sequence[Message]) -> str:
    contents = [_content(message) for message in messages]
    if any(isinstance(content, list) for content in contents):
        raise ValueError("the model has no chat template, which pictures need: set data.chat_template")
    return prompt_text([{"content": content} for content in contents])


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Return a text, or parts if there is a picture. Clients of the OpenAI API send a turn of calls without content."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def compared(message: Message) -> Message:
    """Return the fields of a message that count in comparisons."""
    content = _content(message)
    fields = {key: value for key, value in message.items() if value is not None and key not in THINKING}
    if message.get("role") == "assistant" and isinstance(content, str):
        content = content.strip()  # many agents strip the policy's text
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = _plain_numbers(calls)
    return fields | {"content": content}


def _plain_numbers(value: Any) -> Any:
    """Return the value with whole numbers in a single form: JavaScript writes 60 where 60.0 was sampled."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_plain_numbers, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value
