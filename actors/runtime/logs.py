"""Logging: JSON lines per actor in the run folder, readable lines on the terminal. Files of logs are bounded."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict

from areal.base.text import shown
from areal.storage.disk import Backlog

# A file of this size is renamed to NAME.1, in place of an older NAME.1.
LIMIT_BYTES = 32 << 20

_file: Backlog | None = None


def log_file(path: Path) -> Backlog:
    """A file that takes lines. The file and NAME.1 together keep the newest LIMIT_BYTES to twice as much. Lines that a
    full disk refuses are written later."""
    file = Backlog(path, path.with_name(f"{path.name}.1"), LIMIT_BYTES)
    file.append([])  # the file is there from the start, even if nothing is logged
    return file


def configure_logging(name: str, level: int = logging.INFO) -> None:
    """Set up structlog for this process. Every line has the field `actor` with the value `name`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            structlog.processors.format_exc_info,
            _to_file,
            _as_shown,
            _rendered,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(actor=name)


def write_log_file(path: Path) -> None:
    """From now on, also append every log line to `path`, as JSON."""
    global _file
    _file = log_file(path)


def _to_file(logger: Any, method: str, event: EventDict) -> EventDict:
    if _file is not None:
        _file.append([f"{json.dumps(event, default=str)}\n"])
    return event


def _as_shown(logger: Any, method: str, event: EventDict) -> EventDict:
    """The texts of models and members may hold anything. Only a traceback may have several lines."""
    return {
        key: shown(value) if key == "exception" else shown(value).replace("\n", "\\n")
        for key, value in ((key, value if isinstance(value, str) else repr(value)) for key, value in event.items())
    }


def _rendered(logger: Any, method: str, event: EventDict) -> str:
    """The line for the terminal."""
    return str(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)(logger, method, event))
