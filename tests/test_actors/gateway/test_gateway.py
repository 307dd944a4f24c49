"""The gateway: real HTTP, the real ledger and the master's real answers, a policy that says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import sqlite3
import ssl
import threading
import time
from contextlib import AsyncExitStack
from hashlib import sha256
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from fakes.scripted_policy import END, byte_tokenizer
from support.small_runs import ten_steps

from actors.gateway.gateway import Gateway
from actors.gateway.keys import LastMinute
from actors.gateway.ledger_sessions import LedgerSessions
from actors.gateway.session_links import NOT_STORED
from actors.gateway.session_requests import SessionRequests
from actors.gateway.user_sessions import UserReward
from actors.master.accounts import KeyRecords
from actors.master.changes import Rewarded, Stepped
from actors.master.run_state import RunState
from actors.runtime.directory import Directory
from actors.sampling.dispatch import Dispatch
from actors.sampling.jobs import Call, SampleFailed, ended
from actors.sampling.sampling import Sampling
from actors.trainer.sample_store import SampleStore
from areal.base.errors import UserError
from areal.config import Config
from areal.extensions.agents import openai_api, openai_endpoint
from areal.extensions.agents.parsers import Parsed, Parsers
from areal.extensions.prometheus.prometheus import Numbers
from areal.rewards.functions import Result
from areal.samples.table import Generation
from areal.samples.trajectory import Group, Note, Trajectory
from areal.staleness.ledger_state import EXPIRED, Batch, GroupState
from areal.storage.journal import Journal
from areal.storage.saved_calls import NO_LIMIT, SavedCall, notes_of, packed
from areal.storage.spool import Spool
from protocols.attempt_messages import AskCalls, LostLeases, RenewLeases, StoreCalls, StoredCalls, StoredSamples
from protocols.bus_errors import BusyError, FencedError, RefusedError
from protocols.membership_messages import Member, Policy
from protocols.messages import GroupAccepted, GroupStarted, ScoredSample, StoreSamples
from protocols.session_messages import AskSession, DiscardSession, SessionAnswer, SessionDiscarded
from protocols.training_messages import AskLogprobs, Logprobs

STEPPED = "step_seconds", "starved_seconds", "groups_left_over"

COUNTS = "opened", "rewarded", "expired", "deleted", "refused", "untrained", "adopted"
USER, JUDGE, EXAMINER = "user's key", "judge's key", "examiner's key"
TOKENIZER = byte_tokenizer()


def make_config(**gateway) -> Config:
    keys = {
        "anna": {"sha256": sha256(USER.encode()).hexdigest()},
        "judge": {"sha256": sha256(JUDGE.encode()).hexdigest(), "rights": ["reward_all"]},
        "examiner": {"sha256": sha256(EXAMINER.encode()).hexdigest(), "train": False},
    }
    gateway = {"keys": keys, "share": 1} | gateway
    trainer = {"minibatches": 1, "advantage_mean": "batch"}
    sampling = {"max_new_tokens": 64}
    return ten_steps(steps=4, group_size=4, max_staleness=1, sampling=sampling, trainer=trainer, gateway=gateway)


class City:
    """The master and the trainer around gateways."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = RunState(config, Journal(sqlite3.connect(":memory:")))
        self.ledger = self.state.ledger
        self.spool = Spool(sqlite3.connect(":memory:"))
        self.trained: dict[str, Trajectory] = {}
        self.now = 0.0
        self.says: list[str | None] = []
        self.prompts: list[str] = []
        self.salts: list[str] = []
        self.temperatures: list[float] = []
        self.seeds: list[int | None] = []
        self.samples: dict[str, StoreSamples] = {}
        self.aborted = asyncio.Event()  # the calls that nothing answers
        self.reports = True  # whether the master hears of samples
        self.served = SimpleNamespace(version=None)  # the version that users get, if it is not the newest
        self.directory = Directory(Policy(lineage=0, version=0, folder=""))
        run = SimpleNamespace(
            evaluations=self,
            ledger=self.ledger,
            state=self.state,
            config=config,
            now=lambda: self.now,
            changed=SimpleNamespace(notify=lambda: None),
            member=lambda request, *roles: SimpleNamespace(identity=request.sender),
            admission=SimpleNamespace(free_sessions=lambda: self.ledger.state.room.for_sessions),
            meter=SimpleNamespace(begin=lambda: None, keys=KeyRecords()),
        )
        self._requests = SessionRequests(run)

    async def ask_master(self, sender: str, message, answer, park=0.0):
        if isinstance(message, GroupStarted):
            return self.ledger.started(message.group, sender, message.start_version)
        if isinstance(message, RenewLeases):
            return LostLeases(groups=tuple(self.ledger.leases.renew(sender, message.groups, self.now, 60.0)))
        return await self._requests.dispatch(SimpleNamespace(sender=sender, message=message))

    async def ask_generator(self, address: str, message: AskLogprobs, answer, timeout: float) -> Logprobs:
        """Each token is as likely as its place says; the likeliest is `x`."""
        places, x = np.arange(1, len(message.tokens), dtype=np.float32), TOKENIZER.encode("x")[0]
        likeliest = np.full(len(places) * message.top_k, x, np.int32)
        columns = {"top_tokens": likeliest, "top_logprobs": np.zeros(len(likeliest), np.float32)}
        return Logprobs(version=5, logprobs=-places, **columns)

    async def ask_trainer(self, message, answer):
        if isinstance(message, StoreCalls):
            return self.spool.unfinished.put(message.group, 0, message.prompt_index, message.frame.data, message.number)
        if answer is StoredCalls:
            return StoredCalls(frame=np.frombuffer(self.spool.unfinished.calls(message.group, 0), np.uint8))
        if answer is StoredSamples:
            stored = self.samples.get(message.group)
            if stored:
                self._report(stored)
            return StoredSamples(places=(0,) if stored else (), start_version=0 if stored else None)
        stored = self.samples.setdefault(message.group, message)
        self.spool.forget([message.group])
        if not self.reports:
            await asyncio.Event().wait()
        return GroupAccepted(accepted=self._report(stored))

    def _report(self, stored: StoreSamples) -> bool:
        (sample,) = stored.samples
        trajectory = Trajectory.of_frame(sample.frame.data)
        trajectory.validate()
        report = self.ledger.ready(stored.group, trajectory.start_version, signal=False)
        if report == "accepted":
            self.trained[stored.group] = trajectory
            numbers = {"row": -1, "version": 0, "mean": trajectory.reward, "spread": 0.0, "tokens": 1, "discarded": 0}
            marks = {"marks": sample.marks, "gave": sample.gave}
            self.state.emit(Rewarded(group=stored.group, signal=False, parts={}, **marks, **numbers))
        return report in ("accepted", "unchanged")

    def train(self) -> None:
        version = self.ledger.version
        batch = self.ledger.next_batch(version)
        assert isinstance(batch, Batch)
        self.ledger.commit(version)
        self.state.emit(Stepped(metrics=dict.fromkeys(STEPPED, 0.0), groups=batch.group_ids))

    async def run(self, job) -> Generation:
        return await self.sample(job)

    async def sample(self, call) -> Generation:
        self.prompts.append(TOKENIZER.decode(call.tokens))
        request = Call.request(0, [call]).sequences[0]
        self.salts.append(request.cache_salt)
        self.seeds.append(request.seed)
        self.temperatures.append(call.sample.sampling.temperature)
        text = self.says.pop(0)
        if text is None:
            await self.aborted.wait()
            raise ended()
        tokens = TOKENIZER.encode(text + END, add_special_tokens=False)
        n, version = len(tokens), self.ledger.version if self.served.version is None else self.served.version
        columns = np.array(tokens, np.int32), np.full(n, -0.5, np.float32), np.full(n, version, np.int32)
        return call.add(Generation(*columns, None), "stop")

    @contextlib.asynccontextmanager
    async def gateway(self, index: int = 0):
        """A gateway, until the end of the block; then it is lost, and the master has noticed."""
        name, tasks = f"gateway/{index}#{index}", set()

        def spawn(work, what):
            tasks.add(task := asyncio.get_running_loop().create_task(work))
            return task

        async with AsyncExitStack() as used:
            member = SimpleNamespace(
                config=self.config,
                directory=self.directory,
                kind=Gateway,
                index=index,
                bus=None,
                state="healthy",
                spawn=spawn,
                used=used,
                ask=self.ask_generator,
                become_healthy=lambda: asyncio.sleep(0),
                ask_master=lambda *parts: self.ask_master(name, *parts),
            )
            sampling = Sampling(member, TOKENIZER, self.config.gateway.serve == "evaluated")
            sampling.services.dispatch = self
            sampling.ask_trainer = self.ask_trainer
            gateway = Gateway(member, sampling)
            await gateway.main()
            port = await gateway._endpoint.listen()
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                yield Client(http, gateway)
            for task in tasks:
                task.cancel()
        self.ledger.leases.release(name)


