import numpy as np
import pytest
import torch

from areal.weights.chunks import CHUNK_BYTES, HeldVersion, Manifest, TornWeights, apply, difference
from areal.weights.folders import sums_of, write_weights


@pytest.fixture
def folder(tmp_path):
    """Two files of 2.5 chunks and a few bytes."""
    folder = tmp_path / "v1"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(np.random.default_rng(0).bytes(CHUNK_BYTES * 5 // 2))
    (folder / "adapter_config.json").write_bytes(b"{}")
    return folder


def step(lr):
    """A chunk of bf16 weights before and after a step of the fp32 master weights, as bytes."""
    torch.manual_seed(0)
    values_before = torch.randn(CHUNK_BYTES // 2) * 0.02
    values_after = values_before + lr * torch.randn(len(values_before)).sign()
    return [w.bfloat16().view(torch.uint8).numpy().tobytes() for w in (values_before, values_after)]


def test_the_stamp_tells_a_byte_a_name_and_a_length_apart(folder):
    stamp = Manifest.of(folder).stamp
    assert Manifest.of(folder).stamp == stamp
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[CHUNK_BYTES + 7] ^= 1
    file.write_bytes(data)
    second = Manifest.of(folder).stamp
    file.write_bytes(data[:-1])
    cut = Manifest.of(folder).stamp
    (folder / "adapter_config.json").rename(folder / "b.json")
    assert len({stamp, second, cut, Manifest.of(folder).stamp}) == 4


def test_the_sums_of_tensors_in_memory_are_those_of_their_file(tmp_path):
    random = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(CHUNK_BYTES // 4 * 3, generator=random)[::2],
        "b": torch.randn(3, CHUNK_BYTES // 5, generator=random).bfloat16(),
        "c": torch.tensor(3),
        "d": torch.zeros(0),
    }
    file = write_weights(tensors, tmp_path)
    assert [sums_of(file, tensors)] == list(Manifest.of(tmp_path).files)


def test_chunks_make_the_same_files_and_a_wrong_one_is_not_taken(folder, tmp_path):
    payload = HeldVersion(folder, Manifest.of(folder))
    (tmp_path / "here").mkdir()
    here = HeldVersion(tmp_path / "here", payload.manifest, arriving=True)
    here.put(0, payload.read(0))
    with pytest.raises(TornWeights, match="in place of chunk 1"):
        here.put(2, payload.read(2))
    with pytest.raises(TornWeights, match="checksum"):
        here.put(1, bytes(len(payload.read(1))))
    for number in range(1, payload.chunks):
        here.put(number, payload.read(number))
    assert here.complete
    assert Manifest.of(tmp_path / "here") == payload.manifest


def test_a_difference_makes_the_very_same_bytes_and_is_small_for_a_small_step_of_bf16_weights():
    old, new = step(1e-6)
    assert old != new
    packed = difference(new, old)
    assert apply(packed, old) == new
    assert len(packed) < len(new) / 20


def test_where_nearly_everything_has_changed_no_difference_is_made():
    rng = np.random.default_rng(0)
    assert difference(rng.bytes(4096), rng.bytes(4096)) is None


def test_an_odd_number_of_bytes_can_differ_as_well():
    assert apply(difference(b"a" * 2000 + b"c", b"a" * 2001), b"a" * 2001) == b"a" * 2000 + b"c"


@pytest.mark.parametrize("packed", [b"", b"nonsense", difference(b"b" * 4096, b"a" * 4096)[:-9]])
def test_a_difference_that_is_cut_short_or_nonsense_is_told(packed):
    with pytest.raises(TornWeights):
        apply(packed, b"a" * 4096)


def test_a_version_can_be_read_after_its_folder_is_gone(folder):
    manifest = Manifest.of(folder)
    held = HeldVersion(folder, manifest)
    for path in folder.iterdir():
        path.unlink()
    assert held.read(held.chunks - 1) is not None


def test_weights_as_they_are_published_have_the_layout_of_the_version_before(tmp_path):
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        write_weights({"w": torch.randn(100)}, tmp_path / name)
    first, two = (Manifest.of(tmp_path / name) for name in ("v1", "v2"))
    assert first != two
    assert first.is_laid_out_like(two)
