"""Reads a sampled turn by vLLM's parsers: thinking, tool calls and the rest of the text.

Training thus reads a policy as vLLM's server does. `parser_choice.py` chooses the parser of calls. vLLM is imported for
the first turn that may have calls or thinking: the import takes six seconds and 400 MB, and few runs need it.
"""

import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from areal.base.errors import UserError
from areal.config.role_sections import AUTO_PARSER
from areal.extensions.agents.parser_choice import Marks, example_turns, fitting_parser, marks_of
from areal.samples.table import Generation
from areal.workflows.chat_templates import EXAMPLE_TOOL
from areal.workflows.tools import Tool, Tools

log = structlog.get_logger()

Json = dict[str, Any]
T = TypeVar("T")

# Some parsers take quadratic time: qwen3_xml takes 18 s for a policy that repeats the beginning of a call 800 times.
# The limit is CPU time, so that a busy machine does not change how a turn is read.
PARSE_SECONDS = 10.0
# Calls and returns of functions between two looks at the clock.
_CALLS = 256
# Loggers that write a traceback for every malformed call.
_LOUD = ("vllm.parser", "vllm.reasoning", "vllm.tool_parsers")
# The parsers of gpt-oss. The parsers read tokens, also in turns without tools: the text of such tokens makes no sense.
HARMONY, HARMONY_REASONING = "openai", "openai_gptoss"
# Marks in gpt-oss' chat template.
HARMONY_MARKS = ("<|channel|>", "<|call|>")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn as its agent gets it.

    content: the text without thinking and calls. reasoning: the thinking, or None. calls: tool calls in the form of
    OpenAI's API. stopped: whether a stop text ended the turn.
    """

    content: str
    reasoning: str | None
    calls: list[Json]
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of vLLM's parsers. special: the parser has to see the special tokens."""

    parser: Any
    special: bool


