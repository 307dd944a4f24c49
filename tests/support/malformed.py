"""Input that no correct peer sends, made from a seed: frames for a front door, requests for the HTTP endpoint."""

from __future__ import annotations

import json
import random
import types
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

import msgpack
import numpy as np
from pydantic import BaseModel

from areal.extensions.agents.openai_api import Access
from protocols.codec import DTYPES, PROTOCOL_VERSION
from protocols.messages import KINDS

# What actors compare with, look up, or use as a name.
TEXTS = [
    "", "a", "g0.0", "g1.0", "g0.1", "addition", "healthy", "stale", "draining", "stop", "length", "ready", "generator",
    "reward", "trainer", "evaluator", "rollout_manager", "tcp://127.0.0.1:1", "tcp://127.0.0.1:99999", "tcp://", "é\0ü",
    "../../etc/passwd", "%s %d {}", "\n\r\x1b[2J", "x" * 256, "x" * 257, "tokens_generated",
]  # fmt: skip
INTEGERS = [
    *range(-2, 9),
    64,
    4095,
    65536,
    65537,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    1 << 53,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 1e-320, 1e300, -1e300, 1.7e308, float("inf"), float("-inf"), float("nan")]
# What gets furthest.
USUAL: dict[str, Sequence[Any]] = {
    "temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (0,), "min_p": (0.0,), "max_new_tokens": (1, 4),
    "min_version": (0,), "limit": (1, 64),
    "address": ("tcp://127.0.0.1:1",), "function": ("addition",), "prompt": ("1+1=",), "completion": ("2",),
    "index": (None, 0, 1, 7), "reward": (0.0, 1.0), "count": (1, 9), "first": (0,), "lineage": (0, 1), "folder": ("f",),
    "version": (0, 1), "code": ("refused",), "group": ("g0.0", "g1.0", "g2.0", "g9.9"), "start_version": (0, 0, 1),
    "reward_mean": (0.5,), "number": (0, 1), "size": (1,), "discarded": (0, 5), "tokens": (0, 5),
    "sequence": ("1", "2"),
}  # fmt: skip
LENGTHS = b"\xdc\xdd\xde\xdf\xd9\xda\xdb\xc4\xc5\xc6\xc7\xc8\xc9"
# Any one of these ends a run where a member says it, as it should.
LAST_WORDS = {"training_failed", "scoring_failed", "training_finished"}


