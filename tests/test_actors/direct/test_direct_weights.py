"""Weights from a trainer's process straight into a real vLLM engine, over real sockets and real groups of gloo, and
what becomes of a transfer when either side goes.

One engine serves the module; the last two tests each kill it, and the first of them starts another. Trainers are forked
from a process that has vLLM loaded.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from fakes.transfer_end import TransferEnd
from safetensors.torch import load_file, save_file
from support.networks import network
from support.tiny_training import divide
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.direct.direct_weights import DirectReceiver, DirectSender, load_transport
from actors.generator.generator import Generator
from actors.runtime.directory import Directory
from actors.runtime.membership import Membership
from areal.config.engine_sections import GeneratorConfig, SamplingConfig, WeightsConfig
from areal.config.trainer_section import TrainerConfig
from areal.cpu.fork_server import IMPORTED
from areal.generation import engine_weights as engines
from areal.generation.engine_process import EngineError
from areal.generation.generation_engine import GenerationEngine
from areal.generation.offered_weights import WeightLoadError
from areal.samples.table import Generation
from areal.storage.disk import DiskRetry
from areal.weights.chunks import Manifest
from protocols.bus import Bus
from protocols.bus_errors import StreamBrokenError
from protocols.membership_messages import Member, Policy
from protocols.weight_messages import SendWeights

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE = 120.0
LOOPBACK, NOBODY = "tcp://127.0.0.1:*", "tcp://127.0.0.1:1"
WEIGHTS = WeightsConfig(transport="direct")
CONFIG = GeneratorConfig(dtype="float32", max_concurrent_rollouts=8, stream_interval=4, kv_cache_gib=0.25)
SAMPLING = SamplingConfig(max_new_tokens=200, min_new_tokens=200)
SHORT = SamplingConfig(max_new_tokens=16, min_new_tokens=16)
PROMPT = list(range(10, 60))
NAMES = ["generator/0#x", "generator/1#x", "generator/2#x", "generator/3#a", "generator/3#b", "generator/3#c"]
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.08,
}


def serve_weights(pipe) -> None:
    """A trainer's process: the real sender behind a real front door. It does what comes through the pipe."""
    asyncio.run(_serve_weights(pipe))


async def _serve_weights(pipe) -> None:
    directory = Directory(Policy(lineage=0, version=0, folder=""))
    directory.update(dict.fromkeys(NAMES), ())
    sender = DirectSender("gloo", directory, "127.0.0.1", 2)
    await load_transport()
    crashes = []
    bus = Bus("trainer/0#x", network())
    pipe.send(bus.serve(LOOPBACK, sender.dispatch, crashes.append))
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        if isinstance(order, Policy):
            sender.offer(order)
        elif order in NAMES:
            directory.update({}, [order])
        pipe.send(
            {
                "links": sorted(owner.partition(" ")[0] for owner in sender._links),
                "sent": sender.bytes_sent,
                "crashes": [repr(c) for c in crashes],
            }
        )
    sender.close()
    await bus.close()


class TrainerProcess:
    def __init__(self, context) -> None:
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=serve_weights, args=(child_end,), daemon=True)
        self.process.start()
        child_end.close()

    async def started(self) -> TrainerProcess:
        address = await asyncio.to_thread(self.pipe.recv)
        self.member = Member(identity="trainer/0#x", role="trainer", index=0, address=address, state="healthy")
        return self

    async def tell(self, order="look"):
        self.pipe.send(order)
        return await asyncio.wait_for(asyncio.to_thread(self.pipe.recv), PATIENCE)

    def kill(self, sign=signal.SIGKILL) -> None:
        os.kill(self.process.pid, sign)

    def end(self) -> None:
        if self.process.is_alive():
            self.kill(signal.SIGCONT)
            self.pipe.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


