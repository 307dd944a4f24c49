"""The master's state: what it makes of its journal."""

import asyncio
import sqlite3

from conftest import ROOT
from support.small_runs import ten_steps

from actors.master import changes
from actors.master.run_state import RunState
from areal.config import Config
from areal.data.sources import open_source
from areal.storage.journal import Journal


def config_of(**data) -> Config:
    return ten_steps(data={"source": "addition", "size": 20, "eval_size": 0, **data})


def state_of(config: Config, connection: sqlite3.Connection) -> RunState:
    return RunState(config, Journal(connection), open_source(config.data, config.seed))


def rewarded(state: RunState, group: str, signal: bool = True) -> None:
    row = state.ledger.state.groups.get(group).row
    state.ledger.ready(group, 0, signal)
    state.emit(
        changes.Rewarded(
            group=group,
            row=row,
            version=0,
            mean=0.5 if signal else 0.0,
            spread=0.5 * signal,
            signal=signal,
            parts={},
            tokens=7,
            discarded=0,
        )
    )


def test_a_master_after_a_master_goes_on_with_the_same_history_from_events_and_from_a_snapshot():
    sampler = f"{ROOT}/configs/examples/difficulty/difficulty.py:Difficulty"
    config, connection = config_of(sampler=sampler), sqlite3.connect(":memory:", check_same_thread=False)
    state = state_of(config, connection)
    permits = state.ledger.admit("manager/0#1", 4, 0.0, 30.0)
    for number, permit in enumerate(permits[:3]):
        rewarded(state, permit.group_id, signal=number == 1)
    assert state.coverage == 4 / 20
    for _ in range(2):
        asyncio.run(state.journal.durable())
        later = state_of(config, connection)
        assert later.history == state.history
        assert later.history.rows[later.history.data.key(permits[1].row)].tokens == 7
        assert later.ledger.row_of_prompt(4) == state.ledger.row_of_prompt(4)
        state.journal.compact(state.dump())
