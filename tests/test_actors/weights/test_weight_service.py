"""Weights between actors, over real sockets: who sends what to whom, and what becomes of it when that goes wrong."""

import asyncio
import itertools

import numpy as np
import pytest
from support.networks import network
from support.small_disks import fill_disk, mounted_small_disk

from actors.start.preflight import check_folder
from actors.weights import weight_service
from actors.weights.weight_service import WeightFetcher, WeightServer
from areal.base.errors import UserError
from areal.config.engine_sections import WeightsConfig
from areal.storage import disk
from areal.weights import chunks as weight_files
from areal.weights.chunks import HeldVersion, Manifest, TornWeights
from protocols.bus import Bus
from protocols.bus_errors import RefusedError, StreamBrokenError
from protocols.membership_messages import Member, Policy
from protocols.weight_messages import FetchWeights, WeightChunk

PATIENCE = 60
CHUNKS, CHUNK_BYTES = 9, 1 << 12


class Node:
    """What stands for a trainer or a generator: a bus with a front door, and weights behind it."""

    def __init__(self, cluster, role, index, config):
        self.bus = Bus(f"{role}/{index}#x", network())
        self.index = index
        self.cluster = cluster
        self.asked = []
        fetcher = self.bus, index, config, cluster.folder, self.members, lambda: cluster.policy
        self.weights = WeightServer(4) if role == "trainer" else WeightFetcher(*fetcher)
        address = self.bus.serve("tcp://127.0.0.1:*", self.handle, cluster.crashes.append)
        self.member = Member(identity=f"{role}/{index}#x", role=role, index=index, address=address, state="healthy")
        self.spoil = lambda part: part

    def members(self, role):
        return [m for m in self.cluster.members() if m.role == role]

    async def handle(self, request):
        self.asked.append((request.sender.split("#")[0], request.message.first))
        async for part in self.weights.serve(request):
            yield self.spoil(part)


class Cluster:
    """A trainer and generators; `publish` writes a version as the trainer does."""

    def __init__(self, folder, generators, **config):
        self.folder = folder
        self.crashes = []
        self.policy = Policy(lineage=0, version=0, folder="model")
        self.nodes = []
        self.config = WeightsConfig(**{"transport": "stream"} | config)
        self.trainer = self.join("trainer", 0)
        self.generators = [self.join("generator", index) for index in range(generators)]

    def join(self, role, index):
        self.nodes.append(Node(self, role, index, self.config))
        return self.nodes[-1]

    def members(self):
        return [node.member for node in self.nodes]

    def publish(self, data, version=None):
        version = self.policy.version + 1 if version is None else version
        folder = self.folder / f"l0-v{version:06}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(data)
        manifest = Manifest.of(folder)
        self.trainer.weights.offer((0, version), HeldVersion(folder, manifest))
        self.policy = Policy(lineage=0, version=version, folder=str(folder), stamp=manifest.stamp)
        return self.policy

    async def fetch_all(self):
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*(node.weights.fetch(self.policy) for node in self.generators))


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_service, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", CHUNK_BYTES)
    clusters = []

    def make(generators, **config):
        clusters.append(Cluster(tmp_path, generators, **config))
        return clusters[-1]

    yield make
    for node in itertools.chain.from_iterable(small_cluster.nodes for small_cluster in clusters):
        await node.bus.close()
    assert not any(small_cluster.crashes for small_cluster in clusters)


def random_bytes(seed=0, size=CHUNKS * CHUNK_BYTES - 5):
    return np.random.default_rng(seed).bytes(size)


def slightly_changed(data):
    """Every hundredth byte is another."""
    changed = np.frombuffer(data, np.uint8).copy()
    changed[::100] ^= 1
    return changed.tobytes()


def read(folder):
    return (folder / "model.safetensors").read_bytes()


async def test_the_trainer_sends_a_version_once_and_the_generators_pass_it_on(cluster):
    of_four = cluster(4)
    data = random_bytes()
    of_four.publish(data)
    folders = await of_four.fetch_all()
    assert [read(folder) == data for folder in folders] == [True] * 4
    assert of_four.trainer.asked == [("generator/0", 0)]
    assert sorted(of_four.generators[0].asked) == [("generator/1", 0), ("generator/2", 0)]
    assert of_four.generators[1].asked == [("generator/3", 0)]
    assert of_four.trainer.weights.bytes_sent == len(data)


