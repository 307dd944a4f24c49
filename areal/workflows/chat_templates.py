"""The text of a model's chat template before the first sampled turn, and between two sampled turns.

A template renders whole messages, but a sampled turn is kept unchanged. So the turns are rendered with a placeholder
for the sampled text, and the text after the last placeholder comes between the turns. A turn with calls is rendered
with its calls: some templates write results of tools only beside the calls, or name results by their place.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from areal.samples.pictures import find
from areal.samples.tokenizer import special_tokens, stop_tokens

Message = dict[str, Any]

# Placeholders for the sampled text, in the last turn and in earlier turns: no template changes them.
_LAST, _EARLIER = "content-sampled-6f1d8a", "content-earlier-6f1d8a"
EXAMPLE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"argument": {"type": "string", "description": "The word."}}},
    },
}
EXAMPLE_ARGUMENTS = {"argument": "value 8305"}
NO_TOOLS = "the model's chat template shows it no tools: choose a model whose template does"
# Marks that templates take out of messages, such as /no_think.
_MARK = re.compile(r"(?<!\S)/\w+(?!\S)")
# The most tokens that a template writes to end a turn.
_END_TOKENS = 256


class ChatTemplate:
    """The chat template of a tokenizer. tools: shown to the policy.

    The methods raise ValueError if the template does not show a message, and any error of the template.
    """

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._name = f"the chat template of {tokenizer.name_or_path}".removesuffix(" of ")
        self._in_parts = _in_parts(tokenizer, str(tokenizer.chat_template))

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the messages, and of the beginning of the assistant's turn."""
        text = self._render(messages)
        self._check_shown(messages, text)
        self._check_tools(messages, text)
        return list(encoded_first(self._tokenizer, text))

    def between(self, past: Sequence[Message], new: Sequence[Message], turn: Sequence[int], ended: bool) -> list[int]:
        """Return the tokens between the last message of `past`, which was sampled as `turn`, and the next turn, without
        end tokens that the policy has sampled itself. ended: whether the policy has ended the turn."""
        failure = ValueError("no turn was sampled")
        for form in _forms(past):
            try:
                return self._rest(form, new, turn, ended)
            except Exception as error:  # templates may raise anything, and may render another form
                failure = error  # type: ignore[assignment]
        raise failure

    def end(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the template writes after an answer to the messages, if nothing follows."""
        text = self._render([*messages, {"role": "assistant", "content": _LAST}], continues=False)
        return self._encode(self._after(text))

    def check(self) -> None:
        """Raises ValueError if the tokens between two turns differ from a rendering of the whole conversation. With
        tools, the first turn has two calls, or one call if the template refuses two."""
        failure = None
        for calls, arguments in itertools.product((2, 1), (dict, json.dumps)) if self._tools else [(0, dict)]:
            try:
                return self._check_example(*_example(self._tools, calls, arguments))
            except ValueError:
                raise
            except Exception as error:  # templates raise anything where they do not take a form
                failure = failure or error
        raise ValueError(f"{self._name} refuses such a conversation: {failure}")

    def example_calls(self) -> list[list[int]]:
        """Return a turn with a call of EXAMPLE_TOOL as the policy would sample it, in every form of the template; empty
        if the template shows no calls. Raises ValueError if the template refuses all forms."""
        turns, failure = {}, None
        for arguments, content in itertools.product((dict, json.dumps), ("", None)):
            question, turn, _ = _example([EXAMPLE_TOOL], 1, arguments)
            try:
                answered, start, end = self._answered(question, turn | {"content": content})
            except Exception as error:  # templates raise anything where they do not take a form
                failure = failure or error
                continue
            turns[self._tokenizer.decode(answered[start:end])] = answered[start:end]
        if failure and not turns:
            raise ValueError(f"{self._name} refuses a call: {failure}")
        said = EXAMPLE_TOOL["function"]["name"], EXAMPLE_ARGUMENTS["argument"]
        return [turn for text, turn in turns.items() if all(word in text for word in said)]

    def _answered(self, question: Message, turn: Message) -> tuple[list[int], int, int]:
        """Return the tokens of a question and a turn, and the places where the policy's own tokens begin and end. The
        end is the first token that ends a sequence or, without such a token, the last special token."""
        head = self._encode(self._render([question]))
        answered = self._encode(self._render([question, turn], continues=False))
        start = next((i for i, (a, b) in enumerate(zip(head, answered, strict=False)) if a != b), len(head))
        stops, special = (tokens(self._tokenizer) for tokens in (stop_tokens, special_tokens))
        ends = [i for i in range(start, len(answered)) if answered[i] in stops][:1]
        ends = ends or [i for i in range(start, len(answered)) if answered[i] in special]
        return answered, start, ends[-1] + 1 if ends else len(answered)

    def _check_example(self, question: Message, turn: Message, new: Sequence[Message]) -> None:
        answered, start, end = self._answered(question, turn)
        whole = self._encode(self._render([question, turn, *new]))
        written = self.between([question, turn], new, answered[start:end], ended=True)
        expected = whole[end:] if whole[:end] == answered[:end] else whole[-len(written) :]
        if written != expected:
            shown, needed = map(self._tokenizer.decode, (written, expected))
            raise ValueError(f"after a turn, {self._name} writes {needed!r}, of which a conversation has {shown!r}")

    def _rest(self, turns: Sequence[Message], new: Sequence[Message], turn: Sequence[int], ended: bool) -> list[int]:
        text, has_calls = self._render([*turns, *new]), "tool_calls" in turns[-1]
        if has_calls and _LAST not in text:  # no arguments are shown: the ending begins with the turn
            head = self._render(turns[:-1])
            text = text.replace(head, head + _LAST, 1) if text.startswith(head) else text
        tokens = self._encode(self._after(text))
        n = self._written(tokens, turn, ended, has_calls)
        if has_calls and not (ended and n):
            raise ValueError(f"{self._name} ends a turn with calls otherwise than the policy did")
        self._check_shown(new, self._tokenizer.decode(tokens[n:]))
        return tokens[n:]

    def _after(self, text: str) -> str:
        _, placeholder, ending = text.rpartition(_LAST)
        if not placeholder:
            raise ValueError(f"{self._name} does not show the assistant's last turn")
        return ending

    def _written(self, tokens: Sequence[int], turn: Sequence[int], ended: bool, has_calls: bool) -> int:
        """Return how many of `tokens`, which follow the placeholder, the turn itself ends with. Before this end stand
        white space and special tokens or, with calls, the end of arguments."""
        special = special_tokens(self._tokenizer)
        start = next((i for i, token in enumerate(tokens) if token in special), 0) if has_calls else 0
        while start < len(tokens) and (tokens[start] in special or not self._tokenizer.decode(tokens[start]).strip()):
            start += 1
        longest, written = 0, 0
        for end in range(1, min(len(tokens), start + _END_TOKENS) + 1):
            n = 0
            while n < min(end, len(turn)) and tokens[end - 1 - n] == turn[-1 - n]:
                n += 1
            if n > longest and end - n <= start:
                longest, written = n, end
        return written if ended or not special.isdisjoint(tokens[written - longest : written]) else 0

    def _check_shown(self, messages: Sequence[Message], shown: str) -> None:
        for message in messages:
            for text in _texts_of(message):
                if not _stands(text, shown):
                    raise ValueError(f"{self._name} does not show {text[:60]!r}, which the role {message['role']} says")

    def _check_tools(self, messages: Sequence[Message], shown: str) -> None:
        if not self._tools:
            return
        bare = ""
        with suppress(Exception):  # templates may raise anything where there are no tools
            bare = ChatTemplate(self._tokenizer)._render(messages)
        if shown == bare:
            raise ValueError(NO_TOOLS)
        for tool in self._tools:
            if tool["function"]["name"] not in shown:
                raise ValueError(f"{self._name} does not show the tool {tool['function']['name']}")

    def _render(self, messages: Sequence[Message], *, continues: bool = True) -> str:
        if self._in_parts:
            messages = [message | {"content": _parts(message.get("content"))} for message in messages]
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=self._tools, add_generation_prompt=continues, tokenize=False
        )
        pictures = parts_of(messages)
        if not pictures:
            return text
        sizes = [(picture["width"], picture["height"]) for picture in pictures]
        return str(find("sight")(self._tokenizer.name_or_path).expand(text, sizes))

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _example(tools: list[dict[str, Any]] | None, calls: int, arguments: Any) -> tuple[Message, Message, list[Message]]:
    """Return a question, a turn of the assistant and further messages. arguments: makes a call's arguments."""
    question = {"role": "user", "content": "Question 4071?"}
    if not tools:
        return (
            question,
            {"role": "assistant", "content": "Answer 5172."},
            [{"role": "user", "content": "Question 6283?"}],
        )
    function = {"name": tools[0]["function"]["name"], "arguments": arguments(EXAMPLE_ARGUMENTS)}
    requests = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(calls)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": f"Result {7394 + i}."}
        for i, call in enumerate(requests)
    ]
    return question, {"role": "assistant", "content": "", "tool_calls": requests}, results