class Cluster:
    """Versions, the trainer's process that offers them, and a generator with the module's engine."""

    def __init__(self, folder, models, engine, context, config=CONFIG) -> None:
        self.folder, self.models, self.engine, self._context, self._config = folder, models, engine, context, config
        self.policy = Policy(lineage=0, version=0, folder="the model")
        self.trainer: TrainerProcess
        self.buses: list[Bus] = []

    async def start(self, trainer: TrainerProcess) -> None:
        self.trainer = trainer
        member = Membership(Generator, self.bus(NAMES[0]), NOBODY, 0)
        member.config = SimpleNamespace(
            keeps_words=False,
            model="the model",
            seed=0,
            steps=1,
            colocate=False,
            generator=self._config,
            sampling=SAMPLING,
            weights=WEIGHTS,
            trainer=TrainerConfig(),
            weights_folder=self.folder,
        )
        member.directory = self.directory = Directory(self.policy, [self.trainer.member])
        member.disk = DiskRetry(self.folder, "the generator")
        self.generator = await Generator.start(member, self._start_engine)

    async def _start_engine(self, *_, **options):
        assert options["transfer"] == "gloo"
        return self.engine

    async def another_trainer(self) -> None:
        self.trainer.end()
        self.trainer = await TrainerProcess(self._context).started()
        self.directory.update({"trainer/0#x": self.trainer.member}, ())
        await self.trainer.tell(self.policy)

    def bus(self, name: str) -> Bus:
        self.buses.append(Bus(name, network()))
        return self.buses[-1]

    def model(self, version: int):
        return self.models[version % len(self.models)]

    async def publish(self, folder=None) -> Policy:
        version = self.policy.version + 1
        folder = folder or self.model(version)
        stamp = (await asyncio.to_thread(Manifest.of, folder)).stamp
        self.policy = Policy(lineage=0, version=version, folder=str(folder), stamp=stamp)
        await self.trainer.tell(self.policy)
        return self.policy

    async def load(self) -> None:
        """The generator loads the newest version, as it does when it is told of it."""
        self.directory.policy = self.policy
        async with asyncio.timeout(PATIENCE):
            await self.generator.policy.load_wanted()

    def another(self, name: str) -> TransferEnd:
        return TransferEnd(self.bus(name), self.trainer.member)

    async def check_sampled(self, at: int) -> None:
        sequence = await collect(self.engine.generate("check", PROMPT, SHORT))
        assert set(sequence.versions) == {at}
        assert np.abs(reference(self.model(at), sequence.tokens) - sequence.logprobs).max() < 1e-4


def has(end: TransferEnd, policy: Policy) -> bool:
    """Whether a receiver has that version to the bit."""
    files = [load_file(path) for path in Path(policy.folder).glob("*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    return tensors.keys() == end.tensors.keys() and all(end.tensors[name].equal(tensors[name]) for name in tensors)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three policies. The last has its weights in two files, as two ranks of a trainer write them."""
    folders = []
    for seed in range(3):
        torch.manual_seed(seed)
        folders.append(tmp_path_factory.mktemp(f"model{seed}"))
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folders[-1])
    divide(folders[2], 2)
    return folders


@pytest.fixture(scope="module")
def context() -> Iterator:
    context_of_tests = multiprocessing.get_context("forkserver")
    context_of_tests.set_forkserver_preload([*IMPORTED, "actors.direct.transfer"])
    return context_of_tests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(models, context, tmp_path_factory):
    async with started_cluster(tmp_path_factory.mktemp("weights"), models, context, CONFIG) as started:
        yield started


@asynccontextmanager
async def started_cluster(folder, models, context, config):
    starting = GenerationEngine.start(models[0], config, version=0, transfer="gloo")
    engine, trainer = await asyncio.gather(starting, TrainerProcess(context).started())
    cluster = Cluster(folder, models, engine, context, config)
    try:
        await cluster.start(trainer)
        yield cluster
    finally:
        cluster.trainer.end()
        for bus in cluster.buses:
            await bus.close()
        await cluster.engine.close()


async def collect(stream, progress=None) -> Generation:
    parts = [] if progress is None else progress
    async with asyncio.timeout(PATIENCE):
        async for chunk in stream:
            parts.append(chunk)
    fields = (np.concatenate([getattr(c, name) for c in parts]) for name in ("tokens", "logprobs", "versions"))
    return Generation(*fields, parts[-1].finish)


@lru_cache(maxsize=3)
def loaded(model):
    return Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)


