"""What is said of a configuration that is none."""

import difflib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal.base.secrets import without_secrets
from areal.config.reading import CONFIGS, read_yaml
from areal.config.section import Section, section_in

# So many keys are named where one is not known.
FEW_KEYS = 12


def other_names() -> dict[str, str]:
    """Names of other libraries (docs/examples.md), and what they are here."""
    names: dict[str, str] = read_yaml((Path(__file__).with_name("other_names.yaml")).read_text())
    return names


def sentence_of(error: ValidationError, file: Path | str | None, kind: type[Section]) -> str:
    place = str(file or "the command line").removeprefix(f"{CONFIGS.parent}/")
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            section: Any = kind
            for part in first["loc"][:-1]:
                if part in section.model_fields:  # else the place in a list, or the name in a mapping
                    section = section_in(section.model_fields[part].annotation)
            close = difflib.get_close_matches(str(first["loc"][-1]), section.model_fields, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(section.model_fields)}."
            if len(section.model_fields) > FEW_KEYS and not close:
                hint = f"`areal config {key.rpartition('.')[0]}".rstrip() + "` lists those that are known."
            if first["loc"][-1] in (others := other_names()):
                hint = f"here it is {others[first['loc'][-1]]}."
            if "." in str(first["loc"][-1]):
                hint = "keys with dots are for the command line; in a file write one section inside the other."
            if key == "grid":
                hint = f"a configuration with a grid is a sweep, areal sweep {place}."
            return f"Unknown key {key!r} in {place}: {hint}"
        case "missing" if isinstance(first["loc"][-1], str):
            return f"The key {key!r} is missing in {place}: set it there or as an override, {key}=VALUE."
        case "value_error":
            return f"{first['msg'].removeprefix('Value error, ')} ({place})."
        case "model_type" | "model_attributes_type":
            return f"{key} is a section, but has a value in {place}: `areal config {key}` lists its keys."
        case _:
            value = without_secrets(first["input"], key.rpartition(".")[2])
            rule = first["msg"].removeprefix("Input ").partition(", unable to parse")[0]
            if callable(value):  # a loss, in a notebook
                return f"{key} is a function of this process, but another calls it: write it to a file, FILE.py:NAME."
            return f"{key} is {value!r:.80} in {place}, but {rule[0].lower() + rule[1:]}."
