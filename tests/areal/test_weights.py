import json

import pytest
import torch
from safetensors.torch import load_file

from areal.weights import atomic_folder, copy_model_files, write_weights


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


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "7").mkdir()
    with pytest.raises(FileExistsError, match="7"), atomic_folder(tmp_path / "7"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_model_files_are_copied_without_weights_and_say_the_dtype(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16"}))
    for name in ("tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (source / name).write_text("{}")
    copy_model_files(source, target, dtype="float32")
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]
    assert json.loads((target / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "float32"}
