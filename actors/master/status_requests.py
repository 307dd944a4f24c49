"""Requests of processes outside the run to the master: for the status of the run, and for its configuration."""

import time
from collections.abc import Callable
from pathlib import Path

from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.base.secrets import without_secrets
from areal.weights.model_files import digests_of
from protocols.membership_messages import AskConfig, AskStatus, Configuration, Status
from protocols.transport import Request


class StatusRequests(HandlesRequests):
    """Answers monitors, and processes that are about to join. alerts: returns the sentences for the user of the run."""

    def __init__(self, run: RunControl, alerts: Callable[[], list[str]]) -> None:
        self._run = run
        self._alerts = alerts
        self._model = digests_of(Path(run.config.model))

    @handles(AskConfig)
    async def ask_config(self, request: Request[AskConfig]) -> Configuration:
        return Configuration(values=without_secrets(self._run.config.model_dump(mode="json")), model=self._model)

    @handles(AskStatus)
    async def ask_status(self, request: Request[AskStatus]) -> Status:
        since, run, config = request.message.since, self._run, self._run.config
        return Status(
            values={
                "run": config.name,
                "time": time.time(),
                "version": run.ledger.version,
                "lineage": run.state.lineage,
                "steps": config.steps,
                "max_staleness": config.max_staleness,
                "rewards": config.reward.functions | run.state.rewards_of(run.ledger.state.prompts.next_prompt),
                **run.admission.counts(),
                "waiting": str(run.shortage or run.progress.describe()),
                "alerts": self._alerts(),
                "metrics": run.state.last_step,
                "recent": [] if since is None else run.meter.recent(since),
                "accuracy": {
                    str(version): evaluation.accuracy
                    for version, evaluation in run.state.results.evaluations.items()
                    if evaluation.accuracy is not None
                },
                "members": run.members.status_rows(),
                "ended": run.end.done(),
                "events": run.announcements.publisher.address,
            }
        )