class Client:
    def __init__(self, http: aiohttp.ClientSession, gateway: Gateway) -> None:
        self.http, self.gateway = http, gateway

    async def ask(self, path: str, body=None, key: str = USER, method: str = "POST", **headers: str):
        """The status, the body and the headers of an answer."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()} | {
            "Authorization": f"Bearer {key}"
        }
        async with self.http.request(method, f"/v1/{path}", json=body, headers=headers) as answer:
            data = await (answer.json() if answer.content_type == "application/json" else answer.text())
            return answer.status, data, answer.headers

    async def say(self, *texts: str, session: str = "s", stream: bool = False, **headers: str):
        """The texts are user, assistant, user, ... of one conversation."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        body = {"model": "m", "messages": messages, "stream": stream}
        return await self.ask("chat/completions", body, X_Session_Id=session, **headers)

    async def reward(self, value, session: str = "s", key: str = JUDGE, **more):
        name = f"anna:{session}" if key == JUDGE else session
        return (await self.ask(f"sessions/{name}/reward", {"reward": value, **more}, key))[:2]


def text_of(answer) -> str:
    return answer[1]["choices"][0]["message"]["content"]


@pytest.fixture
def city() -> City:
    return City(make_config())


async def test_a_conversation_is_one_sample_with_the_reward_that_came_and_is_trained(city):
    city.says = ["hello", "fine"]
    async with city.gateway() as user:
        status, _, headers = first = await user.say("hi")
        assert (status, text_of(first), headers["X-Areal-Version"], headers["X-Areal-Trained"]) == (
            200,
            "hello",
            "0",
            "yes",
        )
        assert headers["X-Session-Id"] == "anna:s"
        status, events, _ = await user.say("hi", "hello", "how are you?", stream=True)
        assert status == 200 and events.rstrip().endswith("data: [DONE]") and '"fine"' in events
        assert (await user.reward({"useful": 0.75, "kind": 0.25}))[1] == {
            "id": "anna:s",
            "state": "ready",
            "changed": True,
        }
        assert (await user.reward(-1))[1] == {"id": "anna:s", "state": "ready", "changed": False}, "a repeat"
    (sample,) = city.trained.values()
    sampled = TOKENIZER.decode(sample.tokens[sample.sampled])
    assert (sample.reward, sampled, sample.branches) == (1.0, f"hello{END}fine{END}", ())
    assert city.ledger.state.groups.count(GroupState.READY) == 1


async def test_the_version_of_an_answer_is_that_of_its_first_token_streamed_or_not_and_also_of_its_repeat(city):
    city.says = ["hello", "fine"]
    versions = iter([0, 1, 0, 1])

    async def sample(call):
        tokens = TOKENIZER.encode(city.says.pop(0) + END, add_special_tokens=False)
        for part in (tokens[:1], tokens[1:]):
            columns = (np.array(part, np.int32), np.full(len(part), -0.5, np.float32))
            version = np.full(len(part), next(versions), np.int32)
            done = call.add(Generation(*columns, version, None), None if len(part) == 1 else "stop")
        return done

    city.sample = sample
    async with city.gateway() as user:
        answers = [await user.say("hi", Idempotency_Key="1") for _ in "12"]
        answers.append(await user.say("hi", "hello", "how?", stream=True))
        assert [headers["X-Areal-Version"] for _, _, headers in answers] == ["0"] * 3


async def test_one_id_of_calls_with_two_questions_is_refused_here_and_at_the_next_gateway(city):
    city.says = ["hello"]
    for index in range(2):
        async with city.gateway(index) as user:
            question = {"role": "user", "content": "hi", "name": "Anna"}
            body = {"model": "m", "messages": [question]}
            headers = {"X_Session_Id": "s", "Idempotency_Key": "1"}
            assert text_of(await user.ask("chat/completions", body, **headers)) == "hello"
            status, body, _ = await user.say("who are you?", Idempotency_Key="1")
            assert (status, body["error"]["code"]) == (409, "id_in_use")


@pytest.mark.parametrize("end", ["it expires", "its reward comes", "it is deleted"])
async def test_a_call_that_was_answered_is_not_answered_otherwise_once_its_session_has_ended(city, end):
    city.says = ["hello", "another answer"]
    async with city.gateway() as user:
        await user.say("hi", Idempotency_Key="1")
        if end == "it expires":
            await user.gateway.sessions.table.discard(user.gateway.sessions.table.sessions["anna:s"], "expired")
        elif end == "its reward comes":
            await user.reward(1)
        else:
            await user.ask("sessions/s", method="DELETE")
        status, body, _ = await user.say("hi", Idempotency_Key="1")
        assert (status, body["error"]["code"]) == (409, "session_over")
        assert city.ledger.state.prompts.next_session == 1, "none is opened for it"
        assert text_of(await user.say("hi", Idempotency_Key="2")) == "another answer"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(FencedError("another gateway has this place"), id="fenced"),
        pytest.param(BusyError("this actor is ending"), id="ending"),
    ],
)
async def test_a_gateway_that_is_no_part_of_the_run_any_more_says_so_in_the_form_of_the_api(city, error, caplog):
    city.says = ["hello", "fine"]

    async def away(*question):
        raise error

    async with city.gateway() as user:
        await user.say("hi")
        ask_trainer, ask_master = user.gateway.sampling.ask_trainer, city.ask_master
        user.gateway.sampling.ask_trainer = city.ask_master = away
        answers = [
            await user.say("hi", session="new"),
            await user.say("hi", "hello", "how?"),
            await user.reward(1),
            await user.reward(1, session="other", id="a"),
            await user.ask("sessions/other", method="GET"),
            await user.ask("sessions/s/end", {}),
            await user.ask("sessions/s", method="DELETE"),
        ]
        user.gateway.sampling.ask_trainer, city.ask_master = ask_trainer, ask_master
    assert [(status, body["error"]["code"]) for status, body, *_ in answers] == [(503, "unavailable")] * 7
    assert not caplog.records, "nothing of it is an error of the server"


@pytest.mark.parametrize("expires", [True, False])
async def test_a_session_without_a_call_is_gone_if_it_has_expired_and_else_has_nothing_to_be_rewarded(city, expires):
    group = LedgerSessions(city.ledger.state).open("anna:s", "gateway/9#9", 0.0, 60.0)
    city.ledger.leases.release("gateway/9#9")
    async with city.gateway() as user:
        await user.gateway.sessions.table.renew()
        while not user.gateway.sessions.table.sessions:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        if expires:
            city.ledger.discard(group.group_id, EXPIRED)
        status, body = await user.reward(1)
    if expires:
        assert (status, body) == (200, {"id": "anna:s", "state": "gone", "changed": False})
    else:
        assert (status, body["error"]["code"]) == (400, "no_calls")


async def test_a_reward_in_progress_when_its_gateway_ends_is_told_so_in_the_form_of_the_api(city):
    city.says, city.reports = ["hello"], False
    async with city.gateway() as user:
        await user.say("hi")
        reward = asyncio.create_task(user.reward(1))
        while not city.samples:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        await user.gateway.sessions.close()
        status, body = await reward
    assert (status, body["error"]["code"]) == (503, "unavailable")


async def test_a_call_that_its_gateway_ends_can_be_asked_again(city):
    city.says = [None]
    async with city.gateway() as user:
        call = asyncio.create_task(user.say("hi"))
        while city.says:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        session = user.gateway.sessions.table.sessions["anna:s"]
        session.sample.close()
        city.aborted.set()
        status, body, _ = await call
    assert (status, body["error"]["code"]) == (409, "elsewhere")


async def test_a_session_of_the_same_name_after_the_reward_is_another_sample_with_a_reward_of_its_own(city):
    city.says = ["hello", "fine", "bye"]
    async with city.gateway() as user:
        await user.say("hi")
        await user.reward(1)
        await user.say("hi", "hello", "how are you?")
        assert (await user.ask("sessions/s", method="GET"))[1]["state"] == "open"
        await user.say("hi", "hello", "how are you?", "fine", "bye")
        await user.reward(-1)
    first, second = city.trained.values()
    assert (first.reward, second.reward) == (1, -1)
    assert TOKENIZER.decode(second.tokens[second.sampled]) == f"fine{END}bye{END}", "no token is trained twice"


