"""`areal stop`: what becomes of the processes of a run."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest
from support.small_runs import ten_steps

from actors.watching.machine_runs import RunHere, stop_run
from areal.config import dump_config

PROGRAM = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("suspended", [False, True])
def test_a_run_is_stopped_in_order_also_if_it_is_suspended(tmp_path, suspended):
    (tmp_path / "config.yaml").write_text(dump_config(ten_steps()))
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        if suspended:
            process.send_signal(signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                pass
        assert stop_run(RunHere(tmp_path, process.pid, "", 0.0)) == []
        assert process.wait(60) == 0
