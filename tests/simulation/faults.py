"""The faults of a simulation: a plan of what fails and when, drawn from the seed before the simulation begins.

A plan uses only a few kinds of faults, so that over many seeds each kind also occurs without most of the others. After
`Plan.until` there are no faults any more, and the run has to reach its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from simulation.engines import Mishaps
from simulation.network import Weather

# The requests that each role handles. Over many seeds, a process dies at each of the `POINTS` of each handler.
HANDLERS: dict[str, tuple[str, ...]] = {
    "master": (
        "join",
        "heartbeat",
        "leave",
        "ask_snapshot",
        "ask_permits",
        "renew_leases",
        "group_started",
        "group_failed",
        "ask_recovery",
        "publish_policy",
        "ask_reuse",
        "group_ready",
        "ask_batch",
        "commit_step",
        "checkpoint_saved",
        "training_finished",
        "training_failed",
        "step_failed",
        "ask_evaluation",
        "rows_scored",
        "evaluation_done",
        "evaluation_abandoned",
        "scoring_failed",
        "connection_lost",
    ),
    "trainer": ("store_samples", "ask_samples", "store_calls", "ask_calls", "take_devices"),
    "generator": ("open_flow", "generate", "end_jobs", "yield_devices"),
    "reward": ("open_flow", "score", "end_jobs"),
    "scorer": ("open_flow", "score_tokens", "score", "end_jobs"),
}

# What no actor of the simulation asks of another: the monitor's and the other ranks' questions, files, which all see,
# pictures, which no row has, and what a trainer compares that keeps the log-probs of its steps.
NOT_ASKED = {
    "add_reward",
    "ask_config",
    "ask_logprobs",
    "ask_status",
    "fetch_weights",
    "generate_pictured",
    "offer_pictures",
    "send_weights",
    "store_pictures",
    "transfer_done",
}

# What gateways alone ask of the master.
SESSION_HANDLERS = ("ask_session", "adopt_sessions", "discard_session", "report_keys")

Point = Literal["before", "working", "worked", "handled", "answered"]
POINTS: tuple[Point, ...] = ("before", "working", "worked", "handled", "answered")
# The share of the runs that are resumed with other settings.
RESUMED = 0.15
# The share of the runs in which a checkpoint is damaged.
DAMAGED = 0.1
# The share of the runs in which a fault comes right before an event, and how long before it at most.
AIMED, BEFORE_SECONDS = 0.3, 0.5
# The other roles have no disk, so they have no points `working` and `worked`.
WITH_A_DISK = ("master", "trainer")
WITHOUT_A_DISK: tuple[Point, ...] = ("before", "handled", "answered")


@dataclass(frozen=True, slots=True)
class FailPoint:
    """The process dies when the role gets its `nth` request of this `kind`. The point is one of:

    * `before`: before the handler begins;
    * `working`, `worked`: right before and right after the handler's work on its disk, that is, before and after the
      commit;
    * `handled`: after the handler, before the answer is sent;
    * `answered`: right after the answer is sent. The answer of a stream is its first part.
    """

    role: str
    kind: str
    point: Point
    nth: int
    restart_after: float


@dataclass(frozen=True, slots=True)
class Kill:
    """The process dies and is restarted. `steps`: it dies only after that many more of its own callbacks, so that it
    can be in the middle of an operation. `silent`: its machine dies with it, so that no connection is closed."""

    at: float
    process: str
    restart_after: float
    silent: bool = False
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Leave:
    """The process is told to leave (SIGTERM). It is restarted `restart_after` seconds after it left; None: never."""

    at: float
    process: str
    restart_after: float | None


@dataclass(frozen=True, slots=True)
class Pause:
    """The process is suspended for some seconds, without noticing it. `replaced`: a new one is started meanwhile."""

    at: float
    process: str
    seconds: float
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Arrive:
    """One more process of a role joins the run."""

    at: float
    process: str


@dataclass(frozen=True, slots=True)
class Replace:
    """A second process is started in the place of a running one, which does not notice it."""

    at: float
    process: str


@dataclass(frozen=True, slots=True)
class Partition:
    """No message passes from `side` to `other`; unless `one_way`, none passes back either."""

    at: float
    side: tuple[str, ...]
    other: tuple[str, ...]
    seconds: float
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """The connections between two processes break once."""

    at: float
    one: str
    other: str


@dataclass(frozen=True, slots=True)
class Storm:
    """The network has this weather for some seconds."""

    at: float
    weather: Weather
    seconds: float


@dataclass(frozen=True, slots=True)
class SlowDisk:
    """For `seconds`, every disk operation of a process takes up to `slower` seconds longer."""

    at: float
    process: str
    slower: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FullDisk:
    """For `seconds`, the disk of a process has no room for more."""

    at: float
    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ClockJump:
    at: float
    process: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Resume:
    """All processes die, and the run is resumed with so many more steps (less if negative) and another bound. `back`:
    from which of its kept checkpoints, as soon as there is one, the newest is 0; None: from where it was. `spool_lost`:
    it is empty then."""

    at: float
    more_steps: int
    max_staleness: int
    back: int | None = None
    spool_lost: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """A bit flips in the newest checkpoint, as soon as there is one before, and the trainer dies. The model counts as
    one."""

    at: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Every work of this kind (`HANGS`) that the process begins from now on never ends, while the process lives."""

    at: float
    process: str
    work: str