class Parsers(Tool):
    """Reads turns by the parsers of these names, the keys of vLLM's --tool-call-parser and --reasoning-parser.

    `tool_call_parser`: the name of the parser, chosen by `load` for `auto`. template_kwargs:
    `data.chat_template_kwargs`, from which some parsers learn whether the policy thinks.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_call_parser: str | None = AUTO_PARSER,
        reasoning_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if tool_call_parser == AUTO_PARSER and all(mark in str(tokenizer.chat_template) for mark in HARMONY_MARKS):
            tool_call_parser = HARMONY
        self._tokenizer = tokenizer
        self.tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self.template_kwargs = dict(template_kwargs or {})
        self._harmony = tool_call_parser == HARMONY or reasoning_parser == HARMONY_REASONING
        self._loading = threading.Lock()
        self._kinds: tuple[_Kind | None, _Kind | None] | None = None
        self._special_ids: frozenset[int] = frozenset()
        self._marks: Marks | None = None
        self._has_warned = False

    def load(self) -> None:
        """Import vLLM and choose its parsers, at the first call. Raises UserError if the tokenizer lacks a token, or if
        the parser of calls does not read the calls of the chat template."""
        with self._loading:
            if self._kinds is not None:
                return
            environment = dict(os.environ)
            try:
                self._kinds = self._chosen()
            except UserError:
                raise
            except Exception as error:  # each parser has its own
                cause = error.__cause__ if isinstance(error, TypeError) and error.__cause__ else error
                names = {"tool_call_parser": self.tool_call_parser, "reasoning_parser": self._reasoning_parser}
                named = " and ".join(f"rollout_manager.{key}={name}" for key, name in names.items() if name)
                reason = " ".join(str(cause).split()).rstrip(".!")
                raise UserError(f"vLLM cannot use {named} with this model: {reason}.") from None
            finally:  # vLLM sets variables that the programs of agents would inherit
                for name in os.environ.keys() - environment.keys():
                    del os.environ[name]
                os.environ.update(environment)

    def check(self, tools: list[Json] | None) -> None:
        """Load the parsers for turns with these tools. Raises UserError, and ValueError for tools of another form."""
        if self.reads(tools):
            self.load()
            _request(tools)

    def parse(
        self, sampled: Generation, tools: list[Json] | None, stops: Sequence[str] = (), taken: Collection[str] = ()
    ) -> Parsed:
        """Read the turn up to the first of `stops`. Without a call, with a malformed call, or if a limit cut the turn
        or a stop text a call, the turn has no calls, and the text of calls is content. taken: ids of earlier calls of
        the sample.

        May take a few times PARSE_SECONDS. Raises as `check`.
        """
        self.check(tools)
        text, stopped = self._text(sampled, stops, special=False)
        with_tools, without = self._kinds or (None, None)
        if tools and with_tools and not self._cuts_a_call(with_tools, sampled, stops):
            reasoning, content, raw_calls = self._tried(with_tools, sampled, tools, stops) or (None, "", ())
            if calls := _calls(raw_calls, taken):
                return Parsed((content or "").strip(), reasoning or None, calls, stopped)
        # Read again: parsers of calls drop text that they cannot read.
        if without:
            reasoning, content, _ = self._tried(without, sampled, None, stops) or (None, text, ())
            return Parsed(content or "", reasoning or None, [], stopped)
        return Parsed(text, None, [], stopped)

    def reads(self, tools: list[Json] | None) -> bool:
        """Return whether vLLM's parsers read turns with these tools. Parsers need the whole turn, and time."""
        return bool((tools and self.tool_call_parser) or self._reasoning_parser or self._harmony)

    def _chosen(self) -> tuple[_Kind | None, _Kind | None]:
        """Return the parser of turns with tools, and the parser of turns without. May raise anything."""
        from vllm.tokenizers.hf import get_cached_tokenizer

        for loud in _LOUD:
            logging.getLogger(loud).setLevel(logging.CRITICAL)
        # Every parser asks for the vocabulary, which takes transformers 0.1 s.
        self._tokenizer = get_cached_tokenizer(self._tokenizer)
        self._special_ids = frozenset(self._tokenizer.all_special_ids)

        name, reasoning = self.tool_call_parser, self._reasoning_parser
        with_tools = None if name in (None, AUTO_PARSER) else self._kind(name, reasoning)
        if name is not None and not self._harmony:
            turns = example_turns(name, self._tokenizer)
            self.tool_call_parser = fitting_parser(name, self._tokenizer, turns, _known_parsers(), self._read_by)
            with_tools = with_tools or self._kind(self.tool_call_parser, reasoning)
            if turns and with_tools:
                self._marks = marks_of(self._text(turns[0], (), special=with_tools.special)[0])
        return with_tools, with_tools if self._harmony else self._kind(None, reasoning)

    def _kind(self, name: str | None, reasoning: str | None) -> _Kind | None:
        """Return the parser of turns with these names; None without a name. May raise anything."""
        from vllm.parser import ParserManager

        parser = ParserManager.get_parser(
            name,
            reasoning,
            enable_auto_tools=name is not None,
            is_harmony=self._harmony,
            tokenizer=self._tokenizer,
        )
        if parser is None:
            return None
        request = _request([EXAMPLE_TOOL] if name else None)
        adjusted = self._make_parser(parser, request).adjust_request(request)
        return _Kind(parser, special=not adjusted.skip_special_tokens)

    def _read_by(self, name: str, turn: Generation) -> tuple[str, list[Json]]:
        """Return the text and the calls of a turn, by this parser of calls. May raise anything."""
        kind = self._kind(name, None)
        assert kind is not None
        _, content, raw_calls = self._parsed(kind, turn, [EXAMPLE_TOOL], ())
        return (content or "").strip(), _calls(raw_calls, ())

    def _cuts_a_call(self, kind: _Kind, sampled: Generation, stops: Sequence[str]) -> bool:
        """Return whether a limit ends the turn, or a stop text ends it within a call: parsers would take a part of a
        call for a whole call. Without known marks any call counts as cut, since the chat template writes no calls."""
        text, stopped = self._text(sampled, stops, special=kind.special)
        return sampled.finish == "length" or (stopped and not (self._marks and self._marks.are_closed(text)))

    def _make_parser(self, parser: Any, request: Any) -> Any:
        """Return a parser of a turn."""
        return parser(self._tokenizer, request.tools, chat_template_kwargs=self.template_kwargs)

    def _text(self, sampled: Generation, stops: Sequence[str], *, special: bool) -> tuple[str, bool]:
        """Return the text before the first of `stops`, and whether a stop was found. special: keep special tokens."""
        tokens = sampled.tokens
        if special and sampled.finish == "stop" and len(tokens) and int(tokens[-1]) in self._special_ids:
            tokens = tokens[:-1]
        return cut(self._tokenizer.decode(tokens, skip_special_tokens=not special), stops)

    def _tried(
        self, kind: _Kind, sampled: Generation, tools: list[Json] | None, stops: Sequence[str]
    ) -> tuple[str | None, str | None, Any] | None:
        """Parse as `_parsed` does. Return None if the parser fails on this turn; the first failure is logged."""
        try:
            return _within(PARSE_SECONDS, lambda: self._parsed(kind, sampled, tools, stops))
        except (_TooSlow, Exception) as error:  # a policy may write anything, and parsers raise anything
            if not self._has_warned:
                text = self._text(sampled, stops, special=kind.special)[0]
                log.warning("a parser fails on what the policy writes", error=repr(error), text=text[-200:])
            self._has_warned = True
            return None

    def _parsed(
        self, kind: _Kind, sampled: Generation, tools: list[Json] | None, stops: Sequence[str]
    ) -> tuple[str | None, str | None, Any]:
        """Return reasoning, content and calls, by vLLM. May raise anything."""
        request = _request(tools)
        text, _ = self._text(sampled, stops, special=kind.special)
        parser = self._make_parser(kind.parser, request)
        return parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=sampled.tokens.tolist())


