"""The simulated cluster: it is deterministic, it finds bugs that are there, and none in the real actors."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from actors.runtime.actor import HandlesRequests
from actors.runtime.membership import Membership
from actors.trainer import kept_rollouts
from actors.weights.weight_service import WeightFetcher
from areal.base import extensions
from areal.base.errors import UserError
from areal.config.roles import ROLES
from areal.generation.engine_weights import LoadTimes
from areal.samples.table import Generation
from areal.storage.run_folder import version_of
from areal.storage.spool import Spool
from protocols.bus_errors import BusyError
from protocols.codec import MAX_BODY_BYTES
from protocols.membership_messages import Policy
from protocols.messages import Message, StoreSamples
from protocols.network import Full
from protocols.training_messages import AskRecovery
from protocols.version import SUBJECTS
from simulate import parse_seeds, run_one, run_seeds
from simulation import faults
from simulation.cluster.loop import EndlessCallbacks
from simulation.engines import LIKED, REFERENCE, TEACHER, Mishaps, Pace, SimEngine, SimLearner, stem
from simulation.faults import (
    HANDLERS,
    HANGS,
    NOT_ASKED,
    SESSION_HANDLERS,
    Damage,
    FailPoint,
    Hang,
    Kill,
    Leave,
    Pause,
    Plan,
)
from simulation.loop import FaultyLoop, WorldScheduler
from simulation.model import OPERATIONS, draw_model, with_hangs
from simulation.network import FaultyNetwork, FaultyWire, Weather
from simulation.world import Model, Result, World, simulate

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


def loop_of(scheduler: WorldScheduler, name: str = "process", offset: float = 0.0) -> FaultyLoop:
    return FaultyLoop(scheduler, name, offset, lambda: 0.01)


def begin(loop: FaultyLoop, work) -> list[asyncio.Task]:
    tasks: list[asyncio.Task] = []
    loop.call_soon(lambda: tasks.append(loop.create_task(work)))
    return tasks


# --- virtual time


def test_an_hour_of_sleep_takes_no_time() -> None:
    scheduler = WorldScheduler()
    tasks = begin(loop_of(scheduler), asyncio.sleep(3600.0, "rested"))
    scheduler.run(4000.0)
    assert tasks[0].result() == "rested"
    assert scheduler.now == 3600.0


def test_asyncio_works_on_a_loop_of_the_simulation() -> None:
    async def work() -> list[object]:
        found: list[object] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(asyncio.sleep(i, i)) for i in (3, 1, 2)]
        found.append([part.result() for part in parts])
        found.append(await asyncio.to_thread(lambda: "from a thread"))
        queue: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().call_later(1.0, queue.put_nowait, "queued")
        found.append(await asyncio.wait_for(queue.get(), 2.0))
        return found

    scheduler = WorldScheduler()
    tasks = begin(loop_of(scheduler, offset=77.0), work())
    scheduler.run(100.0)
    assert tasks[0].result() == [[3, 1, 2], "from a thread", "queued"]


def test_nothing_of_a_killed_process_runs_again_not_even_finally() -> None:
    words = []

    async def work() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            words.append("cleaned up")

    scheduler = WorldScheduler()
    loop = loop_of(scheduler)
    begin(loop, work())
    scheduler.call_at(5.0, loop.kill)
    scheduler.run(100.0)
    assert words == []


def test_a_paused_process_does_later_what_was_due_meanwhile() -> None:
    scheduler, words = WorldScheduler(), []
    loop = loop_of(scheduler)
    loop.call_at(1.0, lambda: words.append(("first", scheduler.now)))
    loop.call_at(2.0, lambda: words.append(("second", scheduler.now)))
    scheduler.call_at(0.5, loop.pause)
    scheduler.call_at(5.0, loop.resume)
    scheduler.run(100.0)
    assert words == [("first", 5.0), ("second", 5.0)]


def test_a_clock_that_jumps_makes_its_own_timers_due_and_no_others() -> None:
    scheduler, words = WorldScheduler(), []
    jumping, steady = loop_of(scheduler, "jumping"), loop_of(scheduler, "other")
    for loop in (jumping, steady):
        loop.call_at(10.0, lambda loop=loop: words.append((loop.name, scheduler.now, loop.time())))
    scheduler.call_at(1.0, jumping.jump, 5.0)
    scheduler.run(100.0)
    assert words == [("jumping", 5.0, 10.0), ("other", 10.0, 10.0)]


def test_a_process_killed_while_its_disk_works_does_not_hear_of_it() -> None:
    scheduler, words = WorldScheduler(), []
    loop = loop_of(scheduler)

    async def work() -> None:
        await asyncio.to_thread(words.append, "written")
        words.append("told")

    loop.after_work = loop.kill
    begin(loop, work())
    scheduler.run(100.0)
    assert words == ["written"]


def test_work_of_one_executor_does_not_overlap() -> None:
    scheduler, words = WorldScheduler(), []
    loop = loop_of(scheduler)

    async def work() -> None:
        executor = object()
        jobs = [loop.run_in_executor(executor, lambda i=i: words.append((i, scheduler.now))) for i in range(3)]
        await asyncio.gather(*jobs)

    begin(loop, work())
    scheduler.run(100.0)
    assert [i for i, _ in words] == [0, 1, 2]
    assert words[2][1] - words[0][1] == pytest.approx(0.02)


def test_callbacks_that_never_let_time_pass_are_found() -> None:
    scheduler = WorldScheduler()
    loop = loop_of(scheduler)

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(EndlessCallbacks):
        scheduler.run(1.0)


# --- the network


class Ends:
    """A door and a caller of two processes."""

    def __init__(self, weather: Weather | None = None) -> None:
        self.scheduler = WorldScheduler()
        self.wire = FaultyWire(self.scheduler, Random(1))
        self.wire.weather = weather or Weather()
        self.heard: list[bytes] = []
        self.loops = {name: loop_of(self.scheduler, name) for name in ("server", "client")}
        self.networks = {name: FaultyNetwork(self.wire, name, loop) for name, loop in self.loops.items()}
        self.caller = self.networks["client"].connect("tcp://server:1", self.heard.append, fail)

    def serve(self) -> None:
        self.door, _ = self.networks["server"].bind("tcp://server:1", self.heard.append, fail)

    def run(self, seconds: float) -> None:
        self.scheduler.run(self.scheduler.now + seconds)


def fail(error: BaseException) -> None:
    raise error


def test_a_message_to_nobody_is_not_sent_and_connects_once_there_is_somebody() -> None:
    ends = Ends()
    ends.run(1.0)
    with pytest.raises(Full):
        ends.caller.send([b"hello"])
    ends.serve()
    ends.run(1.0)
    ends.caller.send([b"hello"])
    ends.run(1.0)
    assert [frames[1:] for frames in ends.heard] == [[b"hello"]]


def test_messages_of_one_connection_stay_in_order_unless_the_weather_is_bad() -> None:
    def order(weather: Weather) -> list[int]:
        ends = Ends(weather)
        ends.serve()
        ends.run(1.0)
        for i in range(50):
            ends.caller.send([b"%d" % i])
        ends.run(60.0)
        return [int(frames[1]) for frames in ends.heard]

    assert order(Weather()) == list(range(50))
    assert sorted(order(Weather(reordering=0.5))) == list(range(50)) != order(Weather(reordering=0.5))
    assert len(order(Weather(loss=0.5))) < 40
    assert len(order(Weather(duplication=0.5))) > 60


def test_nothing_passes_a_partition_until_it_heals() -> None:
    ends = Ends()
    ends.serve()
    ends.run(1.0)
    ends.wire.cut("client", "server")
    ends.caller.send([b"lost"])
    ends.run(10.0)
    with pytest.raises(Full):  # the silence has been noticed
        ends.caller.send([b"refused"])
    ends.wire.heal()
    ends.run(1.0)
    ends.caller.send([b"heard"])
    ends.run(1.0)
    assert [frames[1] for frames in ends.heard] == [b"heard"]


def test_a_server_started_again_at_its_address_is_found_again() -> None:
    ends = Ends()
    ends.serve()
    ends.run(1.0)
    ends.loops["server"].kill()
    ends.networks["server"].die(silently=False)
    ends.run(1.0)
    ends.loops["server"] = loop_of(ends.scheduler, "server")
    ends.networks["server"] = FaultyNetwork(ends.wire, "server", ends.loops["server"])
    ends.serve()
    ends.run(1.0)
    ends.caller.send([b"again"])
    ends.run(1.0)
    assert [frames[1] for frames in ends.heard] == [b"again"]


def test_no_scorer_leaves_for_good() -> None:
    for seed in range(200):
        plan = Plan(until=3.0)
        faults.add_scorer_faults(Random(seed), plan, 3)
        assert not [fault for fault in plan.faults if isinstance(fault, Leave) and fault.restart_after is None]


# --- determinism


@cache
def simulated(seed: int) -> Result:
    """Of a seed as it is, for the tests that need no new simulation."""
    return simulate(seed)


def test_a_seed_is_the_same_simulation_every_time() -> None:
    assert simulated(7).digest == simulate(7).digest
    assert simulated(7).digest != simulated(8).digest


def test_a_seed_is_the_same_simulation_in_any_process_on_any_machine(tmp_path: Path) -> None:
    checkout = tmp_path / "elsewhere"
    checkout.symlink_to(ROOT)
    # In the first, a workflow hangs, whose line is told; in the second a disk is full; in one of the others several
    # calls of one sample are moved or aborted at once.
    seeds = [0, 5, 16, 20]
    program = f"""
