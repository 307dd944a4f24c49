"""What the start of a run says of its first waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import areal.devices
from actors.start import preflight
from actors.start.start_checks import first_waits, on_this_machine
from areal.base.errors import UserError
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


def notes_of(capsys, *overrides: str) -> str:
    config = on_this_machine(load_config(ROOT / "configs" / "quickstart.yaml", list(overrides)))
    preflight.check_devices()
    preflight.check_machine(config, {}, {})
    return capsys.readouterr().err


def test_a_gpu_that_is_not_there_ranks_without_cores_and_a_missing_compiler_are_told(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(preflight, "listed_devices", list)
    monkeypatch.setattr(areal.devices, "listed_devices", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(preflight, "hides_avx512", lambda: True)
    monkeypatch.setattr(preflight, "mkl_library", lambda: None)
    notes = notes_of(capsys, "trainer.ranks=4").splitlines()
    assert notes[0] == "Note: CUDA_VISIBLE_DEVICES is 0, but this machine has no GPU: unset it to use the CPU."
    assert notes[1].startswith("Note: the trainer has 4 ranks with 4 threads together, but this machine has 2 cores")
    assert "there is no C compiler here" in notes[2] and len(notes) == 3


@pytest.mark.parametrize(
    ("address", "cure"),
    [
        ("tcp://no-such-host.invalid:5555", r"\(.*\): choose another address with"),
        ("tcp://192.0.2.1:5555", r"\(Cannot assign requested address\): choose another address with"),
    ],
)
def test_an_address_that_cannot_be_is_no_matter_of_another_process(address, cure):
    with pytest.raises(UserError, match=f"The master cannot listen at {re.escape(address)} {cure}"):
        preflight.check_port(address)


def test_run_py_says_what_to_type_if_its_python_has_no_packages(tmp_path):
    refused = subprocess.run([sys.executable, "-S", ROOT / "run.py", "steps=1"], capture_output=True, text=True)
    assert refused.returncode == 2 and "does not have the packages that run.py needs" in refused.stderr
    assert refused.stderr.count("\n") == 1 and re.search("type .*run.py steps=1|`make setup`", refused.stderr)
