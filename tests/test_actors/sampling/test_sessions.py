"""Which actor a sample goes to, and that it goes on elsewhere with all its tokens."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from support.process_tree import needs_namespaces
from support.small_runs import ten_steps
from support.tiny_pictures import png

from actors.runtime.directory import Directory
from actors.sampling.dispatch import Dispatch
from actors.sampling.flows import with_files
from actors.sampling.group_scores import GroupScores
from actors.sampling.jobs import Call, SampleFailed, SampleState, ScoringRules
from actors.sampling.own_code import contained_task
from actors.sampling.sampling import Sampling
from actors.sampling.services import Rewards, Services
from actors.sampling.sessions import SampleSession
from areal.base.errors import UserError
from areal.config import Config
from areal.data.rows import Row
from areal.extensions.programs.outside import Outcome, SandboxError, open_sandbox
from areal.extensions.programs.slots import Programs
from areal.generation.routing import GeneratorLoad
from areal.rewards.functions import Result
from areal.samples.pictures import digest_of, digests_in
from areal.samples.table import Generation
from areal.samples.trajectory import TokenScores, Trajectory
from areal.storage.saved_calls import SavedCall, packed, unpacked
from areal.workflows.conversation import Conversation
from protocols.bus_errors import (
    BusError,
    BusyError,
    ConnectionLostError,
    FencedError,
    HarmfulError,
    MalformedError,
    RefusedError,
    StreamBrokenError,
)
from protocols.membership_messages import Member, Policy
from protocols.messages import Generate
from simulation.loop import FaultyLoop, WorldScheduler


class Cluster:
    """In the place of an actor: knows some healthy members."""

    role, index = "rollout_manager", 0
    config = ten_steps(sampling={"max_new_tokens": 10})

    def __init__(self, *members: Member) -> None:
        self.directory = Directory(Policy(lineage=0, version=0, folder=""), members)
        self.failures = []
        most = self.config.generator.max_concurrent_rollouts
        self.lost = []
        self.dispatch = Dispatch(
            self.directory,
            "rollout_manager",
            0,
            most,
            self.lost.append,
            lambda member, kind: SimpleNamespace(broken=False, run_job=lambda job: self.run_job(member, job)),
        )
        rules = ScoringRules(self.config.reward, {*self.config.rewards}, self.report_failure)
        self.services = Services(self.config, Characters(), self.dispatch, Rewards(self.dispatch, rules, {}, {}))

    def report_failure(self, cause: str, reason: str) -> None:
        self.failures.append((cause, reason))

    async def run_job(self, member: Member, job):
        return await self.servers.run_job(member, job)


def generator(index: int, held: int | None = None) -> Member:
    return Member(
        identity=f"generator/{index}#x",
        role="generator",
        index=index,
        address=f"tcp://node:{index}",
        state="healthy",
        held=None if held is None else Policy(lineage=0, version=held, folder=f"v{held}"),
    )


@pytest.mark.parametrize(("min_version", "chosen"), [(2, 0), (3, 0), (4, 1)])
async def test_a_generator_that_holds_a_version_gets_nothing_that_needs_a_newer_one(min_version, chosen):
    dispatch = Cluster(generator(0, held=3), generator(1)).dispatch
    with dispatch.loads.using(generator(1)):  # the other one is the busier
        assert (await dispatch.choose("generator", min_version=min_version)).index == chosen


async def test_where_all_generators_are_held_one_of_them_will_have_to_do():
    dispatch = Cluster(generator(0, held=3)).dispatch
    assert (await dispatch.choose("generator", min_version=4)).index == 0


async def test_what_others_have_there_counts_too():
    dispatch = Cluster(generator(0), generator(1)).dispatch
    dispatch.loads.reported = {
        "generator/0#x": GeneratorLoad(30, 0, 64, version=0),
        "generator/1#x": GeneratorLoad(20, 0, 64, version=0),
    }
    assert (await dispatch.choose("generator")).index == 1
    with contextlib.ExitStack() as used:
        for _ in range(12):
            used.enter_context(dispatch.loads.using(generator(1)))
        assert (await dispatch.choose("generator")).index == 0


async def test_places_and_sequences_are_those_of_the_healthy_generators_of_now():
    dispatch = Cluster(generator(0), generator(1)).dispatch
    with dispatch.loads.using(generator(0)), dispatch.loads.using(generator(1)):
        assert (dispatch.loads.places, dispatch.loads.sequences) == (2 * dispatch.loads._limit(generator(0)), 2)
        dispatch.loads.reported = {"generator/0#x": GeneratorLoad(0, 0, 5, version=0)}
        assert dispatch.loads.places == 5 + dispatch.loads._limit(generator(1))
        dispatch._directory.update({}, ["generator/1#x"])
        assert (dispatch.loads.places, dispatch.loads.sequences) == (5, 1)


class Clock:
    """The running loop's time, which only a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


@contextlib.contextmanager
def router_that_prefers_0():
    dispatch = Cluster(generator(0), generator(1)).dispatch
    with dispatch.loads.using(generator(1)), structlog.testing.capture_logs() as logs:
        yield dispatch, logs


