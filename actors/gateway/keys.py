"""The rights of keys at a gateway, and an account for every key. Only digests of keys are stored.

Every request passes the account of its key. The most that a request may use is reserved before the work. The use is
counted as it happens, and the reservation ends with the work, however the work ends.
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
# The most sessions of a key with a key of their own: beyond this number the oldest session's key is forgotten.
SESSION_KEYS = 10_000
# A counted request, or a session from a lost gateway, pays for this many rewards, ends and deletions: a client can
# always end a session of its own. The second number is the most that an account keeps.
PREPAID, MOST_PREPAID = 4, 100_000


class LastMinute:
    """A sum over the last minute, by whole seconds of `clock`."""

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
    """The use of a key. `elsewhere`: at other gateways. `open`: sessions here that take calls, or are being opened.
    `reserved`: the most tokens of answers in progress. `prepaid`: rewards, ends and deletions that calls have paid for.
    `refused`: requests, since the gateway has started."""

    def __init__(self, name: str, settings: KeyConfig, clock: Callable[[], float]) -> None:
        self.name, self.settings = name, settings
        self.calls, self.tokens = LastMinute(clock), LastMinute(clock)
        self.open: set[str] = set()
        self.reserved = self.prepaid = self.refused = 0
        self.elsewhere = KeyUse()
        self.answered: dict[tuple[str, str], None] = {}  # session and client's id, of calls in ended sessions
        self.own_keys: dict[str, str] = {}  # digests of session keys, by session, the oldest first

    def check_right(self, *rights: Right) -> None:
        """Raises ApiError if the key has none of the rights."""
        if not {*rights} & {*self.settings.rights}:
            raise ApiError(f"this key may not {rights[0]}: gateway.keys.{self.name}.rights lacks it", "forbidden", 403)

    def use_calls(self, number: int = 1) -> None:
        """Count a request as `number` calls (the number of asked answers), and prepay. Raises ApiError."""
        self._count_calls(number)
        self.prepay(number)

    def prepay(self, number: int = 1) -> None:
        self.prepaid = min(self.prepaid + PREPAID * number, MOST_PREPAID)

    def use_prepaid(self) -> None:
        """Count a reward, an end or a deletion: as a call, unless it is prepaid. Raises ApiError."""
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
        """Raises ApiError if no token is left: answers in progress count with all tokens that they may have."""
        used, limit = self.tokens.sum + self.elsewhere.tokens + self.reserved, self.settings.tokens_per_minute
        if limit is not None and used >= limit:
            raise self._refusal(f"this key may sample {limit} tokens a minute: try again later", "rate_limit_exceeded")

    @contextmanager
    def answer(self, tokens: int) -> Iterator[None]:
        """Reserve the most tokens of an answer, until the end of the block. Raises ApiError if no token is left."""
        self.check_tokens()
        self.reserved += tokens
        try:
            yield
        finally:
            self.reserved -= tokens

    @contextmanager
    def opening(self, session: str) -> Iterator[None]:
        """Count a session as open, from before the block opens or reopens the session; an error in the block undoes
        this. Raises ApiError if the key would have too many sessions."""
        if session in self.open:
            yield
            return
        limit = self.settings.sessions
        if limit is not None and len(self.open) + self.elsewhere.sessions >= limit:
            raise self._refusal(f"this key may have {limit} sessions at a time: end a session", "too_many_sessions")
        self.open.add(session)
        try:
            yield
        except BaseException:
            self.open.discard(session)
            raise

    @property
    def use(self) -> KeyUse:
        """The use of the key at this gateway."""
        calls, tokens = self.calls.sum, self.tokens.sum + self.reserved
        return KeyUse(calls=calls, tokens=tokens, sessions=len(self.open), refused=self.refused)

    def _refusal(self, why: str, code: str) -> ApiError:
        self.refused += 1
        return ApiError(why, code, 429)


class UserKeys:
    """`accounts`: by name of a configured key. A session may have a key, valid at this gateway for this session
    alone, with the rights and the account of the key that opened the session. clock: in seconds."""

    def __init__(self, configured: Mapping[str, KeyConfig], clock: Callable[[], float]) -> None:
        self.accounts = {name: KeyAccount(name, settings, clock) for name, settings in configured.items()}
        self._of_sessions: dict[str, tuple[KeyAccount, str]] = {}  # by the digest of the session's key

    def of_session(self, session: str) -> KeyAccount:
        return self.accounts[session.partition(":")[0]]

    def identify(self, key: str) -> tuple[KeyAccount, str | None]:
        """Return the account of a key, and the session if the key belongs to a session. Raises ApiError."""
        digest = sha256(key.encode()).hexdigest()
        holder: tuple[KeyAccount, str | None] | None = self._of_sessions.get(digest)
        for account in self.accounts.values():  # all accounts, so that the time tells nothing
            if hmac.compare_digest(account.settings.sha256, digest):
                holder = account, None
        if holder:
            return holder
        raise ApiError("this API key is not known here", "invalid_api_key", 401)

    def key_for(self, session: str) -> str:
        """Return a new key for a session, in place of an earlier key."""
        account, key = self.of_session(session), f"session-{secrets.token_urlsafe(24)}"
        self.forget(session)
        if len(account.own_keys) >= SESSION_KEYS:
            self.forget(next(iter(account.own_keys)))
        account.own_keys[session] = digest = sha256(key.encode()).hexdigest()
        self._of_sessions[digest] = account, session
        return key

    def forget(self, session: str) -> None:
        """Forget the key of a session that has ended for good."""
        if digest := self.of_session(session).own_keys.pop(session, None):
            del self._of_sessions[digest]

    def report(self) -> dict[str, KeyUse]:
        """Return the use of keys at this gateway, without unused keys."""
        return {name: use for name, account in self.accounts.items() if (use := account.use) != KeyUse()}
