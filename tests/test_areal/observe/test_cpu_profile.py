"""The CPU profile of a process, and what `areal profile` prints of it."""

from __future__ import annotations

import threading
import zlib
from types import SimpleNamespace

import pytest

from areal.__main__ import main
from areal.config import Config, dump_config
from areal.observe import cpu_profile
from areal.observe.cpu_profile import FOLDER, NATIVE, CpuProfile
from areal.storage.records import line_of
from areal.storage.run_files import CONFIG, METRICS

SETTINGS = {"name": "a", "model": "quickstart", "steps": 2, "batch_size": 8, "group_size": 4}
SETTINGS |= {"data": {"source": "addition"}, "sampling": {"max_new_tokens": 4}, "reward": {"functions": ["addition"]}}


def compress(content: bytes) -> None:
    zlib.compress(content, 9)


def work(content: bytes, ended: threading.Event) -> None:
    while not ended.is_set():
        compress(content)


def seconds_in(profile: CpuProfile, words: str) -> float:
    return sum(seconds for stack, seconds in profile.stacks.items() if words in stack)


@pytest.fixture(scope="module")
def profile():
    """Of this process, in which a thread has compressed for a fifth of a second, and another one has waited."""
    ended, content = threading.Event(), bytes(range(256)) * 100
    threads = [threading.Thread(target=work, args=[content, ended]), threading.Thread(target=ended.wait)]
    profile = CpuProfile()
    for thread in threads:
        thread.start()
    while seconds_in(profile, ";work (") < 0.2:
        profile.look()
    ended.set()
    for thread in threads:
        thread.join()
    return profile


def test_cpu_time_belongs_to_the_function_that_uses_it_below_its_callers(profile):
    inside = sum(seconds for stack, seconds in profile.stacks.items() if ";work (" in stack and ";compress (" in stack)
    assert inside > 0.5 * seconds_in(profile, ";work (")


def test_who_waits_has_no_cpu_time(profile):
    assert seconds_in(profile, "Event.wait") < 0.1 * seconds_in(profile, ";work (")


def test_the_file_has_the_cpu_time_of_python_and_of_what_it_does_not_know(profile):
    lines = [line.rpartition(" ") for line in profile.dump().splitlines()]
    assert lines[-1][0] == NATIVE
    assert sum(int(microseconds) for _, _, microseconds in lines[:-1]) / 1e6 >= 0.2


def test_only_so_many_stacks_are_kept_apart(monkeypatch):
    monkeypatch.setattr(cpu_profile, "MOST_STACKS", 1)
    frames = [SimpleNamespace(f_code=compress.__code__, f_back=None)]
    frames += [SimpleNamespace(f_code=work.__code__, f_back=frames[0])]
    monkeypatch.setattr(cpu_profile, "_threads", lambda: iter(()))
    profile = CpuProfile()
    monkeypatch.setattr(cpu_profile, "_threads", lambda: ((n, 2.0, frame) for n, frame in enumerate(frames)))
    profile.look()
    assert [stack.split(" (")[0] for stack in profile.stacks] == ["compress", "work"]
    assert set(profile.stacks.values()) == {2.0}


def test_only_a_run_that_is_configured_so_is_profiled(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(cpu_profile, "_begin", begun.append)
    monkeypatch.setenv(cpu_profile.VARIABLE, "")
    settings = SETTINGS | {"run_dir": tmp_path}
    cpu_profile.begin(Config.model_validate(settings), "generator-0")
    cpu_profile.begin_as_child("engine")
    assert begun == []
    cpu_profile.begin(Config.model_validate(settings | {"observe": {"profile": True}}), "generator-0")
    cpu_profile.begin_as_child("engine")
    assert begun == [str(tmp_path / "a" / FOLDER / name) for name in ("generator-0", "generator-0-engine")]


def test_areal_profile_prints_the_milliseconds_a_sample_and_the_first_functions(tmp_path, capsys):
    (tmp_path / CONFIG).write_text(dump_config(Config.model_validate(SETTINGS)))
    (tmp_path / METRICS).write_text("".join(line_of({"step": step, "time": 1.0}) for step in (1, 2)))
    assert main(["profile", str(tmp_path)]) != 0
    assert "observe.profile=true" in capsys.readouterr().err
    (tmp_path / FOLDER).mkdir()
    file = tmp_path / FOLDER / "trainer-0.raw"
    file.write_text("outer (/w/x/y/z.py:1);most (/w/x/y/z.py:3) 96000\nouter (/w/x/y/z.py:1) 32000\n")
    assert not main(["profile", str(tmp_path), "--top", "1"])
    shown = capsys.readouterr().out
    assert "64 samples" in shown and "2.00" in shown and "75%" in shown and "most (x/y/z.py:3)" in shown
    assert "outer" not in shown
    file.write_text("what is this\n")
    assert main(["profile", str(tmp_path)]) != 0
    assert "is not a profile" in capsys.readouterr().err
