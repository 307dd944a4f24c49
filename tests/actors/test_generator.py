"""What a generator starts its engine with."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from actors.generator import Generator
from actors.runtime.directory import Directory
from areal.config import load_config
from protocols.messages import Policy


def started_with(seed: int, index: int, lineage: int, version: int) -> int:
    """The seed that a generator gives its engine, which does not start."""
    seeds = []

    async def start_engine(*_, **options):
        seeds.append(options["seed"])
        raise ConnectionError

    async def start():
        config = load_config(None, [f"seed={seed}", *RUN])
        directory = Directory(Policy(lineage=lineage, version=version, folder="m"))
        member = SimpleNamespace(
            config=config,
            index=index,
            directory=directory,
            ask=None,
            spawn=None,
            works=None,
            used=AsyncExitStack(),
            serve=lambda _: None,
        )
        await Generator.start(member, start_engine)

    with pytest.raises(ConnectionError):
        asyncio.run(start())
    return seeds[0]


RUN = [
    "model=m",
    "steps=1",
    "batch_size=4",
    "group_size=2",
    "sampling.max_new_tokens=8",
    "data.source=addition",
    "reward.functions=addition",
]


def test_an_engine_that_is_started_again_draws_other_random_numbers():
    first = started_with(0, 0, 0, 0)
    assert started_with(0, 0, 0, 0) == first  # the same run begins alike
    others = [(0, 0, 0, 3), (0, 0, 1, 3), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]
    seeds = {first, *(started_with(*other) for other in others)}
    assert len(seeds) == 1 + len(others)
    assert all(0 <= seed < 2**32 for seed in seeds)
