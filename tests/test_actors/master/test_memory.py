from fakes.quiet_master import QuietMaster

from actors.master.memory import Memory
from protocols.membership_messages import Heartbeat

GIB = float(1 << 30)


def test_a_machine_with_little_memory_left_is_told_once_with_its_largest_actor_until_it_has_enough():
    run = QuietMaster()
    memory = Memory(run.state, run.members)
    actors = [run.join(role) for role in ("generator", "rollout_manager", "reward")]

    def alerts(free: float) -> list[str]:
        for actor, gib in zip(actors, (1.0, 7.5, 0.0), strict=True):
            stats = {"free_memory": free * GIB, "memory": gib * GIB} if gib else {}  # one that measures nothing
            beat = Heartbeat(state="healthy", serves=(), activity="", stats=stats)
            run.members.heartbeats.record(actor.identity, beat)
        memory.look()
        return list(memory.alerts.values())

    assert alerts(1.5) == []
    (alert,) = alerts(0.5)
    assert "has 0.50 GiB of memory left" in alert and "rollout_manager/0 (7.50 GiB" in alert
    assert alerts(0.25) == alerts(1.5) == [alert]
    assert alerts(3.0) == []
