"""Sampling: the common part of the roles that sample: rollout manager, evaluator and gateway."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import structlog

from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from actors.sampling.dispatch import Dispatch, flows_of
from actors.sampling.jobs import SampleFailed, ScoringRules
from actors.sampling.services import Rewards, Services, judges_of
from actors.sampling.sessions import SampleSession
from areal.base.errors import ToolError
from areal.base.text import error_text
from areal.config.data_section import DataConfig
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import Trajectory
from areal.workflows.named_workflows import Workflow, resolve_workflow
from protocols.attempt_messages import Cause, ScoringFailed
from protocols.bus_errors import BusError, FencedError, MalformedError, RefusedError, text_of
from protocols.membership_messages import ConnectionLost, Member, Work
from protocols.messages import Done, Message
from protocols.transport import ask_until

M = TypeVar("M", bound=Message)

STORE_SECONDS = 60.0

log = structlog.get_logger()


class Prompts(Protocol):
    """The interface of the source of rows (areal.data.prompt_sources.PromptSource)."""

    def row(self, index: int) -> Row: ...
    def heldout(self, i: int) -> Row: ...


class Sampling:
    """The part of an actor that samples: a rollout manager, an evaluator or a gateway. `dispatch` does the jobs of
    samples, `services` is used by sessions. `awaited_rewards`: the run's rewards, which get an actor sooner or later.

    users: whether users are served (see Dispatch).
    """

    @classmethod
    async def start(
        cls, member: Membership, load_tokenizer: Callable[[str, DataConfig], Any] = load_tokenizer, users: bool = False
    ) -> Self:
        """Load the tokenizer and the parsers. Raises UserError."""
        config = member.config
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.data)
        sampling = cls(member, tokenizer, users)
        await sampling.services.load_parsers()
        return sampling

    def __init__(self, member: Membership, tokenizer: Any, users: bool) -> None:
        self._member = member
        config, role, index = member.config, member.kind.role, member.index or 0
        self._causes: set[Cause] = set()  # with a reported failure
        limit, open_flow = config.generator.max_concurrent_rollouts, flows_of(member.bus, member.spawn)
        self.dispatch = Dispatch(member.directory, role, index, limit, self._report_lost, open_flow, users)
        self.awaited_rewards = {*config.rewards}
        rules = ScoringRules(config.reward, self.awaited_rewards, self.report_failure)
        judges = judges_of(config, self.dispatch, tokenizer)
        self.services = Services(
            config=config,
            tokenizer=tokenizer,
            dispatch=self.dispatch,
            rewards=Rewards(self.dispatch, rules, config.scorer_uses.rewards, judges),
            place=f"{role}/{member.index}",
        )
        member.used.push_async_callback(self.services.close)

    def stats(self) -> dict[str, float]:
        return {"samples_scored": self.services.succeeded} | self.services.tools.stats()

    def works(self) -> tuple[Work, ...]:
        own_code = self.services.own_code
        since = next(iter(own_code.values()), None)
        if since is None:
            return ()
        seconds = asyncio.get_running_loop().time() - since
        return (Work(what=f"the workflow's own code, in {len(own_code)} samples", seconds=seconds),)

    async def ask_trainer(self, request: Message, answer: type[M]) -> M:
        """Ask the trainer until it answers. Raises RefusedError."""

        async def ask() -> M:
            trainer = (await self._member.directory.until(lambda: self._member.directory.with_role("trainer")))[0]
            return await self._member.ask(trainer.address, request, answer, STORE_SECONDS)

        def again(error: BusError) -> bool:
            if isinstance(error, RefusedError) and not isinstance(error, FencedError):  # else its successor answers
                return False
            if isinstance(error, MalformedError):  # a group is too large for a message
                raise RefusedError(str(error)) from None
            log.warning("the trainer did not take a request", request=request.kind, error=str(error))
            return True

        return await ask_until(ask, again)

    def report_failure(self, cause: Cause, reason: str) -> None:
        """Report to the master that a sample failed, or that a reward refused a sample: the first failure of every
        cause, for the user, and all failures until a sample has succeeded. If no sample of the run succeeds, the user's
        reward, workflow or data are probably wrong."""
        if not self.services.succeeded or cause not in self._causes:
            self._causes.add(cause)
            self._member.spawn(
                self._member.ask_master(ScoringFailed(cause=cause, reason=text_of(reason)), Done), "report failure"
            )

    def _report_lost(self, actor: Member) -> None:
        """Report to the master that this actor cannot reach another actor."""
        self._member.spawn(self._member.ask_master(ConnectionLost(identity=actor.identity), Done), "report lost")

    async def run_workflow(self, session: SampleSession, workflow: Workflow, row: Row) -> Trajectory:
        """Run the workflow for a sample. Raises SampleFailed, also for any exception of the user's code."""
        try:
            async with session.own_code.limited():
                sample = await workflow(session, row)
            if not isinstance(sample, Trajectory) or not sample.sampled.any():
                raise ValueError("it has returned no Trajectory with sampled tokens")
        except SampleFailed as failure:
            if failure.cause not in ("reward", "scorer", "workflow"):  # else reported already
                self.report_failure(failure.cause, f"{failure}")
            raise
        except ToolError as error:
            self.report_failure(error.cause, f"{error}")
            raise SampleFailed(error.cause, f"{error}") from error
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # user code may call sys.exit, which would end this process
            log.error("workflow failed", workflow=self.services.config.rollout_manager.workflow, exc_info=error)
            reason = f"the workflow raised {error_text(error)}"
            self.report_failure("workflow", reason)
            raise SampleFailed("workflow", reason) from error
        finally:
            session.close()
        self.services.succeeded += 1
        return sample


class RowActor(Actor):
    """A role that samples rows of the data with the run's workflow: rollout manager and evaluator."""

    @classmethod
    async def start(
        cls,
        member: Membership,
        open_source: Callable[[DataConfig, int], Prompts] = open_source,
        load_tokenizer: Callable[[str, DataConfig], Any] = load_tokenizer,
        workflow: Workflow | None = None,
    ) -> Self:
        """workflow: in place of the workflow in the configuration."""
        config, settings = member.config, member.config.rollout_manager
        source = await asyncio.to_thread(open_source, config.data, config.seed)
        workflow = workflow or resolve_workflow(settings.workflow, settings.workflow_options)
        return cls(member, await Sampling.start(member, load_tokenizer), source, workflow)

    def __init__(self, member: Membership, sampling: Sampling, source: Prompts, workflow: Workflow) -> None:
        self.member = member
        self.config, self.directory = member.config, member.directory
        self.sampling = sampling
        self._source = source
        self._workflow = workflow

    def works(self) -> tuple[Work, ...]:
        return self.sampling.works()
