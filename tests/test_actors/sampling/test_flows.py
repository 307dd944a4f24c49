"""Flows over real links: what travels together, how jobs end, and that none is left when a flow breaks."""

from __future__ import annotations

import asyncio
import functools
import itertools

import numpy as np
import pytest
from support.networks import network

from actors.sampling import flows
from actors.sampling.flows import Flow, Flows, Job
from protocols.bus import Bus
from protocols.bus_errors import BusError, BusyError, HarmfulError, MalformedError, RefusedError, StreamBrokenError
from protocols.messages import Completion, CompletionsScored, Done, EndJobs, OpenFlow, Score, Scored

PATIENCE = 60.0


class Task(Job):
    def __init__(self, text: str, number: int = -1) -> None:
        self.number = number
        self.text = text
        self.heard: list[float] = []


class Kind:
    """Jobs that answer with the length of their text; a negative score is not the last."""

    def request(self, flow, jobs):
        some = (Completion(job=job.number, function="f", prompt="", completions=(job.text,), row=0) for job in jobs)
        return Score(flow=flow, rows=({},), completions=tuple(some))

    def deliver(self, part, jobs):
        for scored in part.scored:
            if job := jobs.get(scored.job):
                job.heard += scored.scores
                if scored.scores[0] >= 0:
                    jobs.pop(scored.job).succeed(scored.scores[0])
        return part.failed


class Server:
    """What it does with a job stands in the job's text. `parts`, `requests`: what travelled, by number of jobs."""

    def __init__(self) -> None:
        self.flows = Flows(lambda scored: 1000, self.part, lambda work, name: asyncio.create_task(work, name=name))
        self.goes_on = asyncio.Event()
        self.running, self.parts, self.requests = set(), [], []
        self.bus = Bus("reward/0#s", network())
        self.address = self.bus.serve("tcp://127.0.0.1:*", self.handle, pytest.fail)

    def handle(self, request):
        return self.flows.serve(request) if isinstance(request.message, OpenFlow) else self.answer(request)

    def part(self, scored, failed):
        if scored or failed:
            self.parts.append(len(scored) + len(failed))
        return CompletionsScored(scored=tuple(scored), failed=tuple(failed))

    async def answer(self, request):
        requests = request.message
        if isinstance(requests, EndJobs):
            self.flows.cancel(request)
            return Done()
        self.requests.append(len(requests.completions))
        if any(item.completions[0] == "refuse all" for item in requests.completions):
            raise RefusedError("not these")
        jobs = {item.job: functools.partial(self.work, item) for item in requests.completions}
        self.flows.begin(request, requests.flow, jobs)
        return Done()

    async def work(self, one, add):
        self.running.add(one.completions[0])
        try:
            if one.completions[0] == "harm":
                raise HarmfulError("it does harm")
            if one.completions[0].startswith("wait"):
                add(Scored(job=one.job, scores=(-1.0,), parts=({},)))
                await self.goes_on.wait()
            add(Scored(job=one.job, scores=(float(len(one.completions[0])),), parts=({},)))
        finally:
            self.running.discard(one.completions[0])


