"""The master's answers to the evaluator: a version to evaluate, and the receipt of scores."""

import structlog

from actors.master.accounts import evaluation_record
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from protocols.bus_errors import RefusedError
from protocols.evaluation_messages import (
    AskEvaluation,
    EvaluationAbandoned,
    EvaluationAnswer,
    EvaluationDone,
    RowScores,
    RowsScored,
)
from protocols.messages import Done
from protocols.transport import Request

log = structlog.get_logger()


class EvaluationRequests(HandlesRequests):
    """Answers the evaluator."""

    def __init__(self, run: RunControl) -> None:
        self._run = run

    @handles(AskEvaluation)
    async def ask_evaluation(self, request: Request[AskEvaluation]) -> EvaluationAnswer:
        self._run.member(request, "evaluator")
        due = await self._run.park(request, lambda: self._run.evaluations.ready)
        if due is None:
            return EvaluationAnswer(version=None)
        self._run.member(request)  # the sender may have been removed while its request was parked
        self._run.evaluations.begin_attempt()
        scored = self._run.state.results.row_scores(due.version)
        return EvaluationAnswer(version=due.version, holder=due.holder, scored=RowScores.of(scored) if scored else None)

    @handles(RowsScored)
    async def rows_scored(self, request: Request[RowsScored]) -> Done:
        self._run.member(request, "evaluator")
        version, scored = request.message.version, request.message.scored.by_row()
        if not all(0 <= row < self._run.config.data.eval_size for row in scored):
            raise RefusedError(f"there are {self._run.config.data.eval_size} held-out rows, not {max(scored)}")
        if self._run.evaluations.keep_scores(version, scored):
            self._run.progress.note_progress()
        return Done()

    @handles(EvaluationDone)
    async def evaluation_done(self, request: Request[EvaluationDone]) -> Done:
        self._run.member(request, "evaluator")
        if not self._run.evaluations.finish(request.message):
            return Done()
        record = evaluation_record(request.message)
        log.info("evaluated", **record)
        self._run.progress.note_progress()
        await self._run.journal.durable()
        await self._run.record("an evaluation", self._run.folder.append_evaluation, record)
        await self._run.end_if_complete()
        self._run.changed.notify()
        return Done()

    @handles(EvaluationAbandoned)
    async def evaluation_abandoned(self, request: Request[EvaluationAbandoned]) -> Done:
        self._run.member(request, "evaluator")
        abandoned, due = request.message, self._run.evaluations.due
        if due is None or due.version != abandoned.version:
            return Done()
        if not self._run.config.steps:  # nothing is noted: whoever starts the evaluation again wants it done
            self._run.end_if(f"The model was not evaluated: {abandoned.reason}.")
            return Done()
        self._run.evaluations.give_up(due, abandoned.reason)
        self._run.progress.note_progress()
        await self._run.end_if_complete()
        self._run.changed.notify()
        return Done()
