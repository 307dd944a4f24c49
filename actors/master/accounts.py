"""The master's records of a run: the metrics of every step, and the summary at the end."""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from actors.master.run_state import RunState
from actors.runtime.actor import Ending
from areal.config import Config
from areal.rewards.functions import mean_parts
from areal.staleness.ledger import RunEnded, Waiting
from areal.staleness.ledger_state import EXPIRED, ZERO_SIGNAL, Batch, GroupState, StepRecord
from areal.storage.events import COUNTERS
from protocols.evaluation_messages import EvaluationDone
from protocols.messages import CommitStep
from protocols.session_messages import KeyUse

# Validity of a gateway's report of the use of keys, and of its open sessions, which a lost gateway leaves to others.
REPORT_SECONDS, PRESENT_SECONDS = 60.0, 5.0
# Number of recent steps kept for monitors that connect late, and the names of the kept metrics.
RECENT_STEPS = 512
RECENT = (
    "step", "reward_mean", "reward_mean_all", "groups_filtered", "groups_ready", "staleness_mean", "staleness_max",
    "tokens_generated", "tokens_trained", "step_seconds", "step_seconds_median", "trainer_wait_seconds",
)  # fmt: skip


class KeyRecords:
    """The use of users' keys, by the last report of every gateway. A report counts for a minute, the period of its
    numbers, even if the gateway is lost: a lost gateway gives no key more room."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Mapping[str, KeyUse]]] = {}  # by gateway: the time, and the use by key

    def note(self, gateway: str, uses: Mapping[str, KeyUse], now: float) -> None:
        self._reports[gateway] = now, uses
        self._reports = {name: report for name, report in self._reports.items() if now - report[0] < REPORT_SECONDS}

    def total(self, now: float, apart: str = "") -> dict[str, KeyUse]:
        """The use by key, without the report of the gateway `apart`."""
        sums: dict[str, Counter[str]] = {}
        for gateway, (when, uses) in self._reports.items():
            for key, use in uses.items() if gateway != apart else ():
                present = use if now - when < PRESENT_SECONDS else use.model_copy(update={"sessions": 0})
                sums.setdefault(key, Counter()).update(present.model_dump())
        return {key: KeyUse(**numbers) for key, numbers in sums.items()}


class StepMeter:
    """Measures the current step, from the last commit to the next, with `clock`, in seconds. `keys`: of users."""

    def __init__(self, state: RunState, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock
        self.keys = KeyRecords()
        self._counted: Counter[str] = Counter()
        self._starved = 0.0
        self._starving_since: float | None = None
        self._left_over: int | None = None
        self._begun: float | None = None
        self._recent = deque([_main_metrics(state.last_step)] if state.last_step else [], RECENT_STEPS)

    def begin(self) -> None:
        """Start the clock of this master's first step. Further calls have no effect."""
        self._begun = self._clock() if self._begun is None else self._begun

    def count(self, stats: Mapping[str, float], previous: Mapping[str, float] | None) -> Counter[str]:
        """Add to the step, and return, the growth of a member's counters since the last heartbeat.

        stats: of the new heartbeat. previous: of the last heartbeat; None for the first heartbeat of a member that
        joined an earlier master, which adds nothing.
        """
        fresh: Counter[str] = Counter()
        if previous is not None:
            differences = ((name, stats.get(name, 0.0) - previous.get(name, 0.0)) for name in COUNTERS)
            fresh.update({name: difference for name, difference in differences if difference})
        if fresh:
            self._counted += fresh
        return fresh

    def record_wait(self, answer: Batch | Waiting | RunEnded) -> None:
        """Count the ledger's answer to a trainer that asks for a batch: the time with fewer ready groups than a batch,
        and the number of ready groups left over when the batch is formed."""
        now = self._clock()
        if isinstance(answer, Waiting) and answer.ready < answer.needed:
            self._starving_since = now if self._starving_since is None else self._starving_since
        elif self._starving_since is not None:
            self._starved += now - self._starving_since
            self._starving_since = None
        if isinstance(answer, Batch) and self._left_over is None:
            self._left_over = self._state.ledger.state.groups.count(GroupState.READY)

    def metrics(self, commit: CommitStep, record: StepRecord) -> dict[str, Any]:
        """The metrics of the step that `commit` ends. The call begins the next step."""
        state, alive, now = self._state, self._state.ledger.state.groups, self._clock()
        groups = record.batch.group_ids
        rewards = [state.tally.rewards[group] for group in groups]
        seconds = now - self._begun if self._begun is not None else 0.0
        trained = commit.metrics.get("tokens_trained")
        mixed = sum(prompt >= 0 for prompt in record.prompts) * (commit.metrics.get("mixed_groups") or 0.0)
        metrics: dict[str, Any] = {
            **commit.metrics,
            "step": commit.version,
            "reward_mean": sum(rewards) / len(rewards),
            "reward_mean_all": state.tally.score / state.tally.scored if state.tally.scored else None,
            "reward_parts": mean_parts(state.tally.reward_parts[group] for group in groups),
            "groups_filtered": sum(reason == ZERO_SIGNAL for _, reason in state.tally.discarded),
            "staleness_mean": record.mean_staleness,
            "staleness_max": record.max_staleness,
            "staleness_histogram": record.staleness_histogram,
            **{name: n if name.endswith("_seconds") else int(n) for name in COUNTERS for n in [self._counted[name]]},
            "step_seconds": seconds,
            "step_seconds_median": median([*(step["step_seconds"] for step in self._recent), seconds][-20:]),
            "effective_throughput": trained / seconds if trained is not None and seconds else None,
            "groups_trained": len(groups),
            "tokens_per_mixed_group": self._counted["tokens_generated"] / mixed if mixed else None,
            "coverage": coverage(state),
            "groups_ready": alive.count(GroupState.READY),
            "groups_alive": len(alive),
            "groups_left_over": self._left_over or 0,
            "starved_seconds": self._starved,
            "prompts": list(record.prompts),
            "discarded": state.tally.discarded.copy(),
        }
        if state.settings.max_sessions:
            metrics["sessions_open"] = alive.count(GroupState.OPEN)
            metrics["sessions_trained"] = sum(prompt < 0 for prompt in record.prompts)
            metrics["sessions_expired"] = sum(reason == EXPIRED for _, reason in state.tally.discarded)
        if keys := self.keys.total(now):
            metrics["keys"] = {name: use.model_dump() for name, use in keys.items()}
        # Before the first step the trainer also waits for other actors to start. The step does not count this wait.
        waited = commit.metrics.get("trainer_wait_seconds") or 0.0
        metrics["trainer_wait_seconds"] = min(waited, metrics["step_seconds"])
        self._counted, self._begun = Counter(), now
        self._starved, self._left_over = 0.0, None
        self._recent.append(_main_metrics(metrics))
        return metrics

    @property
    def tokens_sampled(self) -> int:
        """The number of sampled tokens by the counts of all generators, without tokens of evaluations. Tokens that a
        generator samples after its last heartbeat are missing."""
        return self._state.tally.tokens_sampled + int(
            self._counted["tokens_generated"] - self._counted["tokens_evaluated"]
        )

    def recent(self, since: int) -> list[dict[str, Any]]:
        """The main metrics of the recent steps after step `since`."""
        return [metrics for metrics in self._recent if metrics["step"] > since]