def reference(model, tokens: np.ndarray) -> np.ndarray:
    """Log-probs of `tokens` after the prompt under the weights of `model`, by transformers. They have no end token."""
    ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
    with torch.no_grad():
        logits = loaded(model)(ids).logits[0, len(PROMPT) - 1 : -1]
    logits[:, SHAPE["eos_token_id"]] = -torch.inf
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event to offer
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(cluster):
    """Sequences that run. Yields what they have so far, and the tasks."""
    progress = [[] for _ in range(3)]
    tasks = [
        asyncio.create_task(collect(cluster.engine.generate(f"r{i}", PROMPT, SAMPLING), parts))
        for i, parts in enumerate(progress)
    ]
    await until(lambda: all(progress))
    yield progress, tasks
    await asyncio.gather(*tasks)


def at_call(monkeypatch, name: str, action) -> None:
    """Do `action` when the generator gets this call, before its engine does."""
    calls = DirectReceiver.calls

    async def watched(self, policy):
        async with aclosing(calls(self, policy)) as all_calls:
            async for call, info in all_calls:
                if call == name:
                    await action()
                yield call, info

    monkeypatch.setattr(DirectReceiver, "calls", watched)


async def test_sequences_are_interrupted_and_each_token_has_the_logprob_of_the_weights_that_sampled_it(cluster):
    async with running(cluster) as (progress, tasks):
        old_version = cluster.engine.version
        for _ in range(2):  # the second one in the group that there is
            await cluster.publish()
            await cluster.load()
            counts = [len(parts) for parts in progress]
            await until(lambda counts=counts: all(len(p) >= n + 4 for p, n in zip(progress, counts, strict=True)))
        sequences = await asyncio.gather(*tasks)
    versions = [old_version, old_version + 1, old_version + 2]
    for sequence in sequences:
        assert set(sequence.versions) == set(versions)
        for version in versions:
            part = sequence.versions == version
            off = {v: np.abs(reference(cluster.model(v), sequence.tokens) - sequence.logprobs)[part] for v in versions}
            assert off.pop(version).max() < 1e-4
            assert all(wrong.mean() > 0.05 for wrong in off.values())
    assert cluster.generator.policy._reloads["sequences_interrupted"] >= 3
    seen = await cluster.trainer.tell()
    assert seen["links"] == [NAMES[0]]
    assert not list(cluster.folder.iterdir())  # nothing was fetched: the tensors came directly


async def test_none_waits_for_another_that_stalls_comes_or_leaves(cluster):
    policy = await cluster.publish()
    slow, comes = cluster.another(NAMES[1]), cluster.another(NAMES[2])
    stalling = await stalled(slow, policy)
    await asyncio.gather(cluster.load(), comes.receive(policy))
    assert has(comes, policy)
    await cluster.check_sampled(policy.version)
    assert (await cluster.trainer.tell())["links"] == NAMES[:3]
    stalling.cancel()
    await asyncio.gather(stalling, return_exceptions=True)
    await until_links(cluster, [NAMES[0], NAMES[2]])
    await comes.receive(await cluster.publish())  # a group serves all later versions
    assert comes.calls.count("init_weight_transfer_engine") == 1
    assert has(comes, cluster.policy)
    await cluster.trainer.tell(NAMES[2])  # it leaves the run
    await cluster.load()
    assert (await cluster.trainer.tell())["links"] == [NAMES[0]]
    with pytest.raises(WeightLoadError, match="no member"):
        await comes.receive(cluster.policy)


async def stalled(end: TransferEnd, policy: Policy) -> asyncio.Task[None]:
    """A transfer whose receiver never joins the group."""
    asks = asyncio.Event()

    async def stall():
        async with aclosing(end.receiver.calls(policy)) as calls:
            async for call, _ in calls:
                if call == "init_weight_transfer_engine":
                    asks.set()
                    await asyncio.sleep(PATIENCE)

    stalling = asyncio.create_task(stall())
    await asks.wait()
    return stalling


