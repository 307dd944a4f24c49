"""Text by a model, by a user's code or by an actor: the code in a text, and a text as it is shown to people.

A model may write anything, on purpose too. Hence no function here takes more time than in proportion to the text's
length, as regular expressions easily do, and no shown text can steer a terminal.
"""

import re
import shutil
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from traceback import FrameSummary, TracebackException
from typing import Any, TextIO, cast

FENCE = "```"
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_WHITE_SPACE = re.compile(r"\s*")
# Control characters other than tab and newline: C0, DEL, C1 (a terminal takes 0x9b for ESC [). Line and paragraph
# separators, and characters that change the direction of the text around them, are shown by their codes too.
_CONTROLS = {
    code: chr(code).encode("unicode_escape").decode()
    for codes in (
        range(9),
        range(0x0B, 0x20),
        range(0x7F, 0xA0),
        (0x061C, 0x200E, 0x200F),
        range(0x2028, 0x202F),
        range(0x2066, 0x206A),
    )
    for code in codes
}


def cut_text(text: str, limit: int) -> str:
    """Return the text, or its first `limit` characters and a line with the number of further characters."""
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} more characters]"


def python_call(text: str) -> str | None:
    """Return the code in the first complete ```python block or pair of <tool> tags; None without either."""
    calls = [call for call in (_fenced_python(text), _between(text, "<tool>", "</tool>")) if call is not None]
    return min(calls)[1] if calls else None


def _fenced_python(text: str) -> tuple[int, str] | None:
    opening = f"{FENCE}python"
    at = 0
    while (start := text.find(opening, at)) >= 0:
        space = _WHITE_SPACE.match(text, start + len(opening))
        assert space is not None  # the pattern also matches nothing
        line = text.rfind("\n", start, space.end())
        if line >= 0:
            end = text.find(FENCE, line)
            return (start, text[line + 1 : end]) if end >= 0 else None
        at = space.end()
    return None


def _between(text: str, opening: str, closing: str) -> tuple[int, str] | None:
    start = text.find(opening)
    end = text.find(closing, start + len(opening))
    return (start, text[start + len(opening) : end]) if 0 <= start < end else None


def shown(text: str) -> str:
    r"""Return `text` with control characters written as \x1b, which steer neither a terminal nor a page."""
    return text.translate(_CONTROLS)


def break_lines(text: str, columns: int) -> str:
    """Return `text` with lines above `columns` characters broken between words. Lines that steer a terminal stay."""
    return "\n".join(
        line
        if len(line) <= columns or "\x1b" in line or "\r" in line
        else textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def sentences_on(stream: TextIO) -> TextIO:
    """Return a stream of sentences for a terminal, which would break sentences within words."""
    return cast(TextIO, _Sentences(stream)) if stream.isatty() else stream


class _Sentences:
    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    def write(self, text: str) -> int:
        self._terminal.write(break_lines(text, shutil.get_terminal_size().columns))
        return len(text)


def error_text(error: BaseException) -> str:
    """Return the class of an exception and its text, although the `__str__` of a user's class may raise."""
    return f"{type(error).__name__}: {TracebackException(type(error), error, None)}"


def reason_of(error: BaseException) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split())


@contextmanager
def without_code() -> Iterator[None]:
    """Load something with transformers. Raises ValueError if the model needs Python code, which is never run."""
    try:
        yield
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        raise ValueError("it needs Python code of its own, which is never run") from error


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(45), duration(720), duration(11_100)
    ('45 s', '12 min', '3 h 5 min')"""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def all_shown(value: Any) -> Any:
    """Return `value` with all its texts as `shown`: an actor may report any text."""
    match value:
        case str():
            return shown(value)
        case dict():
            return {all_shown(key): all_shown(inner) for key, inner in value.items()}
        case list() | tuple():
            return [all_shown(inner) for inner in value]
    return value


def place_in(frames: Iterable[FrameSummary], libraries: tuple[str, ...] = LIBRARIES) -> str:
    """Return the innermost line of code outside the folders `libraries`, in words; empty if there is none."""
    lines = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f", in {lines[-1].filename}, line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
