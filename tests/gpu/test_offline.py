"""Files for a machine without internet: cut, joined, verified."""

import hashlib

import offline
import pytest

DATA = bytes(range(256)) * 10


@pytest.fixture
def file(tmp_path):
    """A file to download."""
    source = tmp_path / "source.whl"
    source.write_bytes(DATA)
    return {"name": "big.whl", "url": source.as_uri(), "size": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest()}


def test_a_file_travels_in_pieces_and_is_whole_again(tmp_path, file):
    there = tmp_path / "there"
    there.mkdir()
    file["pieces"] = offline.download(there, file, piece=1000)
    assert [(there / name).stat().st_size for name in file["pieces"]] == [1000, 1000, 560]
    assert offline.download(there, file | {"url": "file:///nowhere"}, piece=1000) == file["pieces"]  # not once more
    assert offline.joined(there, file).read_bytes() == DATA
    assert [path.name for path in there.iterdir()] == ["big.whl"]
    assert offline.joined(there, file).read_bytes() == DATA


def test_a_piece_that_is_damaged_or_missing_is_refused_and_can_come_again(tmp_path, file):
    file["pieces"] = offline.download(tmp_path, file, piece=1000)
    piece = tmp_path / file["pieces"][1]
    right = piece.read_bytes()
    piece.write_bytes(bytes(1000))
    with pytest.raises(SystemExit, match="damaged"):
        offline.joined(tmp_path, file)
    piece.write_bytes(right)
    assert offline.joined(tmp_path, file).read_bytes() == DATA

    second = file | {"name": "other.whl"}
    second["pieces"] = offline.download(tmp_path, second, piece=1000)
    (tmp_path / second["pieces"][2]).unlink()
    with pytest.raises(SystemExit, match=r"other.whl.002 is missing"):
        offline.joined(tmp_path, second)


def test_a_damaged_download_is_refused(tmp_path, file):
    with pytest.raises(SystemExit, match="damaged"):
        offline.download(tmp_path, file | {"sha256": "0" * 64}, piece=10_000)


def test_what_the_other_machine_has_in_this_version_does_not_travel():
    def package(name, version):
        wheel = {"url": f"https://x/{name}-{version}.whl", "size": 3, "hashes": {"sha256": "0"}}
        return {"name": name, "version": version, "wheels": [wheel]}

    source = {"url": "https://x/zss-1.tar.gz", "size": 1, "hashes": {"sha256": "1"}}
    packages = [package("torch", "2.13.0"), package("typing-extensions", "4"), {"name": "zss", "version": "1"}]
    packages[2]["sdist"] = source
    results = list(offline.missing(packages, "torch==2.12.0\ntyping_extensions==4\n"))
    assert [file["name"] for file in results] == ["torch-2.13.0.whl", "zss-1.tar.gz"]