async def test_two_are_sent_to_at_once_and_a_third_in_its_turn(cluster):
    policy = await cluster.publish()
    first, second, third = (cluster.another(name) for name in NAMES[3:])
    stalling = [await stalled(end, policy) for end in (first, second)]
    receiving = asyncio.create_task(third.receive(policy))
    await cluster.trainer.tell()
    await asyncio.sleep(0.5)
    assert not third.calls
    stalling[0].cancel()
    async with asyncio.timeout(PATIENCE):
        await receiving
    assert has(third, policy)
    stalling[1].cancel()
    await asyncio.gather(*stalling, return_exceptions=True)
    await cluster.load()


async def test_one_whose_turn_does_not_come_in_its_time_is_not_sent_to():
    sender = DirectSender("gloo", SimpleNamespace(members=NAMES), "127.0.0.1", 2)
    for _ in range(2):
        await sender._turns.acquire()
    message = SendWeights(lineage=0, version=1, workers=1)
    request = SimpleNamespace(message=message, sender=NAMES[0], owner=f"{NAMES[0]} a", remaining=0.01)
    with pytest.raises(StreamBrokenError, match="took the time"):
        await anext(sender.serve(request))


async def until_links(cluster, links) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await cluster.trainer.tell())["links"] != links:  # noqa: ASYNC110 - another process has them
            await asyncio.sleep(0.05)


async def test_one_that_goes_in_the_middle_can_come_again(cluster):
    policy = await cluster.publish()
    for name, call in zip(NAMES[3:5], ("start_weight_update", "update_weights"), strict=True):
        goes = cluster.another(name)
        await goes.receive(policy, until=call)
        await goes.bus.close()
    back = cluster.another(NAMES[5])
    await back.receive(policy)
    assert has(back, policy)
    await cluster.load()
    await cluster.check_sampled(policy.version)
    assert (await cluster.trainer.tell())["crashes"] == []


async def test_a_version_that_does_not_fit_or_is_not_offered_is_refused_and_sampling_goes_on(cluster, tmp_path):
    sound = await cluster.publish()
    await cluster.load()
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"intermediate_size": 512})).save_pretrained(tmp_path)
    wrong = await cluster.publish(tmp_path)
    async with running(cluster) as (progress, tasks):
        with pytest.raises(WeightLoadError, match="does not fit the model: 12 tensors differ"):
            await cluster.engine.receive(wrong.version, cluster.generator.policy._receiver.calls(wrong))
        gone = wrong.model_copy(update={"version": 999})
        with pytest.raises(WeightLoadError, match="does not have version 999"):
            await cluster.engine.receive(999, cluster.generator.policy._receiver.calls(gone))
        assert {int(v) for s in await asyncio.gather(*tasks) for v in s.versions} == {sound.version}
    await cluster.publish()
    await cluster.load()
    await cluster.check_sampled(cluster.policy.version)


async def test_where_a_trainer_dies_while_tensors_land_nothing_is_sampled_until_the_files_are_loaded(
    cluster, monkeypatch
):
    old_version = cluster.engine.version
    policy = await cluster.publish()
    fetched = asyncio.Event()

    async def die():
        cluster.trainer.kill(signal.SIGSTOP)  # the engine begins to wait for tensors that do not come
        asyncio.get_running_loop().call_later(1.0, cluster.trainer.kill)

    async def fetch(policy):
        generated = cluster.engine.stats().tokens_generated
        await asyncio.sleep(0.5)
        assert cluster.engine.stats().tokens_generated == generated  # the weights are torn now
        assert cluster.engine.version == old_version
        fetched.set()
        return await type(cluster.generator.policy._weights).fetch(cluster.generator.policy._weights, policy)

    at_call(monkeypatch, "update_weights", die)
    monkeypatch.setattr(cluster.generator.policy._weights, "fetch", fetch)
    async with running(cluster) as (progress, tasks):
        await cluster.load()
        assert fetched.is_set()
        sequences = await asyncio.gather(*tasks)
    for sequence in sequences:
        assert set(sequence.versions) == {old_version, policy.version}
        for version in (old_version, policy.version):
            part = sequence.versions == version
            assert np.abs(reference(cluster.model(version), sequence.tokens) - sequence.logprobs)[part].max() < 1e-4
    monkeypatch.undo()
    await cluster.another_trainer()
    await cluster.publish()
    await cluster.load()
    await cluster.check_sampled(cluster.policy.version)
    assert (await cluster.trainer.tell())["links"] == [NAMES[0]]


