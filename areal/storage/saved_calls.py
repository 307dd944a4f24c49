"""The saved calls of an unfinished sample to the policy.

A new attempt at the sample begins with the saved calls: a call with the same prompt goes on from the saved tokens. The
workflow makes the prompt again, so only the prompt's digest is saved.
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
    """prompt: `digest_of` the prompt. limit: most tokens, or `NO_LIMIT`. sampled: the tokens so far, at least one."""

    prompt: bytes
    limit: int
    sampled: Generation


def digest_of(prompt: np.ndarray, pictures: Sequence[str] = ()) -> bytes:
    """Return the digest of a prompt's tokens, int32 [n], and of the names of its pictures."""
    digest = blake2b(np.ascontiguousarray(prompt, np.int32).data, digest_size=DIGEST_BYTES)
    digest.update("".join(pictures).encode())
    return digest.digest()


def packed(calls: Sequence[SavedCall], notes: str = "") -> bytes:
    """Return at least one call as a frame: 12 bytes a token, and 25 a call. notes: text for the sample's owner."""
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
    """Return the notes of a frame of calls; empty without notes."""
    notes = unpack(frame).get("notes")
    return "" if notes is None else notes.tobytes().decode()


def unpacked(frame: bytes | memoryview) -> list[SavedCall]:
    """The inverse of `packed`. Raises ValueError if the frame cannot be of calls."""
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
