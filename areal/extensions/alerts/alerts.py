"""Alerts: sentences about faults in the metrics and rollouts of a run. No I/O and no clock.

An alert is about the newest steps: the alert ends once the run has recovered. An alert compares the mean of the last
RECENT steps with the level of the first EARLY steps (their median: in the first step only the shortest samples are
finished). A change counts if it is large, by the thresholds below, and if the recent value is higher (or lower) in a
share PAIRS of all pairs of an early and a recent value: 19 of the 3003 orders of 15 values meet this. If a healthy run
may show the same sign, an alert needs a second sign: lengths, entropy and the variety of answers change a lot while a
policy learns, but then its reward rises.

Of 150 simulated runs of 120 steps, with 4 to 64 prompts a step and no fault, looked at every 5 steps, 8 had an alert
about a change, once. A quickstart paid for short answers had an alert from step 15 on: the first step with a verdict.

The thresholds of single values are the healthy ranges of docs/observe.md, or half way to the limits of the guard, which
ends the run. With all thresholds the recorded quickstarts are silent at every step.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal.storage.disk import STEPS_LOOKED_AT, running_out
from areal.training.engine_gap import GAP, unusual_gap

EARLY = 10
RECENT = 5
PAIRS = 0.9
PAIRS_RISEN = 0.7
ERRORS = 4.0
"""Standard errors by which evaluations have to differ."""
FACTOR = 2.0
"""Lengths: a policy that halves or doubles its answers without more reward no longer does the task."""
REMAINS = 0.25
"""Lengths: below this share of the early level an alert needs no look at the reward: little of an answer is left."""
CUT = 0.1
"""The rise of the share of cut samples. Each cut sample teaches that an answer without its end is wrong."""
EXPIRED = 0.5
"""Sessions of users: above this share of expired sessions, most feedback of users is lost."""
PART = 0.1
"""Parts of the reward: change as a share of the larger level. Conflicting parts often have smaller changes."""
TOKEN = 0.25
TOKEN_RISE = 0.15
"""The share of a token, and its rise. The most frequent token of texts has about 0.05, of the quickstart 0.19."""
COPIES = 0.5
COPIES_RISE = 0.25
"""The share of copies in a group, and its rise. With short answers the share is high from the start (quickstart: 0.4),
and it rises with the accuracy if there is a single right answer: the share is a bad sign only if the reward stays."""
UNANSWERED = 0.2
"""The share of samples rewarded by `math` without the row's answer in them. With a right reward the share is 0, except
for answers in words or in another unit."""
MIXED = 0.3
SAMPLE_SIZE = 0.5
WEIGHT_MEAN = (0.9, 1.1)
ENTROPY = 0.1
"""The share of the early entropy. Entropy falls in every run that learns (quickstart: to 0.4 in 120 steps)."""
PROMPTS = 5
"""Prompts named in a sentence."""

Filters = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Alert:
    """`sentence` names the fault since step `first`, with numbers, and the remedy. `filters` select its rollouts, as on
    the web page: a column, or a column with _min or _max, and its value."""

    name: str
    sentence: str
    first: int
    last: int
    filters: Filters = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The filters as an SQL condition, for `areal rollouts --where`."""
        return " and ".join(_sql(name, value) for name, value in self.filters.items())


@dataclass(frozen=True, slots=True)
class Digest:
    """The trained rollouts of a step.

    tokens: the most frequent sampled tokens, with their share of all. copies: the share of samples equal to an earlier
    sample of their group, token by token. Both may be from a part of the samples, and are None if the part is empty.
    flat: the share of groups with equal rewards of all samples, by reward. flat_prompts: indices of some of their
    prompts. unanswered: the share of rewarded samples without the row's answer in them, among rows with an integer as
    the answer; None without such samples.
    """

    step: int
    tokens: dict[int, float] | None
    copies: float | None
    flat: dict[float, float]
    flat_prompts: tuple[int, ...]
    unanswered: float | None = None


def _sql(name: str, value: str | int | float) -> str:
    column, _, end = name.rpartition("_")
    if end in ("min", "max"):
        return f"{column} {'>=' if end == 'min' else '<='} {value}"
    return f"{name} = '{value}'" if isinstance(value, str) else f"{name} = {value}"


