"""The columns of a training sample that scorers give: log-probs of a teacher, and of a reference."""

import asyncio
import functools

from actors.sampling.jobs import SampleFailed
from actors.sampling.services import Rewards
from areal.base.errors import explain
from areal.config import Config
from areal.data.rows import Row
from areal.samples.trajectory import Trajectory


async def with_scorer_columns(sample: Trajectory, config: Config, row: Row, rewards: Rewards) -> Trajectory:
    """Return the sample with a column from every scorer of the row. Raises SampleFailed."""
    for column, name in scorers_of(config, row).items():
        branches = [rewards.score_tokens(name, branch.tokens) for branch in sample.sequences()]
        scores = await asyncio.gather(*branches)
        with explain(ValueError, f"scorer {name!r}: {{why}}", functools.partial(SampleFailed, "scorer")):
            sample = sample.with_scores(column, [score.logprobs for score in scores])
            if column == "teacher_logprobs" and config.trainer.teacher_top_k:
                sample = sample.with_scores("teacher_top_tokens", [score.top_tokens for score in scores])
                sample = sample.with_scores("teacher_top_logprobs", [score.top_logprobs for score in scores])
    return sample


def scorers_of(config: Config, row: Row) -> dict[str, str]:
    """The names of the scorers of a sample of this row, by column. Raises SampleFailed."""
    trainer = config.trainer
    named = {"teacher_logprobs": trainer.teacher, "reference_logprobs": trainer.reference_scorer}
    if trainer.teacher_key:
        named["teacher_logprobs"] = row.fields.get(trainer.teacher_key) or trainer.teacher
    for name in filter(None, named.values()):
        if name not in config.scorer_uses.logprobs:
            names = ", ".join(config.scorer_uses.logprobs)
            why = f"row {row.index} has {trainer.teacher_key}={name!r} (trainer.teacher_key): scorers has {names}"
            raise SampleFailed("row", why)
    return {column: name for column, name in named.items() if name}
