"""The master of a launched run, as a program: FOLDER ADDRESS.

It starts the run whose launch is in FOLDER, or resumes it if it has begun; it listens at ADDRESS, tcp://HOST:PORT.
"""

import os
import sys
from pathlib import Path

from areal.base.processes import START
from areal.storage.run_files import JOURNAL

# Name of the configuration in the folder of a launch.
CONFIG = "run.yaml"


def words_of(folder: Path, address: str) -> list[str]:
    """The words of `run.py` that start or resume the run."""
    run = folder.parent
    resume = ["--resume", str(run)] if (run / JOURNAL).exists() else []
    place = [f"master.address={address}", f"run_dir={run.parent}", f"name={run.name}"]
    return ["--role", "master", *resume, "--config", str(folder / CONFIG), *place]


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, START, *words_of(Path(sys.argv[1]).absolute(), sys.argv[2])])
