"""The order of the checks of a trainer and a generator. Their processes share the devices as in a run."""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from areal.config import Config
from areal.extensions.selftest.child import CheckProcess
from areal.extensions.selftest.findings import Finding

KERNELS = {"attention", "head", "gradient"}
STARTS = {"trainer", "generator", "ranks"}
SPEED = {"generation", "busy load"}
COMPARED = {"log-probs", "publish", "load", "engine", "interruption", "kept cache"}
RESTART = {"checkpoint", "restart"}
LONGEST = {"longest row", "training"}
TURNS = {"turns"}
DIRECT = {"transport"}
CHECKS_OF_ENGINES = KERNELS | STARTS | SPEED | COMPARED | RESTART | LONGEST | TURNS | DIRECT

CHECKPOINT_BYTES = 32 * 2**30
"""A larger checkpoint is not written for a check."""


class Orders(Protocol):
    """The self-test as the giver of orders to processes, and the keeper of their findings."""

    def do(
        self,
        model: str,
        child: CheckProcess,
        order: str,
        finds: set[str],
        needed_for: Collection[str] = (),
        **arguments: Any,
    ) -> Any: ...

    def follows(self, model: str, names: set[str], ready: bool, needed_for: Collection[str] = ()) -> bool: ...

    def selects(self, names: Collection[str]) -> bool: ...

    def add(self, model: str, findings: list[Finding]) -> None: ...


