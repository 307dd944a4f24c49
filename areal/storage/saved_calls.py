"""The calls of a sample to the policy, as they are saved while the sample is not finished.

Whoever samples it again begins with them: a call with the same prompt goes on from its saved tokens. The prompt itself
is not saved, because the workflow makes it again; its digest is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from areal.trajectory import Finish

DIGEST_BYTES = 16
NO_LIMIT = -1
_FINISHES: tuple[Finish | None, ...] = (None, "stop", "length")
_OF_CALLS = {"prompts": np.uint8, "limits": np.int32, "lengths": np.int32, "finishes": np.uint8}
_OF_TOKENS = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}


@dataclass(frozen=True, slots=True)
class SavedCall:
    """prompt: `digest_of` its prompt. limit: the most tokens that the workflow asked for; `NO_LIMIT`: any number.
    tokens int32, logprobs float32, versions int32, all [n]: what is sampled, n > 0. finish: None if more follows."""

    prompt: bytes
    limit: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: Finish | None


def digest_of(prompt: np.ndarray) -> bytes:
    """Of the tokens of a prompt, int32 [n]."""
    return blake2b(np.ascontiguousarray(prompt, np.int32).data, digest_size=DIGEST_BYTES).digest()


def packed(calls: Sequence[SavedCall]) -> dict[str, np.ndarray]:
    """At least one call as columns, each 1-dimensional: 12 bytes a token, and 25 a call."""
    table = {
        "prompts": np.frombuffer(b"".join(call.prompt for call in calls), np.uint8),
        "limits": [call.limit for call in calls],
        "lengths": [len(call.tokens) for call in calls],
        "finishes": [_FINISHES.index(call.finish) for call in calls],
        **{name: np.concatenate([getattr(call, name) for call in calls]) for name in _OF_TOKENS},
    }
    return {name: np.asarray(table[name], dtype) for name, dtype in (_OF_CALLS | _OF_TOKENS).items()}


def unpacked(table: Mapping[str, np.ndarray]) -> list[SavedCall]:
    """The inverse of `packed`. Raises ValueError if these columns cannot be of calls."""
    if table.keys() != _OF_CALLS.keys() | _OF_TOKENS.keys():
        raise ValueError(f"saved calls have other columns than they should: {', '.join(sorted(table))}")
    calls, tokens = len(table["lengths"]), int(table["lengths"].sum(dtype=np.int64))
    lengths = dict.fromkeys(_OF_CALLS, calls) | dict.fromkeys(_OF_TOKENS, tokens) | {"prompts": calls * DIGEST_BYTES}
    for name, dtype in (_OF_CALLS | _OF_TOKENS).items():
        if table[name].dtype != dtype or table[name].shape != (lengths[name],):
            raise ValueError(f"{name} of {calls} saved calls is {table[name].dtype} {table[name].shape}")
    if not calls or table["lengths"].min() < 1 or table["finishes"].max() >= len(_FINISHES):
        raise ValueError("a saved call has no token, or an unknown finish")
    if table["versions"].min() < 0 or not np.isfinite(table["logprobs"]).all():
        raise ValueError("a saved token has a version or a log-prob that no policy gives")
    ends = [0, *np.cumsum(table["lengths"], dtype=np.int64).tolist()]
    digests, limits, finishes = table["prompts"].tobytes(), table["limits"].tolist(), table["finishes"].tolist()
    return [
        SavedCall(
            prompt=digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES],
            limit=limits[number],
            **{name: table[name][begin:end] for name in _OF_TOKENS},
            finish=_FINISHES[finishes[number]],
        )
        for number, (begin, end) in enumerate(pairwise(ends))
    ]
