"""The generator's door for prompts with pictures, over real links."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
from support.networks import network

from actors.generator.generator import Generator, _columns
from actors.runtime.actor import Notifier
from actors.sampling.flows import PICTURES, Flow, Flows
from actors.sampling.jobs import Call, SampleState
from areal.config.engine_sections import SamplingConfig
from areal.extensions.pictures.views import Views
from areal.extensions.pictures.vision import Picture, Sight
from areal.samples.pictures import digest_of
from areal.samples.table import Generation, TokenTable
from protocols.bus import Bus
from protocols.picture_messages import GeneratePictured


def spawn(work, name):
    return asyncio.create_task(work, name=name)


class Engine:
    """Gives one token to each sequence. `seen`: what it gets of the pictures of each."""

    version = 0

    def __init__(self):
        self.seen = []

    async def generate(self, name, tokens, sampling, *, first_version, pictures, cache_salt, whole):
        self.seen.append([picture.name for picture in pictures])
        table = TokenTable()
        table.extend(1, {"tokens": [7], "logprobs": [-1.0], "versions": 0})
        yield Generation.of(table, "stop")


def seen(sight, content):
    return Picture(digest_of(content), np.zeros((1, 1), np.float32), (1, 1, 1), (1, 1, 1))


def call(*pictures):
    sample = SampleState(SamplingConfig(max_new_tokens=4), 0, None, None, lambda version: None)
    sample.pictures = {digest_of(content): content for content in pictures}
    return Call(sample, np.int32([1, 5]), 4, None, [*sample.pictures])


@contextlib.asynccontextmanager
async def asked(tmp_path):
    """A generator, and a flow to it. `files`: those in each of its requests."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 5}')
    generator = object.__new__(Generator)
    generator.config = SimpleNamespace(model=str(tmp_path))
    working = lambda *_: contextlib.nullcontext()  # noqa: E731
    generator.member = SimpleNamespace(state="healthy", working=working)
    generator._engine, generator._loaded = Engine(), Notifier()
    generator._views = Views(str(tmp_path), limit=0)
    generator._sequences, generator._leaving, generator._samples = {}, set(), None
    generator._tokens_evaluated = 0
    generator._flows = Flows(lambda new: 16, _columns, spawn)
    files = []

    def handle(request):
        if isinstance(request.message, GeneratePictured):
            files.append([content.tobytes() for content in request.message.files])
        return generator.dispatch(request)

    served, bus = Bus("generator/0#s", network()), Bus("rollout_manager/0#a", network())
    address = served.serve("tcp://127.0.0.1:*", handle, lambda error: None)
    flow = Flow(bus.peer(address), itertools.count(), Call, spawn)
    try:
        yield generator, flow, files
    finally:
        await bus.close()
        await served.close()


async def test_no_request_of_several_sequences_brings_more_pictures_than_a_generator_looks_at_in_time(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Sight, "look", seen)
    many = [bytes([n]) for n in range(20)]
    async with asked(tmp_path) as (generator, flow, files):
        await asyncio.gather(*[flow.run_job(call(content)) for content in many for _ in range(2)])
        assert max(map(len, files)) <= PICTURES and {*itertools.chain(*files)} == {*many}
        await flow.run_job(call(*many))
        assert files[-1] == many
    digests = [digest_of(content) for content in many]
    assert sorted(generator._engine.seen) == sorted([[name] for name in digests * 2] + [digests])


async def test_a_picture_is_sent_to_a_generator_once_and_again_where_it_has_no_room_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Sight, "look", seen)
    async with asked(tmp_path) as (generator, flow, files):
        await asyncio.gather(*[flow.run_job(call(b"a")) for _ in range(16)])
        await flow.run_job(call(b"a"))
        assert files == [[], [b"a"], []]
        await flow.run_job(call(b"b", b"a"))  # it has room for one
        await flow.run_job(call())
        assert files[3:] == [[], [b"b"], [b"b", b"a"]]
        await flow.run_job(call(b"a", b"b"))
        assert files[6:] == [[], [b"b"], [b"a", b"b"]]
    a, b = digest_of(b"a"), digest_of(b"b")
    assert generator._engine.seen == [[a]] * 17 + [[b, a], [], [a, b]]
