"""That `make bench` keeps what was measured, and measures only what is missing."""

import json
import sys

import bench
import pytest


def run(monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--folder", str(folder), *words])
    with pytest.raises(SystemExit) as end:
        bench.main()
    return end.value.code


def test_what_is_there_is_shown_and_not_measured_again(monkeypatch, tmp_path, capsys):
    (tmp_path / "bus.json").write_text(json.dumps({"ratio": 0.512, "spread": [0.4, 0.6]}))
    monkeypatch.setattr(bench.subprocess, "run", lambda *args, **kwargs: pytest.fail("it is there"))
    here = {"processor": "a CPU", "cores": 2, "commit": "abc"}
    monkeypatch.setattr(bench, "machine", lambda: here)
    assert run(monkeypatch, tmp_path, "--only", "bus") == 0
    shown = capsys.readouterr().out
    assert "a CPU, 2 cores, commit abc" in shown and "0.512" in shown and "not measured" in shown
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert stored == {"made_on": here, "results": {"bus": {"ratio": 0.512, "spread": [0.4, 0.6]}}}


def test_a_benchmark_that_fails_is_named_and_measured_again_the_next_time(monkeypatch, tmp_path, capsys):
    script = tmp_path / "bus.py"
    monkeypatch.setattr(bench, "HERE", tmp_path)
    script.write_text("import sys; sys.exit('out of order')")
    assert run(monkeypatch, tmp_path, "--only", "bus") == 1
    assert "bus failed" in capsys.readouterr().out
    script.write_text(
        "import json, pathlib, sys\n"
        "pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text(json.dumps({'ratio': 1.5}))\n"
    )
    assert run(monkeypatch, tmp_path, "--only", "bus", "--rounds", "1") == 0
    assert json.loads((tmp_path / "bus.json").read_text()) == {"ratio": 1.5}


def test_every_benchmark_that_it_names_is_there():
    assert all((bench.HERE / f"{name}.py").is_file() for name in bench.RATIOS)
    assert bench.RATIOS.keys() >= bench.WITH_A_MODEL
