"""What the rollout manager makes of a workflow's sample."""

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import scripted_policy
from support.small_runs import ten_steps

from actors.evaluator.evaluator import Evaluator
from actors.rollout_manager.group_run import (
    ROWS_AHEAD,
    GroupRun,
    GroupStart,
    GroupStore,
    TrainingRows,
    _Scored,
    first_scored,
)
from actors.rollout_manager.rollout_manager import RolloutManager
from actors.rollout_manager.saved_groups import SavedGroups
from actors.runtime.actor import Notifier
from actors.runtime.directory import Directory
from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Sampling
from actors.sampling.services import Services
from areal.config import Config
from areal.data.rows import Row
from areal.extensions.programs.outside import SandboxError
from areal.extensions.sandboxes.sandbox_tasks import RowError
from areal.samples.pictures import digest_of
from areal.samples.trajectory import Note, TokenScores, Trajectory
from areal.workflows.named_workflows import resolve_workflow
from protocols.bus_errors import BusyError, DeadlineError, FencedError, RefusedError
from protocols.membership_messages import Member, Policy
from protocols.messages import Permit, StoreSamples
from protocols.picture_messages import LackingPictures

PROMPT, SAMPLED = 5, 9


async def workflow(session, row):
    n = PROMPT + SAMPLED
    versions = np.repeat(np.array([-1, 0], np.int32), [PROMPT, SAMPLED])
    return Trajectory(np.zeros(n, np.int32), np.zeros(n, np.float32), versions, 1.0, "length")


async def strange(session, row):
    return replace(await workflow(session, row), reward=float("nan"))


class Episode(scripted_policy.Session):
    own_code = SimpleNamespace(limited=contextlib.nullcontext)

    def close(self) -> None:
        pass


class Session:
    """In the place of a sample's session, which these workflows do not use."""

    own_code = SimpleNamespace(limited=contextlib.nullcontext)

    def close(self) -> None:
        pass


def alone(role, overlong_tokens=0, workflow=workflow):
    """An actor of this role without a cluster around it."""
    actor = object.__new__(role)
    actor._workflow = workflow
    actor.member = SimpleNamespace()
    actor.directory = Directory(Policy(lineage=0, version=0, folder=""))
    reward = {"functions": ["addition"], "overlong_tokens": overlong_tokens}
    actor.config = ten_steps(batch_size=4, sampling={"max_new_tokens": 10}, reward=reward)
    actor.sampling = sampling = object.__new__(Sampling)
    sampling._member = actor.member
    actor.member.directory = actor.directory
    sampling.services = Services(actor.config, *[None] * 3, succeeded=1)
    sampling._causes = {"workflow"}  # was reported before
    actor._saved = SavedGroups(sampling, None)
    return actor


class Scoring:
    """In the place of the scorers: log-probs that tell whose they are, and of how many tokens."""

    async def score_tokens(self, name, tokens):
        logprobs = np.full(len(tokens) - 1, -len(name) - len(tokens) / 100, np.float32)
        likely = np.stack([tokens[1:], tokens[1:] + 1], 1)
        return TokenScores(logprobs, likely, np.stack([logprobs, logprobs - 1], 1))


@pytest.mark.parametrize(("row", "teacher"), [({}, "wise"), ({"t": None}, "wise"), ({"t": "wiser"}, "wiser")])
async def test_a_sample_to_train_gets_the_log_probs_of_the_teacher_that_its_row_names_and_of_the_reference(
    row, teacher
):
    manager = alone(RolloutManager)
    scorers = {name: {"model": "m"} for name in ("wise", "wiser", "first")}
    trainer = {"teacher": "wise", "teacher_key": "t", "kl_coef": 0.1, "reference": "scorer:first"}
    trainer |= {"teacher_top_k": 2, "teacher_coef": 0.5}
    manager.config = Config.model_validate(manager.config.model_dump() | {"scorers": scorers, "trainer": trainer})
    manager.sampling.services.rewards = scoring = Scoring()
    sample = await manager.run_workflow(Session(), Row(0, "", None, None, row))
    n = PROMPT + SAMPLED
    expected = np.where(sample.sampled, np.float32(-len(teacher) - n / 100), 0)
    np.testing.assert_array_equal(sample.teacher_logprobs, expected)
    np.testing.assert_array_equal(sample.reference_logprobs, np.where(sample.sampled, np.float32(-5 - n / 100), 0))
    np.testing.assert_array_equal(sample.teacher_top_tokens[:, 1], np.where(sample.sampled, sample.tokens + 1, 0))
    np.testing.assert_array_equal(sample.teacher_top_logprobs[:, 1], np.where(sample.sampled, expected - 1, 0))
    none = TokenScores(np.full(n - 1, np.nan, np.float32), np.zeros((n - 1, 2), np.int32), np.zeros((n - 1, 2)))
    scoring.score_tokens = lambda name, tokens: asyncio.sleep(0, none)
    with pytest.raises(SampleFailed, match=f"scorer {teacher!r}: one of the teacher_logprobs is not finite"):
        await manager.run_workflow(Session(), Row(0, "", None, None, row))
    with pytest.raises(
        SampleFailed, match=r"row 7 has t='nobody' \(trainer.teacher_key\): scorers has wise, wiser, first"
    ):
        await manager.run_workflow(Session(), Row(7, "", None, None, {"t": "nobody"}))


