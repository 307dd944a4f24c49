"""Models of simulated clusters: their size, settings and pace, and how a seed draws them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from areal.base.plugins import load
from areal.config import Config
from areal.data.history import History
from areal.staleness.standstills import UNKNOWN
from protocols.codec import MAX_BODY_BYTES
from simulation.engines import JUDGED, LIKED, LIKED_MOST, LIKED_WEIGHT, REFERENCE, TEACHER, TOGETHER, Pace

MASTER = "tcp://master-0:5555"
MODEL = "model"
BRANCHING = "simulation.engines:branching"
DIFFICULTY = "simulation.model:Difficulty"
SKIPS_FLAT = "simulation.model:skip_flat"
# Samplers and their options. Runs are short.
SAMPLERS: dict[str, dict[str, Any]] = {"shuffle": {}, DIFFICULTY: {"half_life": 2.0}, SKIPS_FLAT: {}}

Difficulty = load(str(Path(__file__).parents[2] / "configs/examples/difficulty/difficulty.py:Difficulty"), "sampler")


def skip_flat(history: History, prompt: int) -> int:
    """A user's sampler: the rows in order, but one whose last group had no signal is left out of the next epoch."""
    index, rows = history.last + 1, len(history.data)
    while (row := history.of(index)) and row.flat and index // rows - row.index // rows <= 1:
        index += 1
    return index


@dataclass(frozen=True, slots=True)
class Model:
    """The size, settings and pace of a simulated run. Times are in virtual seconds."""

    steps: int = 4
    batch_size: int = 1
    group_size: int = 2
    oversample: int = 0
    moves: float = 0.0
    """Share of the running sequences that move to another generator at each balancing."""
    max_staleness: int = 1
    on_straggler: str = "wait"
    on_failed_sample: str = "requeue"
    run_ahead: str = "max"
    generators: int = 1
    managers: int = 1
    rewards: int = 1
    scorers: tuple[str, ...] = ()
    """The names of the scorers, one for each process."""
    gateways: int = 0
    users: int = 3
    share: float = 0.0
    """Of all groups alive, how many may be sessions; 1: there are no rows."""
    without_permit: str = "serve"
    serve: str = "newest"
    session_seconds: float = 6.0
    idle_seconds: float = 3.0
    judge: bool = False
    """Whether LIKED is a judge."""
    eval_size: int = 0
    every: int = 0
    samples: int = 1
    checkpoint_every: int = 2
    filter_zero_signal: bool = False
    doubtful: float = 0.0
    """Share of the steps whose metrics are beyond the guard's limits."""
    doubtful_steps: int = 2
    """Number of such steps in a row after which the guard ends the run."""
    redo_differs: bool = False
    """Whether the result of a step differs between trainers, as on a GPU."""
    sampler: str = "shuffle"
    size: int | None = None
    """Number of rows in each epoch; None: the data has no end."""
    bytes_a_row: int = 0
    """Size of a field of each row, which travels to the rewards."""
    reward_parts: int = 0
    """Number of parts of each score, and about the length of the text of each failure."""
    groups: bool = False
    """Whether there is a reward of groups, beside that of each sample."""
    branching: bool = False
    """Whether a sample is many calls, some of them at the same time, instead of one."""
    max_new_tokens: int = 12
    save_every: int = 0
    """Tokens of an unfinished sample after which its calls are saved; 0: they are not."""
    stream_interval: int = 6
    concurrent: int = 4
    interrupt: bool = True
    colocate: bool = False
    heartbeat_seconds: float = 2.0
    lease_seconds: float = 6.0
    lost_seconds: float = 14.0
    stall_seconds: float = 240.0
    evaluation_seconds: float | None = 20.0
    compact_events: int = 10_000
    hang_seconds: float = 120.0
    drain_seconds: float = 3.0
    farewell: bool = True
    """Whether the simulation continues after the end of the run, until all actors have left."""
    pace: Pace = field(default_factory=Pace)
    faults_until: float = 3.0
    patience: float = 60.0
    """Seconds within which the run has to reach its end, once the faults have ended."""

    @property
    def processes(self) -> list[str]:
        counts = {
            "master": 1,
            "trainer": 1,
            "generator": self.generators,
            "reward": self.rewards,
            "scorer": len(self.scorers),
            "rollout_manager": self.managers,
            "evaluator": 1 if self.eval_size else 0,
            "gateway": self.gateways,
        }
        return [f"{role}-{index}" for role, number in counts.items() for index in range(number)]


