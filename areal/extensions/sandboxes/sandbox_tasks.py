"""Tasks of sandboxes: a row's image, files and tests. README.md has the fields.

Rows of SWE-bench, SWE-smith, SWE-Gym and of sets in the same form are read as published. Their tests run under pytest,
and a plug-in of pytest writes the outcomes. A row whose tests have no names of pytest needs a `command`.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from areal.base.errors import UserError
from areal.extensions.programs.outside import SandboxError

# The folder of files for the tests, outside the repository; the repository and Python in images of SWE-bench.
PLACE, REPOSITORY, BIN = "/tmp/areal", "/testbed", "/opt/miniconda3/envs/testbed/bin"
_PATCHED = re.compile(r"^\+\+\+ b/(.+?)\s*$", re.MULTILINE)
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,499}")  # never an option of docker
_APPLY = "git apply --whitespace=nowarn"
# The history is removed, since it may hold the solution, or the change that made the mistake.
_NO_HISTORY = (
    "rm -rf .git && git init -q && git add -A && git -c user.name=areal -c user.email=areal@localhost commit -qm start"
)
_PLUGIN = """
import json
outcomes = {}
def pytest_runtest_logreport(report):
    passed = report.outcome == "passed" or hasattr(report, "wasxfail")
    if report.when == "call" or not passed:
        outcomes[report.nodeid] = outcomes.get(report.nodeid, True) and passed
def pytest_sessionfinish(session):
    with open("PLACE/outcomes.json", "w") as file:
        json.dump(outcomes, file)
""".replace("PLACE", PLACE)
# Published names of tests end at the first space.
_JUDGE = """
import json, os, subprocess, sys
os.environ["PYTHONPATH"] = os.pathsep.join(["PLACE", *filter(None, [os.environ.get("PYTHONPATH")])])
names = json.load(open("PLACE/names.json"))
files = sorted({name.split("::")[0] for name in names})
subprocess.call([sys.executable, "-m", "pytest", "-p", "areal_outcomes", "-p", "no:cacheprovider"] + files)
outcomes = json.load(open("PLACE/outcomes.json"))
def passes(name):
    found = [ok for test, ok in outcomes.items() if name in (test, test.split()[0])]
    return found and all(found)
sys.exit(not all(map(passes, names)))
""".replace("PLACE", PLACE)


# The longest time of a row's tests.
MOST_SECONDS = 86_400.0
_FOLDERS, _TEXTS = ("build", "tests_folder"), ("image", "setup", "path", "folder", "ready", "command", "reward_file")


class TaskFolder(str):
    """A folder of this machine that a task was read from. Only a source that reads tasks from folders makes one. A
    row's data may name any path, and the folder is sent to the sandbox where the row's own code runs."""

    @classmethod
    def inside(cls, task: Path, name: str) -> "TaskFolder":
        """Return the folder `name` in the folder of a task. Raises UserError if the folder is a link to elsewhere."""
        folder = (task / name).resolve()
        if not folder.is_relative_to(task.resolve()):
            raise UserError(f"The folder {name} of the task {task} is a link to {folder}: copy it there")
        return cls(folder)


class RowError(SandboxError):
    """The row is at fault: another attempt would fail as well."""

    cause = "row"


@dataclass(frozen=True)
class Task:
    """A task by the fields in README.md. isolated: the tests run in a new sandbox with a copy of `folder`, else in the
    policy's own. tests: written before `ready`, and again after the copy. reward_file None: the exit status of
    `command` is the reward. seconds None: the limit of any command."""

    image: str | None = None
    build: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None
    folder: str | None = None
    isolated: bool = False
    ready: str | None = None
    tests: Mapping[str, str] = field(default_factory=dict)
    tests_folder: str | None = None
    command: str | None = None
    reward_file: str | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Raises RowError for a field of a wrong kind: a row's data may hold anything."""
        texts = {name: getattr(self, name) for name in _TEXTS} | {**self.files} | {**self.tests}
        if wrong := [name for name, value in texts.items() if not isinstance(value, str | None)]:
            raise RowError(f"the row's {wrong[0]} is no text")
        if self.image is not None and not _IMAGE.fullmatch(self.image):
            raise RowError(f"the row's image {self.image[:80]!r} is no name of an image")
        seconds = self.seconds
        if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds <= MOST_SECONDS):
            raise RowError(f"the row's seconds are no number up to {MOST_SECONDS:.0f}")

    def check(self) -> None:
        """Raise RowError if nothing can judge the task."""
        if self.command is None:
            raise RowError("the row has no command that judges, and neither do the environment's options")
        if self.isolated and not self.folder:
            raise RowError("the tests are to run in a new sandbox, but the row names no folder that is copied there")
        if self.ready and not self.isolated:
            raise RowError("the row's tests are made ready in a new sandbox: leave out isolated=false")

    def shell(self, code: str) -> tuple[str, ...]:
        """Return the command that runs shell code."""
        return "sh", "-c", f'PATH={self.path}:"$PATH"; {code}' if self.path else code


