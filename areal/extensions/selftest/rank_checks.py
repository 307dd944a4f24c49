"""The check of a trainer's ranks: whether the ranks reach each other, and how fast.

`areal selftest` under torchrun makes no further check, on one node or several nodes. The ranks meet as in a run.
"""

import os
import socket
import time

import torch
import torch.distributed as dist

from areal.base.network_interfaces import GLOO
from areal.extensions.selftest.findings import Finding, judged

ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}
"""fp32 numbers to sum over the ranks, by the type of device."""
TIMES = 3


def check_ranks(device: torch.device) -> Finding:
    """Sum numbers over all ranks, each on its device. All ranks call this function together."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.empty(ELEMENTS[device.type], device=device)
    seconds = []
    right = True
    for _ in range(TIMES):  # the first sum makes connections
        numbers.fill_(float(rank + 1))
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(numbers)
        right = right and bool((numbers == ranks * (ranks + 1) / 2).all())  # waits for the GPU
        seconds.append(time.perf_counter() - started)
    gather = torch.zeros(ranks, 64, dtype=torch.uint8, device=device)
    name = socket.gethostname().encode()[:64]
    gather[rank, : len(name)] = torch.tensor(list(name), dtype=torch.uint8, device=device)
    dist.all_reduce(gather)
    hosts = sorted({bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gather.cpu()})
    rate = 2 * (ranks - 1) / ranks * numbers.nbytes / min(seconds) / 1e9
    return judged(
        "ranks",
        right,
        f"{ranks} ranks on {len(hosts)} hosts, {dist.get_backend()}: {numbers.nbytes / 1e9:.2g} GB summed at "
        f"{rate:.3g} GB/s a rank",
        "Sums over the ranks are wrong: update NCCL and the driver, try NCCL_P2P_DISABLE=1, and report it.",
        hosts=hosts,
        interface=os.environ.get(GLOO),
        ranks=ranks,
        gb_per_second=rate,
        seconds=seconds,
    )


def check_started_ranks() -> Finding:
    """Join the ranks started by torchrun as a trainer's rank does, and check them."""
    from areal.training.trained_model import join_ranks

    join_ranks()
    cuda = torch.cuda.is_available()
    return check_ranks(torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu"))
