"""The users of a simulation: they talk to gateways, and reward at once, late, twice or never.

HTTP stands aside: a request of a user becomes a task in the process of a gateway, which does what the endpoint does for
it. A user does not hear of the end of a gateway. It asks again, with the same id, perhaps another gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Protocol

from actors.gateway.user_sessions import UserReward
from areal.extensions.agents.openai_api import ApiError, ChatRequest
from protocols.bus_errors import BusError
from simulation.book import Violation
from simulation.incarnation import Incarnation
from simulation.loop import FaultyLoop, WorldScheduler
from simulation.oracle import Oracle

KEY = "users"
# Seconds between a user and a gateway, at most, and after which a user asks again.
LATENCY, PATIENCE = 0.02, 6.0
# How a conversation ends, with weights.
ENDS = {"reward": 6, "late": 2, "twice": 3, "never": 2, "silent": 2, "delete": 1, "take back": 2, "talk on": 4}
# Statuses that mean: not here or not now.
AGAIN = (409, 429, 500, 507)


class Lost(Exception):
    """A user has no answer, and does not know whether there was one."""


class Surroundings(Protocol):
    """The part of a world that users need."""

    scheduler: WorldScheduler
    oracle: Oracle
    random: Random
    incarnations: list[Incarnation]
    over: bool

    def say(self, who: str, what: str) -> None: ...


class Users:
    """So many users, each of whom has one conversation after the other until the run is over."""

    def __init__(self, world: Surroundings, count: int, loop: FaultyLoop) -> None:
        self.loop = loop
        self._world = world
        self._random = Random(f"users {world.random.random()}")
        self._conversations = 0
        for _ in range(count):
            loop.call_soon(lambda: loop.create_task(self._live()))

    async def _live(self) -> None:
        while not self._world.over:
            await asyncio.sleep(self._random.uniform(0.0, 1.5))
            self._conversations += 1
            await _Conversation(self._world, self._random, self._conversations, self.loop).go_on()


class _Conversation:
    """One session of a user. `number` is the text of its first message, and so in its first tokens."""

    def __init__(self, world: Surroundings, random: Random, number: int, loop: FaultyLoop) -> None:
        self.name = f"{KEY}:{number}"
        self._world, self._random, self._number, self._loop = world, random, number, loop
        self._messages = [{"role": "user", "content": f"{number}"}]
        self._group = ""
        self._gateway: Incarnation | None = None
        self._taken: set[str] = set()  # the ids of the rewards that are said to count
        self._value = random.choice((-1.0, -0.25, 0.5, 1.0))

    async def go_on(self) -> None:
        end = self._random.choices(list(ENDS), list(ENDS.values()))[0]
        try:
            for turn in range(self._random.choice((1, 1, 2, 3))):
                await self._turn(f"{self._number}-{turn}")
            await self._end(end)
        except Lost:
            self._say("gives up")

    async def _end(self, end: str) -> None:
        if end == "late":
            await asyncio.sleep(self._random.uniform(1.0, 8.0))
        if end == "delete":
            await self._delete()
        elif end == "silent":
            await self._until(lambda gateway: gateway.ends.end(self.name))
        elif end == "twice":
            other = -self._value if self._random.random() < 0.5 else self._value
            rewards = self._reward(self._value), self._reward(other)
            both = await asyncio.gather(*rewards, return_exceptions=True)
            for error in both:
                if isinstance(error, BaseException) and not isinstance(error, Lost):
                    raise error
        elif end != "never":
            await self._reward(self._value)
        if end == "reward":  # whoever has lost the answer asks again
            await asyncio.sleep(2.0)
            await self._reward(self._value)
        if end == "talk on":
            await self._turn(f"{self._number}-after")
        if end == "take back" or end == "talk on" and self._random.random() < 0.5:
            await asyncio.sleep(self._random.expovariate(0.5))
            await self._delete()

    async def _delete(self) -> None:
        ways_back = self._world.oracle.ways_back
        answer = await self._until(lambda gateway: gateway.delete(self.name))
        if ways_back == self._world.oracle.ways_back:
            self._world.oracle.deleted(self.name, answer["trained_in"])

    async def _turn(self, mark: str) -> None:
        """One call, perhaps twice at a time, as clients do whose connection is slow."""
        calls = [self._call(mark) for _ in range(1 + (self._random.random() < 0.15))]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers = [result for result in results if not isinstance(result, BaseException)]
        for error in results:
            if isinstance(error, BaseException) and (not isinstance(error, Lost) or not answers):
                raise error
        message = answers[0].message
        self._messages += [message, {"role": "user", "content": f"{self._random.randrange(100)}"}]
        await asyncio.sleep(self._random.expovariate(3.0))

    async def _call(self, mark: str) -> Any:
        messages = list(self._messages)

        async def call(gateway: Any) -> Any:
            gateway.check_call(self.name, mark)
            session = await gateway.open_session(self.name, True)
            request = ChatRequest(messages=messages)
            answer = await session.answer(request, f"answer {self._random.random()}", None, mark)
            group = session.group.group if session.group else ""
            if group and len(answer.sampled):
                self._group = group
                self._world.oracle.told(group, self.name, mark, answer.sampled)
            return answer

        return await self._until(call)

    async def _reward(self, value: float) -> None:
        mark = f"{self._number}{value:+}" if self._number % 3 else ""  # some rewards have no id

        async def reward(gateway: Any) -> Any:
            try:
                state = await gateway.ends.reward(self.name, UserReward(value, {}, None, mark))
            except ApiError as error:
                if error.code == "no_calls":
                    self._world.oracle.fail(Violation(f"{self.name} has calls, but is told: {error}"))
                if error.code not in ("rewarded", "id_in_use"):
                    raise
                # With its id it was taken before: for an earlier session, since a late call has begun another.
                state = {"state": "ready", "changed": error.code == "id_in_use"}
            if state["state"] == "ready":
                self._world.oracle.rewarded(self.name, value if state["changed"] else None, mark)
            if mark and state["changed"]:
                self._taken.add(mark)
            elif mark in self._taken:
                self._world.oracle.forgotten(self.name)
            return state

        self._say(f"rewards {value}: {await self._until(reward)}")

    async def _until(self, do: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """What a gateway answers. Raises Lost once none has answered for long, or none will."""
        for attempt in range(8):
            if self._world.over:
                break
            try:
                return await self._ask(do)
            except Lost:
                self._gateway = None
            except BusError as error:
                self._gateway = None
                self._say(f"has no answer: {error}")
            except ApiError as error:
                self._say(f"is refused: {error}")
                if error.status not in AGAIN or error.code == "session_full":
                    break
                self._gateway = None
            await asyncio.sleep(self._random.uniform(0.1, 0.5 * (1 + attempt)))
        raise Lost

    async def _ask(self, do: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        world, loop = self._world, self._loop
        here = [one for one in world.incarnations if one.role == "gateway" and one.alive and serves(one)]
        if not here:
            raise Lost
        if self._gateway not in here or self._random.random() < 0.1:
            self._gateway = self._random.choice(here)
        one, answer, tasks = self._gateway, loop.create_future(), []

        def deliver(task: asyncio.Task[Any]) -> None:
            error = Lost() if task.cancelled() else task.exception()
            if answer.done():
                return
            if error:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        def begin() -> None:
            role = one.actor.role
            task = asyncio.get_running_loop().create_task(do(role.sessions))
            tasks.append(task)
            role.door.requests.add(task)
            task.add_done_callback(role.door.requests.discard)
            task.add_done_callback(lambda task: world.scheduler.call_at(self._soon(), deliver, task, loop=loop))

        world.scheduler.call_at(self._soon(), begin, loop=one.loop)
        try:
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            if tasks and self._random.random() < 0.7:  # the connection is closed, and the gateway hears of it
                world.scheduler.call_at(self._soon(), tasks[0].cancel, loop=one.loop)
            raise Lost from None

    def _soon(self) -> float:
        return self._world.scheduler.now + LATENCY * self._random.random()

    def _say(self, what: str) -> None:
        self._world.say(self.name, what)


def serves(one: Incarnation) -> bool:
    """Whether users reach this gateway."""
    return one.actor is not None and one.actor.state == "healthy" and hasattr(one.actor.role, "door")