async def test_weights_that_find_no_room_arrive_once_there_is_some(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "RETRY_SECONDS", 0.05)
    one_cluster = cluster(1)
    one_cluster.publish(data := random_bytes())
    receiver, disk_retry = one_cluster.generators[0].weights, disk.DiskRetry(tmp_path, "the generator")
    small = receiver._folder
    small.mkdir()
    with mounted_small_disk(small, inodes=100):
        hog = fill_disk(small)
        async with asyncio.timeout(PATIENCE):
            fetching = asyncio.create_task(
                disk_retry.write(lambda: receiver.fetch(one_cluster.policy), "weights", small)
            )
            while not (disk_retry.shortage or fetching.done()):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            assert disk_retry.shortage.folder == str(small) and not fetching.done()
            hog.unlink()
            assert read(await fetching) == data


async def test_a_version_is_passed_on_while_it_arrives(cluster, monkeypatch):
    two = cluster(2)
    two.publish(random_bytes())
    receiver = two.generators[1].weights
    passed_on, put = asyncio.Event(), HeldVersion.put

    def put_and_tell(held_version, number, data):
        put(held_version, number, data)
        if held_version in receiver._held_versions.values():
            loop.call_soon_threadsafe(passed_on.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(HeldVersion, "put", put_and_tell)

    async def slowly(request):
        async for part in WeightServer.serve(two.trainer.weights, request):
            if isinstance(part, WeightChunk) and part.number == CHUNKS - 1:
                await passed_on.wait()  # the last chunk goes out only once another is there, two hops away
            yield part

    two.trainer.weights.serve = slowly
    assert len(await two.fetch_all()) == 2


async def test_where_a_sender_breaks_off_the_next_one_goes_on_from_the_last_good_chunk(cluster):
    two = cluster(2)
    data = random_bytes()
    two.publish(data)

    def break_off(part):
        if isinstance(part, WeightChunk) and part.number == 5:
            raise StreamBrokenError("cut")
        return part

    two.generators[0].spoil = break_off
    folders = await two.fetch_all()
    assert read(folders[1]) == data
    assert two.trainer.asked[-1] == ("generator/1", 5)
    assert two.generators[1].weights.bytes_received == len(data)


async def test_a_chunk_that_was_changed_on_the_way_is_fetched_again_from_somebody_else(cluster):
    two = cluster(2)
    data = random_bytes()
    two.publish(data)

    def corrupt(part):
        if isinstance(part, WeightChunk) and part.number == 3:
            return part.model_copy(update={"data": part.data ^ np.uint8(1)})
        return part

    two.generators[0].spoil = corrupt
    folders = await two.fetch_all()
    assert read(folders[1]) == data
    assert two.trainer.asked[-1] == ("generator/1", 3)


async def test_a_generator_that_is_gone_costs_its_children_one_attempt(cluster, monkeypatch):
    monkeypatch.setattr(weight_service, "STALL_SECONDS", 0.5)
    three = cluster(3)
    await three.generators[0].bus.close()
    three.generators = three.generators[1:]
    data = random_bytes()
    three.publish(data)
    assert [read(folder) == data for folder in await three.fetch_all()] == [True] * 2
    assert sorted(sender for sender, _ in three.trainer.asked) == ["generator/1", "generator/2"]


async def test_only_what_changed_is_sent_to_one_that_has_the_version_before_also_by_generators(cluster):
    two = cluster(2)
    data = random_bytes()
    two.publish(data)
    await two.fetch_all()
    full = two.generators[1].weights.bytes_received
    two.publish(slightly_changed(data))
    folders = await two.fetch_all()
    assert [read(folder) == slightly_changed(data) for folder in folders] == [True] * 2
    assert two.generators[1].weights.bytes_received - full < full / 10
    assert two.trainer.weights.bytes_sent - full < full / 10


@pytest.mark.parametrize("delta", [True, False])
async def test_without_a_common_version_or_with_delta_off_all_is_sent(cluster, delta):
    small = cluster(1, delta=delta)
    data = random_bytes()
    small.publish(data)
    await small.fetch_all()
    if delta:
        small.trainer.weights._drop((0, 1))
    small.publish(slightly_changed(data))
    assert read((await small.fetch_all())[0]) == slightly_changed(data)
    assert small.trainer.weights.bytes_sent == 2 * len(data)


async def test_a_version_that_was_torn_on_this_machine_is_no_base_twice(cluster):
    small = cluster(1)
    data = random_bytes(size=2 * CHUNK_BYTES)
    small.publish(data)
    (folder,) = await small.fetch_all()
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes(100))
    small.publish(slightly_changed(data))
    assert read((await small.fetch_all())[0]) == slightly_changed(data)


