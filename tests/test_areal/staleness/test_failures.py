"""Failures that end a run, and failures that do not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from areal.staleness.failures import (
    FILTERED_LIMIT,
    LEAST_DISCARDED,
    LONG_LIMIT,
    UNSCORED_LEAST,
    UNSCORED_SECONDS,
    Failures,
)
from areal.staleness.ledger_state import Counters


@pytest.fixture
def failures() -> Failures:
    return Failures(batch_size=2, outage_seconds=60.0, max_share=0.1, folder=Path("runs/x"), earlier=Counters())


def test_prompts_that_were_lost_before_the_run_was_resumed_do_not_count():
    counters = Counters(trained=10, discarded=Counter({"reward": 30}))
    failures = Failures(2, 60.0, 0.1, Path("runs/x"), counters)
    failures.failed("reward", "no score", 0.0)
    failures.end_reason_after_ready(False, 1.0)
    counters.discarded["reward"] += LEAST_DISCARDED
    assert failures.verdict(counters, 0.0) is None
    counters.discarded["reward"] += 1
    assert "21 of 21 prompts were discarded because their groups failed" in str(failures.verdict(counters, 0.0))
    counters.trained += 300
    assert failures.verdict(counters, 0.0) is None


def test_only_prompts_in_a_row_that_are_too_long_end_a_run(failures):
    for another in (
        lambda: failures.end_reason_after_ready(False, 1.0),
        lambda: failures.failed("reward", "no score", 0.0),
    ):
        assert all(failures.too_long("11 tokens") is None for _ in range(LONG_LIMIT - 1))
        another()
    assert all(failures.too_long("11 tokens") is None for _ in range(LONG_LIMIT - 1))
    assert "1000 prompts in a row were too long, the last one: 11 tokens" in str(failures.too_long("11 tokens"))


def test_only_groups_in_a_row_without_signal_end_a_run(failures):
    for _ in range(2):
        assert failures.end_reason_after_ready(False, 0.5) is None
        assert all(failures.end_reason_after_ready(True, 0.5) is None for _ in range(2 * FILTERED_LIMIT))
    assert "201 groups in a row" in str(failures.end_reason_after_ready(True, 0.25))


def test_samples_that_fail_from_the_beginning_end_a_run_once_it_had_some_time(failures):
    assert all(failures.sample_failed("no\nscore", 0.0) is None for _ in range(UNSCORED_LEAST))
    assert "4 have failed. The last failure: no score." in str(failures.sample_failed("no\nscore", UNSCORED_SECONDS))
    failures.end_reason_after_ready(True, 0.0)
    assert failures.sample_failed("no\nscore", UNSCORED_SECONDS) is None
