"""The requests of a gateway about sessions, to the master and to the trainer."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import structlog

from actors.gateway.user_sessions import UserSession
from actors.runtime.membership import Membership
from actors.sampling.sampling import Sampling
from areal.extensions.agents.openai_api import ApiError
from protocols.attempt_messages import StoreCalls
from protocols.bus_errors import FencedError, RefusedError
from protocols.messages import Done, GroupStarted, Message
from protocols.session_messages import AskSession, DiscardSession, SessionAnswer, SessionDiscarded, SessionGroup

NOT_STORED = "the session could not be stored, so this answer or reward does not count: ask again"

M = TypeVar("M", bound=Message)
log = structlog.get_logger()


class SessionLinks:
    """See the module. drop: forgets a session that the trainer refuses to store."""

    def __init__(self, member: Membership, sampling: Sampling, drop: Callable[[UserSession], None]) -> None:
        self._member = member
        self._sampling = sampling
        self._drop = drop

    async def discard(self, name: str, reason: Any, group: str = "") -> SessionDiscarded:
        """Give up the group of the session `name`; without `group`, all alive groups of the session. Raises ApiError if
        a batch has such a group."""
        request = DiscardSession(session=name, group=group, reason=reason)
        try:
            return await self._member.ask_master(request, SessionDiscarded)
        except FencedError:
            raise
        except RefusedError as error:
            raise ApiError(f"it cannot be deleted any more: {error}", "in_training", 409) from None

    async def ask(self, name: str, opens: bool, mark: str = "") -> SessionAnswer:
        return await self._member.ask_master(AskSession(session=name, opens=opens, mark=mark), SessionAnswer)

    async def is_open(self, group: SessionGroup) -> bool:
        """Whether the session has neither expired nor been deleted meanwhile."""
        answer = await self.ask(group.session, opens=False)
        return answer.session is not None and answer.session.group == group.group

    def report_start(self, session: UserSession, version: int) -> None:
        if session.group is not None:
            session.sample.min_version = max(version, session.group.min_version)
            started = GroupStarted(group=session.group.group, start_version=version)
            self._member.spawn(self._member.ask_master(started, Done), "session started")

    async def save(self, session: UserSession, frame: bytes) -> None:
        assert session.group is not None
        request = StoreCalls(
            group=session.group.group,
            prompt_index=session.group.prompt_index,
            place=0,
            frame=np.frombuffer(frame, np.uint8),
            number=session.saves,
        )
        await self.store(session, request, Done)

    async def store(self, session: UserSession, request: Message, answer: type[M]) -> M:
        """Have the trainer store calls or a sample. Raises ApiError if the trainer refuses. This gateway then forgets
        the session; a later request continues from the stored calls, here or at another gateway."""
        try:
            return await self._sampling.ask_trainer(request, answer)
        except FencedError:
            raise
        except RefusedError as error:
            self._drop(session)
            log.warning("a session cannot be stored", session=session.name, error=str(error))
            raise ApiError(NOT_STORED, "not_stored", 507) from None
