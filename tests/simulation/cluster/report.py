"""The report of a run of the scaling model, and the tables that compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from simulation.cluster.cluster import Cluster, Totals
from simulation.cluster.setups import Setup


@dataclass(frozen=True, slots=True)
class ProcessLoad:
    """The load of one process, per second of the run: messages in and out, and CPU seconds."""

    messages: float
    cores: float


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a set-up. Rates are completion tokens per second, over the measured steps."""

    setup: Setup
    throughput: float
    training_bound: float
    """The throughput of a trainer that never waits and whose ranks have equal shares."""
    generating_bound: float
    """The throughput if every engine is full and never interrupted."""
    age_bound: float
    """eta + 1 batches in the time that the longest completion takes on these engines, at the load that they had."""
    step_seconds: float
    shares: dict[str, float]
    """Shares of a step's time, by what the trainer did. `starved`: it waited, and fewer groups than a batch were ready.
    `stragglers`: it waited, because rule 3 held the batch back for groups that would be too old afterwards. `control`:
    the rest."""
    staleness_mean: float
    staleness_max: int
    alive: float
    """Alive groups on average, in batches."""
    sequences: float
    """Sequences on an engine, on average."""
    engines_idle: float
    engines_loading: float
    """Shares of the time in which engines have no sequence, and in which they load weights."""
    master: ProcessLoad
    manager: ProcessLoad
    """The busiest rollout manager."""
    generator: ProcessLoad
    """The busiest generator."""
    trainer: ProcessLoad
    cpu_seconds: float
    """CPU time of the simulation."""
    logged: dict[str, int]

    @classmethod
    def of(cls, cluster: Cluster, start: Totals, end: Totals, cpu_seconds: float) -> Report:
        setup, costs = cluster.setup, cluster.costs
        seconds = end.now - start.now
        steps = cluster.steps[setup.warm_up :]
        tokens, learner, engines = end.tokens - start.tokens, end.learner - start.learner, end.engines - start.engines
        waited = sum(step["trainer_wait_seconds"] for step in steps)
        starved = min(waited, sum(step["starved_seconds"] for step in steps))
        spent = dict(learner) | {"starved": starved, "stragglers": waited - starved}
        spent["publishing"] += sum(step["publish_wait_seconds"] for step in steps)
        spent["control"] = seconds - sum(spent.values())
        engine_seconds = seconds * setup.generators
        sequences = engines["sequence_seconds"] / engine_seconds
        mean = tokens / (len(steps) * setup.batch_size * setup.group_size)
        pace = costs.decode_step(round(sequences), sequences * (setup.prompt_tokens + mean * 0.7))
        bare = learner["computing"] + learner["publishing"] + learner["gradients"] + learner["fetching"]

        def load(role: str) -> ProcessLoad:
            names = [name for name in end.messages if name.rpartition("-")[0] == role]
            messages = max(end.messages[name] - start.messages[name] for name in names)
            return ProcessLoad(messages / seconds, max(end.cpu[name] - start.cpu[name] for name in names) / seconds)

        staleness = [step["staleness_mean"] for step in steps]
        return cls(
            setup=setup,
            throughput=tokens / seconds,
            training_bound=tokens / bare,
            generating_bound=costs.generating_bound(setup.prompt_tokens + mean / 2),
            age_bound=(setup.max_staleness + 1) * tokens / len(steps) / (setup.max_new_tokens * pace),
            step_seconds=seconds / len(steps),
            shares={name: value / seconds for name, value in spent.items()},
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(step["staleness_max"] for step in steps),
            alive=sum(step["groups_alive"] for step in steps) / len(steps) / setup.batch_size + 1,
            sequences=sequences,
            engines_idle=1 - engines["busy_seconds"] / engine_seconds,
            engines_loading=engines["load_seconds"] / engine_seconds,
            master=load("master"),
            manager=load("rollout_manager"),
            generator=load("generator"),
            trainer=load("trainer"),
            cpu_seconds=cpu_seconds,
            logged=dict(end.logged),
        )

    @property
    def limit(self) -> str:
        """The largest share of the trainer's time, apart from computing with equal shares."""
        name = max((name for name in self.shares if name != "computing"), key=lambda name: self.shares[name])
        return f"{name} {self.shares[name]:.1%}"


