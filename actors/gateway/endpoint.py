"""The HTTP endpoint of a gateway: sessions, keys that outlive samples, and the calls of agents (`openai_endpoint.py`).

| request | answer |
|---|---|
| POST /v1/chat/completions, /v1/responses, /v1/messages | as inside a sample, with headers of the session |
| POST /v1/completions | for keys that are not trained, for programs that evaluate |
| POST /v1/sessions {"id": ...} | a session with a key |
| GET /v1/sessions/ID | the state |
| POST /v1/sessions/ID/reward {"reward": ..., "call": ..., "id": ...} | the state, once the reward is stored |
| POST /v1/sessions/ID/end | the state |
| DELETE /v1/sessions/ID | the number of deleted sessions of this name, and the steps that trained earlier sessions |
"""

import asyncio
import json
import re
import secrets
import ssl
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, Field

from actors.gateway.completions import CompletionRequest, TextCompletion, completions_body
from actors.gateway.keys import KeyAccount, Right, UserKeys
from actors.gateway.open_sessions import OpenSessions
from actors.gateway.session_table import NO_SESSION
from actors.gateway.user_sessions import UNAVAILABLE, SessionCall, UserReward, UserSession
from actors.sampling.jobs import SampleFailed
from areal.base.errors import explain
from areal.config.role_sections import GatewayConfig
from areal.extensions.agents.anthropic_api import CountRequest
from areal.extensions.agents.openai_api import ApiError, SamplingFields, prompt_tokens
from areal.extensions.agents.openai_endpoint import OpenAIEndpoint, OpenSample, body_of, key_of, parse
from protocols.bus_errors import BusError

log = structlog.get_logger()
SESSION_ID = re.compile(r"(?!-$)[\w.@+-]{1,100}")
# Limits of a reward: number of parts, size of a part, and length of a name.
MAX_PARTS, LARGEST_PART, LONGEST_NAME = 64, 1e6, 100
ONLY_UNTRAINED = (
    "completions are for programs that evaluate, and nothing of them is trained: use a key with train: false "
    "(gateway.keys.{name}.train)"
)


class SessionRequest(BaseModel):
    id: str | None = None


class SessionReward(BaseModel):
    """The body of a reward. reward: for the session, or for the answer with the id `call`; a dict has parts to be
    added. id: chosen by the client; a repeat with the id gets the first answer."""

    reward: float | dict[str, float] = Field(union_mode="left_to_right")
    call: str | None = None
    id: str = Field("", max_length=100)

    def within(self, bounds: tuple[float, float]) -> UserReward:
        """Return the reward. Raises ApiError if it is out of bounds."""
        parts = self.reward if isinstance(self.reward, dict) else {}
        fits = all(len(name) <= LONGEST_NAME and abs(part) <= LARGEST_PART for name, part in parts.items())
        if not fits or len(parts) > MAX_PARTS:
            why = f"a reward has at most {MAX_PARTS} parts, each of at most {LARGEST_PART:.0f}, with names of at most"
            raise ApiError(f"{why} {LONGEST_NAME} characters", "bad_parts")
        value = sum(self.reward.values()) if isinstance(self.reward, dict) else self.reward
        if not bounds[0] <= value <= bounds[1]:
            raise ApiError(f"a reward is from {bounds[0]:g} to {bounds[1]:g}, not {value:g}", "reward_out_of_range")
        return UserReward(value, parts, self.call, self.id)