Fault = (
    Kill
    | Leave
    | Pause
    | Arrive
    | Replace
    | Partition
    | Reset
    | Storm
    | SlowDisk
    | FullDisk
    | ClockJump
    | Resume
    | Damage
    | Hang
)

# How the works begin that may hang, by role.
HANGS = {
    "trainer": ("starting", "loading", "step", "a snapshot", "writing", "a copy", "saving"),
    "generator": ("starting", "loading", "sampling"),
    "rollout_manager": ("workflow",),
}


@dataclass(slots=True)
class Plan:
    """All faults of a simulation, which end at `until`. `faults`: in order of time. `points`: each happens when its
    request comes. `mishaps`: failures of the engines, at any time until `until`."""

    until: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    points: list[FailPoint] = field(default_factory=list)
    mishaps: Mishaps = field(default_factory=Mishaps)


def draw(random: Random, processes: list[str], until: float) -> Plan:
    """Draw a plan for these processes, which are named `role-index`."""
    plan = Plan(until)
    kinds = random.sample(sorted(_DRAWS), random.choice((0, 1, 1, 2, 2, 3, 4)))
    if random.random() < 0.6 or not kinds:
        kinds.append("fail-points")
    for kind in kinds:
        _DRAWS[kind](random, plan, processes)
    plan.faults.sort(key=lambda fault: fault.at)
    return plan


def draw_before(random: Random, processes: list[str], until: float, events: Sequence[tuple[float, str]]) -> Fault:
    """Draw a fault that comes right before one of the events of a simulation, of which there are the times and kinds.
    Each kind of event is as likely as each other one, however seldom it happens, and so is each kind of fault: over
    many seeds, all pairs of them come."""
    kind = random.choice(sorted({kind for _, kind in events}))
    at = random.choice([time for time, name in events if name == kind])
    plan = Plan(until)
    random.choice(_SINGLE)(random, plan, processes)
    return replace(plan.faults[0], at=max(0.0, at - BEFORE_SECONDS * random.random() ** 2))


def add_resume(random: Random, plan: Plan) -> None:
    """Add to some plans that the run is resumed with other settings."""
    if random.random() < RESUMED:
        _draw_resume(random, plan, [])
        plan.until = max(plan.until, plan.faults[-1].at + random.uniform(0.5, 2.0))


def _draw_resume(random: Random, plan: Plan, processes: list[str]) -> None:
    at, more_steps = _when(random, plan), random.choice((-2, -1, -1, 0, 1, 2))
    max_staleness = random.choice((0, 1, 2))
    back = random.choice((None, 0, 0, 1, 2))
    plan.faults.append(Resume(at, more_steps, max_staleness, back, back is not None and random.random() < 0.3))


def add_manager_kills(random: Random, plan: Plan) -> None:
    """Add to a plan that both managers die, one after the other, while some samples take long, and that another actor
    dies while it hands on what they had saved."""
    plan.mishaps.straggler, plan.mishaps.straggler_times = 0.15, 4.0
    plan.until = max(plan.until, 5.0)
    for number in range(8):
        plan.faults.append(Kill(0.5 * (1 + number), f"rollout_manager-{number % 2}", random.uniform(0.05, 0.3)))
    role, kind = random.choice((("trainer", "ask_samples"), ("trainer", "ask_calls"), ("master", "ask_reuse")))
    plan.points.append(FailPoint(role, kind, random.choice(POINTS), 1 + int(random.expovariate(0.3)), _restart(random)))


