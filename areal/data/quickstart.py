"""The place of the quickstart's model: made once for a user, and copied for each folder of runs."""

import fcntl
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from areal.base.errors import explain
from areal.base.processes import cache_folder
from areal.models import quickstart_folder


def make(options: Namespace) -> None:
    """`areal quickstart-model`."""
    with explain(OSError, f"{options.folder} cannot hold a model ({{strerror}}): name another folder."):
        options.folder.mkdir(parents=True, exist_ok=True)
    print(ensure(options.folder, options.seed, lambda line: print(line, file=sys.stderr, flush=True)))


def ensure(parent: Path, seed: int = 0, progress: Callable[[str], None] | None = None) -> Path:
    """Return the model's folder in `parent`, by a copy from the user's cache if missing. The cache's model is built
    once, while other processes wait. If the cache cannot be written, the model is built in place."""
    folder = quickstart_folder(parent, seed)
    if folder.exists():
        return folder

    def make_whole(folder: Path) -> None:
        from areal.data.warm_start import build  # imports torch, which a copy does without

        with _complete(folder) as unfinished:
            build(unfinished, seed, progress)

    original = quickstart_folder(cache_folder() / "areal", seed)
    try:
        original.parent.mkdir(parents=True, exist_ok=True)
        lock = original.with_suffix(".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or this process killed
    except OSError as error:
        if progress:
            progress(f"the model is not kept for other runs: {error}")
        make_whole(folder)
        return folder
    with lock:
        if not original.exists():
            make_whole(original)
        if not folder.exists():  # another process may have waited for the same model
            with _complete(folder) as unfinished:
                shutil.copytree(original, unfinished, dirs_exist_ok=True)
    return folder


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `folder` once the block has ended without an exception."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
