"""Where the quickstart's model is: made once for a user, whole or not at all, and copied without torch."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal.data import quickstart


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a user with an empty cache has had a model built in, by the names that they had meanwhile."""
    folders: list[Path] = []

    def build(folder: Path, *_: object) -> None:
        folders.append(folder)
        (folder / "model.safetensors").write_text(f"model {len(folders)}")

    monkeypatch.setattr("areal.data.warm_start.build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folders


def test_a_model_is_built_once_for_a_user_and_a_seed(tmp_path: Path, places: list[Path]):
    first = quickstart.ensure(tmp_path / "a", 0)
    assert quickstart.ensure(tmp_path / "a", 0) == first
    again = quickstart.ensure(tmp_path / "b", 0)
    assert (again.parent, again.name) == (tmp_path / "b", first.name)
    assert (again / "model.safetensors").read_text() == "model 1"
    assert quickstart.ensure(tmp_path / "a", 1) != first
    assert len(places) == 2 and {folder.parent for folder in places} == {tmp_path / "cache" / "areal"}


def test_whoever_needs_a_model_that_is_being_built_waits_for_it(tmp_path: Path, places: list[Path]):
    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(quickstart.ensure, [tmp_path / name for name in "aabb"]))
    assert len(places) == 1 and all((folder / "model.safetensors").exists() for folder in folders)
    assert [file.name for file in (tmp_path / "a").iterdir()] == [folders[0].name]


def test_a_cache_that_takes_no_files_costs_nothing_but_the_time(tmp_path: Path, places: list[Path]):
    (tmp_path / "cache").write_text("no folder")
    lines: list[str] = []
    folder = quickstart.ensure(tmp_path / "a", 0, lines.append)
    assert [place.parent for place in places] == [folder.parent] and "is not kept for other runs" in lines[0]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch):
    def fail(folder: Path, *_: object) -> None:
        (folder / "model.safetensors").write_text("begun")
        raise OSError("no space left")

    monkeypatch.setattr("areal.data.warm_start.build", fail)
    with pytest.raises(OSError, match="no space"):
        quickstart.ensure(tmp_path / "a")
    assert [file.suffix for file in tmp_path.rglob("*") if file.is_file()] == [".lock"]


def test_a_copy_is_made_without_torch(tmp_path: Path, places: list[Path]):
    first = quickstart.ensure(tmp_path / "a")
    code = "import sys; from areal.__main__ import main; main(); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "quickstart-model", str(tmp_path / "b")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "b" / first.name / "model.safetensors").read_text() == "model 1"
