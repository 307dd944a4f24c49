"""The uses of a run's scorers: scorers of log-probs, scorers of rewards, and the scorers that are started."""

from collections.abc import Mapping
from dataclasses import dataclass

from areal.config.engine_sections import ScorerConfig
from areal.config.scoring import POLICY, SCORER
from areal.config.trainer_section import TrainerConfig


@dataclass(frozen=True, slots=True)
class ScorerUses:
    """scorers: by name. trainer: names the teacher and the reference. judges: the addresses of the judges in the run,
    by the reward's name. run_rewards: the names of the run's rewards. any_teacher: rows or a workflow may ask each
    scorer of log-probs. any_needed: the run cannot lack any used scorer; else only scorers of rewards."""

    scorers: Mapping[str, ScorerConfig]
    trainer: TrainerConfig
    judges: Mapping[str, str]
    run_rewards: frozenset[str]
    any_teacher: bool
    any_needed: bool

    @property
    def logprobs(self) -> list[str]:
        """The names of the scorers of log-probs; all other scorers give rewards."""
        return [name for name, scorer in self.scorers.items() if scorer.kind == "logprobs"]

    @property
    def rewards(self) -> dict[str, str]:
        """The names of the scorers of rewards, by the reward's name: a reward model has the same name as its reward."""
        urls = {name: url.removeprefix(SCORER) for name, url in self.judges.items() if url != POLICY}
        return urls | {name: name for name in self.scorers if self.scorers[name].kind == "reward_model"}

    def top_k(self, scorer: str) -> int:
        """Return the number of likeliest tokens that a scorer of log-probs adds at each place."""
        teaches = scorer == self.trainer.teacher or self.trainer.teacher_key
        return self.trainer.teacher_top_k if teaches else 0

    @property
    def used(self) -> list[str]:
        """The names of the scorers in use; all scorers of log-probs, if rows or a workflow may ask them."""
        teachers = self.logprobs if self.any_teacher else [self.trainer.teacher]
        return [name for name in self.scorers if name in {*teachers, self.trainer.reference_scorer, *self._asked}]

    @property
    def needed(self) -> list[str]:
        """The `used` scorers that the run cannot lack."""
        return [name for name in self.used if self.any_needed or name in self._asked]

    @property
    def started(self) -> list[str]:
        """The names of the scorers to start in a run on one machine, an entry for each process."""
        return [name for name in self.needed for _ in range(self.scorers[name].count)]

    @property
    def _asked(self) -> set[str]:
        return {scorer for name, scorer in self.rewards.items() if name in self.run_rewards or name != scorer}
