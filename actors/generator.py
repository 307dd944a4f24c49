"""The generator: one vLLM engine. Every token it streams carries its log-prob and the version that sampled it.

A generator is STALE until it has loaded the newest published policy, and HEALTHY from then on. It loads each new policy
without waiting for other generators: it interrupts the running sequences, replaces the weights, and continues the
sequences. With `generator.interrupt: false` it lets the running sequences finish first, and requests that arrive
meanwhile wait. A generator that *holds* a policy, because that policy is evaluated on it, loads no newer one until the
master ends the hold. A generator knows nothing about tasks or rewards.

| loop, besides those of every actor (`actors/runtime/membership.py`) | waits for | unblocks |
|---|---|---|
| main | a published or held version newer than the loaded one | loads it, then the sequences that wait for it |
| outputs of the engine | messages of vLLM's process | the flows of the askers |
| one for each flow | tokens, at most every 50 ms | the samples of a manager |
| weights for others | the next chunk on disk | the main loops of the generators below it in the tree |
| device (`colocate`) | the trainer's turn to end | wakes the engine |

A generator that shares its devices with the trainer starts its engine while the trainer does not compute. With
`colocate` the engine sleeps while the trainer computes; its sequences continue afterwards.
"""

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import structlog

from actors.runtime.actor import CONTROL_SECONDS, Actor, HandlesRequests, Notifier, handles, parked
from actors.runtime.directory import Directory
from actors.runtime.membership import Ask, Membership, Spawn
from actors.runtime.works import Works
from actors.sampling.flows import Flows
from actors.weights.weight_service import WeightFetcher
from areal.base import extensions
from areal.base.errors import UserError, explain
from areal.config import Config
from areal.config.engine_sections import SamplingConfig
from areal.devices import shares_devices, transfer_backend
from areal.generation.generation_engine import EngineError, EngineStats, GenerationEngine, LoadTimes
from areal.generation.offered_weights import WeightLoadError
from areal.generation.routing import Concurrency
from areal.models import kept_words_of
from areal.samples.pictures import find
from areal.samples.table import Generation, joined
from areal.samples.trajectory import TokenScores
from areal.storage.disk import DiskRetry
from areal.weights.chunks import TornWeights
from protocols.bus_errors import BusyError, RefusedError, StreamBrokenError
from protocols.messages import (
    FINISHES,
    SAMPLING,
    AskLogprobs,
    Done,
    EndJobs,
    Engagement,
    Generate,
    GeneratePictured,
    JobFailed,
    LackingPictures,
    Logprobs,
    Message,
    NewSequence,
    OpenFlow,
    Policy,
    TakeDevices,
    TokenColumns,
    YieldDevices,
)
from protocols.transport import Request, ask_until

RETRY_LOAD_SECONDS = 1.0
# A generator that has loaded no version for so long ends, and is started again.
LOADS_FAIL_SECONDS = 60.0
# How long the trainer may keep a request for the devices before it refuses it.
TAKE_SECONDS = 20.0
# Copied with the settings of each sequence: `model_construct` inspects factories of defaults anew, for 0.4 ms.
ANY_SAMPLING = SamplingConfig(max_new_tokens=1)

T = TypeVar("T")
log = structlog.get_logger()


class Engine(Protocol):
    """The interface of the engine that samples tokens (areal.generation.generation_engine.GenerationEngine)."""

    @property
    def version(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingConfig,
        *,
        first_version: int | None = None,
        pictures: Sequence[Any] = (),
        cache_salt: str = "",
        whole: bool = False,
    ) -> AsyncGenerator[Generation, None]: ...
    async def score(self, request_id: str, tokens: Sequence[int], top_k: int = 0) -> TokenScores: ...
    def drained(self) -> AbstractAsyncContextManager[None]: ...
    async def load(self, folder: Path, version: int) -> LoadTimes: ...
    async def receive(
        self, version: int, calls: AsyncGenerator[tuple[str, dict[str, Any]], None], lost: asyncio.Event
    ) -> LoadTimes: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    def hand_over(self, request_ids: Collection[str] | None = None) -> None: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...


