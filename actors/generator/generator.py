"""The generator: a vLLM engine. A streamed token carries the log-prob and the version that sampled the token.

A generator is STALE until the newest published policy is loaded, and HEALTHY from then on. A generator follows the
published policies (`loaded_policy.py`). If a generator *holds* a policy under evaluation, no newer policy is loaded
until the master ends the hold. A generator knows nothing about tasks or rewards.

| loop, besides the loops of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| main | a published or held version newer than the loaded version | the sequences that wait for the version |
| outputs of the engine | messages of vLLM's process | the flows of the askers |
| per flow | tokens, at most every 50 ms | the samples of a manager |
| weights for others | the next chunk on disk | the main loops of generators further down the tree |
| device (`colocate`) | the trainer's turn to end | wakes the engine |
"""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from actors.generator.engine import Engine
from actors.generator.loaded_policy import LoadedPolicy
from actors.generator.shared_devices import SharedDevices
from actors.runtime.actor import Actor, Notifier, handles
from actors.runtime.membership import Membership
from actors.sampling.flows import Flows
from areal.base.errors import UserError
from areal.config.engine_sections import SamplingConfig
from areal.devices import transfer_backend
from areal.generation.engine_process import EngineError
from areal.generation.generation_engine import GenerationEngine
from areal.generation.routing import Concurrency
from areal.models import kept_words_of
from areal.samples.pictures import find
from areal.samples.table import Generation, joined
from protocols.bus_errors import BusyError, RefusedError, StreamBrokenError
from protocols.membership_messages import Engagement
from protocols.messages import (
    FINISHES,
    SAMPLING,
    Done,
    EndJobs,
    Generate,
    JobFailed,
    Message,
    NewSequence,
    OpenFlow,
    TokenColumns,
)
from protocols.picture_messages import GeneratePictured, LackingPictures
from protocols.transport import Request

# Copied with the settings of each sequence: `model_construct` inspects factories of defaults anew, for 0.4 ms.
ANY_SAMPLING = SamplingConfig(max_new_tokens=1)