async def test_without_interruption_a_transfer_that_fails_leaves_the_engine_stopped(cluster, monkeypatch):
    monkeypatch.setattr(cluster.engine.weights, "_config", CONFIG.model_copy(update={"interrupt": False}))
    policy = await cluster.publish()

    async def calls():
        async with aclosing(cluster.generator.policy._receiver.calls(policy)) as orders:
            async for call, info in orders:
                if call == "finish_weight_update":
                    return
                yield call, info

    with pytest.raises(WeightLoadError, match="ended the transfer early"):
        async with cluster.engine.drained():
            await cluster.engine.receive(policy.version, calls())
    waits = asyncio.create_task(collect(cluster.engine.generate("waits", PROMPT, SHORT)))
    generated = cluster.engine.stats().tokens_generated
    await asyncio.sleep(0.5)
    assert cluster.engine.stats().tokens_generated == generated
    await cluster.load()
    assert set((await waits).versions) == {policy.version}
    await cluster.check_sampled(policy.version)


async def test_an_engine_that_waits_for_a_silent_trainer_is_ended_and_another_goes_on_with_the_next_trainer(
    cluster, monkeypatch
):
    monkeypatch.setattr(engines, "LOST_SECONDS", 1.0)  # gloo would free the engine, NCCL would not
    await cluster.publish()

    async def stop():
        cluster.trainer.kill(signal.SIGSTOP)

    at_call(monkeypatch, "update_weights", stop)
    with pytest.raises(EngineError, match="holds the engine, but its sender is gone"):
        await cluster.load()
    monkeypatch.undo()
    cluster.trainer.kill()
    ended, cluster.engine = (
        cluster.engine,
        await GenerationEngine.start(cluster.model(0), CONFIG, version=0, transfer="gloo"),
    )
    await ended.close()
    cluster.generator._engine = cluster.generator.policy._engine = cluster.engine
    await cluster.another_trainer()
    await cluster.publish()
    await cluster.load()
    await cluster.check_sampled(cluster.policy.version)
    assert (await cluster.trainer.tell())["links"] == [NAMES[0]]


async def test_a_trainer_outlives_an_engine_that_dies_while_tensors_land(cluster, monkeypatch):
    policy = await cluster.publish()

    async def die():
        cluster.trainer.kill(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.5, kill_engine)
        asyncio.get_running_loop().call_later(1.0, cluster.trainer.kill, signal.SIGCONT)

    def kill_engine():
        for child in psutil.Process().children(recursive=True):
            if child.status() != psutil.STATUS_ZOMBIE and "EngineCore" in " ".join(child.cmdline()):
                child.send_signal(signal.SIGKILL)

    at_call(monkeypatch, "update_weights", die)
    with pytest.raises(EngineError, match="The vLLM engine process died"):
        await cluster.load()
    await until_links(cluster, [])
    second = cluster.another(NAMES[1])
    await second.receive(policy)
    assert has(second, policy)
    assert (await cluster.trainer.tell())["crashes"] == []


@pytest.fixture
def streams(monkeypatch):
    """Streams of a GPU, on which everything is done at once."""
    from vllm.distributed.weight_transfer import packed_tensor

    class Stream:
        def synchronize(self) -> None:
            used.append(self)

    used = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: (Stream(), Stream()))
    return used


