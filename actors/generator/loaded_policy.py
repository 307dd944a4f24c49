"""The policy that a generator's engine has loaded: the newest published version, or a held version.

A generator loads a new version without waiting for other generators: the engine interrupts the running sequences,
replaces the weights, and continues the sequences. With `generator.interrupt: false` the running sequences end first.
"""

import asyncio
import functools
from collections import Counter
from dataclasses import asdict
from typing import Any

import structlog

from actors.generator.engine import Engine
from actors.runtime.actor import HandlesRequests, Notifier, handles, parked
from actors.runtime.membership import Membership
from actors.weights.weight_service import WeightFetcher
from areal.base import extensions
from areal.base.errors import explain
from areal.generation.engine_process import EngineError
from areal.generation.engine_weights import LoadTimes
from areal.generation.offered_weights import WeightLoadError
from areal.storage.disk import DiskRetry
from areal.weights.chunks import TornWeights
from protocols.bus_errors import BusyError, RefusedError
from protocols.membership_messages import Policy
from protocols.training_messages import AskLogprobs, Logprobs
from protocols.transport import Request

RETRY_LOAD_SECONDS = 1.0
# A generator that has loaded no version for this long ends, and is started again.
LOADS_FAIL_SECONDS = 60.0

log = structlog.get_logger()


class LoadedPolicy(HandlesRequests):
    """The loaded policy: whether it is behind, how the next version is loaded, and its log-probs of given tokens.

    loaded: notified after each load, and when a load has failed.
    """

    def __init__(self, member: Membership, engine: Engine, loaded: Notifier) -> None:
        self._member, self._engine, self._loaded = member, engine, loaded
        self._config, self._directory = member.config, member.directory
        self._lineage = 0
        self._reloads: Counter[str] = Counter()
        self._weights = WeightFetcher(
            member.bus,
            member.index or 0,
            self._config.weights,
            self._config.weights_folder,
            functools.partial(self._directory.with_role, healthy=False),
            lambda: self._directory.policy,
        )
        member.used.push_async_callback(asyncio.to_thread, self._weights.close)
        member.serve(self._weights)
        self._receiver: Any = None
        if self._config.weights.direct:
            receiver = extensions.need("direct", "receiver", "weights.transport=direct").load()
            self._receiver = receiver(member.bus, self._directory, self._config.generator.devices)

    @property
    def identity(self) -> tuple[int, int]:
        """The lineage and the version. Version 0, the run's initial model, belongs to every lineage."""
        return self._lineage if self._engine.version else self._directory.policy.lineage, self._engine.version

    def is_behind(self) -> bool:
        return self._wanted().identity > self.identity

    def stats(self) -> dict[str, float]:
        return {
            **self._reloads,
            "fetch_seconds": self._weights.seconds,
            "weight_bytes_received": self._weights.bytes_received,
            "weight_bytes_sent": self._weights.bytes_sent,
        }

    @handles(AskLogprobs)
    async def ask_logprobs(self, request: Request[AskLogprobs]) -> Logprobs:
        if self._member.state == "draining":
            raise BusyError("this generator computes no log-probs: it is draining")
        ask = request.message
        required = ask.lineage, ask.version
        with (
            explain(ValueError, "{why}", RefusedError),
            explain((EngineError, TimeoutError), "this generator computed no log-probs: {why}", BusyError),
        ):
            async with parked(request):
                await self._loaded.until(lambda: self.identity >= required or self._member.state != "healthy")
                scores = await self._engine.score(f"{request.sender} log-probs", ask.tokens.tolist(), ask.top_k)
        columns = {"top_tokens": scores.top_tokens.ravel(), "top_logprobs": scores.top_logprobs.ravel()}
        return Logprobs(version=scores.version, logprobs=scores.logprobs, **columns)

    def _wanted(self) -> Policy:
        """Return the policy to load: the held policy, or else the newest published policy. A held
        policy older than the loaded policy is ignored, because running sequences cannot go back to older weights."""
        me = self._directory.members.get(self._member.bus.identity.name)
        if me is None or me.held is None:
            return self._directory.policy
        # Version 0 is the initial model of the run, in every lineage.
        passed = me.held.identity < self.identity if me.held.version else self._engine.version > 0
        return self._directory.policy if passed else me.held

    async def load_wanted(self) -> None:
        """Load the wanted policy, while sequences run until its weights have arrived. If files are missing or torn, try
        the newest published policy and the wanted policy in turn. A direct transfer is tried once; if it fails, the
        files are loaded. Raises EngineError after LOADS_FAIL_SECONDS without a load."""
        alternate, direct = False, self._config.weights.direct
        began = asyncio.get_running_loop().time()
        while True:
            try:
                if not self._config.generator.interrupt:
                    self._member.activity = "finishing the running sequences before it loads new weights"
                async with self._engine.drained():
                    if not self.is_behind():
                        return
                    policy = self._directory.policy if alternate else self._wanted()
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
            self._member.took(part, began, seconds)
            began += seconds
        self._loaded.notify()

    async def _fall_behind(self) -> None:
        """After a failed load, accept no new sequences, and send waiting sequences away."""
        if self._member.state == "healthy":
            self._member.state = "stale"
            self._loaded.notify()
            await self._member.beat()

    async def _receive(self, policy: Policy) -> LoadTimes:
        self._member.activity = f"receiving version {policy.version}"
        with self._member.working(self._member.activity):  # each call of the transfer has a deadline
            return await self._engine.receive(policy.version, self._receiver.calls(policy), self._receiver.lost)

    async def _fetch_and_load(self, policy: Policy) -> LoadTimes:
        self._member.activity = f"fetching version {policy.version}"
        fetch, into = functools.partial(self._weights.fetch, policy), self._config.weights_folder
        with self._member.working(self._member.activity, "fetch", self._arrived):
            folder = await self._member.disk.write(fetch, f"the weights of version {policy.version}", into)
        self._member.activity = f"loading version {policy.version}"
        with self._member.working(self._member.activity, "load"):
            return await self._engine.load(folder, policy.version)

    def _arrived(self) -> float:
        """Evidence of a fetch: a number that grows while weights arrive, or while the disk refuses writes."""
        return self._weights.bytes_received + DiskRetry.refusals
