"""The CPU profile of a process, and what `areal profile` prints of it."""

from __future__ import annotations

import marshal
import pstats
import threading
import zlib

import pytest

from areal.__main__ import main
from areal.config import Config, dump_config
from areal.observe import cpu_profile
from areal.observe.cpu_profile import FOLDER, NATIVE, CpuProfile
from areal.run_files import CONFIG, METRICS
from areal.storage.records import line_of

SETTINGS = {
    "name": "a",
    "model": "quickstart",
    "steps": 2,
    "batch_size": 8,
    "group_size": 4,
    "data": {"source": "addition"},
}
SETTINGS |= {"sampling": {"max_new_tokens": 4}, "reward": {"functions": ["addition"]}}


def compress(content: bytes) -> None:
    zlib.compress(content, 9)


def work(content: bytes, ended: threading.Event) -> None:
    while not ended.is_set():
        compress(content)


@pytest.fixture
def profile():
    """Of this process, in which a thread has compressed and another one has waited, with fifty samples of the first."""
    ended, content = threading.Event(), bytes(range(256)) * 100
    threads = [threading.Thread(target=work, args=[content, ended]), threading.Thread(target=ended.wait)]
    profile = CpuProfile()
    for thread in threads:
        thread.start()
    while figures_of(profile, "work")[0] < 50:
        profile.look()
    ended.set()
    for thread in threads:
        thread.join()
    return profile


def figures_of(profile: CpuProfile, name: str) -> list[float]:
    """Samples, own seconds and all seconds of a function here."""
    rows = [
        figures for (file, _, function), figures in profile._functions.items() if (file, function) == (__file__, name)
    ]
    return rows[0] if rows else [0, 0.0, 0.0]


def test_cpu_time_belongs_to_the_function_that_uses_it_and_to_its_callers(profile):
    _, own, total = figures_of(profile, "work")
    assert figures_of(profile, "compress")[2] > own  # it compresses, in C
    assert total >= figures_of(profile, "compress")[2] + own - 1e-9


def test_who_waits_has_no_cpu_time(profile):
    waited = sum(own for (_, _, name), (_, own, _) in profile._functions.items() if name == "Condition.wait")
    assert waited < 0.1 * figures_of(profile, "work")[2]


def test_the_file_is_one_of_cprofiles_and_has_all_cpu_time_of_the_process(profile, tmp_path):
    (tmp_path / "a.pstats").write_bytes(profile.dump())
    stats = vars(pstats.Stats(str(tmp_path / "a.pstats")))
    compressing = next(row for (_, _, name), row in stats["stats"].items() if name == "compress")
    assert [name for _, _, name in compressing[4]] == ["work"]
    assert NATIVE in stats["stats"] and stats["total_tt"] > 0
    assert stats["total_tt"] == pytest.approx(sum(row[2] for row in stats["stats"].values()))


def test_a_function_that_calls_itself_counts_once():
    profile, a, b = CpuProfile(), ("f", 1, "a"), ("f", 2, "b")
    profile._add([a, b, a, b], 1.0)
    assert profile._functions == {a: [1, 1.0, 1.0], b: [1, 0.0, 1.0]}


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
    config = Config.model_validate(SETTINGS)
    (tmp_path / CONFIG).write_text(dump_config(config))
    (tmp_path / METRICS).write_text("".join(line_of({"step": step, "time": 1.0}) for step in (1, 2)))
    assert main(["profile", str(tmp_path)]) != 0
    assert "observe.profile=true" in capsys.readouterr().err
    (tmp_path / FOLDER).mkdir()
    figures = {("/x/y/z.py", 3, "most"): (9, 9, 0.096, 0.1, {}), ("/x/y/z.py", 9, "least"): (1, 1, 0.032, 0.1, {})}
    (tmp_path / FOLDER / "trainer-0.pstats").write_bytes(marshal.dumps(figures))
    assert not main(["profile", str(tmp_path), "--top", "1"])
    shown = capsys.readouterr().out
    assert "64 samples" in shown and "2.00" in shown and "75%" in shown and "y/z.py:3" in shown
    assert "most" in shown and "least" not in shown
