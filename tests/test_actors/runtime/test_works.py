from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actors.runtime.works import Works


class Clock:
    """The time, which a test moves on, and the works that are looked at meanwhile every second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.works = Works(lambda: self.now)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.works.look()

    @property
    def still(self) -> dict[str, float]:
        return {work.kind: work.still for work in self.works.report()}


@contextmanager
def failing() -> Iterator[None]:
    with pytest.raises(RuntimeError):
        yield


def test_work_stands_still_while_its_evidence_does_not_move():
    clock, counter = Clock(), [0]
    with clock.works.working("training", "train", lambda: counter[0]):
        clock.run(5)
        assert clock.still == {"train": 5.0}
        counter[0] += 1
        clock.run(3)
        assert clock.still == {"train": 2.0}  # it moved in the first of the three seconds
    assert clock.works.take_ended() == {"train": 5.0}
    assert clock.works.take_ended() == {}


def test_work_without_evidence_stands_still_for_its_whole_duration():
    clock = Clock()
    with clock.works.working("loading", "load"):
        clock.run(7)
        clock.now += 0.5
    assert clock.works.take_ended() == {"load": 7.5}


def test_what_failed_or_was_cancelled_says_nothing_about_how_long_such_work_takes():
    clock = Clock()
    with failing(), clock.works.working("loading", "load"):
        clock.run(7)
        raise RuntimeError
    assert clock.works.take_ended() == {} and clock.works.report() == ()


def test_an_engine_that_hangs_stands_still_although_each_of_its_requests_is_given_up():
    clock, counter = Clock(), [0]

    def steps() -> float:
        return counter[0]

    for number in range(4):  # one after another, and one beside each
        with failing(), clock.works.working("sampling", "sample", steps):
            clock.run(3)
            with failing(), clock.works.working("sampling", "sample", steps):
                clock.run(2)
                assert clock.still == {"sample": 5.0 * (number + 1)}
                raise RuntimeError
            raise RuntimeError
    counter[0] += 1
    with clock.works.working("sampling", "sample", steps):
        clock.run(3)
        assert clock.still == {"sample": 3.0}
        counter[0] += 1
    with clock.works.working("sampling", "sample", steps):
        assert clock.still == {"sample": 0.0}


def test_time_in_which_the_process_was_suspended_does_not_count():
    clock = Clock()
    with clock.works.working("loading", "load"):
        clock.run(2)
        clock.now += 3600.0
        clock.works.look()
        assert clock.still["load"] <= 5.0


def test_work_is_not_expected_to_move_during_other_work_or_while_it_waits_for_others():
    clock = Clock()
    with clock.works.working("sampling", "sample", clock.works.unless_other("sample")):
        clock.run(2)
        with clock.works.working("loading", "load"):
            clock.run(9)
            assert clock.still == {"sample": 0.0, "load": 9.0}
        clock.run(3)
        assert clock.still["sample"] <= 3.0
        with clock.works.waiting():
            clock.run(9)
            assert clock.still["sample"] == 0.0
    assert clock.works.take_ended() == {"load": 9.0, "sample": 2.0}


def test_a_heartbeat_has_of_each_kind_the_work_that_has_stood_still_for_longest_and_the_oldest_first():
    clock, counter = Clock(), [0]
    with clock.works.working("scoring"), clock.works.working("one", "write", lambda: counter[0]):
        clock.run(4)
        counter[0] += 1
        with clock.works.working("the other", "write"):
            clock.run(4)
            report = clock.works.report()
    assert [(work.kind, work.what, work.seconds, work.still) for work in report] == [
        ("", "scoring", 8.0, 8.0),
        ("write", "the other", 4.0, 4.0),
    ]
