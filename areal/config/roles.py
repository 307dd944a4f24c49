"""The roles of a run besides the master: their numbers of processes, their needs, and the stages that wait for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from areal.base import extensions
from areal.config import Config

Goal = Literal["batch", "step", "evaluation"]
"""The stages that a run waits for: the next batch, its training and publication, the scores of a version."""


@dataclass(frozen=True)
class Role:
    """A role; the actor is a class in the module `actors.NAME`.

    processes: their number in a run on one machine. 0: the run does without the role; else it waits until one is ready.
    joins: whether the run starts no process of the role, because processes of the role join the run.
    works_for: the goals that need this role, among other roles.
    devices, devices_key: number of GPUs of the process with an index, and the configuration key with the number.
    in_turns: with `colocate` the role uses the devices in turns with all other such roles.
    names: of processes that differ, one for each process of a run on one machine; the process gets `--ROLE NAME`.
    single: a run has a single process of the role, and a new process takes its place.
    environment: variables for the role's process, unless the user has set them.
    """

    name: str
    processes: Callable[[Config], int]
    works_for: frozenset[Goal]
    devices: Callable[[Config, int], int] = lambda config, index: 0
    devices_key: str = ""
    in_turns: bool = True
    names: Callable[[Config], list[str]] = lambda config: []
    single: bool = False
    joins: Callable[[Config], bool] = lambda config: False
    environment: Mapping[str, str] = field(default_factory=dict)

    def started(self, config: Config) -> int:
        """Return the number of processes that a run on one machine starts."""
        return 0 if self.joins(config) else self.processes(config)

    def options(self, config: Config, index: int) -> list[str]:
        """Return the options of a process that differ from the role's."""
        names = self.names(config)
        return [f"--{self.name}", names[index]] if names else []

    def needed_devices(self, config: Config, count: int) -> str:
        """Return the devices of `count` processes, for messages."""
        numbers = dict.fromkeys(f"{self.devices(config, index)}" for index in range(count))
        devices = f"{' or '.join(numbers)}{'' if self.single else ' each'} ({self.devices_key})"
        return f"the {self.name} needs {devices}" if self.single else f"{count} {self.name}s need {devices}"


# Roles that compute with the run's model, or make and read its tokens.
USES_MODEL = frozenset(("trainer", "generator", "rollout_manager", "evaluator", "gateway"))
# numpy, imported by the bus, would start a thread for each core. vLLM is loaded in a process with a single thread.
ENGINE_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}

# The slowest role to start comes first. Roles get devices, and are shown, in this order.
ROLES = {
    role.name: role
    for role in (
        Role(
            "trainer",
            processes=lambda config: int(config.steps > 0),
            works_for=frozenset({"step"}),
            devices=lambda config, index: config.trainer.ranks,
            devices_key="trainer.ranks",
            single=True,
        ),
        Role(
            "generator",
            processes=lambda config: config.generator.count,
            works_for=frozenset({"batch", "evaluation"}),
            devices=lambda config, index: config.generator.devices,
            devices_key="generator.tensor_parallel",
            environment=ENGINE_ENVIRONMENT,
        ),
        Role(
            "scorer",
            processes=lambda config: len(config.scorer_uses.started) or len(config.scorer_uses.needed),
            joins=lambda config: not config.scorer_uses.started,
            names=lambda config: config.scorer_uses.started,
            works_for=frozenset({"batch", "evaluation"}),
            devices=lambda config, index: config.scorers[config.scorer_uses.started[index]].devices,
            devices_key="scorers.NAME.tensor_parallel",
            in_turns=False,
            environment=ENGINE_ENVIRONMENT,
        ),
        Role(
            "reward",
            processes=lambda config: (
                config.reward.count if config.rewards.keys() - {*config.scorers, *config.judges} else 0
            ),
            joins=lambda config: not config.own_rewards and bool(config.reward.external),
            works_for=frozenset({"batch", "evaluation"}),
        ),
        Role(
            "rollout_manager",
            processes=lambda config: config.rollout_manager.count if config.steps and config.gateway.share < 1 else 0,
            joins=lambda config: config.rollout_manager.external,
            works_for=frozenset({"batch"}),
        ),
        Role("gateway", processes=lambda config: config.gateway.count, works_for=frozenset()),
        Role(
            "evaluator",
            processes=lambda config: int(config.evaluates),
            joins=lambda config: config.rollout_manager.external,
            works_for=frozenset({"evaluation"}),
        ),
    )
}


def is_role(name: str) -> bool:
    """Whether an actor may join under the name of a role, either of this project or of an installed package."""
    is_own = ("role", name) in extensions.own_entries()  # the master does not join
    return name in ROLES or (not is_own and extensions.entry("role", name) is not None)


def role_of(name: str) -> Role:
    """Return the role of this name. A role of an installed package is started by hand, and the run does without it."""
    return ROLES.get(name) or Role(name, processes=lambda config: 0, works_for=frozenset())