class Wire:
    """A group whose receiver gets what has been sent before. `most`: bytes that were alive at once at its sender."""

    def __init__(self) -> None:
        self.sent, self.alive, self.most = [], [], 0

    def broadcast(self, tensor, src: int) -> None:
        self.sent.append(tensor.clone())
        self.alive = [reference for reference in self.alive if reference() is not None] + [weakref.ref(tensor)]
        self.most = max(self.most, sum(reference().nbytes for reference in self.alive))


async def test_vllms_receiver_of_nccl_takes_what_is_packed_here_and_buffers_are_small(streams, tmp_path):
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    from actors.direct import transfer
    from actors.direct.transfer import Sender

    sizes = {"a": 10, "b": 4 << 20, "c": 1 << 20, "lm_head": 9 << 20, "tokens": 9 << 20, "norm": 3}  # of 4 bytes
    torch.manual_seed(0)
    save_file({name: torch.randn(size) for name, size in sizes.items()}, tmp_path / "model.safetensors")
    source, wire, group = transfer._Stored(tmp_path), Wire(), Wire()
    info = Sender("nccl", "127.0.0.1", 1, print)._init_info()
    assert info.packed_buffer_size_bytes == 16 << 20
    end = transfer.NcclTrainerEngine(client=None, source=source, packed_buffer_size_bytes=16 << 20)
    end.device, end.model_update_group = "cpu", wire
    end._broadcast(source, source.metadata())
    assert wire.most <= (16 << 20) + (36 << 20)

    group.broadcast = lambda tensor, src: tensor.copy_(wire.sent.pop(0))
    received = {}
    packed_nccl_broadcast_consumer(
        iter([(meta.name, (list(meta.shape), meta.dtype)) for meta in source.metadata()]),
        group,
        0,
        lambda pairs: received.update({name: tensor.clone() for name, tensor in pairs}),
        16 << 20,
        device="cpu",
    )
    weights = load_file(tmp_path / "model.safetensors")
    assert received.keys() == weights.keys() and all(received[name].equal(weights[name]) for name in weights)
    assert not wire.sent


async def test_a_transfer_has_a_stream_to_itself_which_later_ones_use_again(streams):
    from actors.direct.transfer import _stream

    with _stream():  # two at once
        with _stream():
            pass
        with _stream():
            pass
    assert [streams[0] is stream for stream in streams] == [True, True, False]
    with pytest.raises(RuntimeError), _stream():
        raise RuntimeError("what it has queued may never end")
    with _stream(), _stream():
        pass
    assert len(set(streams)) == 3


@pytest.mark.slow
async def test_two_workers_of_an_engine_each_take_their_part_of_135_million_parameters(context, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # vLLM sets it, and the trainers of later tests read it
    shape = SHAPE | {
        "vocab_size": 49152,
        "hidden_size": 640,
        "intermediate_size": 1536,
        "num_hidden_layers": 26,
        "num_attention_heads": 10,
        "initializer_range": 0.05,
    }
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(tmp_path / f"model{seed}")
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(models[-1])
    divide(models[1], 2)
    config = CONFIG.model_copy(update={"tensor_parallel": 2})
    async with started_cluster(tmp_path / "weights", models, context, config) as cluster:
        async with running(cluster) as (progress, tasks):
            for _ in range(2):
                counts = [len(parts) for parts in progress]
                await cluster.publish()
                await cluster.load()
                print(dict(cluster.generator.policy._reloads))
                await until(lambda counts=counts: all(len(p) > n for p, n in zip(progress, counts, strict=True)))
            sequences = await asyncio.gather(*tasks)
        for sequence in sequences:
            assert set(sequence.versions) == {0, 1, 2}
            for version in range(3):
                part = sequence.versions == version
                off = reference(cluster.model(version), sequence.tokens) - sequence.logprobs
                assert np.abs(off)[part].max() < 1e-3
        await cluster.publish()
        cut_off = asyncio.create_task(cluster.load())
        await until(lambda: cluster.engine.weights.torn_since)
        cluster.trainer.kill()
        await cut_off
        assert not cluster.engine.weights.torn_since
        await cluster.check_sampled(cluster.policy.version)
