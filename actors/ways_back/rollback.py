"""`areal run --resume RUN --from-step N`: a run goes back to a checkpoint, and on from there.

With every version that gets a checkpoint, the journal keeps the master's state at that moment. To go back is to take
the kept state again. Groups that were ready then and are still in the spool remain; other rows that were alive are
generated anew, as new attempts. All later results of the run are moved into a folder, `abandoned/1` and so on. Sessions
of users cannot be generated anew. No step trains a session whose reward was acknowledged since; the folder keeps the
session's sample.

The journal is written first, in a single transaction that also says that files have to be moved. If the run is killed
in between, resuming it moves the remaining files.
"""

import asyncio
import math
import shutil
import sqlite3
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from actors.master.changes import Abandoned
from actors.master.run_state import RunState
from actors.ways_back.moved_rollouts import move_rollouts
from actors.ways_back.past_state import return_to
from areal.base.errors import UserError
from areal.config import Config
from areal.staleness.ledger_state import GroupState
from areal.storage.disk import rename, shortage
from areal.storage.journal import Journal
from areal.storage.records import move_records
from areal.storage.run_files import EVALUATIONS, JOURNAL, METRICS, OLDER, REPORT, ROLLOUTS, SPOOL, SUMMARY
from areal.storage.run_folder import checkpoint_of, checkpoints_in, hold_changes_from, version_of
from areal.storage.spool import Spool, SpoolPart
from areal.storage.spool_file import SpoolError

ABANDONED = "abandoned"
# A spool with the samples of users whose acknowledged rewards are undone.
SESSIONS = "sessions.db"
# Trackers get all of this again, as new runs.
MOVED_WHOLE = (SUMMARY, REPORT, "tracked.json", "traced.json", "tensorboard")


def go_back(config: Config, version: int | None, agreed: bool = False) -> list[str]:
    """Go back to the checkpoint of `version`, or only finish a way back (None). Returns sentences about the changes.
    agreed: the user agrees that acknowledged rewards of users are undone. Raises UserError, before any change, without
    a needed agreement, if the checkpoint is not kept, or if another process uses the journal or the spool."""
    with closing(Journal.open(config.folder / JOURNAL)) as journal:
        state = RunState(config, journal)
        _move_files(config, state)
        lines = [] if version is None else _take_state(config, state, version, agreed)
        _move_files(config, state)
        return lines


def versions_kept(folder: Path, journal: Journal) -> list[int]:
    """The versions that the run in `folder` can go back to."""
    return [version for version in journal.kept_versions() if checkpoint_of(folder, version).is_dir()]


def _take_state(config: Config, state: RunState, version: int, agreed: bool) -> list[str]:
    versions = versions_kept(config.folder, state.journal)
    if version not in versions:
        choice = (
            f"choose --from-step from {', '.join(map(str, versions))}" if versions else "it has none with its state"
        )
        raise UserError(f"The run in {config.folder} has no checkpoint of step {version} to go back to: {choice}.")
    past, newest = state.journal.kept(version), state.ledger.version
    alive = past["ledger"]["groups"]
    ready = [group["group_id"] for group in alive if group["state"] in (GroupState.READY, GroupState.BATCHED)]
    abandoned = _abandoned(config, state.rollbacks + 1)
    acknowledged = _acknowledged(state, version)
    if (undone := acknowledged - {*ready}) and not agreed:
        raise UserError(
            f"To go back to step {version} undoes {len(undone)} rewards of users that were acknowledged since, and no "
            f"step will train them: add --yes to do that. Their samples are then in {abandoned}."
        )
    spooled = _whole_groups(config.folder / SPOOL, ready, config.group_size, abandoned)
    undone = acknowledged - spooled
    saved = _keep_samples(config.folder / SPOOL, sorted(undone), abandoned)
    return_to(state, past, spooled)
    state.journal.compact(state.dump())
    asyncio.run(state.journal.durable())
    rows = [group["group_id"] for group in alive if not is_session(group["group_id"])]
    in_spool, lost = len(spooled.intersection(rows)), len({*ready}.intersection(rows) - spooled)
    lines = [
        f"The run goes back from step {newest} to step {version}; what came after is in {abandoned}. "
        f"Of the groups that were alive at that step, {in_spool} are ready in the spool, and the prompts of "
        f"{len(rows) - in_spool} are generated anew{f' ({lost} were lost with the spool)' if lost else ''}."
    ]
    if undone:
        lines.append(
            f"{len(undone)} rewards of users that were acknowledged are undone: no step trains them. Of their samples, "
            f"{saved} are in {abandoned / SESSIONS}, and those that were trained are among the rollouts there, as far "
            f"as the run keeps rollouts."
        )
    return lines


