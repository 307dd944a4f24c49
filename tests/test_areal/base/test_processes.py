"""What a process does to itself at its start."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from areal.base.processes import LenientOutput, torchrun


def test_the_limit_on_open_files_rises_to_what_is_allowed_and_no_further():
    script = (
        "import resource as r; from areal.base.processes import raise_open_files\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 700)); raise_open_files(); print(*r.getrlimit(r.RLIMIT_NOFILE))\n"
        "raise_open_files(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["700", "700"] * 2
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] != 700


def test_a_program_whose_parent_ended_while_it_started_does_not_stay():
    starts = "import subprocess as s; from areal.base.processes import tied; print(*tied('sleep', '600'), sep='\\n')"
    command = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, check=True).stdout
    late = subprocess.run(command.splitlines(), capture_output=True, text=True, timeout=60)
    assert late.returncode == 1
    assert "the process that started this one has ended" in late.stderr


def test_a_program_ends_with_its_parent():
    script = (
        "import os, subprocess as s; from areal.base.processes import tied\n"
        "s.Popen(tied('sh', '-c', 'echo started; exec sleep 600'))\n"
        "input(); os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"started\n"
        # The output is at its end when whoever holds it has ended: the program as well.
        parent.communicate(b"\n", timeout=60)


def test_a_process_that_outlives_sigterm_ends_with_its_leader_even_while_it_runs_no_python():
    waits = "; import ctypes; print('ready', flush=True)"
    waits += "\nwhile True: ctypes.CDLL(None).pause()"
    leader = subprocess.Popen(["sleep", "600"])
    script = f"from areal.base.processes import outlive_sigterm; outlive_sigterm({leader.pid}){waits}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        leader.kill()
        leader.wait()
        assert process.wait(60) == 1


def test_torchrun_opens_no_port_but_that_at_which_the_ranks_meet(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\nfrom pathlib import Path\n"
        "files = Path(f'/proc/{os.getppid()}/fd').iterdir()\n"
        "opened = {os.readlink(file) for file in files if file.is_socket()}\n"  # others may be closed meanwhile
        "lines = [line.split() for name in ('tcp', 'tcp6') for line in open(f'/proc/net/{name}')]\n"
        "own = [int(w[1].split(':')[-1], 16) for w in lines if w[3] == '0A' and f'socket:[{w[9]}]' in opened]\n"
        "listens = own == [int(os.environ['MASTER_PORT'])]\n"
        "os.write(1, f'listens {listens} {os.environ[\"WORLD_SIZE\"]}\\n'.encode())\n"  # in one piece
    )
    ran = subprocess.run([*torchrun(2), str(script)], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == ["listens True 2"] * 2, ran.stderr


def test_an_output_on_a_full_disk_raises_nothing_unless_its_text_must_not_be_lost():
    with open("/dev/full", "w") as full, open(os.devnull, "w") as nowhere:
        output = LenientOutput(full)
        output.write("x" * 100_000)
        output.flush()
        with pytest.raises(OSError, match="No space left"):
            LenientOutput(full, reader_only=True).write("x" * 100_000)
        os.dup2(nowhere.fileno(), full.fileno())  # for what is in the buffers when it is closed


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict"])
def test_a_character_that_the_encoding_of_the_output_lacks_ends_no_program(encoding):
    script = "import sys; from areal.base.processes import LenientOutput as L; print('a \\u2192 b', file=L(sys.stdout))"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a ? b\n", b"")
