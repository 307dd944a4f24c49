"""Whether the rows of a run that goes on are those with which it began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog
from support.small_runs import ten_steps

from actors.record.completeness import check_rows_kept
from areal.base.errors import UserError
from areal.config import Config
from areal.data.sources import open_source
from areal.storage.journal import Journal


def config_of(folder: Path, numbers: list[int], answer: str = "yes") -> Config:
    """Of a run whose data has these rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Is it {n}?", "answer": answer}) + "\n" for n in numbers))
    data, reward = {"source": str(file), "eval_size": 1}, {"functions": ["exact_match"]}
    return ten_steps(run_dir=folder, steps=2, group_size=1, data=data, reward=reward)


def check(config: Config) -> list[str]:
    """What is said of the rows when the run begins or goes on."""
    journal = Journal.open(config.run_dir / "journal.db")
    try:
        with structlog.testing.capture_logs() as logs:
            check_rows_kept(config, journal, open_source(config.data, config.seed))
        return [line["event"] for line in logs]
    finally:
        journal.close()


def test_a_run_goes_on_with_as_many_rows_as_it_began_with_and_says_if_they_are_others(tmp_path):
    assert check(config_of(tmp_path, [1, 2, 3, 4])) == check(config_of(tmp_path, [1, 2, 3, 4])) == []
    for rows in ([1, 2, 3], [1, 2, 3, 4, 5]):
        sentence = rf"rows.jsonl' had 3 rows to train on when the run in .* began, and has {len(rows) - 1} now"
        with pytest.raises(UserError, match=sentence):
            check(config_of(tmp_path, rows))
    for config in (config_of(tmp_path, [4, 3, 2, 1]), config_of(tmp_path, [1, 2, 3, 4], "no")):
        assert check(config) == ["the rows differ from the rows at the run's beginning"]
    assert check(config_of(tmp_path, [1, 2, 3, 4])) == []


def test_generated_rows_without_an_end_are_not_compared(tmp_path):
    config = config_of(tmp_path, [1, 2])
    endless = config.model_copy(update={"data": config.data.model_copy(update={"source": "addition"})})
    assert check(endless) == []