async def test_who_may_do_what(city):
    city.says = ["hello"]
    async with city.gateway() as user:
        assert (await user.say("hi"))[0] == 200
        assert (await user.ask("chat/completions", {}, key="guess"))[0] == 401
        assert (await user.ask("chat/completions", {}, key=JUDGE))[0] == 403
        status, body = await user.reward(1, key=USER)
        assert status == 403 and "gateway.keys.anna.rights" in body["error"]["message"]
        assert (await user.reward(2))[0] == 400, "out of the range"
        assert (await user.ask("sessions/judge:s", method="GET"))[0] == 404
        status, access, _ = await user.ask("sessions", {"id": "mine"})
        assert (status, access["id"]) == (200, "anna:mine")
        assert (await user.ask("sessions/s", key=access["api_key"], method="GET"))[0] == 404, (
            "the key is for one session"
        )
        city.says = ["again"]
        status, _, headers = await user.ask(
            "chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, access["api_key"]
        )
        assert (status, headers["X-Session-Id"]) == (200, "anna:mine")


async def test_a_call_with_the_same_id_is_answered_once_and_again_by_another_gateway(city):
    city.says = ["hello", "fine", "never"]
    async with city.gateway(0) as user:
        first = await user.say("hi", Idempotency_Key="1")
        again = await user.say("hi", Idempotency_Key="1")
        assert text_of(first) == text_of(again) == "hello" and len(city.prompts) == 1
        assert notes_of(city.spool.unfinished.calls("s0.0", 0)), "it is stored before it is answered"
    async with city.gateway(1) as user:
        assert text_of(await user.say("hi", Idempotency_Key="1")) == "hello" and len(city.prompts) == 1
        assert text_of(await user.say("hi", "hello", "how?", Idempotency_Key="2")) == "fine"
        assert (await user.reward(1, call=first[1]["id"]))[1]["changed"]
    async with city.gateway(2) as user:
        assert (await user.ask("sessions/s/end", {}))[1]["state"] == "ready", (
            "the reward of a call has outlived its gateway"
        )
    (sample,) = city.trained.values()
    assert TOKENIZER.decode(sample.tokens[sample.sampled]) == f"hello{END}fine{END}" and sample.reward == 1
    assert city.ledger.state.counters.admitted == 1


async def test_a_retry_of_an_official_client_gets_the_same_answer_and_a_question_asked_twice_another(city):
    city.says = ["hello", "hi there"]
    async with city.gateway() as user:
        answers = [await user.say("hi", X_Stainless_Retry_Count=count) for count in ("0", "1", "0", "2")]
    assert [text_of(answer) for answer in answers] == ["hello", "hello", "hi there", "hi there"]


async def test_a_call_whose_client_is_gone_goes_on_for_its_retry(city):
    city.says = [None, "hello"]
    async with city.gateway() as user:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await user.say("hi", Idempotency_Key="1")
        retry = asyncio.create_task(user.say("hi", Idempotency_Key="1"))
        done, _ = await asyncio.wait([retry], timeout=0.2)
        assert not done and city.says == ["hello"], "it waits for the first one"
        retry.cancel()


async def test_a_session_that_expires_in_the_ledger_is_served_on_and_not_trained(city):
    city.says = ["hello", "bye"]
    async with city.gateway() as user:
        await user.say("hi")
        for _ in range(2):  # others fill the steps until its deadline
            for _ in range(2):
                group = LedgerSessions(city.ledger.state).open("other", "gateway/9#9", 0.0, 60.0)
                city.ledger.ready(group.group_id, city.ledger.version)
            assert isinstance(city.ledger.next_batch(city.ledger.version), Batch)
            city.ledger.commit(city.ledger.version)
        assert city.ledger.state.counters.discarded == {EXPIRED: 1}
        status, body = await user.reward(1)
        assert (status, body["state"], body["changed"]) == (200, "gone", False)
    assert city.trained == {}


@pytest.mark.parametrize("choice", ["serve", "wait"])
async def test_without_a_permit_a_session_is_served_and_not_trained_or_has_to_wait(choice):
    city = City(make_config(without_permit=choice))
    city.says = [f"answer {i}" for i in range(9)]
    async with city.gateway() as user:
        answers = [await user.say("hi", session=f"s{i}") for i in range(5)]
        status, body, headers = answers[-1]
        assert [answer[0] for answer in answers[:4]] == [200] * 4
        if choice == "serve":
            assert (status, headers["X-Areal-Trained"]) == (200, "no")
            assert (await user.reward(1, session="s4"))[1] == {
                "id": "anna:s4",
                "state": "untrained",
                "version": 0,
                "tokens": 9,
                "changed": False,
            }
        else:
            assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "no_permit", "5")


async def test_deleted_and_opted_out_sessions_are_not_trained(city):
    city.says = ["hello"] * 4
    async with city.gateway() as user:
        await user.say("hi", session="a")
        await user.reward(1, session="a")
        assert (await user.ask("sessions/a", method="DELETE"))[0] == 200
        await user.say("hi", session="b")
        answer = await user.say("hi", session="b", X_Areal_Train="no")
        assert answer[2]["X-Areal-Trained"] == "no"
    assert city.ledger.state.counters.discarded == {"deleted": 1, "opted out": 1} and len(city.ledger.state.groups) == 0


async def test_the_answer_to_a_deletion_says_what_is_deleted_and_which_steps_have_trained_earlier_sessions(city):
    city.says = ["hello"] * 4
    async with city.gateway() as user:
        for name in "ab":
            await user.say("hi", session=name)
            await user.reward(1, session=name)
        city.train()
        trained = {"id": "anna:a", "state": "trained", "deleted": 0, "trained_in": [1]}
        assert (await user.ask("sessions/a", method="DELETE"))[1] == trained
        await user.say("hi", session="a")
        assert (await user.ask("sessions/a", method="DELETE"))[1] == trained | {"deleted": 1}, "the later one is not"
        await user.say("hi", session="c", X_Areal_Train="no")
        for count, state in ((1, "deleted"), (0, "gone")):
            deleted = {"id": "anna:c", "state": state, "deleted": count, "trained_in": []}
            assert (await user.ask("sessions/c", method="DELETE"))[1] == deleted
    assert city.ledger.state.counters.discarded == {"deleted": 1}


async def test_a_session_is_deleted_where_it_goes_on_and_nowhere_else(city):
    city.says = ["hello"] * 2
    async with city.gateway(0) as user, city.gateway(1) as other:
        await user.say("hi")
        status, body, _ = await other.ask("sessions/s", method="DELETE")
        assert (status, body["error"]["code"]) == (409, "elsewhere")
        assert (await user.say("hi", "hello", "how?"))[2]["X-Areal-Trained"] == "yes"
        assert (await user.ask("sessions/s", method="DELETE"))[1]["deleted"] == 1


async def test_a_session_in_the_batch_cannot_be_deleted_any_more(city):
    city.says = ["hello"] * 2
    async with city.gateway() as user:
        for name in "ab":
            await user.say("hi", session=name)
            await user.reward(1, session=name)
        city.ledger.next_batch(0)
        status, body, _ = await user.ask("sessions/a", method="DELETE")
        assert status == 409 and "in the batch that is trained now" in body["error"]["message"]
        assert user.gateway.sessions.table.counts["deleted"] == 0


