"""Bugs put into the real code on purpose. A simulation that does not catch them proves nothing.

with MUTANTS["no batch gate"]():
    simulate(seed)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from actors.master import Master
from actors.sessions import SampleSession
from actors.trainer import Trainer
from areal.ledger import Ledger
from protocols.codec import decode_header, encode_header
from protocols.messages import Recovery
from protocols.transport import Peer, Server

Mutant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def capacity_from_a_counter() -> AbstractContextManager[None]:
    """Capacity counts what was ever admitted and trained, in place of the live rows."""

    def capacity(ledger: Ledger) -> int:
        return max(0, ledger._most_alive() - (ledger.counters.admitted - ledger.counters.trained))

    return _replaced(Ledger, "capacity", property(capacity))


@contextmanager
def no_deduplication() -> Iterator[None]:
    """A server handles a repeated request again."""
    receive = Server._receive

    def receive_anew(server: Server, frames: list[bytes]) -> None:
        header = decode_header(frames[1:])
        if header.id:
            server._answers.pop((header.sender, header.id), None)
            server._calls.pop((header.sender, header.id), None)
        receive(server, frames)

    def forget(server: Server, key: tuple[str, str]) -> None:
        server._calls.pop(key, None)

    with _replaced(Server, "_receive", receive_anew), _replaced(Server, "_forget", forget):
        yield


def no_batch_gate() -> AbstractContextManager[None]:
    """Rule 3 is gone: a batch is trained whoever is left behind."""
    return _replaced(Ledger, "_stragglers", lambda ledger, chosen: [])


def no_lease_expiry() -> AbstractContextManager[None]:
    """A lease that nobody renews lasts for ever."""
    return _replaced(Ledger, "expire", lambda ledger, now: [])


def replies_not_matched() -> AbstractContextManager[None]:
    """Whoever has waited longest gets the reply, whatever it answers."""
    receive = Peer._receive

    def receive_for_anyone(peer: Peer, frames: list[bytes]) -> None:
        header = decode_header(frames)
        if header.reply_to and peer._waiting:
            frames = [encode_header(header._replace(reply_to=next(iter(peer._waiting)))), *frames[1:]]
        receive(peer, frames)

    return _replaced(Peer, "_receive", receive_for_anyone)


def version_kept_on_roll_back() -> AbstractContextManager[None]:
    """A restarted trainer loads the last checkpoint and calls it the version where the run stands."""
    ask_master = Trainer.ask_master

    async def ask(trainer: Trainer, *arguments: Any) -> Any:
        answer = await ask_master(trainer, *arguments)
        if isinstance(answer, Recovery):
            answer = answer.model_copy(update={"checkpoint_version": answer.version})
        return answer

    return _added(Trainer, "ask_master", ask)


def answers_before_the_commit() -> AbstractContextManager[None]:
    """The master answers before what it journaled is on disk."""

    async def at_once(master: Master, answer: Any) -> Any:
        return await answer

    return _replaced(Master, "_durably", at_once)


def no_fencing() -> AbstractContextManager[None]:
    """The master takes whatever a trainer reports, be it of a dead lineage."""
    return _replaced(Master, "_trainer", lambda master, request, lineage=None: None)


def min_version_ignored() -> AbstractContextManager[None]:
    """Rule 2 is gone: weights older than a group's admission may begin it."""
    init = SampleSession.__init__

    def begin(session: SampleSession, *arguments: Any, **more: Any) -> None:
        init(session, *arguments, **more)
        session.min_version = 0

    return _replaced(SampleSession, "__init__", begin)


@contextmanager
def _added(owner: type, name: str, value: Any) -> Iterator[None]:
    """Like `_replaced`, for a method that the class inherits."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


MUTANTS: dict[str, Mutant] = {
    "capacity from a counter": capacity_from_a_counter,
    "no de-duplication": no_deduplication,
    "no batch gate": no_batch_gate,
    "no lease expiry": no_lease_expiry,
    "replies not matched": replies_not_matched,
    "version kept on roll-back": version_kept_on_roll_back,
    "answers before the commit": answers_before_the_commit,
    "no fencing": no_fencing,
    "min_version ignored": min_version_ignored,
}
