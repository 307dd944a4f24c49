"""The formulas of the scaling model: the duration of each operation, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from areal.training.microbatches import split_over_ranks
from simulation.cluster.setups import Setup


@dataclass(frozen=True, slots=True)
class Costs:
    """The durations of operations in one set-up, in seconds."""

    setup: Setup

    def decode_step(self, sequences: int, context: float) -> float:
        """A decoding step: one token for each of `sequences`, which have `context` tokens in total. It reads all
        weights and the KV of all these tokens."""
        llm, hardware, n = self.setup.llm, self.setup.hardware, self.setup.llm.devices_an_engine
        read = (llm.weight_bytes + context * llm.kv_bytes) / (
            n * hardware.memory_bandwidth * hardware.bandwidth_reached
        )
        compute = 2 * llm.parameters * sequences / (n * hardware.peak_flops * hardware.prefill_utilisation)
        talk = 2 * llm.layers * hardware.allreduce if n > 1 else 0.0
        return hardware.decode_overhead + talk + max(read, compute)

    def prefill(self, tokens: float) -> float:
        llm, hardware = self.setup.llm, self.setup.hardware
        flops = 2 * llm.parameters * tokens
        return flops / (llm.devices_an_engine * hardware.peak_flops * hardware.prefill_utilisation)

    @property
    def kv_capacity(self) -> float:
        """Number of tokens that fit into the KV cache of an engine."""
        llm, hardware = self.setup.llm, self.setup.hardware
        room = llm.devices_an_engine * hardware.memory * hardware.memory_share - llm.weight_bytes
        return room / llm.kv_bytes

    @property
    def load(self) -> float:
        """Loading new weights. All engines do so at about the same time, and each node reads the file once."""
        setup, hardware = self.setup, self.setup.hardware
        nodes = max(1.0, setup.generators * setup.llm.devices_an_engine / hardware.devices_a_node)
        bandwidth = min(hardware.read_bandwidth, hardware.storage_bandwidth / nodes)
        return hardware.pause_seconds + setup.llm.weight_bytes / bandwidth

    @property
    def snapshot(self) -> float:
        """Gathering the weights on rank 0."""
        return self.setup.llm.weight_bytes / self.setup.hardware.network_bandwidth

    @property
    def write(self) -> float:
        """Writing the weights by rank 0, during the next step."""
        return self.setup.llm.weight_bytes / self.setup.hardware.write_bandwidth

    @property
    def gradients(self) -> float:
        """The all-reduces of fp32 gradients of all optimizer steps, over a ring of nodes."""
        setup, hardware = self.setup, self.setup.hardware
        if setup.trainer_devices == 1:
            return 0.0
        at_once = min(setup.trainer_devices, hardware.devices_a_node) * hardware.network_bandwidth
        return setup.minibatches * 2 * 4 * setup.llm.parameters / at_once

    def fetch(self, tokens: int) -> float:
        return 12 * tokens / self.setup.hardware.spool_bandwidth

    def training(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Seconds of computing, and the seconds that it would take if all ranks had equal shares."""
        setup, llm = self.setup, self.setup.llm
        rate = setup.hardware.peak_flops * llm.training_utilisation
        seconds = even = 0.0
        part = -(-len(lengths) // setup.minibatches)
        for first in range(0, len(lengths), part):
            minibatch = lengths[first : first + part]
            shares = split_over_ranks(minibatch, setup.trainer_devices, sum(minibatch))
            work = [sum(llm.training_flops(minibatch[i]) for i in chain(*rows)) for rows in shares]
            seconds += max(work) / rate
            even += sum(work) / len(work) / rate
        return seconds, even

    def generating_bound(self, mean_context: float) -> float:
        """Tokens/s of all engines together, if each is always full and never interrupted."""
        setup = self.setup
        sequences = min(setup.concurrent, int(self.kv_capacity / mean_context))
        return setup.generators * sequences / self.decode_step(sequences, sequences * mean_context)