async def test_a_generator_that_does_not_answer_gets_one_sequence_at_a_time_ever_more_rarely(monkeypatch, unhurried):
    clock = Clock(monkeypatch)
    with router_that_prefers_0() as (dispatch, logs):
        waits = []
        for _ in range(6):
            for _ in range(72):  # all sequences of a flow fail with it
                dispatch.avoidance.failed(generator(0), StreamBrokenError("gone"))
            before = clock.now
            while (await dispatch.choose("generator")).index == 1:
                clock.now += 1.0
            waits.append(clock.now - before)
            with contextlib.suppress(StreamBrokenError), dispatch._asking(generator(0)):
                assert (await dispatch.choose("generator")).index == 1, "one sequence tries it"
                clock.now += 6.5
                raise StreamBrokenError("gone")
        assert waits == [5, 10, 20, 40, 60, 60]
        assert [log["actor"] for log in logs] == ["generator/0#x"]


@pytest.mark.parametrize("answer", ["the sequence ends", "the sequence is long"])
async def test_a_generator_that_answers_again_is_trusted(monkeypatch, unhurried, answer):
    clock = Clock(monkeypatch)
    with router_that_prefers_0() as (dispatch, logs), contextlib.ExitStack() as used:
        dispatch.avoidance.failed(generator(0), StreamBrokenError("gone"))
        clock.now += 5.0
        used.enter_context(dispatch._asking(generator(0)))
        assert not dispatch.avoidance.trusts(generator(0))
        if answer == "the sequence ends":
            used.close()
        else:
            clock.now += 13.0
        assert dispatch.avoidance.trusts(generator(0))
        dispatch.avoidance.failed(generator(0), StreamBrokenError("gone again"))
        assert not dispatch.avoidance.trusts(generator(0))
        assert len(logs) == 2


async def test_of_a_generator_whose_connection_is_lost_the_master_hears_once(monkeypatch, unhurried):
    Clock(monkeypatch)
    cluster = Cluster(generator(0), generator(1))
    cluster.dispatch.avoidance.failed(generator(1), StreamBrokenError("silent"))
    for _ in range(72):  # all sequences of a flow fail with it
        cluster.dispatch.avoidance.failed(generator(0), ConnectionLostError("refused"))
    assert cluster.lost == [generator(0)]


async def test_a_generator_that_the_directory_shows_anew_is_tried_at_once(monkeypatch, unhurried):
    Clock(monkeypatch)
    with router_that_prefers_0() as (dispatch, _):
        dispatch.avoidance.failed(generator(0), StreamBrokenError("gone"))
        assert (await dispatch.choose("generator")).index == 1
        dispatch._directory.update({"generator/0#x": generator(0)}, ())
        assert (await dispatch.choose("generator")).index == 0
        with dispatch._asking(generator(0)):
            assert (await dispatch.choose("generator")).index == 1


async def test_of_two_generators_that_do_not_answer_the_one_that_has_failed_less_often_is_asked(monkeypatch, unhurried):
    clock = Clock(monkeypatch)
    with router_that_prefers_0() as (dispatch, _):
        dispatch.avoidance.failed(generator(0), StreamBrokenError("gone"))
        clock.now += 5.0
        dispatch.avoidance.failed(generator(0), StreamBrokenError("gone"))
        dispatch.avoidance.failed(generator(1), StreamBrokenError("gone"))
        assert (await dispatch.choose("generator")).index == 1


async def test_one_that_is_busy_is_avoided_for_a_while_in_silence(monkeypatch, unhurried):
    clock = Clock(monkeypatch)
    with router_that_prefers_0() as (dispatch, logs):
        dispatch.avoidance.failed(generator(0), BusyError("it drains"))
        assert (await dispatch.choose("generator")).index == 1
        clock.now += 5.0
        assert dispatch.avoidance.trusts(generator(0))
        assert logs == []


async def test_a_sample_whose_generator_does_not_answer_to_another_one_continues_elsewhere(unhurried):
    cluster = Cluster(generator(0), generator(1))
    _, first = session_at(cluster, generator(0))
    _, second = session_at(cluster, generator(0))
    cluster.servers = streams = Streams(
        at0=[[StreamBrokenError("gone")]],
        at1=[[chunk(65, version=3, finish="stop")], [chunk(66, version=3, finish="stop")]],
    )
    for session in (first, second):
        await session.generate([1, 2])
    assert [name for name, _ in streams.asked] == ["0", "1", "1"]


def test_calls_name_the_pictures_of_their_prompts_and_send_those_that_the_generator_lacks():
    config, frames = Cluster().config, []
    for pictures in ([b"a", b"b"], [b"b", b"b"], []):
        sample = SampleState(config.sampling, 0, None, None, lambda version: None)
        sample.pictures = {digest_of(content): content for content in pictures}
        frames.append(Call(sample, np.int32([1]), 4, None, [*map(digest_of, pictures)]))
    a, b = digest_of(b"a"), digest_of(b"b")
    request = Call.request(0, frames)
    assert [request.pictures[sequence.prompt] for sequence in request.sequences] == [(a, b), (b, b), ()]
    more = with_files(request, frames, {b})
    assert [content.tobytes() for content in more.files] == [b"b"] and not request.files
    assert [content.tobytes() for content in with_files(more, frames, {a, b}).files] == [b"a", b"b"]
    with pytest.raises(BusError, match="pictures that no job has"):
        with_files(request, frames[2:], {b})
    assert type(Call.request(0, frames[2:])) is Generate