import os
from simulation.world import simulate
os.statvfs = None  # what it would tell differs
print([simulate(s).digest for s in {seeds}])
"""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    digests = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{checkout}:{checkout / 'tests'}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert eval(digests) == [simulated(seed).digest for seed in seeds]


def test_tracing_changes_nothing() -> None:
    assert simulated(7).digest == simulate(7, traced=True).digest


# --- the real actors


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (30, 60, 90))])
def test_no_fault_breaks_an_invariant(first: int) -> None:
    """By some seeds of each: a change of the protocol is for `tests/simulate.py`, with a thousand."""
    for seed in range(first, first + 24):
        result = simulated(seed)
        assert result.ok, result.story


def test_a_calm_run_reaches_its_end_with_every_actor_started_once() -> None:
    world = World(1, Model(), Plan())
    assert world.run().ok
    assert all(process.lives == 1 for process in world.processes.values())
    assert world.summary["ok"]
    assert world.summary["steps"] == world.model.steps


def test_in_a_run_that_moves_and_over_samples_every_token_is_accounted_for() -> None:
    """What is trained has all its tokens in their order: the oracle looks."""
    model = Model(
        steps=6, batch_size=2, max_staleness=2, generators=2, managers=2, moves=0.5, oversample=1, max_new_tokens=60
    )
    world = World(1, model, Plan(until=6.0, mishaps=Mishaps(straggler=0.2, straggler_times=3.0)), traced=True)
    trained: list[int] = []
    judge = world.oracle.trained

    def sum_up(writer: str, version: int, groups: list, mask: int | None) -> None:
        trained.extend(int(part.sampled.sum()) for group in groups for part in group.trajectories)
        judge(writer, version, groups, mask)

    world.oracle.trained = sum_up
    result = world.run()
    assert result.ok, result.story
    assert any("-> generator-1: end_jobs(" in line for line in result.trace)
    assert world.summary["tokens_trained"] == sum(trained)
    assert world.summary["tokens_discarded"] > 0
    assert world.summary["tokens_generated"] >= world.summary["tokens_trained"] + world.summary["tokens_discarded"]


def test_training_goes_on_while_a_version_is_evaluated_on_another_generator() -> None:
    world = World(1, Model(steps=16, max_staleness=2, generators=2, eval_size=20, every=8), Plan())
    assert world.run().ok
    events = [
        (kind, body["policy"]["version"] if kind == "published" else body["evaluation"]["version"])
        for kind, body in world.oracle.events
        if kind in ("published", "evaluated")
    ]
    assert events.index(("evaluated", 8)) > events.index(("published", 9))
    assert world.summary["accuracy_after"] is not None


def test_a_run_with_one_generator_is_evaluated_and_reaches_its_end() -> None:
    world = World(1, Model(steps=4, eval_size=4, every=1, samples=3), Plan())
    assert world.run().ok
    assert len(world.summary["evaluations"]) + len(world.summary["not_evaluated"]) == 5


def test_the_master_may_die_at_any_point_of_an_abandoned_evaluation() -> None:
    """Weights that do not load lead to some; drawn plans have few."""
    model = Model(steps=6, max_staleness=2, generators=2, eval_size=8, every=1)
    for point in faults.POINTS:
        died = 0
        for seed in range(12):
            points = [FailPoint("master", "evaluation_abandoned", point, 1, 0.5)]
            result = simulate(seed, model, Plan(until=8.0, points=points, mishaps=Mishaps(load_fails=0.8)))
            assert result.ok, result.story
            died += result.counters[f"{point} evaluation_abandoned"]
            if died:
                break
        assert died, point


def subclasses_of(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from subclasses_of(below)


def handled_in(module: str) -> set[type[Message]]:
    """What the actors of a module answer, without what roles of extensions have at the master."""
    parts = [part for part in subclasses_of(HandlesRequests) if f"{part.__module__}.".startswith(f"{module}.")]
    return {message for part in parts if part not in extensions.find_own("requests") for message in part._handlers}


def handled_by(role: str) -> set[type[Message]]:
    own = handled_in(extensions.entry("role", role).target.partition(":")[0]) | handled_in(f"actors.{role}")
    further = extensions.find_own("requests") if role == "master" else []
    return own | {message for part in further for message in part._handlers}


def test_the_table_of_messages_says_who_answers_what() -> None:
    lines = [line for module in SUBJECTS for line in (module.__doc__ or "").splitlines() if line.startswith("| ")]
    rows = [
        (to.split(", "), set(request.split(", "))) for _, to, request, _ in (line[2:-2].split(" | ") for line in lines)
    ]
    extensions.part_of("direct", "sender")  # imports its handlers
    elsewhere = {message.__name__ for room in ("weights", "direct") for message in handled_in(f"actors.{room}")}
    assert elsewhere <= set().union(*(requests for _, requests in rows))
    for role in ("master", *ROLES):
        asked = set().union(*(requests for to, requests in rows if role in to))
        assert asked - elsewhere == {message.__name__ for message in handled_by(role)}, role


def test_every_handler_of_every_actor_has_fail_points() -> None:
    for role in ("master", *ROLES):
        kinds = {message.kind for message in handled_by(role)}
        of_gateways = SESSION_HANDLERS if role == "master" else ()
        assert kinds - NOT_ASKED == {*HANDLERS.get(role, ()), *of_gateways}, role


def test_every_kind_of_fault_is_drawn() -> None:
    plans = [faults.draw(Random(seed), Model().processes, 3.0) for seed in range(2000)]
    for seed, plan in enumerate(plans):
        faults.add_resume(Random(seed), plan)
        faults.add_damage(Random(seed), plan)
    hangs = [faults.draw_hang(Random(seed), Model().processes, 3.0) for seed in range(200)]
    assert {hang.work for hang in hangs} == {work for works in HANGS.values() for work in works}
    drawn = {type(fault).__name__ for fault in [*hangs, *(fault for plan in plans for fault in plan.faults)]}
    assert drawn == {fault.__name__ for fault in faults.Fault.__args__}
    points = {(point.role, point.kind, point.point) for plan in plans for point in plan.points}
    # Scorers are in plans of their own.
    kinds = {kind for role, kinds in HANDLERS.items() if role != "scorer" for kind in kinds}
    assert {kind for _, kind, _ in points} == kinds
    assert {point for _, _, point in points} == set(faults.POINTS)


def test_a_trainer_killed_in_the_middle_redoes_what_no_checkpoint_covers() -> None:
    model = Model(steps=4, checkpoint_every=3, max_staleness=0)
    world = World(3, model, Plan(until=5.0, faults=[Kill(2.6, "trainer-0", 0.5)]))
    assert world.run().ok
    book = world.oracle.disk
    assert book.lineage == 1
    assert book.version == 4


def test_a_trainer_whose_last_checkpoint_is_damaged_takes_the_one_before_and_replaces_it() -> None:
    model = Model(steps=8, checkpoint_every=2, max_staleness=0)
    for at, older in ((2.7, 0), (4.5, 2)):
        world = World(3, model, Plan(until=at, faults=[Damage(at)]), traced=True)
        assert world.run().ok
        assert world.oracle.disk.version == 8 and world.oracle.disk.lineage == 1
        _, again = "\n".join(world.trace).split("trainer-0 starts as")[1:]
        assert re.search(r"learner: step (\d)", again)[1] == f"{older}"
        assert not world.files.damaged


def test_a_checkpoint_that_the_master_has_not_heard_of_is_saved_again_and_removed_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = kept_rollouts.write_rollouts

    async def slowly_at_first(*what: Any) -> None:
        if not world.oracle.disk.lineage:
            await asyncio.sleep(60.0)  # between the checkpoint and the report of it
        await write(*what)

    def kept(folder: Path | None = None) -> list[Path]:
        return sorted(Path(path) for path in world.files.folders if "/checkpoints/" in path)

    monkeypatch.setattr(kept_rollouts, "write_rollouts", slowly_at_first)
    monkeypatch.setattr("actors.trainer.trainer.checkpoints_in", kept)
    model = Model(steps=10, checkpoint_every=2, max_staleness=0)
    world = World(3, model, Plan(until=4.0, faults=[Kill(4.0, "trainer-0", 0.5)]))
    result = world.run()
    assert result.ok, result.story
    assert [version for kind, version in order_of(world) if kind == "checkpoint_saved"] == [2, 4, 6, 8, 10]
    assert [version_of(path) for path in kept()] == [6, 8, 10]


def test_the_next_step_does_not_wait_for_the_weights_to_be_written() -> None:
    pace = Pace(tokens_per_second=400.0, step=0.3, write=0.25)  # so fast that the trainer never waits for a group
    model = Model(steps=6, max_staleness=2, checkpoint_every=100, generators=3, pace=pace)
    world = World(1, model, Plan())
    assert world.run().ok
    order = [(kind, body.get("version", body.get("policy", {}).get("version"))) for kind, body in world.oracle.events]
    for version in range(1, model.steps):
        assert order.index(("batch_logged", version)) < order.index(("published", version))


def order_of(world: World) -> list[tuple[str, int | None]]:
    return [(kind, body.get("version")) for kind, body in world.oracle.events]


def test_steps_go_on_while_a_checkpoint_is_written_but_the_next_checkpoint_waits_for_it() -> None:
    model = Model(steps=6, max_staleness=2, checkpoint_every=2, generators=3, pace=Pace(step=0.3, save=3.0))
    world = World(1, model, Plan())
    assert world.run().ok
    order = order_of(world)
    assert [event for event in order if event[0] == "checkpoint_saved"] == [("checkpoint_saved", v) for v in (2, 4, 6)]
    saved, *following = (order.index(event) for event in [("checkpoint_saved", 2), *(("committed", v) for v in (3, 4))])
    assert following[0] < saved < following[1]


def test_a_trainer_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before() -> None:
    model = Model(steps=6, max_staleness=0, checkpoint_every=2, pace=Pace(save=0.6))
    counts = Counter[int]()
    for tenths in range(15, 40, 3):
        world = World(1, model, Plan(until=6.0, faults=[Kill(tenths / 10, "trainer-0", 0.5)]))
        result = world.run()
        assert result.ok, result.story
        order = order_of(world)
        opened = [n for n, (kind, _) in enumerate(order) if kind == "lineage_opened"]
        saved = [version for kind, version in order[: opened[1]] if kind == "checkpoint_saved"]
        counts[saved[-1] if saved else 0] += 1
    assert counts.keys() >= {0, 2}


def test_a_checkpoint_that_cannot_be_written_is_made_up_for_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, failed = SimLearner.finish_save, []

    async def disk_is_full_at_first(learner: SimLearner) -> None:
        if not failed:
            failed.append(learner)
            raise UserError("the disk is full.")
        await saved(learner)

    monkeypatch.setattr(SimLearner, "finish_save", disk_is_full_at_first)
    world = World(1, Model(steps=6, checkpoint_every=2), Plan())
    result = world.run()
    assert result.ok, result.story
    assert [version for kind, version in order_of(world) if kind == "checkpoint_saved"] == [4, 6]


def test_a_generator_without_room_for_new_weights_waits_and_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, refused = WeightFetcher.fetch, []

    async def refused_at_first(fetcher: WeightFetcher, policy: Policy) -> Path:
        if len(refused) < 3:
            refused.append(policy.version)
            raise OSError(errno.ENOSPC, "No space left on device")
        return await fetch(fetcher, policy)

    monkeypatch.setattr(WeightFetcher, "fetch", refused_at_first)
    world = World(1, Model(steps=4), Plan())
    result = world.run()
    assert result.ok and len(refused) == 3, result.story
    generators = [life for life in world.incarnations if life.role == "generator"]
    assert len(generators) == len({life.process.name for life in generators}), "one was started again"


def test_only_a_trainer_that_was_started_again_reads_groups_from_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    get = Spool.get
    monkeypatch.setattr(Spool, "get", lambda spool, ids: read.extend(ids) or get(spool, ids))
    model = Model(steps=4, checkpoint_every=3, max_staleness=0)
    assert World(3, model, Plan()).run().ok
    assert not read
    world = World(3, model, Plan(until=5.0, faults=[Kill(2.3, "trainer-0", 0.5)]))
    assert world.run().ok
    assert {group for batch in world.oracle.disk.batches.values() for group in batch} >= set(read) > set()


def test_a_trainer_killed_between_a_commit_and_its_publication_has_it_published_by_its_successor() -> None:
    model = Model(steps=4, checkpoint_every=3, max_staleness=1, pace=Pace(write=0.4))
    left_over = 0
    for tenths in (9, 12, 15, 18, 21):
        world = World(3, model, Plan(until=5.0, faults=[Kill(tenths / 10, "trainer-0", 0.3)]))
        result = world.run()
        assert result.ok, result.story
        policies = world.oracle.disk.policies
        assert {version for _, version in policies} >= set(range(1, model.steps + 1))
        restored = min(version for lineage, version in policies if lineage == 1)
        left_over += restored > 0 and (0, restored) not in policies
    assert left_over


@pytest.mark.parametrize("killed_at", [None, 1.4, 1.7, 2.0, 2.3, 2.6])
def test_a_trainer_that_redoes_its_steps_hears_the_same_verdict_of_the_guard(killed_at: float | None) -> None:
    """Every step is beyond a limit, and the fourth is too many: also for whoever redoes the ones before it."""
    model = Model(steps=8, checkpoint_every=1, max_staleness=0, doubtful=1.0, doubtful_steps=4)
    kills = [Kill(killed_at, "trainer-0", 0.3)] if killed_at else []
    world = World(3, model, Plan(until=4.0, faults=kills))
    result = world.run()
    assert result.ok, result.story
    assert result.counters["stopped"] == 1
    assert not world.summary["ok"]
    assert "at step 4: effective_sample_size is 0, for 4 steps in a row" in world.summary["reason"]
    assert (world.oracle.disk.lineage, world.oracle.disk.checkpoint) == (len(kills), 0)


# --- what seeds draw


def test_a_share_of_the_drawn_models_is_slow_large_bulky_or_computes_otherwise() -> None:
    models = [draw_model(Random(seed)) for seed in range(2000)]
    slowest = [max(getattr(model.pace, what) for what in OPERATIONS) / model.stall_seconds for model in models]
    assert 0.04 < sum(share > 0.5 for share in slowest) / len(models) < 0.12
    assert max(slowest) > 2.5
    slow = [model.pace for model, share in zip(models, slowest, strict=True) if share > 0.5]
    assert all(any(getattr(pace, what) > 9.0 for pace in slow) for what in OPERATIONS)
    assert sum(model.steps > 4 and model.batch_size > 2 for model in models) > 20
    assert sum(model.bytes_a_row > MAX_BODY_BYTES for model in models) > 10
    assert sum(model.redo_differs for model in models) > 800
    assert sum(not model.interrupt for model in models) > 150


@pytest.mark.parametrize("size", [MAX_BODY_BYTES - 200, MAX_BODY_BYTES, 3 * MAX_BODY_BYTES])
def test_rows_scores_and_failures_may_be_about_as_large_as_messages(size: int) -> None:
    model = Model(steps=2, bytes_a_row=size, reward_parts=5000)
    world = World(1, model, Plan(until=1.0, mishaps=Mishaps(score_fails=0.55)))
    result = world.run()
    assert result.ok, result.story
    assert all(process.lives == 1 for process in world.processes.values())


def test_a_redo_may_end_with_other_weights() -> None:
    """What was sampled by the weights of the dead trainer is trained all the same: the oracle looks at each token."""
    model = Model(steps=6, checkpoint_every=4, max_staleness=1, redo_differs=True)
    redone = 0
    for killed_at in (1.4, 1.8, 2.2, 2.6):
        world = World(3, model, Plan(until=4.0, faults=[Kill(killed_at, "trainer-0", 0.3)]))
        result = world.run()
        assert result.ok, result.story
        results = world.oracle.results
        versions = {version for writer, version in results if writer.endswith("~1")} & {
            version for writer, version in results if writer.endswith("~2")
        }
        redone += len(versions)
        for version in versions:
            first, second = results["trainer-0~1", version], results["trainer-0~2", version]
            assert (stem(first), first) != (stem(second), second)
            assert stem(first) == stem(second)
    assert redone


def test_a_payload_that_was_spooled_by_a_trainer_that_died_before_it_was_ready_does_not_stay() -> None:
    """Without its manager, nobody sends the group again: it is admitted anew under another id."""
    points = [FailPoint("trainer", "store_samples", "worked", 1, 0.5)]
    faults = [Kill(0.7 * (1 + i), "rollout_manager-0", 0.1) for i in range(5)]
    leftovers = []
    for seed in range(4):
        world = World(seed, Model(), Plan(until=4.0, points=points, faults=faults))
        assert (result := world.run()).ok, result.story
        put, trained = set(world.spooled_by), set().union(*world.oracle.disk.batches.values())
        leftovers.append(put - trained)
    assert any(leftovers)


def test_a_starting_trainer_takes_no_sample_before_it_has_dropped_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was sent again, and became ready, after the master named what to drop, would be dropped with it."""
    refused: list[type] = []
    ask_master = Membership.ask_master

    async def ask(self: Membership, message: Message, *arguments: Any) -> Any:
        answer = await ask_master(self, message, *arguments)
        if isinstance(message, AskRecovery):
            try:
                self._dispatch(SimpleNamespace(message=StoreSamples.model_construct()))
            except Exception as error:
                refused.append(type(error))
        return answer

    monkeypatch.setattr(Membership, "ask_master", ask)
    assert World(1, Model(), Plan()).run().ok
    assert refused == [BusyError]


