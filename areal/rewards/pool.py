"""Runs rewards in child processes: a reward cannot hang, crash or slow down the calling actor.

    async with RewardPool(["math"], RewardConfig(functions=["math"], workers=2)) as pool:
        score, parts = await pool.score("math", prompt, completion, row)

Each worker (`areal.rewards.worker`) does a single job at a time. The timeout of a job starts when a worker receives the
job, not when the job is queued. A worker that exceeds the timeout, or runs out of memory, is killed with its process
group, and replaced. Jobs of async rewards run at once in a further process (`areal.rewards.concurrent_calls`). If this
process is lost, a worker repeats each of its jobs alone, and the fatal job is found.

A running job stays with its worker until the worker answers or dies. Cancelling a caller does not stop a running job:
an answer can never be taken for the answer to another job. If the reward is deterministic, concurrent callers with the
same request share a job, and the result is cached for later callers.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import msgpack
import structlog

from areal.base.errors import UserError, explain
from areal.config.scoring import RewardConfig
from areal.rewards.concurrent_calls import ConcurrentCalls, WorkerLost
from areal.rewards.functions import Result, Traits
from areal.rewards.lookup import check_groups
from areal.rewards.quarantine import Quarantine, Recent
from areal.rewards.worker import RewardFailed, WorkerProcess
from areal.samples.table import Tokens

# Pause between two attempts to start a worker again.
RESTART_SECONDS = 1.0

log = structlog.get_logger()


Run = Callable[[bytes, float], Awaitable[list[Result]]]
"""Returns the results of a request within so many seconds, or raises RewardFailed."""


def digest(*values: Any) -> bytes:
    """Return a digest of msgpack values; equal values have equal digests."""
    return hashlib.blake2b(msgpack.packb(values), digest_size=16).digest()


@dataclass(eq=False, slots=True)
class _Job:
    """`key`: the digest of the request. `traits`: of the reward. `callers`: the number of waiting callers."""

    request: bytes
    key: bytes
    traits: Traits
    answer: asyncio.Future[list[Result]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    callers: int = 0


class RewardPool:
    """`config.workers` processes. Each holds all rewards in `names`, resolved by `areal.rewards.lookup.resolve`."""

    def __init__(self, names: Sequence[str], config: RewardConfig) -> None:
        self._config = config
        self._options = {name: config.options.get(name, {}) for name in names}
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._unanswered: dict[object, _Job] = {}  # jobs of deterministic rewards by their keys
        self._results = Recent[list[Result]](config.cache_size)
        self._quarantine = Quarantine(config.quarantine_after)
        self._workers: set[WorkerProcess] = set()
        self._concurrent: ConcurrentCalls | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        """Start the workers. Raises UserError if a reward cannot be resolved or a worker does not start."""
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._concurrent is not None:
            await self._concurrent.close()
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._fail_all("the reward pool was closed")

    @property
    def places(self) -> int:
        """The number of calls that run at once, for any reward of the pool."""
        config = self._config
        return config.concurrent_calls if all(t.concurrent for t in self._traits.values()) else config.workers

    async def score(
        self, name: str, prompt: str, completion: str, row: Mapping[str, Any], tokens: Tokens | None = None
    ) -> Result:
        """Return the result of reward `name`. `tokens`: the ids of the completion's tokens. Raises RewardFailed."""
        (result,) = await self.score_all(name, prompt, [completion], row, tokens)
        return result

    async def score_all(
        self, name: str, prompt: str, completions: Sequence[str], row: Mapping[str, Any], tokens: Tokens | None = None
    ) -> list[Result]:
        """Return the results of reward `name`, of one completion or all completions of a group. Raises RewardFailed."""
        if name not in self._options:
            raise RewardFailed(f"reward {name!r} is not served here, only {', '.join(self._options)}", "unknown")
        if self._closed:
            raise RewardFailed("the reward pool was closed", "no_worker")
        traits = self._traits[name]
        ids = [*map(int, tokens)] if traits.takes_tokens and tokens is not None else None
        request = name, prompt, completions, row, ids
        no_json = TypeError, ValueError, OverflowError  # an array, or nested too deeply, or too large
        with explain(no_json, "the row cannot be passed to a worker: {why}", partial(RewardFailed, kind="raised")):
            key = digest(*request)
        if cached := self._results.get(key):
            return cached
        self._quarantine.check(key)
        place = key if traits.deterministic else object()
        job = self._unanswered.get(place) or self._queue(place, _Job(msgpack.packb(request), key, traits))
        job.callers += 1
        try:
            return await asyncio.shield(job.answer)
        finally:
            job.callers -= 1
            if not job.callers:
                job.answer.cancel()
                del self._unanswered[place]

    def _queue(self, place: object, job: _Job) -> _Job:
        self._unanswered[place] = job
        if job.traits.concurrent:
            call = asyncio.create_task(self._call(job))
            self._tasks.add(call)
            call.add_done_callback(self._tasks.discard)
            job.answer.add_done_callback(lambda _: call.cancel())  # nobody waits for the answer any more
        else:
            self._jobs.put_nowait(job)
        return job

    async def _serve(self, worker: WorkerProcess) -> None:
        """Run jobs of the queue in turn on `worker`, which is replaced when it dies."""
        while True:
            worker = await self._living(worker)
            job = await self._jobs.get()
            if job.answer.done():
                continue
            worker = await self._living(worker)
            await self._answer(job, worker.run)

    async def _call(self, job: _Job) -> None:
        assert self._concurrent is not None
        try:
            await self._answer(job, self._concurrent.run)
        except WorkerLost:
            self._jobs.put_nowait(job)
        except (UserError, OSError) as error:
            _settle(job.answer, RewardFailed(f"no reward worker can be started again: {error}", "no_worker"))

    async def _answer(self, job: _Job, run: Run) -> None:
        try:
            self._quarantine.check(job.key)  # workers may have been lost on the job since it was queued
            results = await run(job.request, self._config.timeout_seconds)
        except RewardFailed as failure:
            if failure.kind in ("timeout", "died"):
                self._quarantine.lost(job.key)
            _settle(job.answer, failure)
            return
        if job.traits.deterministic:
            self._results.put(job.key, results)
        _settle(job.answer, results)

    async def _start(self) -> None:
        starting = [asyncio.create_task(self._start_worker()) for _ in range(self._config.workers)]
        self._tasks.update(starting)
        workers = await asyncio.gather(*starting)
        self._traits = workers[0].traits
        check_groups(self._traits, self._config)
        options = {name: self._options[name] for name, traits in self._traits.items() if traits.concurrent}
        if options:
            limit, memory = self._config.concurrent_calls, self._memory
            self._concurrent = ConcurrentCalls(lambda: WorkerProcess.start(options, memory, concurrent=True), limit)
            await self._concurrent.living()
        self._tasks.update(asyncio.create_task(self._serve(worker)) for worker in workers)

    @property
    def _memory(self) -> int:
        return int((self._config.memory_gib or 0) * 2**30)

    async def _start_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.start(self._options, self._memory)
        self._workers.add(worker)
        return worker

    async def _living(self, worker: WorkerProcess) -> WorkerProcess:
        """Return `worker` if it is alive, else a new worker. While no worker can be started, every job fails."""
        if worker.alive:
            return worker
        await worker.kill()
        self._workers.discard(worker)
        self._starting += 1
        try:
            while True:
                try:
                    return await self._start_worker()
                except (UserError, OSError) as error:
                    log.error("a reward worker cannot be started again", error=str(error))
                    if self._starting == self._config.workers:
                        self._fail_all(f"no reward worker can be started again: {error}")
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            self._starting -= 1

    def _fail_all(self, reason: str) -> None:
        for job in self._unanswered.values():
            _settle(job.answer, RewardFailed(reason, "no_worker"))


def _settle(answer: asyncio.Future[list[Result]], outcome: list[Result] | RewardFailed) -> None:
    if answer.done():  # the callers were cancelled
        return
    if isinstance(outcome, RewardFailed):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
