"""A section of the configuration, and the types of its keys."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

# The name of a file or folder in any folder: neither `.` nor `..`, without `/`, and no option of a command.
NAME = r"(?!\.+$|-)[\w.-]{1,100}"
# vLLM's least temperature above 0.
LEAST_TEMPERATURE = 0.01


class Section(BaseModel):
    """A section of keys. The meaning of a key is its description, or the text below the key (see settings_list.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[str]:
        """Yield the mistakes in the keys of this section, as sentences. The user gets the first sentence."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflict(self) -> Self:
        if conflict := next(self.conflicts(), None):
            raise ValueError(conflict)
        return self


T = TypeVar("T", bound=Section)


def template_conflicts(key: str, template: str) -> Iterator[str]:
    """Yield a sentence if the template of a key is not Jinja."""
    import jinja2  # jinja2 takes as long to import as all of the configuration

    try:
        jinja2.Environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        yield f"{key} is not a Jinja template ({error}): correct it"


def temperature_conflicts(key: str, value: float) -> Iterator[str]:
    """Yield a sentence if vLLM would not sample at the temperature of a key."""
    if 0 < value < LEAST_TEMPERATURE:
        yield (
            f"{key} is {value:g}, but vLLM takes temperatures below {LEAST_TEMPERATURE:g} for that, and the trainer "
            f"would not: raise it to {LEAST_TEMPERATURE:g}, or set 0 in an evaluation to be greedy"
        )


def _expanded(path: Path) -> Path:
    with suppress(RuntimeError):
        return path.expanduser()
    return path  # an unknown user


UserPath = Annotated[Path, AfterValidator(_expanded)]
"""A path with ~ for the user's folder."""


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section class of a key, also for `Section | None`, or a list or mapping of sections; else None."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)), None)
