"""The environment of a simulation in this process: logs and other output are silenced, and some settings replaced."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from logging import CRITICAL, DEBUG
from random import Random
from typing import Any, NoReturn, Protocol
from unittest.mock import patch

import structlog
from structlog.typing import EventDict

from actors.evaluator import evaluator
from actors.gateway import user_sessions
from actors.master import run_state
from actors.rollout_manager import group_run, rollout_manager
from actors.runtime import membership
from actors.sampling import own_code
from areal.base.processes import ROOT
from areal.generation.moves import Sequence as Movable
from areal.generation.routing import GeneratorLoad
from areal.storage import disk
from protocols import bus, transport
from protocols.codec import decode_body
from protocols.membership_messages import HeartbeatAnswer, MembersChanged, PolicyPublished, Shutdown
from protocols.messages import Done, Message, StreamEnd
from simulation.cluster.loop import undisturbed
from simulation.loop import DEAD, FaultyLoop, WorldScheduler
from simulation.model import Model

# Small intervals, because most simulated sequences take less than a second.
BALANCE_SECONDS = 0.15
STORE_AFTER_SECONDS = 0.05
REPORT_SECONDS = 0.1

place_of = own_code.place_of


class Simulated(Protocol):
    """The part of a world that this module needs."""

    model: Model
    random: Random
    scheduler: WorldScheduler
    trace: list[str] | None

    def say(self, who: str, what: str) -> None: ...


@contextmanager
def _logs_into(world: Simulated) -> Iterator[None]:
    """Let the actors log into the trace of the world, or nowhere if there is none."""

    def say(logger: Any, method: str, event: EventDict) -> NoReturn:
        try:
            who = asyncio.get_running_loop().name  # type: ignore[attr-defined]
        except RuntimeError:
            who = "?"
        what, error = event.pop("event"), event.pop("exc_info", None)
        words = " ".join(f"{name}={value}" for name, value in event.items())
        world.say(who.partition("~")[0], f"log: {what} {words}{f' {error!r}' if error else ''}")
        raise structlog.DropEvent

    logging, least = structlog.get_config(), CRITICAL if world.trace is None else DEBUG  # nothing is critical
    heard = structlog.make_filtering_bound_logger(least)
    structlog.configure(processors=[say], wrapper_class=heard, cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**logging)


@contextmanager
def quiet(world: Simulated) -> Iterator[None]:
    """Set up this process for a simulation: logs go into the trace only, garbage collection is off, the settings of the
    actors are replaced by those of the model, and no message tells of this machine's disks and folders."""
    with ExitStack() as settings:
        settings.enter_context(patch.multiple(run_state, COMPACT_EVENTS=world.model.compact_events))
        settings.enter_context(patch.multiple(membership, HEARTBEAT_SECONDS=world.model.heartbeat_seconds))
        for receiver in (transport, bus):
            settings.enter_context(patch.multiple(receiver, decode_body=_decode_body))
        settings.enter_context(patch.multiple(evaluator, REPORT_SECONDS=REPORT_SECONDS))
        moves = functools.partial(_some_moves, world)
        settings.enter_context(patch.multiple(rollout_manager, plan_moves=moves, BALANCE_SECONDS=BALANCE_SECONDS))
        settings.enter_context(patch.multiple(group_run, STORE_AFTER_SECONDS=STORE_AFTER_SECONDS))
        settings.enter_context(patch.multiple(own_code, place_of=_place_in_checkout))
        settings.enter_context(patch.multiple(user_sessions, _since_boot=lambda: ("", world.scheduler.now)))
        settings.enter_context(
            patch.multiple(disk, free_bytes=lambda _: 0, _inodes=lambda _: "", _same_disk=lambda *_: False)
        )
        settings.enter_context(_logs_into(world))
        settings.enter_context(undisturbed(_finalize_stream))
        yield


def _place_in_checkout(error: BaseException | None) -> str:
    return place_of(error).replace(f"{ROOT}/", "")


def _some_moves(
    world: Simulated, loads: Mapping[str, GeneratorLoad], sequences: Iterable[Movable], askers: int, now: float
) -> list[tuple[Movable, str]]:
    """Random moves of sequences. Simulated sequences are too short for the real `plan_moves` to find a gain."""
    chance = world.random
    moving = [s for s in sequences if s.generator in loads and chance.random() < world.model.moves]
    return [(sequence, chance.choice(list(loads))) for sequence in moving]


def _decode_body(kind: str, frames: Sequence[bytes]) -> Message:
    """Decode a message. Kinds that are sent often or to many are decoded once and cached, since messages are
    immutable."""
    repeated = kind in _REPEATED and len(frames) == 2  # without arrays
    return _decode_once(kind, frames[1]) if repeated else decode_body(kind, frames)


@functools.lru_cache(maxsize=256)
def _decode_once(kind: str, body: bytes) -> Message:
    return decode_body(kind, (b"", body))


_REPEATED = {kind.kind for kind in (Done, HeartbeatAnswer, MembersChanged, PolicyPublished, Shutdown, StreamEnd)}


def _finalize_stream(stream: Any) -> None:
    """Close an async generator that was not closed, as asyncio does."""
    loop = asyncio._get_running_loop()
    if isinstance(loop, FaultyLoop) and loop.state is not DEAD:
        loop.call_soon(loop.create_task, stream.aclose())
