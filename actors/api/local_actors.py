"""Actors in a process that also does other work: the actors run in a thread with an event loop."""

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import structlog

from actors.runtime.actor import Actor
from actors.runtime.bound_addresses import ListenAddress, new_bus, open_network
from actors.runtime.logs import configure_logging
from actors.runtime.membership import Membership, ask_once
from areal.base.errors import UserError
from protocols.addresses import host_of
from protocols.messages import Message
from protocols.network import ZmqNetwork

# How long an actor waits for the master, and how long a process waits for its actors to leave.
READY_SECONDS, LEAVE_SECONDS = 300.0, 30.0
# Pause before a fenced actor joins again.
AGAIN_SECONDS = 1.0

T = TypeVar("T")
log = structlog.get_logger()


class LocalActors:
    """The actors of this process in the run of the master at an address. keys: the folder of the run's keys; None:
    AREAL_KEYS names the folder. Methods are called from any other thread."""

    def __init__(self, master: str, keys: Path | None) -> None:
        if not structlog.is_configured():
            configure_logging("this process", logging.WARNING)
        self.master = master
        self._keys = keys
        self._actors: list[Membership] = []
        self._lives: list[Future[None]] = []
        self._leaving = False
        self._loop = _loop_of(os.getpid())

    def ask(self, message: Message, patience: float = 10.0) -> Any:
        """Return the master's answer. Raises UserError."""
        return self._run(ask_once(self._network(), self.master, message, patience)).result()

    def add(self, kind: type[Actor], **options: Any) -> Future[None]:
        """Have an actor of this class join the run, and join again whenever the master fences the actor. options: of
        the class. Returns a future that ends once the actor is ready, or fails with a UserError."""
        ready: Future[None] = Future()
        life = self._run(self._live(kind, options, ready))
        self._lives.append(life)
        life.add_done_callback(lambda ended: _follow(ended, ready))
        return ready

    def leave(self) -> None:
        """Have all actors hand over their work and leave. Actors may join again afterwards."""
        self._leaving = True
        self._loop.call_soon_threadsafe(self._tell_to_leave)
        wait(self._lives, LEAVE_SECONDS)
        self._lives.clear()
        self._leaving = False

    def _tell_to_leave(self) -> None:
        for actor in self._actors:
            actor.leave("its process")

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _network(self) -> ZmqNetwork:
        return open_network(host_of(self.master), keys=self._keys)

    async def _live(self, kind: type[Actor], options: Mapping[str, Any], ready: Future[None]) -> None:
        again = True
        while again and not self._leaving:
            actor = Membership(
                kind,
                new_bus(f"{kind.role}/?", self._network()),
                self.master,
                None,
                ListenAddress.towards(self.master),
                patience=READY_SECONDS,
                own_process=False,
                **options,
            )
            self._actors.append(actor)
            life = asyncio.create_task(actor.run())
            while not life.done() and not ready.done():
                if actor.state == "healthy":
                    ready.set_result(None)
                await asyncio.wait([life], timeout=0.1)
            ending = await life
            self._actors.remove(actor)
            again = ending.fenced
            if again:
                log.warning("an actor of this process joins the run again", role=kind.role, why=ending.reason)
                await asyncio.sleep(AGAIN_SECONDS)
            elif not ending.ok:
                log.warning("an actor of this process has left the run", role=kind.role, why=ending.reason)


@functools.cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process's memberships in all runs. A fork has no threads, and needs a loop of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="areal", daemon=True).start()
    return loop


def _follow(life: Future[None], ready: Future[None]) -> None:
    """Note that an actor has ended. If the actor was never ready, `ready` fails; a later failure is logged."""
    error = life.exception()
    if not ready.done():
        ready.set_exception(error or UserError("The run ended, or the process left it, before its actor was ready."))
    elif error:
        log.error("an actor of this process has failed", exc_info=error)
