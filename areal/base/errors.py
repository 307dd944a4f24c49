"""Errors that are mistakes of the user, and sentences in place of errors of libraries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from areal.base.text import reason_of

Causes = type[BaseException] | tuple[type[BaseException], ...]


class UserError(Exception):
    """A mistake by the user. The message is one sentence, which names the mistake, the place and the remedy."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the sentence alone."""
        return [f"UserError: {self}"]


class ToolError(Exception):
    """A tool failed, and the sample that uses the tool fails with it. `cause`: reported to the master; "row" if another
    attempt at the row would fail as well."""

    cause: Literal["sandbox", "row"] = "sandbox"


NOT_PERMITTED = "This user has no right to do that ({why}): start it as the owner of the folder, or change its rights."


@contextmanager
def explain(causes: Causes, message: str, error: Callable[[str], Exception] = UserError) -> Iterator[None]:
    """Raise `error` in place of an error of the kinds `causes`. In `message`, `{why}` stands for the text of the cause
    in one line, and `{strerror}` for the operating system's text, if the message names the file itself.

    If `causes` has Exception, as for the user's code, `{why}` begins with the type of the cause.

        >>> with explain(KeyError, "the row has no column {why}: add it"):
        ...     {}["answer"]
        Traceback (most recent call last):
        areal.base.errors.UserError: the row has no column 'answer': add it
    """
    try:
        yield
    except causes as cause:
        text = reason_of(cause) or type(cause).__name__
        if Exception in (causes if isinstance(causes, tuple) else (causes,)):
            text = f"{type(cause).__name__}: {text}"
        strerror = getattr(cause, "strerror", None) or text
        raise error(message.replace("{why}", text).replace("{strerror}", strerror)) from cause