async def test_a_picture_that_a_workflow_shows_goes_to_the_generator_and_stands_in_the_sample(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl", "image_token_id": 5}')
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 784}')
    monkeypatch.setattr(Cluster, "config", Cluster.config.model_copy(update={"model": str(tmp_path)}))
    cluster, requests = Cluster(generator(0)), []

    async def run_job(member: Member, call):
        request = Call.request(0, [call])
        requests.append(with_files(request, [call], {*call.pictures}) if call.pictures else request)
        return call.add(chunk(65, version=3, finish="stop"), "stop")

    cluster.run_job = run_job
    _, session = session_at(cluster, generator(0))
    small, tall = png(28, 28, 0), png(28, 56, 1)
    parts = [session.show(tall), session.show(small)]
    await session.generate([9, 5, 5, 8, 5, 8], pictures=parts)
    await session.generate([9, 5, 5, 8, 5, 8, 65, 5, 8], pictures=[*parts, session.show(small)])
    await session.generate([9, 5, 8], pictures=parts[1:])
    await session.generate([9, 8])
    names = [digest_of(tall), digest_of(small)]
    files = [[content.tobytes() for content in request.files] for request in requests[:3]]
    assert [[*request.pictures[0]] for request in requests[:3]] == [names, [*names, names[1]], names[1:]]
    assert files == [[tall, small], [tall, small], [small]] and type(requests[3]) is Generate
    grown, *branches = session.trajectory(1.0).sequences()
    assert [row.tobytes().hex() for row in grown.pictures[[1, 2, 4, 7]]] == [names[n] for n in (0, 0, 1, 1)]
    assert not grown.pictures[[0, 3, 5, 6, 8, 9]].any()
    assert [digests_in(branch.pictures) for branch in branches] == [[names[1]], []]

    saved, (_, again) = unpacked(packed(session.calls_so_far())), session_at(cluster, generator(0))
    again.saved_calls = saved
    await again.generate([9, 5, 8], pictures=[again.show(png(28, 28, 7))])
    await again.generate([9, 5, 8], pictures=[again.show(small)])
    assert len(requests) == 5 and again.unsaved == 1, "the call with another picture alone is sampled anew"
    for tokens, shown in [([9, 5, 5], parts), ([9, 5, 8], [{**parts[1], "digest": "0a" * 16}])]:
        with pytest.raises(SampleFailed, match="not those of its 2 pictures|neither of the row nor of session.show"):
            await session.generate(tokens, pictures=shown)
    with pytest.raises(ValueError, match="no picture in one of the formats"):
        session.show(b"text")


class Streams:
    """In the place of generators: streams that a test writes, by generator; the sequence asked of each is kept, and its
    prompt."""

    def __init__(self, **streams: list) -> None:
        self.streams = streams
        self.asked, self.prompts = [], []

    async def run_job(self, member: Member, call):
        asked = Call.request(0, [call])
        self.asked.append((member.address[-1], asked.sequences[0]))
        self.prompts.append(asked.prompts[0].tolist())
        for part in self.streams[f"at{member.address[-1]}"].pop(0):
            if isinstance(part, Exception):
                raise part
            part = part() if callable(part) else part
            if (done := call.add(part, part.finish)) is not None:
                return done
        raise AssertionError("the test wrote too little")


def chunk(*tokens: int, version: int, finish: str | None = None) -> Generation:
    n = len(tokens)
    return Generation(np.array(tokens, np.int32), np.zeros(n, np.float32), np.full(n, version, np.int32), finish)


