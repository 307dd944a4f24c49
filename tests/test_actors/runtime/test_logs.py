"""Log lines, which hold what models and members wrote, and the files of logs."""

import json

import pytest
import structlog

from actors.runtime import logs


@pytest.fixture
def log(tmp_path, monkeypatch):
    logging_before = structlog.get_config()
    monkeypatch.setattr(logs, "_file", None)
    yield tmp_path / "a.jsonl"
    structlog.configure(**logging_before)
    structlog.contextvars.clear_contextvars()


def test_a_text_in_a_log_line_can_neither_steer_the_terminal_nor_look_like_another_line(log, capsys):
    logs.configure_logging("generator/0")
    logs.write_log_file(log)
    evil = "\x1b]52;c;aGFjaw==\x07\n2026-01-01 [info] all is well"
    structlog.get_logger().warning("left", reason=evil, members=[evil], count=3)
    shown = capsys.readouterr().err
    assert "\x1b]" not in shown and "\x07" not in shown
    assert len(shown.splitlines()) == 1 and "count=3" in shown
    assert json.loads(log.read_text())["reason"] == evil  # the file has it as it was


def test_a_traceback_keeps_its_lines(log, capsys):
    logs.configure_logging("generator/0")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        structlog.get_logger().exception("failed")
    shown = capsys.readouterr().err
    assert "\x1b[2J" not in shown and len(shown.splitlines()) > 2


def test_a_log_file_is_bounded_and_keeps_the_newest_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LIMIT_BYTES", 4096)
    file = tmp_path / "logs" / "master-0.jsonl"
    log = logs.log_file(file)
    for number in range(1000):
        log.append([f"{number:05d}" + "." * 95 + "\n"])
    stored = [line for name in ("master-0.jsonl.1", "master-0.jsonl") for line in (file.parent / name).open()]
    assert sorted(path.name for path in file.parent.iterdir()) == ["master-0.jsonl", "master-0.jsonl.1"]
    assert sum(path.stat().st_size for path in file.parent.iterdir()) <= 2 * 4096
    assert [int(line[:5]) for line in stored] == list(range(1000 - len(stored), 1000))
