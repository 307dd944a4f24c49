"""Audits a finished run by its record alone: journal, rollouts, checkpoints, and the stamp of the last weights.

Each check holds, fails, or is not shown, if the record lacks the data. Whoever can write all parts of a record can
forge a record that fits together: an audit shows that the parts agree and that the training gives these weights.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

import areal
from areal.base.command_line import output as terminal
from areal.base.errors import UserError
from areal.base.plugins import announce_code
from areal.base.processes import torchrun
from areal.config import Config
from areal.devices import set_allocator
from areal.extensions.desk.replay import Replay, keeps_weights, plan, run_variant
from areal.samples.tokenizer import reads_as_kept
from areal.samples.trajectory import Group, samples_of
from areal.staleness.invariants import check_invariants
from areal.staleness.ledger_records import event_of, state_of
from areal.staleness.ledger_state import BatchLogged, Committed, Discarded, LedgerError, LedgerSettings, LedgerState
from areal.storage.disk import replace
from areal.storage.record import Record

if TYPE_CHECKING:
    from areal.training.training_engine import TrainingEngine

Result = Literal["holds", "fails", "not shown"]
GAPS = 20.0
"""A sample's tokens are of a different version if their mean gap exceeds LEAST_GAP (nats) and exceeds GAPS times the
largest mean gap between engine and trainer in the run's metrics."""
LEAST_GAP = 1e-5
NAMED = 5
"""The most faults named for a check."""
TOLERANCE = 1e-6
_JOURNAL, _ONCE, _BOUND, _REWARDS, _TEXTS = (
    "the journal is whole and each event follows from earlier events",
    "each prompt is trained once, or left out for a reason",
    "each batch is within the bound",
    "rewards match the journal",
    "texts match the tokens",
)
_OF_RANKS = "AREAL_AUDIT_REPORT"
"""Environment variable of ranks: the file, of a random name, for the report of rank 0."""
_VERSIONS, _WEIGHTS = "each token has the right version", "the record gives these weights"
CHECKS = (_JOURNAL, _ONCE, _BOUND, _REWARDS, _TEXTS, _VERSIONS, _WEIGHTS)


@dataclass
class AuditFinding:
    """The result of a check. about: the compared data. faults: the places that fail. unknown: the missing data."""

    check: str
    about: str = ""
    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def result(self) -> Result:
        return "fails" if self.faults else "not shown" if self.unknown or not self.about else "holds"


@dataclass
class JournalFacts:
    """The facts of the journal. ledger: the ledger's state at the end. logged: the groups of each step's batch, and
    rewards: the mean reward of each group, both since the last snapshot. discarded: prompts of discarded groups.
    metrics: the record of the last step."""

    run: str
    ledger: LedgerState
    logged: dict[int, tuple[str, ...]]
    rewards: dict[str, float]
    discarded: set[int]
    metrics: dict[str, Any]


def run(options: Namespace) -> int:
    """`areal audit`."""
    set_allocator()
    console = terminal(160)
    audit = Audit(options.run, options.full)
    announce_code(options.run, audit.config.model_dump(mode="json"), options.trust)
    if file := os.environ.get(_OF_RANKS):  # this process is a rank
        report = audit.report()
        if os.environ["RANK"] == "0":
            replace(Path(file), json.dumps(report))
        return 0
    ranks = audit.config.trainer.ranks
    report = _report_of_ranks(ranks) if ranks > 1 else audit.report()
    console.print(_page(report))
    if options.json:
        replace(options.json, json.dumps(report, indent=2) + "\n")
    return 0 if report["ok"] else 1


