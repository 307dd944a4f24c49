"""The checks of a generator on a real engine: green, and red where versions or weights are wrong."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal.extensions.desk.split import GIB
from areal.extensions.selftest import generator_checks as generation
from areal.extensions.selftest import reference_models, sequences, verdicts
from areal.extensions.selftest.generator_checks import GenerationChecks
from areal.extensions.selftest.synthetic import TINY, tiny_config, write_tiny_model
from areal.extensions.selftest.transfer_checks import Sending
from areal.extensions.selftest.verdicts import check_engine, check_versions
from areal.generation import engine_process
from areal.generation.engine_weights import LoadTimes
from areal.weights.folders import write_weights
from areal.weights.model_files import WEIGHTS_FILE

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model, and published: other weights."""
    folder = tmp_path_factory.mktemp("selftest")
    write_tiny_model(folder / "model", "float32")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(folder / "published")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generator(folder):
    generator = GenerationChecks(tiny_config(folder / "model", "float32", "direct"))
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(generation, "SEQUENCES", 4)
        fewer.setattr(generation, "TOKENS", 32)
        await generator.start()
        yield generator
        await generator.close()


async def interrupted(generator, folder, name):
    """What the check finds after an interruption, and the sequences. The engine is at version 0 before."""
    await generator._engine.load(folder / "model", 0)
    for file in ("sampled", name):
        (folder / f"{file}.npz").unlink(missing_ok=True)
    await generator.sample(str(folder / "sampled.npz"))
    await generator.interrupt(str(folder / "published"), str(folder / f"{name}.npz"))
    await generator.keep(str(folder / f"{name}-kept.npz"))
    scratch = folder / f"scratch-{name}"
    scratch.mkdir()
    files = [str(folder / file) for file in ("sampled.npz", f"{name}.npz", "published")]
    return generator.compare(*files, str(scratch), str(folder / f"{name}-kept.npz"))


async def test_an_engine_that_is_right_passes_and_tokens_of_the_wrong_version_fail(generator, folder):
    engine, versions, stored = await interrupted(generator, folder, "right")
    assert (engine.result, versions.result, stored.result) == ("ok", "ok", "ok")
    assert versions.values["crossing"] >= 2
    assert stored.values["gap_to_recomputed"] > 10 * stored.values["gap"]

    old = sequences.read(folder / "right.npz")
    config = generator._config
    under = [reference_models.reference_logprobs(folder / name, old, config) for name in ("model", "scratch-right")]

    def judge(versions_of, logprobs_of=lambda s: s.logprobs):
        changed = [sequences.Sampled(s.prompt, s.tokens, logprobs_of(s), versions_of(s)) for s in old]
        return check_versions(changed, *under, "float32")

    assert judge(lambda s: s.versions).result == "ok"
    assert judge(lambda s: np.append(s.versions[:1], s.versions[:-1])).result == "FAILED"  # one token late
    assert judge(lambda s: np.append(s.versions[1:], s.versions[-1:])).result == "FAILED"  # one token early
    assert judge(lambda s: s.versions[::-1]).result == "FAILED"
    assert judge(lambda s: s.versions * 0).result == "FAILED"
    assert judge(lambda s: s.versions, lambda s: s.logprobs + 0.1).result == "FAILED"
    wrong = [logps + 0.1 for logps in under[0]]
    assert check_engine(old, wrong, "float32").result == "FAILED"


async def test_an_engine_that_names_versions_one_off_fails(generator, folder, monkeypatch):
    add = engine_process.EngineSequence.add

    def one_off(stream, output, logprobs, version):
        add(stream, output, logprobs, str(int(version) + 1))

    monkeypatch.setattr(engine_process.EngineSequence, "add", one_off)
    _, versions, _ = await interrupted(generator, folder, "off")
    assert versions.result == "FAILED"


async def test_a_cache_that_is_recomputed_where_it_should_be_kept_fails(generator, folder):
    await generator._engine.load(folder / "published", 1)
    sampled, _ = await generation.interrupt(generator._engine, generator._config, folder / "model", 2)
    arguments = folder / "published", folder / "model", sampled, generator._config
    exact = reference_models.kept_logprobs(*arguments)
    recomputed = reference_models.reference_logprobs(folder / "model", sampled, generator._config)
    findings = verdicts.check_kept(sampled, exact, recomputed, "float32")
    assert (findings.name, findings.result) == ("kept cache", "FAILED")
    assert findings.values["gap_to_recomputed"] < 1e-3


async def test_sequences_that_an_engine_sleeps_in_go_on_right(generator, folder):
    await generator._engine.load(folder / "model", 0)
    facts = await generator.sleep(True)
    assert facts["sequences"] > 0
    generated = generator._engine.stats().tokens_generated
    await asyncio.sleep(0.1)
    assert generator._engine.stats().tokens_generated == generated
    await generator.wake(str(folder / "slept.npz"))
    (folder / "scratch-slept").mkdir()
    files = [str(folder / name) for name in ("slept.npz", "slept.npz", "published", "scratch-slept")]
    *_, turns = generator.compare(*files, slept=files[0], turns={"sleep_seconds": facts["seconds"]})
    assert (turns.name, turns.result) == ("turns", "ok")
    assert turns.values["gap"] < 1e-4