def test_a_reward_that_drains_while_no_master_says_so_costs_no_group() -> None:
    points = [FailPoint("master", "leave", "before", 1, 3.0)]
    for at in (1.2, 1.6, 2.0):
        world = World(1, Model(steps=8, max_staleness=2), Plan(6.0, [Leave(at, "reward-0", 0.3)], points))
        result = world.run()
        assert result.ok, result.story
        assert not [body for kind, body in world.oracle.events if kind in ("requeued", "discarded")]


# --- scorers


@pytest.mark.parametrize("branching", [False, True])
def test_a_scorer_that_dies_leaves_is_replaced_and_joins_late_costs_no_group_and_each_sample_has_its_columns(
    branching: bool,
) -> None:
    points = [FailPoint("scorer", kind, "handled", 2, 0.5) for kind in HANDLERS["scorer"]]
    happens = [
        Kill(0.8, "scorer-0", 4.0, silent=True),
        Leave(1.5, "scorer-1", 3.0),
        faults.Arrive(2.5, "scorer-9"),
        faults.Replace(5.0, "scorer-1"),
        Kill(5.5, "scorer-4", 1.0),
        Kill(6.0, "scorer-0", 0.3),
    ]
    of_all = Model(
        steps=8, max_staleness=2, scorers=(TEACHER, TEACHER, REFERENCE, LIKED, LIKED), branching=branching, eval_size=4
    )
    for seed in range(2):
        world = World(seed, replace(of_all, judge=seed % 2 > 0), Plan(9.0, happens, points))
        result = world.run()
        assert result.ok, result.story
        assert not [body for kind, body in world.oracle.events if kind in ("requeued", "discarded")]


