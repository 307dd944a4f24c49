"""Fail-points: kill a process at a chosen point of a chosen handler. Also report the master's answers to the oracle."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import AsyncGeneratorType
from typing import Any, Protocol

from protocols.attempt_messages import AskSamples, RenewLeases, StoreCalls
from protocols.membership_messages import Heartbeat
from protocols.messages import Message, StoreSamples
from protocols.transport import Request
from simulation.faults import FailPoint, Plan
from simulation.incarnation import Incarnation
from simulation.loop import WorldScheduler
from simulation.oracle import Oracle


class Cluster(Protocol):
    """The part of a world that fail-points need."""

    plan: Plan
    scheduler: WorldScheduler
    counters: Counter[str]
    oracle: Oracle

    def fault(self, what: str) -> None: ...

    def kill(self, life: Incarnation, restart_after: float) -> None: ...


class FailPoints:
    """The fail-points of one plan. They are active until the plan's `until`."""

    def __init__(self, world: Cluster) -> None:
        self._world = world
        self._asked: Counter[tuple[str, str]] = Counter()
        self._waiting: dict[tuple[str, str], list[FailPoint]] = {}
        for point in world.plan.points:
            self._waiting.setdefault((point.role, point.kind), []).append(point)

    def watched(self, life: Incarnation, handle: Callable[..., Any]) -> Callable[..., Any]:
        """`handle`, the handler of all requests to a process, with the fail-points in it."""

        def handler(request: Request[Message]) -> Any:
            point = self._due(life, request.message.kind)
            if point is not None and point.point == "before":
                self._die(life, point)
                return _never()
            if isinstance(request.message, RenewLeases):
                self._world.oracle.renewed(request.sender, request.message.groups)
            elif isinstance(request.message, Heartbeat):
                self._world.oracle.heard_of(request.sender)
            answer = handle(request)
            if isinstance(answer, AsyncGeneratorType):
                return answer if point is None else self._stream(life, answer, point)
            if point is not None:
                answer = self._answer(life, answer, point)
            if life.role == "trainer" and isinstance(request.message, StoreSamples | StoreCalls | AskSamples):
                return _storing(life, request.message.group, answer)
            return self._heard(life, request, answer) if life.role == "master" else answer

        return handler

    def _due(self, life: Incarnation, kind: str) -> FailPoint | None:
        world, key = self._world, (life.role, kind)
        if key not in self._waiting or world.scheduler.now > world.plan.until:
            return None
        self._asked[key] += 1
        point = next((point for point in self._waiting[key] if point.nth == self._asked[key]), None)
        if point is not None:
            world.counters[f"{point.point} {kind}"] += 1
            world.fault(f"{life.process.name}#{life.mark} will die {point.point} {kind}")
        return point

    async def _answer(self, life: Incarnation, answer: Any, point: FailPoint) -> Message:
        die = functools.partial(self._die, life, point)
        if point.point == "working":
            life.loop.before_work = die
        elif point.point == "worked":
            life.loop.after_work = die
        result: Message = await answer
        if point.point == "handled":
            die()
            await _never()
        elif point.point == "answered":
            life.network.on_answer = die
        return result

    async def _stream(self, life: Incarnation, parts: Any, point: FailPoint) -> AsyncIterator[Message]:
        async for part in parts:
            if point.point == "handled":
                break
            if point.point == "answered":
                life.network.on_answer = functools.partial(self._die, life, point)
            yield part
        self._die(life, point)
        await _never()

    async def _heard(self, life: Incarnation, request: Request[Message], answer: Any) -> Message:
        result: Message = await answer
        journaled = life.actor.journal.marks.pop(asyncio.current_task(), 0)
        self._world.oracle.answered(request.sender, request.message.kind, journaled, result)
        return result

    def _die(self, life: Incarnation, point: FailPoint) -> None:
        self._world.kill(life, point.restart_after)


async def _storing(life: Incarnation, group: str, answer: Any) -> Message:
    life.storing[group] += 1
    try:
        result: Message = await answer
        return result
    finally:
        life.storing[group] -= 1


async def _never() -> Any:
    """Waits for ever, like the handler of a dead process."""
    await asyncio.get_running_loop().create_future()
