#!/usr/bin/env python3
"""The kit for a machine without internet.

    python tests/gpu/offline.py --collect FOLDER [--python 3.12] [--have FREEZE] [--piece MB] [--dry-run]
    python3 FOLDER/offline.py [the kit's arguments]             # there, with the same Python

The first command needs uv. It downloads into FOLDER what `make setup` installs for GPUs on Linux, x86-64, without what
the file FREEZE names (`pip freeze` of the other machine, whose packages are then used), and adds the project. Files are
cut into pieces. A file that is there is not downloaded again. The second command joins and verifies them, installs them
into FOLDER/venv, and runs the kit; it needs nothing but Python, its venv and headers, and a C++ compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

CONTENTS = "contents.json"
PROJECT = "areal.tar.gz"
BLOCK = 1 << 20
SECONDS = 60.0  # without a byte of a download
# uv alone would take 12.6 for flashinfer, whose files overwrite those of cuda-bindings 13.
CONSTRAINTS = "cuda-python>=13\n"
PLATFORM = "x86_64-manylinux_2_34"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--collect", type=Path, metavar="FOLDER", help="collect into this folder, in place of running the kit")
    add("--python", default="3.12", help="version of the other machine's Python (default: 3.12)")
    add("--have", type=Path, metavar="FREEZE", help="what the other machine has already: its `pip freeze`")
    add("--piece", type=float, default=1000.0, metavar="MB", help="most bytes of a piece (default: 1000 MB)")
    add("--dry-run", action="store_true", help="say what would be downloaded")
    options, remainder = parser.parse_known_args()
    if options.collect is None:
        return run(Path(__file__).resolve().parent, remainder)
    if remainder:
        parser.error(f"unrecognized arguments: {' '.join(remainder)}")
    expected = list(missing(resolve(options.python), options.have.read_text() if options.have else ""))
    for file in expected:
        print(f"{file['size'] / 1e6:9.1f} MB  {file['name']}")
    print(f"{sum(file['size'] for file in expected) / 1e6:9.1f} MB  in {len(expected)} files")
    if not options.dry_run:
        collect(options.collect, expected, int(options.piece * 1e6), options.python, bool(options.have))
    return 0


def resolve(python: str) -> list[dict[str, Any]]:
    """All packages that the project needs on GPUs, as a lock file (PEP 751) has them."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise SystemExit("There is no uv: install it, `pip install uv`.")
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        constraints, lock = Path(folder, "constraints.txt"), Path(folder, "pylock.toml")
        constraints.write_text(CONSTRAINTS)
        command = [
            uv,
            "pip",
            "compile",
            str(root / "pyproject.toml"),
            "--extra",
            "cuda",
            "--constraints",
            str(constraints),
            "--python-platform",
            PLATFORM,
            "--python-version",
            python,
            "--format",
            "pylock.toml",
            "--output-file",
            str(lock),
        ]
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if process.returncode:
            raise SystemExit(f"uv finds no set of packages: {process.stderr.strip()}")
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text())["packages"]
    return packages


def missing(packages: Iterable[dict[str, Any]], freeze: str) -> Iterator[dict[str, Any]]:
    """name, url, size and sha256 of a wheel of each package, or of its source, unless `freeze` has this version."""
    there = {line.strip().lower().replace("_", "-") for line in freeze.splitlines()}
    for package in packages:
        if f"{package['name']}=={package['version']}" in there:
            continue
        file = (package.get("wheels") or [package["sdist"]])[0]
        name = file["url"].rsplit("/", 1)[-1]
        yield {"name": name, "url": file["url"], "size": file["size"], "sha256": file["hashes"]["sha256"]}


def collect(folder: Path, packages: list[dict[str, Any]], piece: int, python: str, has_some: bool) -> None:
    """Download the files in pieces of at most `piece` bytes, and write what a machine without internet needs beside."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    subprocess.run(["git", "-C", root, "archive", "--output", folder.resolve() / PROJECT, "HEAD"], check=True)
    for file in packages:
        file["pieces"] = download(folder, file, piece)
    contents = {"python": python, "has_some": has_some, "files": packages}
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n")
    shutil.copy(__file__, folder)


def download(folder: Path, file: dict[str, Any], piece: int) -> list[str]:
    """The names of the pieces. Those that an earlier call has written are kept, if all are there and right."""
    count = max(1, -(-file["size"] // piece))
    names = [file["name"]] if count == 1 else [f"{file['name']}.{number:03d}" for number in range(count)]
    paths = [folder / name for name in names]
    if all(path.exists() for path in paths) and digest(paths) == file["sha256"]:
        return names
    with urllib.request.urlopen(file["url"], timeout=SECONDS) as source:
        for path in paths:
            with path.open("wb") as target:
                copy(source, target, piece)
    if digest(paths) != file["sha256"]:
        raise SystemExit(f"The download of {file['name']} is damaged: start again.")
    return names


def copy(source: BinaryIO, target: BinaryIO, limit: int) -> None:
    while limit > 0 and (block := source.read(min(BLOCK, limit))):
        target.write(block)
        limit -= len(block)


def digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the files one after another, hexadecimal."""
    hash_so_far = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                hash_so_far.update(block)
    return hash_so_far.hexdigest()


def run(folder: Path, arguments: list[str]) -> int:
    """Install what is in `folder`, once, and run the kit. Returns its exit code."""
    contents = json.loads((folder / CONTENTS).read_text())
    if f"{sys.version_info.major}.{sys.version_info.minor}" != contents["python"]:
        raise SystemExit(f"These packages are for Python {contents['python']}: start this with it.")
    shutil.unpack_archive(folder / PROJECT, folder / "areal")  # each time: a newer one may have come
    python, marker = folder / "venv" / "bin" / "python", folder / "venv" / "installed"
    if not marker.exists():
        files = [joined(folder, file) for file in contents["files"]]
        options = ["--system-site-packages"] if contents["has_some"] else []
        subprocess.run([sys.executable, "-m", "venv", "--clear", *options, folder / "venv"], check=True)
        sources = [file for file in files if file.suffix != ".whl"]  # built here, with the packages of the wheels
        for what in ([file for file in files if file.suffix == ".whl"], [*sources, "--editable", folder / "areal"]):
            install = [python, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
            subprocess.run([*install, *what], check=True, env=os.environ | {"PIP_CONFIG_FILE": os.devnull})
        marker.touch()
    kit = folder / "areal" / "tests" / "gpu" / "kit.py"
    return subprocess.run([python, kit, "--folder", folder / "kit", *arguments]).returncode


def joined(folder: Path, file: dict[str, Any]) -> Path:
    """The whole file, verified. Pieces are removed as soon as it is there."""
    joined_file, pieces = folder / file["name"], [folder / name for name in file["pieces"]]
    if not joined_file.exists():
        for path in pieces:
            if not path.exists():
                raise SystemExit(f"{path} is missing.")
        with joined_file.with_suffix(".part").open("wb") as target:
            for path in pieces:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, target, BLOCK)
        joined_file.with_suffix(".part").rename(joined_file)
    if digest([joined_file]) != file["sha256"]:
        joined_file.unlink()
        raise SystemExit(f"{joined_file} is damaged: copy it, or its pieces, again.")
    for path in pieces:
        if path != joined_file:
            path.unlink(missing_ok=True)
    return joined_file


if __name__ == "__main__":
    sys.exit(main())
