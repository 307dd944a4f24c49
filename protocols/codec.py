"""Encodes messages as frames and decodes them: `header | body | raw frames`.

The header (msgpack, at most 4 KiB) names the kind of the body and the answered request. Arrays are raw frames beside
the body, so decoding an array makes a view on the received bytes, not a copy. Long texts of a large body are raw frames
too, in UTF-8. Decoding cannot execute code: msgpack's types, numpy arrays of a few plain dtypes and the registered
pydantic models are the only types.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError

from protocols.bus_errors import MalformedError, ProtocolVersionError
from protocols.messages import KINDS, Message
from protocols.version import MODELS, difference, program, version_of

MAX_HEADER_BYTES = 4096
MAX_TOKEN_BYTES = 64
MAX_BODY_BYTES = 1 << 20
MAX_ARRAYS = 4096
MAX_DIMENSIONS = 4
# Limited because the receiver makes an error for every unknown key of a map.
MAX_MAP_ENTRIES = 16_384
MAX_LIST_ENTRIES = 1 << 17
# Limit of one frame. The arrays of a trajectory are far smaller; weights are sent in chunks of at most this size.
MAX_FRAME_BYTES = 64 << 20
DTYPES = {name: np.dtype(name) for name in ("int32", "int64", "float32", "float64", "bool", "uint8")}
# Keyed by the dtype, not by the dtype's name, because the dtype includes the byte order.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ARRAY, _TEXT = 1, 2
# Texts from this length on leave a large body. The limit of a body is meant for lists, which cost more to decode.
LONG_TEXT = 16_384

Frame = bytes | memoryview


class Header(NamedTuple):
    """The envelope of a message. `sender`: role/index#incarnation. `id`: a request's own. `reply_to`: the id of the
    answered request. `part`: the number of a part of a stream, or of a publisher's event. `remaining_ms`: time until
    the asker's deadline. `token`: a secret between the asker and the server (see protocols.transport.Peer).

    A named tuple, because every message has a header, and a pydantic model would cost three times as much.
    """

    kind: str
    sender: str
    id: str = ""
    reply_to: str = ""
    part: int = 0
    remaining_ms: int = 0
    attempt: int = 0
    token: bytes = b""


# Every header has the version, as `v`.
PROTOCOL_VERSION = version_of(MODELS, Header._fields)


def encode(header: Header, message: Message) -> list[Frame]:
    """The frames of a message. Raises MalformedError if encoding fails or the receiver would refuse the message."""
    return [encode_header(header), *encode_body(message)]


def encode_header(header: Header, **extra: str) -> bytes:
    """The first frame. extra: fields for a peer of another protocol. Raises MalformedError."""
    _check(header)
    # Empty fields are left out: the receiver has the same defaults.
    fields = {name: value for name, value in zip(Header._fields, header, strict=True) if value} | extra
    fields["v"] = PROTOCOL_VERSION
    try:
        frame = _pack(fields)
    except (ValueError, OverflowError) as error:  # text that is not Unicode, or a number beyond 64 bits
        raise MalformedError(f"the header of a {header.kind!r} cannot be sent: {error!s:.200}") from None
    _limit(header.kind, "bytes of header", len(frame), MAX_HEADER_BYTES)
    return frame


def encode_refusal(sender: str, failure: Message) -> list[Frame]:
    """The frames of an answer to a peer of another protocol. The header says the version of this package."""
    return [encode_header(Header(failure.kind, sender), program=program()), *encode_body(failure)]


def encode_body(message: Message) -> list[Frame]:
    """The frames after the header. Raises MalformedError."""
    arrays: list[Frame] = []

    def pack(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(_array_frame(value))
            described = _pack((len(arrays) - 1, _NAMES[value.dtype], value.shape))
            return msgpack.ExtType(_ARRAY, described)
        if isinstance(value, BaseModel):
            return value.__dict__
        raise MalformedError(f"a message of kind {message.kind!r} holds type {type(value).__name__}: it cannot be sent")

    def apart(text: str) -> msgpack.ExtType:
        arrays.append(text.encode())
        _limit(message.kind, "bytes in one text", len(arrays[-1]), MAX_FRAME_BYTES)
        return msgpack.ExtType(_TEXT, _pack(len(arrays) - 1))

    try:
        body = _pack(message.__dict__, pack)
        if len(body) > MAX_BODY_BYTES:
            arrays.clear()
            body = _pack(_with_long_texts(message.__dict__, apart), pack)
    except (ValueError, OverflowError, RecursionError) as error:  # not Unicode, beyond 64 bits, or too deep
        raise MalformedError(f"a message of kind {message.kind!r} cannot be sent: {error!s:.200}") from None
    _limit(message.kind, "bytes of body", len(body), MAX_BODY_BYTES)
    _limit(message.kind, "arrays", len(arrays), MAX_ARRAYS)
    return [body, *arrays]


def _with_long_texts(value: Any, apart: Callable[[str], Any]) -> Any:
    """`value`, with `apart(text)` in place of each long text."""
    match value:
        case str() if len(value) >= LONG_TEXT:
            return apart(value)
        case BaseModel():
            return _with_long_texts(value.__dict__, apart)
        case dict():
            return {key: _with_long_texts(part, apart) for key, part in value.items()}
        case list() | tuple():
            return [_with_long_texts(part, apart) for part in value]
    return value


def _pack(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    # msgpack.packb allocates and frees 256 KiB each time, most of the cost of a small message.
    packed: bytes = msgpack.Packer(default=default, buf_size=1024).pack(value)
    return packed


def _limit(kind: str, what: str, size: int, limit: int) -> None:
    if size > limit:
        raise MalformedError(f"a message of kind {kind!r} has {size} {what}; at most {limit} can be sent")


def decode_header(frames: Sequence[Frame]) -> Header:
    """The header of a received message. Raises ProtocolVersionError or MalformedError."""
    if not 2 <= len(frames) <= 2 + MAX_ARRAYS:
        raise MalformedError(f"a message of {len(frames)} frames; 2 to {2 + MAX_ARRAYS} are allowed")
    values = _unpack(frames[0], MAX_HEADER_BYTES)
    if not isinstance(values, dict):
        raise MalformedError("the header is not a map")
    version, name = values.pop("v", None), values.pop("program", None)
    if type(version) is not int:
        raise MalformedError("the header has no valid protocol version")
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(difference(name, program()))
    try:
        header = Header(**values)
    except TypeError:
        raise MalformedError("the header has an unknown field or lacks one") from None
    _check(header)
    return header


def _check(header: Header) -> None:
    kind, sender, id, reply_to, part, remaining_ms, attempt, token = header
    texts = type(kind) is type(sender) is type(id) is type(reply_to) is str
    numbers = type(part) is type(remaining_ms) is type(attempt) is int
    if not (texts and numbers and type(token) is bytes):
        raise MalformedError("a field of the header is of the wrong type")
    if len(kind) > 64 or len(sender) > 256 or len(id) > 128 or len(reply_to) > 128 or len(token) > MAX_TOKEN_BYTES:
        raise MalformedError("a field of the header is too long")
    if remaining_ms < 0 or attempt < 0:
        raise MalformedError("a field of the header is negative")


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

    try:
        # msgpack refuses a length beyond the end of the frame before it allocates memory.
        return msgpack.unpackb(
            frame,
            use_list=False,
            ext_hook=partial(_extension, arrays),
            strict_map_key=True,
            object_pairs_hook=_map,
            max_map_len=MAX_MAP_ENTRIES,
            max_array_len=MAX_LIST_ENTRIES,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MalformedError(f"not msgpack: {error!s:.200}") from None


def _extension(arrays: Sequence[Frame], code: int, data: bytes) -> Any:
    if code == _ARRAY:
        return _array(data, arrays)
    if code == _TEXT:
        return _text(data, arrays)
    raise MalformedError(f"unknown extension type {code}")


def _text(data: bytes, arrays: Sequence[Frame]) -> str:
    index = msgpack.unpackb(data)
    if not (type(index) is int and 0 <= index < len(arrays)):
        raise MalformedError("the place of a text is malformed")
    try:
        return str(arrays[index], "utf-8")
    except UnicodeDecodeError:
        raise MalformedError("a text is not UTF-8") from None


def _map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise MalformedError("a map has the same key twice")
    return values


def _array_frame(value: np.ndarray) -> Frame:
    if value.dtype not in _NAMES:
        raise MalformedError(f"an array of dtype {value.dtype.str} cannot be sent")
    if value.ndim > MAX_DIMENSIONS or value.nbytes > MAX_FRAME_BYTES:
        raise MalformedError(f"an array of shape {value.shape} and {value.nbytes} bytes cannot be sent")
    return np.ascontiguousarray(value).data.cast("B") if value.size else b""


def _array(data: bytes, arrays: Sequence[Frame]) -> np.ndarray:
    described = msgpack.unpackb(data, use_list=False)
    if type(described) is not tuple or len(described) != 3:
        raise MalformedError("the description of an array is malformed")
    index, name, shape = described
    if not (type(index) is int and type(name) is str and type(shape) is tuple and 0 <= index < len(arrays)):
        raise MalformedError("the description of an array is malformed")
    dtype, frame = DTYPES.get(name), arrays[index]
    if dtype is None:
        raise MalformedError(f"an array of the unknown dtype {name:.80}")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n <= MAX_FRAME_BYTES for n in shape):
        raise MalformedError("an array with an impossible shape")
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise MalformedError(f"an array of shape {shape} does not fit its frame of {len(frame)} bytes")
    return np.frombuffer(frame, dtype).reshape(shape)
