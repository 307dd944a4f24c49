"""How often the sentences of pages, docstrings and comments point ("those", "what", "it") instead of naming. Code,
links and rules of tables are left out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

HARD = frozenset(re.findall(r"\w+", "those what one ones others whose"))
"""The references that make a reader look back."""
REFERENCES = HARD | frozenset(
    re.findall(
        r"\w+", "that which other each its it they their them itself themselves whom this these same so there then such"
    )
)
BEGINNINGS = frozenset(re.findall(r"\w+", "those that what its it of one others they"))
"""A sentence that begins with one of these is bare."""


def sentences(page: str) -> Iterator[list[str]]:
    """The words of each sentence of more than two, in small letters.

    >>> list(sentences("Ask `x` again. It is late.\\n\\n* A [link](x.md) to it."))
    [['ask', 'x', 'again'], ['it', 'is', 'late'], ['a', 'link', 'to', 'it']]
    """
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "x", re.sub(r"\]\([^)]*\)", "]", text))
    for block in re.split(r"\n\s*\n|\n(?=\||\* |- |#|\d\. )|\|", text):
        for sentence in re.split(r"(?<=[.!?:])\s+", block):
            words = re.findall(r"[a-z']+", sentence.lower())
            if len(words) > 2:
                yield words


def measure(pages: Iterable[str]) -> tuple[float, float, float]:
    """References and hard references in 1,000 words, and the share of sentences that begin bare."""
    every_sentence = [words for page in pages for words in sentences(page)]
    count = sum(map(len, every_sentence))
    references, hard = (
        1000 * sum(word in kind for words in every_sentence for word in words) / count for kind in (REFERENCES, HARD)
    )
    return references, hard, sum(words[0] in BEGINNINGS for words in every_sentence) / len(every_sentence)


def texts_of_code(source: str) -> Iterator[str]:
    """The docstrings and comments of a Python file, without directives to tools (`# noqa`)."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt|!)", token.string):
            yield token.string.lstrip("# ")
