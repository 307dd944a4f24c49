"""An OpenAI-compatible HTTP endpoint, through which any agent program samples from the policy in training.

Each sample has its own API key, which is valid until the sample ends. The key authorises a call and identifies its
sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict, ValidationError

from areal.workflows.openai_api import Access, ApiError, ChatRequest, ChatSession, chunks, completion
from areal.workflows.parsers import Parsers
from areal.workflows.session import Session

MAX_BODY_BYTES = 32 * 2**20
# Time for unfinished responses when the endpoint closes. Calls that still generate are cancelled before.
CLOSE_SECONDS = 1.0


class Reward(BaseModel):
    """The body of a POST to /v1/reward."""

    model_config = ConfigDict(allow_inf_nan=False)

    reward: float


@dataclass(slots=True)
class _Open:
    """A sample that an agent works on, and its calls in progress."""

    chat: ChatSession
    calls: set[asyncio.Task[Any]] = field(default_factory=set)


class OpenAIEndpoint:
    """Serves calls for open samples. It starts to listen when the first sample is opened.

    model: the name that /v1/models returns; requests may use any name. host: the interface to listen on. parsers: as in
    ChatSession.
    """

    def __init__(self, model: str, host: str, parsers: Parsers | None = None) -> None:
        self._model = model
        self._host = host
        self._parsers = parsers
        self._open: dict[str, _Open] = {}
        self._starting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    @contextlib.asynccontextmanager
    async def serve(self, session: Session) -> AsyncIterator[Access]:
        """Answer calls for this sample until the end of the block. Calls still in progress are then cancelled."""
        port = await self._port()
        key = f"sample-{secrets.token_urlsafe(24)}"
        self._open[key] = sample = _Open(ChatSession(session, self._parsers))
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield Access(f"http://{host}:{port}/v1", key, sample.chat)
        finally:
            del self._open[key]
            for call in sample.calls:
                call.cancel()
            await asyncio.gather(*sample.calls, return_exceptions=True)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _port(self) -> int:
        async with self._starting:
            if self._runner is None:
                runner = web.AppRunner(
                    self._app(), handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS, access_log=None,
                    logger=_log,
                )  # fmt: skip
                await runner.setup()
                await web.TCPSite(runner, self._host, 0).start()
                self._runner = runner
        port: int = self._runner.addresses[0][1]
        return port

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        return app

    def _sample(self, request: web.Request) -> _Open:
        """The open sample that the request's API key belongs to. Raises ApiError."""
        sample = self._open.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if sample is None:
            raise ApiError(
                "no sample with this API key is open: the sample has ended, or this is not the key that the agent got",
                "invalid_api_key",
                401,
            )
        return sample

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        sample = self._sample(request)
        asked = _parse(ChatRequest, await _body(request))
        # A separate task, so that the end of the sample cancels it without closing the connection.
        call = asyncio.create_task(sample.chat.complete(asked))
        sample.calls.add(call)
        try:
            await asyncio.wait([call])
            if call.cancelled():
                raise ApiError("the sample has ended", "sample_ended")
            answer = call.result()
        finally:
            call.cancel()
            sample.calls.discard(call)
        if not asked.stream:
            return web.json_response(completion(answer, asked, sample.chat.tokenizer))
        return await _stream(request, chunks(answer, asked, sample.chat.tokenizer))

    async def _reward(self, request: web.Request) -> web.Response:
        self._sample(request).chat.reward = reward = _parse(Reward, await _body(request)).reward
        return web.json_response({"reward": reward})

    async def _models(self, request: web.Request) -> web.Response:
        self._sample(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "areal"}
        return web.json_response({"object": "list", "data": [model]})


def _is_ours(record: logging.LogRecord) -> bool:
    """False for log records of malformed requests. Their clients get an answer, and could fill the log with them."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_log = logging.getLogger(__name__)
_log.addFilter(_is_ours)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in the format of the OpenAI API."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error(error.status, str(error), error.code)
    except web.HTTPException as error:  # for example an unknown path, or a body that is too large
        return _error(error.status, error.text or error.reason, None)


def _error(status: int, message: str, code: str | None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


async def _body(request: web.Request) -> bytes:
    """The body of the request. Raises ApiError if it does not match its declared encoding."""
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise ApiError(f"the body cannot be read: {error}") from None


def _parse(kind: type[BaseModel], body: bytes) -> Any:
    """The body as a `kind`. Raises ApiError, which names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise ApiError(f"{where}: {first['msg']}") from None


async def _stream(request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
    """Send the events as a stream. All of them are known before: tool calls and stop strings need the whole turn."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in [*map(json.dumps, events), "[DONE]"]:
        await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response