class GatewayEndpoint(OpenAIEndpoint):
    """See the module."""

    def __init__(
        self,
        model: str,
        settings: GatewayConfig,
        port: int,
        keys: UserKeys,
        sessions: OpenSessions,
        on_refusal: Callable[[str], None],
        most_characters: int,
    ) -> None:
        super().__init__(model, settings.host, on_refusal, port, _tls(settings), most_characters)
        self._settings, self._keys, self._sessions = settings, keys, sessions

    def _app(self) -> web.Application:
        app = super()._app()
        app.middlewares.append(_with_the_run)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/sessions", self._begin_session)
        app.router.add_get("/v1/sessions/{id}", self._state)
        app.router.add_delete("/v1/sessions/{id}", self._delete)
        app.router.add_post("/v1/sessions/{id}/reward", self._reward_session)
        app.router.add_post("/v1/sessions/{id}/end", self._end)
        return app

    def _enter(self, request: web.Request, *rights: Right) -> tuple[KeyAccount, str | None]:
        """Count a request as a call. Returns the account, and the session of a session's key. Raises ApiError."""
        account, own_session = self._keys.identify(key_of(request))
        account.use_calls()
        if rights:
            account.check_right(*rights)
        return account, own_session

    def _sample(self, request: web.Request) -> Any:
        """Raises ApiError if the request has no key. Only calls need an open session."""
        self._enter(request)

    async def _read(self, request: web.Request, kind: type[BaseModel]) -> tuple[OpenSample, Any]:
        """Return the session of a call, and the call's body. Raises ApiError."""
        account, own_session = self._enter(request, "serve")
        account.check_tokens()
        data = await body_of(request)
        body = parse(kind, data)
        account.use_calls((getattr(body, "n", 1) or 1) - 1)
        messages = getattr(body, "messages", None) or getattr(body, "input", None)
        if isinstance(messages, list) and len(messages) > self._settings.max_messages:
            raise ApiError(f"a call has at most {self._settings.max_messages} messages (gateway.max_messages)")
        if not account.settings.train and isinstance(body, SamplingFields) and self._differs(body):
            session = self._sessions.untrained(account.name, body)
            return self._call(session, ""), body
        session_name = own_session or f"{account.name}:{_session_id(request, data)}"
        wishes = request.headers.getall("X-Areal-Train", ["yes"])
        train = account.settings.train and all(value.strip().lower() == "yes" for value in wishes)
        mark, retries = request.headers.get("Idempotency-Key", "")[:200], request.headers.get("X-Stainless-Retry-Count")
        is_first = not mark and retries == "0"  # a client may ask for the same answer twice
        if not mark and retries is not None:  # OpenAI's and Anthropic's clients send this header, and repeat the body
            mark = sha256(data).hexdigest()
        if not is_first:
            self._sessions.check_call(session_name, mark)
        session = await self._sessions.open_session(session_name, train)
        if is_first:
            session.forget_call(mark)
        return self._call(session, mark), body

    def _call(self, session: UserSession, mark: str) -> SessionCall:
        return SessionCall(**vars(session.open), session=session, mark=mark, give_back=self._sessions.give_back)

    def _differs(self, body: SamplingFields) -> bool:
        """Whether the request asks for other sampling settings than the run's."""
        return body.changed(self._sessions.policy.sampling) != self._sessions.policy.sampling

    async def _complete(self, request: web.Request) -> web.Response:
        account, _ = self._enter(request, "serve")
        if account.settings.train:
            raise ApiError(ONLY_UNTRAINED.format(name=account.name), "forbidden", 403)
        account.check_tokens()
        body = parse(CompletionRequest, await body_of(request))
        account.use_calls(len(body.given) - 1)
        prompts = await body.prompts(self._sessions.policy.tokenizer, self._most_characters)
        completions = await asyncio.gather(*(self._completion(account.name, body, prompt) for prompt in prompts))
        return web.json_response(completions_body(body, completions, prompts), headers={"X-Areal-Trained": "no"})

    async def _completion(self, key: str, request: CompletionRequest, prompt: list[int]) -> TextCompletion:
        sample = self._sessions.untrained(key, request).sample
        request.check_sampling(sample.sampling)
        scored = request.echo and request.logprobs is not None and len(prompt) > 1
        scores = await self._sessions.policy.score(prompt, max(1, request.logprobs or 0)) if scored else None
        completion = TextCompletion(request, self._sessions.policy.tokenizer, prompt, scores)
        if request.max_tokens != 0:
            with explain(SampleFailed, "the completion has failed: {why}", ApiError):
                await completion.sample(sample)
        return completion

    async def _count(self, request: web.Request) -> web.Response:
        """Count tokens. No session is needed or opened."""
        self._enter(request, "serve")
        body = parse(CountRequest, await body_of(request))
        count = await prompt_tokens(body.chat(), self._sessions.policy.tokenizer, self._most_characters)
        return web.json_response({"input_tokens": count})

    async def _reward(self, request: web.Request) -> web.Response:
        raise ApiError("a session gets its reward by POST /v1/sessions/ID/reward", "not_found", 404)

    async def _begin_session(self, request: web.Request) -> web.Response:
        account, own_session = self._enter(request, "serve")
        if own_session:
            raise ApiError("the key of a session opens no other", "forbidden", 403)
        number = parse(SessionRequest, await body_of(request) or b"{}").id or secrets.token_hex(8)
        session = f"{account.name}:{_checked(number)}"
        return web.json_response({"id": session, "api_key": self._keys.key_for(session)})

    def _named(
        self, request: web.Request, *rights: Right, use: Callable[[KeyAccount], None] = KeyAccount.use_prepaid
    ) -> str:
        """Return the path's session, if the key has a right to it. `use` counts the request. Raises ApiError."""
        account, own_session = self._keys.identify(key_of(request))
        use(account)
        owner, _, number = request.match_info["id"].rpartition(":")
        owner = owner or account.name
        session = f"{owner}:{_checked(number)}"
        of_all = own_session is None and "reward_all" in {*rights} & {*account.settings.rights}
        is_own = owner == account.name and own_session in (None, session)
        if owner not in self._keys.accounts or not (is_own or of_all):
            raise ApiError("this key has no such session", "not_found", 404)
        account.check_right(*rights)
        return session

    async def _state(self, request: web.Request) -> web.Response:
        session = self._named(request, "serve", "reward", "reward_all", use=KeyAccount.use_calls)
        return web.json_response(await self._sessions.table.state(session))

    async def _reward_session(self, request: web.Request) -> web.Response:
        session = self._named(request, "reward", "reward_all")
        body = parse(SessionReward, await body_of(request))
        reward = body.within(self._settings.reward_range)
        return web.json_response(await self._sessions.ends.reward(session, reward))

    async def _end(self, request: web.Request) -> web.Response:
        return web.json_response(await self._sessions.ends.end(self._named(request, "serve")))

    async def _delete(self, request: web.Request) -> web.Response:
        session = self._named(request, "serve")
        answer = await self._sessions.delete(session)
        self._keys.forget(session)
        return web.json_response(answer)


