"""What several tests look at."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import json
import math
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import zmq

from areal.config import Config
from areal.samples.trajectory import Branch, Group, Trajectory
from areal.storage.spool import Spool, SpoolPart
from protocols.network import ZmqNetwork
from protocols.security import Keys, make_keys

T = TypeVar("T")

needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urpfnm", "--mount-proc", "true"], capture_output=True).returncode != 0,
    reason="user namespaces are forbidden here, as they often are in containers",
)


def ten_steps(**more: Any) -> Config:
    """The configuration of a run of ten steps of two groups. more: sections in place of these."""
    values = {
        "model": "m",
        "steps": 10,
        "batch_size": 2,
        "group_size": 2,
        "sampling": {"max_new_tokens": 8},
        "data": {"source": "addition", "eval_size": 0},
        "reward": {"functions": ["addition"]},
        "trainer": {"minibatches": 1},
    }
    return Config.model_validate(values | more)


SHORT = """
class Short:
    def __init__(self, characters):
        self.characters = characters

    async def score(self, prompt, completion, row):
        return 1 / (self.characters + len(completion))
"""

# Programs that are run in sandboxes: each `make test` draws another eighth of them.
an_eighth_or_all = pytest.mark.parametrize(
    "share", [pytest.param(1 / 8, id="an eighth"), pytest.param(1.0, id="all", marks=pytest.mark.slow)]
)


def drawn(programs: dict[str, T], share: float) -> dict[str, T]:
    """A share of the programs, drawn from each kind of them; the kind of a program is the first word of its name, and
    kinds of fewer than four are one. Where a test fails with one, it says its name."""
    sizes = Counter(name.split()[0] for name in programs)
    kinds: dict[str, list[str]] = {}
    for name in programs:
        kind = name.split()[0]
        kinds.setdefault(kind if sizes[kind] >= 4 else "", []).append(name)
    names = (random.sample(names, math.ceil(share * len(names))) for names in kinds.values())
    return {name: programs[name] for name in itertools.chain.from_iterable(names)}


def put(spool: Spool, group: Group, place: int = 0, size: int = 0) -> Group | None:
    """Store samples of a group from `place` on. size: that of the group; 0: it has just these."""
    parts = {
        place + n: SpoolPart(replace(group, trajectories=(sample,), notes=group.notes[n : n + 1]), sample.frame())
        for n, sample in enumerate(group.trajectories)
    }
    return spool.put_all(parts, size or len(parts))


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    command: str


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills, in the first of pytest-xdist's processes that asks for it. The others wait."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, partial = shared / name, shared / f"{name}.partial"
    with (shared / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@contextlib.contextmanager
def mounted_small_disk(folder: Path, inodes: int) -> Iterator[None]:
    """A disk of 1 MiB is mounted at `folder`, where this user may mount one. Otherwise the test is skipped."""
    command = ["mount", "-t", "tmpfs", "-o", f"size=1m,nr_inodes={inodes}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(folder: Path) -> Path:
    """Fill the disk to its last byte. Returns the file that does."""
    with (folder / "hog").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size = 0
    return folder / "hog"


def use_up_inodes(folder: Path) -> list[Path]:
    """Returns the files that do."""
    files: list[Path] = []
    while True:
        try:
            (folder / f"inode{len(files)}").touch(exist_ok=False)
        except OSError:
            return files
        files.append(folder / f"inode{len(files)}")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def keys_folder() -> str:
    """The keys of all networks of a test, also in the processes that it starts."""
    if "KEYS_OF_TESTS" not in os.environ:
        os.environ["KEYS_OF_TESTS"] = folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        make_keys(Path(folder))
    return os.environ["KEYS_OF_TESTS"]


@functools.cache
def keys() -> Keys:
    return Keys(Path(keys_folder()))


def network() -> ZmqNetwork:
    return ZmqNetwork(keys())


def dealer(context: zmq.Context, address: str) -> zmq.Socket:
    """A socket with the keys and without a bus, connected."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    keys().connect(socket, keys().generations[0])
    socket.connect(address)
    return socket


def processes() -> list[Process]:
    """All that run now."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            status = (folder / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        # The name in brackets may hold anything; state and parent follow it.
        results.append(Process(int(folder.name), int(status.rpartition(")")[2].split()[1]), command))
    return results


def processes_mentioning(word: str) -> list[str]:
    """Command lines of all processes that contain `word`."""
    return [process.command for process in processes() if word in process.command]


def descendants(pid: int) -> list[Process]:
    """What a process has started, and what that has started."""
    below, everything = [], processes()
    parents = {pid}
    while results := [p for p in everything if p.parent in parents]:
        below += results
        parents = {p.pid for p in results}
    return below


def check_adapters(folder: Path, model: Path, checkpoint: str) -> None:
    """They alone are published; the last checkpoint is a whole model, which differs from the first where they are."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    published = list((folder / "weights").glob("*/*.safetensors"))
    assert {path.name for path in published} == {"adapter_model.safetensors"}
    assert all(path.stat().st_size < 40_000 for path in published)  # the model has 3 MB
    AutoModelForCausalLM.from_pretrained(checkpoint)
    weights_before, weights_after = (load_file(Path(of, "model.safetensors")) for of in (model, checkpoint))
    changed = {name for name in weights_before if not weights_before[name].equal(weights_after[name])}
    assert changed == {name for name in weights_before if "q_proj" in name or "v_proj" in name}


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# A prompt 0 1 and two answers, of which the second branches off within the first; then a conversation of its own.
BRANCHED = Trajectory(
    tokens=np.array([0, 1, 2, 3, 7, 8, 9, 5], np.int32),
    logprobs=np.array([0, 0, -2, -3, 0, -8, 0, -5], np.float32),
    versions=np.array([-1, -1, 4, 4, -1, 5, -1, 3], np.int32),
    reward=1.0,
    finish="stop",
    branches=(Branch(0, 4), Branch(3, 2), Branch(0, 2)),
    returns=np.arange(8.0),
    teacher_logprobs=np.array([0, 0, -1, -2, 0, -3, 0, -4], np.float32),
    reference_logprobs=np.array([0, 0, -4, -3, 0, -2, 0, -1], np.float32),
    teacher_top_tokens=np.array([(0, 0), (0, 0), (2, 7), (5, 6), (0, 0), (8, 1), (0, 0), (9, 5)], np.int32),
    teacher_top_logprobs=np.array([(0, 0), (0, 0), (-1, -2), (-2, -3), (0, 0), (-1, -4), (0, 0), (-1, -5)], np.float32),
    routes=np.array([(0, 0), (0, 0), (1, 0), (3, 1), (0, 0), (0, 255), (0, 0), (2, 1)], np.uint8),
    pictures=np.repeat(np.array([[0], [7], [0], [0], [0], [0], [255], [0]], np.uint8), 16, 1),
)