@functools.lru_cache(maxsize=1024)
def config_of(model: Model) -> Config:
    """The configuration of the run, cached for each model."""
    options = {"url": f"scorer:{LIKED}", "template": "{{ prompt }}{{ completion }}", "high": LIKED_MOST}
    is_judged = model.judge and LIKED in model.scorers
    teaching = {"teacher_coef": 0.5, "teacher_top_k": 2}
    return Config.model_validate(
        {
            "name": "simulation",
            "model": MODEL,
            "steps": model.steps,
            "batch_size": model.batch_size,
            "group_size": model.group_size,
            "oversample": model.oversample,
            "max_staleness": model.max_staleness,
            "on_straggler": model.on_straggler,
            "on_failed_sample": model.on_failed_sample,
            "run_ahead": model.run_ahead,
            "colocate": model.colocate,
            "filter_zero_signal": model.filter_zero_signal,
            "gateway": {
                "count": model.gateways,
                "share": model.share,
                "without_permit": model.without_permit,
                "serve": model.serve,
                "session_seconds": model.session_seconds,
                "score": model.share < 1 or model.eval_size > 0,
                "idle_seconds": model.idle_seconds,
                "keys": {"users": {"sha256": "0" * 64, "rights": ["serve", "reward"]}} if model.gateways else {},
            },
            "guard": {"patience": model.doubtful_steps},
            "observe": {"rollouts": "none"},  # their notes have times, which no two runs share
            "data": {
                "source": "addition",
                "eval_size": model.eval_size,
                "sampler": model.sampler,
                "sampler_options": SAMPLERS[model.sampler],
            },
            "sampling": {"max_new_tokens": model.max_new_tokens},
            "reward": {
                "functions": ({} if model.share == 1 and not model.eval_size else {"addition": 1.0})
                | ({JUDGED if is_judged else LIKED: LIKED_WEIGHT} if LIKED in model.scorers else {})
                | dict.fromkeys([TOGETHER] * model.groups, 1.0),
                "options": {JUDGED: options} if is_judged else {},
                "groups": [TOGETHER] * model.groups,
                "timeout_seconds": 2.0,
                "credit": "return_to_go",
            },
            "rollout_manager": {
                "workflow": BRANCHING if model.branching else "single_turn",
                "save_every_tokens": model.save_every,
            },
            "generator": {
                "count": model.generators,
                "max_concurrent_rollouts": model.concurrent,
                "stream_interval": model.stream_interval,
                "interrupt": model.interrupt,
            },
            "evaluator": {
                "every": model.every,
                "temperature": 0.5,
                "samples": model.samples,
                "timeout_seconds": model.evaluation_seconds,
            },
            "trainer": {
                "checkpoint_every": model.checkpoint_every,
                "minibatches": 1,
                "advantage_mean": "batch" if model.share else "group",
                "teacher": TEACHER if TEACHER in model.scorers else None,
                **(teaching if TEACHER in model.scorers and not model.filter_zero_signal else {}),
                "reference": f"scorer:{REFERENCE}" if REFERENCE in model.scorers else None,
                "kl_coef": 0.1 if REFERENCE in model.scorers else 0.0,
            },
            "scorers": {
                name: {
                    "model": MODEL,
                    "count": model.scorers.count(name),
                    "chat": False,
                    **({"kind": "judge" if model.judge else "reward_model"} if name == LIKED else {}),
                }
                for name in dict.fromkeys(model.scorers)
            },
            "master": {
                "address": MASTER,
                "lease_seconds": model.lease_seconds,
                "lost_seconds": model.lost_seconds,
                "stall_seconds": model.stall_seconds,
                "hang_seconds": model.hang_seconds,
                "drain_seconds": model.drain_seconds,
            },
        }
    )


# Steps, batch size B and group size G of drawn models: as small as possible, but each rule of the ledger still matters.
SIZES = ((2, 1, 2), (2, 2, 1), (3, 1, 1), (3, 1, 2), (3, 2, 1), (4, 1, 1))
# The share of the models that have a reward of groups.
GROUPS = 0.2
# Shares of the models that are larger, that have an operation that takes up to a few times `stall_seconds`, and whose
# messages are about as large as messages may be.
LARGER, SLOW, BULKY = 0.05, 0.08, 0.03
SLOW_STALL_SECONDS = 18.0
# The share of the models in which something hangs, and the least limit of a standstill in them: an actor may wait for a
# master that is away for almost as long.
HANGS, HANG_SECONDS = 0.05, 20.0
# The share of the runs that have scorers.
SCORERS = 0.25
# The share of the runs that have gateways, and among these of those without rows.
GATEWAYS, SESSIONS_ALONE = 0.15, 0.4
OPERATIONS = ("score", "save", "restore", "load", "start", "write", "step")


