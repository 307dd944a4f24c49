"""The scale model: its formulas, and what the real control plane makes of them on a few devices."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from rich.console import Console

from areal.base.errors import UserError
from simulation.cluster.costs import Costs
from simulation.cluster.lengths import Lengths
from simulation.cluster.report import Report, run, run_sizes
from simulation.cluster.setups import MODELS, Setup, devices_for, parse_devices

# A few devices, few and short samples, and only so many steps as the staleness takes to reach the bound and run-ahead
# to settle: what takes minutes with the paper's. CPU time goes with the samples of a group.
SMALL = Setup(
    devices=8,
    batch_size=16,
    group_size=2,
    max_new_tokens=1024,
    length_median=400.0,
    prompt_tokens=256,
    warm_up=10,
    steps=3,
)


@pytest.fixture(scope="module")
def auto() -> Report:
    return run(SMALL)


@pytest.fixture(scope="module")
def run_at_most() -> Report:
    return run(replace(SMALL, run_ahead="max"))


def test_no_run_does_more_than_its_pools_could(auto: Report, run_at_most: Report) -> None:
    for report in (auto, run_at_most):
        assert 0 < report.throughput <= min(report.training_bound, report.generating_bound)


def test_no_group_is_older_than_eta(auto: Report, run_at_most: Report) -> None:
    assert auto.staleness_max <= SMALL.max_staleness
    assert run_at_most.staleness_max <= SMALL.max_staleness


def test_run_ahead_auto_halves_the_staleness_at_the_same_throughput(auto: Report, run_at_most: Report) -> None:
    assert run_at_most.staleness_mean >= SMALL.max_staleness - 0.5
    assert auto.throughput >= 0.98 * run_at_most.throughput
    assert auto.staleness_mean <= 0.5 * run_at_most.staleness_mean


def test_the_seconds_of_a_step_are_accounted_for(auto: Report) -> None:
    assert sum(auto.shares.values()) == pytest.approx(1.0)
    assert min(auto.shares.values()) >= -0.01


def test_nothing_went_wrong(auto: Report, run_at_most: Report) -> None:
    for report in (auto, run_at_most):
        assert not [line for line in report.logged if line.startswith(("warning", "error"))]


def test_the_same_set_up_gives_the_same_run_and_another_seed_another() -> None:
    def simulated(setup: Setup) -> dict[str, Any]:
        values = asdict(run(setup))
        del values["setup"], values["cpu_seconds"]
        for process in ("master", "manager", "generator", "trainer"):
            del values[process]["cores"]  # of this machine
        return values

    tiny = replace(SMALL, devices=8, batch_size=8, group_size=4, warm_up=1, steps=2)
    assert simulated(tiny) == simulated(tiny)
    assert simulated(tiny) != simulated(replace(tiny, seed=1))


def test_lengths_do_not_depend_on_who_asks_first() -> None:
    first, second = Lengths(SMALL), Lengths(SMALL)
    requests = [first.next(prompt) for prompt in (1, 1, 2)]
    assert [second.next(prompt) for prompt in (2, 1, 1)] == [requests[2], requests[0], requests[1]]


def test_lengths_are_cut_at_the_limit() -> None:
    lengths = Lengths(replace(SMALL, max_new_tokens=1024))
    drawn = [lengths.next(prompt) for prompt in range(200)]
    assert max(drawn) == (1024, True)
    assert not any(cut for tokens, cut in drawn if tokens < 1024)


def test_a_decoding_step_takes_longer_with_more_to_read_and_shorter_on_more_devices() -> None:
    costs = Costs(Setup(devices=32))
    assert costs.decode_step(64, 64 * 4000.0) > costs.decode_step(64, 64 * 2000.0) > costs.decode_step(1, 1000.0)
    alone = Costs(Setup(devices=32, llm=replace(MODELS["7b"], devices_an_engine=1)))
    assert alone.decode_step(64, 64 * 4000.0) > costs.decode_step(64, 64 * 4000.0)


def test_a_step_takes_as_long_as_its_fullest_rank() -> None:
    setup = Setup(devices=8, minibatches=1)  # two of them train
    flops = setup.llm.training_flops
    seconds, even = Costs(setup).training([500, 9000, 2000, 8000, 3000])
    work = flops(9000) + flops(2000) + flops(500), flops(8000) + flops(3000)
    assert seconds / even == pytest.approx(max(work) / (sum(work) / 2))


def test_sizes_are_compared_with_the_smallest() -> None:
    tiny = replace(SMALL, batch_size=8, group_size=4, warm_up=1, steps=2)
    console = Console(record=True, width=250)
    reports = run_sizes([replace(tiny, devices=32), replace(tiny, devices=8)], console)
    assert [report.setup.devices for report in reports] == [8, 32]
    ratio = reports[1].throughput / reports[0].throughput / 4
    text = console.export_text()
    assert f"{ratio:.3f}" in text
    assert reports[1].limit in text


def test_devices_are_named_by_numbers_or_by_engines() -> None:
    assert parse_devices("8,32") == [8, 32]
    for wrong in ("", "a", "2", "8,"):
        with pytest.raises(UserError):
            parse_devices(wrong)
    assert Setup(devices=devices_for(192, MODELS["7b"])).generators == 192
