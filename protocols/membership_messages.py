"""The messages about the members of a run: joining, heartbeats, the directory, the master's events; status; rewards.

| from | to | request | answer |
|---|---|---|---|
| any | master | Join | Welcome |
| any | master | Heartbeat | HeartbeatAnswer |
| any | master | Leave | Done |
| any | master | AskSnapshot | Snapshot |
| any | master | AskConfig | Configuration |
| rollout_manager, evaluator, gateway | master | ConnectionLost | Done |
| any | master | AddReward | Done |
| monitor | master | AskStatus | Status |

The master publishes PolicyPublished, MembersChanged and Shutdown.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Json, model_validator

from protocols.messages import MAX_SERVED, MAX_STATS, Address, Count, Int64s, Message, Name, Number, Part, Several

State = Literal["starting", "stale", "healthy", "draining"]
"""`starting`: not ready yet. `stale`: cannot load new weights. `draining`: takes no new work and is about to leave."""


class Policy(Part):
    """A policy, identified by (lineage, version). `folder` holds model.safetensors, at least on the trainer's machine.
    `stamp`: the digest of areal.weights.chunks, empty if there is nothing to check, as for version 0, the run's model.
    """

    lineage: int
    version: int
    folder: Annotated[str, Field(max_length=4096)]
    stamp: Name = ""

    @property
    def identity(self) -> tuple[int, int]:
        return self.lineage, self.version


def actor_name(identity: str) -> str:
    """The role/index of an identity role/index#incarnation.

    >>> actor_name("generator/2#9f3c")
    'generator/2'
    """
    return identity.partition("#")[0]


class Member(Part):
    """An actor as the directory lists it. `identity`: role/index#incarnation. `held`: a generator loads no policy newer
    than `held`, while `held` is evaluated there. `serving`: the policy is held for users (gateway.serve)."""

    identity: Name
    role: Name
    index: int
    address: Name
    state: State
    serves: Several[Name] = ()
    held: Policy | None = None
    serving: bool = False


class Join(Message):
    role: Name
    index: Annotated[int, Field(ge=0, le=1 << 20)] | None
    address: Address


class Snapshot(Message):
    """The current policy and members, for actors that join late. Events with numbers after `sequence` change the
    snapshot and are published at the address `events`. A restarted master goes on with the sequence numbers of the
    master before. The master sends the JSON of a member, encoded once for all askers."""

    policy: Policy
    members: Several[Annotated[Json[Member] | Member, Field(union_mode="left_to_right")]]
    sequence: int
    events: Name


class Welcome(Message):
    """The answer to Join: the actor's identity, the run's configuration and a snapshot. `start` is new for every start
    of an actor with this role and index."""

    identity: Name
    start: Name
    config: dict[str, Any]
    snapshot: Snapshot


class Engagement(Part):
    """The load of a generator: running and waiting `sequences` by asker, and the `limit` on the sum."""

    sequences: Annotated[dict[Name, Count], Field(max_length=4096)]
    limit: Annotated[int, Field(ge=1, le=1 << 31)]
    version: Annotated[int, Field(ge=0, le=1 << 53)]


class LoadColumns(Part):
    """The loads of generators (areal.generation.routing.GeneratorLoad), as the master passes them on: `names` are
    identities, and entry i of the columns, int64 [generators], is about generator i. `asker_sequences`: the number of
    `sequences` that the receiver began."""

    names: Several[Name]
    sequences: Int64s
    asker_sequences: Int64s
    limits: Int64s
    versions: Int64s

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if {len(self.sequences), len(self.asker_sequences), len(self.limits), len(self.versions)} != {len(self.names)}:
            raise ValueError("the columns are not as long as the names")
        if (self.limits < 1).any():
            raise ValueError("a limit is below 1")
        return self


class Span(Part):
    """An operation of an actor: `began` on the actor's own clock, and `seconds` long."""

    name: Name
    began: Number
    seconds: Number


class Work(Part):
    """Work of an actor, since `seconds` ago. Waiting for other actors is not work. `still`: seconds without any
    evidence of progress. `kind`: works of the same kind are compared; empty if the work has deadlines of its own."""

    kind: Annotated[str, Field(max_length=64)] = ""
    what: Annotated[str, Field(max_length=256)]
    seconds: Number
    still: Number = 0.0


class DiskShortage(Part):
    """A disk takes no writes for now (areal.storage.disk.Shortage)."""

    folder: Annotated[str, Field(max_length=4096)]
    cause: Name
    free: Annotated[int, Field(ge=0)]
    waits: Annotated[str, Field(max_length=512)]


class Heartbeat(Message):
    """Sent every second. `serves`: names of rewards or models that the actor offers. `stats`: gauges and counters by
    name. `spans`: operations since the last heartbeat. `clock`: the time of sending, on the clock of the spans.
    `engagement`: a generator's load. `works`: the oldest work in progress of every kind, oldest first; empty while the
    actor waits. `ended`: by kind, the longest standstill of works that have ended since the last heartbeat. `shortage`:
    set while the actor waits for a disk. `alert`: a sentence for the user of the run, if any. A generator is healthy
    once it has loaded the policy that was current when the generator joined."""

    state: State
    serves: Annotated[Several[Name], Field(max_length=MAX_SERVED)]
    activity: Annotated[str, Field(max_length=512)]
    stats: Annotated[dict[Name, Number], Field(max_length=MAX_STATS)]
    engagement: Engagement | None = None
    works: Annotated[Several[Work], Field(max_length=MAX_STATS)] = ()
    ended: Annotated[dict[Name, Number], Field(max_length=MAX_STATS)] = Field(default_factory=dict)
    spans: Annotated[Several[Span], Field(max_length=MAX_STATS)] = ()
    clock: Number = 0.0
    shortage: DiskShortage | None = None
    alert: Annotated[str, Field(max_length=1024)] = ""


class Shutdown(Message):
    """The run is over. `ok`: it reached its end. `stopped`: the master was told to stop; the trainer hands over."""

    ok: bool
    reason: Annotated[str, Field(max_length=4096)]
    stopped: bool = False


class HeartbeatAnswer(Message):
    """`ended`: set once the run is over. `loads`: only for rollout managers and gateways."""

    policy: Policy
    sequence: int
    ended: Shutdown | None = None
    loads: LoadColumns | None = None


class Leave(Message):
    reason: Annotated[str, Field(max_length=4096)]


class ConnectionLost(Message):
    """The sender cannot reach a member: a connection was refused, or broke. The master answers after its own try."""

    identity: Name


class AskSnapshot(Message):
    pass


class AskConfig(Message):
    """A request of a process that is no member but needs the configuration, for example before it joins."""


class Configuration(Message):
    """model: digests of the parts of the run's model, by name."""

    values: dict[str, Any]
    model: dict[str, str]


class AddReward(Message):
    """From the next new prompt on, the reward `name` counts with `weight`, whether the reward is new or not. Rows with
    rewards of their own are not affected."""

    name: Name
    weight: Number


class AskStatus(Message):
    """`since`: the answer includes the newest steps after step `since`. None: the answer includes no steps."""

    since: int | None = None


class Status(Message):
    """The status for a monitor: see `StatusRequests.ask_status` for the keys."""

    values: dict[str, Any]


class PolicyPublished(Message):
    policy: Policy


class MembersChanged(Message):
    """`changed`: members that are new or have changed. `gone`: identities of former members."""

    changed: Several[Member] = ()
    gone: Several[Name] = ()