def add_damage(random: Random, plan: Plan) -> None:
    """Add to some plans that the newest checkpoint is damaged."""
    if random.random() < DAMAGED:
        plan.faults.append(Damage(_when(random, plan)))


def add_scorer_faults(random: Random, plan: Plan, count: int) -> None:
    """Add to a plan what happens to the scorers: some die, leave, are replaced or slow; more join; some give wrong
    columns."""
    names = [f"scorer-{index}" for index in range(count)]
    draws = (_draw_kills, _draw_leaves, _draw_replacements, _draw_pauses, _draw_scorer_points)
    for draw_faults in random.sample(draws, random.choice((1, 2, 3))):
        draw_faults(random, plan, [random.choice(names)] if draw_faults is _draw_leaves else names)  # none is a spare
    if random.random() < 0.4:  # of any of the names
        plan.faults.append(Arrive(_when(random, plan), f"scorer-{count + random.randrange(count)}"))
    if random.random() < 0.4:
        plan.mishaps.wrong_columns = random.choice((0.05, 0.3))


def add_gateway_faults(random: Random, plan: Plan, count: int) -> None:
    """Add to a plan what happens to the gateways: some die, leave, are replaced, slow or not heard, and more join; and
    that others die while they answer them."""
    names = [f"gateway-{index}" for index in range(count)]
    draws = (_draw_kills, _draw_replacements, _draw_pauses, _draw_clock_jumps, _draw_leaves, _draw_session_points)
    for draw_faults in random.sample(draws, random.choice((1, 2, 3))):
        draw_faults(random, plan, names)
    if random.random() < 0.4:
        plan.faults.append(Arrive(_when(random, plan), f"gateway-{count}"))
    if random.random() < 0.3:
        other = random.choice(("master-0", "trainer-0", "generator-0"))
        plan.faults.append(Partition(_when(random, plan), (random.choice(names),), (other,), random.choice((3.0, 8.0))))


def rename(plan: Plan, role: str, process: str) -> None:
    """What happens to processes of the role, of which there are none, happens to this process."""
    for number, fault in enumerate(plan.faults):
        if isinstance(fault, Kill | Leave | Pause | Replace | ClockJump | Hang) and fault.process.startswith(role):
            if isinstance(fault, Leave):
                fault = replace(fault, restart_after=fault.restart_after or 1.0)  # there may be no other one
            plan.faults[number] = replace(fault, process=process)


def _draw_session_points(random: Random, plan: Plan, processes: list[str]) -> None:
    for _ in range(random.choice((1, 2))):
        kind = random.choice((*SESSION_HANDLERS, *SESSION_HANDLERS, "store_calls", "store_samples", "ask_calls"))
        role = "master" if kind in SESSION_HANDLERS else "trainer"
        nth = 1 + int(random.expovariate(0.5))
        plan.points.append(FailPoint(role, kind, random.choice(POINTS), nth, _restart(random)))


def _draw_scorer_points(random: Random, plan: Plan, processes: list[str]) -> None:
    for _ in range(random.choice((1, 2))):
        kind, point = random.choice(HANDLERS["scorer"]), random.choice(WITHOUT_A_DISK)
        plan.points.append(FailPoint("scorer", kind, point, 1 + int(random.expovariate(0.5)), _restart(random)))


def draw_hang(random: Random, processes: list[str], until: float) -> Hang:
    """Draw a hang in one of these processes, early, since most runs are short."""
    name = random.choice([name for name in processes if name.rpartition("-")[0] in HANGS])
    return Hang(random.uniform(0.0, until / 3), name, random.choice(HANGS[name.rpartition("-")[0]]))


def _when(random: Random, plan: Plan) -> float:
    return random.triangular(0.1, plan.until, plan.until * 0.5)


def _restart(random: Random) -> float:
    """Seconds until a restart: usually short, sometimes so long that other actors notice the absence."""
    return random.uniform(0.05, 0.8) if random.random() < 0.7 else random.uniform(1.0, 6.0)


def _some(random: Random, processes: list[str]) -> str:
    # The master and the trainer have more weight: there is only one of each, and their loss is the most severe.
    weights = [4 if name.startswith("trainer") else 2 if name.startswith("master") else 1 for name in processes]
    return random.choices(processes, weights)[0]


