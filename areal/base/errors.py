"""Mistakes by the user, and errors that are told as such."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from areal.base.text import reason_of

Causes = type[BaseException] | tuple[type[BaseException], ...]


class UserError(Exception):
    """A mistake by the user. The message is one sentence: what is wrong, where, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the sentence alone."""
        return [f"UserError: {self}"]


class ToolError(Exception):
    """A tool failed, and with it the sample that uses the tool. `cause`: what is reported to the master; "row" if
    another attempt at the row would fail as well."""

    cause: Literal["sandbox", "row"] = "sandbox"


NOT_PERMITTED = "This user has no right to do that ({why}): start it as the owner of the folder, or change its rights."


@contextmanager
def explain(causes: Causes, message: str, error: Callable[[str], Exception] = UserError) -> Iterator[None]:
    """Raise `error` in place of errors of these kinds. `{why}` in its message stands for what they say, in one line.

    If they are errors of all kinds, as of the user's code, their type comes first. `{strerror}` stands for what the
    system says, for a message that names the file itself.
    """
    try:
        yield
    except causes as cause:
        text = reason_of(cause) or type(cause).__name__
        if Exception in (causes if isinstance(causes, tuple) else (causes,)):
            text = f"{type(cause).__name__}: {text}"
        strerror = getattr(cause, "strerror", None) or text
        raise error(message.replace("{why}", text).replace("{strerror}", strerror)) from cause