async def test_the_sessions_of_a_key_share_their_prefixes_with_no_other_key():
    keys = {name: {"sha256": sha256(key.encode()).hexdigest()} for name, key in (("anna", USER), ("bert", JUDGE))}
    city = City(make_config(keys=keys))
    city.says = ["hello"] * 3
    async with city.gateway() as user:
        for key in (USER, USER, JUDGE):
            own = (await user.ask("sessions", {}, key))[1]["api_key"]
            await user.ask("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, own)
    assert city.salts == ["anna", "anna", "bert"]


async def test_users_get_the_evaluated_version_which_bounds_how_old_their_sessions_are_and_else_none():
    config = make_config()
    gateway = config.gateway.model_copy(update={"serve": "evaluated"})
    city = City(config.model_copy(update={"max_staleness": 3, "gateway": gateway}))
    city.says = ["hello"] * 6
    async with city.gateway() as user:
        status, body, _ = await user.say("hi")
        assert (status, body["error"]["code"]) == (503, "no_version") and not city.ledger.state.prompts.next_session
        city.directory.update({"generator/0#1": generator(0, serving=True)}, ())
        for i in range(4):
            city.served.version = 0
            _, _, headers = await user.say("hi", session=f"s{i}")
            assert headers["X-Areal-Version"] == "0" and headers["X-Areal-Trained"] == "yes"
            await user.reward(1, session=f"s{i}")
            if i % 2:
                city.train()
        assert city.ledger.version == 2
        _, _, headers = await user.say("hi", session="last")
        assert (headers["X-Areal-Version"], headers["X-Areal-Trained"]) == ("0", "yes")
        (group,) = city.ledger.state.groups.of_session("anna:last")
        assert (group.start_version, group.deadline) == (0, 3)
        city.served.version = 2
        _, _, headers = await user.say("hi", session="new")
        assert city.ledger.state.groups.of_session("anna:new")[0].admission_version == 2


@pytest.mark.parametrize("sentence", ["set evaluator.every", "lower gateway.share", "set generator.count"])
def test_what_evaluated_versions_need_is_said_before_a_run(sentence):
    values = make_config().model_dump() | {"generator": {"count": 2}, "evaluator": {"every": 2}}
    values["data"]["eval_size"], values["data"]["source"] = 4, "addition"
    values["gateway"] |= {"serve": "evaluated", "share": 0}
    Config(**values)
    section, key = sentence.split()[1].split(".")
    values[section] |= {key: 1 if key == "share" else 0 if key == "every" else 1}
    with pytest.raises(UserError, match=sentence):
        Config(**values)


def generator(index: int, **more) -> Member:
    held = Policy(lineage=0, version=0, folder="") if more.get("serving") else None
    more |= {"role": "generator", "address": "tcp://a:1", "state": "healthy", "held": held}
    return Member(identity=f"generator/{index}#1", index=index, **more)


async def test_a_generator_that_serves_users_gets_their_calls_alone_and_they_follow_it():
    server, other = generator(0, serving=True), generator(1)
    directory = Directory(Policy(lineage=0, version=3, folder=""), [server, other])
    rows, users = (Dispatch(directory, "gateway", 0, 8, lambda member: None, None, users) for users in (False, True))
    assert await users.choose("generator") == server and await rows.choose("generator", min_version=1) == other
    directory.update({}, [other.identity])
    waiting = asyncio.create_task(rows.choose("generator", min_version=1))
    opened_later = asyncio.create_task(users.choose("generator", min_version=3))
    done, _ = await asyncio.wait([waiting, opened_later], timeout=0.05)
    assert not done, "they would wait there for weights that do not come"
    newer = other.model_copy(update={"serving": True, "held": Policy(lineage=0, version=3, folder="")})
    directory.update({other.identity: newer, server.identity: generator(0)}, ())
    directory.changed.notify()
    assert users.avoids(server) and not rows.avoids(server)
    assert (await waiting).identity == server.identity and await opened_later == await users.choose(
        "generator"
    ) == newer


async def test_quotas_of_a_key(city):
    keys = {"anna": {"sha256": sha256(USER.encode()).hexdigest(), "calls_per_minute": 3, "sessions": 2}}
    city = City(make_config(keys=keys))
    city.says = ["hello"] * 9
    async with city.gateway() as user:
        answers = [await user.say("hi", session=name) for name in "abcd"]
        assert [answer[0] for answer in answers] == [200, 200, 429, 429]
        assert [answer[1]["error"]["code"] for answer in answers[2:]] == ["too_many_sessions", "rate_limit_exceeded"]
        assert (await user.ask("messages", {"max_tokens": 9, "messages": []}))[1]["error"]["type"] == "rate_limit_error"


def keyed(**quotas) -> City:
    """With one key, and its quotas."""
    city = City(make_config(keys={"anna": {"sha256": sha256(USER.encode()).hexdigest()} | quotas}))
    city.says = ["hello"] * 20
    return city


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens", "responses"])
async def test_a_call_that_cannot_fit_into_the_context_is_refused_before_it_is_encoded(path, monkeypatch):
    config = make_config()
    generator = config.generator.model_copy(update={"max_model_len": 256})
    city = City(config.model_copy(update={"generator": generator}))
    monkeypatch.setattr(openai_api, "_rendered", None)
    async with city.gateway() as user:
        text = "a" * 5000
        body = {"input": text} if path == "responses" else {"messages": [{"role": "user", "content": text}]}
        status, answer, _ = await user.ask(path, {"model": "m", **body})
    assert status == 400 and "the model takes at most 4096" in answer["error"]["message"]


async def test_a_long_prompt_is_encoded_beside_the_event_loop(monkeypatch):
    city, threads, rendered = keyed(), set(), openai_api._rendered
    monkeypatch.setattr(openai_api, "_rendered", lambda *args: threads.add(threading.get_ident()) or rendered(*args))
    async with city.gateway() as user:
        await user.say("a" * 5000)
        question = {"model": "m", "messages": [{"role": "user", "content": "a" * 5000}]}
        assert (await user.ask("messages/count_tokens", question))[1]["input_tokens"] > 5000
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("POST", "sessions", {}),
        ("GET", "sessions/unknown", None),
        ("GET", "models", None),
    ],
)
async def test_every_request_is_a_call_of_its_key(method, path, body):
    async with keyed(calls_per_minute=2).gateway() as user:
        statuses = [(await user.ask(path, body, method=method))[0] for _ in range(4)]
    assert statuses == [200, 200, 429, 429]


async def test_a_key_without_calls_left_can_still_reward_and_delete_its_sessions_here_and_at_the_next_gateway():
    city = keyed(calls_per_minute=2, rights=["serve", "reward"])
    async with city.gateway(0) as user:
        for name in "ab":
            await user.say("hi", session=name)
        assert (await user.say("hi", session="c"))[0] == (await user.ask("sessions/a", method="GET"))[0] == 429
        assert (await user.reward(1.0, session="a", key=USER, id="x"))[1]["changed"]
        await user.gateway.share_accounts()
    async with city.gateway(1) as user:
        await user.gateway.share_accounts()
        await user.gateway.sessions.table.renew()
        while not user.gateway.sessions.table.sessions:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        assert (await user.say("hi", session="b"))[0] == 429
        assert (await user.ask("sessions/b", method="DELETE"))[1]["deleted"] == 1
        statuses = [(await user.ask("sessions/b", method="DELETE"))[0] for _ in range(5)]
        assert statuses == [200] * 3 + [429] * 2, "they are as many as calls and sessions have paid for"


async def test_as_many_answers_are_as_many_calls():
    city = keyed(calls_per_minute=4)
    question = {"messages": [{"role": "user", "content": "x"}]}
    async with city.gateway() as user:
        assert [(await user.ask("chat/completions", question | {"n": n}))[0] for n in (5, 2, 1)] == [429, 200, 200]
    assert len(city.prompts) == 3


async def test_an_answer_that_its_client_does_not_wait_for_is_paid_with_the_tokens_that_were_sampled():
    city, sampled = keyed(tokens_per_minute=4), asyncio.Event()

    async def endless(call):
        tokens = np.array(TOKENIZER.encode("hello", add_special_tokens=False), np.int32)
        call.add(Generation(tokens, np.zeros(5, np.float32), np.zeros(5, np.int32), None), None)
        sampled.set()
        await asyncio.Event().wait()

    city.sample = endless
    async with city.gateway() as user:
        account = user.gateway.sessions._keys.accounts["anna"]
        for mark in ("", "1"):
            account.tokens, sampled = LastMinute(lambda: 0.0), asyncio.Event()
            call = asyncio.create_task(user.say("hi", stream=True, session=f"s{mark}"))
            await sampled.wait()
            further = [user.say("hi", session=f"{name}{mark}") for name in "abc"]
            assert [answer[0] for answer in await asyncio.gather(*further)] == [429] * 3, "the call is in progress"
            call.cancel()
            while account.reserved:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            assert account.use.tokens == 5 and (await user.say("hi", session=f"d{mark}"))[0] == 429
        assert account.use.sessions == 2, "a call that is refused opens no session"


async def test_sessions_that_open_at_once_are_counted_before_they_are_open(monkeypatch):
    city, ask_master = keyed(sessions=1), City.ask_master

    async def slow(*parts):
        await asyncio.sleep(0.01)
        return await ask_master(city, *parts)

    city.ask_master = slow
    async with city.gateway() as user:
        answers = await asyncio.gather(*(user.say("hi", session=name) for name in "abcdefghi"))
        assert sorted(answer[0] for answer in answers) == [200] + [429] * 8
        (opened,) = user.gateway.sessions.table.sessions
        await user.ask(f"sessions/{opened}/end", {})
        assert (await user.say("hi", session="next"))[0] == 200, "one that has ended leaves room"
        again = opened.partition(":")[2]
        assert (await user.say("hi", session=again))[0] == 429, "and takes no room that is taken"


