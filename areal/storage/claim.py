"""The claim of a run on its folder. The process that starts a run holds the claim until the process ends.

The claim is a lock on the file `address` in the folder, which has the address of the run's master. A second run cannot
take the folder, and roles that a user starts on this machine find the master by the folder.
"""

import errno
import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

from areal.base.errors import UserError, explain
from areal.storage.database import try_lock
from areal.storage.disk import RESERVE_BYTES, free_bytes, mebibytes, refusal, shortage

ADDRESS = "address"
# A killed process of a run may take a moment to exit, and so may a process that looks whether a run goes on.
LOCK_ATTEMPTS = 20
# Keys, configuration, journal, spool, logs and the reserve. Weights and checkpoints wait for room.
ROOM_BYTES = 2 * RESERVE_BYTES
_ELSEWHERE = "choose another run_dir"


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest existing folder above."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def can_be_made(folder: Path) -> bool:
    """Whether the folder, or a file in an existing folder, can be made. This is tried: root has all rights in /proc."""
    forbidden = errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS
    return getattr(refusal(nearest_existing(folder)), "errno", None) not in forbidden


def check_room(folder: Path, resume: bool) -> None:
    """Raise UserError if the disk of the run folder (to be made) has no room for the first files of a run."""
    there = nearest_existing(folder)
    cause = shortage(refusal(there, ROOM_BYTES), there)
    if cause is not None:
        raise UserError(
            f"The disk of {folder} does not take the {mebibytes(ROOM_BYTES)} that a run needs there to begin (it is "
            f"{cause}, with {mebibytes(free_bytes(there))} free): free some room there, or "
            f"{'move the run to another disk' if resume else 'choose another run_dir'}."
        )


def check_free(folder: Path, resume: bool) -> None:
    """Raise UserError if `claim` would; print the place where `claim` would move an earlier run. Nothing is changed."""
    if claimed_address(folder) is not None:
        raise _in_progress(folder)
    if not can_be_made(folder):
        there = nearest_existing(folder)
        raise UserError(f"The run folder {folder} cannot be used (no folder can be made in {there}): {_ELSEWHERE}.")
    if not resume and (folder / "metrics.jsonl").exists():
        print(f"Note: there is a run in {folder}; the start of this one moves it to {_aside(folder)}.", file=sys.stderr)


def claim(folder: Path, resume: bool = False) -> int:
    """Make the folder of a run, or take the folder of a run to resume. An earlier run is not overwritten: its folder is
    renamed to NAME.1, NAME.2, ... Only this user may enter the folder, which has keys and completions, whatever its
    mode was.

    Returns the descriptor of the claim. Raises UserError if another process has the claim, or if no folder can be made.
    """
    while True:
        with explain(OSError, f"The run folder {folder} cannot be used ({{strerror}}): {_ELSEWHERE}."):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _open(folder)
        if lock is None:
            continue
        if not try_lock(lock, folder / ADDRESS, LOCK_ATTEMPTS):
            os.close(lock)
            raise _in_progress(folder)
        if _is_same_file(lock, folder / ADDRESS):  # else another run has moved the folder aside meanwhile
            if resume or not (folder / "metrics.jsonl").exists():  # without metrics.jsonl no run has begun here
                os.truncate(lock, 0)
                return lock
            aside = _aside(folder)
            folder.rename(aside)
            print(f"Note: the earlier run of {folder} is now in {aside}.", file=sys.stderr)
        os.close(lock)


def _in_progress(folder: Path) -> UserError:
    return UserError(f"The run in {folder} is in progress: wait for its end, or give this run another name, name=NAME.")


def _open(folder: Path) -> int | None:
    """Open the file of the claim; None if another run has moved the folder aside just now."""
    with suppress(FileNotFoundError):
        folder.chmod(0o700)
        return os.open(folder / ADDRESS, os.O_CREAT | os.O_RDWR, 0o600)
    return None


def announce(lock: int, address: str) -> None:
    """Put the master's address into the claimed folder, for roles on this machine. `lock`: the result of `claim`."""
    os.pwrite(lock, f"{address}\n".encode(), 0)


def claimed_address(folder: Path) -> str | None:
    """Return the address of the run's master; None while no run is in progress, or none has announced the address."""
    try:
        file = os.open(folder / ADDRESS, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(file, 1024).decode().strip() or None
    except OSError:  # a file system without locks: no run can be in progress
        return None
    finally:
        os.close(file)
    return None


def _aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return aside


def _is_same_file(lock: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), path.stat())
    return False
