"""Results of evaluations, and the scores of rows of an evaluation without a result yet."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from actors.master.changes import Evaluated, EvaluationDropped, RowsScoredChange
from areal.config import Config
from protocols.evaluation_messages import EvaluationDone
from protocols.membership_messages import Member, Policy


@dataclass(slots=True)
class EvaluationResults:
    """The result of every evaluated version, and the reason of every version without a result.

    steps: the last version. conditions: a digest of the settings of evaluations. partial: the version and the
    conditions of an evaluation without a result yet. scores: the scores and the number of tokens of every row that the
    evaluation `partial` has scored.
    """

    steps: int
    conditions: str
    evaluations: dict[int, EvaluationDone] = field(default_factory=dict)
    not_evaluated: dict[int, str] = field(default_factory=dict)
    partial: tuple[int, str] | None = None
    scores: dict[int, tuple[list[float], int]] = field(default_factory=dict)

    def is_over(self, version: int) -> bool:
        """True if the evaluation of the version has ended, with a result or without."""
        return version in self.evaluations or version in self.not_evaluated

    def holder(self, members: Iterable[Member]) -> tuple[Member, Policy] | None:
        """The member that holds a policy for an evaluation, and the policy; None if no member does."""
        holders = ((member, held) for member in members if (held := member.held) is not None)
        return next(((member, held) for member, held in holders if not self.is_over(held.version)), None)

    def row_scores(self, version: int) -> Mapping[int, tuple[Sequence[float], int]]:
        """Scores and number of tokens of the scored rows of an evaluation of `version` without a result yet."""
        return self.scores if self.partial == (version, self.conditions) else {}

    def rows_scored(self, version: int, rows: Mapping[int, tuple[Sequence[float], int]]) -> RowsScoredChange:
        """The change that adds the scores of rows, and drops scores of another version or under other settings."""
        records = tuple((row, tokens, *scores) for row, (scores, tokens) in rows.items())
        return RowsScoredChange(version=version, conditions=self.conditions, rows=records)

    def apply(self, change: Evaluated | EvaluationDropped | RowsScoredChange) -> None:
        match change:
            case Evaluated(evaluation=evaluation):
                if evaluation.version not in (0, self.steps):  # the summary shows samples of these versions
                    evaluation = evaluation.model_copy(update={"samples": ()})
                self.evaluations[evaluation.version] = evaluation
                self._forget_scores(evaluation.version)
            case EvaluationDropped(version=version, reason=reason):
                self.not_evaluated[version] = reason
                self._forget_scores(version)
            case RowsScoredChange():
                self._add_scores(change)

    def _add_scores(self, change: RowsScoredChange) -> None:
        if self.partial != (change.version, change.conditions):
            self.partial, self.scores = (change.version, change.conditions), {}
        self.scores |= {row: (scores, tokens) for row, tokens, *scores in change.rows}

    def _forget_scores(self, version: int) -> None:
        if self.partial and self.partial[0] == version:
            self.partial, self.scores = None, {}

    def dump(self) -> dict[str, Any]:
        return {
            "evaluations": [evaluation.model_dump() for evaluation in self.evaluations.values()],
            "not_evaluated": list(self.not_evaluated.items()),
            "partial": self.partial,
            "row_scores": [[row, tokens, *scores] for row, (scores, tokens) in self.scores.items()],
        }

    def load(self, dump: Mapping[str, Any]) -> None:
        evaluations = [EvaluationDone.model_validate(evaluation, strict=False) for evaluation in dump["evaluations"]]
        self.evaluations = {evaluation.version: evaluation for evaluation in evaluations}
        self.not_evaluated = {version: reason for version, reason in dump["not_evaluated"]}
        self.partial, self.scores = None, {}
        if dump["partial"]:
            version, conditions = dump["partial"]
            self._add_scores(RowsScoredChange(version=version, conditions=conditions, rows=dump["row_scores"]))


def conditions_of(config: Config) -> str:
    """A digest of the settings that may change when a run is resumed and that change scores. Scores under different
    conditions do not make up a result."""
    evaluator, workflow = config.evaluator, config.rollout_manager
    settings = [evaluator.samples, evaluator.temperature, evaluator.top_p, workflow.workflow, workflow.workflow_options]
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
