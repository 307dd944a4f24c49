from typing import Any

from fakes.quiet_master import QuietMaster

from actors.master.hangs import Hangs
from protocols.membership_messages import Heartbeat, Work


class Fleet:
    """Members, and what a master with `master.hang_seconds=10` finds of them."""

    def __init__(self) -> None:
        self.run = QuietMaster()
        self.hangs = Hangs(self.run.members, 10.0)

    def beat(self, member: Any, kind: str, still: float, **ended: float) -> None:
        work = Work(kind=kind, what="loading version 9", seconds=still, still=still)
        beat = Heartbeat(state="healthy", serves=(), activity="", stats={}, works=(work,), ended=ended)
        self.run.members.heartbeats.record(member.identity, beat)
        self.hangs.hear(member, beat)


def test_a_member_whose_work_stands_still_for_longer_than_the_limit_hangs():
    fleet = Fleet()
    first, second = fleet.run.join("generator"), fleet.run.join("generator", "y")
    fleet.beat(second, "load", 0.0, load=0.1)  # the history is that of all generators
    fleet.beat(first, "load", 10.0)
    assert fleet.hangs.find() == []
    fleet.beat(first, "load", 11.0)
    why = "it hangs: loading version 9 has stood still for 11 s (limit 10 s, master.hang_seconds)"
    assert fleet.hangs.find() == [(first.identity, why)]


def test_an_alert_comes_at_half_of_the_limit_and_ends_when_the_work_moves():
    fleet = Fleet()
    first = fleet.run.join("generator")
    fleet.beat(first, "load", 0.0, load=0.1)
    fleet.beat(first, "load", 6.0)
    for _ in range(2):
        assert fleet.hangs.find() == []
        assert list(fleet.hangs.alerts.values()) == [
            "generator/0 may hang: loading version 9 has stood still for 5 s; it is started again after 10 s"
        ]
    fleet.beat(first, "load", 0.0)
    assert fleet.hangs.find() == [] and not fleet.hangs.alerts


def test_work_with_deadlines_of_its_own_never_hangs():
    fleet = Fleet()
    fleet.beat(fleet.run.join("reward"), "", 1e6)
    assert fleet.hangs.find() == [] and not fleet.hangs.alerts


def test_a_kind_without_a_history_has_thirty_times_the_limit():
    fleet = Fleet()
    trainer = fleet.run.join("trainer")
    fleet.beat(trainer, "save", 299.0)
    assert fleet.hangs.find() == []
    fleet.beat(trainer, "save", 301.0)
    assert len(fleet.hangs.find()) == 1