def alerts(
    records: Sequence[Mapping[str, Any]],
    digests: Sequence[Digest] = (),
    evaluations: Sequence[Mapping[str, Any]] = (),
    guard: Mapping[str, Any] | None = None,
    named: Callable[[int], str] = str,
    is_math: bool = False,
    taught: bool = False,
) -> list[Alert]:
    """Return the alerts of a run; alerts about the policy come first.

    records: metrics.jsonl, by step; evaluations: evaluations.jsonl, by version. Missing values, null and infinities
    count as not measured. guard: the limits in the configuration's section. named: returns a token's name. is_math:
    whether the reward compares with the row's answer. taught: whether a teacher trains the policy; then the agreement
    with the teacher stands for the reward, and groups need no signal.
    """
    if not records:
        return []
    filtered = any(record.get("groups_filtered") for record in records)
    reward = Curve.of(records, "reward_mean_all" if filtered else "reward_mean")
    shares = [{"step": digest.step, "copies": digest.copies, "unanswered": digest.unanswered} for digest in digests]
    if taught:
        reward = Curve.of(records, "teacher_agreement")
        reward.name = "the agreement with the teacher"
    return [
        *_lengths(Curve.of(records, "completion_tokens_mean"), reward),
        *_cut(Curve.of(records, "cut_share")),
        *_parts(records, reward),
        *_expired(records),
        *_nothing_trained(Curve.of(records, "optimizer_steps")),
        *_evaluations(evaluations, reward),
        *_token(digests, named),
        *_copies(Curve.of(shares, "copies"), reward),
        *(_unanswered(Curve.of(shares, "unanswered")) if is_math else ()),
        *(_teacher(Curve.of(records, "kl_teacher")) if taught else ()),
        *(() if taught or records[-1].get("value_loss") else _no_signal(records, digests, filtered)),
        *_entropy(Curve.of(records, "entropy"), reward, guard or {}),
        *_ranges(records, guard or {}),
        *_disk(Curve.of(records, "disk_free")),
    ]


class Curve:
    """A number by step. `level`: the median of the first EARLY values, nan without RECENT further values. `means`: at
    each step the mean of RECENT values up to the step, nan without so many."""

    name = "the reward"  # the name of the training signal

    def __init__(self, steps: Sequence[int], values: Sequence[float]) -> None:
        self.steps = np.asarray(steps, int)
        self.values = np.asarray(values, float)
        self.means = np.full(len(values), np.nan)
        self.level = np.nan
        self._above, self._below = np.zeros((2, len(values)))  # shares of pairs of a recent and an early value
        if len(values) >= RECENT:
            windows = np.lib.stride_tricks.sliding_window_view(self.values, RECENT)
            self.means[RECENT - 1 :] = windows.mean(1)
            if len(values) >= EARLY + RECENT:
                early = self.values[:EARLY]
                self.level = float(np.median(early))
                self._above[RECENT - 1 :] = (windows[:, :, None] > early).mean((1, 2))
                self._below[RECENT - 1 :] = (windows[:, :, None] < early).mean((1, 2))

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], key: str) -> "Curve":
        """Return the curve of a metric, or with a dot of a metric's part, at the steps with a value."""
        name, _, part = key.partition(".")
        values = [(record.get(name) or {}).get(part) if part else record.get(name) for record in records]
        points = [
            (record["step"], value)
            for record, value in zip(records, values, strict=True)
            if isinstance(value, int | float) and np.isfinite(value)
        ]
        return cls([step for step, _ in points], [value for _, value in points])

    @property
    def last(self) -> float:
        return float(self.means[-1]) if len(self.means) else np.nan

    def rises(self, by: float = 0.0) -> np.ndarray:
        """Return bool by step: the mean is above the level by more than `by`, and by more than chance explains."""
        return (self.means - self.level > by) & (self._above >= PAIRS)

    def falls(self) -> np.ndarray:
        return (self.means < self.level) & (self._below >= PAIRS)

    def is_far(self) -> np.ndarray:
        """Return bool by step: the mean differs from the level by more than PART of the larger value."""
        return np.asarray(np.abs(self.means - self.level) > PART * np.maximum(np.abs(self.means), np.abs(self.level)))

    def rose(self) -> bool:
        """Return whether the mean is now above the level. A rise silences alerts, so fewer pairs are enough."""
        return bool(len(self.values)) and bool(self._above[-1] >= PAIRS_RISEN)

    def since(self, wrong: np.ndarray) -> int | None:
        """Return the first step of the newest change, or None if the newest mean is sound. A mean becomes wrong some
        steps after its values: values nearer to the newest mean than to the level belong to the change."""
        if not len(wrong) or not wrong[-1]:
            return None
        sound = np.flatnonzero(~wrong)
        first = end = int(sound[-1]) + 1 if len(sound) else 0
        near = np.abs(self.values - self.last) < np.abs(self.values - self.level)
        while first > max(0, end - RECENT + 1) and near[first - 1]:
            first -= 1
        return int(self.steps[first])


