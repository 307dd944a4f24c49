"""Ended sessions of users: receipts of rewards, the steps of trained sessions, and deletions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from actors.master.changes import Rewarded
from areal.staleness.ledger_state import LedgerGroup
from protocols.session_messages import Receipt

# The number of kept entries of each kind, the newest.
RECORDS_KEPT = 10_000


@dataclass(slots=True)
class SessionRecords:
    """The records of the newest sessions, for users who ask after the end of a session.

    receipts: the group that became ready and the value that the reward gave, by the session's name and a mark of the
    reward; and the last group of a name by the name alone. trained_sessions: name and step of every trained session, by
    group. deleted_sessions: the groups that users have deleted.
    """

    receipts: dict[str, str] = field(default_factory=dict)
    trained_sessions: dict[str, tuple[str, int]] = field(default_factory=dict)
    deleted_sessions: dict[str, None] = field(default_factory=dict)

    def receipt(self, session: str, mark: str) -> Receipt | None:
        """The receipt of the reward with the mark `mark`, of a session with the name `session`."""
        group, _, gave = self.receipts.get(f"{session} {mark}", "").partition(" ")
        return Receipt(group=group, gave=gave) if mark and group else None

    def add_receipt(self, session: str, rewarded: Rewarded) -> None:
        self.receipts[session] = rewarded.group
        for mark, gave in zip_longest(rewarded.marks, rewarded.gave, fillvalue=""):
            self.receipts[f"{session} {mark}"] = f"{rewarded.group} {gave}"
        _shorten(self.receipts)

    def drop_receipts(self, group: str) -> None:
        """Forget the receipts of a group that will not be trained."""
        self.receipts = {key: of for key, of in self.receipts.items() if of.partition(" ")[0] != group}

    def note_trained(self, groups: Iterable[LedgerGroup | None], step: int) -> None:
        for group in groups:
            if group is not None and group.session:
                self.trained_sessions[group.group_id] = group.session, step
        _shorten(self.trained_sessions)

    def note_deleted(self, groups: Iterable[str]) -> None:
        self.deleted_sessions |= dict.fromkeys(groups)
        _shorten(self.deleted_sessions)

    def dump(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def load(self, dump: Mapping[str, Any]) -> None:
        for part in fields(self):
            setattr(self, part.name, dump[part.name])


def _shorten(entries: dict[str, Any]) -> None:
    """Forget the oldest entries beyond RECORDS_KEPT."""
    while len(entries) > RECORDS_KEPT:
        del entries[next(iter(entries))]
