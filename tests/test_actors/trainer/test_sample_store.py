"""The trainer's door: which samples it takes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.small_runs import ten_steps
from support.tiny_pictures import png

from actors.trainer.sample_store import SampleStore
from areal.config.trainer_section import TrainerConfig
from areal.extensions.pictures.picture_store import PictureStore
from areal.samples.pictures import digest_of
from areal.samples.trajectory import Trajectory
from areal.storage.spool import Spool
from protocols.messages import GroupAccepted, ScoredSample, StoreSamples
from protocols.picture_messages import OfferPictures, StorePictures
from protocols.transport import Request

ROUTES = np.uint8([[0, 0, 0, 0], [1, 0, 7, 2], [3, 5, 0, 6]])
SAMPLE = Trajectory(np.array([4, 5, 6]), np.array([0, -1, -2]), np.array([-1, 0, 0]), 1.0, "stop")


async def on_disk(what: str, use: Any, *arguments: Any) -> Any:
    return use(*arguments)


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        (ROUTES, None),
        (None, "its tokens have no routes, which trainer.routing=replay needs"),
        (ROUTES[:, :2], "have 2 bytes of routes, but the model has 4: 2 experts in each of 2 layers"),
        (ROUTES * np.uint8([[1], [1], [0]]), "one of its sampled tokens has no routes"),
    ],
)
def test_a_sample_without_the_routes_or_kept_words_of_its_tokens_is_refused_where_they_are_needed(
    tmp_path, routes, sentence
):
    sizes = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    frame = np.frombuffer(replace(SAMPLE, routes=routes).frame(), np.uint8)
    sample = ScoredSample(place=0, frame=frame)
    stored = StoreSamples(group="g", prompt_index=0, row="", samples=(sample,))

    def part(routing: str, **sampling: float) -> Any:
        changes = {"trainer": {"routing": routing, "minibatches": 1}, "sampling": {"max_new_tokens": 8, **sampling}}
        config = ten_steps(model=str(tmp_path), **changes)
        nothing: Any = None  # what comes after the door
        return SampleStore(config, 100, nothing, nothing, nothing, nothing)._part(stored, sample)

    assert part("own").frame.tobytes() == frame.tobytes()
    with pytest.raises(ValueError, match="its tokens have no kept_words"):
        part("own", top_k=5)
    if sentence is None:
        (taken,) = part("replay").group.trajectories
        assert taken.routes.tolist() == ROUTES.tolist()
    else:
        with pytest.raises(ValueError, match=sentence):
            part("replay")


@pytest.mark.parametrize(("prompt_index", "samples"), [(-1, 1), (0, 1), (0, 2)])
async def test_a_sample_that_is_forgotten_while_it_is_stored_is_not_accepted(
    monkeypatch, tmp_path, prompt_index, samples
):
    """A session has expired; after a checkpoint another thread removes its payload."""
    spool, nothing = Spool(sqlite3.connect(":memory:", check_same_thread=False)), cast(Any, None)
    write = spool._file.store

    def write_and_forget(changes: Any) -> None:
        write(changes)
        spool.forget(["g"])

    monkeypatch.setattr(spool._file, "store", write_and_forget)

    async def ask_master(*_: Any) -> Any:
        pytest.fail("the master is asked about a group that is not stored")

    config: Any = SimpleNamespace(trainer=TrainerConfig(), keeps_words=False, pictures_folder=tmp_path, group_size=2)
    store = SampleStore(config, 100, spool, nothing, on_disk, ask_master)
    frame = np.frombuffer(SAMPLE.frame(), np.uint8)
    parts = tuple(ScoredSample(place=place, frame=frame) for place in range(samples))
    message = StoreSamples(group="g", prompt_index=prompt_index, row="", samples=parts)
    answer = await store.dispatch(Request(message, "gateway/0#a", asyncio.get_running_loop().time() + 60, b""))
    assert answer == GroupAccepted(accepted=False)


@pytest.mark.parametrize(("shown", "taken"), [(4, True), (3, False), (2, False)])
async def test_a_sample_that_ends_inside_a_picture_is_refused(tmp_path, shown, taken):
    """A picture of 56 x 56 pixels has 4 parts; the second one shown is cut."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 5}')
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 784}')
    picture, nothing = png(56, 56, 0), None
    store_of_pictures = PictureStore(tmp_path / "pictures")
    store_of_pictures.put_all([picture])
    config: Any = SimpleNamespace(
        model=str(tmp_path), trainer=TrainerConfig(), keeps_words=False, pictures_folder=tmp_path / "pictures"
    )
    store: Any = SampleStore(config, 100, *[nothing] * 4)  # type: ignore[arg-type]
    tokens = np.array([7, 5, 5, 5, 5, 8, 9, 7, *[5] * shown])
    column = (tokens == 5)[:, None] * np.frombuffer(bytes.fromhex(digest_of(picture)), np.uint8)
    versions = np.where(tokens == 9, 0, -1)
    frame = Trajectory(tokens, np.zeros(len(tokens)), versions, 1.0, "stop", pictures=column).frame()
    sample = ScoredSample(place=0, frame=np.frombuffer(frame, np.uint8))
    with nullcontext() if taken else pytest.raises(ValueError, match="are not as many as it has parts"):
        store._part(StoreSamples(group="g", prompt_index=0, row="", samples=(sample,)), sample)


async def test_pictures_that_are_stored_are_not_asked_for_again(tmp_path):
    nothing: Any = None
    config: Any = SimpleNamespace(trainer=TrainerConfig(), keeps_words=False, pictures_folder=tmp_path / "pictures")
    store = SampleStore(config, 100, nothing, nothing, on_disk, nothing)

    def asked(message: Any) -> Any:
        return store.pictures.dispatch(
            Request(message, "rollout_manager/0#a", asyncio.get_running_loop().time() + 60, b"")
        )

    names = digest_of(b"one"), digest_of(b"two")
    assert (await asked(OfferPictures(names=names))).names == names
    await asked(StorePictures(files=(np.frombuffer(b"two", np.uint8),)))
    assert (await asked(OfferPictures(names=names))).names == names[:1]
