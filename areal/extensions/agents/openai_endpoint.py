"""An HTTP endpoint, through which any agent program samples from the policy in training. The endpoint speaks OpenAI's
chat completions and responses, and Anthropic's messages.

A sample has its own API key, which is valid until the sample ends. The key authorises a call and identifies the sample.
Rewards need another key, since a policy with a shell may find the API key in the agent's environment variables.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from areal.base.errors import explain
from areal.extensions.agents import anthropic_api, openai_api
from areal.extensions.agents.anthropic_api import CountRequest, MessageReply, MessagesRequest, Threads
from areal.extensions.agents.openai_api import (
    Access,
    Answer,
    ApiError,
    ChatReply,
    ChatRequest,
    ChatSession,
    Event,
    Reply,
)
from areal.extensions.agents.parsers import first_mistake
from areal.extensions.agents.responses_api import ResponseReply, Responses, ResponsesRequest
from areal.workflows.session import Session
from areal.workflows.tools import Tool, Tools

MAX_BODY_BYTES = 32 * 2**20
# A connection without a request for this long is closed. aiohttp counts from the connection on, so a request's headers
# have to come within this time, and so has the body.
IDLE_SECONDS = 30.0
# Time for the rest of a request that is answered early.
LINGER_SECONDS = 10.0
# Time for unfinished responses when the endpoint closes. Calls that still generate are cancelled before.
CLOSE_SECONDS = 1.0
# Statuses of temporary refusals, and the seconds after which a refused caller is told to come again.
FOR_NOW, RETRY_AFTER = (429, 503), "5"
NO_REWARD = (
    "a reward needs the sample's reward key as `key`, which an agent gets where "
    "rollout_manager.workflow_options.agent_reward is true: the run's reward functions score all other samples "
    "(areal docs agents)"
)


class RewardRequest(BaseModel):
    """The body of a POST to /v1/reward. key: the sample's reward key. call: the id of the rewarded answer. session: the
    header X-Session-Id of the rewarded calls, and `agent` their maker's name; a null reward leaves these calls
    untrained. With neither call nor session, the reward is the sample's."""

    reward: float | None
    key: str = ""
    call: str | None = None
    session: str | None = None
    agent: str = ""

    @model_validator(mode="after")
    def _check_subject(self) -> Self:
        if self.call and self.session:
            raise PydanticCustomError("subject", "a reward is of a call or of a session, not of both")
        if self.reward is None and not self.session:
            raise PydanticCustomError("subject", "only a session can be without a reward, and is then not trained")
        return self


@dataclass
class OpenSample:
    """A sample that an agent works on, and its calls in progress."""

    chat: ChatSession
    reward_key: str = field(default_factory=lambda: f"reward-{secrets.token_urlsafe(24)}")
    responses: Responses = field(default_factory=dict)
    threads: Threads = field(default_factory=dict)
    calls: set[asyncio.Task[Answer]] = field(default_factory=set)

    async def complete(self, request: ChatRequest, name: str, on_text: Callable[[str], None] | None) -> Answer:
        """See ChatSession.complete."""
        return await self.chat.complete(request, name, on_text)

    def name_caller(self, caller: str, names: Sequence[str]) -> None:
        """Record the answers with these ids for the agent that named its call `caller`, if it has a name."""
        if caller:
            self.chat.name_caller(caller, names)

    def headers(self) -> dict[str, str]:
        """Headers of the answers, as far as known at their beginning."""
        return {}