def draw_scorers(random: Random) -> tuple[str, ...]:
    """Draw which scorers a run has, and how many of each name."""
    names = random.sample((TEACHER, REFERENCE, LIKED), random.choice((1, 2, 3)))
    return tuple(name for name in names for _ in range(random.choice((1, 1, 2))))


def with_gateways(model: Model, random: Random) -> Model:
    """`model` with gateways, and with users whose sessions are trained beside rows, or alone."""
    alone = random.random() < SESSIONS_ALONE
    return replace(
        model,
        gateways=random.choice((1, 2, 2)),
        users=random.choice((2, 3, 5)),
        share=1.0 if alone else random.choice((0.5, 0.8)),
        managers=0 if alone else model.managers,
        max_staleness=model.max_staleness if alone else max(1, model.max_staleness),
        without_permit=random.choice(("serve", "wait")),
        session_seconds=6.0 if alone else random.choice((6.0, 3600.0)),
        idle_seconds=random.choice((2.0, 5.0)) if alone else random.choice((2.0, 3600.0)),
        sampler="shuffle" if alone else model.sampler,
        size=None if alone else model.size,
        patience=model.patience + 60.0,
    )


def with_hangs(model: Model) -> Model:
    """`model` with a limit of standstills, and with the patience that a hang without a history needs: of a user's
    limit of an evaluation, three pass before the only generator is fenced, and the evaluation is given up."""
    patience = model.patience + 2 * UNKNOWN * HANG_SECONDS
    return replace(model, hang_seconds=HANG_SECONDS, evaluation_seconds=None, patience=patience)


def draw_model(random: Random) -> Model:
    """Draw a small cluster and a short run, with few exceptions."""
    steps, batch_size, group_size = random.choice(SIZES)
    eval_size = random.choice((0, 0, 0, 0, 0, 4))
    generators = random.choice((1, 1, 1, 2))
    moves = random.choice((0.0, 0.3)) if generators > 1 else 0.0
    stall_seconds, pace, longest = random.choice((240.0, 240.0, 240.0, 36.0)), Pace(), 0.0
    max_new_tokens = 12
    if random.random() < LARGER:
        steps, batch_size, group_size = random.randint(5, 8), random.randint(1, 4), random.randint(1, 3)
        if (
            random.random() < 0.5
        ):  # sequences begin so late, last so long, and move so often, that versions change meanwhile
            generators, moves, max_new_tokens, pace = 2, 0.5, 60, replace(pace, first_token=0.3)
    if random.random() < SLOW:
        stall_seconds = SLOW_STALL_SECONDS
        longest = stall_seconds * random.uniform(0.5, 3.0)
        pace = replace(pace, **dict.fromkeys(random.sample(OPERATIONS, random.choice((1, 1, 2))), longest))
    bytes_a_row = reward_parts = 0
    if random.random() < BULKY:
        bytes_a_row = random.choice((MAX_BODY_BYTES - random.randrange(1000), 3 * MAX_BODY_BYTES))
        reward_parts = random.choice((0, 5000))
    manner = random.random()
    return Model(
        steps=steps,
        batch_size=batch_size,
        group_size=group_size,
        max_staleness=random.choice((0, 1, 1, 2)),
        on_straggler=random.choice(("wait", "wait", "wait", "requeue", "mask", "admission_only")),
        on_failed_sample=random.choice(("requeue", "discard")),
        run_ahead=random.choice(("auto", "max")),
        generators=generators,
        oversample=random.choice((0, 0, 1)),
        moves=moves,
        max_new_tokens=max_new_tokens,
        managers=random.choice((1, 1, 1, 2)),
        eval_size=eval_size,
        every=random.choice((0, 0, 1, 2)) if eval_size else 0,
        samples=random.choice((1, 3)) if eval_size else 1,
        checkpoint_every=random.choice((1, 2, 2, 3)),
        stall_seconds=stall_seconds,
        evaluation_seconds=20.0 + 100 * longest,
        pace=pace,
        patience=60.0 + 30 * steps + 100 * longest,
        interrupt=manner < 0.875,
        colocate=manner < 0.125,
        redo_differs=random.random() < 0.5,
        bytes_a_row=bytes_a_row,
        reward_parts=reward_parts,
        compact_events=random.choice((10_000, 20)),
        farewell=random.random() < 0.3,
        filter_zero_signal=group_size > 1 and random.random() < 0.5,
        doubtful=random.choice((0.0, 0.0, 0.5)),
        doubtful_steps=random.choice((1, 2, 100)),
        branching=random.random() < 0.25,
    )