class EngineTest:
    """The checks of both engines on a model. config: the run's configuration. start: starts a process by the name of
    its part. `trainer`: the trainer's process, started at once.

    With `colocate` the engines have the devices in turns, as in a run: first the generator, then the trainer."""

    def __init__(
        self, test: Orders, name: str, config: Config, start: Callable[[str], CheckProcess], folder: Path
    ) -> None:
        self._test, self._name, self._config, self._start, self._folder = test, name, config, start, folder
        self.trainer = start("trainer")
        self._generator: CheckProcess | None = None
        self._direct = DIRECT if config.weights.direct else set()
        self._turns = TURNS if config.colocate else set()
        self._kept = {"kept cache"} if config.generator.kv_on_update == "keep" and not config.trainer.lora else set()
        self._compared = (COMPARED - {"kept cache"}) | self._kept
        self._done: set[str] = set()  # orders followed so far
        self._facts: dict[str, Any] = {}  # seconds and bytes for `check_turns`

    def run(self) -> None:
        """Make all checks of engines."""
        if self._test.selects(self._compared | SPEED | self._turns | self._direct | {"generator"}):
            self._generate()
        self._train()
        self._replace_trainer()
        self._load()
        self._do(self.trainer, "longest", LONGEST, self._direct)  # `transport` needs changed weights
        self._transfer()
        self._compare()

    def _do(
        self,
        child: CheckProcess | None,
        order: str,
        finds: set[str],
        needed_for: Collection[str] = (),
        **arguments: Any,
    ) -> Any:
        if child is None:  # no selected check needs a generator
            return None
        answer = self._test.do(self._name, child, order, finds, needed_for, **arguments)
        if answer is not None:
            self._done.add(order)
        return answer

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def _generate(self) -> None:
        """Start the generator, and make the checks without a trainer. In turns the devices have no trainer yet."""
        later = self._compared | SPEED | self._turns | self._direct
        self._note_memory("before")
        self._generator = self._start("generator")
        self._do(self._generator, "start", {"generator"}, later)
        self._do(self._generator, "sample", set(), self._compared | self._turns, file=self._path("sampled.npz"))
        if (facts := self._do(self.trainer, "operations", set(), SPEED)) is not None:
            self._do(self._generator, "speed", SPEED, **facts)
        if self._turns:
            self._note_memory("running")
            slept = self._do(self._generator, "sleep", set(), later | LONGEST | RESTART, sequences=True)
            self._facts |= {"sleep_seconds": slept["seconds"]} if slept else {}
            self._note_memory("asleep")

    def _note_memory(self, when: str) -> None:
        if self._turns:
            self._facts[when] = self._do(self.trainer, "free_memory", set(), self._turns)

    def _train(self) -> None:
        later = self._compared | LONGEST | RESTART | self._turns | self._direct
        self._do(self.trainer, "start", {"trainer"} | ({"ranks"} if self._config.trainer.ranks > 1 else set()), later)
        names = {"log-probs", "publish"}
        if self._follows(names, "sample", self._compared | self._turns):
            files = {"sampled": self._path("sampled.npz"), "published": self._path("published")}
            self._do(self.trainer, "logprobs", names, self._compared | self._turns, **files)

    def _follows(self, names: set[str], order: str, needed_for: Collection[str] = ()) -> bool:
        """Return whether to make the checks `names`, or an order `needed_for` later checks: both need `order` done."""
        return self._test.follows(self._name, names, order in self._done, needed_for)

    def _replace_trainer(self) -> None:
        """Save a checkpoint, kill the trainer, start a second trainer, and load the checkpoint."""
        later = LONGEST | self._direct
        if not self._test.selects(RESTART):
            return
        room = self._do(self.trainer, "checkpoint_bytes", set(), RESTART)
        free = shutil.disk_usage(self._folder).free
        if room is None or (why := too_large(room["bytes"], free)):
            self._test.add(self._name, [Finding(name, "skipped", why if room else "not tried") for name in RESTART])
            return
        files = {"folder": self._path("checkpoint"), "file": self._path("values.npz")}
        if (saved := self._do(self.trainer, "save", set(), RESTART, **files)) is None:
            return
        self.trainer.kill()
        self.trainer = self._start("trainer")
        waited = self._do(self.trainer, "wait_for_memory", {"restart"}, {"checkpoint"}, needed=saved["free_at_start"])
        if waited is not None:
            self._do(self.trainer, "start_again", set(), RESTART | later | self._turns)
            self._do(self.trainer, "resume", {"checkpoint"}, (), seconds=saved["seconds"], **files)
        shutil.rmtree(files["folder"], ignore_errors=True)

    def _load(self) -> None:
        """Have the generator load the trainer's published weights while the generator samples."""
        later = self._compared - {"log-probs", "publish", "load"}
        if self._turns:
            facts = self._do(self.trainer, "offload", set(), self._turns | later | {"load"})
            self._facts |= facts or {}
            woken = self._do(
                self._generator, "wake", set(), self._turns | later | {"load"}, file=self._path("slept.npz")
            )
            self._facts |= {"wake_seconds": woken["seconds"]} if woken else {}
        if self._follows({"load"}, "logprobs", later | self._turns):
            files = {"published": self._path("published"), "file": self._path("interrupted.npz")}
            self._do(self._generator, "interrupt", {"load"}, later | self._turns, **files)
        if self._kept and self._follows(set(), "interrupt", self._kept):
            self._do(self._generator, "keep", set(), self._kept, file=self._path("kept.npz"))
        if self._turns:
            if "wake" in self._done:
                self._do(self._generator, "sleep", set(), LONGEST, sequences=False)
            self._do(self.trainer, "reload", set(), LONGEST)

    def _transfer(self) -> None:
        """Have the trainer send its weights into the generator's engine, and sample with the new weights."""
        if not (self._direct and self._test.selects(self._direct)):
            return
        folder, workers = self._path("sent"), self._config.generator.devices
        call = self._do(self.trainer, "send", DIRECT, folder=folder, workers=workers)
        while call and "call" in call:
            if self._do(self._generator, "receive", DIRECT, **call) != []:
                return
            call = self._do(self.trainer, "sent", DIRECT)
        if (
            call is not None
            and self._do(self._generator, "sample", set(), DIRECT, file=self._path("received.npz")) == []
        ):
            self._done.add("transfer")

    def _compare(self) -> None:
        """Close both engines, and compare all samples with the reference, which needs the engines' memory."""
        names = self._compared & {"engine", "interruption", "kept cache"} | self._turns
        if not self._test.selects(names | self._direct) or not {"interrupt", "transfer"} & self._done:
            self._follows(names, "interrupt")
            return
        self.trainer.close()
        self._do(self._generator, "close", set(), names | self._direct)
        if self._follows(names, "interrupt"):
            sampled = {name: self._path(f"{name}.npz") for name in ("sampled", "interrupted")}
            extra = {"slept": self._path("slept.npz"), "turns": self._facts} if self._turns else {}
            extra |= {"kept_file": self._path("kept.npz")} if "keep" in self._done else {}
            Path(self._path("scratch")).mkdir()
            files = {"published": self._path("published"), "scratch": self._path("scratch")}
            self._do(self._generator, "compare", names, **sampled, **files, **extra)
        if "transfer" in self._done:
            Path(self._path("scratch-sent")).mkdir()
            files = {"received": self._path("received.npz"), "published": self._path("sent")}
            self._do(self._generator, "compare_received", DIRECT, **files, scratch=self._path("scratch-sent"))


def too_large(size: float, free: float) -> str:
    """Return why a check writes no checkpoint of `size` bytes on a disk with `free` bytes; "" if the check writes it.

    >>> too_large(64e9, free=1e12)
    'a checkpoint of this model has 64 GB, too many for a check'
    """
    if size > CHECKPOINT_BYTES:
        return f"a checkpoint of this model has {size / 1e9:.0f} GB, too many for a check"
    return f"a checkpoint has {size / 1e9:.2g} GB, and the disk {free / 1e9:.2g}" if size > 0.9 * free else ""
