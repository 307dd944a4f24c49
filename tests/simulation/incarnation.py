"""A process name in the simulated cluster, and the incarnations that have this name one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from areal.storage.rollouts import Rollout
from simulation.engines import SimEngine, Toil
from simulation.loop import DEAD, FaultyLoop
from simulation.network import FaultyNetwork
from simulation.watched import Disk, WatchedBus


class Process:
    """One name in the cluster, such as `generator-0`, over all restarts. `slower`: extra seconds of each disk
    operation, at most. `rollouts`: those that are written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.role, _, index = name.rpartition("-")
        self.index = int(index)
        self.lives = 0
        self.slower = 0.0
        self.running: Incarnation | None = None
        self.disk: Disk | None = None
        self.rollouts: list[Rollout] = []

    def limit_disk(self, full: bool) -> None:
        """Let the disk have no room for more, or again."""
        if self.disk is not None:
            self.disk.full = full


class Incarnation:
    """One process, from its start to its end. `mark` is the incarnation in its actor's identity. `began`: the virtual
    time. `storing`: the groups whose StoreSamples, StoreCalls or AskSamples it is answering. `ended`: in order; a
    resumed run starts it again."""

    def __init__(self, process: Process, loop: FaultyLoop, network: FaultyNetwork, mark: str) -> None:
        self.process = process
        self.role = process.role
        self.loop = loop
        self.network = network
        self.mark = mark
        self.actor: Any = None
        self.engine: SimEngine | None = None  # of a generator that has started
        self.bus: WatchedBus  # set when the process begins
        self.task: asyncio.Task[Any] | None = None
        self.toil = Toil()
        self.began = loop.scheduler.now
        self.storing: Counter[str] = Counter()
        self.restart_after: float | None = None
        self.stays_away = False
        self.ended = False
        self.left_calmly_at: float | None = None  # when a trainer was told to leave that had the time to save
        self.policy = (0, 0)

    @property
    def alive(self) -> bool:
        return self.loop.state is not DEAD