def task_of(row: Mapping[str, Any], *, isolated: bool | None = None, **defaults: Any) -> Task:
    """Return the task of a row's fields. isolated: overrides the row. defaults: for fields that the row lacks. Raises
    RowError."""
    values = {entry.name: row[entry.name] for entry in fields(Task) if row.get(entry.name) is not None}
    if foreign := [name for name in _FOLDERS if name in values and not isinstance(values[name], TaskFolder)]:
        raise RowError(f"the row names a folder of this machine as {foreign[0]}: only tasks of harbor:FOLDER have them")
    if row.get("FAIL_TO_PASS") is not None and "command" not in values:
        values = _swe_fields(row) | values
    for name in "files", "tests", "limits":  # tables have nulls in fields that only other rows use
        if not isinstance(entries := values.get(name, {}), Mapping):
            raise RowError(f"the row's {name} are of type {type(entries).__name__}, not an object")
        values[name] = {key: value for key, value in entries.items() if value is not None}
    values = {name: value for name, value in defaults.items() if value is not None} | values
    values["isolated"] = values.get("isolated", values.get("folder") is not None) if isolated is None else isolated
    return Task(**values)


def _swe_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    names = [*_names(row, "FAIL_TO_PASS"), *_names(row, "PASS_TO_PASS")]
    if not names or not all("::" in name for name in names):
        raise RowError("the row's FAIL_TO_PASS or PASS_TO_PASS are no names of pytest: give it a command")
    patch, test_patch = row.get("patch"), row.get("test_patch")
    seeded = row.get("image_name") and not test_patch  # SWE-smith: the patch makes the mistake
    test_files = sorted({name.split("::")[0] for name in names} | {*_PATCHED.findall(test_patch or "")})
    apply = f"{_APPLY} {PLACE}/bug.patch && " if seeded else ""
    saved = f"{PLACE}/tests.tar"
    apply_tests = f"{_APPLY} {PLACE}/test.patch && " if test_patch else ""
    quoted = " ".join(map(shlex.quote, test_files))
    return {
        "image": _image(row),
        "folder": REPOSITORY,
        "path": BIN,
        "files": {f"{PLACE}/bug.patch": str(patch)} if seeded else {},
        "setup": f"cd {REPOSITORY} && {apply}{_NO_HISTORY} && rm -rf {PLACE}",
        "ready": f"cd {REPOSITORY} && {apply_tests}tar -cf {saved} {quoted}",
        "command": f"cd {REPOSITORY} && tar -xf {saved} && python {PLACE}/judge.py",
        "tests": {
            f"{PLACE}/test.patch": test_patch,
            f"{PLACE}/areal_outcomes.py": _PLUGIN,
            f"{PLACE}/judge.py": _JUDGE,
            f"{PLACE}/names.json": json.dumps(names),
        },
    }


def _names(row: Mapping[str, Any], key: str) -> Sequence[str]:
    """Return the names of tests: a list, or its JSON as in SWE-bench."""
    names = row.get(key) or []
    if isinstance(names, str):
        with suppress(ValueError):
            names = json.loads(names)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RowError(f"the row's {key} is no list of names of tests")
    return names


def _image(row: Mapping[str, Any]) -> str | None:
    """Return the image that the row names, or the image that the row's data set has published."""
    if image := row.get("image_name") or row.get("docker_image"):
        return str(image)
    name = str(row.get("instance_id", ""))
    if "environment_setup_commit" in row:
        return f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest".lower()
    return f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest".lower()
