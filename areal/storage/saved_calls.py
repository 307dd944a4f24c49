"""The calls of a sample to the policy, as they are saved while the sample is not finished.

Whoever samples it again begins with them: a call with the same prompt goes on from its saved tokens. The prompt itself
is not saved, because the workflow makes it again; its digest is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from areal.samples.table import Finish, Generation, joined, pack, split, unpack

DIGEST_BYTES = 16
NO_LIMIT = -1
_FINISHES: tuple[Finish | None, ...] = (None, "stop", "length")
_OF_CALLS = {"prompts": np.uint8, "limits": np.int32, "lengths": np.int32, "finishes": np.uint8}


@dataclass(frozen=True, slots=True)
class SavedCall:
    """prompt: `digest_of` its prompt. limit: most tokens, or `NO_LIMIT`. sampled: its tokens so far, not none."""

    prompt: bytes
    limit: int
    sampled: Generation


def digest_of(prompt: np.ndarray, pictures: Sequence[str] = ()) -> bytes:
    """Of the tokens of a prompt, int32 [n], and the names of its pictures."""
    digest = blake2b(np.ascontiguousarray(prompt, np.int32).data, digest_size=DIGEST_BYTES)
    digest.update("".join(pictures).encode())
    return digest.digest()


def packed(calls: Sequence[SavedCall], notes: str = "") -> bytes:
    """At least one call as a frame: 12 bytes a token, and 25 a call. notes: what else its owner needs to go on."""
    values = (
        np.frombuffer(b"".join(call.prompt for call in calls), np.uint8),
        [call.limit for call in calls],
        [len(call.sampled) for call in calls],
        [_FINISHES.index(call.sampled.finish) for call in calls],
    )
    of_calls = {name: np.asarray(value, _OF_CALLS[name]) for name, value in zip(_OF_CALLS, values, strict=True)}
    columns = joined(call.sampled for call in calls) | of_calls
    return pack(columns | ({"notes": np.frombuffer(notes.encode(), np.uint8)} if notes else {}))


def notes_of(frame: bytes | memoryview) -> str:
    """The notes of a frame of calls; empty if it has none."""
    notes = unpack(frame).get("notes")
    return "" if notes is None else notes.tobytes().decode()


def unpacked(frame: bytes | memoryview) -> list[SavedCall]:
    """The inverse of `packed`. Raises ValueError if this cannot be of calls."""
    arrays = unpack(frame)
    arrays.pop("notes", None)
    if missing := _OF_CALLS.keys() - arrays.keys():
        raise ValueError(f"saved calls lack {', '.join(sorted(missing))}")
    of_calls = {name: arrays.pop(name) for name in _OF_CALLS}
    calls = len(of_calls["lengths"])
    for name, array in of_calls.items():
        if array.dtype != _OF_CALLS[name] or array.shape != (calls * DIGEST_BYTES if name == "prompts" else calls,):
            raise ValueError(f"{name} of {calls} saved calls is {array.dtype} {array.shape}")
    limits, lengths, finishes = (of_calls[name].tolist() for name in ("limits", "lengths", "finishes"))
    if not calls or min(lengths) < 1 or max(finishes) >= len(_FINISHES):
        raise ValueError("a saved call has no token, or an unknown finish")
    tables = split(arrays, lengths)
    if arrays["versions"].min() < 0 or not np.isfinite(arrays["logprobs"]).all():
        raise ValueError("a saved token has a version or a log-prob that no policy gives")
    digests = of_calls["prompts"].tobytes()
    return [
        SavedCall(
            digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES],
            limits[number],
            Generation.of(table, _FINISHES[finishes[number]]),
        )
        for number, table in enumerate(tables)
    ]