class Malformed:
    """Frames of one message after the other: a tenth valid as far as types go, the rest broken in one way or more.

    senders: identities to speak as; those of members get further, with the token that they joined with.
    """

    def __init__(self, seed: int, senders: Sequence[str] = ("stranger/0#1",), token: bytes = b"token") -> None:
        self.random = random.Random(seed)
        self.senders = list(senders)
        self.token = token
        self._sent: deque[list[bytes]] = deque(maxlen=64)
        self._ids = 0
        self._kinds = sorted(KINDS)
        self._ways = [
            (120, self._valid),
            (340, self._with_wrong_fields),
            (150, self._with_wrong_header),
            (230, self._damaged),
            (2, self._of_many_values),
            (20, self._nested),
            (50, self._with_wrong_frames),
            (40, self._random),
            (48, self._repeated),
        ]

    def frames(self) -> list[bytes]:
        """Of one message, without the route that a dealer does not send."""
        weights, ways = zip(*self._ways, strict=True)
        result = self.random.choices(ways, weights)[0]()
        self._sent.append(result)
        return result

    # --- ways to be wrong

    def _valid(self) -> list[bytes]:
        kind = self.random.choice(self._kinds)
        return self._packed(self._header(kind), self._fields(kind))

    def _with_wrong_fields(self) -> list[bytes]:
        kind = self.random.choice(self._kinds)
        fields = self._fields(kind)
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            name = self.random.choice([*fields, "unknown"])
            if self.random.random() < 0.2:
                fields.pop(name, None)
            else:
                fields[name] = self._anything()
        return self._packed(self._header(kind), fields)

    def _with_wrong_header(self) -> list[bytes]:
        kind = self.random.choice(self._kinds)
        header: dict[Any, Any] = self._header(kind)
        for _ in range(self.random.choice((1, 1, 2))):
            name = self.random.choice([*header, "unknown", "attempt", "part", "reply_to"])
            match self.random.randrange(4):
                case 0:
                    header.pop(name, None)
                case 1:
                    header["kind"] = self.random.choice(self._kinds)
                case _:
                    header[name] = self._anything()
        return self._packed(self._quiet(header), self._fields(kind))

    def _damaged(self) -> list[bytes]:
        """Bits flipped, bytes cut out or put in, in any frame."""
        frames = self._valid()
        for _ in range(self.random.choice((1, 1, 2, 4))):
            i = self.random.randrange(len(frames))
            frames[i] = self._damage(frames[i])
        return frames if self._is_quiet(frames) else self._random()

    def _damage(self, frame: bytes) -> bytes:
        data, at = bytearray(frame), self.random.randrange(len(frame) + 1)
        match self.random.randrange(4):
            case 0 if at < len(data):
                data[at] ^= 1 << self.random.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = self.random.randbytes(self.random.randrange(1, 9))
            case _:
                data[at:at] = bytes([self.random.choice(LENGTHS)]) + self.random.randbytes(4)
        return bytes(data)

    def _of_many_values(self) -> list[bytes]:
        """Small to send, large to hold; or the same key again and again."""
        kind, n = self.random.choice(self._kinds), self.random.choice((100, 5_000, 60_000))
        fields = self._fields(kind)
        name = self.random.choice([*fields, "unknown"])
        match self.random.randrange(4):
            case 0:
                fields[name] = (0,) * n
            case 1:
                fields[name] = ({},) * n
            case 2:
                fields[name] = {f"{i}": i for i in range(n)}
            case _:
                body = b"\xde" + min(n, 65_535).to_bytes(2) + (msgpack.packb(name) + b"\x00") * min(n, 65_535)
                return [msgpack.packb(self._header(kind)), body]
        return self._packed(self._header(kind), fields)

    def _nested(self) -> list[bytes]:
        kind, depth = self.random.choice(self._kinds), self.random.choice((10, 100, 400, 600, 1100, 2000))
        head = b"\x81" + msgpack.packb(self.random.choice([*KINDS[kind].model_fields, "unknown"]))
        opening = self.random.choice((b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"))
        return [msgpack.packb(self._header(kind)), head + opening * depth + b"\x01"]

    def _with_wrong_frames(self) -> list[bytes]:
        frames = self._valid()
        match self.random.randrange(4):
            case 0:
                return frames[: self.random.randrange(len(frames) + 1)] or [b""]
            case 1:
                return frames + [b""] * self.random.choice((1, 2, 3, 30) if self.random.random() < 0.99 else (4100,))
            case 2:
                self.random.shuffle(frames)
                return frames
            case _:
                return [*frames[:1], *frames]

    def _random(self) -> list[bytes]:
        return [self.random.randbytes(self.random.randrange(40)) for _ in range(self.random.randrange(1, 5))]

    def _repeated(self) -> list[bytes]:
        return self.random.choice(self._sent) if self._sent else self._random()

    # --- values

    def _header(self, kind: str) -> dict[str, Any]:
        chance, n = self.random.random(), self.random
        self._ids += 1
        header = {"v": PROTOCOL_VERSION, "kind": kind, "sender": n.choice(self.senders), "id": f"f{self._ids}"}
        if chance < 0.99:
            header["token"] = self.token
        if chance < 0.9:
            header["remaining_ms"] = n.choice((1, 50, 1000, 8000))
        if 0.9 < chance < 0.95:
            header["reply_to"] = f"f{max(0, self._ids - n.randrange(50))}"
            header["kind"] = n.choice(("credit", "cancel", kind))
        return self._quiet(header)

    def _quiet(self, header: dict[Any, Any]) -> dict[Any, Any]:
        """Members do not speak last words."""
        kind = header.get("kind")
        return header | {"sender": "stranger/0#1"} if isinstance(kind, str) and kind in LAST_WORDS else header

    def _is_quiet(self, frames: list[bytes]) -> bool:
        return not any(word.encode() in frames[0] for word in LAST_WORDS) or b"stranger" in frames[0]

    def _packed(self, header: dict[Any, Any], fields: dict[Any, Any]) -> list[bytes]:
        arrays: list[bytes] = []

        def pack(value: Any) -> msgpack.ExtType:
            index, name, shape = len(arrays), value.dtype.name, value.shape
            arrays.append(value.tobytes())
            if self.random.random() < 0.05:
                index, name, shape = self.random.choice(
                    [(index + 1, name, shape), (index, "float64", shape), (index, name, (*shape, 2)), (0, name, shape)]
                )
            return msgpack.ExtType(1, msgpack.packb((index, name, shape)))

        packed = [msgpack.packb(value, default=pack, strict_types=False) for value in (header, fields)]
        return [*packed, *arrays]

    def _fields(self, kind: str) -> dict[str, Any]:
        return self._part(KINDS[kind])

    def _part(self, model: type[BaseModel]) -> dict[str, Any]:
        return {
            name: self._value(field.annotation, name)
            for name, field in model.model_fields.items()
            if field.is_required() or self.random.random() < 0.5
        }

    def _value(self, annotation: Any, name: str) -> Any:
        """Of the type, which need not be all that is asked of it."""
        if name in USUAL and annotation in (int, float, str, int | None) and self.random.random() < 0.8:
            return self.random.choice(USUAL[name])
        choice, origin, of = self.random.choice, get_origin(annotation), get_args(annotation)
        if origin is Literal:
            return choice(of)
        if origin in (Union, types.UnionType):
            return self._value(choice(of), name)
        if origin is tuple and of[-1] is not Ellipsis:
            return tuple(self._value(item, name) for item in of)
        if origin is tuple:
            return tuple(self._value(of[0], name) for _ in range(choice((0, 1, 1, 2, 8))))
        if origin is dict and of[1] is not Any:
            return {choice(TEXTS): self._value(of[1], name) for _ in range(choice((0, 1, 3)))}
        if origin is dict:
            return {choice(TEXTS): self._anything() for _ in range(choice((0, 1, 3)))}
        if hasattr(annotation, "__metadata__"):
            return self._value(get_args(annotation)[0], name)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self._part(annotation)
        if annotation is np.ndarray:
            return self._array(name)
        result = {str: self._text, int: lambda: choice(INTEGERS), float: lambda: choice(FLOATS)}
        return result.get(annotation, lambda: choice((True, False, None)))()

    def _text(self) -> str:
        chance = self.random.random()
        return self.random.choice(TEXTS) if chance > 0.01 else "x" * (100_000 if chance < 0.001 else 5000)

    def _array(self, name: str) -> np.ndarray:
        usual = {"logprobs": "float32", "checksums": "int64", "data": "uint8"}.get(name, "int32")
        if self.random.random() < 0.85:
            return np.array([self.random.randrange(-1, 9) & 127 for _ in range(6)], usual)
        dtype = DTYPES[self.random.choice(list(DTYPES))]
        shape = self.random.choice(((), (0,), (6,), (2, 3), (1, 1, 1, 1), (2000,)))
        return np.frombuffer(self.random.randbytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)

    def _anything(self) -> Any:
        choice = self.random.choice
        match self.random.randrange(12):
            case 0 | 1:
                return choice(INTEGERS)
            case 2 | 3:
                return choice(FLOATS)
            case 4 | 5:
                return self._text()
            case 6:
                return choice((None, True, False, (), {}))
            case 7:
                return self.random.randbytes(choice((0, 1, 30)))
            case 8:
                return tuple(self._anything() for _ in range(choice((1, 2, 5))))
            case 9:
                return {choice((*TEXTS, b"bytes")): self._anything() for _ in range(choice((1, 2, 5)))}
            case 10:
                return self._array("")
            case _:
                return choice((msgpack.Timestamp(1, 2), msgpack.ExtType(5, b"x"), msgpack.ExtType(1, b"\xc1")))


# The fields of a call, by its path.
FIELDS = {
    "/v1/chat/completions": "messages model tools tool_choice n max_tokens stop logprobs top_logprobs response_format "
    "stream stream_options",
    "/v1/responses": "input model tools tool_choice instructions previous_response_id max_output_tokens text stream",
    "/v1/messages": "messages model tools tool_choice system max_tokens stop_sequences output_config stream",
    "/v1/messages/count_tokens": "messages model tools tool_choice system",
}


class MalformedHttp:
    """Requests to the endpoint of agents as bytes on a connection, most of them with the key of an open sample."""

    def __init__(self, seed: int, access: Access) -> None:
        self.random = random.Random(seed)
        self._access = access

    def request(self) -> bytes:
        choice, chance = self.random.choice, self.random.random()
        path = choice([*FIELDS] * 2 + ["/v1/reward", "/v1/models", "/", "/v1/\u20ac"])
        body = self._body(path)
        headers = {"Host": "a", "Authorization": f"Bearer {self._access.api_key}", "Content-Length": str(len(body))}
        if chance < 0.2:
            name, value = choice(
                [
                    ("Authorization", "Bearer \xff"),
                    ("Authorization", ""),
                    ("Content-Length", "-1"),
                    ("Content-Length", "99999999999"),
                    ("Content-Length", "1"),
                    ("Content-Encoding", "gzip"),
                    ("Content-Encoding", "deflate"),
                    ("Content-Encoding", "x"),
                    ("Transfer-Encoding", "chunked"),
                    ("Content-Type", "text/plain; charset=none"),
                    ("Host", ""),
                    ("X", "y" * 20_000),
                    ("Expect", "100-continue"),
                    ("Expect", "x"),
                    ("Upgrade", "websocket"),
                    ("Connection", "upgrade"),
                ]
            )
            headers[name] = value
        method = choice(["POST"] * 9 + ["GET", "PUT", "HEAD", "BREW"])
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        result = "\r\n".join(lines).encode("utf-8", "replace") + body
        if chance > 0.95:
            at = self.random.randrange(len(result))
            result = result[:at] + self.random.randbytes(3) + result[at + 1 :]
        return result

    def _body(self, path: str) -> bytes:
        chance, choice = self.random.random(), self.random.choice
        if path == "/v1/reward":
            return json.dumps({choice(("reward", "x")): self._anything(2), "key": self._access.reward_key}).encode()
        fields = FIELDS.get(path, "messages").split()
        request: Any = {fields[0]: self._messages(path), "model": "m"}
        if chance < 0.6:
            request[choice(fields)] = self._anything(3)
        if chance < 0.1:
            request = self._anything(4)
        body = json.dumps(request).encode()
        match self.random.randrange(30):
            case 0:
                return body[: self.random.randrange(len(body))]
            case 1:
                return self.random.randbytes(50)
            case 2:
                return b"[" * choice((50, 300, 100_000))
            case 3:
                return b'{"messages": [' + b"0," * choice((10, 10_000)) + b"0]}"
            case 4:
                return b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
            case 5:
                return body.replace(b'"', b'"\\ud800', 3)
        return body

    def _messages(self, path: str) -> list[Any]:
        messages: list[Any] = [{"role": "user", "content": "?"}]
        if path != "/v1/chat/completions":
            return [*messages, self._part(path), *messages] if self.random.random() < 0.5 else messages
        if self.random.random() < 0.5:
            last: dict[str, Any] = {"role": self.random.choice(("user", "assistant", "tool", "developer", "x"))}
            last["content"] = self._anything(2)
            if self.random.random() < 0.6:
                arguments = self.random.choice(
                    ['{"a": 1}', "[" * 20_000, "9" * 5000, '"\\ud800"', "", "NaN", "1e999", 7]
                )
                call = {"id": self._anything(1), "function": {"name": self._anything(1), "arguments": arguments}}
                last["tool_calls"] = self.random.choice(([call], [call, 3], 5, "calls", {"a": 1}, [self._anything(2)]))
            messages.append(last)
        return messages

    def _part(self, path: str) -> Any:
        """An item of a response's input, or a message with a block."""
        kinds = "message function_call function_call_output reasoning text tool_use tool_result thinking image"
        part: Any = {"type": self.random.choice(kinds.split()), "role": self.random.choice(("user", "assistant"))}
        for name in ("content", "call_id", "name", "arguments", "output", "text", "id", "input", "tool_use_id"):
            if self.random.random() < 0.8:
                part[name] = self.random.choice((self._anything(2), "text"))
        return part if path == "/v1/responses" else {"role": part["role"], "content": [part]}

    def _anything(self, depth: int) -> Any:
        choice = self.random.choice
        if depth and self.random.random() < 0.4:
            inner = [self._anything(depth - 1) for _ in range(self.random.randrange(4))]
            return choice((inner, {f"{choice(TEXTS[:8])}{i}": item for i, item in enumerate(inner)}))
        return choice((None, True, 0, -1, 1 << 70, 1.5, 1e308, float("nan"), float("inf"), "", "text", "\ud800", "\0"))