class OpenAIEndpoint(Tool):
    """Serves calls for open samples, from the first opened sample on.

    model: the name that /v1/models returns; requests may use any name. host: the interface to listen on. on_refusal:
    called for each request that is answered with an error, except for errors within a stream. port: 0 takes any free
    port. most_characters: limit of a call.
    """

    def __init__(
        self,
        model: str,
        host: str,
        on_refusal: Callable[[str], None] = lambda refusal: None,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        most_characters: int = openai_api.MAX_CHARACTERS,
    ) -> None:
        self._model = model
        self._most_characters = most_characters
        self._host, self._listen_at, self._tls = host, port, tls
        self._on_refusal = on_refusal
        self._open: dict[str, OpenSample] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    @contextlib.asynccontextmanager
    async def serve(self, session: Session) -> AsyncIterator[Access]:
        """Answer calls for this sample until the end of the block. Calls still in progress are then cancelled."""
        port = await self.listen()
        key = f"sample-{secrets.token_urlsafe(24)}"
        self._open[key] = sample = OpenSample(ChatSession(session, self._most_characters))
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield Access(f"http://{host}:{port}/v1", key, sample.reward_key, sample.chat)
        finally:
            del self._open[key]
            for call in sample.calls:
                call.cancel()
            await asyncio.gather(*sample.calls, return_exceptions=True)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def listen(self) -> int:
        """Listen, unless the endpoint already listens. Returns the port. Raises OSError if the port cannot be used."""
        async with self._starting:
            if self._runner is None:
                runner = web.AppRunner(
                    self._app(),
                    handler_cancellation=True,
                    shutdown_timeout=CLOSE_SECONDS,
                    access_log=None,
                    logger=_log,
                    auto_decompress=False,
                    keepalive_timeout=IDLE_SECONDS,
                    lingering_time=min(IDLE_SECONDS, LINGER_SECONDS),
                )
                await runner.setup()
                await web.TCPSite(runner, self._host, self._listen_at, ssl_context=self._tls).start()
                self._runner = runner
        port: int = self._runner.addresses[0][1]
        return port

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._response)
        app.router.add_post("/v1/messages", self._message)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return errors in the format of the protocol that the path belongs to."""
        try:
            return await handler(request)
        except ApiError as refused:
            error = refused
        except web.HTTPException as refused:  # for example an unknown path, or a body that is too large
            error = ApiError(refused.text or refused.reason, status=refused.status)
        self._on_refusal(f"{request.method} {request.path}: {error.status}, {error}")
        return _error(request, error)

    def _sample(self, request: web.Request) -> OpenSample:
        """Return the open sample of the request's API key. Raises ApiError."""
        sample = self._open.get(key_of(request))
        if sample is None:
            raise ApiError(
                "no sample with this API key is open: the sample has ended, or this is not the key that the agent got",
                "invalid_api_key",
                401,
            )
        return sample

    async def _read(self, request: web.Request, kind: type[BaseModel]) -> tuple[OpenSample, Any]:
        """Return the open sample of a request, and the request's body as a `kind`. Raises ApiError."""
        return self._sample(request), parse(kind, await body_of(request))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        sample, body = await self._read(request, ChatRequest)
        return await _answer(request, sample, ChatReply(body, sample.chat.tokenizer))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        sample, body = await self._read(request, ResponsesRequest)
        return await _answer(request, sample, ResponseReply(body, sample.responses))

    async def _message(self, request: web.Request) -> web.StreamResponse:
        sample, body = await self._read(request, MessagesRequest)
        return await _answer(request, sample, MessageReply(body, sample.chat.tokenizer, sample.threads))

    async def _count(self, request: web.Request) -> web.Response:
        sample, body = await self._read(request, CountRequest)
        chat, limit = sample.chat, self._most_characters
        count = await openai_api.prompt_tokens(body.chat(), chat.tokenizer, limit, chat.session)
        return web.json_response({"input_tokens": count})

    async def _reward(self, request: web.Request) -> web.Response:
        sample, body = await self._read(request, RewardRequest)
        if body.key != sample.reward_key:
            raise ApiError(NO_REWARD, "not_the_reward_key", 403)
        if body.session:
            sample.chat.credit_caller(body.session, body.reward, body.agent)
        elif body.reward is not None:
            sample.chat.give_reward(body.reward, body.call)
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        self._sample(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "areal"}
        return web.json_response({"object": "list", "data": [model]})


def open_endpoint(tools: Tools) -> OpenAIEndpoint:
    limit = openai_api.most_characters(tools.config, tools.tokenizer)
    return OpenAIEndpoint(tools.config.model, tools.config.rollout_manager.endpoint_host, most_characters=limit)


