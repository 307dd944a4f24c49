"""How long work may stand still: each kind of work has a limit, from earlier works of the kind that ended well.

A hang is work that nothing has moved for ten times as long as ever before: no other sign tells a hang from slow work.
"""

import math
from collections import Counter
from collections.abc import Hashable

FACTOR = 10.0
"""The limit, in longest standstills of works that ended well."""
UNKNOWN = 30.0
"""The limit, in `floor`, of a kind without an ended work: a first start or checkpoint may take an hour."""


class Standstills:
    """floor: the least limit in seconds; 0: there are no limits. unknown: the limit of a kind without a history."""

    def __init__(self, floor: float, unknown: float) -> None:
        self._floor = floor
        self._unknown = unknown
        self._longest: dict[Hashable, float] = {}
        self._hung = Counter[Hashable]()

    def limit(self, kind: Hashable) -> float:
        """Return the seconds after which work of this kind counts as hung."""
        if not self._floor:
            return math.inf
        longest = self._longest.get(kind)
        limit = self._unknown if longest is None else max(self._floor, FACTOR * longest)
        return limit * 2.0 ** self._hung[kind]

    def end(self, kind: Hashable, longest: float) -> None:
        """Note a work that ended well, after a standstill of at most `longest` seconds."""
        self._longest[kind] = max(longest, self._longest.get(kind, 0.0))
        del self._hung[kind]

    def hang(self, kind: Hashable) -> None:
        """Note a work that was ended as hung. Perhaps it was slow: the next work of the kind has twice the time."""
        self._hung[kind] += 1