def coverage(state: RunState) -> float | None:
    """The share of rows with an admitted prompt; None if the data has no end."""
    if state.history.source is None and state.rows is not None:  # in an epoch every row comes once
        return min(1.0, state.ledger.state.prompts.next_prompt / state.rows)
    return state.history.coverage()


def _main_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in RECENT if name in metrics}


def summary(config: Config, state: RunState, ending: Ending, tokens_sampled: int) -> dict[str, Any]:
    """The contents of summary.json, for a run that has ended. tokens_sampled: by the counts of the generators."""
    counters = state.ledger.state.counters
    tally, results = state.tally, state.results
    first, last = results.evaluations.get(0), results.evaluations.get(config.steps)
    samples = (counters.trained - counters.sessions_trained) * config.group_size + counters.sessions_trained
    accounted = tally.tokens_trained + tally.tokens_discarded + sum(tally.tokens.values())
    tokens = max(accounted, tokens_sampled)
    return {
        "ok": ending.ok,
        "reason": ending.reason,
        "steps": state.ledger.version,
        "accuracy_before": first and first.accuracy,
        "accuracy_after": last and last.accuracy,
        "evaluations": [evaluation_record(evaluation) for evaluation in results.evaluations.values()],
        "not_evaluated": {str(version): reason for version, reason in results.not_evaluated.items()},
        "max_staleness": config.max_staleness,
        "samples_trained": samples,
        "samples_per_second": samples / state.seconds if state.seconds else None,
        "effective_throughput": tally.tokens_trained / state.seconds if state.seconds else None,
        "tokens_generated": tokens,
        "tokens_trained": tally.tokens_trained,
        "tokens_discarded": tally.tokens_discarded,
        "tokens_lost": tokens - accounted,
        "tokens_untrained_share": 1 - tally.tokens_trained / tokens if tokens else None,
        "seconds": state.seconds,
        "checkpoint": state.checkpoint,
        "weights": {"version": state.policy.version, "stamp": state.policy.stamp},
        "lineages": state.lineage + 1,
        "masters": state.masters,
        "restarts": _restarts(state),
        "rollbacks": state.rollbacks,
        "sessions": {"opened": state.ledger.state.prompts.next_session, "trained": counters.sessions_trained},
        "groups_discarded": dict(counters.discarded),
        "groups_requeued": dict(counters.requeued),
        "prompts_open": state.ledger.state.open_prompts(),
        "discarded": tally.discarded,
        "samples_before": [s.model_dump() for s in first.samples] if first else [],
        "samples_after": [s.model_dump() for s in last.samples] if last else [],
    }


def _restarts(state: RunState) -> dict[str, int]:
    """The number of restarted processes by role."""
    restarts = Counter({"master": state.masters - 1})
    for name, starts in state.starts.items():
        restarts[name.partition("/")[0]] += starts - 1
    return {role: times for role, times in restarts.items() if times > 0}


def evaluation_record(evaluation: EvaluationDone) -> dict[str, Any]:
    """The numbers of an evaluation, without the samples."""
    return evaluation.model_dump(exclude={"samples"})
