"""A generator's end of a direct transfer without an engine: only vLLM's part, and a model that keeps what it gets."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from types import SimpleNamespace

import torch

from actors.direct.direct_weights import DirectReceiver
from actors.runtime.directory import Directory
from protocols.bus import Bus
from protocols.membership_messages import Member, Policy


class TransferEnd:
    """Receives by gloo. `tensors`: those of the last version, by name. `calls`: what the trainer has asked for."""

    def __init__(self, bus: Bus, trainer: Member) -> None:
        from actors.direct.transfer import GlooEngine

        self.bus = bus
        self.receiver = DirectReceiver(bus, Directory(Policy(lineage=0, version=0, folder=""), [trainer]), 1)
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        facts = SimpleNamespace(parallel_config=parallel, model_config=None)
        self._end = GlooEngine(None, facts, torch.device("cpu"), SimpleNamespace(load_weights=self._load))

    async def receive(self, policy: Policy, until: str = "") -> float:
        """Receive a version, or go away at the call `until`. Returns the seconds from the start of the update to its
        end, in which an engine would be paused."""
        began = ended = 0.0
        async with aclosing(self.receiver.calls(policy)) as calls:
            async for call, info in calls:
                self.calls.append(call)
                if call == until:
                    break
                if call == "init_weight_transfer_engine":
                    await asyncio.to_thread(self._end.init_transfer_engine, self._end.parse_init_info(info))
                elif call == "start_weight_update":
                    began = time.perf_counter()
                elif call == "update_weights":
                    await asyncio.to_thread(self._end.update_weights, info)
                ended = time.perf_counter()
        return ended - began

    def _load(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name in self.tensors:
                self.tensors[name].copy_(tensor)
            else:
                self.tensors[name] = tensor.clone()
