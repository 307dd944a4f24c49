import json

import structlog

from actors.runtime import logs


def test_a_log_file_is_bounded_and_keeps_the_newest_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LIMIT_BYTES", 4096)
    file = tmp_path / "logs" / "master-0.jsonl"
    log = logs.LogFile(file)
    for number in range(1000):
        log.write(f"{number:05d}" + "." * 95)
    log.close()
    kept = [line for name in ("master-0.jsonl.1", "master-0.jsonl") for line in (file.parent / name).open()]
    assert sorted(path.name for path in file.parent.iterdir()) == ["master-0.jsonl", "master-0.jsonl.1"]
    assert sum(path.stat().st_size for path in file.parent.iterdir()) <= 2 * 4096
    assert [int(line[:5]) for line in kept] == list(range(1000 - len(kept), 1000))


def test_log_lines_are_also_json_in_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "_file", None)
    logs.configure_logging("reward/0")
    try:
        logs.write_log_file(tmp_path / "reward-0.jsonl")
        structlog.get_logger().warning("slow", seconds=3)
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    line = json.loads((tmp_path / "reward-0.jsonl").read_text())
    assert (line["event"], line["seconds"], line["actor"]) == ("slow", 3, "reward/0")
    assert "slow" in capsys.readouterr().err
