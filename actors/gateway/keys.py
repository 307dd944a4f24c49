"""Who may do what at a gateway: keys, of which only digests are stored, and the account of each.

Every request passes the account of its key. What a request may use is reserved before the work; what it has used is
counted as it is used, and the rest of the reservation ends with the work, however that ends.
"""

import hmac
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal

from areal.config.role_sections import KeyConfig
from areal.extensions.agents.openai_api import ApiError
from protocols.session_messages import KeyUse

Right = Literal["serve", "reward", "reward_all"]
WINDOW_SECONDS = 60
# Sessions of a key that have a key of their own: beyond it that of the oldest is forgotten.
SESSION_KEYS = 10_000
# Each counted request, and each session that comes from a lost gateway, pays for so many rewards, ends and deletions:
# what a client has begun it can end at any time. An account keeps the second number of them at most.
PREPAID, MOST_PREPAID = 4, 100_000


class LastMinute:
    """A sum of what was counted in the last minute, by whole seconds of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque()
        self._sum = 0

    def add(self, number: int) -> None:
        second = int(self._clock())
        same = self._seconds.pop()[1] if self._seconds and self._seconds[-1][0] == second else 0
        self._seconds.append((second, same + number))
        self._sum += number

    @property
    def sum(self) -> int:
        while self._seconds and self._seconds[0][0] <= int(self._clock()) - WINDOW_SECONDS:
            self._sum -= self._seconds.popleft()[1]
        return self._sum


class KeyAccount:
    """What a key uses. `elsewhere`: at other gateways. `open`: its sessions here that take calls, or are being opened.
    `reserved`: the tokens that answers in progress may have. `prepaid`: rewards, ends and deletions for which calls
    have paid. `refused`: requests, since the gateway has started."""

    def __init__(self, name: str, settings: KeyConfig, clock: Callable[[], float]) -> None:
        self.name, self.settings = name, settings
        self.calls, self.tokens = LastMinute(clock), LastMinute(clock)
        self.open: set[str] = set()
        self.reserved = self.prepaid = self.refused = 0
        self.elsewhere = KeyUse()
        self.answered: dict[tuple[str, str], None] = {}  # session and client's id, of calls of sessions that have ended
        self.own_keys: dict[str, str] = {}  # digests of the keys of sessions, by session, the oldest first

    def check_right(self, *rights: Right) -> None:
        """Raises ApiError if the key has none of the rights."""
        if not {*rights} & {*self.settings.rights}:
            raise ApiError(f"this key may not {rights[0]}: gateway.keys.{self.name}.rights lacks it", "forbidden", 403)

    def use_calls(self, number: int = 1) -> None:
        """Count a request, which is as many calls as it asks for answers, and prepays. Raises ApiError."""
        self._count_calls(number)
        self.prepay(number)

    def prepay(self, number: int = 1) -> None:
        self.prepaid = min(self.prepaid + PREPAID * number, MOST_PREPAID)

    def use_prepaid(self) -> None:
        """Count a reward, an end or a deletion: as a call if none is prepaid. Raises ApiError."""
        if self.prepaid:
            self.prepaid -= 1
        else:
            self._count_calls(1)

    def _count_calls(self, number: int) -> None:
        used, limit = self.calls.sum + self.elsewhere.calls, self.settings.calls_per_minute
        if limit is not None and used + number > limit:
            raise self._refusal(f"this key may make {limit} calls a minute: try again later", "rate_limit_exceeded")
        self.calls.add(number)

    def check_tokens(self) -> None:
        """Raises ApiError if no token is left: answers in progress count with all that they may have."""
        used, limit = self.tokens.sum + self.elsewhere.tokens + self.reserved, self.settings.tokens_per_minute
        if limit is not None and used >= limit:
            raise self._refusal(f"this key may sample {limit} tokens a minute: try again later", "rate_limit_exceeded")

    @contextmanager
    def answer(self, tokens: int) -> Iterator[None]:
        """Reserve the tokens that an answer may have, until the end of the block. Raises ApiError as `check_tokens`."""
        self.check_tokens()
        self.reserved += tokens
        try:
            yield
        finally:
            self.reserved -= tokens

    @contextmanager
    def opening(self, session: str) -> Iterator[None]:
        """Count a session as open from before it is opened, or opened again, unless the block raises. Raises ApiError
        if it would be one too many."""
        if session in self.open:
            yield
            return
        limit = self.settings.sessions
        if limit is not None and len(self.open) + self.elsewhere.sessions >= limit:
            raise self._refusal(f"this key may have {limit} sessions at a time: end one", "too_many_sessions")
        self.open.add(session)
        try:
            yield
        except BaseException:
            self.open.discard(session)
            raise

    @property
    def use(self) -> KeyUse:
        """What it has used here."""
        calls, tokens = self.calls.sum, self.tokens.sum + self.reserved
        return KeyUse(calls=calls, tokens=tokens, sessions=len(self.open), refused=self.refused)

    def _refusal(self, why: str, code: str) -> ApiError:
        self.refused += 1
        return ApiError(why, code, 429)


class UserKeys:
    """`accounts`: of the configured keys, by name. A session may have a key of its own, which is valid at this gateway
    and for that session alone, and has rights and account of the key that opened it. clock: in seconds."""

    def __init__(self, configured: Mapping[str, KeyConfig], clock: Callable[[], float]) -> None:
        self.accounts = {name: KeyAccount(name, settings, clock) for name, settings in configured.items()}
        self._of_sessions: dict[str, tuple[KeyAccount, str]] = {}  # by the digest of a session's own key

    def of_session(self, session: str) -> KeyAccount:
        return self.accounts[session.partition(":")[0]]

    def identify(self, key: str) -> tuple[KeyAccount, str | None]:
        """The account of a key, and the session if it is one's own. Raises ApiError."""
        digest = sha256(key.encode()).hexdigest()
        holder: tuple[KeyAccount, str | None] | None = self._of_sessions.get(digest)
        for account in self.accounts.values():  # all of them, so that the time tells nothing
            if hmac.compare_digest(account.settings.sha256, digest):
                holder = account, None
        if holder:
            return holder
        raise ApiError("this API key is not known here", "invalid_api_key", 401)

    def key_for(self, session: str) -> str:
        """A new key of a session's own, in place of an earlier one."""
        account, key = self.of_session(session), f"session-{secrets.token_urlsafe(24)}"
        self.forget(session)
        if len(account.own_keys) >= SESSION_KEYS:
            self.forget(next(iter(account.own_keys)))
        account.own_keys[session] = digest = sha256(key.encode()).hexdigest()
        self._of_sessions[digest] = account, session
        return key

    def forget(self, session: str) -> None:
        """The session has ended for good."""
        if digest := self.of_session(session).own_keys.pop(session, None):
            del self._of_sessions[digest]

    def report(self) -> dict[str, KeyUse]:
        """What the keys have used here, those that have."""
        return {name: use for name, account in self.accounts.items() if (use := account.use) != KeyUse()}
