"""What a process does to itself at its start."""

from __future__ import annotations

import resource
import subprocess
import sys


def test_the_limit_on_open_files_rises_to_what_is_allowed_and_no_further():
    script = (
        "import resource as r; from areal.processes import raise_open_files\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 700)); raise_open_files(); print(*r.getrlimit(r.RLIMIT_NOFILE))\n"
        "raise_open_files(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["700", "700"] * 2
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] != 700