class SharedDevices(HandlesRequests):
    """The devices of an engine, which the trainer may have in turns. It asks for them from the first moment on."""

    def __init__(self, config: Config, directory: Directory, ask: Ask, spawn: Spawn, works: Works) -> None:
        self._config = config
        self._directory = directory
        self._ask = ask
        self._spawn = spawn
        self._works = works
        self._yields = 0  # requests to yield the devices
        self._busy = asyncio.Lock()  # held while the engine starts, falls asleep and wakes
        self._engine: Engine | None = None  # until it has started
        self._asleep = False

    async def start(self, start: Callable[[], Awaitable[Engine]]) -> Engine:
        """Start the engine, once the trainer has left the devices."""

        async def start_engine() -> Engine:
            self._engine = engine = await start()
            return engine

        return await self._take(start_engine)

    @handles(YieldDevices)
    async def yield_devices(self, request: Request[YieldDevices]) -> Done:
        self._yields += 1
        await asyncio.shield(self._spawn(self._sleep(), "sleep"))  # also if the trainer no longer waits for the answer
        return Done()

    async def _sleep(self) -> None:
        async with self._busy:
            if self._engine is not None and self._config.colocate and not self._asleep:
                self._asleep = True
                with self._works.working("falling asleep", "sleep"):
                    await self._engine.sleep()
                self._spawn(self._take(functools.partial(self._wake, self._engine)), "wake")

    async def _wake(self, engine: Engine) -> None:
        with self._works.working("waking", "wake"):
            await engine.wake()
        self._asleep = False

    async def _take(self, use: Callable[[], Awaitable[T]]) -> T:
        """Call `use` once the trainer, if it shares its devices with this generator, has left them."""

        async def ask_trainer() -> None:
            trainer = (await self._directory.until(lambda: self._directory.with_role("trainer", False)))[0]
            await self._ask(trainer.address, TakeDevices(), Done, TAKE_SECONDS + CONTROL_SECONDS)

        while True:
            yields = self._yields
            if self._config.steps and shares_devices(self._config):
                with self._works.waiting():
                    await ask_until(ask_trainer)  # the trainer computes, has died, or has been replaced
            async with self._busy:
                if yields == self._yields:  # otherwise the trainer has taken the devices again since it answered
                    return await use()


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
        self._weights = WeightFetcher(
            member.bus,
            member.index or 0,
            self.config.weights,
            self.config.weights_folder,
            functools.partial(self.directory.with_role, healthy=False),
            lambda: self.directory.policy,
        )
        member.used.push_async_callback(asyncio.to_thread, self._weights.close)
        member.serve(self._weights)
        self._receiver: Any = None
        if self.config.weights.direct:
            receiver = extensions.need("direct", "receiver", "weights.transport=direct").load()
            self._receiver = receiver(member.bus, self.directory, self.config.generator.devices)
        self._flows = Flows[_New](lambda new: new.tokens.nbytes + 16, _columns, member.spawn)
        self._loaded = Notifier()
        self._samples = member.works.unless_other("sample", self._steps)  # one for all sequences
        self._sequences: dict[str, str] = {}  # identity of the asking actor, by the request id in the engine
        self._leaving: set[str] = set()
        self._concurrency = Concurrency(self.config.generator.max_concurrent_rollouts)
        self._lineage = 0
        self._reloads: Counter[str] = Counter()
        self._tokens_evaluated = 0

    async def catch_up(self) -> None:
        if self._is_behind():
            await self._load_wanted()

    async def main(self) -> None:
        await self.member.become_healthy()
        while True:
            self.member.activity = f"generating at version {self._engine.version}"
            await self.directory.until(self._is_behind)
            await self._load_wanted()
            if self.member.state == "stale":
                self.member.state = "healthy"
                await self.member.beat()

    async def hand_over(self) -> None:
        """Hand over every sequence: its asker continues it on another generator, from the tokens sampled so far."""
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
            **self._reloads,
            "fetch_seconds": self._weights.seconds,
            "weight_bytes_received": self._weights.bytes_received,
            "weight_bytes_sent": self._weights.bytes_sent,
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
        """Begin the sequences of a request. pictures: of each prompt, as in `_Prompt`. Raises BusyError."""
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
        """Sample a sequence. `name`: its name in the engine. Raises BusError, or EngineError if the engine died."""
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

    @handles(AskLogprobs)
    async def ask_logprobs(self, request: Request[AskLogprobs]) -> Logprobs:
        if self.member.state == "draining":
            raise BusyError("this generator computes no log-probs: it is draining")
        ask = request.message
        required = ask.lineage, ask.version
        with (
            explain(ValueError, "{why}", RefusedError),
            explain((EngineError, TimeoutError), "this generator computed no log-probs: {why}", BusyError),
        ):
            async with parked(request):
                await self._loaded.until(lambda: self._loaded_policy() >= required or self.member.state != "healthy")
                scores = await self._engine.score(f"{request.sender} log-probs", ask.tokens.tolist(), ask.top_k)
        columns = {"top_tokens": scores.top_tokens.ravel(), "top_logprobs": scores.top_logprobs.ravel()}
        return Logprobs(version=scores.version, logprobs=scores.logprobs, **columns)

    def _steps(self) -> float:
        """Moves while the engine samples."""
        stats = self._engine.stats()
        return stats.steps + stats.tokens_generated

    def _leaves(self, name: str) -> bool:
        return self.member.state == "draining" or name in self._leaving

    async def _fall_behind(self) -> None:
        """After a load that failed: accept no new sequences, and send away those that wait for newer weights."""
        if self.member.state == "healthy":
            self.member.state = "stale"
            self._loaded.notify()
            await self.member.beat()

    def _is_behind(self) -> bool:
        return self._wanted_policy().identity > self._loaded_policy()

    def _loaded_policy(self) -> tuple[int, int]:
        # Version 0 is the initial model of the run, in every lineage.
        return self._lineage if self._engine.version else self.directory.policy.lineage, self._engine.version

    def _wanted_policy(self) -> Policy:
        """The policy that this generator should have: the one it holds, or else the newest published one. A held policy
        older than the loaded one is ignored, because running sequences cannot go back to older weights."""
        me = self.directory.members.get(self.member.bus.identity.name)
        if me is None or me.held is None:
            return self.directory.policy
        # Version 0 is the initial model of the run, in every lineage.
        passed = me.held.identity < self._loaded_policy() if me.held.version else self._engine.version > 0
        return self.directory.policy if passed else me.held

    async def _load_wanted(self) -> None:
        """Load the wanted policy. If its files are missing or torn, retry, alternating between the newest published
        policy and the wanted one. Sequences continue to run while the weights are fetched. A direct transfer is tried
        once; if it fails, the files are loaded."""
        alternate, direct = False, self.config.weights.direct
        began = asyncio.get_running_loop().time()
        while True:
            try:
                if not self.config.generator.interrupt:
                    self.member.activity = "finishing the running sequences before it loads new weights"
                async with self._engine.drained():
                    if not self._is_behind():
                        return
                    policy = self.directory.policy if alternate else self._wanted_policy()
                    times = await (self._receive if direct and policy.stamp else self._fetch_and_load)(policy)
                break
            except (TornWeights, WeightLoadError) as error:
                log.warning("weights did not load", version=policy.version, error=str(error))
                if direct:
                    direct = False
                    await self._fall_behind()
                    continue
                alternate = not alternate
                if asyncio.get_running_loop().time() - began > LOADS_FAIL_SECONDS:
                    raise EngineError(f"no version has loaded for {LOADS_FAIL_SECONDS:g} s: {error}") from None
                await self._fall_behind()
                await asyncio.sleep(RETRY_LOAD_SECONDS)
        self._lineage = policy.lineage
        self._reloads.update({"reloads": 1, **asdict(times)})
        parts = {"pause": times.pause_seconds, "load": times.load_seconds, "resume": times.resume_seconds}
        began = asyncio.get_running_loop().time() - sum(parts.values())
        for part, seconds in parts.items():
            self.member.took(part, began, seconds)
            began += seconds
        self._loaded.notify()

    async def _receive(self, policy: Policy) -> LoadTimes:
        self.member.activity = f"receiving version {policy.version}"
        with self.member.working(self.member.activity):  # each call of the transfer has a deadline
            return await self._engine.receive(policy.version, self._receiver.calls(policy), self._receiver.lost)

    def _arrived(self) -> float:
        """Moves while weights are fetched."""
        return self._weights.bytes_received + DiskRetry.refusals

    async def _fetch_and_load(self, policy: Policy) -> LoadTimes:
        self.member.activity = f"fetching version {policy.version}"
        fetch, into = functools.partial(self._weights.fetch, policy), self.config.weights_folder
        with self.member.working(self.member.activity, "fetch", self._arrived):
            folder = await self.member.disk.write(fetch, f"the weights of version {policy.version}", into)
        self.member.activity = f"loading version {policy.version}"
        with self.member.working(self.member.activity, "load"):
            return await self._engine.load(folder, policy.version)


class _Prompt(NamedTuple):
    """Its tokens, and what the engine gets of its pictures, or why it cannot."""

    tokens: list[int]
    pictures: Sequence[Any]

    def seen(self) -> Sequence[Any]:
        """The pictures. Raises ValueError if there is one that the engine cannot get."""
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


def _name(owner: str, job: int) -> str:
    return f"{owner} {job}"