def open_parsers(tools: Tools) -> Parsers:
    """Return the parsers in the configuration of the run."""
    names, data = tools.config.rollout_manager, tools.config.data
    return Parsers(tools.tokenizer, names.tool_call_parser, names.reasoning_parser, data.chat_template_kwargs)


def _known_parsers() -> list[str]:
    """Return the names of vLLM's parsers of calls that read text."""
    from vllm.tool_parsers import ToolParserManager

    return [name for name in ToolParserManager.list_registered() if name != HARMONY]


def _request(tools: list[Json] | None) -> Any:
    """Return a request with these tools as vLLM's parsers take it. Raises ValueError."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    try:
        return ChatCompletionRequest(messages=[], model="policy", tools=tools or None)
    except ValidationError as error:
        raise ValueError(first_mistake(error)) from None


def first_mistake(error: ValidationError, whole: str = "") -> str:
    """Return the first mistake in a value, after the path of its field, or after `whole` without a field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def _calls(raw_calls: Iterable[Any] | None, taken: Collection[str]) -> list[Json]:
    """Return the calls in the form of OpenAI's API, with unique ids; an empty list if any call is malformed."""
    ids, calls = set(taken), []
    for call in raw_calls or ():
        try:
            json.loads(call.arguments)
        except (ValueError, RecursionError):
            return []
        if not call.name:
            return []
        # Some models write ids of their calls, or want ids in a form that their parser knows.
        name = call.id if call.id and call.id not in ids else f"call_{token_hex(12)}"
        ids.add(name)
        calls.append({"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
    return calls


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether a stop string was found."""
    end = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    return (text, False) if end is None else (text[:end], True)


class _TooSlow(BaseException):
    """The CPU time is over. Not an Exception, since parsers catch Exceptions."""


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of the call. Raises _TooSlow when the call calls a function after this many CPU seconds."""
    until = time.thread_time() + seconds
    calls = itertools.count(1)

    def look(*_: Any) -> None:
        if next(calls) % _CALLS == 0 and time.thread_time() > until:
            raise _TooSlow(f"it takes more than {seconds:g} s")

    sys.setprofile(look)  # for this thread
    try:
        return call()
    finally:
        sys.setprofile(None)
