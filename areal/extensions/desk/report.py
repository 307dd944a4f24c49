"""Writes the report of a run: the page of the dashboard with its data inside, in one HTML file."""

from pathlib import Path

from areal.extensions.desk.page import PAGES, page
from areal.extensions.desk.run_view import RunView
from areal.storage.disk import replace

ROLLOUTS_SECONDS = 20.0
"""No further file of rollouts is read for the alerts after this time."""


def report_of(folder: Path) -> str:
    """The report, as HTML. Raises UserError if the folder holds no run, or one of its files is damaged."""
    view = RunView(folder)
    _ = view.record.summary  # the live page shows a run without it, a report is to have it
    return page(PAGES / "run.html", view.since(rollouts_seconds=ROLLOUTS_SECONDS))


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path. Raises UserError if the folder holds no run."""
    path = folder / "report.html"
    replace(path, report_of(folder))
    return path
