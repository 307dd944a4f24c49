"""`areal backup`: a copy of a run folder, even during the run. The run can be resumed from the copy.

A group is in the spool before the journal says that the group is ready. Three things happen only after the journal says
that a newer checkpoint covers the steps: groups leave the spool, old checkpoints are removed, and steps are no longer
redone. So copies of rollouts, checkpoints, journal and spool, made in this order, fit together whatever is written
meanwhile, unless a checkpoint is reported in between. After such a report the copy starts again.
"""

import shutil
from argparse import Namespace
from pathlib import Path

from actors.master.run_state import RunState
from areal.base.command_line import typed
from areal.base.errors import UserError
from areal.config import Config
from areal.storage.database import copy_store
from areal.storage.disk import within
from areal.storage.journal import journal_copy
from areal.storage.records import metrics_up_to
from areal.storage.run_files import JOURNAL, METRICS, OLDER, SPOOL
from areal.storage.run_folder import config_of_run
from areal.weights.folders import atomic_folder, link

# Files of the run's processes, files that a resumed run makes again, and files with a copy of their own.
ELSEWHERE = ("address", "keys", "reserve", "weights", "*.lock", "*.tmp", ".*", f"{JOURNAL}*", f"{SPOOL}*", METRICS)
# Folders of files that are never written again: links suffice as copies.
LINKED = ("checkpoints", "rollouts", "abandoned")
ATTEMPTS = 20


class OvertakenError(Exception):
    """The run has replaced a file during the copy."""


def backup(options: Namespace) -> None:
    """Copy the folder of a run. Raises UserError without a run, for an existing copy, and if copying fails."""
    folder, copy = options.folder.absolute(), options.copy.absolute()
    config: Config = config_of_run(folder, secrets=True)
    if not (folder / JOURNAL).is_file():
        raise UserError(f"There is no run in {folder} that could be resumed from a copy: it has no {JOURNAL}.")
    if copy.exists():
        raise UserError(f"{copy} exists: name a new folder for the copy.")
    for attempt in range(ATTEMPTS):
        try:
            with atomic_folder(copy) as partial:
                version = _fill(config, folder, partial)
            break
        except (OvertakenError, FileNotFoundError, shutil.Error) as error:  # a file that was removed meanwhile
            if attempt == ATTEMPTS - 1:
                raise UserError(f"{folder} cannot be copied to {copy}: {error}.") from error
    print(f"The run with its {version} steps is in {copy}: {typed(f'run --resume {copy}')} goes on from it.")


def _fill(config: Config, folder: Path, copy: Path) -> int:
    """Copy the run into an empty folder. Returns the copied version."""
    older = folder / OLDER[METRICS]
    number = older.exists() and older.stat().st_ino
    pictures = config.pictures_folder.name
    # A link stays a link: the maker of the folder must not choose which files of this user are in the copy.
    ignored = shutil.ignore_patterns(*ELSEWHERE, *LINKED, pictures)
    shutil.copytree(folder, copy, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    copy.chmod(0o700)  # a run folder holds completions, and perhaps secrets
    checkpoint_version = _state(config, folder / JOURNAL).checkpoint_version  # after the logs, which may be large
    for name in LINKED:
        _link_files(folder, copy, name)
    state = _state(config, folder / JOURNAL, copy)
    if (folder / SPOOL).exists():  # else the spool is on the trainer's host
        copy_store(folder / SPOOL, copy)
    _link_files(folder, copy, pictures)  # after the spool: a picture is on disk before its group is in the spool
    if _state(config, folder / JOURNAL).checkpoint_version != checkpoint_version:
        raise OvertakenError("a checkpoint was saved meanwhile; stop the run first")
    # The journal was copied before, and must not be older than the metrics.
    (copy / METRICS).write_bytes(metrics_up_to(folder / METRICS, state.ledger.version))
    if (older.exists() and older.stat().st_ino) != number:
        raise OvertakenError(f"{older} was replaced meanwhile; stop the run first")
    return state.ledger.version


def _link_files(folder: Path, copy: Path, name: str) -> None:
    """Copy a folder in `folder`, if it exists, by links to the files."""
    if (folder / name).exists():
        source, ignored = within(folder / name, folder), shutil.ignore_patterns(*ELSEWHERE)
        shutil.copytree(source, copy / name, symlinks=True, copy_function=link, ignore=ignored)


def _state(config: Config, journal: Path, copy: Path | None = None) -> RunState:
    """Return the state in a journal that may be in use. copy: a folder for a copy of the journal."""
    with journal_copy(journal, copy) as opened:
        return RunState(config, opened)
