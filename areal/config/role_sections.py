"""The sections of the other roles, of the network, and of watching a run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from areal.base.errors import UserError, explain
from areal.config.data_section import BenchmarkConfig
from areal.config.engine_options import parser_conflicts
from areal.config.reading import BENCHMARKS, merged, read_values
from areal.config.section import NAME, Section, UserPath, temperature_conflicts

# auto: the parser that reads the tool calls of the model's chat template.
AUTO_PARSER = "auto"
# Workflows whose policy always gets tools.
OFFER_TOOLS = ("tools", "sandbox_tools")

# The name of a workflow by a process that joins the run.
EXTERNAL = "external"


class RolloutManagerConfig(Section):
    count: int = Field(1, ge=1, description="rollout managers of a run on one machine")
    workflow: str = "single_turn"
    """a built-in workflow, or package.module:function (areal docs workflows); external: the workflow of a process that
    joins the run (areal.train)"""
    workflow_options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the workflow")
    endpoint_host: str = Field(
        "127.0.0.1", description="interface at which agents reach the policy (areal docs agents)"
    )
    tool_call_parser: str = AUTO_PARSER
    """vLLM's parser of tool calls for agents, such as qwen3_coder; auto: the parser of the calls in the model's chat
    template"""
    reasoning_parser: str | None = None
    """vLLM's parser of thinking for agents, such as qwen3; null: thinking is text"""
    max_concurrent_groups: int = Field(64, ge=1, description="most groups that a manager runs at once")
    save_every_tokens: int = Field(2048, ge=0)
    """the trainer's disk gets the tokens of an unfinished sample after every so many tokens, which bounds the loss with
    a killed rollout manager; 0: only finished samples are stored"""
    sample_seconds: float | None = Field(None, gt=0)
    """a sample fails if its workflow waits for so long for anything but the run's own actors; null: ten times as long
    as any earlier wait, and at least 5 times master.hang_seconds (30 times until a wait ends)"""

    def conflicts(self) -> Iterator[str]:
        for key, name in ("tool_call_parser", self.tool_call_parser), ("reasoning_parser", self.reasoning_parser):
            yield from parser_conflicts(key, None if name == AUTO_PARSER else name)

    @property
    def external(self) -> bool:
        """Whether a process that joins the run has the workflow."""
        return self.workflow == EXTERNAL

    @property
    def is_own(self) -> bool:
        """Whether the workflow is a user's own code."""
        return ":" in self.workflow or self.external

    @property
    def gives_rewards(self) -> bool:
        """Whether the workflow gives rewards: rows then need neither answers nor tests."""
        return self.workflow in ("environment", "sandbox_tools", "verifiers") or bool(
            self.workflow_options.get("agent_reward")
        )

    @property
    def needs_parsers(self) -> bool:
        """Whether vLLM's parsers, which may not fit the model, are known at the start to read the turns."""
        named = self.reasoning_parser is not None or self.tool_call_parser != AUTO_PARSER
        return named or self.workflow in OFFER_TOOLS

    @property
    def may_need_parsers(self) -> bool:
        """Whether vLLM's parsers read the turns if the workflow offers tools. Its first call shows the tools."""
        return not self.needs_parsers and (self.workflow in ("agent", "verifiers") or self.is_own)


class EvaluatorConfig(Section):
    """Scores held-out rows and benchmarks at the first and the last version, and at every k-th version between them.
    For a version in between, one generator stays at the version until the scoring is done; everything else continues.
    """

    every: int = Field(0, ge=0, description="k: also evaluate every k-th version; 0: only the first and the last")
    samples: int = Field(1, ge=1, description="completions per row")
    pass_score: float = Field(1.0, description="least score of a solved completion (pass@k)")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    timeout_seconds: float | None = Field(None, gt=0)
    """time limit of an evaluation, which then reports the scores so far"""
    benchmarks: dict[str, BenchmarkConfig] = Field(default_factory=dict)

    @field_validator("benchmarks", mode="before")
    @classmethod
    def _benchmarks_are_known(cls, value: Any) -> dict[str, Any]:
        with explain(UserError, "{why}", lambda text: ValueError(text.rstrip("."))):
            return benchmarks_in(value)

    def conflicts(self) -> Iterator[str]:
        yield from temperature_conflicts("evaluator.temperature", self.temperature)
        if not self.temperature and self.samples > 1:
            yield (
                f"evaluator.samples is {self.samples}, but at evaluator.temperature 0 they are all the same: "
                f"set evaluator.samples=1 or a higher temperature"
            )


