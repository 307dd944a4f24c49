"""What the start of a run says of its first waits."""

from __future__ import annotations

from pathlib import Path

from actors.start.start_checks import first_waits
from areal.base.processes import ROOT
from areal.config import load_config
from areal.models import quickstart_folder


def waits(tmp_path, *overrides):
    return first_waits(load_config(ROOT / "configs" / "quickstart.yaml", [f"run_dir={tmp_path}", *overrides]))


def test_what_takes_long_only_the_first_time_is_told_only_then(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, engines = waits(tmp_path)
    assert "quickstart's model is made first" in model
    assert "half a minute or more, and the first time twice as long. Logs:" in engines
    quickstart_folder(tmp_path / "cache" / "areal").mkdir(parents=True)
    (line,) = waits(tmp_path)
    assert line == f"The engines are loaded, which takes half a minute or more. Logs: {tmp_path}/quickstart/logs."


def test_gpus_have_waits_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [line.split()[0] for line in waits(tmp_path, f"model={Path('m')}")] == ["vLLM", "The"]
    assert len(waits(tmp_path, "model=m", "generator.enforce_eager=true")) == 1
