"""The environment of a simulation in this process: logs and other output are silenced, and some settings replaced."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, Protocol
from unittest.mock import patch

from actors import evaluator, generator, master, reward, rollout_manager, trainer
from actors.parts import run_state, sessions
from actors.runtime import actor as runtime
from actors.simulation.loop import undisturbed
from areal.generation import routing
from areal.generation.routing import Load
from protocols import transport
from protocols.codec import decode_body
from protocols.messages import Done, HeartbeatAnswer, MembersChanged, Message, PolicyPublished, Shutdown, StreamEnd
from simulation.loop import DEAD, FaultyLoop
from simulation.model import Model

# Small intervals, because most simulated sequences take less than a second.
BALANCE_SECONDS = 0.15
REPORT_SECONDS = 0.1


class Simulated(Protocol):
    """The part of a world that this module needs."""

    model: Model
    random: Random
    trace: list[str] | None

    def say(self, who: str, what: str) -> None: ...


class _Log:
    """Replaces the loggers of the actors. It writes to the trace of the world, or drops everything if there is none."""

    def __init__(self, world: Simulated) -> None:
        if world.trace is None:
            self.debug = self.info = self.warning = self.error = _silent
        else:
            self.debug = self.info = self.warning = self.error = self._say
        self._world = world

    def _say(self, event: str, **fields: Any) -> None:
        try:
            who = asyncio.get_running_loop().name  # type: ignore[attr-defined]
        except RuntimeError:
            who = "?"
        error = fields.pop("exc_info", None)
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        self._world.say(who.partition("~")[0], f"log: {event} {words}{f' {error!r}' if error else ''}")


def _silent(event: str, **fields: Any) -> None:
    pass


_LOGGING = [
    module
    for module in (evaluator, generator, master, reward, rollout_manager, runtime, sessions, trainer)
    if hasattr(module, "log")
]


@contextmanager
def quiet(world: Simulated) -> Iterator[None]:
    """Set up this process for a simulation: logs go into the trace only, garbage collection is off, and the settings of
    the actors are replaced by those of the model."""
    stand_in = _Log(world)
    with ExitStack() as settings:
        settings.enter_context(patch.multiple(run_state, COMPACT_EVENTS=world.model.compact_events))
        settings.enter_context(patch.multiple(runtime, HEARTBEAT_SECONDS=world.model.heartbeat_seconds))
        settings.enter_context(patch.multiple(transport, decode_body=_decode_body))
        settings.enter_context(patch.multiple(evaluator, REPORT_SECONDS=REPORT_SECONDS))
        moves = functools.partial(_some_moves, world)
        settings.enter_context(patch.multiple(rollout_manager, BALANCE_SECONDS=BALANCE_SECONDS, plan_moves=moves))
        for module in _LOGGING:
            settings.enter_context(patch.multiple(module, log=stand_in))
        settings.enter_context(undisturbed(_finalize_stream))
        yield


def _some_moves(
    world: Simulated, loads: Mapping[str, Load], sequences: Iterable[routing.Sequence], askers: int, now: float
) -> list[tuple[routing.Sequence, str]]:
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
