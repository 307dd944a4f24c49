"""Who may do what at a gateway: keys, of which only digests are stored, and their quotas."""

import hmac
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Literal

from areal.config.role_sections import KeyConfig
from areal.extensions.agents.openai_api import ApiError

Right = Literal["serve", "reward", "reward_all"]
WINDOW_SECONDS = 60.0
# Keys of sessions that are known at a time: beyond it the oldest is forgotten.
SESSION_KEYS = 100_000


class UserKeys:
    """`configured`: by name. A session may have a key of its own, which is valid at this gateway and for that session
    alone, and has the rights of the key that opened it. clock: in seconds."""

    def __init__(self, configured: Mapping[str, KeyConfig], clock: Callable[[], float]) -> None:
        self.configured = configured
        self._clock = clock
        self._of_sessions: dict[str, tuple[str, str]] = {}  # the key's name and the session, by digest
        self._uses: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def identify(self, key: str) -> tuple[str, str | None]:
        """The name of a key, and the session if it is one's own. Raises ApiError."""
        digest, name = sha256(key.encode()).hexdigest(), ""
        for candidate, settings in self.configured.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(settings.sha256, digest):
                name = candidate
        if name:
            return name, None
        if digest in self._of_sessions:
            return self._of_sessions[digest]
        raise ApiError("this API key is not known here", "invalid_api_key", 401)

    def check(self, name: str, *rights: Right) -> None:
        """Raises ApiError if the key has none of the rights."""
        if not {*rights} & {*self.configured[name].rights}:
            raise ApiError(f"this key may not {rights[0]}: gateway.keys.{name}.rights lacks it", "forbidden", 403)

    def key_for(self, name: str, session: str) -> str:
        """A new key of a session's own."""
        key = f"session-{secrets.token_urlsafe(24)}"
        self._of_sessions[sha256(key.encode()).hexdigest()] = name, session
        if len(self._of_sessions) > SESSION_KEYS:
            del self._of_sessions[next(iter(self._of_sessions))]
        return key

    def forget(self, session: str) -> None:
        """The session has ended for good."""
        self._of_sessions = {key: of for key, of in self._of_sessions.items() if of[1] != session}

    def use_call(self, name: str) -> None:
        """Count a call. Raises ApiError if the key has used up its calls or tokens of this minute."""
        for what, limit in self._limits(name).items():
            if limit is not None and self._used(name, what) >= limit:
                raise ApiError(f"this key may use {limit} {what} a minute: try again later", "rate_limit_exceeded", 429)
        self.count(name, "calls", 1)

    def count(self, name: str, what: str, number: int) -> None:
        if self._limits(name)[what] is not None:
            self._uses.setdefault((name, what), deque()).append((self._clock(), number))

    def _limits(self, name: str) -> dict[str, int | None]:
        settings = self.configured[name]
        return {"calls": settings.calls_per_minute, "tokens": settings.tokens_per_minute}

    def _used(self, name: str, what: str) -> int:
        uses = self._uses.setdefault((name, what), deque())
        while uses and uses[0][0] <= self._clock() - WINDOW_SECONDS:
            uses.popleft()
        return sum(number for _, number in uses)
