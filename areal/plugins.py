"""The user's own functions and classes, named `package.module:object` in the configuration."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from areal.config import UserError


def load(path: str, what: str) -> Any:
    """The object that `path` (`package.module:object`) names; `what` says in errors what it was wanted for.

    Modules in the current working directory can be named too. Raises UserError where the path is not of this form,
    the module does not import, or it has no such object.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{what} {path!r} is not of the form package.module:object: write, say, my_module:my_function")
    try:
        module = _import(module_name)
    except Exception as error:  # importing runs the user's module, which may raise anything
        raise UserError(
            f"{what} {path!r}: importing {module_name} from {os.getcwd()} or the installed packages failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, name):
        close = difflib.get_close_matches(name, vars(module), 1)
        advice = f"did you mean {close[0]}?" if close else "correct the name or define it there"
        raise UserError(f"{what} {path!r}: {module.__file__ or module_name} has no {name}: {advice}")
    return getattr(module, name)


def _import(name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        # Last, so that no file of the user's can hide an installed package.
        sys.path.append(folder)
        importlib.invalidate_caches()
    return importlib.import_module(name)