@pytest.mark.parametrize(("name", "judge"), [(TEACHER, False), (LIKED, False), (LIKED, True)])
def test_a_scorer_that_is_away_for_long_pauses_admission_and_one_that_refuses_rows_fails_their_groups(
    name, judge
) -> None:
    away = World(1, Model(scorers=(name,), judge=judge), Plan(20.0, [Kill(1.0, "scorer-0", 18.0)]))
    assert (result := away.run()).ok, result.story
    assert not [body for kind, body in away.oracle.events if kind in ("requeued", "discarded")]
    for seed, mishaps in enumerate((Mishaps(score_fails=0.3), Mishaps(wrong_columns=0.1))):
        refusing = World(seed, Model(scorers=(name,), judge=judge, managers=2), Plan(5.0, mishaps=mishaps))
        assert (result := refusing.run()).ok, result.story


# --- works that never end


@pytest.mark.parametrize(("role", "work"), [(role, work) for role, works in HANGS.items() for work in works])
def test_work_that_never_ends_costs_time_and_no_run(role: str, work: str) -> None:
    """With a history. What is started or loaded again has one; a trainer loads only then."""
    hangs(role, work, 2.5)


@pytest.mark.parametrize(
    ("role", "work"),
    [
        pytest.param(role, work, marks=() if work in ("starting", "sampling", "step") else pytest.mark.slow)
        for role, works in HANGS.items()
        for work in works
        if (role, work) != ("trainer", "loading")
    ],
)
def test_work_that_never_ends_is_found_without_a_history_too(role: str, work: str) -> None:
    hangs(role, work, 0.3)


