"""The environment of a simulation in this process: logs and other output are silenced, and some settings replaced."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, Protocol

from actors import evaluator, generator, master, reward, rollout_manager, trainer
from actors.parts import run_state, sessions
from actors.runtime import actor as runtime
from actors.simulation.loop import DEAD, ProcessLoop
from actors.simulation.model import Model
from areal.generation import routing
from areal.generation.routing import Load
from protocols import transport
from protocols.codec import decode_body
from protocols.messages import Done, HeartbeatAnswer, MembersChanged, Message, PolicyPublished, Shutdown, StreamEnd

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
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a class or module until the end of the block."""
    before = {name: vars(owner)[name] for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def garbage_kept(finalizer: Callable[[Any], None]) -> Iterator[None]:
    """Switch off garbage collection, whose time is not deterministic. `finalizer` gets the async generators that were
    not closed."""
    hooks, collects = sys.get_asyncgen_hooks(), gc.isenabled()
    sys.set_asyncgen_hooks(finalizer=finalizer)
    gc.disable()
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
        if collects:
            gc.enable()


@contextmanager
def unlisted() -> Iterator[None]:
    """Keep tasks out of asyncio's list of all tasks, a slow set that a simulation does not need: each of its loops has
    a list of its own."""
    known = vars(asyncio.tasks)
    everywhere: Any = known["_all_tasks" if "_all_tasks" in known else "_scheduled_tasks"]  # the latter in Python 3.12
    everywhere.add = lambda task: None
    try:
        yield
    finally:
        del everywhere.add


@contextmanager
def quiet(world: Simulated) -> Iterator[None]:
    """Set up this process for a simulation: logs go into the trace only, garbage collection is off, and the settings of
    the actors are replaced by those of the model."""
    stand_in = _Log(world)
    with ExitStack() as settings:
        settings.enter_context(replaced(run_state, COMPACT_EVENTS=world.model.compact_events))
        settings.enter_context(replaced(runtime, HEARTBEAT_SECONDS=world.model.heartbeat_seconds))
        settings.enter_context(replaced(transport, decode_body=_decode_body))
        settings.enter_context(replaced(evaluator, REPORT_SECONDS=REPORT_SECONDS))
        moves = functools.partial(_some_moves, world)
        settings.enter_context(replaced(rollout_manager, BALANCE_SECONDS=BALANCE_SECONDS, plan_moves=moves))
        for module in _LOGGING:
            settings.enter_context(replaced(module, log=stand_in))
        settings.enter_context(garbage_kept(_finalize_stream))
        settings.enter_context(unlisted())
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
    if isinstance(loop, ProcessLoop) and loop.state is not DEAD:
        loop.call_soon(loop.create_task, stream.aclose())