async def test_gateways_share_the_account_of_a_key():
    city = keyed(sessions=1, calls_per_minute=6)
    async with city.gateway(0) as user, city.gateway(1) as neighbour:
        await user.say("hi")
        for gateway in (user, neighbour):
            await gateway.gateway.share_accounts()
        status, body, _ = await neighbour.say("hi", session="another")
        assert (status, body["error"]["code"]) == (429, "too_many_sessions")
        statuses = [(await neighbour.ask("models", method="GET"))[0] for _ in range(5)]
        assert statuses == [200] * 4 + [429], "one call was made at the other gateway, and one here"


@pytest.mark.parametrize("value", ["No", "NO", "false", "0", "off", "", "maybe", "yes, no"])
async def test_whatever_is_not_yes_opts_out_of_training(city, value):
    city.says = ["hello"] * 2
    async with city.gateway() as user:
        assert (await user.say("hi", X_Areal_Train=value))[2]["X-Areal-Trained"] == "no"
        assert (await user.say("hi", session="t", X_Areal_Train=" Yes "))[2]["X-Areal-Trained"] == "yes"


GREEDY = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], "temperature": 0, "seed": 1234}


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_key_that_is_not_trained_may_sample_otherwise_and_no_ledger_hears_of_it(city, path):
    city.says = ["4", "4"]
    body = GREEDY | ({"input": "2+2?", "top_p": 0.5} if path == "responses" else {})
    async with city.gateway() as client:
        for _ in range(2):
            status, _, headers = await client.ask(path, body, EXAMINER, X_Session_Id="same", X_Areal_Train="yes")
            assert (status, headers["X-Areal-Trained"]) == (200, "no")
        assert city.temperatures == [0, 0]
        assert not client.gateway.sessions.table.sessions and not city.ledger.state.groups
        status, refused, _ = await client.ask(path, body)
        assert status == 400 and "temperature: 0.0 is not possible" in str(refused)
        status, refused, _ = await client.ask(path, {**body, "temperature": None, "top_p": None})
        assert status == 400 and "seed: 1234 is not possible" in str(refused)
        status, refused, _ = await client.ask(path, body | {"top_p": 2}, EXAMINER)
        assert status == 400 and "top_p" in str(refused)


async def test_a_key_that_is_not_trained_has_random_numbers_of_its_own_by_its_seed(city):
    city.says = ["4"] * 5
    drawn = GREEDY | {"temperature": 0.5}
    async with city.gateway() as client:
        for _ in range(2):
            assert (await client.ask("chat/completions", drawn, EXAMINER))[0] == 200
        assert (await client.ask("chat/completions", drawn | {"seed": -1}, EXAMINER))[0] == 200
        assert (await client.ask("chat/completions", drawn | {"n": 2, "seed": 2**63 - 1}, EXAMINER))[0] == 200
    assert city.seeds == [1234, 1234, None, 2**63 - 1, 0]


async def test_the_log_probs_of_a_prompt_wait_for_the_first_generator_until_a_deadline(city, monkeypatch):
    body = {"model": "m", "prompt": "a+b", "max_tokens": 0, "logprobs": 1, "echo": True}
    async with city.gateway() as client:
        waiting = asyncio.create_task(client.ask("completions", body, EXAMINER))
        await client.ask("models", method="GET")
        assert not waiting.done()
        city.directory.update({"g": generator(0)}, ())
        city.directory.changed.notify()
        status, answer, _ = await waiting
        assert (status, answer["choices"][0]["logprobs"]["token_logprobs"]) == (200, [None, -1.0, -2.0])
        city.directory.update({}, ["g"])
        monkeypatch.setattr("actors.gateway.served_policy.SCORE_SECONDS", 0.05)
        status, answer, _ = await client.ask("completions", body, EXAMINER)
        assert (status, answer["error"]["code"]) == (503, "no_version")


async def test_completions_say_how_likely_a_prompt_is_and_belong_to_no_session(city):
    city.says = ["4", "5.6"]
    city.directory.members["g"] = generator(0)
    asked = {"model": "m", "temperature": 0, "seed": 1}
    async with city.gateway() as client:
        body = asked | {"prompt": [TOKENIZER.encode("a+b")], "max_tokens": 2, "logprobs": 1, "echo": True}
        status, answer, headers = await client.ask("completions", body, EXAMINER)
        (choice,) = answer["choices"]
        assert (status, headers["X-Areal-Trained"]) == (200, "no")
        assert (choice["text"], choice["logprobs"]["tokens"]) == ("a+b4", ["a", "+", "b", "4", END])
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][:3] == [None, {"x": 0.0, "+": -1.0}, {"x": 0.0, "b": -2.0}]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        body = asked | {"prompt": ["2+2="], "stop": [".", "!"], "max_tokens": 8}
        status, answer, _ = await client.ask("completions", body, EXAMINER)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("5", "stop")
        assert not client.gateway.sessions.table.sessions and not city.ledger.state.groups
        status, refused, _ = await client.ask("completions", body)
        assert status == 403 and "use a key with train: false (gateway.keys.anna.train)" in str(refused)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("2+" * 5000, "the model takes at most 4096"),
        ([[0] * 5000], "the model takes at most 4096"),
        ([1, -1], "prompt: -1 is no token of the model"),
        ([1, 2**40], f"prompt: {2**40} is no token of the model"),
    ],
)
async def test_prompts_that_no_engine_could_take_are_refused_before_they_are_sampled(city, prompt, why):
    generator = city.config.generator.model_copy(update={"max_model_len": 256})
    short = City(city.config.model_copy(update={"generator": generator}))
    async with short.gateway() as client:
        status, refused, _ = await client.ask("completions", {"prompt": prompt, "max_tokens": 1}, EXAMINER)
    assert status == 400 and why in str(refused)


async def test_a_session_whose_first_call_is_refused_gives_its_permit_back(city):
    city.says = ["hello"]
    refused = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.123}
    async with city.gateway() as client:
        for _ in range(3):
            assert (await client.ask("chat/completions", refused, X_Session_Id="s"))[0] == 400
            assert client.gateway.sessions.stats()["sessions_open"] == 0
        assert not city.ledger.state.groups
        await client.say("hi")
        assert (await client.ask("chat/completions", refused, X_Session_Id="s"))[0] == 400
        assert client.gateway.sessions.stats()["sessions_open"] == 1


async def test_fields_that_no_template_shows_are_not_stored(city):
    city.says = ["hello"] * 2
    junk = "nobody reads this" * 100
    message = {"role": "user", "content": "hi", "junk": junk}
    body = {"model": junk, "tool_choice": {"junk": junk}, "metadata": {"session_id": "s", "more": junk}}
    async with city.gateway() as user:
        assert (await user.ask("chat/completions", body | {"messages": [message]}))[0] == 200
    assert "nobody" not in notes_of(city.spool.unfinished.calls("s0.0", 0)) and "hi" in notes_of(
        city.spool.unfinished.calls("s0.0", 0)
    )


async def test_a_session_takes_no_more_text_than_its_trainer_can_store_with_each_call(city, monkeypatch):
    monkeypatch.setattr("actors.gateway.user_sessions.MAX_TEXT", 500)
    city.says = ["hello"] * 9
    async with city.gateway() as user:
        statuses = [(await user.say(f"{number}" * 200))[0] for number in range(4)]
    assert statuses == [200, 200, 409, 409]


@pytest.mark.parametrize("text", ["", "POST /v1/mod", "head", "body"])
async def test_a_connection_that_sends_nothing_more_is_closed(city, monkeypatch, text):
    monkeypatch.setattr(openai_endpoint, "IDLE_SECONDS", 0.2)
    start = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {USER}\r\n"
    text = {"head": start, "body": start + "Content-Length: 9\r\n\r\n{"}.get(text, text)
    async with city.gateway() as user:
        reader, writer = await asyncio.open_connection("127.0.0.1", await user.gateway._endpoint.listen())
        writer.write(text.encode())
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
    assert (b"408" in answer) == text.endswith("{")


async def test_the_sum_of_rewards_of_answers_stays_within_the_range(city):
    city.says = [f"{number}" for number in range(5)]
    async with city.gateway() as user:
        for number in range(5):
            answer = await user.say(f"question {number}")
            assert (await user.reward(1, call=answer[1]["id"]))[0] == 200
        assert (await user.ask("sessions/s/end", {}))[1]["state"] == "ready"
    assert [sample.reward for sample in city.trained.values()] == [1]


@pytest.mark.parametrize(
    "value",
    [1e308, float("nan"), {"a": 1e60, "b": -1e60}, {"a": 1e308}, {"a" * 300: 1}, {f"{n}": 0 for n in range(5000)}],
)
async def test_a_reward_that_is_out_of_bounds_is_refused_and_the_session_goes_on(city, value):
    city.says = ["hello"] * 2
    async with city.gateway() as user:
        await user.say("hi")
        assert (await user.reward(value))[0] == 400
        assert (await user.ask("sessions/s", method="GET"))[1]["state"] == "open"
        assert (await user.reward(1))[1]["changed"]