def run(role, overlong_tokens, workflow=workflow):
    """The sample that an actor of this role gets."""
    return asyncio.run(alone(role, overlong_tokens, workflow).run_workflow(Session(), None))


@pytest.mark.parametrize(("overlong_tokens", "reward"), [(0, 1.0), (4, 0.25), (1, 1.0)])
def test_a_sample_to_train_loses_reward_by_the_tokens_it_sampled(overlong_tokens, reward):
    assert run(RolloutManager, overlong_tokens).reward == reward


@pytest.mark.parametrize(("error", "cause"), [(SandboxError, "sandbox"), (RowError, "row")])
def test_a_sandbox_that_is_lost_fails_the_sample_and_a_row_that_nobody_can_use_is_discarded(error, cause):
    async def lost(session, row):
        raise error("it is gone")

    reports = []
    manager = alone(RolloutManager, workflow=lost)
    manager.sampling.report_failure = lambda *report: reports.append(report)
    with pytest.raises(SampleFailed, match="^it is gone$") as failure:
        asyncio.run(manager.run_workflow(Session(), None))
    assert failure.value.cause == cause and reports == [(cause, "it is gone")]


def test_the_images_of_the_next_rows_are_pulled_ahead_once_samples_run_in_containers():
    manager = alone(RolloutManager)
    source = SimpleNamespace(row=lambda index: Row(index, "", None, None, {"image": f"image-{index}"}))
    rows = TrainingRows(manager.config, source, manager.sampling.services)
    pulled = []
    sandboxes = manager.sampling.services.tools["sandboxes"]
    rows.prepare_ahead(3)
    sandboxes._swept["docker"] = None
    sandboxes._pull = lambda provider, task: pulled.append(task.image)
    rows.prepare_ahead(3)
    assert pulled == [f"image-{index}" for index in range(4, 4 + ROWS_AHEAD)]


@pytest.mark.parametrize("role", [RolloutManager, Evaluator])
def test_a_sample_that_could_not_travel_has_failed_and_ends_no_actor(role):
    async def unsampled(session, row):
        return replace(await workflow(session, row), versions=np.full(PROMPT + SAMPLED, -1))

    async def forgetful(session, row):
        await workflow(session, row)

    with pytest.raises(SampleFailed, match="a reward of nan is no score"):
        run(role, 0, strange)
    for returned in (unsampled, forgetful):
        with pytest.raises(SampleFailed, match="it has returned no Trajectory with sampled tokens"):
            run(role, 0, returned)


def test_evaluation_scores_the_same_sample_as_it_is():
    assert run(Evaluator, 4).reward == 1.0


class Gate:
    """An environment. Every second one waits in its step until the gate is open."""

    opened: asyncio.Event

    async def reset(self, row):
        self.waits = row.index % 2
        return "go"

    async def step(self, action):
        if self.waits:
            await self.opened.wait()
        return "", 1.0, True


async def test_of_256_episodes_of_a_manager_the_slow_ones_hold_no_other_up():
    Gate.opened = asyncio.Event()
    manager = alone(RolloutManager, workflow=resolve_workflow("environment", {"environment": f"{__name__}:Gate"}))
    rows = [Row(i, "", None, None, {}) for i in range(256)]
    episodes = [asyncio.create_task(manager.run_workflow(Episode("x"), row)) for row in rows]
    await asyncio.gather(*episodes[::2])
    assert not any(episode.done() for episode in episodes[1::2])
    Gate.opened.set()
    assert sum(done.reward for done in await asyncio.gather(*episodes)) == 256


async def sample(name: str, turns: int, ended: list[str]):
    """One that ends after so many turns of the event loop; a name in capitals fails."""
    try:
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(name)
        return SampleFailed("reward", name) if name.isupper() else name
    except asyncio.CancelledError:
        ended.append(f"{name} stopped")
        raise


def scored_of(names: str) -> tuple[tuple[str, ...], list[str]]:
    """What becomes of samples that end in this order, in a group of 2 and more."""
    ended: list[str] = []
    work = [sample(name, 50 * i, ended) for i, name in enumerate(names)]
    stored: list[str] = []
    scored = asyncio.run(first_scored(work, 2, stored.append))
    assert stored == scored[:-1]  # at once, and the last one when the others are stopped
    return scored, ended


def test_a_group_is_complete_with_the_first_that_are_scored_and_the_others_are_stopped():
    assert scored_of("abcd") == (["a", "b"], ["a", "b", "c stopped", "d stopped"])


