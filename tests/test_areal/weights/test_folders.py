import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.small_disks import mounted_small_disk, use_up_inodes

from areal.weights.folders import atomic_folder, copy_model_files, remove_folder, write_weights

ROOT = Path(__file__).parents[3]


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    with atomic_folder(tmp_path / "deep" / "7") as partial:
        write_weights({"w": torch.arange(6.0).view(2, 3).T}, partial)
        assert not (tmp_path / "deep" / "7").exists()
    loaded = load_file(tmp_path / "deep" / "7" / "model.safetensors")
    assert loaded["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError, match="full"), atomic_folder(tmp_path / "7") as partial:
        (partial / "half").write_text("a")
        raise RuntimeError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_replaced_when_the_new_one_is_complete(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "old").write_text("a")
    with atomic_folder(tmp_path / "7") as partial:
        (partial / "new").write_text("b")
        assert (tmp_path / "7" / "old").exists()
    assert [path.name for path in (tmp_path / "7").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_a_failure_leaves_the_old_folder_as_it_was(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "old").write_text("a")
    with pytest.raises(RuntimeError, match="full"), atomic_folder(tmp_path / "7") as partial:
        (partial / "old").write_text("b")
        raise RuntimeError("disk full")
    assert (tmp_path / "7" / "old").read_text() == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_a_folder_is_removed_from_a_disk_without_inodes(tmp_path):
    with mounted_small_disk(tmp_path, inodes=20):
        with atomic_folder(tmp_path / "7") as partial:
            (partial / "weights").touch()
        use_up_inodes(tmp_path)
        remove_folder(tmp_path / "7")
        assert not (tmp_path / "7").exists() and not list(tmp_path.glob(".*"))


WRITER = """
import os, signal, sys
from pathlib import Path
from areal.weights import folders as weights

replace, renames = os.replace, []

def replace_and_die(source, target):
    if len(renames) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    renames.append(target)
    replace(source, target)

os.replace = replace_and_die
with weights.atomic_folder(Path(sys.argv[1])) as partial:
    for name in "ab":
        (partial / name).write_text("new")
"""


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_writer_killed_between_any_two_renames_leaves_no_torn_folder_and_its_leftovers_go(tmp_path, renames):
    folder, second = tmp_path / "7", tmp_path / ".7.5.leftover"
    for result in (folder, second):
        result.mkdir()
        for name in "ab":
            (result / name).write_text("old")
    process = subprocess.run([sys.executable, "-c", WRITER, str(folder), str(renames)], cwd=ROOT, check=False)
    assert process.returncode == (-signal.SIGKILL if renames < 2 else 0)
    if renames == 1:
        assert not folder.exists()
    else:
        assert contents(folder) == dict.fromkeys("ab", "new" if renames else "old")
    with atomic_folder(folder) as partial:
        (partial / "c").write_text("newer")
    assert contents(folder) == {"c": "newer"}
    assert {path.name for path in tmp_path.iterdir()} == {"7", ".7.5.leftover"}


def test_model_files_are_copied_without_weights_and_say_the_dtype(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16"}))
    for name in ("tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (source / name).write_text("{}")
    copy_model_files(source, target, dtype="float32")
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]
    assert json.loads((target / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "float32"}


def test_a_removed_folder_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "v000001"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    remove_folder(folder)
    remove_folder(folder)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_goes_with_the_name_that_it_wrote(tmp_path):
    (tmp_path / ".7.abc").mkdir()
    (tmp_path / ".8.abc").mkdir()
    remove_folder(tmp_path / "7")
    assert [path.name for path in tmp_path.iterdir()] == [".8.abc"]