async def test_no_session_has_the_name_of_those_without_one(city):
    city.says = ["hello"]
    async with city.gateway() as user:
        hi = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await user.ask("sessions", {"id": "-"}))[0] == 400
        assert (await user.say("hi", session="-"))[0] == 400
        answer = await user.ask("chat/completions", hi | {"user": "-"})
        assert answer[0] == 200 and "anna" not in user.gateway.sessions.table.unnamed


async def test_the_engines_words_and_the_names_of_gateways_stay_inside(city):
    city.says = ["hello"]
    async with city.gateway(0) as user, city.gateway(1) as neighbour:
        await user.say("hi")
        for path, method in (("sessions/s", "GET"), ("sessions/s", "DELETE")):
            status, body, _ = await neighbour.ask(path, method=method)
            assert (status, body["error"]["code"]) == (409, "elsewhere") and "#" not in body["error"]["message"]

        async def refuse(call):
            raise SampleFailed(
                "prompt", "the generator refused the prompt: generator/0#7 at tcp://10.0.0.1: CUDA error"
            )

        city.sample = refuse
        status, body, _ = await user.say("hi", "hello", "and?")
        assert status == 400 and body["error"]["message"] == (
            "the call has failed: the policy does not take its prompt: send less"
        )
    assert city.ledger.state.groups.count(GroupState.OPEN) == 1, "what another gateway has is not deleted"


async def test_nothing_is_kept_of_a_session_that_was_deleted_before_its_reward_came(tmp_path):
    words, spool = "what the user said", Spool.open(tmp_path / "spool.db")

    async def on_disk(what, use, *arguments):
        return use(*arguments)

    async def refuse(message, answer):
        return GroupAccepted(accepted=False)

    store = SampleStore(make_config(), 300, spool, None, on_disk, refuse)  # without a writer of rollouts
    sample = ScoredSample(place=0, frame=np.frombuffer(trained().frame(), np.uint8), parts={}, discarded=0)
    late = StoreSamples(group="s0.0", prompt_index=-1, row=words, samples=(sample,))
    request = SimpleNamespace(sender="gateway/0#1", message=late, remaining=9.0)
    assert not (await store.dispatch(request)).accepted
    for file in tmp_path.iterdir():
        assert words.encode() not in file.read_bytes(), file
    spool.close()


async def test_a_call_that_the_trainer_does_not_store_is_an_error_and_not_an_answer(city):
    city.says = ["hello"]

    async def refuse(message, answer):
        raise RefusedError("trainer/0#12ab: its disk is full")

    async with city.gateway() as user:
        user.gateway.sampling.ask_trainer = refuse
        status, body, _ = await user.say("hi")
        assert (status, body["error"]["message"]) == (507, NOT_STORED)


async def test_the_other_protocols_and_a_session_that_user_names(city):
    city.says = ["one", "two", "three"]
    async with city.gateway() as user:
        hi = {"role": "user", "content": "hi"}
        message = {"model": "m", "max_tokens": 9, "messages": [hi], "metadata": {"session_id": "one"}}
        status, body, headers = await user.ask("messages", message)
        assert (status, body["content"][0]["text"], headers["X-Session-Id"]) == (200, "one", "anna:one")
        status, body, headers = await user.ask("responses", {"model": "m", "input": "hi", "user": "zwei ü"})
        assert (status, body["output"][0]["content"][0]["text"]) == (200, "two") and len(headers["X-Session-Id"]) == 37
        status, _, headers = await user.ask("chat/completions", {"model": "m", "messages": [hi]})
        assert (status, headers["X-Session-Id"]) == (200, user.gateway.sessions.table.unnamed["anna"])


async def test_tokens_are_counted_without_a_session(city):
    async with city.gateway() as client:
        question = {"model": "m", "messages": [{"role": "user", "content": "two words"}]}
        status, counted, _ = await client.ask("messages/count_tokens", question)
        assert status == 200 and counted["input_tokens"] > 5
        assert (await client.ask("messages/count_tokens", question, key="another"))[0] == 401
        assert not len(city.ledger.state.groups) and not client.gateway.sessions.table.sessions


async def test_a_session_whose_lease_has_lapsed_goes_on_where_it_is_or_at_the_gateway_that_has_taken_it(city):
    city.says = ["hello", "fine"]
    async with city.gateway(0) as user, city.gateway(1) as other:
        await user.say("hi", Idempotency_Key="1")
        for holder in (user, other):  # the master gives it to whoever asks first
            city.now += 61
            city.ledger.leases.expire(city.now)
            await holder.gateway.sessions.table.renew()
            assert text_of(await holder.say("hi", Idempotency_Key="1")) == "hello"
        await user.gateway.sessions.table.renew()
        assert (await user.say("hi", "hello", "how are you?"))[0] == (await user.reward(1))[0] == 409
        assert text_of(await other.say("hi", "hello", "how are you?")) == "fine"
        assert (await other.reward(1))[1]["state"] == "ready"
    (sample,) = city.trained.values()
    assert TOKENIZER.decode(sample.tokens[sample.sampled]) == f"hello{END}fine{END}"


class CallsOfTools(Parsers):
    """Reads each turn with tools as a call, with an id of its own as vLLM's parsers give it."""

    def check(self, tools):
        pass

    def parse(self, sampled, tools, stops=(), taken=()):
        call = {"id": secrets.token_hex(4), "type": "function", "function": {"name": "add", "arguments": "{}"}}
        return Parsed("", None, [call], False) if tools else super().parse(sampled, tools, stops)


