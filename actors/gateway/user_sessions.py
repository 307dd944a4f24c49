"""A session of a user with the policy: calls, rewards, and the saved state for another gateway.

A finished call is on the trainer's disk before the client has the last byte. A gateway that continues the session makes
the saved requests again: every request finds its saved tokens.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog

from actors.gateway.keys import KeyAccount
from actors.sampling.jobs import SampleFailed
from actors.sampling.services import Services
from actors.sampling.sessions import SampleSession
from areal.base.errors import explain
from areal.data.rows import Row
from areal.extensions.agents.openai_api import Answer, ApiError, ChatRequest, ChatSession, message_of, most_characters
from areal.extensions.agents.openai_endpoint import OpenSample
from areal.samples.table import Generation, Tokens
from areal.storage.saved_calls import notes_of, packed, unpacked
from areal.workflows.turn_ends import Keep
from protocols.bus_errors import BusError
from protocols.session_messages import SessionGroup

log = structlog.get_logger()
MAX_REWARDS = 1024
"""The most rewards of answers in a session."""
ELSEWHERE = "the session goes on elsewhere, or has ended: ask again"
UNAVAILABLE = "this gateway has no part in the run now: ask again, or ask another gateway"
MAX_TEXT = 16 * 2**20
"""The most characters of requests and answers in a session: every save writes them."""
KEPT = {"max_tokens", "max_completion_tokens", "stop"}
"""The fields of a request that change the answer, besides messages and tools."""


class UserSample(SampleSession):
    """The sample of a session, with `call_limit` tokens per call and `gateway.max_session_tokens` in all.
    `newest_version`: the version of the last token. Every key has a KV cache, so response times reveal nothing about
    prompts of other keys."""

    newest_version: int | None = None
    on_first: Callable[[], None] | None = None
    account: KeyAccount | None = None  # pays for sampled tokens

    def __init__(self, services: Services, name: str, group: SessionGroup | None, on_start: Callable[[int], None]):
        self.messages: list[dict[str, Any]] = []  # of the first request
        row = Row(0 if group is None else group.prompt_index, self.messages, None, None, {"session": name})
        total = services.config.gateway.max_session_tokens
        sampling = services.config.sampling.model_copy(update={"max_new_tokens": total})
        super().__init__(services, row, sampling, group.min_version if group else 0, on_start=on_start)
        self.cache_salt = name.partition(":")[0]
        self.call_limit = services.config.sampling.max_new_tokens

    def show(self, content: bytes) -> dict[str, Any]:
        raise ValueError("sessions of users take none yet")

    async def generate(
        self,
        tokens: Tokens,
        max_new_tokens: int | None = None,
        keep: Keep | None = None,
        pictures: Sequence[dict[str, Any]] | None = None,
    ) -> Generation:
        limit = min(max_new_tokens or self.call_limit, self.call_limit)
        with self.account.answer(min(limit, self.room)) if self.account else nullcontext():
            return await super().generate(tokens, limit, keep, pictures)

    def count(self, versions: np.ndarray) -> None:
        if self.account:
            self.account.tokens.add(len(versions))
        if len(versions):
            self.newest_version = int(versions[-1])
            if self.on_first:
                self.on_first()
                self.on_first = None
        super().count(versions)


class UserReward(NamedTuple):
    """A reward of the answer with the id `call`, or of the session (None), with parts by name. mark: the client's id of
    the reward, or empty."""

    value: float
    parts: Mapping[str, float]
    call: str | None
    mark: str

    @property
    def gave(self) -> str:
        """The reward in a receipt (areal.samples.trajectory.Note)."""
        return f"{self.value:.9g} {self.call or ''}".strip()


class AnsweredCall(NamedTuple):
    """A finished call. name: the answer's id. mark: the client's id, with the answer's number. messages, options,
    answer: the places of messages, further fields, and the answer's message and finish in the session's parts."""

    name: str
    mark: str
    messages: list[int]
    options: int
    answer: int


class UserSession:
    """See the module. name: the key's name and the session id. account: the account of the key. group: the permit;
    None: the session is served, and not trained. save: has the trainer store a frame. on_start: gets the version of the
    first token.

    `admitted`: the current or former group, or empty. `ended`: no calls are taken any more. `rewarded`: the reward has
    come, and the sample is ready or given up.
    """

    def __init__(
        self,
        services: Services,
        name: str,
        group: SessionGroup | None,
        account: KeyAccount,
        save: "Callable[[UserSession, bytes], Any]",
        on_start: "Callable[[UserSession, int], None]",
    ) -> None:
        self.name, self.group, self.account = name, group, account
        self.admitted = group.group if group else ""
        self.sample = UserSample(services, name, group, lambda version: on_start(self, version))
        self.sample.account = account
        self.chat = ChatSession(self.sample, most_characters(services.config, services.tokenizer))
        self.open = OpenSample(self.chat)
        self.ended = self.rewarded = False
        self.rewarding = asyncio.Lock()
        self.running = 0
        self.begun = self.used = asyncio.get_running_loop().time()
        self.first_tokens: list[float] = []  # seconds from a call to its first text, since the last look
        self._save = save
        self.saves = 0  # the number of saves
        self.is_over = False  # the sample is made, and takes no call any more
        self._turns: list[AnsweredCall] = []
        self._text = 0  # characters in _parts
        self._parts: dict[str, int] = {}  # parts of requests, as JSON, with their places: a call repeats earlier parts
        self._rewards: list[tuple[str, float, str]] = []  # answer, value, mark, in order of arrival
        self.gave: dict[str, str] = {}  # the rewards in receipts, by the client's ids
        self._calls: dict[str, asyncio.Task[Answer]] = {}  # by the client's ids
        self._questions: dict[str, bytes] = {}  # digests of the messages of calls
        self._saving = asyncio.Lock()

    @property
    def full(self) -> bool:
        """Whether the session has no room for another call."""
        short_of_room = self.sample.room < self.sample.call_limit or self._text >= MAX_TEXT
        return bool(self.sample.tokens_sampled) and short_of_room

    @property
    def answered(self) -> set[str]:
        """The client's ids of answered calls."""
        return {key.rpartition("/")[0] for key, call in self._calls.items() if is_answered(call)}

    def give_reward(self, value: float, answer: str, mark: str) -> None:
        """Set the reward of an answer, unless a reward came before with this mark. Raises ApiError."""
        if mark in self.gave:
            return
        if len(self._rewards) >= MAX_REWARDS:
            raise ApiError(f"a session takes at most {MAX_REWARDS} rewards of its answers", "too_many_rewards")
        self.chat.give_reward(value, answer)
        self._rewards.append((answer, value, mark))
        if mark:
            self.gave[mark] = UserReward(value, {}, answer, mark).gave

    async def answer(self, request: ChatRequest, name: str, on_text: Callable[[str], None] | None, mark: str) -> Answer:
        """Return the policy's answer, once it is saved. mark: the client's id for the call, or empty. A second call
        with the mark gets the first call's answer, even if the first connection was lost. Raises ApiError, also if a
        call with other messages came with this mark."""
        if not mark:
            return await self._turn(request, name, on_text, mark)
        call = self._calls.get(mark)
        if call is None or (call.done() and not is_answered(call)):
            self._questions[mark] = _question(request)
            call = self._calls[mark] = asyncio.create_task(self._turn(request, name, on_text, mark))
            call.add_done_callback(note_error)
        elif self._questions[mark] != _question(request):
            why = "a call with other messages came with this Idempotency-Key: give this call a new key"
            raise ApiError(why, "id_in_use", 409)
        await asyncio.wait([call])
        if call.cancelled():
            raise ApiError(ELSEWHERE, "elsewhere", 409)
        answer = call.result()
        self.chat.name_answer(name, answer)
        return answer

    def forget_call(self, mark: str) -> None:
        """Have the next call with this mark begin anew."""
        self._calls = {key: call for key, call in self._calls.items() if key.rpartition("/")[0] != mark}

    async def _turn(self, request: ChatRequest, name: str, on_text: Callable[[str], None] | None, mark: str) -> Answer:
        loop = asyncio.get_running_loop()
        self.running += 1
        began = loop.time()
        self.sample.on_first = lambda: self.first_tokens.append(loop.time() - began)
        try:
            if not self.sample.messages:
                self.sample.messages += map(message_of, request.messages)
            answer = await self.chat.complete(request, name, on_text)
            if self.is_over:
                raise ApiError("the session got its reward while it answered: this call is not trained", "over", 409)
            self._add_turn(request, name, answer, mark)
            await self.save()
        except SampleFailed as failure:
            if self.sample.closed:
                raise ApiError(ELSEWHERE, "elsewhere", 409) from None
            log.warning("a call has failed", session=self.name, error=f"{failure}")
            why = "the policy does not take its prompt: send less" if failure.cause == "prompt" else "try again later"
            raise ApiError(f"the call has failed: {why}", "call_failed") from None
        finally:
            self.running -= 1
            self.used = loop.time()
        return answer

    def _add_turn(self, request: ChatRequest, name: str, answer: Answer, mark: str) -> None:
        """Keep the parts of a request that templates may show."""
        options = request.model_dump(mode="json", exclude_none=True, include=KEPT) | {"tools": request.offered}
        messages = map(message_of, request.messages)
        parts = map(json.dumps, [*messages, options, [answer.message, answer.finish]])
        *places, place, end = map(self._place, parts)
        self._turns.append(AnsweredCall(name, mark, places, place, end))

    def _place(self, part: str) -> int:
        self._text += len(part) if part not in self._parts else 0
        return self._parts.setdefault(part, len(self._parts))

    async def save(self) -> None:
        """Have the trainer store the calls so far, and everything else needed to continue them."""
        async with self._saving:
            if self.group is None:
                return
            self.saves += 1
            turns = {"parts": [*self._parts], "turns": self._turns, "rewards": self._rewards}
            notes = json.dumps({"saves": self.saves, "ended": self.ended, "age": self._age()} | turns)
            if calls := self.sample.calls_so_far():
                await self._save(self, packed(calls, notes))

    def _age(self) -> tuple[float, str, float]:
        """Return the age in seconds, and the machine's boot and clock: a gateway on this machine can add the time
        since. Clocks of hosts may differ by hours."""
        return asyncio.get_running_loop().time() - self.begun, *_since_boot()

    async def restore(self, frame: bytes | memoryview) -> None:
        """Become the session that `save` has stored. Raises SampleFailed, ApiError and ValueError."""
        self.sample.account = None  # sampled tokens are paid for
        notes = json.loads(notes_of(frame))
        self.saves = notes["saves"] + 1  # the last gateway may still be at the next save
        self.sample.saved_calls = unpacked(frame)
        parts = [json.loads(part) for part in notes["parts"]]
        for turn in itertools.starmap(AnsweredCall, notes["turns"]):
            request = ChatRequest(messages=[parts[place] for place in turn.messages], **parts[turn.options])
            answer = await self.chat.complete(request, turn.name, earlier=parts[turn.answer])
            if not self._turns:
                self.sample.messages += map(message_of, request.messages)
            self._add_turn(request, turn.name, answer, turn.mark)
            if turn.mark:
                self._questions[turn.mark] = _question(request)
                self._calls[turn.mark] = asyncio.create_task(_same(answer))
        self.sample.account = self.account
        for name, value, mark in notes["rewards"]:
            self.give_reward(value, name, mark)
        self.ended = notes["ended"]
        age, boot, then = notes["age"]
        here, now = _since_boot()
        self.begun = asyncio.get_running_loop().time() - age - (max(0.0, now - then) if boot == here else 0.0)

    def close(self) -> None:
        for call in self._calls.values():
            call.cancel()
        self.sample.close()

    async def leave(self) -> None:
        """Close the session, and wait until its calls have ended."""
        self.close()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)