def _draw_kills(random: Random, plan: Plan, processes: list[str]) -> None:
    for _ in range(random.choice((1, 1, 2, 3))):
        silent, steps = random.random() < 0.25, random.choice((0, 1 + int(random.expovariate(0.05))))
        plan.faults.append(Kill(_when(random, plan), _some(random, processes), _restart(random), silent, steps))


def _draw_points(random: Random, plan: Plan, processes: list[str]) -> None:
    for _ in range(random.choice((1, 1, 2))):
        role = random.choices(("master", "trainer", "generator", "reward"), (8, 2, 1, 1))[0]
        kind = random.choice(HANDLERS[role])
        point = random.choice(POINTS if role in WITH_A_DISK else WITHOUT_A_DISK)
        rare = _PROVOKED_BY.get(kind)
        if rare is not None:
            rare(random, plan, processes)
        nth = 1 + int(random.expovariate(2.0 if rare else 0.5))
        plan.points.append(FailPoint(role, kind, point, nth, _restart(random)))


def _draw_trainer_kill(random: Random, plan: Plan, processes: list[str]) -> None:
    plan.faults.append(Kill(_when(random, plan), "trainer-0", random.uniform(0.05, 0.5)))


def _draw_manager_kills(random: Random, plan: Plan, processes: list[str]) -> None:
    """Managers die again and again, each after some work, so that what is stored of it is used."""
    managers = [name for name in processes if name.startswith("rollout_manager")]
    first = random.uniform(0.5, plan.until / 2)
    for number in range(random.choice((2, 3, 4))):
        at = min(plan.until, first + number * random.uniform(0.3, 0.8))
        plan.faults.append(Kill(at, random.choice(managers), random.uniform(0.05, 0.3)))


def _draw_server_kill(random: Random, plan: Plan, processes: list[str]) -> None:
    """A server of jobs dies, and nobody takes its place for long."""
    servers = [name for name in processes if name.startswith(("generator", "reward"))]
    plan.faults.append(Kill(_when(random, plan), random.choice(servers), random.uniform(2.0, 6.0)))


def _draw_leaves(random: Random, plan: Plan, processes: list[str]) -> None:
    others = [name for name in processes if not name.startswith("master")]
    name = random.choice(others)
    spare = sum(other.rpartition("-")[0] == name.rpartition("-")[0] for other in processes) > 1
    stays_away = spare and random.random() < 0.5
    plan.faults.append(Leave(_when(random, plan), name, None if stays_away else _restart(random)))


def _draw_pauses(random: Random, plan: Plan, processes: list[str]) -> None:
    name = _some(random, processes)
    seconds = random.choice((0.5, 2.0, 5.0, 8.0)) * random.uniform(0.5, 1.5)
    replaced = not name.startswith("master") and random.random() < 0.3
    plan.faults.append(Pause(_when(random, plan), name, seconds, replaced))


def _draw_arrivals(random: Random, plan: Plan, processes: list[str]) -> None:
    role = random.choice(("generator", "reward", "rollout_manager"))
    plan.faults.append(Arrive(_when(random, plan), f"{role}-9"))


def _draw_replacements(random: Random, plan: Plan, processes: list[str]) -> None:
    others = [name for name in processes if not name.startswith("master")]
    for _ in range(random.choice((1, 1, 2))):
        plan.faults.append(Replace(_when(random, plan), _some(random, others)))


