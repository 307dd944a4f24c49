"""Flows: jobs for another actor and their results, in batches. A job is a sequence to sample, or a completion to score.

An asker opens a flow to a server. A request carries all jobs begun since the last request. Results come back as the
parts of a stream, and a part carries all results of a moment. So the messages per job become fewer as more jobs run.

Jobs live and die with their flow. If the stream of a flow ends or a part is lost, the server ends all jobs of the flow.
The jobs fail at the asker, who begins them again elsewhere. The asker may also end single jobs.
"""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from actors.runtime.actor import CONTROL_SECONDS, Notifier
from protocols.bus_errors import (
    BusError,
    BusyError,
    DeadlineError,
    MalformedError,
    RefusedError,
    StreamBrokenError,
    from_code,
)
from protocols.membership_messages import Member
from protocols.messages import EndJobs, JobFailed, Message, OpenFlow
from protocols.picture_messages import LackingPictures
from protocols.transport import Peer, Request

# Timeout of a flow's stream. A stream breaks much earlier if the server falls silent.
FLOW_SECONDS = 30 * 24 * 3600.0
# Least time between two parts of a flow. The first result after a pause does not wait.
GATHER_SECONDS = 0.05
# Most jobs in a request, and bytes of results in a part.
JOBS, PART_BYTES = 256, 512 << 10
# Most pictures in a request of several jobs: a server may need a second for a large picture.
PICTURES = 4
# The most flows of a sender at a server, and the most jobs on a flow.
MAX_FLOWS, MAX_JOBS = 64, 16_384

J = TypeVar("J", bound="Job")
R = TypeVar("R")
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
Choose = Callable[[str, str | None, int], Awaitable[Member]]
"""Chooses an actor: of this role, serving this name (None: any), with weights of this version or newer."""
JobFunction = Callable[[Callable[[R], None]], Awaitable[None]]
"""A job at a server: a function that gets a function to add results, and may raise a BusError."""


class Job:
    """A job of an asker. An ended job may be begun again, on any flow.

    role, serves: the role of the actor for the job, and a name that the actor has to serve (None: any). target: the
    actor on which the job is to continue; None: any. files: the job's pictures, by name, for servers without them.
    number: the name of the job on its flow, never used again. `_done`: gets the result or the error.
    """

    role = ""
    serves: str | None = None
    target: Member | None = None
    files: Mapping[str, bytes] = {}
    number = -1
    _flow: "Flow[Any] | None" = None
    _done: asyncio.Future[Any] | None = None

    def begin(self, number: int, flow: "Flow[Any]") -> asyncio.Future[Any]:
        self.number = number
        self._flow = flow
        self._done = asyncio.get_running_loop().create_future()
        return self._done

    @property
    def runs(self) -> bool:
        return self._done is not None and not self._done.done()

    def succeed(self, result: Any) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(result)

    def fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def stop(self) -> None:
        """Have the server end the job. The results so far still arrive, and then the job fails."""
        if self._flow is not None and self.runs:
            self._flow.stop(self.number)

    # actors.sampling.dispatch.Dispatch calls these methods in order; from `check` on, for every tried actor.

    def begin_dispatch(self) -> Member | None:
        """Return the actor at which the job begins; None: any."""
        return None

    def check(self) -> None:
        """Raises SampleFailed if the job is not wanted any more."""

    async def place(self, choose: Choose) -> Member:
        """Return the actor to do the job. Raises SampleFailed if there is none."""
        return await choose(self.role, self.serves, 0)

    def run_at(self, member: Member) -> None:
        """Note that this actor has the job from now on."""

    def settle(self, error: BusError) -> Any:
        """Return the result if the job ends with this error; None: try another actor. Raises SampleFailed."""
        raise NotImplementedError

    def leave(self, member: Member, target: Member | None) -> Member | None:
        """Note that `member` no longer has the job. Returns the actor at which the job continues; None: any."""
        return target

    def end_dispatch(self) -> None:
        """Called at the end, also after an error."""


class Kind(Protocol[J]):
    """A class of jobs, from the asker's point of view."""

    def request(self, flow: int, jobs: Sequence[J]) -> Message:
        """Return the request to begin these jobs on a flow."""

    def deliver(self, part: Message, jobs: dict[int, J]) -> Sequence[JobFailed]:
        """Give results in a part of the stream to the jobs, and remove ended jobs. A job missing in `jobs` is not
        wanted any more. Returns the failures in the part. Raises BusError for another kind of part."""