async def test_old_versions_are_removed_and_one_that_was_skipped_is_not_missed(cluster):
    small = cluster(1)
    for version in (1, 2, 5, 6):
        small.publish(random_bytes(version, 100), version)
        await small.fetch_all()
    stored = {path.name for path in small.generators[0].weights._folder.iterdir()}
    assert stored == {"l0-v000005", "l0-v000006"}
    small.generators[0].weights.close()
    assert not small.generators[0].weights._folder.exists()


async def test_in_place_of_a_direct_transfer_the_folder_is_read_or_if_it_is_not_shared_streamed_by_the_trainer(cluster):
    two = cluster(2, transport="direct")
    data = random_bytes()
    policy = two.publish(data)
    assert [str(folder) for folder in await two.fetch_all()] == [policy.folder] * 2
    assert not two.trainer.asked
    two.policy = policy.model_copy(update={"folder": "/nowhere"})
    assert [read(folder) == data for folder in await two.fetch_all()] == [True] * 2
    assert sorted(two.trainer.asked) == [("generator/0", 0), ("generator/1", 0)]


async def test_one_that_asks_for_a_version_that_is_gone_takes_the_newest_one(cluster):
    small = cluster(1)
    first = small.publish(random_bytes(1, 100))
    for version in range(2, 7):
        small.publish(random_bytes(version, 100), version)
    with pytest.raises(TornWeights, match="there is a newer one"):
        await small.generators[0].weights.fetch(first)
    ask = FetchWeights(lineage=0, version=1, first=0, base=None)
    with pytest.raises(RefusedError):
        await anext(small.generators[0].bus.peer(small.trainer.member.address).stream(ask, PATIENCE))
    assert read((await small.fetch_all())[0]) == random_bytes(6, 100)


async def test_a_trainer_that_is_away_is_waited_for(cluster):
    small = cluster(1)
    trainer = small.nodes.pop(0)
    small.publish(random_bytes(1, 100))
    fetching = asyncio.create_task(small.fetch_all())
    await asyncio.sleep(0.05)
    assert not fetching.done()
    small.nodes.append(trainer)
    assert read((await fetching)[0]) == random_bytes(1, 100)


async def test_a_shared_folder_is_read_in_place_and_a_stale_or_torn_copy_in_it_is_told(tmp_path):
    shared_cluster = Cluster(tmp_path, 0)
    policy = shared_cluster.publish(random_bytes(1, 1000))
    shared_cluster.config = WeightsConfig()
    fetcher = shared_cluster.join("generator", 0).weights
    assert str(await fetcher.fetch(policy)) == policy.folder
    (tmp_path / "l0-v000001" / "model.safetensors").write_bytes(random_bytes(1, 1000)[:-1] + b"?")
    with pytest.raises(TornWeights, match="are not the published ones, or not all of them are written yet"):
        await fetcher.fetch(policy)
    with pytest.raises(TornWeights, match="cannot be read"):
        await fetcher.fetch(policy.model_copy(update={"folder": str(tmp_path / "nowhere")}))
    for node in shared_cluster.nodes:
        await node.bus.close()


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_started(tmp_path):
    (tmp_path / "file").write_text("")
    check_folder(tmp_path / "new" / "weights")
    with pytest.raises(UserError, match="Weights cannot be written to .*file/weights"):
        check_folder(tmp_path / "file" / "weights")
    assert not (tmp_path / "new").exists()
