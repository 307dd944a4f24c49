"""Logging: JSON lines per actor in the run folder, readable lines on the terminal. Files of logs are bounded."""

from __future__ import annotations

import json
import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict

from areal.text import shown

# A file that has grown to this size is renamed to NAME.1, in place of an older one.
LIMIT_BYTES = 32 << 20

_file: LogFile | None = None


class LogFile:
    """A file to which lines are appended. It and the file NAME.1 keep the newest LIMIT_BYTES to twice that."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(path, maxBytes=LIMIT_BYTES, backupCount=1, encoding="utf-8")

    def write(self, line: str) -> None:
        self._handler.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        self._handler.close()


def configure_logging(name: str) -> None:
    """Set up structlog for this process. Every line has the field `actor`, which is `name`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            structlog.processors.format_exc_info,
            _to_file,
            _as_shown,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(actor=name)


def write_log_file(path: Path) -> None:
    """From now on, also append every log line to `path`, as JSON."""
    global _file
    _file = LogFile(path)


def _to_file(logger: Any, method: str, event: EventDict) -> EventDict:
    if _file is not None:
        _file.write(json.dumps(event, default=str))
    return event


def _as_shown(logger: Any, method: str, event: EventDict) -> EventDict:
    """The texts of models and members may hold anything. Only a traceback may have several lines."""
    return {
        key: shown(value) if key == "exception" else shown(value).replace("\n", "\\n")
        for key, value in ((key, value if isinstance(value, str) else repr(value)) for key, value in event.items())
    }