async def test_the_call_of_a_tool_has_the_same_id_at_the_next_gateway_and_its_conversation_goes_on_from_its_tokens(
    city,
):
    city.says = ["add 2 3", "add 4 5"]
    question = {"role": "user", "content": "add"}
    body = {"model": "m", "tools": [{"type": "function", "function": {"name": "add"}}], "messages": [question]}

    async def ask(user):
        user.gateway.sampling.services.tools["parsers"] = CallsOfTools(TOKENIZER)
        headers = {"X_Session_Id": "s", "Idempotency_Key": f"{len(body['messages'])}"}
        choice = (await user.ask("chat/completions", body, **headers))[1]["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        return choice["message"]

    async with city.gateway(0) as user:
        called = await ask(user)
    async with city.gateway(1) as user:
        assert await ask(user) == called
        (call,) = called["tool_calls"]
        body["messages"] += [called, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
        await ask(user)
        assert (await user.reward(1))[1]["state"] == "ready"
    (sample,) = city.trained.values()
    assert sample.branches == () and TOKENIZER.decode(sample.tokens[sample.sampled]) == f"add 2 3{END}add 4 5{END}"


async def test_each_message_of_a_session_is_stored_once_though_each_call_repeats_those_before(city):
    city.says = [f"answer {n}" for n in range(6)]
    texts = ["question 0"]
    async with city.gateway(0) as user:
        for n in range(5):
            texts += [text_of(await user.say(*texts, Idempotency_Key=f"{n}")), f"question {n + 1}"]
    notes = notes_of(city.spool.unfinished.calls("s0.0", 0))
    assert [notes.count(text) for text in texts[:-2:2]] == [1] * 5
    async with city.gateway(1) as user:
        assert text_of(await user.say(*texts[:-2], Idempotency_Key="4")) == "answer 4"
        assert text_of(await user.say(*texts)) == "answer 5"
        assert (await user.reward(1))[1]["state"] == "ready"
    assert [len(sample.branches) for sample in city.trained.values()] == [0]


async def test_a_gateway_that_leaves_takes_rewards_and_no_calls(city):
    city.says = ["hello", "fine"]
    async with city.gateway() as user:
        await user.say("hi")
        user.gateway.member.state = "draining"
        status, body, _ = await user.say("hi", "hello", "how are you?")
        assert (status, body["error"]["code"]) == (503, "leaving")
        assert (await user.reward(1))[1]["state"] == "ready"


async def test_a_gateway_that_stores_late_forgets_a_session_that_another_one_has_taken(city):
    city.says = ["hello", "late", "fine"]
    ask_trainer, hold = city.ask_trainer, []

    async def fenced(message, answer):
        if message.kind == "store_calls" and hold:
            raise RefusedError("gateway/1#1 goes on with s0.0")
        return await ask_trainer(message, answer)

    async with city.gateway(0) as user, city.gateway(1) as other:
        user.gateway.sampling.ask_trainer = fenced
        await user.say("hi")
        city.now += 61
        city.ledger.leases.expire(city.now)
        await other.gateway.sessions.table.renew()
        hold.append("gateway/1")
        assert [(await user.say("hi", "hello", "how?"))[0] for _ in range(2)] == [507, 409]
        assert text_of(await other.say("hi", "hello", "how?")) == "fine"


async def test_a_session_that_is_idle_is_trained_with_the_rewards_of_its_calls_and_else_waits_until_it_expires():
    city = City(make_config(idle_seconds=0.5, session_seconds=1.5))
    city.says = ["hello", "hello"]
    async with city.gateway() as user:
        answer = await user.say("hi", session="a")
        await user.reward(0.5, session="a", call=answer[1]["id"])
        await user.say("hi", session="b")
        while city.ledger.state.groups.count(GroupState.OPEN):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
    assert [sample.reward for sample in city.trained.values()] == [0.5]
    assert city.ledger.state.counters.discarded == {EXPIRED: 1}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
async def test_with_a_certificate_the_gateway_speaks_tls_alone(tmp_path):
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    process = await asyncio.create_subprocess_exec(*command.split(), cwd=tmp_path, stderr=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    city = City(make_config(certificate=str(tmp_path / "cert.pem"), private_key=str(tmp_path / "key.pem")))
    trust = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    trust.check_hostname = False
    async with city.gateway() as user:
        url = f"://127.0.0.1:{await user.gateway._endpoint.listen()}/v1/models"
        headers = {"Authorization": f"Bearer {USER}"}
        async with aiohttp.ClientSession() as http:
            async with http.get(f"https{url}", headers=headers, ssl=trust) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http{url}", headers=headers)


async def test_the_key_of_one_session_rewards_no_other_also_if_it_is_of_a_key_that_rewards_all():
    keys = {
        "anna": {"sha256": sha256(USER.encode()).hexdigest()},
        "boss": {"sha256": sha256(JUDGE.encode()).hexdigest(), "rights": ["serve", "reward_all"]},
    }
    city = City(make_config(keys=keys))
    city.says = ["hello"]
    async with city.gateway() as user:
        await user.say("hi")
        access = (await user.ask("sessions", {"id": "mine"}, JUDGE))[1]
        status, _, _ = await user.ask("sessions/anna:s/reward", {"reward": 1}, access["api_key"])
        assert status == 404 and city.trained == {}
        assert (await user.reward(1))[1]["state"] == "ready", "the key itself may"


@pytest.mark.parametrize(
    "name", ["anna:x:s", "judge:s", "anna:", ":", "%00", "anna:%0a", "a" * 300, "anna:%F0%9F%98%80"]
)
async def test_strange_names_of_sessions_are_refused_in_words(name):
    city = City(make_config())
    city.says = ["hello"]
    async with city.gateway() as user:
        await user.say("hi")
        for path, method in (
            (f"sessions/{name}", "GET"),
            (f"sessions/{name}", "DELETE"),
            (f"sessions/{name}/end", "POST"),
        ):
            status, body, _ = await user.ask(path, {}, method=method)
            assert 400 <= status < 500 and body["error"]["message"], (path, method)
    assert city.ledger.state.groups.count(GroupState.OPEN) == 1


async def test_a_reward_whose_client_goes_away_is_taken():
    city = City(make_config())
    city.says = ["hello"]
    ask_trainer, waiting, go_on = city.ask_trainer, asyncio.Event(), asyncio.Event()

    async def slow(message, answer):
        if message.kind == "store_samples":
            waiting.set()
            await go_on.wait()
        return await ask_trainer(message, answer)

    async with city.gateway() as user:
        user.gateway.sampling.ask_trainer = slow
        await user.say("hi")
        given = UserReward(1.0, {}, None, "")
        reward = asyncio.create_task(user.gateway.sessions.ends.reward("anna:s", given))  # as its handler does
        await waiting.wait()
        reward.cancel()
        await asyncio.gather(reward, return_exceptions=True)
        later = asyncio.create_task(user.reward(-1))
        go_on.set()
        assert (await later)[1] == {"id": "anna:s", "state": "ready", "changed": False}
    assert [sample.reward for sample in city.trained.values()] == [1]


async def test_a_call_that_is_answered_after_the_sample_was_made_is_an_error_and_a_later_one_begins_another_session():
    city = City(make_config())
    city.says = ["hello", "late", "new"]
    ask_trainer, sample, stores, answers, go_on = city.ask_trainer, city.sample, *(asyncio.Event() for _ in "123")

    async def slow_store(message, answer):
        if message.kind == "store_samples":
            stores.set()
            await go_on.wait()
        return await ask_trainer(message, answer)

    async def slow_sample(call):
        if city.says[0] == "late":
            answers.set()
            await stores.wait()
        return await sample(call)

    async with city.gateway() as user:
        user.gateway.sampling.ask_trainer, city.sample = slow_store, slow_sample
        await user.say("hi")
        late = asyncio.create_task(user.say("hi", "hello", "how?"))
        await answers.wait()
        reward = asyncio.create_task(user.reward(1))
        status, body, _ = await late
        assert (status, body["error"]["code"]) == (409, "over")
        new = asyncio.create_task(user.say("again"))
        go_on.set()
        assert (await reward)[1]["state"] == "ready" and text_of(await new) == "new"
    (trained,) = city.trained.values()
    assert "late" not in TOKENIZER.decode(trained.tokens) and len(LedgerSessions(city.ledger.state).ownerless()) == 1


async def test_a_session_that_expires_while_the_master_is_asked_about_its_reward_is_gone(city):
    city.says = ["hello"]
    async with city.gateway() as user:
        await user.say("hi")
        session, ask = user.gateway.sessions.table.sessions["anna:s"], user.gateway.sessions.table.links.ask

        async def expire(*question):
            session.group = None
            return await ask(*question)

        user.gateway.sessions.table.links.ask = expire
        status, body = await user.reward(1, id="a")
        assert (status, body["changed"]) == (200, False)
    assert city.trained == {}


async def test_a_reward_with_an_id_is_answered_alike_however_often_it_comes_and_whoever_is_asked(city):
    city.says = ["hello", "fine", "other"]
    taken, call = ({"id": "anna:s", "state": state, "changed": True} for state in ("ready", "open"))
    async with city.gateway(0) as user:
        answer = (await user.say("hi"))[1]["id"]
        assert await user.reward(0.5, call=answer, id="a") == (200, call)
        assert await user.reward(-1, call=answer, id="b") == (200, call)
        assert await user.reward(0.5, call=answer, id="a") == (200, call), "b is not undone"
        status, body = await user.reward(0.25, call=answer, id="a")
        assert (status, body["error"]["code"]) == (409, "id_in_use"), "one id has one value"
        await user.say("hi", "hello", "how?")
    async with city.gateway(1) as user:
        assert await user.reward(0.5, call=answer, id="a") == (200, call)
        assert user.gateway.sessions.table.sessions["anna:s"].chat.rewards == {answer: -1}
        assert await asyncio.gather(*(user.reward(1, id="c") for _ in "12")) == [(200, taken)] * 2
    (sample,) = city.trained.values()
    assert sample.reward == 0, "1 for the session, and -1 for its answer"
    async with city.gateway(2) as user:
        for _ in range(2):
            assert await user.reward(1, id="c") == (200, taken)
            assert await user.reward(-1, call=answer, id="b") == (200, call)
            status, body = await user.reward(1, id="d")
            assert (status, body["error"]["code"]) == (409, "rewarded") and "another id" in body["error"]["message"]
            if not city.ledger.version:
                await user.say("hi", session="t")
                await user.reward(1, session="t")
                city.train()
            for other in ({"reward": -1, "id": "c"}, {"reward": 1, "id": "b", "call": answer}):
                status, body, _ = await user.ask("sessions/anna:s/reward", other, JUDGE)
                assert (status, body["error"]["code"]) == (409, "id_in_use"), "one id has one value, also afterwards"
        assert (await user.ask("sessions/s", method="GET"))[1]["state"] == "trained"


async def test_a_reward_whose_id_came_before_does_not_reward_a_later_session_of_the_same_name(city):
    city.says = ["hello", "fine"]
    async with city.gateway() as user:
        await user.say("hi")
        asked = []
        ask, user.gateway.sessions.table.links.ask = (
            user.gateway.sessions.table.links.ask,
            lambda *about: asked.append(about) or ask(*about),
        )
        assert (await user.reward(1, id="a"))[1]["changed"]
        assert asked == [("anna:s", False, "a")], "one question to the master for a reward with an id"
        user.gateway.sessions.table.links.ask = ask
        await user.say("hi", "hello", "how?")
        status, body = await user.reward(1, id="a")
        assert (status, body["error"]["code"]) == (409, "id_in_use") and "earlier session" in body["error"]["message"]
        assert (await user.ask("sessions/s", method="GET"))[1]["state"] == "open"
        assert (await user.reward(-1, id="b"))[1]["state"] == "ready"
    assert [sample.reward for sample in city.trained.values()] == [1, -1]


async def test_a_reward_that_is_stored_when_its_gateway_is_lost_counts_and_its_repeat_hears_so(city):
    city.says = ["hello"]
    city.reports = False
    async with city.gateway(0) as user:
        await user.say("hi")
        reward = asyncio.create_task(user.reward(1, id="a"))
        while not city.samples:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        reward.cancel()
    assert LedgerSessions(city.ledger.state).ownerless() == ["s0.0"] and not city.ledger.state.groups.count(
        GroupState.READY
    )
    async with city.gateway(1) as user:
        assert await user.reward(1, id="a") == (200, {"id": "anna:s", "state": "ready", "changed": True})
        assert (await user.reward(-1, id="b"))[0] == 409
    assert [sample.reward for sample in city.trained.values()] == [1]


async def test_a_reward_that_was_taken_and_is_undone_is_not_said_to_count(city):
    city.says = ["hello"]
    async with city.gateway() as user:
        await user.say("hi")
        await user.reward(1, id="a")
        await user.ask("sessions/s", method="DELETE")
        assert (await user.reward(1, id="a"))[1] == {"id": "anna:s", "state": "gone", "changed": False}
    assert not city.state.sessions.receipts


@pytest.mark.parametrize("host", ["the same", "another, whose clock is an hour ahead"])
async def test_a_session_grows_no_younger_at_another_gateway_and_no_hour_older_at_another_host(city, monkeypatch, host):
    city.says = ["hello", "again"]
    at, there = time.monotonic(), "a boot"
    monkeypatch.setattr("actors.gateway.user_sessions._since_boot", lambda: (there, at))
    async with city.gateway(0) as user:
        await user.say("hi")
        user.gateway.sessions.table.sessions["anna:s"].begun -= 200
        await user.say("and?")
    at += 1000 if host == "the same" else 3600
    there = "a boot" if host == "the same" else "another one"
    async with city.gateway(1) as user:

        async def waits(message, answer):
            user.gateway.sessions.table.sessions["anna:s"].begun -= 500  # as if the trainer had been away so long
            return await city.ask_trainer(message, answer)

        user.gateway.sampling.ask_trainer = waits
        await user.ask("sessions/s", method="GET")
        session = user.gateway.sessions.table.sessions["anna:s"]
        age = asyncio.get_running_loop().time() - session.begun
        assert 0 <= age - (1200 if host == "the same" else 200) < 100


async def test_a_text_in_parts_is_scored_as_text_at_the_end_of_its_session():
    city = City(make_config(score=True))
    city.says = ["2"]
    asked = []

    async def score(name, prompt, completions, row, tokens):
        asked.append((prompt, completions))
        return [Result(0.5, {})]

    async with city.gateway() as user:
        user.gateway.sampling.services.rewards = SimpleNamespace(score=score)
        parts = [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1"}]
        body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
        await user.ask("chat/completions", body, X_Session_Id="s")
        assert (await user.ask("sessions/s/end", {}))[1]["state"] == "ready"
    assert asked == [("1 + 1", ["2"])] and [sample.reward for sample in city.trained.values()] == [0.5]


async def test_rewards_of_rows_score_no_session_that_ends_without_one():
    city = City(make_config(share=0.5))
    city.says = ["2"]
    async with city.gateway() as user:
        await user.say("1 + 1")
        assert (await user.ask("sessions/s/end", {}))[1]["state"] == "ended", "it waits for its reward"
        assert (await user.reward(1))[1]["state"] == "ready"
    assert [sample.reward for sample in city.trained.values()] == [1]


async def test_of_a_session_that_is_not_here_the_master_is_asked_once(city):
    asked, ask_master = [], city.ask_master

    async def counted(sender, message, *rest):
        asked.append(message.kind)
        return await ask_master(sender, message, *rest)

    city.ask_master = counted
    async with city.gateway() as user:
        assert (await user.reward(1))[1] == {"id": "anna:s", "state": "gone", "changed": False}
        assert (await user.ask("sessions/s", method="GET"))[1] == {"id": "anna:s", "state": "gone"}
    assert asked.count("ask_session") == 2


async def test_a_gateway_that_asks_again_for_its_session_hears_that_it_has_begun():
    city = City(make_config())
    first, again = [
        await city.ask_master("gateway/0#1", AskSession(session="a:s", opens=True), SessionAnswer) for _ in "12"
    ]
    assert (first.session.resumed, again.session.resumed) == (False, True)
    assert first.session.group == again.session.group


async def test_the_trainer_takes_a_session_from_the_gateway_alone_that_goes_on_with_it_also_after_its_restart():
    async def on_disk(what, use, *arguments):
        return use(*arguments)

    spool = Spool(sqlite3.connect(":memory:"))
    sample = ScoredSample(place=0, frame=np.frombuffer(trained().frame(), np.uint8), parts={}, discarded=0)
    rewarded = StoreSamples(group="s0.0", prompt_index=-1, row="", samples=(sample,))
    saves = [
        StoreCalls(group="s0.0", prompt_index=-1, place=0, frame=np.frombuffer(saved(text), np.uint8), number=number)
        for number, text in enumerate(("hello", "hello", "hello, fine"))
    ]
    for restart in range(2):
        store = SampleStore(make_config(), 300, spool, None, on_disk, None)

        async def ask(sender, message, store=store):
            part = store if store.answers(message) else store.unfinished
            return await part.dispatch(SimpleNamespace(sender=sender, message=message, remaining=9.0))

        if not restart:
            await ask("gateway/0#1", saves[0])
            await ask("gateway/0#2", AskCalls(group="s0.0", place=0))
        for late in (saves[1], rewarded):
            with pytest.raises(RefusedError, match="gateway/0#2 goes on with s0.0"):
                await ask("gateway/0#1", late)
        await ask("gateway/0#2", saves[2])
        assert spool.unfinished.calls("s0.0", 0) == saved("hello, fine"), "a late sample has not ended it"
    spool.forget(["s0.0"])
    assert spool.ids() == [] and spool.unfinished.holder("s0.0") == ""


def trained() -> Trajectory:
    tokens, logprobs = np.array([1, 2], np.int32), np.zeros(2, np.float32)
    return Trajectory(tokens=tokens, logprobs=logprobs, versions=np.array([-1, 0], np.int32), reward=1.0, finish="stop")


def saved(text: str) -> bytes:
    tokens = np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)
    sampled = Generation(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")
    return packed([SavedCall(b"p" * 16, NO_LIMIT, sampled)])


async def test_what_is_saved_last_counts_though_it_is_shorter(city):
    city.says = ["hello"]
    async with city.gateway(0) as user:
        answer = await user.say("hi")
        await user.reward(-0.25, call=answer[1]["id"])
        assert (await user.reward(1, call=answer[1]["id"]))[1]["changed"]
    async with city.gateway(1) as user:
        assert (await user.ask("sessions/s/end", {}))[1]["state"] == "ready"
    assert [sample.reward for sample in city.trained.values()] == [1]


async def test_each_count_of_sessions_is_a_counter_for_prometheus(city):
    async with city.gateway() as user:
        numbers = user.gateway.stats()
    families = {family.name: family.type for family in Numbers("gateway", 0, lambda: numbers).collect()}
    assert {name: kind for name, kind in families.items() if "sessions" in name} == {
        "areal_sessions_open": "gauge",
        **{f"areal_sessions_{name}": "counter" for name in COUNTS},
    }


async def test_a_reward_is_not_acknowledged_while_the_master_has_not_heard_of_an_earlier_attempt():
    store = SampleStore(make_config(), 100, None, None, None, lambda *_: asyncio.Event().wait())
    group = Group("s0.0", -1, (trained(),), "", (Note(),))
    first = asyncio.create_task(store._report_ready(group))
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await store._report_ready(group)
    first.cancel()


async def test_a_session_that_is_ready_does_not_expire_for_a_gateway_that_has_not_heard_of_it(city):
    group = LedgerSessions(city.ledger.state).open("anna:s", "gateway/0#0", 0.0, 60.0)
    city.ledger.ready(group.group_id, 0)
    expired = DiscardSession(session="anna:s", group=group.group_id, reason="expired")
    assert (await city.ask_master("gateway/0#0", expired, SessionDiscarded)).count == 0
    assert city.ledger.state.groups.count(GroupState.READY) == 1
    await city.ask_master("gateway/0#0", DiscardSession(session="anna:s", reason="deleted"), SessionDiscarded)
    assert city.ledger.state.groups.count(GroupState.READY) == 0
