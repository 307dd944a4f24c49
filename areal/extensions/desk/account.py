"""The account of a run in sentences, and the headline numbers of its page."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.base.text import duration, percent
from areal.data import addition
from areal.storage.record import Record, number_or_nan

HELD_OUT = "held-out accuracy"
# Reasons why sessions of users are not trained.
FATES = "expired", "deleted", "opted out", "failed", "unused"


def account(run: Record) -> str:
    """Tell in sentences how the run's reward changed, how stale its groups were, and how many tokens were lost."""
    summary, rewards = run.ending or {}, run.metrics.series("reward_mean")
    if not rewards:
        return ""
    few = max(1, min(10, len(rewards) // 3))
    first, last = (sum(part) / few for part in (rewards[:few], rewards[-few:]))
    early, late = ("first step", "last") if few == 1 else (f"first {few} of them", f"last {few}")
    model = Path(run.configuration.settings.get("model", "The model")).name
    seconds = math.fsum(filter(math.isfinite, run.metrics.series("step_seconds")))
    says = [
        f"{model} was trained for {run.metrics.trained:,} steps in {duration(seconds)}. Its mean reward was "
        f"{first:.3f} in the {early} and {last:.3f} in the {late}."
    ]
    if ages := [*filter(math.isfinite, run.metrics.series("staleness_max"))]:
        bound = number_or_nan(run.configuration.settings.get("max_staleness", summary.get("max_staleness")))
        versions = "version" if max(ages) == 1 else "versions"
        allowed = "" if math.isnan(bound) else f"; {bound:g} were allowed"
        says.append(f"No group was more than {max(ages):g} {versions} behind the weights that it trained{allowed}.")
    if isinstance(lost := summary.get("tokens_untrained_share"), int | float):
        says.append(f"{percent(lost)} of the generated tokens were not trained on.")
    return " ".join([*says, *interruptions(summary), *sessions_of_users(summary)])


def interruptions(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on restarted processes and on returns to a checkpoint."""
    if restarts := summary.get("restarts"):
        times = ", ".join(f"{role} {number:,}" for role, number in restarts.items())
        yield f"Processes were started again after a stop or a failure, or when the run was resumed: {times}."
    if rollbacks := summary.get("rollbacks"):
        yield f"The run went back to a checkpoint {'once' if rollbacks == 1 else f'{rollbacks:,} times'}."


def sessions_of_users(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on the fates of the users' sessions."""
    sessions = summary.get("sessions") or {}
    if sessions.get("opened"):
        discarded = summary.get("groups_discarded") or {}
        fates = {"trained": sessions["trained"]} | {fate: discarded.get(fate, 0) for fate in FATES}
        counts = ", ".join(f"{number:,} {fate}" for fate, number in fates.items() if number)
        yield f"Of {sessions['opened']:,} sessions of users that could be trained: {counts or 'none has ended'}."


def headlines(run: Record) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page, as (name, value). The held-out accuracy comes first, from the first
    evaluation to the newest, with two standard errors of the newest. Unknown numbers are left out."""
    scores: dict[str, list[dict[str, Any]]] = {}
    for evaluation in sorted(run.metrics.evaluations, key=lambda evaluation: evaluation["version"]):
        for name, scored in {HELD_OUT: evaluation, **(evaluation.get("benchmarks") or {})}.items():
            if scored.get("accuracy") is not None:
                scores.setdefault(name, []).append(scored)
    cards = [(name, _from_to(scored)) for name, scored in scores.items()]
    summary = run.ending or {}
    forms = {
        "samples a second": ("samples_per_second", "{:,.1f}".format),
        "samples trained": ("samples_trained", "{:,.0f}".format),
        "trainer idle": ("trainer_idle", percent),
        "log-prob gap, max": ("logprob_gap_max", "{:.1e}".format),
    }
    known_forms = ((name, summary.get(key), form) for name, (key, form) in forms.items())
    return cards + [(name, form(value)) for name, value, form in known_forms if isinstance(value, int | float)]


def _from_to(scores: Sequence[Mapping[str, Any]]) -> str:
    shares = dict.fromkeys(percent(scored["accuracy"]) for scored in (scores[0], scores[-1]))
    error = scores[-1].get("standard_error")
    return " → ".join(shares) + (f" ± {percent(2 * error)}" if error else "")


def notation(run: Record) -> str:
    """Explain how the quickstart's sums are written. Empty for any other run."""
    return (
        addition.WORKING_IN_WORDS if (run.configuration.settings.get("data") or {}).get("source") == "addition" else ""
    )


def fork_lines(runs: Iterable[Record]) -> list[str]:
    """Return the forks among these runs as a tree: a line for each run, below its parent. Empty without forks."""
    tree: dict[tuple[tuple[int, str], ...], str] = {}
    for run in runs:
        identity = run.metrics.records[-1].get("run", run.name) if run.metrics.records else run.name
        names = [*((origin.run, origin.name) for origin in run.configuration.origins), (identity, run.name)]
        path: tuple[tuple[int, str], ...] = ()
        for (run_id, name), step in zip(
            names, [0, *(origin.step for origin in run.configuration.origins)], strict=True
        ):
            tree[*path, (step, run_id)] = "    " * len(path) + name + f", from step {step} on" * bool(step)
            path = (*path, (step, run_id))
    return [tree[path] for path in sorted(tree)] if any(len(path) > 1 for path in tree) else []
