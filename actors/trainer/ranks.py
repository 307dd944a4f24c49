"""The training engine of all ranks behind an interface. Rank 0 uses a `Ranks`; the other ranks call `run_follower`.

The engine runs in a thread, so that the trainer still handles messages while the engine computes a step.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.base.errors import UserError
from areal.base.processes import importing, outlive_sigterm
from areal.devices import CORES, settle
from areal.samples.trajectory import Group, TokenValues
from areal.weights.chunks import Manifest
from areal.weights.folders import remove_folder
from protocols.bus_errors import text_of
from protocols.training_messages import StepFailed

if TYPE_CHECKING:
    import numpy as np

    from areal.config import Config
    from areal.storage.disk import DiskRetry
    from areal.training.training_engine import TrainingEngine

# Errors of a collective: another rank has died, perhaps of an error of its own.
COLLECTIVE = re.compile(r"^Dist\w*Error|gloo|NCCL")

FAREWELL_SECONDS = 1.0


class Ranks:
    """The model under training, on all ranks. Create it with `start`, once the processes of all ranks are running."""

    _snapshot_written: Future[Manifest]
    _checkpoint_written: Future[None]

    def __init__(self, engine: TrainingEngine, thread: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._thread = thread

    @classmethod
    async def start(cls, config: Config, disk_retry: DiskRetry) -> Ranks:
        """Start the engine of this rank; all ranks have to start at the same time. disk_retry: repeats writes of
        folders. Raises UserError if the model cannot be loaded."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        engine = await asyncio.get_running_loop().run_in_executor(thread, start_engine, config, disk_retry)
        await asyncio.get_running_loop().run_in_executor(
            thread, engine.messages.broadcast, {"process": os.getpid(), "host": socket.gethostname()}
        )
        return cls(engine, thread)

    @property
    def work_done(self) -> int:
        """A counter that grows while the engine computes."""
        return self._engine.model.work_done

    @property
    def vocab_size(self) -> int:
        """All token ids of the model are smaller than this."""
        return self._engine.model.vocab_size

    @property
    def values(self) -> TokenValues | None:
        """The values of the last step for every token, if the run keeps rollouts."""
        return self._engine.values

    @property
    def whole_logprobs(self) -> np.ndarray | None:
        """Log-probs among all words for the tokens of the step's first minibatch, as in the engine."""
        return self._engine.whole_logprobs

    async def step(
        self, groups: Sequence[Group], *, version: int, temperature: float, mask_older_than: int | None
    ) -> dict[str, float | None]:
        """Train the weights of `version` on a batch. Returns the fields of `StepResult`."""
        command = {"version": version, "temperature": temperature, "mask_older_than": mask_older_than}
        return asdict(await self._on_all_ranks({"do": "step", **command}, groups))

    async def snapshot(self, folder: Path) -> None:
        """Copy the current weights, to be written to `folder` in the background, after the last snapshot."""
        self._snapshot_written = await self._on_all_ranks({"do": "snapshot", "folder": str(folder)})

    async def finish_snapshot(self) -> Manifest:
        """Wait until the last snapshot is on disk. Returns the manifest of the files. Raises UserError."""
        return await asyncio.wrap_future(self._snapshot_written)

    async def save(self, folder: Path, run: str) -> None:
        """Copy all that `load` needs, to be written to `folder` in the background. run: the run's identity."""
        self._checkpoint_written = await self._on_all_ranks({"do": "save", "folder": str(folder), "run": run})

    async def finish_save(self) -> None:
        """Wait until the last checkpoint is on disk. Raises UserError if the checkpoint cannot be written."""
        await asyncio.wrap_future(self._checkpoint_written)

    async def load(self, folder: Path, run: str) -> None:
        """Restore the state of a checkpoint of the run with the identity `run`."""
        await self._on_all_ranks({"do": "load", "folder": str(folder), "run": run})

    async def offload(self) -> None:
        """Move everything from the devices to host memory, until `reload`."""
        await self._on_all_ranks({"do": "offload"})

    async def reload(self) -> None:
        await self._on_all_ranks({"do": "reload"})

    async def forget(self, folder: Path) -> None:
        """Remove a folder of weights or a checkpoint that is no longer needed."""
        await asyncio.to_thread(remove_folder, folder)

    def close(self) -> None:
        """Tell the other ranks to end. If the engine is still computing after FAREWELL_SECONDS, give up."""
        farewell = self._thread.submit(self._engine.messages.broadcast, {"do": "end"})
        # A running computation cannot be cancelled, so the process does not wait for it.
        wait([farewell], timeout=FAREWELL_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _on_all_ranks(self, command: dict[str, Any], groups: Sequence[Group] | None = None) -> Any:
        def run() -> Any:
            self._engine.messages.broadcast(command)
            return execute(self._engine, command, groups)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


def start_engine(config: Config, disk_retry: DiskRetry | None = None) -> TrainingEngine:
    """Create the engine of this rank. Called on all ranks."""
    with importing():
        from areal.training.training_engine import TrainingEngine

    return TrainingEngine.of_run(config, keep_values=config.observe.rollouts != "none", disk_retry=disk_retry)


def execute(engine: TrainingEngine, command: dict[str, Any], groups: Sequence[Group] | None) -> Any:
    """Carry out a command of rank 0. Called on all ranks."""
    arguments = {key: value for key, value in command.items() if key != "do"}
    if command["do"] == "step":
        return engine.step(groups, **arguments)
    if command["do"] in ("offload", "reload"):
        return getattr(engine, command["do"])()
    folder = Path(arguments["folder"])
    if command["do"] == "snapshot":
        engine.storage.snapshot()
        return engine.storage.begin_write(folder)
    return {"save": engine.storage.begin_save, "load": engine.storage.load}[command["do"]](folder, arguments["run"])


def failure_of_step(version: int, error: Exception) -> StepFailed | None:
    """Return the report about an error in the step after `version`; None if the error is the loss of a rank."""
    reason = f"{type(error).__name__}: {error}"
    return None if COLLECTIVE.search(reason) else StepFailed(version=version, reason=text_of(reason))


def run_follower(config: Config, report: Callable[[StepFailed], object]) -> None:
    """The main loop of every rank but 0: execute the commands of rank 0 until the end of the run. report: sends the
    failure of a step to the master, before the failure is raised."""
    engine = start_engine(config)
    settle(CORES)
    leader = engine.messages.broadcast(None)
    # On SIGTERM rank 0 may still train and save a checkpoint, with all ranks.
    outlive_sigterm(leader["process"] if leader["host"] == socket.gethostname() else None)
    while (command := engine.messages.broadcast(None))["do"] != "end":
        try:
            execute(engine, command, None)
        except UserError:  # raised on all ranks, and rank 0 decides the next command
            if command["do"] != "load":
                raise
        except Exception as error:
            if command["do"] == "step" and (failure := failure_of_step(command["version"], error)):
                report(failure)
            raise
