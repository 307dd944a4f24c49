"""A model divided over ranks, against one rank that has all of it: clipped steps, published weights, checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from test_areal.extensions.routing.test_routes import with_routes

from areal.extensions.routing.expert_routing import routing_of
from areal.training.training_engine import TrainingEngine
from support.tiny_training import TEMPERATURE, make_batch, make_kind, settings, weights_of

ROUNDING = 1e-5
OF_THE_LOSS = ("critic", "kl_coef", "routing")


def make_kinds(kinds, folder):
    """A model of each kind, in a folder of its name. kinds: the changes to the sizes of each."""
    for kind, changes in kinds.items():
        make_kind(kind, folder / kind, **changes)
    return folder


def configuration(changes):
    return settings(minibatches=2, grad_clip=0.05, weight_decay=0.05, **changes)


def batch_of(number, folder, changes):
    batch = make_batch(seed=number)
    if changes.get("routing") != "replay":
        return batch
    sparse = [0, 1] if "Qwen3Moe" in str(folder) else [1]
    return with_routes(batch, routing_of(folder), sparse, number)


def train(engine, folder, changes, numbers):
    """The norms of the gradients of steps on the batches with these numbers, before they were clipped."""
    norms = []
    for number in numbers:
        batch = batch_of(number, folder, changes) if engine.rank == 0 else None
        norms.append(engine.step(batch, version=3, temperature=TEMPERATURE).grad_norm)
    return norms


def few_and_all(cases, few):
    """Parameters of a test: `few` cases of two ranks, and in the slow suite the rest and those of four. cases: by the
    number of ranks."""
    rest = [case for case in cases[2] if case not in few]
    slow = [pytest.param(2, rest, marks=pytest.mark.slow, id="the rest")]
    return [pytest.param(2, few, id="few"), *slow, pytest.param(4, [*cases[4]], marks=pytest.mark.slow, id="four")]


def train_divided(words, cases):
    """What each rank does: three steps, and a fourth one after the checkpoint of these was loaded. words: the folder of
    the models, that of the results, and the names of cases."""
    models, out, *names = words
    models, out, of_ranks, norms = Path(models), Path(out), cases[int(os.environ["WORLD_SIZE"])], {}
    for case, (kind, changes) in ((name, of_ranks[name]) for name in names):
        engine = TrainingEngine(models / kind, configuration(changes), seed=0)
        norms[case] = train(engine, models / kind, changes, range(3))
        engine.storage.publish(out / case / "published")
        engine.storage.save(out / case / "checkpoint")
        engine.close()
        engine = TrainingEngine(models / kind, configuration(changes), seed=1)
        engine.storage.load(out / case / "checkpoint")
        norms[case] += train(engine, models / kind, changes, [3])
        engine.storage.publish(out / case / "resumed")
        engine.close()
    if engine.rank == 0:
        (out / "norms.json").write_text(json.dumps(norms))


def assert_as_one_rank(models, out, cases, *, goes_on_alone):
    """goes_on_alone: whether one rank can load the checkpoints."""
    divided = json.loads((out / "norms.json").read_text())
    for case, (kind, changes) in cases.items():
        alone = {key: value for key, value in changes.items() if key in OF_THE_LOSS}
        engine = TrainingEngine(models / kind, configuration(alone), seed=0)
        norms = train(engine, models / kind, alone, range(3))
        assert_same(
            weights_of(out / case / "published"), weights_of(engine.storage.publish(out / case / "alone")), case
        )
        norms += train(engine, models / kind, alone, [3])
        assert divided[case] == pytest.approx(norms, rel=1e-4), case
        assert min(norms) > 0.05, "the gradients were clipped"
        expected = weights_of(engine.storage.publish(out / case / "alone after"))
        engine.close()
        assert_same(weights_of(out / case / "resumed"), expected, case)
        if goes_on_alone:
            resumed = TrainingEngine(models / kind, configuration(alone), seed=1)
            resumed.storage.load(out / case / "checkpoint")
            train(resumed, models / kind, alone, [3])
            assert_same(
                weights_of(resumed.storage.publish(out / case / "one rank")), expected, f"{case} resumed by one rank"
            )
            resumed.close()


def assert_same(tensors, expected, case):
    assert tensors.keys() == expected.keys(), case
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=ROUNDING, msg=f"{case}: {name}")