def _since_boot() -> tuple[str, float]:
    """Return the id of this machine's boot, and the seconds of a clock that is never set, shared by all processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), time.monotonic()


def _question(request: ChatRequest) -> bytes:
    """Return a digest of the messages of a call, as far as templates show them."""
    return sha256(json.dumps([*map(message_of, request.messages)]).encode()).digest()


def is_answered(call: asyncio.Task[Answer]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def note_error(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's error, so that asyncio does not report it if nobody waits any more."""
    if not task.cancelled():
        task.exception()


async def _same(answer: Answer) -> Answer:
    return answer


@dataclass(kw_only=True)
class SessionCall(OpenSample):
    """A call of a session, for the endpoint. mark: the client's id for the call. give_back: called with the session of
    a refused call. version: the version of the first tokens; None before they arrive."""

    session: UserSession
    mark: str
    give_back: Callable[[UserSession], Awaitable[None]]
    number: int = 0
    version: int | None = None

    async def complete(self, request: ChatRequest, name: str, on_text: Callable[[str], None] | None) -> Answer:
        mark = f"{self.mark}/{self.number}" if self.mark else ""
        self.number += 1

        def on_piece(text: str) -> None:
            if self.version is None:
                self.version = self.session.sample.newest_version
            assert on_text is not None  # otherwise this is not called
            on_text(text)

        with explain(BusError, UNAVAILABLE, partial(ApiError, code="unavailable", status=503)):
            try:
                answer = await self.session.answer(request, name, on_text and on_piece, mark)
            except ApiError:
                await self.give_back(self.session)
                raise
        if self.version is None and len(answer.sampled):
            self.version = int(answer.sampled.versions[0])
        return answer

    def name_caller(self, caller: str, names: Sequence[str]) -> None:
        """Ignore the caller: the name of the session counts."""

    def headers(self) -> dict[str, str]:
        return {
            "X-Session-Id": self.session.name,
            "X-Areal-Version": "" if self.version is None else f"{self.version}",
            "X-Areal-Trained": "no" if self.session.group is None else "yes",
        }