class Flow(Generic[J]):
    """The asker's end of a flow to the server behind `peer`. numbers: names for flows and jobs, never used twice,
    because a server may still be busy with an abandoned job. `broken`: the flow has ended, and takes no more jobs."""

    def __init__(self, peer: Peer, numbers: Iterator[int], kind: Kind[J], spawn: Spawn) -> None:
        self._peer = peer
        self._numbers = numbers
        self._number = next(numbers)
        self._kind = kind
        self._jobs: dict[int, J] = {}
        self._new: list[int] = []
        self._stopped: list[int] = []
        self._opened = asyncio.Event()
        self._to_send = asyncio.Event()
        self.broken = False
        spawn(self._live(), f"flow to {peer.address}")

    async def run_job(self, job: J) -> Any:
        """Return the result of a job. On cancellation the server ends the job. Raises a BusError if the server refuses
        the job, if the job fails there, or if the flow breaks."""
        number = next(self._numbers)
        result = job.begin(number, self)
        self._jobs[number] = job
        self._new.append(number)
        self._to_send.set()
        try:
            return await result
        finally:
            if self._jobs.pop(number, None) is not None:
                self.stop(number)

    def stop(self, number: int) -> None:
        """See `Job.stop`."""
        self._stopped.append(number)
        self._to_send.set()

    async def _live(self) -> None:
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._send())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.broken = True
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, Exception)]
        if crash := next((error for error in errors if not isinstance(error, BusError)), None):
            raise crash
        for job in self._jobs.values():
            job.fail(errors[0])
        self._jobs.clear()

    async def _read(self) -> None:
        async with contextlib.aclosing(self._peer.stream(OpenFlow(flow=self._number), FLOW_SECONDS)) as parts:
            async for part in parts:
                self._opened.set()
                for failure in self._kind.deliver(part, self._jobs):
                    if job := self._jobs.pop(failure.job, None):
                        job.fail(from_code(failure.code, failure.text))
        raise StreamBrokenError(f"{self._peer.address} ended its flow")

    async def _send(self) -> None:
        """Send new jobs and stops, request after request: a server begins a job before it hears of a stop."""
        await self._opened.wait()
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            new, self._new = self._new, []
            stopped, self._stopped = self._stopped, []
            for first in range(0, len(new), JOBS):
                await self._begin(new[first : first + JOBS])
            if stopped:
                await self._peer.ask(EndJobs(flow=self._number, jobs=np.array(stopped, np.int64)), CONTROL_SECONDS)

    async def _begin(self, numbers: Sequence[int]) -> None:
        jobs = [job for number in numbers if (job := self._jobs.get(number))]
        if not jobs:
            return
        try:
            begun = await self._request(jobs)
        except (DeadlineError, StreamBrokenError):  # the server may or may not have begun the jobs: the flow breaks
            raise
        except (MalformedError, ValueError) as error:  # ValueError: a value that no message may have
            begun = len(numbers) == 1
            if begun:
                self._fail(numbers, MalformedError(str(error)))
        except BusError as error:
            self._fail(numbers, error)
            return
        if not begun:
            middle = len(numbers) // 2  # a job cannot travel, or all jobs together are too large
            await self._begin(numbers[:middle])
            await self._begin(numbers[middle:])

    async def _request(self, jobs: Sequence[J]) -> bool:
        """Have the server begin the jobs. Returns False if several jobs need more pictures than a server looks at for a
        request. A single job with many pictures gets more time."""
        request, lacking = self._kind.request(self._number, jobs), set[str]()
        while isinstance(
            answer := await self._peer.ask(request, CONTROL_SECONDS * (1 + len(lacking))), LackingPictures
        ):
            lacking |= {*answer.names}  # the set grows: a server lacks nothing that a request has
            if len(lacking) > PICTURES and len(jobs) > 1:
                return False
            request = with_files(request, jobs, lacking)
        return True

    def _fail(self, numbers: Sequence[int], error: BusError) -> None:
        for number in numbers:
            if job := self._jobs.pop(number, None):
                job.fail(error)


