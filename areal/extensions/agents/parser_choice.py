"""Chooses vLLM's parser for the calls that a model's chat template writes.

The template writes an example call, and the parsers read it back. If several can, the best leaves the least text beside
the call, since some parsers find a call between the marks of another model. Next comes Hermes' form, the most common,
then a parser named as the marks (`<seed:tool_call>`).
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from areal.base.errors import UserError, explain
from areal.config.role_sections import AUTO_PARSER
from areal.samples.table import Generation
from areal.workflows.chat_templates import EXAMPLE_ARGUMENTS, EXAMPLE_TOOL, ChatTemplate

# Fits any tokenizer.
HERMES = "hermes"
_EXAMPLE_NAME, _EXAMPLE_VALUE = EXAMPLE_TOOL["function"]["name"], EXAMPLE_ARGUMENTS["argument"]
# <tool_call>, [TOOL_CALLS]
_MARK = r"<[^<>\s]+>|\[[A-Z_]+\]"

Read = Callable[[str, Generation], tuple[str, list[dict[str, Any]]]]
"""Returns the text and the calls of a turn, read by the parser of this name. May raise anything."""


class Marks(NamedTuple):
    """The marks around a call in a turn: `begins` before the name of the tool, and `end` after the arguments."""

    begins: tuple[str, ...]
    end: str

    def are_closed(self, text: str) -> bool:
        """Return whether every call of the text has its end."""
        return text.rfind(self.end) > max(map(text.rfind, self.begins))


def marks_of(example: str) -> Marks | None:
    """Return the marks around an example call, or None without marks."""
    head, tail = example.partition(_EXAMPLE_NAME)[0], example.rpartition(_EXAMPLE_VALUE)[2]
    begins, end = re.findall(_MARK, head) or head.split()[:1], re.search(rf"({_MARK}|\S)\s*$", tail)
    return Marks(tuple(begins), end[1]) if begins and end else None


def example_turns(name: str, tokenizer: Any) -> list[Generation]:
    """Return turns with an example call as the policy would write it; an empty list if the chat template writes no
    calls. Raises UserError if the template refuses calls and no parser is named."""
    if not tokenizer.chat_template:
        return []
    refused = "{why}: set data.chat_template to a template that takes the calls of tools."
    with explain(ValueError, refused) if name == AUTO_PARSER else suppress(ValueError):
        return [*map(_turn, ChatTemplate(tokenizer, [EXAMPLE_TOOL]).example_calls())]
    return []


def fitting_parser(name: str, tokenizer: Any, turns: Sequence[Generation], names: Iterable[str], read: Read) -> str:
    """Return the parser for these turns of a model: `name`, or for `auto` the best of `names`. Without turns any parser
    fits. Raises UserError if the parser does not read the call of the turns."""
    if not turns:
        return HERMES if name == AUTO_PARSER else name
    written = tokenizer.decode(turns[0].tokens)
    order = sorted(names, key=lambda parser: (parser != HERMES, parser.partition("_")[0] not in written, parser))
    fitting, lacking = _fitting(order, turns, read)
    if name in fitting or (name != AUTO_PARSER and not fitting):
        return name
    calls = f"the calls that the model's chat template writes, such as {written!r:.200}"
    if name != AUTO_PARSER:
        raise UserError(
            f"rollout_manager.tool_call_parser={name} does not read {calls}: leave it out, or name "
            f"{' or '.join(fitting)}."
        )
    if not fitting:
        untried = f" ({' and '.join(lacking)} lack packages of their own)" if lacking else ""
        raise UserError(
            f"No parser of vLLM reads {calls}{untried}: set data.chat_template to a template whose calls one reads, or "
            f"rollout_manager.tool_call_parser if the policy writes its calls in another form."
        )
    return fitting[0]


def _fitting(names: Iterable[str], turns: Sequence[Generation], read: Read) -> tuple[list[str], list[str]]:
    """Return the parsers that read a turn, best first, and the parsers whose packages are not installed."""
    lengths: dict[str, int] = {}  # characters of text beside the call
    lacking: dict[str, bool] = {}
    for name, turn in product(names, turns):
        try:
            text, calls = read(name, turn)
        except Exception as error:  # a tokenizer may lack a parser's tokens, and parsers raise anything
            lacking |= {name: True} if isinstance(error.__cause__, ImportError) else {}
            continue
        if [_called(call) for call in calls] == [(EXAMPLE_TOOL["function"]["name"], EXAMPLE_ARGUMENTS)]:
            lengths[name] = min(len(text), lengths.get(name, len(text)))
    return sorted(lengths, key=lengths.__getitem__), [*lacking]


def _called(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def _turn(tokens: Sequence[int]) -> Generation:
    """Return a turn of these tokens, as if the policy had sampled them."""
    n = len(tokens)
    return Generation(np.array(tokens, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "stop")
