"""What the benchmarks of generation make of their measurements."""

import generator_overhead
import interrupt
import pytest


def test_a_rate_counts_whole_groups_and_neither_start_nor_tail(monkeypatch):
    times = iter([0.0, 90.0, *(100.0 + second for second in range(9)), 900.0])
    monkeypatch.setattr(generator_overhead.time, "perf_counter", lambda: next(times))
    clock = generator_overhead.Clock(group_size=2)
    for group in range(12):
        clock(group, 30)
        clock(group, 20)
    # A tenth of twelve groups is finished at 90 s, nine tenths at 107 s: eight groups of 50 tokens between.
    assert clock.rate() == pytest.approx(8 * 50 / 17)


def test_pairs_are_compared_each_with_itself():
    def run(pair, on, speed):
        return {"pair": pair, "interrupt": on, "samples_per_second": speed}

    runs = [
        run(0, True, 12),
        run(0, False, 10),
        run(1, False, 20),
        run(1, True, 30),
        run(2, True, 9),
        run(2, False, 10),
    ]
    results = interrupt.summarise(runs)
    assert results["ratio"] == pytest.approx(1.2)
    assert results["spread"] == pytest.approx([0.9, 1.5])
    assert results["with"] == {"samples_per_second": 12}