def _report_of_ranks(ranks: int) -> dict[str, Any]:
    """Run this command by `ranks` ranks, since the trainer's rounding depends on their number. Returns the report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        process = subprocess.run(
            [*torchrun(ranks), "-m", "areal", *sys.argv[1:]], env=os.environ | {_OF_RANKS: str(file)}
        )
        if process.returncode:
            raise UserError(f"The run was not audited: one of its {ranks} ranks ended with {process.returncode}.")
        report: dict[str, Any] = json.loads(file.read_text())
    return report


class Audit:
    """The audit of the run in `folder`. The audit of a fork begins with the fork's checkpoint. full: train all steps
    again, else the steps between two checkpoints, drawn at random. Raises UserError if there is no finished run."""

    def __init__(self, folder: Path, full: bool = False) -> None:
        self.record, self.full = Record(folder), full
        self.config, self.summary = self.record.configuration.load(), self.record.ending or {}
        if not self.summary:
            raise UserError(f"The run in {folder} is not over, it has no summary.json: audit it once it is.")
        self.first, records = self.record.configuration.first_version, self.record.metrics.records
        self.earlier = [record for record in records if record["step"] <= self.first]
        self.records = {record["step"]: record for record in records[len(self.earlier) :]}
        # The first step that must have metrics.
        self.oldest = min(self.records) if self.config.observe.metrics_mib and self.records else self.first + 1
        self.changes = [change for change in self.record.configuration.changes if change["key"] == "max_staleness"]
        self.findings = {check: AuditFinding(check) for check in CHECKS}
        self.replayed: list[tuple[int, int]] = []

    def report(self) -> dict[str, Any]:
        """Make all checks. Returns the content of the JSON file."""
        began = time.time()
        journal = self._check_journal()
        try:
            self._check_groups(journal)
            self._check_texts()
            self._check_training(journal.run if journal else "")
        except UserError as error:  # a file cannot be read
            self.findings[_WEIGHTS].faults.append(str(error).splitlines()[0])
        findings = self.findings.values()
        return {
            "run": journal.run if journal else None,
            "folder": str(self.record.folder),
            "steps": max(self.records, default=0),
            "fork_of": [origin._asdict() for origin in self.record.configuration.origins],
            "weights": self.summary.get("weights"),
            "replayed": self.replayed,
            "full": self.full,
            "ok": all(finding.result == "holds" for finding in findings),
            "findings": [{"result": finding.result, **asdict(finding)} for finding in findings],
            "program": areal.__version__,
            "time": began,
            "seconds": time.time() - began,
        }

    # --- the journal

    def _check_journal(self) -> JournalFacts | None:
        finding, facts = self.findings[_JOURNAL], None
        try:
            facts = read_journal(self.record)
            check_invariants(facts.ledger)
            self.record.compare(facts.run, facts.ledger.version)
        except (LedgerError, UserError) as error:
            finding.faults.append(str(error).splitlines()[0])
        if facts is None:
            return None
        ledger, counters = facts.ledger, facts.ledger.counters
        by_journal: dict[str, Any] = {
            "groups_discarded": dict(counters.discarded),
            "groups_requeued": dict(counters.requeued),
            "steps": ledger.version,
            "prompts_open": ledger.open_prompts(),
        }
        finding.faults += [
            f"{name} is {value!r} by the journal and {self.summary[name]!r} by summary.json"
            for name, value in by_journal.items()
            if self.summary.get(name, value) != value
        ]
        if self.oldest > self.first + 1:
            finding.unknown.append(f"metrics.1.jsonl begins with step {self.oldest} (observe.metrics_mib)")
        missing = sorted(set(range(self.oldest, ledger.version + 1)) ^ self.records.keys())
        if missing:
            finding.faults.append(f"metrics.jsonl and the journal differ in the steps {_some(missing)}")
        finding.about = f"{ledger.version} steps, {counters.admitted} groups admitted, events since step " + str(
            min(facts.logged, default=ledger.version)
        )
        for origin in self.record.configuration.origins[-1:]:
            finding.about += f"; the steps up to {self.first} belong to {origin.name}, run {origin.run}: audit that run"
        return facts

    # --- the groups in the rollouts

    def _check_groups(self, journal: JournalFacts | None) -> None:
        trained: Counter[int] = Counter()
        once, bound, rewarded = (self.findings[check] for check in (_ONCE, _BOUND, _REWARDS))
        seen: dict[int, int] = {}
        for step, batch in self.record.rollouts.batches():
            trained.update(group.prompt_index for group in batch)
            seen[step] = seen.get(step, 0) + 1
            self._check_batch(step, batch, journal, once)
            self._check_bound(step, batch, bound)
            self._check_rewards(step, batch, journal, rewarded)
        once.faults += [f"step {step} is there {n} times" for step, n in seen.items() if n > 1]
        once.faults += [f"prompt {prompt} was trained {n} times" for prompt, n in trained.items() if n > 1]
        if gone := sorted(self.records.keys() - seen.keys()):
            for finding in (once, bound, rewarded):
                finding.unknown.append(f"there are no rollouts of the steps {_some(gone)}")
        elif journal:
            self._account(trained, journal, once)
        about = f"{trained.total()} groups of {len(seen)} steps"
        once.about, rewarded.about = about, f"{about}, against metrics.jsonl and the journal"
        bound.about = f"{about}, bound {self.config.max_staleness}, by the versions of their tokens"
        if self.config.on_straggler == "admission_only":
            bound.unknown.append("on_straggler is admission_only, which has no bound")

    def _check_batch(self, step: int, batch: Sequence[Group], journal: JournalFacts | None, once: AuditFinding) -> None:
        ids = tuple(group.id for group in batch)
        if len(batch) != self.config.batch_size:
            once.faults.append(f"step {step} has {len(batch)} groups, not {self.config.batch_size}")
        for group in batch:
            size = samples_of(group.prompt_index, self.config.group_size)
            if (number := len(group.trajectories)) != size:
                once.faults.append(f"group {group.id} of step {step} has {number} samples, not {size}")
        if journal and journal.logged.get(step, ids) != ids:
            once.faults.append(f"the batch of step {step} is not the one in the journal")

    def _account(self, trained: Mapping[int, int], journal: JournalFacts, once: AuditFinding) -> None:
        """Check that each admitted prompt is trained, discarded or open."""
        waiting = set(journal.ledger.open_prompts())
        places = (*self.earlier, *self.records.values(), self.summary)
        before = {prompt for record in self.earlier for prompt in record["prompts"]}
        discarded = {prompt for place in places for prompt, _ in place.get("discarded") or ()}
        accounted = trained.keys() | before | waiting | journal.discarded | discarded
        admitted = set(range(-journal.ledger.prompts.next_session, journal.ledger.prompts.next_prompt))
        if missing := sorted(admitted - accounted):
            cut = self.oldest > self.first + 1  # the removed records also named discarded prompts
            (once.unknown if cut else once.faults).append(f"no fate is known of the prompts {_some(missing)}")
        if strange := sorted(set(trained) - admitted):
            once.faults.append(f"the prompts {_some(strange)} were trained and never admitted")
        if repeated := sorted(trained.keys() & (waiting | before)):
            once.faults.append(f"the prompts {_some(repeated)} were trained and are open, or were before the fork")

    def _check_bound(self, step: int, batch: Sequence[Group], bound: AuditFinding) -> None:
        first = self.changes[0]["before"] if self.changes else self.config.max_staleness
        # The largest bound since the group may have been admitted.
        limit = max([first, *(change["now"] for change in self.changes if change["step"] <= step)])
        ages = [step - 1 - group.start_version for group in batch]
        newest = max(int(sample.versions.max()) for group in batch for sample in group.trajectories)
        if newest >= step:
            bound.faults.append(f"step {step} has tokens of version {newest}, which it was to make")
        if self.config.on_straggler in ("wait", "requeue") and max(ages) > limit:
            bound.faults.append(f"step {step} has a group that is {max(ages)} versions old, over the bound {limit}")
        if (recorded := self.records.get(step, {}).get("staleness_max", max(ages))) != max(ages):
            bound.faults.append(f"step {step} has staleness {max(ages)}, and {recorded} by metrics.jsonl")

    def _check_rewards(
        self, step: int, batch: Sequence[Group], journal: JournalFacts | None, finding: AuditFinding
    ) -> None:
        means = {group.id: float(np.mean([sample.reward for sample in group.trajectories])) for group in batch}
        recorded = self.records.get(step, {}).get("reward_mean")
        if recorded is not None and not math.isclose(recorded, np.mean([*means.values()]), abs_tol=TOLERANCE):
            finding.faults.append(
                f"step {step} has reward {np.mean([*means.values()]):g}, and {recorded:g} by metrics.jsonl"
            )
        for group, mean in means.items():
            if journal and not math.isclose(journal.rewards.get(group, mean), mean, abs_tol=TOLERANCE):
                finding.faults.append(
                    f"group {group} of step {step} has reward {mean:g}, not {journal.rewards[group]:g}"
                )

    def _check_texts(self) -> None:
        finding, number = self.findings[_TEXTS], 0
        tokenizer = self.record.configuration.tokenizer()
        if tokenizer is None:
            finding.unknown.append(f"the tokenizer of {self.config.model} is not here")
            return
        names = ["step", "group", "sample", "prompt", "completion", "tokens", "prompt_tokens"]
        for row in self.record.rollouts.rows(names):
            number += 1
            if not reads_as_kept(tokenizer, row):
                finding.faults.append(f"sample {row['sample']} of group {row['group']} of step {row['step']}")
        finding.about = f"{number} rows"

    # --- the training, once more

    def _check_training(self, run: str) -> None:
        weights, versions = self.findings[_WEIGHTS], self.findings[_VERSIONS]
        for checkpoint in self.record.checkpoints.folders:
            facts = self.record.checkpoints.facts(checkpoint)
            if facts is None or facts["run"] != run:
                weights.faults.append(f"{checkpoint} is damaged, or of another run")
        possible = list(self._intervals(weights))
        tokens = 0
        # The report's random name is the seed, so all ranks draw the same steps.
        drawn = random.Random(os.environ.get(_OF_RANKS)).sample(possible, len(possible))
        for first, last in possible if self.full else drawn:
            (variant,) = plan(self.record, [], steps=f"{first}:{last}")
            sampling = _TokenVersions(variant, self._limit(), versions)
            summary = run_variant(variant, Console(quiet=True), check=sampling.check, run=run)
            self.replayed.append((first, last))
            tokens += sampling.tokens
            if not summary["ok"] or summary["same_weights"] is False:
                weights.faults.append(f"the steps {first + 1} to {last} give other weights{self._since(variant)}")
            elif summary["same_weights"] is None:
                weights.unknown.append(f"the weights after step {last} are not in the record")
            if tokens and not self.full:
                break  # else these few steps pass no version of any token in a later batch
        steps = sum(last - first for first, last in self.replayed)
        how = "trained again" if self.full else "drawn and trained again; --full trains all"
        weights.about = f"{steps} of {len(self.records)} steps {how}" if steps else ""
        versions.about = f"{tokens} sampled tokens, with log-probs by the weights of their version" if tokens else ""
        if not possible:
            versions.unknown.append("no step could be trained again")
        elif not tokens:
            versions.unknown.append("no trained token is of a version that these steps pass")

    def _intervals(self, weights: AuditFinding) -> Iterator[tuple[int, int]]:
        """Yield the steps between a checkpoint and later comparable weights, if their rollouts are there. With --full
        the intervals cover all steps, else each interval begins at the last checkpoint before its weights."""
        versions = sorted({*self.record.versions, max(self.records, default=0)})
        ends = [version for version in versions[1:] if keeps_weights(self.record, version)]
        starts = versions[:1] + ends if self.full else [max(v for v in versions if v < end) for end in ends]
        for interval in zip(starts, ends, strict=False):
            try:
                plan(self.record, [], steps="{}:{}".format(*interval))
            except UserError as error:
                weights.unknown.append(str(error))
            else:
                yield interval

    def _limit(self) -> float:
        gaps = [record.get("logprob_gap") or 0.0 for record in self.records.values()]
        return max(LEAST_GAP, GAPS * max(gaps, default=0.0))

    def _since(self, variant: Replay) -> str:
        """Return the end of a sentence: the first step at which the losses of the replay and the run differ."""
        for record in Record(variant.folder).metrics.records:
            loss = self.records.get(record["step"], {}).get("loss")
            if loss is not None and not math.isclose(loss, record["loss"], rel_tol=TOLERANCE, abs_tol=1e-9):
                return f", and another loss from step {record['step']} on"
        return ", with the losses of the run"


class _TokenVersions:
    """Compares the log-probs of sampled tokens with the log-probs under the weights of each token's version, which the
    replay of `variant` passes. limit: on the mean difference in a sample, nats. `tokens`: tokens compared so far."""

    def __init__(self, variant: Replay, limit: float, finding: AuditFinding) -> None:
        self._limit, self._finding = limit, finding
        self._coming = variant.run.rollouts.batches(variant.first + 1)  # later batches too
        self._window: list[tuple[int, list[Group]]] = []
        self.tokens = 0

    def check(self, engine: "TrainingEngine", config: Config, step: int) -> None:
        """Compare before a step. engine: has the weights of version `step` - 1."""
        version, oldest = step - 1, config.max_staleness
        self._window = [(at, batch) for at, batch in self._window if at >= step]
        while not self._window or self._window[-1][0] <= version + oldest:
            if (pair := next(self._coming, None)) is None:
                break
            self._window.append(pair)
        for at, batch in self._window:
            groups = [g for g in batch if any((sample.versions == version).any() for sample in g.trajectories)]
            if groups and at >= step:
                self._compare(engine.logprobs(groups, temperature=config.sampling.temperature), groups, version, at)

    def _compare(self, logp: np.ndarray, groups: Sequence[Group], version: int, step: int) -> None:
        start = 0
        for group in groups:
            for number, sample in enumerate(group.trajectories):
                for sequence in sample.sequences():
                    these, start = logp[start : start + len(sequence)], start + len(sequence)
                    of_version = sequence.versions == version
                    gaps = np.abs(these[of_version] - sequence.logprobs[of_version])
                    self.tokens += len(gaps)
                    if len(gaps) and not gaps.mean() <= self._limit:
                        self._finding.faults.append(
                            f"sample {number} of group {group.id} of step {step} was not sampled by version {version} "
                            f"(its log-probs are {gaps.mean():.1e} off, limit {self._limit:.1e})"
                        )


def read_journal(record: Record) -> JournalFacts:
    """Read a copy of a run's journal. Raises UserError if it is damaged, LedgerError if an event does not follow."""
    with record.journal() as journal:
        snapshot, events = journal.read()
    with journal.version_errors("the snapshot"):
        ledger = (
            state_of(snapshot["ledger"]) if snapshot else LedgerState(LedgerSettings.of(record.configuration.load()))
        )
    facts = JournalFacts(journal.run, ledger, {}, {}, set(), (snapshot or {}).get("last_step") or {})
    for kind, body in events:
        with journal.version_errors(kind):
            if kind == "rewarded":
                facts.rewards[body["group"]] = body["mean"]
            if kind == "stepped":
                facts.metrics = body["metrics"]
            event = event_of(kind, body)
        if event is None:
            continue
        match event:
            case BatchLogged(version, group_ids):
                facts.logged[version + 1] = tuple(group_ids)
            case Discarded(group_id) if group := ledger.groups.get(group_id):
                facts.discarded.add(group.prompt_index)
        ledger.apply(event)
        if isinstance(event, Committed):
            check_invariants(ledger)
    return facts


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:NAMED])) + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")


def _page(report: Mapping[str, Any]) -> Table:
    table = Table(title=f"Audit of {report['folder']}, run {report['run']}", show_lines=True)
    for heading in ("check", "result", "compared data, and faults"):
        table.add_column(heading, overflow="fold")
    for finding in report["findings"]:
        lines = [*finding["faults"], *finding["unknown"]]
        shown = [line for line in (finding["about"], *lines[:NAMED]) if line]
        rest_line = [f"and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
        table.add_row(finding["check"], finding["result"], "\n".join([*shown, *rest_line]))
    table.caption = "The run is what its record says." if report["ok"] else "Not all is shown: see above."
    return table
