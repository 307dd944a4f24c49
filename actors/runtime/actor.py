"""The parts of all actors: handlers of requests, endings, and the interface of a role.

A role is made whole: `start` gets the membership in the run, with the configuration, makes all parts of the role, and
then the role.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from protocols.bus_errors import RefusedError
from protocols.membership_messages import Engagement, LoadColumns, Work
from protocols.messages import Message
from protocols.transport import Request

CONTROL_SECONDS = 10.0
# A parked request is answered at the latest this long before the request's deadline.
PARK_MARGIN_SECONDS = CONTROL_SECONDS / 2

M = TypeVar("M", bound=Message)
T = TypeVar("T")
A = TypeVar("A")


def handles(kind: type[M]) -> Callable[[Callable[[A, Request[M]], T]], Callable[[A, Request[M]], T]]:
    """Mark a method as the handler of a kind of request: `async def` for one answer, an async generator for a stream.
    The method gets the `Request`."""

    def mark(method: Callable[[A, Request[M]], T]) -> Callable[[A, Request[M]], T]:
        method.handled_kind = kind  # type: ignore[attr-defined]
        return method

    return mark


class HandlesRequests:
    """Finds the handler of a request by the kind of the message."""

    _handlers: ClassVar[dict[type[Message], str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        handlers = {m.handled_kind: name for name, m in vars(cls).items() if hasattr(m, "handled_kind")}
        cls._handlers = cls._handlers | handlers

    def answers(self, message: Message) -> bool:
        """Whether there is a handler for the kind of the message."""
        return type(message) in self._handlers

    def dispatch(self, request: Request[Message]) -> Any:
        """The coroutine or async generator that answers the request. Raises RefusedError without a handler."""
        handler = self._handlers.get(type(request.message))
        if handler is None:
            raise RefusedError(f"{type(self).__name__} does not answer {request.message.kind!r}")
        return getattr(self, handler)(request)


class Notifier:
    """Wakes all tasks that wait for a condition to become true."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Call after every change that may make a condition true."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], T]) -> T:
        """The first true value of `condition`."""
        while not (value := condition()):
            await self._event.wait()
        return value


def parked(request: Request[Any]) -> asyncio.Timeout:
    """The timeout of a block in which a request waits for its answer to become possible."""
    return asyncio.timeout(max(0.0, request.remaining - PARK_MARGIN_SECONDS))


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why an actor stopped. `ok`: the run reached its end, or the actor was told to leave and left.
    `fenced`: the master no longer accepts this incarnation; a new incarnation may join. `stopped`: a signal stopped the
    actor before the run's end. `of_run`: the master has said that the run has ended."""

    ok: bool
    reason: str
    fenced: bool = False
    stopped: bool = False
    of_run: bool = False


class Actor(HandlesRequests):
    """Base class of every role but the master. A subclass sets `role`, and implements `start`, `main` and `@handles`
    methods. An instance of the base class stands for a role that is not made yet."""

    role: ClassVar[str]
    drains_at_a_stop: ClassVar[bool] = False
    """True if the role hands over its work also when a signal ends the whole run."""

    @classmethod
    async def start(cls, *member: Any, **options: Any) -> Self:
        """Make the role of a `Membership`, with all its parts. The actor is `stale` meanwhile. options: of the process.
        `start` enters into `member.used` what has to be closed at the end, also after a failure."""
        raise NotImplementedError

    async def catch_up(self) -> None:
        """Work before `main`. The actor is `stale` meanwhile, and answers requests."""

    async def main(self) -> None:
        """The work of the role. After `main` returns, the actor stays in the run until the run ends."""

    async def hand_over(self) -> None:
        """Finish or hand over the work in progress, while the actor is draining. The limit is
        `master.drain_seconds`. May set `Membership.outcome`."""

    def serves(self) -> tuple[str, ...]:
        """Names of the rewards that this actor serves, for the directory."""
        return ()

    def stats(self) -> dict[str, float]:
        """Gauges and counters for the heartbeat."""
        return {}

    def works(self) -> tuple[Work, ...]:
        """Works without a `Membership.working` block, for the heartbeat."""
        return ()

    def engagement(self) -> Engagement | None:
        """The load of a generator, for the heartbeat; None for other roles."""
        return None

    def note_loads(self, loads: LoadColumns) -> None:
        """Called after every heartbeat of a rollout manager with the loads of the generators."""


def first_error(error: BaseException) -> BaseException:
    """The first exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
