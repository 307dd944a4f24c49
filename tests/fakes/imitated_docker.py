"""A program that does what docker does for sandboxes, so far as tests need it.

A container is a folder, in which is what it calls /box, /tmp, /tests and /logs. An image is such a folder, and so is
one that can be pulled. Nothing is shut in.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PROGRAM = """#!{python} -IS
import os, pathlib, re, shutil, signal, subprocess, sys
at, command, words = pathlib.Path({at!r}), sys.argv[1], sys.argv[2:]
value = lambda option: next(word for word in words if word.startswith(option)).removeprefix(option)
with open(at / "log", "a") as log:
    log.write(" ".join([command, *words[-1:]]) + chr(10))
def end(place):
    os.kill(int((place / "process").read_text()), signal.SIGKILL)
    shutil.rmtree(place)
if command == "run":
    place = at / "containers" / value("--name=")
    shutil.copytree(at / "images" / words[-3], place)
    (place / "tmp").mkdir(exist_ok=True)
    (place / "process").write_text(str(os.getpid()))
    (place / "label").write_text(value("--label="))
    print(flush=True)
    sys.stdin.read()
    shutil.rmtree(place)
elif command == "exec":
    name, *words = [word for word in words if word != "--interactive"]
    place = at / "containers" / name
    os.environ["PATH"] = str(place / "box") + ":" + os.environ["PATH"]
    words = [re.sub("/(box|tmp|tests|logs)(?![a-z])", lambda found: str(place) + found[0], word) for word in words]
    sys.exit(subprocess.call(words) if words[-1] != "kill -9 -1" else 0)
elif command == "rm":
    for name in words[1:]:
        end(at / "containers" / name)
elif command == "ps":
    for place in (at / "containers").iterdir():
        if (place / "label").read_text() == value("--filter=label="):
            print(place.name)
elif command == "image":
    sys.exit(not (at / "images" / words[1]).is_dir())
elif command == "pull":
    if not (at / "registry" / words[-1]).is_dir():
        sys.exit("manifest unknown: " + words[-1])
    shutil.copytree(at / "registry" / words[-1], at / "images" / words[-1])
elif command == "build":
    shutil.copytree(words[-1], at / "images" / words[-2])
"""


def make_docker(folder: Path) -> Path:
    """Write the program `docker` into a folder. Returns that of its images, containers and the log of its commands."""
    at, program = folder / "engine", folder / "docker"
    for name in "images", "containers", "registry":
        (at / name).mkdir(parents=True)
    program.write_text(PROGRAM.format(python=sys.executable, at=str(at)))
    program.chmod(0o755)
    return at


def make_image(place: Path) -> Path:
    """An image that has nothing but an empty /box, which is returned."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "box").mkdir(parents=True)
    return place / "box"
