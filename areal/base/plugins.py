"""Loads the user's own functions and classes, which the configuration names: `package.module:object`, or a file."""

import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from areal.base.errors import UserError, explain
from areal.base.text import shown

# Code in a configuration: a file or module with an object, or, under the key `command`, a program. The excluded
# beginnings name data and addresses instead.
_OBJECT = re.compile(r"(?!(?:hf|harbor|reasoning_gym|verifiers|paper|tcp|https?):)[\w./~-]+:[A-Za-z_]\w*")


def load(path: str, what: str) -> Any:
    """Return the object that `path` names, as `package.module:object` or `path/to/file.py:object`.

    Modules and file paths are also looked up from the current working directory. `what` names `path` in messages.
    Raises UserError if the path is not of this form, the module does not import, or the module has no such object.
    """
    module_name, colon, name = path.rpartition(":")
    if not (colon and module_name and name):
        raise UserError(f"{what} {path!r} is not of the form package.module:object: write, say, my_module:my_function")
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise UserError(f"{what} {path!r}: there is no file {Path(module_name).absolute()}: correct the path")
    module = _module_of(module_name, f"{what} {path!r}")
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, vars(module), 1)
        advice = f"did you mean {close[0]}?" if close else "correct the name or define it there"
        raise UserError(f"{what} {path!r}: {module.__file__ or module_name} has no {name}: {advice}")
    return getattr(module, name)


def announce_code(folder: Path, values: Any, trust: bool, stranger: bool = False) -> None:
    """Print the names of the user's code in a run's configuration, before any of the code runs.

    values: the configuration. trust: the user has said that the code may run. stranger: somebody else made the folder,
    whoever owns its files. A person at the terminal is asked if the folder is another user's and `trust` is False.
    Raises UserError if the code may not run.
    """
    names = ", ".join(dict.fromkeys(map(shown, _code_in(values))))
    if not names:
        return
    what = f"{folder / 'config.yaml'} names code that runs with your rights: {names}"
    print(f"Note: {what}.", file=sys.stderr)
    if trust or (folder.stat().st_uid == os.geteuid() and not stranger):
        return
    if not (sys.stdin.isatty() and input("The folder is another user's. Run it? [y/N] ").lower() in ("y", "yes")):
        raise UserError(f"The folder is another user's, and {what}: read it, then repeat the command with --trust.")


def _code_in(values: Any, key: str = "") -> Iterator[str]:
    match values:
        case dict():
            for name, value in values.items():
                yield from _code_in(value, str(name))
        case list():
            for value in values:
                yield from _code_in(value, key)
        case str() if key == "command" or _OBJECT.fullmatch(values):
            yield values


def _module_of(name: str, what: str) -> ModuleType:
    """Import a module of the user's. what: the module's name in messages. Raises UserError if the import fails."""
    # Importing runs the user's module, which may raise anything.
    with explain(
        (Exception, SystemExit),
        f"{what}: importing {name} from {os.getcwd()} or the installed packages failed with {{why}}",
    ):
        try:
            return _import(name)
        except ModuleNotFoundError as error:
            if error.name is None or f"{name}.".startswith(f"{error.name}."):
                raise
            cause = error
    raise UserError(
        f"{what}: {name} imports {cause.name}, which {sys.executable} does not have: install the package that has it"
    ) from cause


def _import(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        # At the end: no file of the user may shadow an installed package.
        sys.path.append(folder)
        importlib.invalidate_caches()
    return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    """Import the file, as a module with the full path as its name, which shadows no other module."""
    name = str(file.absolute())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # the file's name ends in .py
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