def run(setup: Setup) -> Report:
    """Simulate one set-up. Raises what `Cluster.run` does."""
    cluster = Cluster(setup)
    return Report.of(cluster, *cluster.run())


def run_sizes(setups: Sequence[Setup], console: Console) -> list[Report]:
    """Simulate set-ups that differ in their number of devices, and print the results. The ideal throughput is that of
    the smallest set-up, in proportion to the devices."""
    reports = []
    for setup in sorted(setups, key=lambda setup: setup.devices):
        with console.status(f"{setup.devices} devices"):
            reports.append(run(setup))
        last = reports[-1]
        console.print(
            f"{setup.devices} devices: {last.throughput:,.0f} tokens/s ({last.cpu_seconds:.0f} s of CPU)",
            highlight=False,
        )
    for table in (_throughput(reports), _time(reports), _load(reports)):
        console.print(table)
    for report in reports:
        if unusual := {k: n for k, n in report.logged.items() if k.startswith(("warning", "error"))}:
            console.print(f"{report.setup.devices} devices, logged: {unusual}", highlight=False)
    return reports


def _throughput(reports: Sequence[Report]) -> Table:
    first = reports[0]
    table = Table(
        "devices",
        "engines",
        "tokens/s",
        "of the ideal",
        "training bound",
        "generating bound",
        "age bound",
        "staleness mean",
        "max",
        "alive, batches",
        title=_title(first.setup),
        title_justify="left",
    )
    for r in reports:
        ideal = first.throughput * r.setup.devices / first.setup.devices
        table.add_row(
            f"{r.setup.devices}",
            f"{r.setup.generators} x {r.setup.llm.devices_an_engine}",
            f"{r.throughput:,.0f}",
            f"{r.throughput / ideal:.3f}",
            f"{r.training_bound:,.0f}",
            f"{r.generating_bound:,.0f}",
            f"{r.age_bound:,.0f}",
            f"{r.staleness_mean:.2f}",
            f"{r.staleness_max}",
            f"{r.alive:.1f}",
        )
    return table


def _time(reports: Sequence[Report]) -> Table:
    names = list(dict.fromkeys(name for report in reports for name in report.shares))
    table = Table(
        "devices",
        "step, s",
        *names,
        "sequences an engine",
        "engines idle",
        "loading",
        title="Where a step's time goes",
        title_justify="left",
    )
    for r in reports:
        shares = (f"{r.shares.get(name, 0.0):.1%}" for name in names)
        table.add_row(
            f"{r.setup.devices}",
            f"{r.step_seconds:,.1f}",
            *shares,
            f"{r.sequences:.0f}",
            f"{r.engines_idle:.1%}",
            f"{r.engines_loading:.1%}",
        )
    return table


def _load(reports: Sequence[Report]) -> Table:
    table = Table(
        "devices",
        "master: messages/s",
        "cores",
        "managers",
        "busiest: messages/s",
        "cores",
        "trainer: cores",
        "limit",
        title="Load of the control plane",
        title_justify="left",
    )
    for r in reports:
        table.add_row(
            f"{r.setup.devices}",
            f"{r.master.messages:,.1f}",
            f"{r.master.cores:.4f}",
            f"{r.setup.managers}",
            f"{r.manager.messages:,.1f}",
            f"{r.manager.cores:.4f}",
            f"{r.trainer.cores:.4f}",
            r.limit,
        )
    return table


def _title(setup: Setup) -> str:
    return (
        f"{setup.llm.name}, {setup.batch_size} x {setup.group_size} samples of up to "
        f"{setup.prompt_tokens + setup.max_new_tokens:,} tokens, eta {setup.max_staleness}, "
        f"run_ahead {setup.run_ahead}, seed {setup.seed}"
    )