def benchmarks_in(value: Any) -> dict[str, Any]:
    """Return the keys of each benchmark in `value`, as BenchmarkConfig describes: names are replaced by the contents of
    their files. Raises UserError, and ValueError for a value of another kind."""
    named = {Path(name).stem: {"base": name} for name in value} if _is_list_of_names(value) else value
    if not isinstance(named, dict) or not all(isinstance(keys, dict | None) for keys in named.values()):
        raise ValueError("evaluator.benchmarks is neither a list of names nor a mapping of names to keys: correct it")
    return {name: _benchmark(name, dict(keys or {})) for name, keys in named.items()}


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _benchmark(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    if not re.fullmatch(NAME, name):
        raise UserError(f"The benchmark {name!r} in evaluator.benchmarks has a name that no file can have: rename it.")
    base = keys.pop("base", name)
    file = Path(base) if base.endswith((".yaml", ".yml")) else BENCHMARKS / f"{base}.yaml"
    if not file.is_file():
        if "source" in keys:
            return keys
        names = ", ".join(sorted(path.stem for path in BENCHMARKS.glob("*.yaml")))
        raise UserError(
            f"There is no benchmark {base!r} (evaluator.benchmarks): known are {names}; write the path of a YAML file "
            f"for one of your own."
        )
    return merged(read_values(file), keys)


class KeyConfig(Section):
    """A key with which users reach the policy. The key itself is stored nowhere."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of the key: printf %s KEY | sha256sum")
    rights: list[Literal["serve", "reward", "reward_all"]] = ["serve"]
    """serve: calls; reward: rewards of the key's own sessions; reward_all: rewards of all sessions"""
    train: bool = True
    """whether the key's sessions may be trained; false: for programs that evaluate, whose requests may set temperature,
    top_p, top_k and min_p"""
    calls_per_minute: int | None = Field(None, ge=1, description="most requests a minute, n answers are n; null: any")
    tokens_per_minute: int | None = Field(None, ge=1)
    """most sampled tokens a minute, where a running answer counts with its token limit; null: any number"""
    sessions: int | None = Field(None, ge=1, description="most sessions that take calls at a time; null: any number")


class GatewayConfig(Section):
    """Gateways serve the policy to users while it learns, and train on their sessions (areal docs gateway)."""

    count: int = Field(0, ge=0, description="gateways of a run on one machine; others may join (--role gateway)")
    share: float = Field(0.0, ge=0, le=1)
    """share of sessions of users among all alive groups; 0: sessions are served, and never trained; 1: sessions alone
    are trained, and no rows"""
    host: str = Field("127.0.0.1", description="interface at which users reach the gateways")
    port: int = Field(0, ge=0, le=65535, description="port of gateway 0, those of others follow; 0: any free port")
    certificate: UserPath | None = Field(None, description="file of the certificate for TLS, PEM; null: no TLS")
    private_key: UserPath | None = Field(None, description="file of its private key, PEM")
    keys: dict[str, KeyConfig] = Field(default_factory=dict, description="who may do what, by name")
    serve: Literal["newest", "evaluated"] = "newest"
    """newest: the version in training; evaluated: one generator keeps the last version whose held-out accuracy is at
    most accuracy_drop below the accuracy of the version served before, and takes only the calls of users"""
    accuracy_drop: float = Field(0.02, ge=0, description="see gateway.serve")
    without_permit: Literal["serve", "wait"] = "serve"
    """fate of a new session beyond the most open sessions: served and not trained, or waits (HTTP 429)"""
    idle_seconds: float = Field(600.0, gt=0, description="a session ends so long after its last call")
    session_seconds: float = Field(3600.0, gt=0)
    """a session expires so long after its first call unless its reward has come"""
    max_session_tokens: int = Field(4096, ge=1, description="most tokens of a session; the next call begins another")
    max_messages: int = Field(1024, ge=1, description="most messages of a call")
    reward_range: tuple[float, float] = Field((-1.0, 1.0), description="lowest and highest reward that a key may give")
    score: bool = False
    """whether reward.functions score a session that ends without a reward; false: the session waits for a reward"""

    def conflicts(self) -> Iterator[str]:
        if self.count and not self.keys:
            yield "gateway.keys is empty, so nobody could make a call: add one with its sha256 (areal docs gateway)"
        if (self.certificate is None) != (self.private_key is None):
            yield "TLS needs two files: set gateway.certificate and gateway.private_key, or neither"
        if not self.reward_range[0] < self.reward_range[1]:
            yield f"gateway.reward_range is {list(self.reward_range)}: write the lowest reward first"
        for name in self.keys:
            if not re.fullmatch(NAME, name):
                yield f"a key of gateway.keys has the name {name[:120]!r}: use up to 100 letters, digits, `_` and `-`"


class ObserveConfig(Section):
    """Tools for watching a run; docs/observe.md lists them. A failure of a tool cannot fail the run."""

    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """each actor serves its metrics at the first free port from this port on; null: off"""
    prometheus_host: str = Field("127.0.0.1", description="interface for the metrics")
    prometheus_token: str | None = Field(None, min_length=1)
    """readers send the token as `Authorization: Bearer`; required if the interface is not loopback"""
    tensorboard: bool = Field(True, description="write TensorBoard event files to the run folder")
    rollouts: Literal["all", "sample", "none"] = "all"
    """rollouts kept in the run folder, as Parquet; sample: the rollouts of every 16th group"""
    rollouts_gib: float = Field(20.0, gt=0, description="above this size the oldest files of rollouts are removed")
    metrics_mib: float | None = Field(None, gt=0)
    """at this size metrics.jsonl replaces metrics.1.jsonl, and TensorBoard's newest file the older; null: never"""
    events_mib: float = Field(32.0, gt=0, description="as metrics_mib, of events.jsonl and events.1.jsonl")
    wandb: str | None = Field(None, description="Weights & Biases project to log to")
    trackio: str | None = Field(None, description="trackio project to log to")
    mlflow: str | None = None
    """MLflow experiment to log to, at MLFLOW_TRACKING_URI or else in mlflow.db beside the run folder"""
    trackers: list[str] = Field(default_factory=list)
    """trackers of installed packages (`areal extensions`), or `package.module:function`"""
    tracker_options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="options by tracker")

    def conflicts(self) -> Iterator[str]:
        for name in self.tracker_options.keys() - {*self.trackers}:
            yield f"observe.tracker_options names {name!r}, which observe.trackers does not: add it there"
        beyond = self.prometheus_host not in ("127.0.0.1", "::1", "localhost")
        if self.prometheus_port and beyond and not self.prometheus_token:
            yield (
                f"observe.prometheus_host is {self.prometheus_host}, where other machines can read the metrics: set "
                f"observe.prometheus_token, and give it to Prometheus as authorization.credentials"
            )


