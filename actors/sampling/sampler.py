"""The base class of the roles that sample: rollout manager and evaluator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from actors.runtime.actor import Actor
from actors.sampling.calls import SampleFailed
from actors.sampling.jobs import RoutedGenerators, RoutedRewards, Servers
from actors.sampling.policy_judges import PolicyJudges
from actors.sampling.router import Router
from actors.sampling.services import Endpoint, Programs, Services, load_parsers
from actors.sampling.sessions import SampleSession
from areal.config import DataConfig
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.text import error_text
from areal.tokens import load_tokenizer
from areal.trajectory import Trajectory
from areal.workflows.builtin import Workflow, resolve_workflow
from areal.workflows.parsers import Parsers
from protocols.errors import text_of
from protocols.messages import Cause, Done, ScoringFailed, Work

log = structlog.get_logger()


class Prompts(Protocol):
    """The interface of the source of rows (areal.data.sources.PromptSource)."""

    def row(self, index: int) -> Row: ...
    def heldout(self, i: int) -> Row: ...


class Sampler(Actor):
    """Base class of the roles that run the workflow on rows of the run's data."""

    def __init__(
        self, *args: Any, open_source: Callable[[DataConfig, int], Prompts] = open_source,
        load_tokenizer: Callable[[str, DataConfig], Any] = load_tokenizer, workflow: Workflow | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """workflow: in place of the one that the configuration names."""
        super().__init__(*args, **kwargs)
        self._given_workflow = workflow
        self._open_source = open_source
        self._load_tokenizer = load_tokenizer
        self.awaited_rewards: set[str] = set()  # those of the run, which have an actor sooner or later
        self.services: Services = None  # type: ignore[assignment]  # set by `setup`
        self._causes: set[Cause] = set()  # of failures that were reported

    async def setup(self) -> None:
        config = self.config
        self.awaited_rewards.update(config.rewards)
        self._router = Router(self)
        self._servers = Servers(self.bus, self.spawn)
        self._source = await asyncio.to_thread(self._open_source, config.data, config.seed)
        tokenizer = await asyncio.to_thread(self._load_tokenizer, config.model, config.data)
        parsers = await load_parsers(config, tokenizer, Parsers)
        self._workflow = self._given_workflow or resolve_workflow(
            config.rollout_manager.workflow, config.rollout_manager.workflow_options
        )
        generators = RoutedGenerators(self._router, self._servers)
        self._scoring = RoutedRewards(
            self._router, self._servers, config.reward, self.awaited_rewards, self.report_failure, config.scorers,
            PolicyJudges(config, generators, tokenizer),
        )  # fmt: skip
        self.services = Services(
            config=config,
            tokenizer=tokenizer,
            parsers=parsers,
            generators=generators,
            rewards=self._scoring,
            programs=Programs(config.sandbox),
            endpoint=Endpoint(config),
        )

    async def teardown(self) -> None:
        if self.services is not None:
            await self.services.close()

    def stats(self) -> dict[str, float]:
        return {"samples_scored": self.services.succeeded if self.services else 0}

    def works(self) -> tuple[Work, ...]:
        own_code = self.services.own_code if self.services else {}
        since = next(iter(own_code.values()), None)
        if since is None:
            return super().works()
        seconds = asyncio.get_running_loop().time() - since
        own = Work(what=f"the workflow's own code, in {len(own_code)} samples", seconds=seconds)
        return own, *super().works()

    def report_failure(self, cause: Cause, reason: str) -> None:
        """Report to the master that a sample failed, or that a reward refused it: the first of each cause, which the
        user is shown, and all until one has succeeded. If no sample of the run does, the user's reward, workflow or
        data are probably wrong."""
        if not self.services.succeeded or cause not in self._causes:
            self._causes.add(cause)
            self.spawn(self.ask_master(ScoringFailed(cause=cause, reason=text_of(reason)), Done), "report failure")

    async def run_workflow(self, session: SampleSession, row: Row) -> Trajectory:
        """Run the workflow for one sample. Raises SampleFailed, also for any exception of the user's own code: it fails
        the sample, not this actor."""
        try:
            async with session.in_workflow():
                sample = await self._workflow(session, row)
            if not isinstance(sample, Trajectory) or not sample.sampled.any():
                raise ValueError("it has returned no Trajectory with sampled tokens")
        except SampleFailed as failure:
            if failure.cause not in ("reward", "scorer", "workflow"):  # those are reported where they occur
                self.report_failure(failure.cause, f"{failure}")
            raise
        except Exception as error:
            log.error("workflow failed", workflow=self.config.rollout_manager.workflow, exc_info=error)
            reason = f"the workflow raised {error_text(error)}"
            self.report_failure("workflow", reason)
            raise SampleFailed("workflow", reason) from error
        finally:
            session.close()
        self.services.succeeded += 1
        return sample
