"""The checkpoints of a run. A checkpoint is written during the next steps, and counts once it is on disk.

In place of a damaged checkpoint the trainer loads the checkpoint before, and trains the steps since then again.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import structlog

from actors.runtime.membership import Membership
from actors.trainer import kept_rollouts
from actors.trainer.learner import Learner
from actors.trainer.phases import refusals
from areal.base.errors import UserError
from areal.storage.rollouts import RolloutWriter
from areal.storage.run_folder import checkpoint_of, ways_on
from areal.storage.spool import Spool
from protocols.training_messages import AskRecovery, CheckpointAnswer, CheckpointSaved, Recovery

# A leaving trainer estimates a step and a checkpoint by the longest of this many recent durations.
DURATIONS_KEPT = 4

log = structlog.get_logger()


class Durations:
    """The durations of the last steps and checkpoints."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=DURATIONS_KEPT))

    def add(self, what: str, began: float) -> None:
        """Add a step or checkpoint that has ended now."""
        self._seconds[what].append(asyncio.get_running_loop().time() - began)

    def why_too_late(self, what: str, began: float, ends: float) -> str:
        """Return why a step or a checkpoint, judged by recent durations, does not end in time; empty if it does."""
        longest, now = max(self._seconds[what], default=0.0), asyncio.get_running_loop().time()
        if began + longest <= ends:
            return ""
        return f"a {what} takes {longest:.0f} s, and of master.drain_seconds {ends - now:.0f} s are left"


class Checkpoints:
    """version: of the last checkpoint on disk. timed: marks a phase of a step. remove: removes a folder."""

    def __init__(
        self,
        member: Membership,
        learner: Learner,
        spool: Spool,
        rollouts: RolloutWriter,
        version: int,
        timed: Callable[[str], AbstractContextManager[None]],
        remove: Callable[[Path], Awaitable[None]],
    ) -> None:
        self._member, self._config = member, member.config
        self._learner, self._spool, self._rollouts = learner, spool, rollouts
        self.version = version
        self._timed, self._remove = timed, remove
        self.durations = Durations()
        self._saving: asyncio.Task[UserError | None] | None = None  # the last save; it runs during the next steps
        self._damage = ""  # shown as long as this trainer lives, since a checkpoint may follow at once
        self._on_disk: list[int] = []  # versions with a checkpoint on disk, oldest first

    async def load(self, recovery: Recovery) -> int:
        """Load the last checkpoint, or if damaged the checkpoint before. Returns the version. Raises UserError if both
        are damaged."""
        newest, damage = recovery.checkpoint_version, ""
        for version in dict.fromkeys((newest, recovery.covered)):
            try:
                await self._load(version, recovery.run)
            except UserError as error:
                damage = damage or str(error)
                continue
            if damage:
                self._damage = f"{damage} The run goes on from version {version}: the steps since are trained again."
                self._alert(self._damage)
            return version
        ways = ways_on(self._config.folder, checkpoint_of(self._config.folder, newest))
        raise UserError(f"{damage} {ways[0].upper()}{ways[1:]}")

    def _alert(self, sentence: str) -> None:
        """Tell the user, until the next checkpoint."""
        log.error(sentence)
        self._member.alert = sentence

    async def _load(self, version: int, run: str) -> None:
        """Load the checkpoint of a version. Version 0 has no checkpoint: the learner begins with the run's model."""
        if version:
            folder = checkpoint_of(self._config.folder, version)
            self._member.activity = f"loading {folder}"
            with self._member.working(self._member.activity, "restore"):
                await self._learner.load(folder, run)

    def find(self, versions: Iterable[int]) -> None:
        """Note which versions have a checkpoint on disk."""
        self._on_disk = sorted(versions)

    async def save(self, version: int, publication: asyncio.Task[None] | None) -> None:
        """Begin to save a checkpoint of the current version, once the last checkpoint is written."""
        await self.wait()
        self._member.activity = f"saving a checkpoint of version {version}"
        folder, began = checkpoint_of(self._config.folder, version), asyncio.get_running_loop().time()
        with self._timed("save"):
            await self._learner.save(folder, self._rollouts.run)
        self._saving = self._member.spawn(self._complete(version, folder, publication, began), "save")

    @property
    def in_progress(self) -> bool:
        return self._saving is not None and not self._saving.done()

    async def wait(self) -> UserError | None:
        """Wait for the last checkpoint. Returns why it could not be written."""
        if self._saving is None:
            return None
        with self._timed("save_wait"):
            return await self._saving

    async def _complete(
        self, version: int, folder: Path, publication: asyncio.Task[None] | None, began: float
    ) -> UserError | None:
        """Wait until the checkpoint is on disk and its version published. Then remove groups from the spool that the
        checkpoint before covers, too, if kept, and checkpoints beyond `trainer.checkpoints_kept`. If the checkpoint
        cannot be written, training continues, and the next checkpoint covers all. Returns why it cannot be written."""
        every, limit = self._config.trainer.checkpoint_every, self._config.trainer.checkpoints_kept
        copied = asyncio.get_running_loop().time()
        try:
            with self._member.working(f"writing a checkpoint of version {version}", "checkpoint", refusals):
                await self._learner.finish_save()
        except UserError as error:
            self._alert(
                f"{error} The run goes on from the checkpoint before; the next checkpoint is due after {every} steps."
            )
            return error
        self._member.took("checkpoint", copied, asyncio.get_running_loop().time() - copied)
        if publication is not None:
            await publication
        # Before the master counts the checkpoint: no trainer redoes its steps afterwards.
        await kept_rollouts.write_rollouts(self._member, self._rollouts)
        covered = self.version if limit > 1 else version
        spooled = "\n".join(await self._member.on_disk("the spool", self._spool.ids))
        saved = CheckpointSaved(version=version, folder=str(folder), covered=covered, spooled=spooled)
        needless = (await self._member.ask_master(saved, CheckpointAnswer)).drop.splitlines()
        self.version = version
        self._member.alert = self._damage
        await self._member.on_disk("the spool", self._spool.forget, needless)
        await self._member.on_disk("the spool", self._spool.scrub)
        self._on_disk.append(version)
        while len(self._on_disk) > limit:
            await self._remove(checkpoint_of(self._config.folder, self._on_disk[0]))
            del self._on_disk[0]
        self.durations.add("checkpoint", began)
        return None


async def ask_recovery(member: Membership, spool: Spool, rollouts: RolloutWriter) -> Recovery:
    """Ask the master for the state of the run. The spool and the rollouts become the run's."""
    spooled = await member.on_disk("the spool", spool.ids)
    recovery = await member.ask_master(AskRecovery(spooled="\n".join(spooled)), Recovery)
    await member.on_disk("the spool", spool.assign, recovery.run)
    await asyncio.to_thread(rollouts.assign, recovery.run)
    await member.on_disk("the spool", spool.forget, recovery.drop.splitlines())
    return recovery
