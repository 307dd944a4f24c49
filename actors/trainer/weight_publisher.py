"""The publication of trained weights: snapshot, commit at the master, files, and the event that generators follow.

    step v ── snapshot ──▶ step v + 1 ── wait for the publication of v ── snapshot ──▶ ...
                  └──▶ commit v, write ──▶ publish v

A snapshot overwrites the snapshot before, so the version before has to be published first. Therefore no two
versions are written at a time, and the published version is at most 1 behind the committed version.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import structlog

from actors.runtime.membership import Membership
from actors.trainer.learner import Learner
from actors.trainer.phases import refusals
from actors.weights.weight_service import WeightServer
from areal.weights.chunks import HeldVersion
from protocols.membership_messages import Policy
from protocols.messages import CommitStep, Done
from protocols.training_messages import PublishPolicy

# Number of published versions that are kept: a generator may still be reading an older version than the newest.
VERSIONS_KEPT = 4

log = structlog.get_logger()


class WeightPublisher:
    """See the module. timed: marks a phase of a step. remove: removes a folder. direct: sends weights to engines, if
    the run has `weights.transport: direct`. `last`: the last publication, which runs during the next step."""

    def __init__(
        self,
        member: Membership,
        learner: Learner,
        lineage: int,
        timed: Callable[[str], AbstractContextManager[None]],
        remove: Callable[[Path], Awaitable[None]],
        direct: Any,
    ) -> None:
        self._member, self._config = member, member.config
        self._learner = learner
        self._lineage = lineage
        self._timed, self._remove = timed, remove
        self._direct = direct
        self._server = WeightServer(VERSIONS_KEPT)
        member.serve(self._server)
        self.last: asyncio.Task[None] | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes of weights sent to generators."""
        direct: int = self._direct.bytes_sent if self._direct else 0
        return self._server.bytes_sent + direct

    async def publish(self, version: int, metrics: Callable[[], dict[str, Any]], on_commit: Callable[[], None]) -> None:
        """Copy the weights of a version, and begin to commit and publish them. metrics: called after the copy.
        on_commit: called once the master has committed the step."""
        await self.wait()
        await self._snapshot(self._policy(version))
        self.last = self._member.spawn(self._publish(self._policy(version), metrics(), on_commit), "publish")

    async def publish_again(self, version: int, redone: int) -> None:
        """Publish the version of a restored trainer under its new lineage, and remove the weights of older lineages.
        redone: number of steps that were trained again."""
        policy, replaced = self._policy(version), self._member.directory.policy
        if version:
            await self._snapshot(policy)
            policy = await self._write(policy)
        await self._member.ask_master(PublishPolicy(policy=policy), Done)
        log.info("restored", lineage=policy.lineage, version=policy.version, redone=redone)
        for lineage in range(replaced.lineage, self._lineage):
            for old in range(version - VERSIONS_KEPT, version + 2):
                await self._remove(self._folder(old, lineage))

    async def wait(self) -> None:
        """Wait until the last version is published."""
        if self.last is not None:
            with self._timed("publish_wait"):
                await self.last

    def _policy(self, version: int) -> Policy:
        """The policy of a version, with the folder for its weights."""
        folder = self._folder(version, self._lineage) if version else self._config.model
        return Policy(lineage=self._lineage, version=version, folder=str(folder))

    async def _snapshot(self, policy: Policy) -> None:
        with self._timed("snapshot"):
            await self._learner.snapshot(Path(policy.folder))

    async def _publish(self, policy: Policy, metrics: dict[str, Any], on_commit: Callable[[], None]) -> None:
        writing = self._member.spawn(self._write(policy), "write")
        commit = CommitStep(lineage=policy.lineage, version=policy.version, metrics=metrics)
        await self._member.ask_master(commit, Done)
        on_commit()
        await self._member.ask_master(PublishPolicy(policy=await writing), Done)
        await self._remove(self._folder(policy.version - VERSIONS_KEPT, self._lineage))

    async def _write(self, policy: Policy) -> Policy:
        """Wait until the snapshot is written. Returns the policy with the stamp of its files."""
        with self._timed("write"):
            manifest = await self._learner.finish_snapshot()
        if manifest is None:
            return policy
        if self._config.weights.transport != "folder":
            self._server.offer(policy.identity, HeldVersion(Path(policy.folder), manifest))
            if self._direct:
                self._direct.offer(policy)
        return policy.model_copy(update={"stamp": manifest.stamp})

    def _folder(self, version: int, lineage: int) -> Path:
        return self._config.weights_folder / f"l{lineage}-v{version:06}"


async def remove_folder(member: Membership, learner: Learner, folder: Path) -> None:
    """Remove a folder of weights or a checkpoint that is no longer needed."""
    with member.working(f"removing {folder.name}", "removal", refusals):
        await member.disk.write(lambda: learner.forget(folder), f"that {folder.name} is removed")


async def remove_weights(member: Membership) -> None:
    """Remove published weights, which a run does not need after its end. The folder is often in memory."""
    ending = member.stopped.result() if member.stopped.done() and not member.stopped.cancelled() else None
    if member.config.weights.folder and ending and ending.ok and not ending.stopped:
        await asyncio.to_thread(shutil.rmtree, member.config.weights_folder, ignore_errors=True)