def _draw_partitions(random: Random, plan: Plan, processes: list[str]) -> None:
    side = tuple(random.sample(processes, random.randint(1, max(1, len(processes) // 2))))
    other = tuple(name for name in processes if name not in side)
    if random.random() < 0.3:
        other = (random.choice(other),)
    if random.random() < 0.5:
        side, other = other, side
    seconds = random.choice((0.5, 3.0, 8.0))
    plan.faults.append(Partition(_when(random, plan), side, other, seconds, one_way=random.random() < 0.4))


def _draw_resets(random: Random, plan: Plan, processes: list[str]) -> None:
    for _ in range(random.choice((1, 3, 6))):
        one, other = random.sample(processes, 2)
        plan.faults.append(Reset(_when(random, plan), one, other))


def _draw_loss(random: Random, plan: Plan, processes: list[str]) -> None:
    _add_storm(random, plan, Weather(loss=random.choice((0.01, 0.05, 0.2))))


def _draw_duplication(random: Random, plan: Plan, processes: list[str]) -> None:
    _add_storm(
        random, plan, Weather(duplication=random.choice((0.02, 0.1, 0.4)), delay_seconds=random.choice((0.1, 2.0)))
    )


def _draw_reordering(random: Random, plan: Plan, processes: list[str]) -> None:
    _add_storm(random, plan, Weather(reordering=random.choice((0.02, 0.1, 0.4)), latency=random.choice((0.002, 0.05))))


def _draw_delay(random: Random, plan: Plan, processes: list[str]) -> None:
    _add_storm(
        random, plan, Weather(delay=random.choice((0.02, 0.1, 0.4)), delay_seconds=random.choice((0.3, 2.0, 5.0)))
    )


def _add_storm(random: Random, plan: Plan, weather: Weather) -> None:
    begins = random.uniform(0.0, plan.until * 0.6)
    plan.faults.append(Storm(begins, weather, random.uniform(0.5, plan.until - begins)))


def _draw_slow_disk(random: Random, plan: Plan, processes: list[str]) -> None:
    name = random.choice([name for name in processes if name.startswith(("master", "trainer"))])
    plan.faults.append(SlowDisk(_when(random, plan), name, random.choice((0.05, 0.5, 2.0)), random.uniform(0.5, 4.0)))


def _draw_full_disk(random: Random, plan: Plan, processes: list[str]) -> None:
    for name in random.choice((["master-0"], ["trainer-0"], ["master-0", "trainer-0"])):
        plan.faults.append(FullDisk(_when(random, plan), name, random.choice((0.5, 3.0, 10.0))))


def _draw_clock_jumps(random: Random, plan: Plan, processes: list[str]) -> None:
    plan.faults.append(
        ClockJump(_when(random, plan), _some(random, processes), random.choice((0.5, 3.0, 10.0, 3600.0)))
    )


def _draw_stragglers(random: Random, plan: Plan, processes: list[str]) -> None:
    plan.mishaps.straggler = random.choice((0.05, 0.2, 0.5))
    plan.mishaps.straggler_times = random.choice((2.0, 8.0))


def _draw_loads(random: Random, plan: Plan, processes: list[str]) -> None:
    plan.mishaps.load_fails = random.choice((0.2, 0.5, 0.9))
    plan.mishaps.load_tears = random.choice((0.0, 0.0, 0.2))


def _draw_scores(random: Random, plan: Plan, processes: list[str]) -> None:
    plan.mishaps.score_fails = random.choice((0.1, 0.5, 0.8))


# Requests that are rare unless a fault leads to them, and the function that draws such a fault.
_PROVOKED_BY = {
    "ask_calls": _draw_manager_kills,
    "ask_recovery": _draw_trainer_kill,
    "ask_reuse": _draw_manager_kills,
    "ask_samples": _draw_manager_kills,
    "connection_lost": _draw_server_kill,
    "group_failed": _draw_scores,
    "leave": _draw_leaves,
    "publish_policy": _draw_trainer_kill,
    "renew_leases": _draw_stragglers,
    "scoring_failed": _draw_scores,
}

_DRAWS = {
    "arrivals": _draw_arrivals,
    "clock jumps": _draw_clock_jumps,
    "delay": _draw_delay,
    "duplication": _draw_duplication,
    "fail-points": _draw_points,
    "full disk": _draw_full_disk,
    "kills": _draw_kills,
    "leaves": _draw_leaves,
    "loads": _draw_loads,
    "loss": _draw_loss,
    "managers": _draw_manager_kills,
    "partitions": _draw_partitions,
    "pauses": _draw_pauses,
    "reordering": _draw_reordering,
    "replacements": _draw_replacements,
    "resets": _draw_resets,
    "scores": _draw_scores,
    "slow disk": _draw_slow_disk,
    "stragglers": _draw_stragglers,
}

# One for each kind of fault that may befall a run at any moment.
_SINGLE = (
    _draw_kills,
    _draw_leaves,
    _draw_pauses,
    _draw_replacements,
    _draw_partitions,
    _draw_resets,
    _draw_loss,
    _draw_slow_disk,
    _draw_full_disk,
    _draw_clock_jumps,
    _draw_resume,
)