def hangs(role: str, work: str, at: float) -> None:
    again = [Kill(at - 0.051, f"{role}-0", 0.05)] if work in ("starting", "loading") else []
    plan = Plan(until=3.5, faults=[*again, Hang(at, f"{role}-0", work)])
    model = with_hangs(Model(steps=12, checkpoint_every=1, group_size=1))
    world = World(1, model, plan)
    result = world.run()
    assert result.ok, result.violation
    assert any(one.toil.hangs for one in world.incarnations)


@pytest.mark.parametrize("role", ["generator", "rollout_manager"])
def test_who_leaves_hands_long_sequences_over_within_a_second(role: str) -> None:
    model = Model(managers=2, generators=2, max_new_tokens=800, drain_seconds=60.0)
    for at in (1.0, 1.6):
        result = World(1, model, Plan(until=4.0, faults=[Leave(at, f"{role}-0", 3.0)]), traced=True).run()
        assert result.ok, result.story
        departure = next(
            line for line in result.trace if f"{role}-0#" in line and "ended: told to leave by SIGTERM" in line
        )
        assert float(departure.split()[0]) < at + 1.0


# --- the command


def test_a_failing_seed_prints_the_story_of_who_is_concerned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulate._garbage_kept", nullcontext)  # it goes through all objects of this process
    console = Console(record=True, width=200)
    assert run_seeds(range(1), 1, None, console)
    assert not run_seeds(range(19, 20), 1, "answers before the commit", console)
    text = console.export_text()
    assert "is answered before" in text
    assert "python tests/simulate.py --mutant 'answers before the commit' --seed" in text


