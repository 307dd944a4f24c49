"""Checks that load an engine's library, each in its own process."""

import subprocess
import sys
import textwrap

from areal.base.errors import UserError, explain
from areal.base.processes import ROOT, tied

# The longest time in which an engine's library loads: 6 s on an idle machine.
ENGINE_SECONDS = 300.0
_IN_A_PROCESS = """
import sys
from areal.base.errors import UserError
try:
{}
except UserError as error:
    sys.exit(str(error))
"""


def check_apart(code: str, *arguments: str, what: str, remedy: str) -> None:
    """Run `code` in a child process, because an engine would stay in this process's memory. what: the engine, in
    messages. Raises UserError with the sentence of the UserError that `code` raises."""
    command = tied(sys.executable, "-c", _IN_A_PROCESS.format(textwrap.indent(code, "    ")), *arguments)
    with explain(
        subprocess.TimeoutExpired,
        f"{what} did not load within {ENGINE_SECONDS:g} s: {remedy}, or start the run on a machine that is less busy.",
    ):
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=ENGINE_SECONDS)
    if process.returncode:
        raise UserError((process.stderr.strip() or f"{what} exited with {process.returncode}.").splitlines()[-1])
