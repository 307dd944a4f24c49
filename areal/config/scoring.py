"""Rewards, and the sandbox of programs that a model wrote."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from areal.base.errors import explain
from areal.config.data_section import reward_weights
from areal.config.section import Section, UserPath

Credit = Literal["sample", "return_to_go", "call"]

# The rewards that ask a model. Their option `url` may name the policy of the run, or a scorer.
JUDGES = ("judge", "group_judge")

POLICY, SCORER = "policy", "scorer:"


def is_in_run(url: str) -> bool:
    """Whether a judge is the policy of the run or a scorer."""
    return url == POLICY or url.startswith(SCORER)


class RewardConfig(Section):
    """`functions` names the rewards of the run (areal docs rewards), with weights if you like: the score is the
    weighted sum. A row of the data may name its own rewards in the same way."""

    count: int = Field(1, ge=1, description="reward actors of a run on one machine")
    functions: dict[str, float] = Field(default_factory=dict)
    """a name, a list of names, or a mapping of names to weights"""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """keyword arguments of rewards that are classes, by name of the reward"""
    external: list[str] = Field(default_factory=list)
    """rewards of processes that join the run (areal.train, areal run --role reward); none starts here"""
    groups: list[str] = Field(default_factory=list)
    """rewards that score all completions of a group at once; a start adds its own rewards of this kind"""
    workers: int = Field(1, ge=1, description="worker processes of each reward actor")
    concurrent_calls: int = Field(64, ge=1)
    """most calls of async rewards that run at once in the single process of a reward actor"""
    timeout_seconds: float = Field(10.0, gt=0, description="time limit of one call")
    retries: int = Field(2, ge=0, description="further attempts after a failure, on another actor if there is one")
    quarantine_after: int = Field(3, ge=1, description="a completion is refused after so many dead or late workers")
    memory_gib: float | None = Field(None, gt=0, description="memory limit of a worker, GiB")
    cache_size: int = Field(4096, ge=0, description="scores that each reward actor caches; 0: off")
    credit: Credit = Field("sample", description="which rewards a sampled token is credited with (areal docs agents)")
    turn_discount: float = Field(1.0, ge=0, le=1, description="return_to_go: factor on a reward for each call between")
    overlong_tokens: int = Field(0, ge=0)
    """a completion loses up to 1 of its reward over this many tokens before max_new_tokens; 0: off"""

    @field_validator("functions", mode="before")
    @classmethod
    def _weighted(cls, value: Any) -> dict[str, float]:
        with explain(ValueError, "reward.functions {why}", ValueError):
            return {} if value == {} else reward_weights(value)


class SandboxConfig(Section):
    """Limits of a model's program and of everything that the program starts. docs/sandbox.md has the reasons.

    Programs run on this machine, or on the SandboxFusion server at `url`."""

    mode: Literal["namespaces", "none"] = "namespaces"
    """none: no protection at all, only for trusted programs"""
    tests: Literal["outside", "inside_where_needed"] = "outside"
    """outside: tests in Python run in another process than the program; rows that need more are refused.
    inside_where_needed: the tests of such rows run beside the program, which can forge the verdict"""
    url: str | None = Field(None, pattern=r"^https?://.+", description="a SandboxFusion server, without /run_code")
    cpu_seconds: float = Field(4.0, gt=0, description="CPU time of a program's processes together")
    wall_seconds: float = Field(8.0, gt=0)
    """elapsed time of a program's tests together; above cpu_seconds, since machines are busy"""
    memory_mib: int = Field(1024, ge=16, description="memory of a program's processes together, MiB")
    processes: int = Field(64, ge=1, description="processes and threads at once")
    disk_mib: int = Field(64, ge=1, description="size of all files together, which are kept in memory, MiB")
    output_kib: int = Field(1024, ge=1, description="size of stdout, and of stderr, KiB")
    cgroup: UserPath | None = None
    """folder of a control group (version 2) for the sandbox; the kernel then counts memory and CPU time exactly"""
    folders: list[UserPath] = Field(default_factory=list)
    """folders that programs may read besides the folders of the system and of Python"""


class ScoringConfig(Section):
    """The sections for scoring completions."""

    reward: RewardConfig = RewardConfig()
    sandbox: SandboxConfig = SandboxConfig()

    def conflicts(self) -> Iterator[str]:
        if "code" in self.own_rewards and self.sandbox.wall_seconds >= self.reward.timeout_seconds:
            yield (
                f"reward.timeout_seconds is {self.reward.timeout_seconds:g}, but a program of the reward code may run "
                f"for sandbox.wall_seconds, {self.sandbox.wall_seconds:g}: raise reward.timeout_seconds above that, or "
                f"lower sandbox.wall_seconds"
            )
        if self.needs_reward and not self.rewards:
            yield "reward.functions is missing: set it there or as an override, reward.functions=NAME"

    @property
    def needs_reward(self) -> bool:
        return True

    @property
    def rewards(self) -> dict[str, float]:
        """All rewards in the configuration, by name."""
        return self.reward.functions

    @property
    def judges(self) -> dict[str, str]:
        """The addresses of the judges in the run, by the reward's name; also of judges that only rows name."""
        options = self.reward.options.items()
        urls = {name: str(values.get("url")) for name, values in options if name.partition("/")[0] in JUDGES}
        return {name: url for name, url in urls.items() if is_in_run(url)}

    @property
    def policy_judges(self) -> list[str]:
        """The rewards that the run's own policy judges, asked by the sampling role."""
        return [name for name, url in self.judges.items() if url == POLICY]

    @property
    def own_rewards(self) -> list[str]:
        """The rewards of the configuration that the run's own reward actors serve."""
        return [name for name in self.rewards if name not in {*self.reward.external, *self.judges}]

    @property
    def served_rewards(self) -> RewardConfig:
        """`reward`, with the settings of the sandbox as the options of `code`."""
        options = {"code": self.sandbox.model_dump(mode="json")} | self.reward.options
        return self.reward.model_copy(update={"options": options})
