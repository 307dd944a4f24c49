"""`areal run --fork RUN --at-step N`: a new run that goes on from a checkpoint of another run.

The fork begins as if the other run had gone back to the checkpoint (actors.ways_back.rollback) with an empty spool:
with the kept state of the checkpoint from the journal, and the metrics up to the checkpoint. The trainer's files are
linked or made anew, so nothing in the folder of the other run changes, and the other run may go on.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from actors.master.run_state import RunState
from actors.ways_back.past_state import become_fork
from actors.ways_back.rollback import versions_kept
from areal.base.errors import UserError, explain
from areal.base.secrets import hidden_in
from areal.config import Config
from areal.config.overrides import parsed
from areal.config.settings import differences, is_under
from areal.storage.disk import replace
from areal.storage.journal import Journal, journal_copy
from areal.storage.records import line_of, read_records
from areal.storage.run_files import EVALUATIONS, FORK, JOURNAL, METRICS
from areal.storage.run_folder import (
    STATE_FILE,
    Origin,
    checkpoint_of,
    config_of_run,
    config_with,
    facts_of,
    is_elsewhere,
    metrics_of,
    origins_of,
)
from areal.weights.folders import link

# Keys for the contents of a checkpoint; for the meaning of an index of the data; and for the measure of an evaluation.
KEPT = ("model", "trainer.lora")
OF_ROWS = ("data", "seed")
OF_EVALUATIONS = (*OF_ROWS, "reward", "sampling", "evaluator", "rollout_manager")
OTHER_DATA = "the data is another one since the fork"


def configuration_of_fork(run: Path, step: int, overrides: Sequence[str]) -> Config:
    """The configuration of a fork of the run in the folder `run` at a checkpoint: the run's configuration, with a new
    name and `overrides`. Raises UserError, also without such a checkpoint."""
    folder = run.resolve()
    place = {"run_dir": str(folder.parent), "name": f"{folder.name}-fork-{step}"}
    config = config_with(run, place | dict(parsed(override, Config) for override in overrides), secrets=True)
    parent, _ = _state_at(run, step)
    if config.folder.resolve() == folder:
        raise UserError(f"A fork of {run} needs a folder of its own: give it another name, name=NAME.")
    if config.steps <= step:
        raise UserError(f"The fork begins with {step} steps and is to have {config.steps}: give it more, steps=N.")
    if hidden := hidden_in(config.model_dump(mode="json")):
        raise UserError(f"{hidden} is hidden in {run / 'config.yaml'}: give it again, {hidden}=VALUE.")
    if changed := [key for key in _changed(parent.config, config) if is_under(key, KEPT)]:
        raise UserError(f"{changed[0]} says what the checkpoint is of that a fork of {run} begins with: keep it.")
    return config


def _changed(stored: Config, config: Config) -> list[str]:
    """The keys that differ, without the keys of moved folders."""
    pairs = differences(stored.model_dump(mode="json"), config.model_dump(mode="json"))
    return [key for key, old, new in pairs if not is_elsewhere(old, new)]


def fork(config: Config, run: Path, step: int) -> list[str]:
    """Fill the empty folder of a new run with the parts taken from `run`. Returns sentences about the parts. The
    journal is written last: a folder without a journal is an incomplete fork, and no run that could be resumed."""
    parent, past = _state_at(run, step)
    changed = _changed(parent.config, config)
    is_comparable = not any(is_under(key, OF_EVALUATIONS) for key in changed)
    with closing(Journal.open(config.folder / JOURNAL)) as journal:
        for name, key in [(METRICS, "step"), *[(EVALUATIONS, "version")] * is_comparable]:
            lines = metrics_of(run) if name == METRICS else read_records(run / name)
            records = (record | {"run": journal.run} for record in lines if record[key] <= step)
            replace(config.folder / name, "".join(map(line_of, records)))
        origin = Origin(parent.config.name, str(run.resolve()), parent.journal.run, step)
        origins = [run_before._asdict() for run_before in (*origins_of(run), origin)]
        replace(config.folder / FORK, json.dumps(origins, indent=2) + "\n")
        _take_checkpoint(checkpoint_of(run, step), checkpoint_of(config.folder, step), journal.run)
        if not is_comparable:
            parent.results.evaluations, parent.results.not_evaluated = {}, {}
        if has_other_rows := any(is_under(key, OF_ROWS) for key in changed):
            past = _without_prompts(past)
        state = RunState(config, journal)
        become_fork(state, parent, past, keeps_history=not has_other_rows)
        journal.compact(state.dump())
        journal.keep(step, state.dump(), 1)
        asyncio.run(journal.durable())
    waiting = len(state.ledger.state.open_prompts())
    prompts = "the data is another one" if has_other_rows else f"{waiting} prompts that were open there are generated"
    return [f"{config.folder} goes on from step {step} of {run}; {prompts}."]


def _state_at(run: Path, step: int) -> tuple[RunState, dict[str, Any]]:
    """The newest state of a run, and the state of a step with a checkpoint. Raises UserError."""
    original = run / JOURNAL
    config = config_of_run(run, secrets=True)
    if not original.is_file():
        raise UserError(f"There is no run in {run} that could be forked, it has no journal.db: give its folder.")
    with journal_copy(original) as journal:
        versions = versions_kept(run, journal)
        if step not in versions:
            there = f"choose --at-step from {', '.join(map(str, versions))}" if versions else "it has none yet"
            raise UserError(f"The run in {run} has no checkpoint of step {step} to fork from: {there}.")
        return RunState(config, journal), journal.kept(step)


def _take_checkpoint(source: Path, target: Path, run: str) -> None:
    """Link a checkpoint into the folder of the run with the identity `run`, as a checkpoint of that run."""
    shutil.rmtree(target.parent, ignore_errors=True)
    # The other run goes on.
    with explain((FileNotFoundError, shutil.Error), f"{source} was removed meanwhile ({{why}}): choose a newer one."):
        shutil.copytree(source, target, copy_function=link)
    if (facts := facts_of(target)) is None:
        raise UserError(f"The checkpoint {source} is damaged: choose another one.")
    replace(target / STATE_FILE, line_of(facts | {"run": run}))


def _without_prompts(past: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with all prompts discarded that were admitted and not trained."""
    ledger = past["ledger"]
    counters, waiting = ledger["counters"], len(ledger["groups"]) + len(ledger["requeued"])
    discarded = counters["discarded"] | {OTHER_DATA: waiting + counters["discarded"].get(OTHER_DATA, 0)}
    emptied = {"groups": [], "requeued": [], "counters": counters | {"discarded": discarded}}
    return {**past, "ledger": ledger | emptied, "rewards": {}, "reward_parts": {}, "tokens": {}}