class MasterConfig(Section):
    address: str = Field("tcp://127.0.0.1:5555", pattern=r"^tcp://.+:\d+$")
    """address at which the master listens; host *: all interfaces. By default, a run on one machine takes another port
    if the port is in use"""
    lease_seconds: float = Field(60.0, gt=0, description="silence after which an actor is fenced and its leases end")
    lost_seconds: float = Field(60.0, gt=0, description="time without the master's answer after which an actor exits")
    stall_seconds: float = Field(300.0, gt=0)
    """time without progress after which the run ends; the master tries to recover earlier"""
    hang_seconds: float = Field(120.0, ge=0)
    """an actor is fenced and its engine killed if its work stands still for so long, and for ten times as long as such
    work ever did; 30 times as long if such work has never ended; 0: never"""
    drain_seconds: float = Field(60.0, gt=0)
    """time for an actor to hand over its work, and for the trainer to save a checkpoint, after being told to leave;
    less than the grace of your scheduler"""

    def conflicts(self) -> Iterator[str]:
        if int(self.address.rpartition(":")[2]) > 65535:
            yield f"master.address is {self.address}, but ports end at 65535: write another one"


class NetworkConfig(Section):
    """The links between actors (areal docs security). Roles started by hand have options for the same keys."""

    keys: UserPath | None = None
    """folder made by `areal keys`, required if the master listens beyond this machine; null: AREAL_KEYS, or on one
    machine keys of the run's own"""
    ports: tuple[int, int] | None = Field(None, description="first and last port to listen at; null: any free port")

    def conflicts(self) -> Iterator[str]:
        if self.ports is not None and not 0 < self.ports[0] <= self.ports[1] < 65536:
            yield f"network.ports is {list(self.ports)}: write the first and the last port, such as [20000, 20100]"

    @property
    def ports_text(self) -> str:
        """Return the ports as written in an address."""
        return "*" if self.ports is None else f"{self.ports[0]}-{self.ports[1]}"
