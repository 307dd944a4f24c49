"""The master of a launched run, as a program: FOLDER ADDRESS [RUN_FOLDER].

The program starts the run of the launch in FOLDER, or resumes the run, and listens at ADDRESS, tcp://HOST:PORT. The run
folder is the parent of FOLDER by default.
"""

import os
import sys
from pathlib import Path

from areal.base.processes import START
from areal.storage.run_files import JOURNAL

# Name of the configuration in the folder of a launch.
CONFIG = "run.yaml"


def words_of(folder: Path, address: str, run: Path) -> list[str]:
    """Return the words of `run.py` that start or resume the run."""
    resume = ["--resume", str(run)] if (run / JOURNAL).exists() else []
    place = [f"master.address={address}", f"run_dir={run.parent}", f"name={run.name}"]
    return ["--role", "master", *resume, "--config", str(folder / CONFIG), *place]


if __name__ == "__main__":
    launched, at, *of = sys.argv[1:]
    launch_folder = Path(launched).absolute()
    run_folder = Path(*of).absolute() if of else launch_folder.parent
    os.execv(sys.executable, [sys.executable, START, *words_of(launch_folder, at, run_folder)])