def test_a_failed_sample_fails_no_group_of_which_enough_are_left():
    assert scored_of("XaYb") == (["a", "b"], ["X", "a", "Y", "b"])


@pytest.mark.parametrize("names", ["Xa", "XYa", "aXYZ"])
def test_a_group_of_which_too_few_are_left_fails(names):
    with pytest.raises(SampleFailed):
        scored_of(names)


def test_a_start_version_is_known_once_all_that_may_count_have_begun():
    told: list[int] = []
    start = GroupStart(4, None, told.append)
    start.count(5)
    start.count()
    start.count(4)
    assert not told
    start.count(6)
    assert told == [4]


@pytest.mark.parametrize("again", [BusyError, FencedError, DeadlineError])
def test_a_group_that_the_trainer_refuses_has_failed_and_what_it_does_not_take_now_comes_again(again, monkeypatch):
    monkeypatch.setattr("protocols.transport.AGAIN_SECONDS", 0)
    answers = [again("not now"), RefusedError("a token is outside the model's vocabulary")]
    trainer = Member(identity="trainer/0#a", role="trainer", index=0, address="", state="healthy")

    async def ask(*_):
        raise answers.pop(0)

    async def store():
        actor = alone(RolloutManager)
        actor.directory.update({trainer.identity: trainer}, ())
        actor.member.ask = ask
        return await GroupStore(actor.sampling, permit, Row(0, "", "", None, {})).send([scored])

    scored = _Scored(0, asyncio.run(workflow(None, None)), Note(discarded=4))
    permit = Permit(group="g0.0", prompt_index=0, row=0, min_version=0)
    refusal = asyncio.run(store())
    assert str(refusal) == "a token is outside the model's vocabulary" and not answers
    assert scored.tokens_sampled == SAMPLED + 4


async def test_the_trainer_gets_the_pictures_of_samples_that_it_lacks():
    sent = []

    async def ask(request, answer):
        sent.append(request)
        return LackingPictures(names=(digest_of(b"new"),))

    manager = alone(RolloutManager)
    manager.sampling.ask_trainer = ask
    plain, files = await workflow(None, None), {digest_of(content): content for content in (b"old", b"new", b"unseen")}
    digests = np.array([[*bytes.fromhex(name)] for name in files], np.uint8)
    pictured = replace(plain, pictures=digests[[0, 0, 1, *[0] * (len(plain) - 3)]])
    permit, row = Permit(group="g0.0", prompt_index=0, row=0, min_version=0), Row(0, "", "", None, {"answer": 1})
    group = GroupStore(manager.sampling, permit, row)
    await group.send([_Scored(0, pictured, Note(), files), _Scored(1, pictured, Note(), files)])
    await group.send([_Scored(0, plain, Note(), files)])
    offer, store, *samples = sent
    assert offer.names == (digest_of(b"old"), digest_of(b"new"))
    assert [content.tobytes() for content in store.files] == [b"new"]
    assert [type(request) for request in samples] == [StoreSamples] * 2


async def test_a_group_of_which_the_trainer_refuses_a_sample_has_failed_with_all_tokens_of_its_samples():
    async def counted(session, row):
        session.tokens_sampled = SAMPLED + 4
        return await workflow(session, row)

    async def choose(*_, **__):
        return None

    async def refuse(*_):
        raise RefusedError("a token is outside the model's vocabulary")

    manager = alone(RolloutManager, workflow=counted)
    source = SimpleNamespace(row=lambda index: Row(index, "", "", None, {}))
    loads = SimpleNamespace(slot_at=lambda home: None, room=Notifier())
    manager.sampling.dispatch = SimpleNamespace(choose=choose, loads=loads)
    manager.sampling.ask_trainer = refuse
    reports = []

    async def report(message, answer):
        reports.append(message)

    manager.member.ask_master = report
    manager.member.config = manager.config
    rows = TrainingRows(manager.config, source, manager.sampling.services)
    permit = Permit(group="g0.0", prompt_index=0, row=0, min_version=0)
    await GroupRun(permit, manager.member, manager.sampling, rows, manager._saved, manager.run_workflow).run()
    (failed,) = reports
    assert "the trainer refused the group: a token is outside" in failed.reason
    assert (failed.cause, failed.discarded) == ("trainer", 2 * (SAMPLED + 4))


async def test_samples_that_are_scored_soon_after_each_other_are_stored_with_one_request(monkeypatch):
    requests, timer = [], Notifier()

    async def send(self, scored):
        requests.append(list(scored))
        timer.notify()

    monkeypatch.setattr("actors.rollout_manager.group_run.STORE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(GroupStore, "send", send)
    group = GroupStore(None, None, None)
    group.add("first")
    group.add("second")
    assert requests == []
    await asyncio.wait_for(timer.until(lambda: requests), 10)
    group.add("last")
    await asyncio.gather(*group.flush())
    assert requests == [["first", "second"], ["last"]]
    group.add("unused")
    group.cancel()
    await asyncio.sleep(0)
    assert len(requests) == 2
