"""Routing: what adaptive limits and moves are good for in a model of engines, and that in balance they do nothing."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.generation.moves import REST_SECONDS, plan_moves
from areal.generation.routing import Concurrency, GeneratorLoad, expected, fullness, groups_that_fit

# ------------------------------------------------------------------------------------ a model of engines with little KV

NUMBERS = itertools.count()
PROMPT = 50


@dataclass(frozen=True)
class Sequence:
    """One that an asker has at a generator (areal.generation.moves.Sequence)."""

    number: int
    generator: str
    since: float
    prefix: int
    sampled: int
    remaining: int
    min_version: int


@dataclass(eq=False)
class Request:
    """A sequence in the model: `length` tokens to sample."""

    name: str
    length: int
    sampled: int = 0
    since: float = 0.0


@dataclass
class Engine:
    """Decodes a token of every running sequence in a step, which takes longer the more run. Whoever came last is
    preempted where the KV is full, and its prefix is prefilled again. `kv`: tokens; `slots`: most that run."""

    kv: int
    slots: int
    step_seconds: float = 0.01  # with all slots taken
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    used: int = 0

    def step(self) -> list[Request]:
        """Returns what is finished."""
        prefilled = 0
        while self.waiting and len(self.running) < self.slots:
            prefix = PROMPT + self.waiting[0].sampled
            if self.running and self.used + prefix > self.kv:
                break
            prefilled += prefix
            self.used += prefix
            self.running.append(self.waiting.pop(0))
        while self.used + len(self.running) > self.kv and len(self.running) > 1:
            self.waiting.insert(0, self.running.pop())
            self.used -= PROMPT + self.waiting[0].sampled
            self.preemptions += 1
        for request in self.running:
            request.sampled += 1
        self.tokens += len(self.running)
        self.used += len(self.running)
        share = (0.25 + len(self.running) / self.slots) / 1.25
        self.seconds += self.step_seconds * (share + prefilled * 0.002)
        finished_requests = [request for request in self.running if request.sampled == request.length]
        for request in finished_requests:
            self.running.remove(request)
            self.used -= PROMPT + request.sampled
        return finished_requests

    def take(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        line = self.running if request in self.running else self.waiting
        line.remove(request)
        self.used -= (PROMPT + request.sampled) * (line is self.running)


def generate(kv: int, limit: Concurrency | int, seconds: float = 40.0) -> Engine:
    """An engine that is kept as full as the limit allows, with a look at it each second."""
    engine, lengths, names, looks = Engine(kv, slots=64), random.Random(1), iter(range(10**6)), 0
    while engine.seconds < seconds:
        maximum = limit if isinstance(limit, int) else limit.limit
        while len(engine.running) + len(engine.waiting) < maximum:
            engine.take(Request(f"{next(names)}", 1 + min(999, int(lengths.expovariate(1 / 300)))))
        engine.step()
        if isinstance(limit, Concurrency) and engine.seconds > looks:
            looks += 1
            limit.adapt(len(engine.running), len(engine.waiting), engine.used / kv, engine.preemptions)
    return engine


def test_with_room_for_all_the_limit_stays_at_the_ceiling():
    limit = Concurrency(64)
    generate(kv=100_000, limit=limit)
    assert limit.limit == 64


@pytest.mark.parametrize("kv", [9_000, 12_000, 16_000])
def test_where_kv_is_short_fewer_sequences_are_preempted_at_about_the_same_throughput(kv):
    full, adapted = generate(kv, 64), generate(kv, Concurrency(64))
    assert adapted.preemptions < full.preemptions / 5
    assert adapted.tokens > 0.95 * full.tokens


def test_after_pressure_the_limit_comes_back():
    limit = Concurrency(64)
    limit.adapt(running=40, waiting=24, kv_use=0.99, preemptions=3)
    assert limit.limit == 38
    for _ in range(16):
        limit.adapt(running=limit.limit, waiting=0, kv_use=0.5, preemptions=3)
    assert limit.limit == 64


def test_signs_of_the_same_pressure_count_once():
    limit = Concurrency(64)
    for preemptions in range(1, 5):
        limit.adapt(running=40, waiting=24, kv_use=0.99, preemptions=preemptions)
    assert limit.limit == 38


def test_a_limit_that_holds_nothing_back_does_not_grow():
    limit = Concurrency(64)
    limit.adapt(running=40, waiting=24, kv_use=0.99, preemptions=0)
    for _ in range(50):
        limit.adapt(running=8, waiting=0, kv_use=0.1, preemptions=0)
    assert limit.limit == 38


LOOKS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.floats(0, 1), st.integers(0, 5)))


@settings(max_examples=50)
@given(st.integers(1, 100), LOOKS)
def test_whatever_an_engine_says_the_limit_is_between_1_and_the_ceiling(ceiling, looks):
    limit = Concurrency(ceiling)
    for look in looks:
        limit.adapt(*look)
        assert 1 <= limit.limit <= ceiling


@pytest.mark.parametrize(
    ("has", "in_hand", "groups"), [(0, 0, 9), (64, 64, 1), (71, 71, 1), (72, 72, 0), (40, 120, 1), (40, 121, 0)]
)
def test_some_sequences_wait_for_each_place_and_what_is_scored_takes_none_but_is_limited(has, in_hand, groups):
    assert groups_that_fit(samples=8, places=64, sequences=has, in_hand=in_hand) == groups


# --------------------------------------------------------------------------------------------------------- first choice


def test_what_the_asker_has_begun_since_a_load_was_told_counts_once_for_each_asker():
    load = GeneratorLoad(sequences=20, asker_sequences=5, limit=64, version=0)
    assert expected(load, asker_sequences=5, askers=4) == 20
    assert expected(load, asker_sequences=8, askers=4) == 32
    assert expected(load, asker_sequences=0, askers=4) == 0


def test_a_generator_with_a_lower_limit_is_full_earlier():
    assert fullness(GeneratorLoad(8, 0, 16, 0), 0, 1, 0) == fullness(GeneratorLoad(32, 0, 64, 0), 0, 1, 0)


def test_older_weights_count_as_load():
    behind, busier = GeneratorLoad(0, 0, 64, version=3), GeneratorLoad(8, 0, 64, version=4)
    assert fullness(behind, 0, 1, min_version=4) > fullness(busier, 0, 1, min_version=4)
    assert fullness(behind, 0, 1, min_version=3) < fullness(busier, 0, 1, min_version=3)


# ---------------------------------------------------------------------------------------------------------------- moves


def on(generator: str, n: int, sampled: int = 500, remaining: int = 1500, since: float = 0.0, needs: int = 0):
    return [
        Sequence(next(NUMBERS), generator, since, PROMPT + sampled, sampled, remaining, min_version=needs)
        for i in range(n)
    ]


def loads_of(sequences: list[Sequence], limits: dict[str, int], version: int = 0) -> dict[str, GeneratorLoad]:
    count = {name: sum(sequence.generator == name for sequence in sequences) for name in limits}
    return {name: GeneratorLoad(count[name], count[name], limit, version) for name, limit in limits.items()}


BOTH = {"a": 64, "b": 64}


def moved(sequences: list[Sequence], limits: dict[str, int] = BOTH, askers: int = 1, version: int = 0) -> int:
    plan = plan_moves(loads_of(sequences, limits, version), sequences, askers, now=REST_SECONDS)
    assert all(sequence.generator != target for sequence, target in plan)
    assert len({sequence.number for sequence, _ in plan}) == len(plan)
    return len(plan)


def test_a_full_generator_gives_to_an_idle_one_until_they_are_nearly_even():
    assert 20 <= moved(on("a", 64)) <= 32


@pytest.mark.parametrize(
    ("a", "b"), [(64, 64), (64, 50), (20, 10), (10, 0), (0, 0)], ids=["full", "nearly full", "half", "tail", "idle"]
)
def test_in_balance_and_where_few_are_left_nothing_moves(a, b):
    assert moved(on("a", a) + on("b", b)) == 0


def test_with_one_generator_nothing_moves():
    assert moved(on("a", 100), {"a": 64}) == 0


def test_a_sequence_that_is_nearly_done_or_has_a_long_prefix_stays():
    assert moved(on("a", 64, remaining=10)) == 0
    assert moved(on("a", 64, sampled=30_000, remaining=1_000)) == 0


def test_who_came_only_just_stays():
    assert moved(on("a", 64, since=1.0)) == 0


def test_nothing_moves_to_where_it_would_wait_for_weights():
    assert moved(on("a", 64, needs=5), version=4) == 0
    assert moved(on("a", 64, needs=5), version=5) > 0


def test_many_askers_do_together_what_one_would_do_alone():
    loads = {"a": GeneratorLoad(64, 16, 64, 0), "b": GeneratorLoad(0, 0, 64, 0)}
    together = 4 * len(plan_moves(loads, on("a", 16), askers=4, now=REST_SECONDS))
    assert abs(together - moved(on("a", 64))) <= 4


def run_to_the_end(lengths: dict[str, list[int]], moves: bool) -> tuple[float, int, dict[str, int]]:
    """Seconds until the last of these sequences is done on its generator or where it moved to, the moves, and the
    tokens sampled of each. Each generator has a clock of its own; the one that is behind goes on."""
    engines = {name: Engine(kv=10**6, slots=32, step_seconds=0.03) for name in lengths}
    for name, many in lengths.items():
        for i, length in enumerate(many):
            engines[name].take(Request(f"{name}-{i}", length))
    count, sampled, looked = 0, {}, 0.0
    while any(engine.running or engine.waiting for engine in engines.values()):
        busy = [engine for engine in engines.values() if engine.running or engine.waiting]
        engine = min(busy, key=lambda engine: engine.seconds)
        sampled |= {request.name: request.sampled for request in engine.step()}
        now = min(item.seconds for item in busy)
        if moves and now >= looked + 2.0:
            looked = now
            count += move(engines, now)
    return max(engine.seconds for engine in engines.values()), count, sampled


def move(engines: dict[str, Engine], now: float) -> int:
    here = [(name, request) for name, engine in engines.items() for request in engine.running + engine.waiting]
    sequences = [
        Sequence(number, name, r.since, PROMPT + r.sampled, r.sampled, 4000 - r.sampled, 0)
        for number, (name, r) in enumerate(here)
    ]
    plan = plan_moves(loads_of(sequences, dict.fromkeys(engines, 32)), sequences, 1, now)
    for sequence, target in plan:
        request = here[sequence.number][1]
        engines[sequence.generator].remove(request)
        request.since = now
        engines[target].take(request)
        engines[target].seconds = max(engines[target].seconds, now)
    return len(plan)


def long_tailed(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [min(4000, 1 + int(chance.lognormvariate(6.6, 0.9))) for _ in range(n)]


def test_where_one_generator_has_all_the_work_moves_end_it_much_sooner_and_no_token_is_lost():
    lengths = {"a": long_tailed(64, seed=3), "b": []}
    stay, _, _ = run_to_the_end(lengths, moves=False)
    seconds, count, sampled = run_to_the_end(lengths, moves=True)
    assert count > 0
    assert seconds < 0.75 * stay
    assert sampled == {f"a-{i}": length for i, length in enumerate(lengths["a"])}


def test_where_the_work_is_even_moves_cost_nothing():
    lengths = {"a": long_tailed(32, seed=1), "b": long_tailed(32, seed=2)}
    stay, _, _ = run_to_the_end(lengths, moves=False)
    seconds, _, _ = run_to_the_end(lengths, moves=True)
    assert seconds <= 1.01 * stay
