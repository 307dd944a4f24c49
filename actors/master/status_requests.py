"""Requests of users and of processes outside the run: the status, the configuration, the weight of a reward."""

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from actors.master import changes
from actors.master.run_control import RunControl
from actors.runtime.actor import HandlesRequests, handles
from areal.base.secrets import without_secrets
from areal.weights.model_files import digests_of
from protocols.bus_errors import RefusedError
from protocols.membership_messages import AddReward, AskConfig, AskStatus, Configuration, Status
from protocols.messages import MAX_SERVED, Done
from protocols.transport import Request

log = structlog.get_logger()


class StatusRequests(HandlesRequests):
    """Answers monitors, processes that are about to join, and whoever changes the weight of a reward. alerts: returns
    the sentences for the user of the run."""

    def __init__(self, run: RunControl, alerts: Callable[[], list[str]]) -> None:
        self._run = run
        self._alerts = alerts
        self._model = digests_of(Path(run.config.model))

    @handles(AskConfig)
    async def ask_config(self, request: Request[AskConfig]) -> Configuration:
        return Configuration(values=without_secrets(self._run.config.model_dump(mode="json")), model=self._model)

    @handles(AddReward)
    async def add_reward(self, request: Request[AddReward]) -> Done:
        name, weight = request.message.name, request.message.weight
        served = {name for m in self._run.state.members.values() if m.role == "reward" for name in m.serves}
        if name not in served | self._run.state.reward_names | {*self._run.config.judges}:
            names = ", ".join(sorted(served)) or "none"
            raise RefusedError(f"no actor serves {name!r} (served: {names}): start one, --role reward --reward {name}")
        prompt = self._run.ledger.state.prompts.next_prompt
        changed = self._run.state.rewards_of(prompt)
        if len({*changed, name}) > MAX_SERVED:
            raise RefusedError(f"the weights of at most {MAX_SERVED} rewards can be changed")
        if changed.get(name) != weight:
            self._run.state.emit(changes.RewardAdded(prompt=prompt, name=name, weight=weight))
            log.info("a reward has a new weight", reward=name, weight=weight, first_prompt=prompt)
        return Done()

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