def _alert(name: str, curve: Curve, first: int, sentence: str, **filters: str | float) -> Alert:
    last = int(curve.steps[-1])
    return Alert(name, sentence, first, last, {"step_min": first, "step_max": last} | filters)


def _lengths(length: Curve, reward: Curve) -> Iterator[Alert]:
    unpaid = "" if reward.rose() else f", and {reward.name} has not risen"
    change = f"from {length.level:.0f} to {length.last:.0f} tokens"
    if first := length.since(length.falls() & (length.means < length.level * (1 / FACTOR if unpaid else REMAINS))):
        sentence = (
            f"Completions have shrunk {change} since step {first}{unpaid}: read whether they still do the task, and "
            f"whether the reward pays for short completions."
        )
        yield _alert("length collapse", length, first, sentence, completion_tokens_max=round(length.level / FACTOR))
    if unpaid and (first := length.since(length.rises() & (length.means > length.level * FACTOR))):
        sentence = (
            f"Completions have grown {change} since step {first}{unpaid}: read what fills them, and whether the reward "
            f"pays for long completions; set reward.overlong_tokens."
        )
        yield _alert("length explosion", length, first, sentence, completion_tokens_min=round(length.level * FACTOR))


def _cut(cut: Curve) -> Iterator[Alert]:
    if first := cut.since(cut.rises(CUT)):
        sentence = (
            f"{cut.last:.0%} of the completions have been cut off at the limit of tokens since step {first}, at first "
            f"{cut.level:.0%}: raise sampling.max_new_tokens, or set reward.overlong_tokens."
        )
        yield _alert("cut completions", cut, first, sentence, finish="length")


def _expired(records: Sequence[Mapping[str, Any]]) -> Iterator[Alert]:
    """Yield an alert if too many sessions of users expire before their reward."""
    sessions = [(r["step"], r.get("sessions_expired") or 0, r.get("sessions_trained") or 0) for r in records]
    points = [(step, expired / (expired + trained)) for step, expired, trained in sessions if expired + trained]
    share = Curve([step for step, _ in points], [value for _, value in points])
    if first := share.since(share.means > EXPIRED):
        sentence = (
            f"{share.last:.0%} of the sessions of users have expired since step {first}, before their reward came: ask "
            f"for feedback earlier, or raise max_staleness or batch_size."
        )
        yield _alert("sessions expire", share, first, sentence)


def _parts(records: Sequence[Mapping[str, Any]], reward: Curve) -> Iterator[Alert]:
    parts_now = records[-1].get("reward_parts") or ()
    names = sorted(name for name in parts_now if name.rpartition("/")[2] != "tokens")  # a judge's cost is no aim
    parts = {f"part {name}": Curve.of(records, f"reward_parts.{name}") for name in names}

    def since(curves: Mapping[str, Curve], wrong: Callable[[Curve], np.ndarray]) -> dict[str, int]:
        starts = {name: curve.since(wrong(curve) & curve.is_far()) for name, curve in curves.items()}
        return {name: first for name, first in starts.items() if first}

    risen, fallen = since(parts, Curve.rises), since(parts | {reward.name: reward}, Curve.falls)
    if risen and fallen:
        first = max(min(risen.values()), min(fallen.values()))
        changes = [
            ", ".join(f"{name} from {curve.level:.3g} to {curve.last:.3g}" for name in which if (curve := all_of[name]))
            for which, all_of in ((risen, parts), (fallen, parts | {reward.name: reward}))
        ]
        sentence = (
            f"One aim has been served at the cost of another since step {first}: {changes[0]} has risen, {changes[1]} "
            f"has fallen; read how the first is earned, and change its rule or its weight."
        )
        yield _alert("reward parts diverge", reward, first, sentence)


