"""Fields of a record, perhaps written by another version of this program."""

from collections.abc import Mapping
from typing import Any


def with_defaults(record: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record, with defaults for missing fields. Raises ValueError for a field without a default: this
    version does not know the field, and would drop it in silence.

        >>> with_defaults({"steps": 5}, {"steps": 1, "seed": 0})
        {'steps': 5, 'seed': 0}"""
    if unknown := sorted(record.keys() - defaults.keys()):
        raise ValueError(f"it has fields that this version does not know: {', '.join(unknown)}")
    return {**defaults, **record}