def writes_calls(tokenizer: Any) -> bool:
    """Whether the chat template writes calls of tools, or refuses calls."""
    try:
        return bool(tokenizer.chat_template and ChatTemplate(tokenizer, [EXAMPLE_TOOL]).example_calls())
    except ValueError:
        return True


def _forms(past: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages with placeholders for sampled text: first with calls, whose arguments are an object or text,
    then without calls. Different templates need different forms."""
    has_calls = any(message.get("tool_calls") for message in past)
    for arguments in (dict, json.dumps, None) if has_calls else (None,):
        earlier = [_placed(message, _EARLIER, arguments) for message in past[:-1]]
        yield [*earlier, *(_placed(message, _LAST, arguments) for message in past[-1:])]


def _placed(message: Message, placeholder: str, arguments: Any) -> Message:
    """Return the message, with a placeholder if sampled. arguments: makes a call's arguments; None: no calls."""
    if message["role"] != "assistant":
        return message
    calls = message.get("tool_calls")
    if not calls or not arguments:
        return {"role": "assistant", "content": placeholder}
    shown = {"arguments": arguments({"argument": placeholder})}
    placed = [call | {"function": call["function"] | shown} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": placed}


def _texts_of(message: Message) -> Iterator[str]:
    """Yield texts of a message that must be shown: not thinking of earlier turns, nor text beside calls."""
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"]
    if not message.get("tool_calls"):
        content = message.get("content") or ""
        content = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        yield content.rpartition("</think>")[2] if message["role"] == "assistant" else content


def parts_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the parts of messages that are pictures, in order."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    return [part for content in contents for part in content if part.get("type") == "image"]


def _stands(text: str, shown: str) -> bool:
    """Whether `shown` contains the text: trimmed, as JSON, or all words of the text in order, in any case."""
    text, shown = text.strip().casefold(), shown.casefold()
    if text in shown or json.dumps(text)[1:-1] in shown:
        return True
    place, words = 0, re.findall(r"\w+", _MARK.sub("", text))
    for word in words:
        if (at := shown.find(word, place)) < 0:
            return False
        place = at + len(word)
    return bool(words) or not text


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content


@lru_cache(maxsize=64)
def _in_parts(tokenizer: Any, template: str) -> bool:
    """Whether the template shows content only as a list of parts. template: the text, as the key of the cache."""
    for content in (_LAST, _parts(_LAST)):
        try:
            shown = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except Exception:  # templates may raise anything, and the messages themselves will tell
            continue
        if _LAST in shown:  # and not as a part that is written out
            return content is not _LAST and str(_parts(_LAST)[0]) not in shown
    return False


@lru_cache(maxsize=64)
def encoded_first(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Encode a conversation's first text. Cached: all samples of a group begin with it, and it may be long."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def check_shown(tokenizer: Any, messages: Sequence[Message], tools: list[dict[str, Any]]) -> None:
    """Raises ValueError if the chat template does not show the policy the tools, or the results of calls."""
    if tokenizer.chat_template:
        ChatTemplate(tokenizer, tools).first(messages)
    elif tools:
        raise ValueError(NO_TOOLS)
    _check_results(tokenizer, str(tokenizer.chat_template), json.dumps(tools))


@lru_cache(maxsize=64)
def _check_results(tokenizer: Any, template: str, tools: str) -> None:
    """Check once for all samples with these tools, given as JSON."""
    ChatTemplate(tokenizer, json.loads(tools)).check()
