"""Log lines on the terminal, which hold what models and members wrote."""

import json

import pytest
import structlog

from actors.runtime import logs


@pytest.fixture
def log(tmp_path, monkeypatch):
    before = structlog.get_config()
    monkeypatch.setattr(logs, "_file", None)
    yield tmp_path / "a.jsonl"
    structlog.configure(**before)
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