class Generator(Actor):
    role = "generator"

    @classmethod
    async def start(
        cls, member: Membership, start_engine: Callable[..., Awaitable[Engine]] = GenerationEngine.start
    ) -> Self:
        config = member.config

        def start() -> Awaitable[Engine]:
            member.activity = "starting the engine"
            return start_engine(
                Path(config.model),
                config.generator,
                version=0,
                seed=member.engine_seed,
                lora=config.trainer.lora,
                sleeps=config.colocate,
                transfer=transfer_backend() if config.weights.direct else None,
                routes=bool(config.steps) and config.trainer.routing == "replay",
                kept_words=kept_words_of(config),
                kept_logprobs=config.trainer.centres_scores,
            )

        devices = SharedDevices(config, member.directory, member.ask, member.spawn, member.works)
        member.serve(devices)
        member.activity = "waiting for the trainer to leave the devices"
        engine = await devices.start(start)
        member.used.push_async_callback(engine.close)
        if config.steps and config.sampling.max_new_tokens >= engine.max_model_len:
            raise UserError(
                f"sampling.max_new_tokens is {config.sampling.max_new_tokens}, but vLLM has room for "
                f"{engine.max_model_len} tokens of prompt and completion of the model {config.model}: lower it, or set "
                f"generator.max_model_len."
            )
        return cls(member, engine)

    def __init__(self, member: Membership, engine: Engine) -> None:
        self.member = member
        self.config, self.directory = member.config, member.directory
        self._engine = engine
        self._flows = Flows[_New](lambda new: new.tokens.nbytes + 16, _columns, member.spawn)
        self._loaded = Notifier()
        self.policy = LoadedPolicy(member, engine, self._loaded)
        member.serve(self.policy)
        self._samples = member.works.unless_other("sample", functools.partial(_steps, engine))  # for all sequences
        self._sequences: dict[str, str] = {}  # identity of the asking actor, by the request id in the engine
        self._leaving: set[str] = set()
        self._concurrency = Concurrency(self.config.generator.max_concurrent_rollouts)
        self._tokens_evaluated = 0

    async def catch_up(self) -> None:
        if self.policy.is_behind():
            await self.policy.load_wanted()

    async def main(self) -> None:
        await self.member.become_healthy()
        while True:
            self.member.activity = f"generating at version {self._engine.version}"
            await self.directory.until(self.policy.is_behind)
            await self.policy.load_wanted()
            if self.member.state == "stale":
                self.member.state = "healthy"
                await self.member.beat()

    async def hand_over(self) -> None:
        """Hand over every sequence: the asker continues on another generator, from the tokens sampled so far."""
        self._engine.hand_over()
        self._loaded.notify()
        await self._flows.wait_until_empty()

    def stats(self) -> dict[str, float]:
        stats = asdict(self._engine.stats())
        del stats["steps"]
        return {
            **stats,
            "limit": self._concurrency.limit,
            "version": self._engine.version,
            "tokens_evaluated": self._tokens_evaluated,
            **self.policy.stats(),
        }

    def engagement(self) -> Engagement | None:
        """The load of the engine, for the heartbeat. Each call also adapts the limit of concurrent sequences."""
        stats = self._engine.stats()
        self._concurrency.adapt(stats.running, stats.waiting, stats.kv_use, stats.preemptions)
        return Engagement(
            sequences=Counter(self._sequences.values()), limit=self._concurrency.limit, version=self._engine.version
        )

    @handles(OpenFlow)
    def open_flow(self, request: Request[OpenFlow]) -> AsyncIterator[Message]:
        return self._flows.serve(request)

    @handles(Generate)
    async def generate(self, request: Request[Generate]) -> Done:
        return self._begin(request, [()] * len(request.message.prompts))

    @handles(GeneratePictured)
    async def generate_pictured(self, request: Request[GeneratePictured]) -> Done | LackingPictures:
        new = dict([await asyncio.to_thread(self._views.look, content.tobytes()) for content in request.message.files])
        names = {name for of_prompt in request.message.pictures for name in of_prompt}
        views = new | {name: view for name in names - new.keys() if (view := self._views.get(name))}
        if lacking := names - views.keys():
            return LackingPictures(names=tuple(lacking))
        return self._begin(request, [[views[name] for name in of_prompt] for of_prompt in request.message.pictures])

    def _begin(self, request: Request[Any], pictures: Sequence[Sequence[Any]]) -> Done:
        """Begin the sequences of a request. pictures: for every prompt, as in `_Prompt`. Raises BusyError."""
        if self.member.state == "draining":
            raise BusyError("this generator accepts no sequences: it is draining")
        message, owner = request.message, request.owner
        prompts = [prompt.tolist() for prompt in message.prompts]
        sequences = {
            new.job: functools.partial(
                self._sample,
                _name(owner, new.job),
                request.sender,
                new,
                _Prompt(prompts[new.prompt], pictures[new.prompt]),
            )
            for new in message.sequences
        }
        self._flows.begin(request, message.flow, sequences)
        return Done()

    @handles(EndJobs)
    async def end_jobs(self, request: Request[EndJobs]) -> Done:
        names = {_name(request.owner, job) for job in request.message.jobs.tolist()}
        self._leaving |= names & self._sequences.keys()
        self._engine.hand_over(names)
        self._loaded.notify()
        return Done()

    @functools.cached_property
    def _views(self) -> Any:
        return find("views")(self.config.model)

    async def _sample(
        self, name: str, sender: str, new: NewSequence, prompt: "_Prompt", add: "Callable[[_New], None]"
    ) -> None:
        """Sample a sequence. name: in the engine. Raises BusError, or EngineError if the engine died."""
        sampling = ANY_SAMPLING.model_copy(update={name: getattr(new, name) for name in SAMPLING}).with_seed(new.seed)
        self._sequences[name] = sender
        try:
            await self._loaded.until(
                lambda: self._engine.version >= new.min_version or self._leaves(name) or self.member.state == "stale"
            )
            if self._leaves(name):
                raise StreamBrokenError("the generator handed the sequence over before it started")
            if self._engine.version < new.min_version:
                raise StreamBrokenError("the generator could not load newer weights, and tries again")
            sampled = self._engine.generate(
                name,
                prompt.tokens,
                sampling,
                first_version=new.first_version,
                pictures=prompt.seen(),
                cache_salt=new.cache_salt,
                whole=new.whole,
            )
            with self.member.working("sampling", "sample", self._samples):
                async with contextlib.aclosing(sampled) as parts:
                    async for part in parts:
                        self._tokens_evaluated += len(part) if sender.startswith("evaluator/") else 0
                        add(_New(new.job, part))
        except ValueError as error:
            raise RefusedError(str(error)) from None
        except EngineError as error:
            if not self._leaves(name):
                raise
            raise StreamBrokenError(str(error)) from None
        finally:
            del self._sequences[name]
            self._leaving.discard(name)

    def _leaves(self, name: str) -> bool:
        return self.member.state == "draining" or name in self._leaving


class _Prompt(NamedTuple):
    """The tokens of a prompt, and its pictures for the engine, or the errors in their place."""

    tokens: list[int]
    pictures: Sequence[Any]

    def seen(self) -> Sequence[Any]:
        """Return the pictures. Raises ValueError if the engine cannot get a picture."""
        for picture in self.pictures:
            if isinstance(picture, Exception):
                raise ValueError(f"a picture of the prompt: {picture}")
        return self.pictures


class _New(NamedTuple):
    """The next tokens of a sequence."""

    job: int
    tokens: Generation


def _columns(new: Sequence[_New], failed: Sequence[JobFailed]) -> TokenColumns:
    return TokenColumns(
        jobs=np.array([part.job for part in new], np.int64),
        counts=np.array([len(part.tokens) for part in new], np.int32),
        finishes=np.array([FINISHES.index(part.tokens.finish) for part in new], np.int32),
        columns=joined(part.tokens for part in new),
        failed=tuple(failed),
    )


def _steps(engine: Engine) -> float:
    """Evidence of sampling: a number that grows while the engine samples."""
    stats = engine.stats()
    return stats.steps + stats.tokens_generated


def _name(owner: str, job: int) -> str:
    return f"{owner} {job}"
