"""Messages to frames and back: `header | body | raw frames`.

The header (msgpack, at most 4 KiB) says what the body is and whom it answers; arrays lie beside the body as raw
frames, so that decoding one is a view on the received bytes, not a copy. Nothing in here can execute anything:
the only types are msgpack's, numpy arrays of a few plain dtypes, and the registered pydantic models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocols.errors import MalformedError, ProtocolVersionError
from protocols.messages import KINDS, PROTOCOL_VERSION, Message

MAX_HEADER_BYTES = 4096
MAX_BODY_BYTES = 1 << 20
MAX_ARRAYS = 4096
MAX_DIMENSIONS = 4
# Each unknown key of a map costs the receiver an error of its own.
MAX_MAP_ENTRIES = 16_384
# One frame: the arrays of one trajectory are far smaller; weights travel in chunks of at most this.
MAX_FRAME_BYTES = 64 << 20
DTYPES = {"int32", "int64", "float32", "bool", "uint8"}
_ARRAY = 1

Frame = bytes | memoryview


class Header(BaseModel):
    """The envelope. `sender` is role/index#incarnation; `id` names a request, `reply_to` the request answered;
    `part` counts the parts of a stream, or the events of a publisher; `remaining_ms` is the asker's deadline."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: int = PROTOCOL_VERSION
    kind: str = Field(max_length=64)
    run: str = Field("", max_length=256)
    sender: str = Field(max_length=256)
    id: str = Field("", max_length=128)
    reply_to: str = Field("", max_length=128)
    part: int = 0
    remaining_ms: int = Field(0, ge=0)
    attempt: int = Field(0, ge=0)


def encode(header: Header, message: Message) -> list[Frame]:
    """Frames of a message. Raises MalformedError for what cannot travel or what the receiver would refuse."""
    arrays: list[Frame] = []

    def pack(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(_array_frame(value))
            return msgpack.ExtType(_ARRAY, msgpack.packb([len(arrays) - 1, value.dtype.name, list(value.shape)]))
        if isinstance(value, BaseModel):
            return value.__dict__
        raise MalformedError(f"a message of kind {message.kind!r} holds a {type(value).__name__}, which cannot travel")

    try:
        head, body = msgpack.packb(header.__dict__), msgpack.packb(message.__dict__, default=pack)
    except (ValueError, RecursionError) as error:  # too deep, or text that is not Unicode
        raise MalformedError(f"a message of kind {message.kind!r} cannot travel: {error!s:.200}") from None
    for what, size, limit in (
        ("bytes of header", len(head), MAX_HEADER_BYTES),
        ("bytes of body", len(body), MAX_BODY_BYTES),
        ("arrays", len(arrays), MAX_ARRAYS),
    ):
        if size > limit:
            raise MalformedError(f"a message of kind {message.kind!r} has {size} {what}; at most {limit} may travel")
    return [head, body, *arrays]


def decode_header(frames: Sequence[Frame]) -> Header:
    """The header of a received message. Raises ProtocolVersionError or MalformedError."""
    if not 2 <= len(frames) <= 2 + MAX_ARRAYS:
        raise MalformedError(f"{len(frames)} frames")
    values = _unpack(frames[0], MAX_HEADER_BYTES)
    if not isinstance(values, dict):
        raise MalformedError("the header is not a map")
    version = values.get("v")
    if type(version) is not int:
        raise MalformedError("the header names no protocol version")
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the peer speaks protocol version {version}, this actor speaks {PROTOCOL_VERSION}: "
            f"install the same version of the project on every node"
        )
    try:
        return Header.model_validate(values)
    except ValidationError as error:
        raise MalformedError(f"header: {error.errors()[0]['msg']}") from None


def decode_body(kind: str, frames: Sequence[Frame]) -> Message:
    """The message in `frames`. Raises MalformedError."""
    if kind not in KINDS:
        raise MalformedError(f"unknown kind {kind!r:.80}")
    values = _unpack(frames[1], MAX_BODY_BYTES, frames[2:])
    try:
        return KINDS[kind].model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedError(f"{kind}: {where:.200}: {first['msg']:.500}") from None


def _unpack(frame: Frame, limit: int, arrays: Sequence[Frame] = ()) -> Any:
    size = len(frame)
    if size > limit:
        raise MalformedError(f"a frame of {size} bytes where at most {limit} are allowed")

    def array(code: int, data: bytes) -> np.ndarray:
        if code != _ARRAY:
            raise MalformedError(f"unknown extension type {code}")
        return _array(data, arrays)

    # An element takes at least a byte, so these caps refuse a length that the frame cannot hold before it is allocated.
    caps = {f"max_{what}_len": size for what in ("str", "bin", "array", "ext")}
    try:
        return msgpack.unpackb(
            frame, use_list=False, ext_hook=array, strict_map_key=True, object_pairs_hook=_map,
            max_map_len=MAX_MAP_ENTRIES, **caps,
        )  # fmt: skip
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MalformedError(f"not msgpack: {error!s:.200}") from None


def _map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise MalformedError("a key stands twice in a map")
    return values


def _array_frame(value: np.ndarray) -> Frame:
    # The name of a dtype does not tell its byte order.
    if value.dtype.name not in DTYPES or not value.dtype.isnative:
        raise MalformedError(f"an array of dtype {value.dtype.str} cannot travel")
    if value.ndim > MAX_DIMENSIONS or value.nbytes > MAX_FRAME_BYTES:
        raise MalformedError(f"an array of shape {value.shape} and {value.nbytes} bytes cannot travel")
    return memoryview(np.ascontiguousarray(value)).cast("B") if value.size else b""


def _array(data: bytes, arrays: Sequence[Frame]) -> np.ndarray:
    described = msgpack.unpackb(data, use_list=False)
    match described:
        case (int(index), str(dtype), (*shape,)) if 0 <= index < len(arrays) and dtype in DTYPES:
            frame = arrays[index]
        case _:
            raise MalformedError("an array that is described wrongly")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n <= MAX_FRAME_BYTES for n in shape):
        raise MalformedError("an array with an impossible shape")
    if math.prod(shape) * np.dtype(dtype).itemsize != len(frame):
        raise MalformedError(f"an array of shape {shape} does not fit its frame of {len(frame)} bytes")
    return np.frombuffer(frame, dtype=dtype).reshape(shape)
