"""Fields of a record that another version of this program may have written."""

from collections.abc import Mapping
from typing import Any


def with_defaults(record: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the defaults of the fields that it lacks. Raises ValueError if it has a field without a default:
    this version does not know that field, and would drop it in silence."""
    if unknown := sorted(record.keys() - defaults.keys()):
        raise ValueError(f"it has fields that this version does not know: {', '.join(unknown)}")
    return {**defaults, **record}
