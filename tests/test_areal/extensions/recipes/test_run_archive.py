"""Records of runs in one file: what is opened, and what is refused."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path

import pytest

from areal.base.errors import UserError
from areal.extensions.recipes import run_archive
from areal.extensions.recipes.machine import differences, machine
from areal.extensions.recipes.run_archive import SUMS, compressed, unpack, write_archive

FILES = {"run/config.yaml": b"model: m\n", "run/rollouts/000001.parquet": bytes(range(256)) * 20}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write_archive(tmp_path / "r.tar.zst", {"name": "r"}, FILES)
    return tmp_path / "r.tar.zst"


def test_a_record_is_unpacked_as_it_was_written_and_other_tools_read_it(record, tmp_path):
    assert unpack(record, tmp_path / "run") == {"name": "r"}
    assert {name: (tmp_path / "run" / name).read_bytes() for name in FILES} == FILES
    sums = (tmp_path / "run" / SUMS).read_text().splitlines()
    assert sums[1] == f"{hashlib.sha256(FILES['run/config.yaml']).hexdigest()}  run/config.yaml"


def test_a_record_with_any_byte_changed_is_refused_with_a_sentence(record, tmp_path):
    content = record.read_bytes()
    for place in [0, len(content) - 1, *random.Random(0).sample(range(len(content)), 60)]:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        record.write_bytes(changed)
        with pytest.raises(UserError, match="not opened as the record of a run: .*Get it again"):
            unpack(record, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    record.write_bytes(content[:-100])
    with pytest.raises(UserError, match="does not end as"):
        unpack(record, tmp_path / "run")


def forged(file: Path, members: list[tuple[tarfile.TarInfo, bytes]], listed: tuple[str, ...] = ()) -> Path:
    """A record of these members whose digests are right."""
    names = dict.fromkeys([*listed, *(member.name for member, _ in members)])
    contents = {member.name: content for member, content in members}
    sums = "".join(f"{hashlib.sha256(contents.get(name, b'')).hexdigest()}  {name}\n" for name in names).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        first = tarfile.TarInfo(SUMS)
        for member, content in [(first, sums), *members]:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    packed = compressed(buffer.getvalue())
    file.write_bytes(packed + run_archive._FRAME + hashlib.sha256(packed).digest())
    return file


def link(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("run/config.yaml")
    member.type, member.linkname = kind, "/etc/passwd"
    return member


HOSTILE = {
    "a symbolic link": [(link(tarfile.SYMTYPE), b"")],
    "a hard link": [(link(tarfile.LNKTYPE), b"")],
    "a device": [(link(tarfile.CHRTYPE), b"")],
    "a folder": [(link(tarfile.DIRTYPE), b"")],
    "a path out of the folder": [(tarfile.TarInfo("run/../../evil.json"), b"{}")],
    "an absolute path": [(tarfile.TarInfo("/tmp/evil.json"), b"{}")],
    "a program": [(tarfile.TarInfo("run/loss.py"), b"print()")],
    "a hidden file": [(tarfile.TarInfo("run/.config.json"), b"{}")],
    "a long name": [(tarfile.TarInfo(f"run/{'a' * 200}.json"), b"{}")],
    "a file twice": [(tarfile.TarInfo("run/a.json"), b"{}"), (tarfile.TarInfo("run/a.json"), b"{}")],
    "no facts": [(tarfile.TarInfo("run/a.json"), b"{}")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
def test_a_record_of_a_stranger_writes_plain_files_into_its_folder_alone(members, tmp_path):
    with pytest.raises(UserError, match="not opened as the record of a run"):
        unpack(forged(tmp_path / "r.tar.zst", members), tmp_path / "place" / "run")
    written = [file for file in tmp_path.rglob("*") if not file.is_dir()]
    assert not any(file.is_symlink() for file in written)
    assert {file.name for file in written} <= {"r.tar.zst", SUMS, "a.json"}


def test_a_record_that_unpacks_to_too_much_or_lacks_a_file_is_refused(tmp_path, monkeypatch):
    lacking = forged(tmp_path / "r.tar.zst", [(tarfile.TarInfo("record.json"), b"{}")], ("run/gone.json",))
    with pytest.raises(UserError, match=r"it lacks run/gone\.json"):
        unpack(lacking, tmp_path / "one")
    monkeypatch.setattr(run_archive, "BYTES", 1 << 20)
    bomb = forged(tmp_path / "bomb.tar.zst", [(tarfile.TarInfo("run/a.json"), bytes(2 << 20))])
    assert bomb.stat().st_size < 10_000
    with pytest.raises(UserError, match="more than"):
        unpack(bomb, tmp_path / "two")
    monkeypatch.setattr(run_archive, "FILES", 2)
    many = forged(tmp_path / "many.tar.zst", [(tarfile.TarInfo(f"run/{n}.json"), b"") for n in range(3)])
    with pytest.raises(UserError, match="2 files"):
        unpack(many, tmp_path / "three")


def test_the_difference_of_two_machines_is_named_where_rounding_depends_on_it():
    here = machine()
    assert differences(here, here) == []
    there = here | {"instructions": "AVX", "packages": here["packages"] | {"torch": "1.0"}}
    assert [line.partition(":")[0] for line in differences(there, here)] == ["instructions", "torch"]