class Pair:
    """A server and an asker."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.server = Server()
        self.bus = Bus("rollout_manager/0#a", network())
        self.flow = self.opened()

    def opened(self) -> Flow:
        peer = self.bus.peer(self.server.address)
        return Flow(peer, self._numbers, Kind(), lambda work, name: asyncio.create_task(work, name=name))

    def run_job(self, text: str) -> asyncio.Task:
        self.last = Task(text)
        return asyncio.create_task(self.flow.run_job(self.last))

    async def until(self, condition) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - what is waited for is a plain value
                await asyncio.sleep(0.002)


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    await pair.bus.close()
    await pair.server.bus.close()


async def test_jobs_of_a_moment_go_together_and_so_do_their_results(pair):
    jobs = [pair.run_job("x" * n) for n in range(100)]
    assert await asyncio.gather(*jobs) == list(range(100))
    assert pair.server.requests == [100]
    assert len(pair.server.parts) == 1


async def test_a_request_and_a_part_have_a_limit(pair, monkeypatch):
    monkeypatch.setattr(flows, "JOBS", 30)
    monkeypatch.setattr(flows, "PART_BYTES", 4000)
    await asyncio.gather(*(pair.run_job("x") for _ in range(100)))
    assert pair.server.requests == [30, 30, 30, 10]
    assert max(pair.server.parts) == 4 and sum(pair.server.parts) == 100


async def test_results_that_come_quickly_gather(pair, monkeypatch):
    monkeypatch.setattr(flows, "GATHER_SECONDS", 0.2)
    for _ in range(2):
        await asyncio.gather(*(pair.run_job("x") for _ in range(3)))
    first = pair.run_job("x")
    await pair.until(lambda: len(pair.server.requests) == 3)
    await asyncio.gather(first, *(pair.run_job("x") for _ in range(3)))
    assert pair.server.parts[2:] == [4]


async def test_a_failure_arrives_as_the_error_it_was_and_harms_no_other_job(pair):
    harm, second = pair.run_job("harm"), pair.run_job("abc")
    with pytest.raises(HarmfulError, match="it does harm"):
        await harm
    assert await second == 3


async def test_another_of_the_same_name_cannot_end_the_jobs_or_add_to_them(pair):
    waiting = pair.run_job("wait")
    await pair.until(lambda: pair.server.running)
    thief = Bus("rollout_manager/0#a", network())
    try:
        peer = thief.peer(pair.server.address)
        await peer.ask(EndJobs(flow=0, jobs=np.array([pair.last.number], np.int64)), PATIENCE)
        with pytest.raises(StreamBrokenError, match="flow 0 of rollout_manager/0#a is not open"):
            await peer.ask(Kind().request(0, [Task("x", 7)]), PATIENCE)
    finally:
        await thief.close()
    pair.server.goes_on.set()
    async with asyncio.timeout(PATIENCE):
        assert await waiting == 4


async def test_jobs_that_the_server_refuses_fail_and_the_flow_goes_on(pair):
    with pytest.raises(RefusedError, match="not these"):
        await pair.run_job("refuse all")
    assert await pair.run_job("ab") == 2
    assert not pair.flow.broken


async def test_a_job_that_cannot_travel_fails_alone(pair):
    jobs = [pair.run_job(text) for text in ("a", "\udc80", None, "abc", "abcd")]  # None is no text
    ends = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(ends.pop(1), MalformedError) and isinstance(ends.pop(1), MalformedError)
    assert ends == [1, 3, 4]


async def test_jobs_too_large_for_one_request_go_in_several(pair):
    texts = ["y" * 16_000] * 100  # too short to travel as frames of their own
    assert await asyncio.gather(*map(pair.run_job, texts)) == [16_000] * 100
    assert len(pair.server.requests) > 1


async def test_a_job_that_is_cancelled_ends_at_the_server(pair):
    waits, second = pair.run_job("wait"), pair.run_job("wait too")
    await pair.until(lambda: len(pair.server.running) == 2)
    waits.cancel()
    await pair.until(lambda: pair.server.running == {"wait too"})
    pair.server.goes_on.set()
    assert await second == 8


async def test_a_job_that_is_cancelled_at_once_never_begins(pair):
    job = pair.run_job("wait")
    await asyncio.sleep(0)
    job.cancel()
    assert await pair.run_job("a") == 1
    assert not pair.server.running


async def test_a_job_that_has_failed_may_begin_again_under_another_name(pair):
    waits = pair.run_job("wait")
    await pair.until(lambda: pair.server.running)
    job, first = pair.last, pair.last.number
    job.stop()
    await pair.until(lambda: not pair.server.running)
    job.fail(StreamBrokenError("handed over"))
    with pytest.raises(StreamBrokenError):
        await waits
    pair.server.goes_on.set()
    assert await pair.flow.run_job(job) == 4
    assert job.number != first


async def test_results_arrive_before_the_last_one(pair):
    job = pair.run_job("wait")
    task = pair.last
    await pair.until(lambda: task.heard)
    pair.server.goes_on.set()
    assert await job == 4
    assert task.heard == [-1, 4]


async def test_where_a_server_is_lost_all_its_jobs_fail(pair):
    jobs = [pair.run_job(f"wait {n}") for n in range(5)]
    await pair.until(lambda: len(pair.server.running) == 5)
    pair.bus.forget(pair.server.address)
    for job in jobs:
        with pytest.raises(StreamBrokenError):
            await job
    assert pair.flow.broken
    pair.flow = pair.opened()
    assert await pair.run_job("ab") == 2


async def test_where_the_asker_leaves_the_server_ends_its_jobs(pair):
    jobs = [pair.run_job(f"wait {n}") for n in range(5)]
    await pair.until(lambda: len(pair.server.running) == 5)
    await pair.bus.close()
    await asyncio.gather(*jobs, return_exceptions=True)
    await pair.until(lambda: not pair.server.running)


async def test_a_job_needs_an_open_flow(pair):
    with pytest.raises(StreamBrokenError, match="flow 99 of rollout_manager/0#a is not open"):
        await pair.bus.peer(pair.server.address).ask(Kind().request(99, [Task("a", 0)]), PATIENCE)


async def test_a_flow_that_the_server_gives_up_breaks(pair):
    job = pair.run_job("wait")
    await pair.until(lambda: pair.server.running)
    await pair.server.bus.close()
    with pytest.raises(BusError):
        await job
    assert pair.flow.broken and not pair.server.running


async def test_a_sender_has_a_limit_of_flows_and_of_jobs_on_each(pair, monkeypatch):
    monkeypatch.setattr(flows, "MAX_FLOWS", 2)
    monkeypatch.setattr(flows, "MAX_JOBS", 3)
    jobs = [pair.run_job("wait") for _ in range(3)]
    await pair.until(lambda: len(pair.server.requests) == 1)
    with pytest.raises(BusyError, match="3 jobs of rollout_manager/0#a are running already"):
        await pair.run_job("a")
    pair.flow, first = pair.opened(), pair.flow
    assert await pair.run_job("a") == 1
    pair.flow = pair.opened()
    with pytest.raises(BusyError, match="2 flows"):
        await pair.run_job("a")
    pair.server.goes_on.set()
    assert await asyncio.gather(*jobs) == [4, 4, 4]
    assert pair.flow.broken and not first.broken


async def test_a_server_knows_when_everything_is_sent(pair):
    job = pair.run_job("wait")
    await pair.until(lambda: pair.server.running)
    emptied = asyncio.create_task(pair.server.flows.wait_until_empty())
    await asyncio.sleep(0.05)
    assert not emptied.done()
    pair.server.goes_on.set()
    await asyncio.wait_for(emptied, PATIENCE)
    assert await job == 4