def _evaluations(evaluations: Sequence[Mapping[str, Any]], reward: Curve) -> Iterator[Alert]:
    scored = [e for e in evaluations if e.get("accuracy") is not None and e.get("standard_error") is not None]
    if not scored or not reward.rose():
        return
    best, newest = max(scored, key=lambda e: float(e["accuracy"])), scored[-1]
    error = float(np.hypot(best["standard_error"], newest["standard_error"]))
    if best["accuracy"] - newest["accuracy"] > ERRORS * error:
        sentence = (
            f"Held-out accuracy has fallen from {best['accuracy']:.1%} (version {best['version']}) to "
            f"{newest['accuracy']:.1%} (version {newest['version']}), while {reward.name} has risen from "
            f"{reward.level:.3g} to {reward.last:.3g}: the policy earns it by something else than the task, or knows "
            f"its prompts by heart."
        )
        yield _alert("held-out accuracy falls", reward, best["version"] + 1, sentence)


def _token(digests: Sequence[Digest], named: Callable[[int], str]) -> Iterator[Alert]:
    points = [(digest.step, digest.tokens) for digest in digests if digest.tokens]
    if not points:
        return
    newest = points[-1][1]
    token = max(newest, key=lambda candidate: newest[candidate])
    share = Curve([step for step, _ in points], [tokens.get(token, 0.0) for _, tokens in points])
    if first := share.since(share.rises(TOKEN_RISE) & (share.means > TOKEN)):
        sentence = (
            f"Token {named(token)} has made up {share.last:.0%} of all sampled tokens since step {first}, at first "
            f"{share.level:.0%}: read whether the policy repeats a template, and whether the reward pays for it."
        )
        yield _alert("one token dominates", share, first, sentence)


def _copies(share: Curve, reward: Curve) -> Iterator[Alert]:
    if (first := share.since(share.rises(COPIES_RISE) & (share.means > COPIES))) and not reward.rose():
        sentence = (
            f"{share.last:.0%} of the samples have been copies of others in their group since step {first}, at first "
            f"{share.level:.0%}, and {reward.name} has not risen: the policy collapses to few answers; lower "
            f"trainer.lr, or raise trainer.eps_clip_higher."
        )
        yield _alert("copies in groups", share, first, sentence)


def _unanswered(share: Curve) -> Iterator[Alert]:
    if first := share.since(share.means > UNANSWERED):
        sentence = (
            f"{share.last:.0%} of the rewarded samples have not contained the row's answer since step {first}: read "
            f"what they are paid for, and correct the reward."
        )
        yield _alert("rewarded without the answer", share, first, sentence, reward_min=0.001)


def _no_signal(records: Sequence[Mapping[str, Any]], digests: Sequence[Digest], filtered: bool) -> Iterator[Alert]:
    mixed = Curve.of([{"share": _mixed(record, filtered), **record} for record in records], "share")
    if not (first := mixed.since(mixed.means < MIXED)):
        return
    sentence = f"{1 - mixed.last:.0%} of the groups have had no signal since step {first}, all samples with one reward"
    filters: Filters = {}
    newest = [digest for digest in digests if digest.step >= first][-RECENT:]
    rewards = Counter[float]()
    for digest in newest:
        rewards.update(digest.flat)  # adds the shares
    if rewards and not filtered:
        frequent = rewards.most_common(2)
        shares = " and ".join(f"{share / len(newest):.0%} always {reward:.3g}" for reward, share in frequent)
        prompts = [prompt for digest in reversed(newest) for prompt in digest.flat_prompts][:PROMPTS]
        sentence += f" ({shares}; the newest are of prompts {', '.join(map(str, prompts))})"
        filters = {"reward_min": frequent[0][0], "reward_max": frequent[0][0]}
    sentence += ": the prompts are too easy or too hard; take other data"
    sentence += "." if filtered else ", or set filter_zero_signal."
    alert = _alert("no signal", mixed, first, sentence, **filters)
    # Filtered groups have no step.
    yield replace(alert, filters={"fate": "filtered", "start_version_min": first - 1}) if filtered else alert