GPU = {
    "before": {"bytes": 78 * GIB},
    "running": {"bytes": 14 * GIB},
    "asleep": {"bytes": 75 * GIB},
    "offloaded": [20 * GIB, GIB],
    "sleep_seconds": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "gap", "result"),
    [
        ({}, 1e-4, "ok"),
        ({}, None, "ok"),  # the model is too large for the reference
        ({}, 0.5, "FAILED"),
        ({"asleep": {"bytes": 40 * GIB}}, 1e-4, "FAILED"),  # the engine has kept half of it
        ({"offloaded": [20 * GIB, 12 * GIB]}, 1e-4, "FAILED"),
        ({"before": {"bytes": None}, "running": {"bytes": None}, "asleep": {"bytes": None}}, 1e-4, "ok"),  # on a CPU
    ],
)
async def test_who_keeps_the_memory_of_a_gpu_in_the_others_turn_fails(changes, gap, result):
    assert verdicts.check_turns(GPU | changes, gap, "float32").result == result


@asynccontextmanager
async def without_packing_the_head(engine, folder, monkeypatch):
    """vLLM's own reload, which leaves a tied head on the CPU as it was."""
    call = engine._process.core.collective_rpc_async

    def reload(method, *arguments, **options):
        if method == "load_policy":
            return call("reload_weights", kwargs={"weights_path": str(folder)})
        return call(method, *arguments, **options)

    monkeypatch.setattr(engine._process.core, "collective_rpc_async", reload)
    yield
    monkeypatch.undo()


async def test_a_head_that_is_not_packed_again_fails(generator, folder, monkeypatch):
    await generator._engine.load(folder / "model", 0)
    await generator.sample(str(folder / "sampled.npz"))
    async with without_packing_the_head(generator._engine, folder / "published", monkeypatch):
        await generator.interrupt(str(folder / "published"), str(folder / "torn.npz"))
    (folder / "scratch-torn").mkdir()
    files = [str(folder / file) for file in ("sampled.npz", "torn.npz", "published", "scratch-torn")]
    engine, versions = generator.compare(*files)
    assert (engine.result, versions.result) == ("ok", "FAILED")
    assert "head" in versions.advice


async def received(generator, folder, name):
    """What the check finds after a transfer of other weights by gloo."""
    generator._receiving = None
    sending = Sending("gloo", 1, folder / "published")
    while "call" in (call := await asyncio.to_thread(sending.next_call)):
        assert await generator.receive(**call) == []
        sending.acknowledge()
    await generator.sample(str(folder / f"{name}.npz"))
    (folder / f"scratch-{name}").mkdir()
    files = [str(folder / file) for file in (f"{name}.npz", "published", f"scratch-{name}")]
    (result,) = await generator.compare_received(*files)
    return result


async def test_weights_that_are_sent_directly_are_the_trainers(generator, folder):
    await generator._engine.load(folder / "model", 0)
    results = await received(generator, folder, "sent")
    assert results.result == "ok"
    assert results.values["bytes"] == pytest.approx(4 * 1_444_096, rel=0.01)
    assert results.measured.startswith("gloo: ")


async def test_a_tensor_that_is_lost_on_the_way_fails(generator, folder, monkeypatch):
    from actors.direct import transfer  # it imports vLLM

    await generator._engine.load(folder / "model", 0)
    pairs = transfer._Stored.__iter__
    lost = "model.layers.1.mlp.down_proj.weight"
    monkeypatch.setattr(
        transfer._Stored, "__iter__", lambda self: ((name, t * (name != lost)) for name, t in pairs(self))
    )
    results = await received(generator, folder, "lost")
    assert results.result == "FAILED"
    assert results.values["gap"] > 0.01


async def test_a_transfer_that_does_not_fit_the_model_fails(generator):
    generator._receiving = None
    (result,) = await generator.receive("start_weight_update", {"model.norm.weight": [3]})
    assert (result.name, result.result) == ("transport", "FAILED")
    assert "does not fit the model" in result.measured


async def test_a_full_engine_has_a_speed(generator, monkeypatch):
    monkeypatch.setattr(generation, "WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(generation, "SPEED_SECONDS", 0.5)
    result, busy = await generator.speed(of_token=1e6, peak_tflops=0.1)
    assert result.values["tokens_per_second"] > 0
    assert result.values["mfu"] == pytest.approx(result.values["tokens_per_second"] * 1e6 / 1e12 / 0.1)
    assert (busy.name, busy.result) == ("busy load", "ok")
    assert busy.values["sequences"] > 0


async def test_sequences_that_stop_at_a_load_of_a_full_engine_fail(generator, monkeypatch):
    for module in (generation, verdicts):
        monkeypatch.setattr(module, "RECOVERY_SECONDS", 0.3)
    stuck = [asyncio.create_task(asyncio.sleep(60)) for _ in range(2)]
    seconds, ended = await generation._recovery(stuck, [3, 5], 1)
    assert not ended
    for task in stuck:
        task.cancel()
    load = verdicts.BusyLoad(LoadTimes(0.1, 0.2, 0.1, 64, 0), seconds)
    assert verdicts.check_busy_load(load, 1000).result == "FAILED"


async def test_weights_that_several_ranks_have_published_make_a_model(tmp_path):
    base, published, folder = (tmp_path / name for name in ("base", "published", "folder"))
    write_tiny_model(base, "float32")
    tensors = load_file(base / WEIGHTS_FILE)
    published.mkdir()
    folder.mkdir()
    for shard, names in enumerate((list(tensors)[:5], list(tensors)[5:])):
        write_weights({name: tensors[name] + 1 for name in names}, published, shard, 2)
    model = AutoModelForCausalLM.from_pretrained(reference_models.model_of(base, published, folder))
    assert all(torch.equal(model.state_dict()[name], tensor + 1) for name, tensor in tensors.items())
