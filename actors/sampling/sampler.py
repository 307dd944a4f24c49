"""The base class of the roles that sample: rollout manager, evaluator and gateway."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import structlog

from actors.runtime.actor import Actor
from actors.runtime.membership import Membership
from actors.sampling.calls import SampleFailed
from actors.sampling.jobs import RoutedGenerators, RoutedRewards, Servers
from actors.sampling.policy_judges import PolicyJudges
from actors.sampling.router import Router
from actors.sampling.services import Services
from actors.sampling.sessions import SampleSession
from areal.base.errors import ToolError
from areal.base.text import error_text
from areal.config.data_section import DataConfig
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.generation.routing import GeneratorLoad
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import Trajectory
from areal.workflows.builtin import Workflow, resolve_workflow
from protocols.bus_errors import BusError, FencedError, MalformedError, RefusedError, text_of
from protocols.messages import Cause, ConnectionLost, Done, LoadColumns, Member, Message, ScoringFailed, Work
from protocols.transport import ask_until

M = TypeVar("M", bound=Message)

STORE_SECONDS = 60.0

log = structlog.get_logger()


class Prompts(Protocol):
    """The interface of the source of rows (areal.data.sources.PromptSource)."""

    def row(self, index: int) -> Row: ...
    def heldout(self, i: int) -> Row: ...


class Sampler(Actor):
    """Base class of the roles that run the workflow on rows of the run's data."""

    @classmethod
    async def start(
        cls,
        member: Membership,
        open_source: Callable[[DataConfig, int], Prompts] = open_source,
        load_tokenizer: Callable[[str, DataConfig], Any] = load_tokenizer,
        workflow: Workflow | None = None,
    ) -> Self:
        """workflow: in place of the one that the configuration names."""
        config, settings = member.config, member.config.rollout_manager
        source = await asyncio.to_thread(open_source, config.data, config.seed)
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.data)
        workflow = workflow or resolve_workflow(settings.workflow, settings.workflow_options)
        sampler = cls(member, source, workflow, tokenizer)
        await sampler.services.load_parsers()
        return sampler

    def __init__(self, member: Membership, source: Prompts, workflow: Workflow, tokenizer: Any) -> None:
        self.member = member
        self.config = config = member.config
        self.directory = member.directory
        self._source = source
        self._workflow = workflow
        self._causes: set[Cause] = set()  # of failures that were reported
        limit = config.generator.max_concurrent_rollouts
        self._routes = member.directory, self.role, member.index or 0, limit, self._report_lost
        self._router = Router(*self._routes)
        self._servers = Servers(member.bus, member.spawn)
        self.awaited_rewards = {*config.rewards}  # those of the run, which have an actor sooner or later
        generators = RoutedGenerators(self._router, self._servers)
        self._scoring = RoutedRewards(
            self._router,
            self._servers,
            config.reward,
            self.awaited_rewards,
            self.report_failure,
            config.reward_scorers,
            PolicyJudges(config, generators, tokenizer),
        )
        self.services = Services(
            config=config,
            tokenizer=tokenizer,
            generators=generators,
            rewards=self._scoring,
            place=f"{self.role}/{member.index}",
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

    def note_loads(self, loads: LoadColumns) -> None:
        columns = (loads.sequences, loads.asker_sequences, loads.limits, loads.versions)
        rows = map(GeneratorLoad, *(column.tolist() for column in columns))
        self._router.loads = dict(zip(loads.names, rows, strict=True))
        self._router.room.notify()

    async def ask_trainer(self, request: Message, answer: type[M]) -> M:
        """Ask the trainer, again until it answers. Raises RefusedError."""

        async def ask() -> M:
            trainer = (await self.directory.until(lambda: self.directory.with_role("trainer")))[0]
            return await self.member.ask(trainer.address, request, answer, STORE_SECONDS)

        def again(error: BusError) -> bool:
            if isinstance(error, RefusedError) and not isinstance(error, FencedError):  # then its successor will answer
                return False
            if isinstance(error, MalformedError):  # a group is too large for one message
                raise RefusedError(str(error)) from None
            log.warning("the trainer did not take a request", request=request.kind, error=str(error))
            return True

        return await ask_until(ask, again)

    def report_failure(self, cause: Cause, reason: str) -> None:
        """Report to the master that a sample failed, or that a reward refused it: the first of each cause, which the
        user is shown, and all until one has succeeded. If no sample of the run does, the user's reward, workflow or
        data are probably wrong."""
        if not self.services.succeeded or cause not in self._causes:
            self._causes.add(cause)
            self.member.spawn(
                self.member.ask_master(ScoringFailed(cause=cause, reason=text_of(reason)), Done), "report failure"
            )

    def _report_lost(self, actor: Member) -> None:
        """Report to the master that this actor cannot reach another one."""
        self.member.spawn(self.member.ask_master(ConnectionLost(identity=actor.identity), Done), "report lost")

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """Run the workflow for one sample. Raises SampleFailed, also for any exception of the user's code."""
        try:
            async with session.in_workflow():
                sample = await self._workflow(session, row)
            if not isinstance(sample, Trajectory) or not sample.sampled.any():
                raise ValueError("it has returned no Trajectory with sampled tokens")
        except SampleFailed as failure:
            if failure.cause not in ("reward", "scorer", "workflow"):  # those are reported where they occur
                self.report_failure(failure.cause, f"{failure}")
            raise
        except ToolError as error:
            self.report_failure(error.cause, f"{error}")
            raise SampleFailed(error.cause, f"{error}") from error
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # it may call sys.exit, which would end this process
            log.error("workflow failed", workflow=self.config.rollout_manager.workflow, exc_info=error)
            reason = f"the workflow raised {error_text(error)}"
            self.report_failure("workflow", reason)
            raise SampleFailed("workflow", reason) from error
        finally:
            session.close()
        self.services.succeeded += 1
        return sample
