"""A section of the configuration, and what its keys are made of."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

# A name of a file or folder, whatever folder it is in: neither `.` nor `..`, without `/`, and no option of a command.
NAME = r"(?!\.+$|-)[\w.-]{1,100}"
# vLLM's least temperature above 0.
LEAST_TEMPERATURE = 0.01


class Section(BaseModel):
    """A section of keys. The meaning of each is its description, or the text below it (see settings_list.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[str]:
        """What is wrong with the keys of this section: sentences for the user, who gets the first one."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflict(self) -> Self:
        if conflict := next(self.conflicts(), None):
            raise ValueError(conflict)
        return self


T = TypeVar("T", bound=Section)


def template_conflicts(key: str, template: str) -> Iterator[str]:
    """Whether the template of a key is none."""
    import jinja2  # which takes as long to import as all of the configuration

    try:
        jinja2.Environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        yield f"{key} is not a Jinja template ({error}): correct it"


def temperature_conflicts(key: str, value: float) -> Iterator[str]:
    """Whether vLLM would sample at another temperature than at the value of a key."""
    if 0 < value < LEAST_TEMPERATURE:
        yield (
            f"{key} is {value:g}, but vLLM takes temperatures below {LEAST_TEMPERATURE:g} for that, and the trainer "
            f"would not: raise it to {LEAST_TEMPERATURE:g}, or set 0 in an evaluation to be greedy"
        )


def _expanded(path: Path) -> Path:
    with suppress(RuntimeError):
        return path.expanduser()
    return path  # there is no such user


UserPath = Annotated[Path, AfterValidator(_expanded)]
"""A path, in which ~ is the user's folder."""


def section_in(annotation: Any) -> type[Section] | None:
    """The section class of a key, also where the annotation is `Section | None`, or a list or mapping of sections. None
    if it holds no section."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)), None)
