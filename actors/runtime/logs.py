"""Logging: JSON lines per actor in the run folder, readable lines on the terminal."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import IO, Any

import structlog
from structlog.typing import EventDict

from areal.text import shown

_file: IO[str] | None = None


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
    path.parent.mkdir(parents=True, exist_ok=True)
    _file = path.open("a", buffering=1)


def _to_file(logger: Any, method: str, event: EventDict) -> EventDict:
    if _file is not None:
        _file.write(json.dumps(event, default=str) + "\n")
    return event


def _as_shown(logger: Any, method: str, event: EventDict) -> EventDict:
    """The texts of models and members may hold anything. Only a traceback may have several lines."""
    return {
        key: shown(value) if key == "exception" else shown(value).replace("\n", "\\n")
        for key, value in ((key, value if isinstance(value, str) else repr(value)) for key, value in event.items())
    }