class Flows(Generic[R]):
    """The server's end of all flows to an actor, with results of the type R. size: the approximate bytes of a result in
    a message. part: makes the message of results and failures."""

    def __init__(
        self, size: Callable[[R], int], part: Callable[[list[R], list[JobFailed]], Message], spawn: Spawn
    ) -> None:
        self._size = size
        self._part = part
        self._spawn = spawn
        self._open: dict[tuple[str, int], _Served[R]] = {}
        self._emptied = Notifier()

    async def serve(self, request: Request[OpenFlow]) -> AsyncGenerator[Message, None]:
        """Answer OpenFlow with results and failures as they come. The first part is empty and says that the flow is
        open. Raises RefusedError if the flow is already open, BusyError if the sender has too many flows."""
        key = request.owner, request.message.flow
        if key in self._open:
            raise RefusedError(f"flow {key[1]} of {request.sender} is open already")
        if sum(owner == request.owner for owner, _ in self._open) >= MAX_FLOWS:
            raise BusyError(f"{MAX_FLOWS} flows of {request.sender} are open already")
        served = self._open[key] = _Served[R]()
        try:
            yield self._part([], [])
            while True:
                part = self._part(*await self._next_part(served))
                self._emptied.notify()
                yield part
        finally:
            del self._open[key]
            for task in served.jobs.values():
                task.cancel()
            self._emptied.notify()

    def begin(self, request: Request[Message], flow: int, jobs: Mapping[int, JobFunction[R]]) -> None:
        """Begin new jobs on a flow, by number. Raises StreamBrokenError (not open) and BusyError (too many jobs)."""
        served = self._open.get((request.owner, flow))
        if served is None:
            raise StreamBrokenError(f"flow {flow} of {request.sender} is not open")
        if len(served.jobs) + len(jobs) > MAX_JOBS:
            raise BusyError(f"{len(served.jobs)} jobs of {request.sender} are running already")
        for job, work in jobs.items():
            served.jobs[job] = task = self._spawn(_run_job(served, job, work), f"job {job} of {request.sender}")
            # Not in the task itself: a task that is cancelled before its first step never runs.
            task.add_done_callback(functools.partial(self._remove_job, served, job))

    def cancel(self, request: Request[EndJobs]) -> None:
        """End jobs. Nothing more comes of them."""
        if served := self._open.get((request.owner, request.message.flow)):
            for job in request.message.jobs.tolist():
                if task := served.jobs.get(job):
                    task.cancel()

    async def wait_until_empty(self) -> None:
        """Wait until no job runs and all results are sent."""
        await self._emptied.until(lambda: not any(served.jobs or served.results for served in self._open.values()))

    def _remove_job(self, served: "_Served[R]", job: int, task: asyncio.Task[None]) -> None:
        served.jobs.pop(job, None)
        self._emptied.notify()

    async def _next_part(self, served: "_Served[R]") -> tuple[list[R], list[JobFailed]]:
        """Return the results and the failures for the next part."""
        loop = asyncio.get_running_loop()
        await served.filled.wait()
        # Also without a pause, this lets other jobs of this moment add results.
        await asyncio.sleep(max(0.0, served.sent + GATHER_SECONDS - loop.time()))
        served.sent = loop.time()
        results: list[R] = []
        failures: list[JobFailed] = []
        room = PART_BYTES
        while served.results:
            result = served.results[0]
            room -= 64 + 4 * len(result.text) if isinstance(result, JobFailed) else self._size(result)
            if room < 0 and (results or failures):
                break
            served.results.popleft()
            failures.append(result) if isinstance(result, JobFailed) else results.append(result)
        if not served.results:
            served.filled.clear()
        return results, failures


class _Served(Generic[R]):
    """A flow at its server: the running `jobs`, the `results` to send, and when a part was last `sent`."""

    def __init__(self) -> None:
        self.jobs: dict[int, asyncio.Task[None]] = {}
        self.results: deque[R | JobFailed] = deque()
        self.filled = asyncio.Event()
        self.sent = -GATHER_SECONDS

    def add(self, result: R | JobFailed) -> None:
        self.results.append(result)
        self.filled.set()


def with_files(request: Any, jobs: Sequence[Job], lacking: Set[str]) -> Any:
    """Return the request with pictures that its server lacks. Raises BusError if no job has the pictures."""
    files = {name: np.frombuffer(content, np.uint8) for job in jobs for name, content in job.files.items()}
    if not files.keys() >= lacking:
        raise BusError("a server lacks pictures that no job has")
    return request.model_copy(update={"files": tuple(file for name, file in files.items() if name in lacking)})


async def _run_job(served: _Served[R], job: int, work: JobFunction[R]) -> None:
    try:
        await work(served.add)
    except BusError as error:
        served.add(JobFailed.of(job, error))