def is_session(group_id: str) -> bool:
    return group_id.startswith("s")


def _acknowledged(state: RunState, version: int) -> set[str]:
    """The sessions with an acknowledged reward that no step up to `version` has trained."""
    taken = (GroupState.READY, GroupState.BATCHED)
    waiting = {group.group_id for group in state.ledger.state.groups if group.session and group.state in taken}
    return waiting | {group for group, (_, step) in state.sessions.trained_sessions.items() if step > version}


def _keep_samples(spool: Path, groups: list[str], abandoned: Path) -> int:
    """Copy the spooled samples of these sessions into a new spool. Returns the number of copied samples."""
    if not groups or not spool.exists():
        return 0
    with closing(Spool.open(spool)) as opened:
        samples = [opened.get([group])[0] for group in groups if _is_whole(opened, group, 1)]
    if samples:
        abandoned.mkdir(parents=True, exist_ok=True)
        with closing(Spool.open(abandoned / SESSIONS)) as copy:
            for group in samples:
                copy.put_all({0: SpoolPart(group, group.trajectories[0].frame())}, 1)
    return len(samples)


def undone_by(past: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a group's fate was decided after the state: the group was alive then, or was admitted later."""
    ledger = past["ledger"]
    alive = {row["group_id"] for row in ledger["groups"]}
    waiting = {row["prompt_index"]: row["attempt"] for row in ledger["requeued"]}

    def undone(group_id: str) -> bool:
        prompt, attempt = map(int, group_id.lstrip("gs").split("."))
        if is_session(group_id):
            return prompt >= ledger["next_session"] or group_id in alive
        is_later = prompt >= ledger["next_prompt"] or attempt >= waiting.get(prompt, math.inf)
        return is_later or group_id in alive

    return undone


def _whole_groups(spool: Path, ids: Collection[str], size: int, abandoned: Path) -> set[str]:
    """The groups, of `size` samples, that are whole in the spool. An unreadable spool is moved away."""
    if not spool.exists():
        return set()
    try:
        opened = Spool.open(spool)
    except UserError as error:
        if not isinstance(error.__cause__, sqlite3.DatabaseError) or shortage(error.__cause__, spool.parent):
            raise  # the spool is in use, or only cannot be written
        for file in spool.parent.glob(f"{spool.name}*"):
            _move(file, abandoned)
        return set()
    with closing(opened):
        return {group for group in ids if _is_whole(opened, group, 1 if is_session(group) else size)}


def _is_whole(spool: Spool, group: str, size: int) -> bool:
    with suppress(SpoolError):
        return len(spool.get([group])[0].trajectories) == size
    return False


def _move_files(config: Config, state: RunState) -> None:
    """Move all results after the version that the run has gone back to. Every part may be repeated."""
    if (version := state.abandoning) is None:
        return
    folder, abandoned, past = config.folder, _abandoned(config, state.rollbacks), state.journal.kept(version)
    for path in [folder / name for name in MOVED_WHOLE]:
        _move(path, abandoned)
    for path in checkpoints_in(folder):
        if version_of(path) > version:
            _move(path, abandoned / "checkpoints")
    for path in (folder / "benchmarks").glob("*.jsonl"):
        if int(path.stem.rpartition("-")[2]) > version:
            _move(path, abandoned / "benchmarks")
    for name in (OLDER[METRICS], METRICS):
        move_records(folder / name, abandoned / name, lambda record: record["step"] > version)
    move_records(folder / EVALUATIONS, abandoned / EVALUATIONS, lambda record: record["version"] > version)
    hold_changes_from(folder, version + 1)
    move_rollouts(folder / ROLLOUTS, abandoned / ROLLOUTS, undone_by(past))
    shutil.rmtree(config.weights_folder, ignore_errors=True)
    if (folder / SPOOL).exists():  # before any group is admitted: ids of later groups are given again
        spool = Spool.open(folder / SPOOL)
        spool.forget(group for group in spool.ids() if not state.ledger.state.needs_payload(group))
        spool.close()
    state.emit(Abandoned(version=version))
    asyncio.run(state.journal.durable())


def _abandoned(config: Config, number: int) -> Path:
    """The folder for all results after the checkpoint that the run has gone back to, or is about to."""
    return config.folder / ABANDONED / f"{number}"


def _move(path: Path, folder: Path) -> None:
    if path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rename(path, folder / path.name)
