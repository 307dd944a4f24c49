"""Paths and downloads in a task's tests: paths outside the task's folder, and programs that download."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from areal.extensions.sandboxes.sandbox_tasks import Task

# An absolute path, not part of a relative path, of a URL, or of a path that begins with a variable.
_PATH = re.compile(r"(?<![\w.~/:$}*<>\\-])/(?:[\w.+-]+/)*[\w.+-]+")
# Folders that the image has, or that the tests bring or write themselves.
_OWN = ("/tests", "/logs", "/dev", "/proc", "/sys", "/usr", "/bin", "/sbin", "/lib", "/lib64")
_DOWNLOADS = re.compile(
    r"\b(?:apt-get|apk|pip3?|uv pip) (?:-\S+ )*(?:add|install)\b|\buvx\b|https?://(?!localhost|127\.)"
)


def path_outside(task: Task) -> str | None:
    """Return a path outside of the task's folder that the task's tests name, or None."""
    inside = [*map(PurePosixPath, (*_OWN, str(task.folder)))]
    for text in _texts(task):
        for name in _PATH.findall(text):
            path = PurePosixPath(name)
            if not any(path == folder or folder in path.parents for folder in inside):
                return str(path)
    return None


def downloads(task: Task) -> bool:
    """Return whether the task's tests seem to download."""
    scripts = [str(task.command), *(text for name, text in _files(task) if name.endswith(".sh"))]
    return any(_DOWNLOADS.search(text) for text in scripts)


def _texts(task: Task) -> Iterator[str]:
    yield str(task.command)
    yield from (text for _, text in _files(task))


def _files(task: Task) -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of the files of tests."""
    yield from task.tests.items()
    for file in sorted(Path(task.tests_folder).rglob("*")) if task.tests_folder else ():
        if file.is_file():
            yield file.name, file.read_text(encoding="utf-8", errors="replace")