def _nothing_trained(moves: Curve) -> Iterator[Alert]:
    if first := moves.since(moves.means == 0):
        sentence = (
            f"No step has moved the weights since step {first}, as every token was masked: raise max_staleness or "
            f"sampling.max_new_tokens, or widen the bounds of the masks (areal docs objectives)."
        )
        yield _alert("nothing trained", moves, first, sentence)


def _teacher(distance: Curve) -> Iterator[Alert]:
    if first := distance.since(distance.rises() & distance.is_far()):
        sentence = (
            f"The policy has moved away from its teacher since step {first}: kl_teacher is {distance.last:.2g} nats a "
            f"token, at first {distance.level:.2g}; lower trainer.lr or max_staleness, or read what it prefers."
        )
        yield _alert("away from the teacher", distance, first, sentence)


def _mixed(record: Mapping[str, Any], filtered: bool) -> float | None:
    """Return the share of groups with different rewards, among the trained groups or the groups before filtering."""
    mixed = record.get("mixed_groups")
    if mixed is None or not filtered:
        return mixed
    trained = record.get("groups_trained") or 0
    return mixed * trained / max(1, trained + (record.get("groups_filtered") or 0))


def _entropy(entropy: Curve, reward: Curve, guard: Mapping[str, Any]) -> Iterator[Alert]:
    limit = guard.get("entropy", 0.0)
    collapsed = entropy.falls() & (entropy.means < ENTROPY * entropy.level) & (not reward.rose())
    if first := entropy.since(collapsed | (entropy.means < 2 * limit)):
        near = f" (the guard ends the run below {limit:g})" * bool(limit)
        sentence = (
            f"Entropy has been at {entropy.last:.2g} nats a token since step {first}{near}, at first "
            f"{entropy.values[:EARLY].mean():.2g}: the policy collapses to few answers; lower trainer.lr, or raise "
            f"trainer.eps_clip_higher."
        )
        yield _alert("entropy collapse", entropy, first, sentence)


def _ranges(records: Sequence[Mapping[str, Any]], guard: Mapping[str, Any]) -> Iterator[Alert]:
    size, limit = Curve.of(records, "effective_sample_size"), guard.get("effective_sample_size", 0.0)
    if first := size.since(size.means < max(SAMPLE_SIZE, 2 * limit)):
        near = f" (the guard ends the run below {limit:g})" * bool(limit)
        sentence = (
            f"The effective sample size has been at {size.last:.2f} since step {first}{near}: the samples are too far "
            f"from the policy in training; lower max_staleness or trainer.lr."
        )
        yield _alert("small effective sample size", size, first, sentence)
    weight = Curve.of(records, "weight_mean")
    if first := weight.since((weight.means < WEIGHT_MEAN[0]) | (weight.means > WEIGHT_MEAN[1])):
        sentence = (
            f"The mean importance weight has been at {weight.last:.2f} since step {first}: pi_behav is not the policy "
            f"that sampled; look at logprob_gap, then lower max_staleness or trainer.lr."
        )
        yield _alert("weights far from 1", weight, first, sentence)
    limit = guard.get("logprob_gap") or 0.0
    for name in ("logprob_gap", "engine_gap"):
        gap = Curve.of(records, name)
        unusual = unusual_gap(gap.level) if name == "engine_gap" and gap.level > 0 else GAP
        if first := gap.since(gap.values > min(GAP, unusual, limit / 2 if limit else GAP)):
            near = f" (the guard ends the run above {limit:g})" * bool(limit)
            sentence = (
                f"Generators and trainer have computed log-probs {gap.values[-1]:.2g} nats apart on the same weights "
                f"since step {first}{near}: compare generator.dtype with trainer.dtype, and the sampling settings."
            )
            yield _alert("log-prob gap", gap, first, sentence)


def _disk(free: Curve) -> Iterator[Alert]:
    if sentence := running_out(free.values.tolist()):
        yield _alert("disk fills up", free, int(free.steps[-STEPS_LOOKED_AT:][0]), sentence)
