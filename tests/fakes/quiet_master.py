"""A master without a bus: its parts that decide, on a clock that the test sets."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from support.small_runs import ten_steps

from actors.master.changes import PublishedChange
from actors.master.evaluations import Evaluations
from actors.master.members import Members
from actors.master.progress import Progress
from actors.master.run_state import RunState
from areal.staleness.failures import Failures
from areal.staleness.ledger_state import Counters
from areal.storage.journal import Journal
from protocols.evaluation_messages import EvaluationDone
from protocols.membership_messages import Heartbeat, Join, Member, Policy


class QuietMaster:
    """A run of ten steps, every second version of which is evaluated."""

    def __init__(self, connection: sqlite3.Connection | None = None, **more: Any) -> None:
        self.now = 100.0
        values: dict[str, Any] = {
            "data": {"source": "addition", "eval_size": 4},
            "evaluator": {"every": 2, "timeout_seconds": 50.0},
            "master": {"lost_seconds": 30.0, "stall_seconds": 90.0},
        }
        config = ten_steps(**values | more)
        self.connection = connection or sqlite3.connect(":memory:", check_same_thread=False)
        self.state = RunState(config, Journal(self.connection))
        self.members = Members(self.state, lambda event: None, lambda: self.now)
        self.evaluations = Evaluations(self.state, self.members)
        self.progress = Progress(
            self.state, self.members, Failures(2, 60.0, 0.1, Path("runs/x"), Counters()), lambda: 1
        )

    def join(self, role: Any, mark: str = "x", **beat: Any) -> Member:
        member = self.members.new_entry(Join(role=role, index=None, address="tcp://a:1"), mark)
        self.members.add(member)
        beat = {"state": "healthy", "serves": (), "activity": "", "stats": {}} | beat
        self.members.update(member, Heartbeat(**beat))
        self.members.heartbeats.record(member.identity, Heartbeat(**beat))
        return self.state.members[member.identity]

    def leave(self, member: Member) -> None:
        self.evaluations.lose_member(member)
        self.members.remove(member.identity, "it left")
        self.evaluations.hold_version_0()

    def publish(self, version: int) -> None:
        policy = Policy(lineage=0, version=version, folder=f"v{version}")
        self.state.emit(PublishedChange(policy=policy))
        self.evaluations.plan(policy)

    def finish(self, version: int, accuracy: float | None = 1.0) -> bool:
        scores = {"accuracy": accuracy, "pass_at": {}, "rows": 4, "failed": 0, "completion_tokens_mean": 2.0}
        return self.evaluations.finish(EvaluationDone(version=version, **scores, samples=()))

    @property
    def held(self) -> dict[int, int]:
        """The versions that are held, by the generators' index."""
        return {m.index: m.held.version for m in self.state.members.values() if m.held}