class Characters:
    """A tokenizer of one character a token."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))


def session_at(cluster: Cluster, home: Member, **settings) -> tuple[Dispatch, SampleSession]:
    dispatch = cluster.dispatch
    sampling = cluster.config.sampling.model_copy(update=settings)
    return dispatch, SampleSession(
        cluster.services, Row(0, "", None, None, {}), sampling, 3, home=home, slot=dispatch.loads.slot_at(home)
    )


def moved(session: SampleSession, target: Member, then: Generation):
    """What a stream sends after the sequence was told to move."""

    def part() -> Generation:
        next(iter(session.running)).move(target)
        return then

    return part


async def test_a_sequence_that_moves_goes_on_at_its_target_from_the_tokens_so_far():
    cluster = Cluster(generator(0), generator(1), generator(2))
    dispatch, session = session_at(cluster, generator(0))

    first = [moved(session, generator(2), chunk(5, 6, version=3)), StreamBrokenError("handed over")]
    cluster.servers = Streams(at0=[first], at2=[[chunk(7, version=4, finish="stop")]])
    done = await session.generate([1, 2])
    assert (done.tokens.tolist(), done.versions.tolist()) == ([5, 6, 7], [3, 3, 4])
    (_, first), (where, second) = cluster.servers.asked
    assert (where, cluster.servers.prompts[1], second.max_new_tokens) == ("2", [1, 2, 5, 6], 8)
    assert second.min_version == 3
    assert (first.first_version, second.first_version) == (None, 3)
    assert (session.tokens_sampled, dict(dispatch.loads.requests)) == (3, {})


async def test_a_sequence_may_be_ended_early():
    cluster = Cluster(generator(0))
    dispatch, session = session_at(cluster, generator(0))
    cluster.servers = Streams(
        at0=[[chunk(5, 6, version=3), chunk(7, 8, version=4), chunk(9, version=4, finish="length")]]
    )
    done = await session.generate([1], keep=lambda tokens: 3 if 7 in tokens else None)
    assert (done.tokens.tolist(), done.versions.tolist(), done.finish) == ([5, 6, 7], [3, 3, 4], "stop")
    assert (len(done.logprobs), session.tokens_sampled, dict(dispatch.loads.requests)) == (3, 4, {})


@pytest.mark.parametrize(("keep", "end"), [(None, 6), (3, 3), (7, 6)])
async def test_a_stop_text_of_the_run_ends_a_turn_and_remains_in_it(keep, end):
    cluster = Cluster(generator(0), generator(1))
    _, session = session_at(cluster, generator(0), stop=["!!", "bye"])
    first = [moved(session, generator(1), chunk(*b"ab!", version=3)), StreamBrokenError("handed over")]
    cluster.servers = Streams(at0=[first], at1=[[chunk(*b"c!", version=4), chunk(*b"!d", version=4)]])
    own = None if keep is None else lambda tokens: keep if len(tokens) >= keep else None
    done = await session.generate([1], keep=own)
    assert (bytes(done.tokens.tolist()), done.finish) == (b"ab!c!!"[:end], "stop")


async def test_the_tokens_that_a_sample_needs_at_least_count_over_its_turns():
    cluster = Cluster(generator(0), generator(1))
    _, session = session_at(cluster, generator(0), min_new_tokens=6)
    first = [moved(session, generator(1), chunk(5, 6, version=3)), StreamBrokenError("handed over")]
    cluster.servers = Streams(
        at0=[first], at1=[[chunk(7, version=3, finish="length")], [chunk(1, 2, 3, version=3, finish="stop")]]
    )
    for most in (3, None):
        await session.generate([1], max_new_tokens=most)
    assert [request.min_new_tokens for _, request in cluster.servers.asked] == [3, 1, 3]


@pytest.mark.parametrize(("wanted", "asked"), [(None, 10), (4, 4), (40, 10)])
async def test_a_call_may_ask_for_fewer_tokens_than_the_run_s(wanted, asked):
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    cluster.servers = Streams(at0=[[chunk(5, version=3, finish="length")]])
    await session.generate([1], max_new_tokens=wanted)
    assert cluster.servers.asked[0][1].max_new_tokens == asked


async def test_a_place_is_taken_while_a_sequence_is_to_come_or_runs():
    cluster = Cluster(generator(0))
    dispatch, session = session_at(cluster, generator(0))
    assert dispatch.loads.requests == {"generator/0#x": 1}
    room = asyncio.create_task(dispatch.loads.room.until(lambda: not dispatch.loads.requests))
    cluster.servers = Streams(at0=[[lambda: chunk(len(dispatch.loads.requests), version=3, finish="stop")]])
    assert (await session.generate([1])).tokens.tolist() == [1]
    assert not dispatch.loads.requests
    await asyncio.wait_for(room, 60)


async def test_a_sample_goes_on_from_what_was_saved_of_its_calls_with_the_same_prompts():
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    saves = []
    saving = asyncio.create_task(asyncio.Event().wait())
    session.save, session.save_every = lambda: saves.append(session.tokens_sampled) or saving, 2
    interrupted = [chunk(8, version=4), lambda: chunk(9, version=len(session.calls_so_far()) + 3)]
    cluster.servers = Streams(
        at0=[[chunk(5, 6, version=3), chunk(7, version=4, finish="stop")], [*interrupted, AssertionError("is killed")]]
    )
    await session.generate([1, 2])
    kept: list[SavedCall] = []
    with pytest.raises(AssertionError):
        await session.generate([1, 2, 5, 6, 7, 3], 4, keep=lambda tokens: kept.extend(session.calls_so_far()))
    assert (saves, session.unsaved) == ([2], 5), "there is one save at a time"
    assert not session.calls_so_far()[1:], "a call that failed is none"

    _, again = session_at(cluster, generator(0))
    again.saved_calls, again.save_every = unpacked(packed(kept[-2:])), 99
    cluster.servers = Streams(at0=[[chunk(1, version=6, finish="stop")], [chunk(2, version=6, finish="stop")]])
    first = await again.generate([1, 2])
    assert not cluster.servers.asked, "it is complete"
    assert (first.tokens.tolist(), first.versions.tolist(), first.finish) == ([5, 6, 7], [3, 3, 4], "stop")
    assert (await again.generate([1, 2, 5, 6, 7, 4], 4)).tokens.tolist() == [1], "it has another prompt"
    second = await again.generate([1, 2, 5, 6, 7, 3], 4)
    assert (second.tokens.tolist(), second.versions.tolist()) == ([8, 9, 2], [4, 5, 6])
    assert cluster.servers.prompts[1] == [1, 2, 5, 6, 7, 3, 8, 9]
    assert cluster.servers.asked[1][1].max_new_tokens == 2
    assert (again.tokens_sampled, again.unsaved, again.first_version, again.saved_calls) == (7, 2, 3, [])
    session.close()
    await asyncio.sleep(0)
    assert saving.cancelled()


async def test_a_call_that_is_saved_at_its_last_token_has_ended():
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    saved: list[SavedCall] = []
    session.save, session.save_every = lambda: saved.extend(session.calls_so_far()) or asyncio.create_task(nothing()), 1
    cluster.servers = Streams(at0=[[chunk(5, 6, version=3, finish="stop")]])
    await session.generate([1, 2])
    assert [(call.sampled.tokens.tolist(), call.sampled.finish) for call in saved] == [([5, 6], "stop")]


async def nothing() -> None:
    pass


async def test_the_target_of_a_move_may_be_gone():
    cluster = Cluster(generator(0), generator(1))
    _, session = session_at(cluster, generator(0))

    broken = [moved(session, generator(7), chunk(5, version=3)), StreamBrokenError("handed over")]
    cluster.servers = Streams(
        at0=[broken, [chunk(6, version=3, finish="stop")]], at1=[[chunk(6, version=3, finish="stop")]]
    )
    async with asyncio.timeout(60):
        assert (await session.generate([1, 2])).tokens.tolist() == [5, 6]


class RewardActors(Cluster):
    """Reward actors that answer as a test has written, by the reward's name; what each was asked is kept."""

    def __init__(self, **answers: list) -> None:
        super().__init__(
            *(
                Member(
                    identity=f"reward/{i}#x",
                    role="reward",
                    index=i,
                    address=f"{i}",
                    state="healthy",
                    serves=tuple(answers),
                )
                for i in range(2)
            )
        )
        self.answers, self.asked = answers, []

    async def run_job(self, member: Member, job):
        self.asked.append(job)
        answer = self.answers[job.function].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, list) else [answer]

    def session(self, reward: dict[str, float] | None = None, **settings) -> SampleSession:
        reward_settings = self.config.reward.model_copy(update=settings)
        self.services.config = self.config = self.config.model_copy(update={"reward": reward_settings})
        self.services.rewards._rules.config = reward_settings
        row = Row(0, "p", "a", reward, {"prompt": "p", "answer": "a"})
        return SampleSession(self.services, row, self.config.sampling)


