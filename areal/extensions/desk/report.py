"""Writes the report of a run: the page of the dashboard and its data in a single HTML file."""

from pathlib import Path

from areal.extensions.desk.page import PAGES, page
from areal.extensions.desk.run_view import RunView
from areal.storage.disk import replace

ROLLOUTS_SECONDS = 20.0
"""After this time the alerts read no further file of rollouts."""


def report_of(folder: Path) -> str:
    """Return the report as HTML. Raises UserError if the folder holds no run, or a damaged file."""
    view = RunView(folder)
    _ = view.record.summary  # raises for a run without summary, which the live page would show
    return page(PAGES / "run.html", view.since(rollouts_seconds=ROLLOUTS_SECONDS))


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path. Raises UserError if the folder holds no run."""
    path = folder / "report.html"
    replace(path, report_of(folder))
    return path
