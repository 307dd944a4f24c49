"""Ends of turns: a turn of the policy may end before the policy ends it, for example at a text."""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areal.workflows.conversation import decoded

# Tokens that are decoded again together with new tokens: the text of a token may depend on the tokens before.
OVERLAP_TOKENS = 8
# The most tokens of a character.
CHARACTER_TOKENS = 4
# The text that a decoder writes for a character with missing bytes.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Keep = Callable[[np.ndarray], int | None]
"""Gets all tokens sampled so far. Returns None to continue, or the number of tokens to keep and to end with."""


def keep_until(tokenizer: Any, marks: Sequence[str], holds: Callable[[str], bool]) -> Keep:
    """Return a `Keep` that ends a turn after the fewest tokens whose text satisfies `holds`.

    If `holds` is true of a text, `holds` must be true of every longer text with this beginning, and can become true
    only where one of `marks` ends. So only new text is decoded and searched for marks, and `holds` is called after a
    mark. `holds` has to be fast: a policy may write nothing but marks.
    """
    grown = GrownText(tokenizer)

    def keep(tokens: np.ndarray) -> int | None:
        old_length = grown.add(tokens)
        if not any(grown.text.find(mark, max(0, old_length - len(mark) + 1)) >= 0 for mark in marks):
            return None
        if not holds(grown.text) or not holds(decoded(tokenizer, tokens)):
            return None
        return bisect.bisect_left(range(len(tokens)), True, key=lambda n: holds(decoded(tokenizer, tokens[:n])))

    return keep


def keep_until_text(tokenizer: Any, texts: Sequence[str]) -> Keep:
    """Return a `Keep` that ends a turn after the fewest tokens whose text contains any of `texts`."""
    return keep_until(tokenizer, texts, lambda text: any(stop in text for stop in texts))


def first_of(first: Keep | None, second: Keep) -> Keep:
    """Return a `Keep` that ends a turn where `first` or `second` does, whichever comes first."""
    if first is None:
        return second
    return lambda tokens: min((end for keep in (first, second) if (end := keep(tokens)) is not None), default=None)


class GrownText:
    """The text of a turn, decoded as tokens arrive."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._settled = 0  # the number of tokens in the text

    def add(self, tokens: np.ndarray) -> int:
        """Decode new tokens. tokens: all tokens of the turn; fewer than before begin another turn. Returns the length
        of the text before. The tokens of an incomplete character at the end wait for the next call."""
        if len(tokens) < self._settled:
            self.text, self._settled = "", 0
        old_length = len(self.text)
        start = max(0, self._settled - OVERLAP_TOKENS)
        overlap = decoded(self._tokenizer, tokens[start : self._settled])
        ends = range(len(tokens), max(self._settled, len(tokens) - CHARACTER_TOKENS), -1)
        for end in ends:
            window = decoded(self._tokenizer, tokens[start:end])
            if not window.endswith(_INCOMPLETE):
                break
        else:
            if len(ends) < CHARACTER_TOKENS:
                return old_length
            end, window = len(tokens), decoded(self._tokenizer, tokens[start:])  # these bytes are no character
        self.text += window[len(overlap) :]
        self._settled = end
        return old_length