@pytest.fixture
def unhurried(monkeypatch):
    monkeypatch.setattr("actors.sampling.dispatch.RETRY_SECONDS", 0)


async def test_the_score_is_the_weighted_sum_of_the_rows_rewards_and_each_is_a_part():
    cluster = RewardActors(math=[Result(1.0, {"answer": 0.5})], brief=[Result(0.25, {})])
    session = cluster.session({"math": 2.0, "brief": -1.0})
    assert await session.score("done", np.array([5, 6])) == 1.75
    assert session.reward_parts == {"math": 1.0, "brief": 0.25, "math/answer": 0.5}
    assert [(asked.completions, asked.tokens.tolist()) for asked in cluster.asked] == [(("done",), [5, 6])] * 2
    assert cluster.services.succeeded == 0  # the workflow may still raise


async def test_a_workflow_may_ask_one_reward_whose_score_is_a_part_and_no_more():
    cluster = RewardActors(judge=[Result(0.5, {"tokens": 9.0})], addition=[Result(1.0, {})])
    session = cluster.session(groups=["rank"])
    assert await session.score("draft", reward="judge") == 0.5
    assert await session.score("done") == 1.0
    assert session.reward_parts == {"judge": 0.5, "judge/tokens": 9.0}
    with pytest.raises(SampleFailed, match="'rank' scores whole groups: it cannot be asked alone"):
        await session.score("draft", reward="rank")


async def test_a_single_reward_is_the_score_and_no_part_of_it():
    cluster = RewardActors(addition=[Result(0.5, {"answer": 0.25})])
    session = cluster.session()
    assert await session.score("done") == 0.5
    assert session.reward_parts == {"addition/answer": 0.25}
    assert cluster.asked[0].tokens is None


async def test_a_sample_that_nothing_scores_fails_where_its_workflow_is_to_give_the_reward():
    cluster = RewardActors()
    settings = {"reward": {}, "rollout_manager": {"workflow": "agent", "workflow_options": {"agent_reward": True}}}
    cluster.config = Config.model_validate(cluster.config.model_dump() | settings)
    with pytest.raises(SampleFailed, match="the workflow gave no reward, and the run has none"):
        await cluster.session().score("done")


async def test_a_failure_is_told_once_a_completion_and_a_lost_actor_is_none(unhurried):
    answers = [BusyError("later"), RefusedError("KeyError"), RefusedError("KeyError"), Result(1.0, {})]
    cluster = RewardActors(addition=answers)
    assert await cluster.session(retries=2).score("done") == 1.0
    assert cluster.failures == [("reward", "reward 'addition': KeyError")]


def test_a_completion_outlives_the_time_in_which_a_dead_reward_actor_is_still_listed():
    scheduler = WorldScheduler()
    loop = FaultyLoop(scheduler, "manager", 0.0, lambda: 0.01)
    done: list[asyncio.Task] = []

    async def scored_by_the_next_actor() -> float:
        cluster = RewardActors(addition=[ConnectionLostError("refused")] * 99)
        listed = {**cluster.directory.members}
        first, second = listed.values()
        cluster.directory.update({}, [second.identity])

        def replace_the_dead() -> None:
            cluster.answers["addition"] = [Result(1.0, {})]
            cluster.directory.update({second.identity: second}, [first.identity])
            cluster.directory.changed.notify()

        loop.call_later(25.0, replace_the_dead)
        score = await cluster.session().score("done")
        assert loop.time() < 25.1, "the news of its successor ends the wait"
        return score

    loop.call_soon(lambda: done.append(loop.create_task(scored_by_the_next_actor())))
    scheduler.run(60.0)
    assert done[0].result() == 1.0


async def test_what_has_cost_too_many_workers_on_any_actor_is_asked_no_more(unhurried):
    cluster = RewardActors(addition=[HarmfulError("no score within 10 s")] * 9)
    with pytest.raises(SampleFailed, match="'addition': .*it is refused"):
        await cluster.session(retries=8).score("done")
    assert len(cluster.asked) == 3
    with pytest.raises(SampleFailed):
        await cluster.session().score("done")
    assert len(cluster.asked) == 3
    with pytest.raises(SampleFailed):
        await cluster.session(retries=0).score("another")
    assert len(cluster.asked) == 4


async def test_a_reward_that_only_a_later_actor_serves_is_waited_for(monkeypatch):
    cluster = RewardActors(addition=[], late=[Result(1.0, {})])
    members = {**cluster.directory.members}
    cluster.directory.update({}, members)
    scoring = asyncio.create_task(cluster.session({"late": 1.0}).score("done"))
    await asyncio.sleep(0)
    assert not scoring.done()
    cluster.directory.update(members, ())
    cluster.directory.changed.notify()
    assert await scoring == 1.0
    cluster.directory.update({}, members)
    monkeypatch.setattr("actors.sampling.jobs.NO_REWARD_SECONDS", 0.01)
    with pytest.raises(SampleFailed, match="no reward actor serves 'late'"):
        await cluster.session({"late": 1.0}).score("done")


