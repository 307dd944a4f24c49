"""The version of the protocol: a digest of the messages' kinds, fields and types, and of the header's fields.

Actors with equal versions understand each other. A changed message changes the version without further work.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from protocols import (
    attempt_messages,
    evaluation_messages,
    membership_messages,
    messages,
    picture_messages,
    scorer_messages,
    session_messages,
    training_messages,
    weight_messages,
)
from protocols.messages import Part

VERSION_BYTES = 4
# No field says how values become frames (protocols.codec): raise this number with a change there.
ENCODING = 1
PROGRAM = "areal-as-actors"
VERSION = r"\d[\w.+-]{0,63}"

SUBJECTS = (
    messages,
    attempt_messages,
    membership_messages,
    training_messages,
    picture_messages,
    scorer_messages,
    evaluation_messages,
    session_messages,
    weight_messages,
)
"""All modules with messages."""
_CLASSES = dict.fromkeys(kind for module in SUBJECTS for kind in vars(module).values() if isinstance(kind, type))
MODELS = [kind for kind in _CLASSES if issubclass(kind, Part)]
"""All messages and parts of messages."""


def version_of(models: Iterable[type[BaseModel]], header: Sequence[str]) -> int:
    """The version of a protocol with these models and fields of the header: the digest of all `description_of`."""
    lines = sorted(description_of(model) for model in models)
    text = "\n".join([f"encoding {ENCODING}", *header, *lines])
    return int.from_bytes(blake2b(text.encode(), digest_size=VERSION_BYTES).digest())


def description_of(model: type[BaseModel]) -> str:
    """The name, the fields and the types of a model in one line, equal in all processes:

    `Credit parts: int (Ge(ge=1), Le(le=1000000))`
    """
    fields = sorted(model.model_fields.items())
    return f"{model.__name__} " + "; ".join(
        f"{name}: {_type(field.annotation)}{_limits(field.metadata)}" for name, field in fields
    )


def _type(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(arguments[0]) + _limits(arguments[1:])
    if arguments:
        name = "Union" if origin in (Union, UnionType) else getattr(origin, "__name__", origin)
        return f"{name}[{', '.join(map(_type, arguments))}]"
    return kind.__name__ if isinstance(kind, type) else repr(kind)


def _limits(marks: Iterable[Any]) -> str:
    """The limits of a value beside its type."""
    limits = chain.from_iterable(mark.metadata if isinstance(mark, FieldInfo) else [mark] for mark in marks)
    text = ", ".join(map(repr, limits))
    return f" ({text})" if text else ""


@cache
def program() -> str:
    """The version of the installed package; empty if the package is not installed."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return ""


def difference(peer: object, installed: str) -> str:
    """The remedy for a peer of another protocol, in one sentence. peer: the version of the peer's package in the peer's
    words, perhaps nonsense. installed: the version of this process's package, or empty if unknown.

    >>> difference("0.9.1", "0.10.0").partition(":")[0]
    "the peer has version 0.9.1 of the project, older than this actor's 0.10.0"
    """
    where = "install the same version of the project on every node"
    if not (isinstance(peer, str) and re.fullmatch(VERSION, peer) and installed):
        return f"the peer speaks another version of the protocol than this actor: {where}"
    if peer == installed:
        return (
            f"the peer has another commit of version {installed} of the project, with another protocol: "
            f"install the same commit on every node"
        )
    age = "older" if _numbers(peer) < _numbers(installed) else "newer"
    return f"the peer has version {peer} of the project, {age} than this actor's {installed}: {where}"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
