"""Checks that a run folder has the whole record of a run."""

import structlog

from actors.master.run_state import RunState
from areal.base import extensions
from areal.base.errors import UserError
from areal.config import Config
from areal.data.prompt_sources import PromptSource
from areal.data.sources import summary_of
from areal.storage.journal import Journal, journal_copy
from areal.storage.run_files import METRICS
from areal.storage.run_folder import compare_record, keep_changes, lost_metrics

log = structlog.get_logger()


def check_record(config: Config, from_step: int | None = None, agreed: bool = False) -> list[str]:
    """Check the folder of a run to resume. Raises UserError unless the folder has the whole record of a single run with
    at most `steps` trained steps. The journal stays unchanged, so a missing log may be put back beside the journal,
    unless the run goes back to `from_step` (agreed: see `go_back`). Returns sentences on the way back, and on changes
    of the configuration."""
    if from_step is None and not (config.folder / METRICS).exists():  # the run was stopped before it began
        return []
    state, lines = _state(config), []
    if state.abandoning is None:
        compare_record(config.folder, state.journal.run, state.ledger.version)
    if from_step is not None or state.abandoning is not None:
        lines = extensions.need("ways_back", "go_back", "--from-step").load()(config, from_step, agreed)
        state = _state(config)
    ledger = state.ledger
    if config.steps < ledger.version:
        raise UserError(f"The run in {config.folder} has trained {ledger.version} steps: set steps to at least that.")
    lines += lost_metrics(config.folder, ledger.version)
    return [*lines, *keep_changes(config, ledger.state.batches_logged, state.checkpoint_version)]


def check_rows_kept(config: Config, journal: Journal, source: PromptSource) -> None:
    """Compare the rows with the rows at the run's beginning. Raises UserError if the number of rows differs, since an
    index would mean a different row; logs a warning if only the contents differ."""
    now = summary_of(source)
    at_first = journal.note("data", now) if now else now
    first_rows, rows = at_first.partition(" ")[0], now.partition(" ")[0]
    if first_rows != rows:
        raise UserError(
            f"{config.data.named} had {first_rows} rows to train on when the run in {config.folder} began, and has "
            f"{rows} now: put them back, or give the new rows another name for a fork, --fork {config.folder} "
            f"--at-step N data.source=NAME."
        )
    if at_first != now:
        log.warning("the rows differ from the rows at the run's beginning", data=config.data.named)


def _state(config: Config) -> RunState:
    with journal_copy(config.folder / "journal.db") as journal:
        return RunState(config, journal)
