"""The record of a run as one thing: whether a run folder has all of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from actors.parts.run_state import RunState
from areal.config import Config, UserError
from areal.storage.database import copy_store
from areal.storage.journal import Journal
from areal.storage.run_folder import compare_record, keep_changes


def check_record(config: Config) -> list[str]:
    """Raises UserError if what the folder of a run to resume has is not the whole record of one run, or if it has
    trained more than `steps`. The journal is not changed, so that a missing log may be put back beside it. Returns what
    is changed in the configuration, in words, once the folder has it."""
    original = config.folder / "journal.db"
    with TemporaryDirectory() as folder:
        state = state_of(config, copy_store(original, Path(folder)), original)
    ledger = state.ledger
    compare_record(config.folder, state.journal.run, ledger.version)
    if config.steps < ledger.version:
        raise UserError(f"The run in {config.folder} has trained {ledger.version} steps: set steps to at least that.")
    return keep_changes(config, ledger.batches_logged, state.checkpoint_version)


def state_of(config: Config, file: Path, original: Path) -> RunState:
    """The state in a copy of a journal. Raises UserError if it is damaged, which names the original."""
    journal = Journal.open(file, original)
    try:
        return RunState(config, journal)
    finally:
        journal.close()