@web.middleware
async def _with_the_run(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises ApiError if the run has ended, or if the gateway no longer belongs to the run."""
    try:
        return await handler(request)
    except BusError as error:
        log.warning("a request finds no part of the run", error=str(error))
        raise ApiError(UNAVAILABLE, "unavailable", 503) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # the client has gone
            raise
        raise ApiError(UNAVAILABLE, "unavailable", 503) from None


def _session_id(request: web.Request, data: bytes) -> str:
    """Return the session id of a call: from a header, metadata.session_id or user. Raises ApiError."""
    if number := request.headers.get("X-Session-Id"):
        return _checked(number.rpartition(":")[2])
    fields = json.loads(data)
    metadata = fields.get("metadata")
    number = (metadata.get("session_id") if isinstance(metadata, dict) else None) or fields.get("user")
    if not number:
        return NO_SESSION
    return number if SESSION_ID.fullmatch(f"{number}") else sha256(f"{number}".encode()).hexdigest()[:32]


def _checked(number: Any) -> str:
    if not isinstance(number, str) or not SESSION_ID.fullmatch(number):
        why = "the id of a session has up to 100 letters, digits and any of _ . @ + -, and is no hyphen alone"
        raise ApiError(why, "bad_session_id")
    return number


def _tls(settings: GatewayConfig) -> ssl.SSLContext | None:
    if settings.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.certificate, settings.private_key)
    return context
