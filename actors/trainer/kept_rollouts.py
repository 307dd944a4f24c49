"""How a trainer keeps the rollouts of a run: as a record that delays no step for long."""

import asyncio
import functools

import numpy as np
import structlog

from actors.runtime.membership import Membership
from areal.config import Config
from areal.samples.tokenizer import load_tokenizer
from areal.storage.rollouts import PATIENCE_SECONDS, RolloutWriter
from areal.storage.run_files import ROLLOUTS

# Rollouts are written after this time, or at this many waiting bytes, or with a checkpoint.
ROLLOUTS_SECONDS = 30.0
ROLLOUTS_BYTES = 32 << 20

log = structlog.get_logger()


def open_rollouts(config: Config) -> RolloutWriter:
    """Return the writer of the run's rollouts."""
    tokenizer = functools.cache(load_tokenizer)

    def texts(sequences: list[np.ndarray]) -> list[str]:
        return [tokenizer(config.model).decode(tokens.tolist()) for tokens in sequences]

    observe = config.observe
    return RolloutWriter(config.folder / ROLLOUTS, observe.rollouts, int(observe.rollouts_gib * (1 << 30)), texts)


async def write_rollouts_regularly(member: Membership, rollouts: RolloutWriter) -> None:
    """Write the rollouts now and then."""
    loop = asyncio.get_running_loop()
    written = loop.time()
    while True:
        await asyncio.sleep(1.0)
        if loop.time() - written > ROLLOUTS_SECONDS or rollouts.waiting > ROLLOUTS_BYTES:
            await write_rollouts(member, rollouts)
            written = loop.time()


async def write_rollouts(member: Membership, rollouts: RolloutWriter) -> None:
    """Write the added rollouts, for at most PATIENCE_SECONDS: they are only a record."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await member.on_disk("the rollouts", rollouts.write, optional=True)
    except TimeoutError:
        log.warning(f"the rollouts are not on disk after {PATIENCE_SECONDS:.0f} s, and the run goes on without them")
    except Exception as error:  # whatever the error is, the run continues without the rollouts
        log.error("rollouts are lost, because they cannot be written", exc_info=error)