def test_one_seed_is_shown_in_full() -> None:
    console = Console(record=True, width=200)
    assert run_one(7, None, console)
    text = console.export_text()
    assert "master-0 starts" in text
    assert "-> master-0: join(" in text
    assert "no violation" in text


def test_seeds_are_a_range() -> None:
    assert parse_seeds("3:7") == range(3, 7)
    assert parse_seeds("5") == range(5, 6)
    for wrong in ("a:b", "7:3", "", "1:2:3"):
        with pytest.raises(UserError):
            parse_seeds(wrong)


def test_a_pause_of_the_only_generator_that_is_longer_than_stall_seconds_ends_no_run() -> None:
    """Whether it wakes before it would be fenced, or is fenced and started again."""
    for lease, replaced in ((30.0, False), (12.0, True)):
        model = Model(steps=8, stall_seconds=8.0, lease_seconds=lease, lost_seconds=60.0)
        for at in (0.2, 0.8, 1.4, 2.0):
            plan = Plan(until=40.0, faults=[Pause(at, "generator-0", 36.0 if replaced else 20.0, replaced)])
            world = World(1, model, plan)
            result = world.run()
            assert result.ok, result.violation
            assert world.summary["ok"], world.summary["reason"]


def test_a_generator_that_is_away_for_longer_than_stall_seconds_is_waited_for() -> None:
    model = Model(steps=8, stall_seconds=8.0, lease_seconds=30.0, lost_seconds=60.0)
    world = World(1, model, Plan(until=40.0, faults=[Leave(1.0, "generator-0", 20.0)]))
    assert world.run().ok
    assert world.summary["ok"], world.summary["reason"]


def test_a_generator_that_finishes_what_runs_before_it_loads_blocks_nothing() -> None:
    for seed in range(8):
        drawn = World(seed)
        result = simulate(seed, replace(drawn.model, interrupt=False, colocate=False), drawn.plan)
        assert result.ok, result.story


def test_no_sequence_is_asked_for_again_because_of_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: Counter[tuple[int, ...]] = Counter()
    interrupted = []
    generate, load = SimEngine.generate, SimEngine.load

    def count(
        self: SimEngine, request_id: str, tokens: list[int], *rest: Any, **options: Any
    ) -> AsyncIterator[Generation]:
        requests[tuple(tokens)] += 1
        return generate(self, request_id, tokens, *rest, **options)

    async def note(self: SimEngine, *args: Any) -> LoadTimes:
        interrupted.append(await load(self, *args))
        return interrupted[-1]

    monkeypatch.setattr(SimEngine, "generate", count)
    monkeypatch.setattr(SimEngine, "load", note)
    model = Model(steps=8, batch_size=2, group_size=3, max_staleness=3, max_new_tokens=96)
    assert World(1, model, Plan()).run().ok
    assert sum(times.sequences_interrupted for times in interrupted) > 4
    assert set(requests.values()) == {model.group_size}
