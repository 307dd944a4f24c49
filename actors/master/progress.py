"""Which actors wait for which actors in a run, how long nothing has moved, and the remedies."""

from collections.abc import Callable
from typing import Literal

from actors.master.members import Members
from actors.master.run_state import RunState
from areal.config.roles import ROLES, Goal
from areal.staleness.failures import Failures
from protocols.membership_messages import actor_name

# How long a reward that was served may have no actor before admission pauses. The actor may be about to restart.
ABSENT_SECONDS = 10.0


class Servers:
    """The rewards and scorers of the run, and whether an actor serves them. `since`: by name of a reward or scorer that
    was served and has no actor now, the time of the loss."""

    def __init__(self, state: RunState, clock: Callable[[], float]) -> None:
        self._config, self._state, self._clock = state.config, state, clock
        self._scorers = dict.fromkeys(self._config.scorer_uses.needed, "scorer")
        self._were_served: set[str] = set()
        self.since: dict[str, float] = {}

    def look(self) -> None:
        """Note the rewards and scorers of the run without an actor. Call every second."""
        served, now = self.served(), self._clock()
        self._were_served |= served
        gone = (self._were_served & self.needed.keys()) - served
        self.since = {name: self.since.get(name, now) for name in sorted(gone)}

    @property
    def absent(self) -> list[str]:
        """The rewards and scorers that were served, and that no actor has served for ABSENT_SECONDS. No group is
        admitted until they are back, since the samples would only wait."""
        return [name for name, since in self.since.items() if self._clock() - since >= ABSENT_SECONDS]

    @property
    def pause(self) -> str:
        """The reason of a pause of admission, and the remedy; empty without a pause, or for another reason."""
        if not self.absent:
            return ""
        name = self.absent[0]
        role = self.needed[name]
        hand = f"areal run --role {role}" + f" --scorer {name}" * (role == "scorer")
        serving = "run.serve_reward in the notebook that did, or " * (role == "reward")
        return f"admission pauses: no actor serves the {role} {name!r} any more. Start one again: {serving}{hand}"

    @property
    def needed(self) -> dict[str, str]:
        """The rewards and scorers of the run, and the roles that serve them."""
        rewards = self._state.reward_names - {*self._config.judges}
        return dict.fromkeys(rewards, "reward") | self._scorers

    def served(self) -> set[str]:
        """The names that healthy members serve."""
        return {name for m in self._state.members.values() if m.state == "healthy" for name in m.serves}


class Progress:
    """`free`: returns the number of groups that may start now."""

    def __init__(self, state: RunState, members: Members, failures: Failures, free: Callable[[], int]) -> None:
        self._config, self._state, self._members, self._clock = state.config, state, members, members.clock
        self._failures = failures
        self._free = free
        self._roles = [name for name, role in ROLES.items() if role.processes(self._config)]
        self.servers = Servers(state, self._clock)
        self._successor_until = 0.0
        self.note_progress()

    def note_progress(self) -> None:
        """An actor has worked, or the run has moved."""
        self._last = self._clock()
        self._remedies = 0

    def await_successor(self) -> None:
        """A member has gone. The run does not end before a successor has had time to join."""
        self._successor_until = self._clock() + self._config.master.lease_seconds

    def describe_stall(self) -> str:
        return f"the run has made no progress for {self._clock() - self._last:.0f} s: {self.describe()}"

    def remedy(self) -> Literal["end", "requeue", "fence"] | None:
        """The remedy that is due because nothing has moved. After a third of `stall_seconds`, re-queue the unfinished
        groups. After two thirds, fence the `suspects`, to have them restarted. After the whole time, end the run. While
        a role has no healthy member, ending the run is the only remedy. A process that joins the run, also for an added
        reward, may be away for `outage_seconds`."""
        if self._waits_for_users():
            return None
        limit, idle, missing = self._config.master.stall_seconds, self._clock() - self._last, self.missing()
        joining = [name for name, role in ROLES.items() if name in missing and role.joins(self._config)]
        if joining or self.servers.since.keys() - {*self._config.own_rewards, *self._config.scorer_uses.started}:
            limit = max(limit, self._config.outage_seconds)
        if idle > limit and self._clock() >= self._successor_until:
            return "end"
        if self._remedies == 2 or idle <= limit * (self._remedies + 1) / 3 or missing:
            return None
        self._remedies += 1
        return "requeue" if self._remedies == 1 else "fence"

    def _waits_for_users(self) -> bool:
        """True if the next batch needs sessions of users, which no actor can hasten."""
        ledger = self._state.ledger
        return (
            ledger.state.settings.sessions_alone and ledger.schedule.waiting is not None and not self._state.unpublished
        )

    def suspects(self) -> list[str]:
        """Healthy members of the roles that the run waits for. Starting members are left alone."""
        goals: set[Goal] = {"step"}
        if self._state.ledger.version == self._config.steps:
            goals = {"step", "evaluation"}
        elif self._state.ledger.schedule.waiting and not self._state.unpublished:
            goals = {"batch", "evaluation"} if self._members.holder else {"batch"}
        awaited = {role.name for role in ROLES.values() if goals & role.works_for}
        return [i for i, m in self._state.members.items() if m.role in awaited and m.state == "healthy"]

    def describe(self) -> str:
        """The waits between actors and their duration, in a line, with the actor that has been at work for longest."""
        if work := self.longest_work():
            return f"{self.who_waits()}; {work}"
        return f"{self.who_waits()} (for {self._clock() - self._last:.0f} s)"

    def longest_work(self) -> str:
        """The member that has been at its present work for longest, the work, and its duration; empty if all members
        only wait. The run does not stall while a member works: a member that hangs is removed before long."""
        works = {identity: last.beat.works[:1] for identity, last in self._members.heartbeats.last.items()}
        working = [(work.seconds, identity, work.what) for identity, first in works.items() for work in first]
        if not working:
            return ""
        seconds, identity, what = max(working)
        return f"{actor_name(identity)} is {what} (for {seconds:.0f} s)"

    def who_waits(self) -> str:
        """The waits between actors."""
        last = self._state.ledger.version == self._config.steps
        if missing := [role for role in self.missing() if last or role != "evaluator"]:
            return f"everyone waits for a {' and a '.join(missing)} to be ready"
        if self._failures.outage:
            return f"one group at a time is tried, because {self._failures.describe_outage(self._clock())}"
        if last:
            return f"everyone waits for the {'last checkpoint and ' if self._config.steps else ''}evaluation"
        if waiting := self._state.ledger.schedule.waiting:
            late = ", and the trainer has not published its last version yet" if self._state.unpublished else ""
            return f"the trainer waits for a batch: {waiting}{late}{self._held_back()}"
        if not self._free():
            return f"the rollout managers wait for the trainer, which is {self._members.activity('trainer')}"
        return "nobody waits"

    def _held_back(self) -> str:
        """The reason why the only generator holds a version, so that no group of a newer version begins; else empty."""
        hold = self._members.holder
        if hold is None or len(self._members.with_role("generator")) > 1:
            return ""
        alone = "" if self._members.with_role("evaluator") else ", but there is no evaluator"
        return f"; the only generator holds version {hold[1].version} until it is evaluated{alone}"

    def missing(self) -> list[str]:
        """The needed roles without a healthy member, and the needed rewards and scorers without an actor."""
        missing = [name for name in self._roles if not self._members.with_role(name)]
        served = self.servers.served()
        unserved = [(role, name) for name, role in sorted(self.servers.needed.items()) if name not in served]
        return [*missing, *(f"{role} that serves {name!r}" for role, name in unserved if role not in missing)]