async def test_all_turns_of_a_sample_share_its_tokens_and_none_is_older_than_its_group():
    cluster = Cluster(generator(0), generator(1))
    dispatch, session = session_at(cluster, generator(0))
    started = []
    session._on_start = started.append
    cluster.servers = Streams(
        at0=[[chunk(5, 6, 7, version=3, finish="stop")], [chunk(*range(7), version=5, finish="length")]]
    )
    await session.generate([1, 2])
    assert not dispatch.loads.requests, "between turns no slot is taken"
    session.min_version = 4  # the group's start is known
    await session.generate([1, 2, 5, 6, 7, 9])
    nothing = await session.generate([1])
    assert (len(nothing.tokens), nothing.finish) == (0, "length")
    (first_at, first), (second_at, second) = cluster.servers.asked
    assert (first_at, second_at) == ("0", "0"), "the prefix is there"
    assert (first.max_new_tokens, second.max_new_tokens) == (10, 7)
    assert (first.min_version, second.min_version) == (3, 4)
    assert (started, session.tokens_sampled, dict(dispatch.loads.requests)) == ([3], 10, {})


async def test_a_turn_may_have_a_limit_of_its_own():
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    cluster.servers = Streams(at0=[[chunk(5, 6, version=3, finish="length")], [chunk(7, version=3, finish="stop")]])
    assert (await session.generate([1], 2)).finish == "length"
    await session.generate([1], 20)
    assert [request.max_new_tokens for _, request in cluster.servers.asked] == [2, 8]


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda session: session.generate([[1, 2]]), r"in the shape \(1, 2\): give one row"),
        (lambda session: session.generate([1], 2.5), "cannot be interpreted as an integer"),
        (lambda session: session.score("done", np.array([[5, 6]])), "give one row"),
        (lambda session: session.score(["done"]), "takes a completion as text, not of type list"),
    ],
)
async def test_what_a_workflow_must_not_give_is_an_error_of_the_workflow(ask, sentence):
    session = RewardActors(addition=[Result(1.0, {})]).session({"addition": 1.0})
    with pytest.raises((TypeError, ValueError), match=sentence):
        await ask(session)


async def test_a_limit_may_be_a_number_of_numpy():
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    cluster.servers = Streams(at0=[[chunk(5, 6, version=3, finish="length")]])
    await session.generate([1], np.int64(2))
    ((_, request),) = cluster.servers.asked
    assert type(request.max_new_tokens) is int


async def test_a_prompt_that_cannot_be_sent_fails_its_sample():
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    cluster.servers = Streams(at0=[[MalformedError("too large")]])
    with pytest.raises(SampleFailed, match="too large"):
        await session.generate([1])


async def test_a_conversation_that_outgrows_the_model_is_cut_but_a_first_prompt_that_does_fails():
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    cluster.servers = Streams(
        at0=[[chunk(5, version=3, finish="stop")], [RefusedError("too long")], [FencedError("gone")]]
    )
    await session.generate([1])
    assert (await session.generate([1, 2])).finish == "length"
    with pytest.raises(SampleFailed):
        await session.generate([1, 2])
    _, fresh = session_at(cluster, generator(0))
    cluster.servers = Streams(at0=[[RefusedError("too long")]])
    with pytest.raises(SampleFailed):
        await fresh.generate([1])


@needs_namespaces
async def test_python_runs_in_the_sandbox_and_what_it_prints_is_told(tmp_path):
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))
    with contextlib.closing(open_sandbox(cluster.config.sandbox)) as sandbox:
        cluster.services.tools["python"] = Programs(cluster.config.sandbox, lambda config: sandbox)
        assert await session.run_python("print(6 * 7)") == "42\n"
        assert (await session.run_python("1 / 0")).rstrip().endswith("ZeroDivisionError: division by zero")
        assert "FileNotFoundError" in await session.run_python(f"open({str(tmp_path)!r})")


class Running:
    """In the place of a sandbox: programs run until they are told to end."""

    def __init__(self):
        self.running, self.begun, self.ended = set(), asyncio.Queue(), asyncio.Event()

    async def run(self, code):
        self.running.add(code)
        self.begun.put_nowait(code)
        try:
            await self.ended.wait()
        finally:
            self.running.remove(code)
        return Outcome("ok", 0, code, "")