def _is_ours(record: logging.LogRecord) -> bool:
    """Drop log records of malformed requests. Their clients get an answer, and could fill the log."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_log = logging.getLogger(__name__)
_log.addFilter(_is_ours)


def key_of(request: web.Request) -> str:
    """Return the API key of a request; empty without a key."""
    return request.headers.get("X-Api-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _error(request: web.Request, error: ApiError) -> web.Response:
    message, headers = str(error), {"Retry-After": RETRY_AFTER} if error.status in FOR_NOW else {}
    if request.path.startswith("/v1/messages"):
        body = anthropic_api.error_body(error.status, message, error.code)
    else:
        body = openai_api.error_body(message, error.code)
    return web.json_response(body, status=error.status, headers=headers)


async def body_of(request: web.Request) -> bytes:
    """Return the unpacked body of the request. Raises ApiError if the body does not match its declared encoding."""
    slow = partial(ApiError, code="slow_body", status=408)
    with (
        explain(TimeoutError, f"the body has not come within {IDLE_SECONDS:.0f} s", slow),
        explain(web.RequestPayloadError, "the body cannot be read: {why}", ApiError),
    ):
        async with asyncio.timeout(IDLE_SECONDS):
            body = await request.read()
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    return body if encoding == "identity" else _unpacked(body, encoding)


def _unpacked(body: bytes, encoding: str) -> bytes:
    """Unpack a body, up to a limit, while aiohttp would inflate any length. Raises ApiError and HTTPException."""
    if encoding not in ("gzip", "deflate"):
        raise ApiError(f"the Content-Encoding {encoding!r} is not known: use gzip or deflate", status=415)
    inflating = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # 32: either format
    with explain(zlib.error, "the body cannot be read: {why}", ApiError):
        unpacked = inflating.decompress(body, MAX_BODY_BYTES)
    if inflating.unconsumed_tail:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(body))
    if not inflating.eof or inflating.unused_data:
        raise ApiError(f"the body cannot be read: it is not one {encoding} stream")
    return unpacked


def parse(kind: type[BaseModel], body: bytes) -> Any:
    """Return the body as a `kind`. Raises ApiError, which names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise ApiError(first_mistake(error, "the body")) from None


async def _answer(request: web.Request, sample: OpenSample, reply: Reply) -> web.StreamResponse:
    """Have the policy answer the call of `reply`. Raises ApiError."""
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    on_text = pieces.put_nowait if reply.request.stream else None
    # Separate tasks, so that the end of the sample cancels them without closing the connection.
    calls = [asyncio.create_task(sample.complete(reply.request, name, on_text)) for name in reply.names]
    calls[0].add_done_callback(lambda _: pieces.put_nowait(None))
    sample.calls.update(calls)
    sample.name_caller(request.headers.get("X-Session-Id", ""), reply.names)
    try:
        if reply.request.stream:
            return await _stream(request, sample, reply, pieces, calls[0])
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        body = reply.body(*(_result(call) for call in calls if call.done()))
        return web.json_response(body, headers=sample.headers())
    finally:
        for call in calls:
            call.cancel()
        sample.calls.difference_update(calls)


def _result(call: asyncio.Task[Answer]) -> Answer:
    """Return the answer of a call that is done. Raises ApiError."""
    if call.cancelled():
        raise ApiError("the sample has ended", "sample_ended")
    if (error := call.exception()) and not isinstance(error, ApiError):
        raise ApiError(f"the sample has failed: {error}", "sample_failed") from error
    return call.result()


async def _stream(
    request: web.Request,
    sample: OpenSample,
    reply: Reply,
    pieces: asyncio.Queue[str | None],
    call: asyncio.Task[Answer],
) -> web.StreamResponse:
    """Send the answer as a stream. The stream begins with the first piece of text or, without any, at the end of the
    call. None ends the pieces. Raises ApiError for an error before the stream has begun; a later error is an event."""
    piece = await pieces.get()
    if piece is None:
        _result(call)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"} | sample.headers()
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    await _send(response, reply.start())
    while piece is not None:
        await _send(response, reply.text(piece))
        piece = await pieces.get()
    try:
        events = reply.finish(_result(call))
    except ApiError as error:
        events = reply.error(error)
    await _send(response, events)
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, events: list[Event]) -> None:
    for event in events:
        if isinstance(event, str):
            await response.write(f"data: {event}\n\n".encode())
        else:
            name = f"event: {event['type']}\n" if "type" in event else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
