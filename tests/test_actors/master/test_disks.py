from structlog.testing import capture_logs

from actors.master.disks import LULL_SECONDS, SHOWN_SECONDS, Disks
from areal.storage.disk import Shortage

RUN, MEMORY = ("runs/a", "full"), ("/dev/shm", "out of quota")


def seen(disks: Disks, *looks: tuple[Shortage, ...], begin: float = 0.0) -> list[str]:
    """The alert after each look, one a second."""
    alerts = []
    for second, shortages in enumerate(looks):
        disks.look(shortages, begin + second)
        alerts.append(disks.alert)
    return alerts


def test_a_full_disk_is_one_sentence_for_all_that_wait_and_its_end_another():
    journal = Shortage(*RUN, 1 << 20, "the master waits to write the journal")
    spool = Shortage(*RUN, 1 << 20, "the trainer waits to write the spool")
    weights = Shortage(*MEMORY, 0, "the trainer waits to write l0-v3 (4.0 MiB)")
    disks = Disks()
    with capture_logs() as logs:
        first, *during, pause, again = seen(
            disks, (journal,), (journal, spool, weights), (spool,), (journal, weights), (), (spool,)
        )
        assert first == "" and {*during, pause, again} == {
            "The disk of runs/a is full (1.0 MiB free): the master waits to write the journal, the trainer waits to "
            "write the spool; the disk of /dev/shm is out of quota (0.0 MiB free): the trainer waits to write l0-v3 "
            "(4.0 MiB). Free some room there, or make it writable, and the run goes on by itself; Ctrl-C ends it, and "
            "--resume continues it."
        }
        *_, last = seen(disks, *[()] * int(LULL_SECONDS), begin=6.0)
        assert last == "The run goes on: the disk of runs/a and /dev/shm refused writes for 5 s."
    assert [entry["event"] for entry in logs] == [again, last]
    disks.look((), 6.0 + SHOWN_SECONDS)
    assert disks.alert == ""


def test_a_disk_that_refuses_for_less_than_a_second_is_not_told():
    disks = Disks()
    refused = (Shortage(*RUN, 0, "the trainer waits to write the spool"),)
    assert set(seen(disks, refused, *[()] * 10)) == {""}
    assert seen(disks, refused, refused, begin=10.0)[1]