async def test_only_so_many_programs_run_at_once_and_a_sample_that_is_cancelled_leaves_the_queue(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    cluster, programs = Cluster(generator(0)), Running()
    cluster.services.tools["python"] = Programs(cluster.config.sandbox, lambda config: programs)
    tasks = {name: asyncio.create_task(session_at(cluster, generator(0))[1].run_python(name)) for name in "abcde"}

    async with asyncio.timeout(60):
        assert {await programs.begun.get(), await programs.begun.get()} == programs.running == {"a", "b"}
        tasks["c"].cancel()
        tasks["a"].cancel()
        assert await programs.begun.get() == "d"
    assert programs.running == {"b", "d"}
    programs.ended.set()
    assert await asyncio.gather(*(tasks[name] for name in "bde")) == ["b", "d", "e"]


async def test_without_a_sandbox_the_sample_that_needs_one_fails():
    cluster = Cluster(generator(0))
    _, session = session_at(cluster, generator(0))

    def sandbox(config):
        raise UserError("namespaces are forbidden")

    cluster.services.tools["python"] = Programs(cluster.config.sandbox, sandbox)
    with pytest.raises(SandboxError, match="namespaces are forbidden"):
        await session.run_python("print(1)")


async def test_the_master_hears_of_a_workflow_that_raises_as_of_a_reward_that_does():
    async def of_the_user(session, row):
        return Trajectory([5, 6], [0.0, -0.5], [-1, 0], {"a": 1.0}[row], "stop")

    sampler = Cluster()
    _, session = session_at(sampler, generator(0))
    assert (await Sampling.run_workflow(sampler, session, of_the_user, "a")).reward == 1.0
    assert (sampler.services.succeeded, sampler.failures) == (1, [])
    with pytest.raises(SampleFailed, match="the workflow raised KeyError"):
        await Sampling.run_workflow(sampler, session, of_the_user, "b")
    assert (sampler.services.succeeded, sampler.failures) == (1, [("workflow", "the workflow raised KeyError: 'b'")])


@pytest.mark.parametrize("raised", [SystemExit(3), BaseException("of its own")])
async def test_a_workflow_that_ends_the_program_fails_its_sample_and_the_process_goes_on(raised):
    async def of_the_user(session, row):
        raise raised

    sampler = Cluster()
    _, session = session_at(sampler, generator(0))
    with pytest.raises(SampleFailed, match=f"the workflow raised {type(raised).__name__}"):
        await Sampling.run_workflow(sampler, session, of_the_user, "a")
    assert [cause for cause, _ in sampler.failures] == ["workflow"]


async def test_nor_does_it_end_the_process_from_a_task_of_its_own():
    async def ends() -> None:
        raise KeyboardInterrupt("no")

    async def of_the_user(session, row):
        asyncio.create_task(ends()).cancel()  # one that never begins
        await asyncio.create_task(ends())

    sampler = Cluster()
    _, session = session_at(sampler, generator(0))
    asyncio.get_running_loop().set_task_factory(contained_task)
    with pytest.raises(SampleFailed, match="the workflow raised RuntimeError: KeyboardInterrupt: no"):
        await asyncio.create_task(Sampling.run_workflow(sampler, session, of_the_user, "a"))


def test_a_row_of_which_no_prompt_can_be_made_is_left_to_the_workflow(monkeypatch):
    def refuse(*_):
        raise TypeError("roles must alternate")

    services, row = Cluster().services, Row(0, "1+1=", "2", None, {})
    data = {"source": "addition", "max_prompt_tokens": 2}
    services.config = Config.model_validate(services.config.model_dump() | {"data": data})
    monkeypatch.setattr(Conversation, "prompt", lambda *_: [1, 2, 3])
    assert services.too_long(row) == "the prompt has 3 tokens, and data.max_prompt_tokens is 2"
    monkeypatch.setattr(Conversation, "prompt", refuse)
    assert services.too_long(row) is None


def test_a_failure_is_reported_whatever_is_in_its_text():
    asked = []
    member = SimpleNamespace(spawn=lambda *_: None, ask_master=lambda message, _: asked.append(message))
    sampler = SimpleNamespace(services=SimpleNamespace(succeeded=0), _causes=set(), _member=member)
    Sampling.report_failure(sampler, "workflow", "no answer to '\ud83d'" + "!" * 5000)
    assert asked[0].reason == "no answer to '?'" + "!" * 4080


# --- rewards of groups


RANKED = {"functions": {"addition": 1.0, "rank": 10.0}, "groups": ["rank"]}


def group_of(cluster: RewardActors, samples: int, needed: int) -> tuple[GroupScores, list[SampleSession], list[int]]:
    """A group, its sessions, and which of them have saved their calls."""
    saved: list[int] = []
    sessions = [cluster.session(**RANKED) for _ in range(samples)]
    group = GroupScores(cluster.services.rewards, sessions[0]._row, sessions, needed)
    for place, session in enumerate(sessions):
        session.group, session.unsaved = group, 7
        session.save = lambda place=place: asyncio.ensure_future(asyncio.sleep(0, saved.append(place)))
    return group, sessions, saved


async def test_the_samples_of_a_group_are_scored_by_one_call_once_all_are_there_and_are_saved_meanwhile():
    together = [Result(0.0, {}), Result(1.0, {"why": 2.0}), Result(2.0, {})]
    cluster = RewardActors(addition=[Result(0.5, {})] * 3, rank=[together])
    _, sessions, saved = group_of(cluster, 3, needed=3)
    scores = [asyncio.create_task(sessions[place].score(f"text {place}")) for place in (2, 0)]
    await asyncio.sleep(0.01)
    assert not any(score.done() for score in scores) and sorted(saved) == [0, 2]
    assert await sessions[1].score("text 1") == 10.5
    assert await asyncio.gather(*scores) == [20.5, 0.5]
    assert [job.completions for job in cluster.asked if job.function == "rank"] == [("text 0", "text 1", "text 2")]
    assert sessions[1].reward_parts == {"rank/why": 2.0, "addition": 0.5, "rank": 1.0}
    cluster.answers["addition"].append(Result(0.5, {}))
    with pytest.raises(SampleFailed, match=r"calls session.score twice, but rank scores all samples of a group once"):
        await sessions[1].score("again")


async def test_a_group_is_scored_without_those_that_ask_for_no_score_and_those_that_come_late_are_not_in_it():
    cluster = RewardActors(addition=[Result(0.0, {})] * 4, rank=[[Result(1.0, {}), Result(2.0, {})]])
    group, sessions, _ = group_of(cluster, 4, needed=3)
    scores = [asyncio.create_task(sessions[place].score(f"text {place}")) for place in (0, 3)]
    await asyncio.sleep(0.01)
    group.finished(sessions[1])
    assert await asyncio.gather(*scores) == [10.0, 20.0]
    assert sessions[2].closed and not sessions[0].closed
    for late in (sessions[2].score("text 2"), asyncio.to_thread(group.finished, sessions[2])):
        with pytest.raises(SampleFailed, match="ended before this call"):
            await late


async def test_a_reward_of_groups_that_fails_fails_each_sample(unhurried):
    cluster = RewardActors(addition=[Result(0.0, {})] * 2, rank=[RefusedError("KeyError")] * 3)
    _, sessions, _ = group_of(cluster, 2, needed=2)
    ends = await asyncio.gather(*(session.score("text") for session in sessions), return_exceptions=True)
    assert [str(end) for end in ends] == ["reward 'rank': KeyError"] * 2 and not cluster.answers["rank"]


async def test_nothing_is_left_of_the_scoring_of_a_group_that_is_given_up():
    cluster = RewardActors(addition=[Result(0.0, {})] * 2)
    group, sessions, _ = group_of(cluster, 2, needed=2)
    asked = asyncio.Event()

    async def score(*_: object) -> list[Result]:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as a job of another actor is told to end
        raise AssertionError("unreachable")

    group._rewards = SimpleNamespace(score=score)
    scores = [asyncio.create_task(session.score("text")) for session in sessions]
    await asked.wait()
    for sample in scores:
        sample.cancel()
    await asyncio.gather(*scores, return_exceptions=True)
    await group.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_evaluation_scores_each_completion_as_a_group_of_one():
    cluster = RewardActors(addition=[Result(0.5, {})], rank=[[Result(1.0, {})]])
    assert await cluster.session(**RANKED).score("text") == 10.5


# --- a workflow's own code


@pytest.fixture
def limited():
    """A session whose workflow may be in its own code for 0.05 s."""
    cluster = RewardActors(addition=[Result(1.0, {})] * 9)
    manager = cluster.config.rollout_manager.model_copy(update={"sample_seconds": 0.05})
    cluster.config = cluster.config.model_copy(update={"rollout_manager": manager})
    return cluster.session()


async def test_a_workflow_that_waits_for_ever_fails_with_the_line_at_which_it_waits(limited):
    async def agent() -> None:
        await asyncio.Event().wait()

    with pytest.raises(
        TimeoutError, match=r"no actor of the run \(rollout_manager.sample_seconds\), in .*test_sessions"
    ):
        async with limited.own_code.limited():
            await limited.score("done")
            await agent()
    assert not limited._services.own_code


async def test_time_in_which_a_sample_waits_for_actors_of_the_run_has_no_limit(limited):
    async def slow(job: object) -> list[Result]:
        await asyncio.sleep(0.15)
        return [Result(1.0, {})]

    flow = SimpleNamespace(broken=False, run_job=slow)
    limited._services.dispatch._open_flow = lambda member, kind: flow
    async with limited.own_code.limited():
        assert await limited.score("done") == 1.0
        assert await limited.score("again") == 1.0


async def test_own_code_after_a_long_wait_for_actors_has_a_limit(limited):
    async def slow(job: object) -> list[Result]:
        await asyncio.sleep(0.08)
        return [Result(1.0, {})]

    flow = SimpleNamespace(broken=False, run_job=slow)
    limited._services.dispatch._open_flow = lambda member, kind: flow
    with pytest.raises(TimeoutError, match="sample_seconds"):
        async with limited.own_code.limited():
            await limited.score("done")
            await asyncio.Event().wait()


async def test_nor_has_the_time_in_which_it_waits_for_a_slot_for_a_command(limited, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    programs = Programs(limited._services.config.sandbox)
    held = contextlib.AsyncExitStack()
    give_back = await held.enter_async_context(programs.slot())
    asyncio.get_running_loop().call_later(0.15, give_back)
    async with limited.own_code.limited(), programs.slot():
        pass
    await held.aclose()
    async with programs.slot():  # it was not given back twice
        second = asyncio.create_task(programs.slot().__aenter__())
        await asyncio.wait([second], timeout=0)
        assert not second.done()
        second.cancel()


async def test_a_timeout_of_the_workflow_itself_is_its_own(limited):
    with pytest.raises(TimeoutError, match="the judge"):
        async with limited.own_code.limited():
            raise TimeoutError("the judge")


async def test_a_workflow_of_the_user_s_may_ask_a_scorer_for_log_probs():
    cluster = Cluster(generator(0))
    settings = {"scorers": {"wise": {"model": "m"}}, "rollout_manager": {"workflow": "mine.py:play"}}
    config = Config(**cluster.config.model_dump() | settings)
    assert config.scorer_uses.started == ["wise"]
    with pytest.raises(UserError, match="the scorer 'wise' is not used"):
        Config(**config.model_dump() | {"rollout_manager": {"workflow": "single_turn"}})

    async def scored(scorer, tokens):
        return TokenScores(np.arange(len(tokens) - 1, dtype=np.float32))

    rewards = SimpleNamespace(score_tokens=scored)
    cluster.services = replace(cluster.services, config=config, rewards=rewards)
    _, session = session_at(cluster, generator(0))
    assert (await session.logprobs("wise", [5, 6, 7])).tolist() == [0, 1]
    with pytest.raises(SampleFailed, match="no scorer 'other' gives log-probs: scorers has wise that does"):
        await session.logprobs("other", [5])
