"""Who waits for whom in a run, for how long nothing has moved, and what is done about it."""

from collections.abc import Callable
from typing import Literal

from actors.master.members import Members
from actors.master.run_state import RunState
from areal.config.roles import ROLES, Goal
from areal.staleness.failures import Failures
from protocols.membership_messages import actor_name

# How long a reward that was served may have no actor before admission pauses. Its actor may just be started again.
ABSENT_SECONDS = 10.0


class Servers:
    """The rewards and scorers that the run needs, and whether an actor serves each. `since`: the names that were served
    and are not, and since when."""

    def __init__(self, state: RunState, clock: Callable[[], float]) -> None:
        self._config, self._state, self._clock = state.config, state, clock
        self._scorers = dict.fromkeys(self._config.needed_scorers, "scorer")
        self._were_served: set[str] = set()
        self.since: dict[str, float] = {}

    def look(self) -> None:
        """Note which rewards and scorers of the run nobody serves any more. To be called every second."""
        served, now = self.served(), self._clock()
        self._were_served |= served
        gone = (self._were_served & self.needed.keys()) - served
        self.since = {name: self.since.get(name, now) for name in sorted(gone)}

    @property
    def absent(self) -> list[str]:
        """The rewards and scorers that were served, and that nobody has served for ABSENT_SECONDS. Until they are back,
        no group is admitted: each of its samples would only wait."""
        return [name for name, since in self.since.items() if self._clock() - since >= ABSENT_SECONDS]

    @property
    def pause(self) -> str:
        """Why admission pauses, and what to do; empty if it does not, or for another reason."""
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
    """`free`: the number of groups that may start now."""

    def __init__(self, state: RunState, members: Members, failures: Failures, free: Callable[[], int]) -> None:
        self._config, self._state, self._members, self._clock = state.config, state, members, members.clock
        self._failures = failures
        self._free = free
        self._roles = [name for name, role in ROLES.items() if role.processes(self._config)]
        self.servers = Servers(state, self._clock)
        self._successor_until = 0.0
        self.note_progress()

    def note_progress(self) -> None:
        """An actor has worked, or what it did has moved the run."""
        self._last = self._clock()
        self._remedies = 0

    def await_successor(self) -> None:
        """A member has gone. The run does not end before the one that may be started in its place had time to join."""
        self._successor_until = self._clock() + self._config.master.lease_seconds

    # --- stalls

    def describe_stall(self) -> str:
        return f"the run has made no progress for {self._clock() - self._last:.0f} s: {self.describe()}"

    def remedy(self) -> Literal["end", "requeue", "fence"] | None:
        """What to do now because nothing has moved. After a third of `stall_seconds`, re-queue the unfinished groups.
        After two thirds, fence the `suspects`, so that they are restarted. After all of it, end the run. While a role
        has no healthy member, only the last one is done. A process that joins the run may be away for `outage_seconds`,
        also one that serves an added reward."""
        if self._waits_for_users():
            return None
        limit, idle, missing = self._config.master.stall_seconds, self._clock() - self._last, self.missing()
        joining = [name for name, role in ROLES.items() if name in missing and role.joins(self._config)]
        if joining or self.servers.since.keys() - {*self._config.own_rewards, *self._config.started_scorers}:
            limit = max(limit, self._config.outage_seconds)
        if idle > limit and self._clock() >= self._successor_until:
            return "end"
        if self._remedies == 2 or idle <= limit * (self._remedies + 1) / 3 or missing:
            return None
        self._remedies += 1
        return "requeue" if self._remedies == 1 else "fence"

    def _waits_for_users(self) -> bool:
        """True if the next batch needs sessions of users, for whom nobody can do anything."""
        ledger = self._state.ledger
        return (
            ledger.state.settings.sessions_alone and ledger.schedule.waiting is not None and not self._state.unpublished
        )

    def suspects(self) -> list[str]:
        """Healthy members of the roles that the run waits for. Members that are still starting are left alone."""
        goals: set[Goal] = {"step"}
        if self._state.ledger.version == self._config.steps:
            goals = {"step", "evaluation"}
        elif self._state.ledger.schedule.waiting and not self._state.unpublished:
            goals = {"batch", "evaluation"} if self._members.holder else {"batch"}
        awaited = {role.name for role in ROLES.values() if goals & role.works_for}
        return [i for i, m in self._state.members.items() if m.role in awaited and m.state == "healthy"]

    # --- in words

    def describe(self) -> str:
        """Which actor waits for which, and since when, in one line; and which actor has been at work for longest."""
        if work := self.longest_work():
            return f"{self.who_waits()}; {work}"
        return f"{self.who_waits()} (for {self._clock() - self._last:.0f} s)"

    def longest_work(self) -> str:
        """The member that has been at its present work for longest, what that is, and for how long; empty if every
        member only waits. While a member works, the run does not stall: one that hangs is no member for long."""
        works = {identity: last.beat.works[:1] for identity, last in self._members.heartbeats.last.items()}
        working = [(work.seconds, identity, work.what) for identity, first in works.items() for work in first]
        if not working:
            return ""
        seconds, identity, what = max(working)
        return f"{actor_name(identity)} is {what} (for {seconds:.0f} s)"

    def who_waits(self) -> str:
        """Which actor waits for which."""
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
        """If the only generator holds a version, so that no group of a newer version begins: why."""
        hold = self._members.holder
        if hold is None or len(self._members.with_role("generator")) > 1:
            return ""
        alone = "" if self._members.with_role("evaluator") else ", but there is no evaluator"
        return f"; the only generator holds version {hold[1].version} until it is evaluated{alone}"

    def missing(self) -> list[str]:
        """The roles that the run needs and no healthy member has, and the rewards and scorers that none serves."""
        missing = [name for name in self._roles if not self._members.with_role(name)]
        served = self.servers.served()
        unserved = [(role, name) for name, role in sorted(self.servers.needed.items()) if name not in served]
        return [*missing, *(f"{role} that serves {name!r}" for role, name in unserved if role not in missing)]
