"""Agents sample through an OpenAI-compatible endpoint: real sockets and clients, and a policy that says what it is told
to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import math
import os
import re
import shlex
import sys
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from fakes.scripted_policy import END, Recorded, byte_tokenizer
from support import clients
from support.process_tree import processes_mentioning
from transformers import PreTrainedTokenizerFast

from actors.runtime.actor import Notifier
from areal.base.errors import UserError
from areal.config.data_section import DataConfig
from areal.data.rows import Row
from areal.data.sources import open_source
from areal.extensions.agents import openai_endpoint
from areal.extensions.agents.agents import AgentFailed, agent
from areal.extensions.agents.openai_api import message_of
from areal.extensions.agents.openai_endpoint import OpenAIEndpoint
from areal.extensions.agents.parsers import Parsers
from areal.extensions.sandboxes import Limits, SandboxTools, Task
from areal.samples.table import Generation
from areal.workflows.named_workflows import resolve_workflow

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
CUT = {"name": "f", "arguments": "{"}
ROW = Row(0, "2+2=", "4", None, {"prompt": "2+2=", "answer": "4"})


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


class Policy(Recorded):
    """A session whose policy says these texts, one a turn. An exception is raised, None never ends, and for an empty
    one there was no room."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *says: str | Exception | None, parsers: Parsers | None = None
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._says = list(says)
        self.prompts: list[str] = []
        self.scored: list[str] = []
        self.busy = self.stopped = 0
        self.changed = Notifier()
        self.refused: list[str] = []
        self._endpoint = OpenAIEndpoint("policy", "127.0.0.1", self.refused.append)
        self._parsers = parsers or Parsers(tokenizer)

    def tool(self, name: str) -> Parsers:
        return {"parsers": self._parsers}[name]

    async def generate(self, tokens, max_new_tokens=None, keep=None, pictures=None) -> Generation:
        self.prompts.append(self.tokenizer.decode(tokens))
        says = self._says.pop(0)
        self.busy += 1
        self.changed.notify()
        try:
            await asyncio.sleep(3600 if says is None else 0)
        except asyncio.CancelledError:
            self.stopped += 1
            self.changed.notify()
            raise
        finally:
            self.busy -= 1
        if isinstance(says, Exception):
            raise says
        sampled = self.tokenizer.encode(says + END, add_special_tokens=False) if says else []
        # As they would be streamed.
        cut = next((n for i in range(len(sampled)) if keep and (n := keep(np.array(sampled[: i + 1])))), None)
        n = min(cut or len(sampled), max_new_tokens or len(sampled))
        finish = "stop" if says and (cut or n == len(sampled)) else "length"
        part = Generation(
            np.array(sampled[:n], np.int32), np.full(n, -0.5, np.float32), np.full(n, 3, np.int32), finish
        )
        self.forest.add(np.array(tokens, np.int32), part)
        return part

    async def score(self, completion: str, tokens=None) -> float:
        self.scored.append(completion)
        return 0.25

    @contextlib.asynccontextmanager
    async def endpoint(self):
        try:
            async with self._endpoint.serve(self) as api:
                yield api
        finally:
            await self._endpoint.close()


@pytest.fixture
async def opened(tokenizer):
    """Opens a sample whose policy says the texts: (policy, access, client)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*says, **settings):
            policy = Policy(tokenizer, *says, **settings)
            api = await stack.enter_async_context(policy.endpoint())
            client = clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0)
            await stack.enter_async_context(client)
            return policy, api, client.chat.completions

        yield start


async def test_an_answer_is_what_the_policy_sampled_after_the_template_s_prompt(opened):
    policy, _, chat = await opened("4")
    response = await chat.create(model="my-model", messages=[user("2+2?")], logprobs=True, top_logprobs=5)
    assert policy.prompts == ["<start>user 2+2?<end><start>assistant "]
    assert (response.model, response.object, response.choices[0].finish_reason) == (
        "my-model",
        "chat.completion",
        "stop",
    )
    assert (response.choices[0].message.role, response.choices[0].message.content) == ("assistant", "4")
    assert (response.usage.completion_tokens, response.usage.total_tokens) == (2, response.usage.prompt_tokens + 2)
    first, last = response.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes, last.token) == ("4", -0.5, [ord("4")], END)
    assert [top.token for top in first.top_logprobs] == ["4"]


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [
        ("temperature", 0.3, 1.0),
        ("top_p", 0.9, 1.0),
        ("seed", 7, None),
        ("presence_penalty", 0.5, 0.0),
        ("logit_bias", {"5": 1}, {}),
    ],
)
async def test_what_would_change_how_tokens_are_drawn_is_refused_with_the_reason(opened, field, value, same):
    policy, _, chat = await opened("4")
    with pytest.raises(clients.openai.BadRequestError, match=f"{field}: .* is not possible: .*; leave {field} out"):
        await chat.create(model="m", messages=[user("2+2?")], **{field: value})
    assert not policy.prompts
    await chat.create(model="m", messages=[user("2+2?")], **{field: same})  # what the run does anyway


async def test_a_streamed_answer_has_the_same_parts(opened):
    _, _, chat = await opened("fair: " + CALL)
    parts = [
        part
        async for part in await chat.create(
            model="m", messages=[user("?")], tools=[WEATHER], stream=True, stream_options={"include_usage": True}
        )
    ]
    begin, delta = (part.choices[0].delta for part in parts[:2])
    assert (begin.role, begin.content, delta.content) == ("assistant", "", "fair:")
    assert (delta.tool_calls[0].index, delta.tool_calls[0].function.name) == (0, "weather")
    assert [part.choices[0].finish_reason for part in parts[:3]] == [None, None, "tool_calls"]
    assert parts[3].usage.completion_tokens == len(("fair: " + CALL).encode()) + 1


async def test_tool_calls_are_read_out_of_the_text_and_all_turns_are_one_trajectory(opened, tokenizer):
    policy, api, chat = await opened(CALL, "Sunny.")
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, user("Weather?")]
    turn = (await chat.create(model="m", messages=messages, tools=[WEATHER])).choices[0]
    call = turn.message.tool_calls[0]
    assert (turn.finish_reason, turn.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
    messages += [turn.message, {"role": "tool", "tool_call_id": call.id, "content": "clear sky"}]
    turn = (await chat.create(model="m", messages=messages, tools=[WEATHER])).choices[0]
    assert turn.message.content == "Sunny."
    beginning = "<start>tools weather<end><start>system Be brief.<end><start>user Weather?<end><start>assistant "
    assert policy.prompts[1] == f"{beginning}{CALL}<end><start>tool clear sky<end><start>assistant "
    trajectory = policy.trajectory(1.0)
    assert tokenizer.decode(trajectory.tokens) == policy.prompts[1] + "Sunny.<end>"
    assert tokenizer.decode(trajectory.tokens[trajectory.sampled]) == f"{CALL}<end>Sunny.<end>"


async def test_without_tools_and_where_it_is_malformed_a_tool_call_is_text(opened):
    malformed = '<tool_call>{"name": "weather",</tool_call>'
    _, _, chat = await opened(malformed)
    turn = (await chat.create(model="m", messages=[user("?")], tools=[WEATHER])).choices[0]
    assert (turn.finish_reason, turn.message.content, turn.message.tool_calls) == ("stop", malformed, None)
    _, _, chat = await opened(CALL)
    turn = (await chat.create(model="m", messages=[user("?")], tools=[WEATHER], tool_choice="none")).choices[0]
    assert (turn.message.content, turn.message.tool_calls) == (CALL, None)


@pytest.mark.parametrize("returned", [("reasoning", "reasoning_content"), ("reasoning_content",), ()])
async def test_thinking_is_a_field_of_its_own_and_need_not_be_sent_back(opened, tokenizer, returned):
    parsers = Parsers(tokenizer, "hermes", "qwen3")
    policy, api, chat = await opened("hm</think>It is" + CALL, "hm again</think>Sunny.", parsers=parsers)
    messages = [user("Weather?")]
    turn = (await chat.create(model="m", messages=messages, tools=[WEATHER])).choices[0]
    message = turn.message.model_dump()
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("It is", "hm", "hm")
    assert turn.message.tool_calls[0].function.name == "weather"
    back = {key: message[key] for key in ("role", "content", "tool_calls", *returned)}
    messages += [back, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "clear"}]
    parts = [part async for part in await chat.create(model="m", messages=messages, tools=[WEATHER], stream=True)]
    assert (parts[1].choices[0].delta.reasoning, parts[2].choices[0].delta.content) == ("hm again", "Sunny.")
    assert api.chat.last_text == "Sunny."
    trajectory = policy.trajectory(1.0)
    assert (
        tokenizer.decode(trajectory.tokens[trajectory.sampled])
        == f"hm</think>It is{CALL}<end>hm again</think>Sunny.<end>"
    )


async def test_tools_that_are_not_in_openai_s_form_are_refused(opened):
    _, _, chat = await opened("4")
    with pytest.raises(clients.openai.BadRequestError, match=r"tools\.0\.function: Field required"):
        await chat.create(model="m", messages=[user("?")], tools=[{"name": "weather"}])


@pytest.mark.parametrize(
    ("change", "tools", "shared"),
    [
        (lambda m: m[:1], None, "<start>user 2+2?<end><start>assistant "),
        (lambda m: [user("3+3?"), *m[1:]], None, "<start>user "),
        (lambda m: [m[0], {"role": "assistant", "content": "5"}, m[2]], None, "<start>user 2+2?<end><start>assistant "),
        (lambda m: m, [WEATHER], "<start>"),
    ],
    ids=["asked again", "another question", "another answer", "other tools"],
)
async def test_a_call_that_does_not_go_on_from_an_answer_begins_a_branch(opened, tokenizer, change, tools, shared):
    policy, _, chat = await opened("4", "other", "yes")
    messages = [user("2+2?"), {"role": "assistant", "content": "4"}, user("Sure?")]
    await chat.create(model="m", messages=messages[:1])
    await chat.create(model="m", messages=change(messages), tools=tools or clients.openai.omit)
    await chat.create(model="m", messages=messages)
    trajectory = policy.trajectory(1.0)
    beginning = "<start>user 2+2?<end><start>assistant "
    paths = [tokenizer.decode(sequence.tokens) for sequence in trajectory.sequences()]
    assert f"{beginning}4<end><start>user Sure?<end><start>assistant yes<end>" in paths
    assert f"{policy.prompts[1]}other<end>" in paths
    assert [tokenizer.decode(sequence.tokens[sequence.sampled]) for sequence in trajectory.sequences()] == [
        "4<end>yes<end>",
        "other<end>",
    ]
    assert tokenizer.decode(list(trajectory.sequences())[1].tokens[: trajectory.branches[1].shared]) == shared


async def test_a_stop_string_ends_the_turn_and_what_was_sampled_up_to_its_end_is_trained(opened, tokenizer):
    policy, api, chat = await opened("run()\nObservation: 7", "7")
    messages = [user("?")]
    turn = (await chat.create(model="m", messages=messages, stop=["Observation:", "never"])).choices[0]
    assert (turn.message.content, turn.finish_reason) == ("run()\n", "stop")
    await chat.create(model="m", messages=[*messages, turn.message, user("8")], stop="Observation:")
    trajectory = policy.trajectory(1.0)
    assert tokenizer.decode(trajectory.tokens[trajectory.sampled]) == "run()\nObservation:7<end>"
    assert policy.prompts[1].endswith("run()\nObservation:<end><start>user 8<end><start>assistant ")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_may_be_limited(opened, name):
    _, _, chat = await opened("long answer")
    turn = (await chat.create(model="m", messages=[user("?")], **{name: 4})).choices[0]
    assert (turn.message.content, turn.finish_reason) == ("long", "length")


async def test_where_there_is_no_room_left_answers_are_empty_and_what_was_sampled_before_is_trained(opened, tokenizer):
    policy, _, chat = await opened("4", "", "")
    messages = [user("?")]
    for content, finish in (("4", "stop"), ("", "length"), ("", "length")):
        turn = (await chat.create(model="m", messages=messages)).choices[0]
        assert (turn.message.content, turn.finish_reason) == (content, finish)
        messages += [turn.message, user("Sure?")]
    trajectory = policy.trajectory(1.0)
    assert (tokenizer.decode(trajectory.tokens[trajectory.sampled]), trajectory.sampled[-1]) == ("4<end>", True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 65}, "n: "),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"messages": []}, "messages: "),
        ({"response_format": {"type": "json_object"}}, "response_format.type: only text can be trained"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "neither a data URL nor of the row",
        ),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "oracle"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool call"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "arguments of the call '1' are not JSON",
        ),
        *(
            ({"extra_body": {name: value}}, f"{name} is not possible: ")
            for name, value in {
                "structured_outputs": {"json": {}, "x": 1},
                "guided_json": {"type": "object"},
                "allowed_token_ids": [1],
                "bad_words": ["x"],
                "min_tokens": 5,
                "stop_token_ids": [5],
                "functions": [{"name": "f"}],
                "continue_final_message": True,
                "output_format": {"type": "json_schema"},
            }.items()
        ),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs: the run renders"),
    ],
)
async def test_what_cannot_be_done_is_said(opened, fields, reason):
    policy, _, chat = await opened("4")
    with pytest.raises(clients.openai.BadRequestError, match=reason):
        await chat.create(**({"model": "m", "messages": [user("?")]} | fields))
    assert not policy.prompts
    (message,) = policy.refused
    assert message.startswith("POST /v1/chat/completions: 400, ") and reason in message


async def test_a_field_that_asks_for_nothing_or_is_not_known_is_taken(opened):
    _, _, chat = await opened("4")
    nothing = {"min_tokens": 0, "bad_words": [], "chat_template_kwargs": {}, "surprise": 1}
    assert (await chat.create(model="m", messages=[user("?")], extra_body=nothing)).choices[0].message.content == "4"


@pytest.mark.parametrize("arguments", ["", None, {}, "{}", {"city": "Köln"}, '{"city": "Köln"}'])
def test_a_call_in_the_messages_may_lack_arguments_or_have_them_as_an_object(arguments):
    called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    read = message_of({"role": "assistant", "tool_calls": [called]})["tool_calls"][0]["function"]
    assert read == {"name": "weather", "arguments": {"city": "Köln"} if "K" in str(arguments) else {}}


@pytest.mark.parametrize(
    ("says", "returned"),
    [("\n\n4 ", "4"), ('<tool_call>{"name": "weather", "arguments": {"x": 60.0}}</tool_call>', {"x": 60})],
)
async def test_a_turn_that_comes_back_stripped_or_with_another_number_s_writing_is_the_policy_s(opened, says, returned):
    policy, _, chat = await opened(says, "yes")
    first = await chat.create(model="m", messages=[user("?")], tools=[WEATHER])
    message = first.choices[0].message
    turn: dict = {"role": "assistant", "content": returned}
    if message.tool_calls:
        function = {"name": "weather", "arguments": json.dumps(returned)}
        turn = {"role": "assistant", "tool_calls": [{"id": message.tool_calls[0].id, "function": function}]}
    await chat.create(model="m", messages=[user("?"), turn, user("Sure?")], tools=[WEATHER])
    assert policy.prompts[1].startswith(f"{policy.prompts[0]}{says}")
    assert len(policy.trajectory(1.0).branches) <= 1


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('One.') }}{% endif %}"
    "<start>{{ m.role }} {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<start>assistant {% endif %}"
)


@pytest.mark.parametrize("strict", [True, False])
async def test_further_system_messages_are_shown_also_by_a_template_that_takes_one(strict):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = STRICT if strict else tokenizer.chat_template
    policy = Policy(tokenizer, "4", "5")
    system = [{"role": role, "content": text} for role, text in (("system", "A."), ("developer", "B."))]
    late = {"role": "system", "content": "C."}
    async with (
        policy.endpoint() as api,
        clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0) as client,
    ):
        for further in [], [{"role": "assistant", "content": "4"}, late, user("Sure?")]:
            await client.chat.completions.create(model="m", messages=[*system, user("?"), *further])
    assert policy.prompts[0].startswith("<start>system A.\n\nB.<end><start>user ?<end>")
    shown = "user C.\n\nSure?" if strict else "system C.<end><start>user Sure?"
    assert policy.prompts[1] == f"{policy.prompts[0]}4<end><start>{shown}<end><start>assistant "


async def test_a_key_is_good_for_its_sample_alone_and_while_it_lasts(tokenizer):
    policy = Policy(tokenizer, "4")
    async with policy.endpoint() as api, policy.endpoint() as second:
        assert api.api_key != second.api_key
        async with clients.openai.AsyncOpenAI(base_url=api.base_url, api_key="sample-0", max_retries=0) as client:
            with pytest.raises(clients.openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=[user("?")])
        async with clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            async with policy._endpoint.serve(policy) as ended:
                pass
            with pytest.raises(clients.openai.AuthenticationError, match="ended"):
                await client.with_options(api_key=ended.api_key).models.list()
            with pytest.raises(clients.openai.NotFoundError, match="Not Found"):
                await client.embeddings.create(model="m", input="x")


async def test_a_body_that_is_too_large_is_refused(opened, monkeypatch):
    monkeypatch.setattr(openai_endpoint, "MAX_BODY_BYTES", 1000)
    _, _, chat = await opened("4")
    with pytest.raises(clients.openai.APIStatusError) as refused:
        await chat.create(model="m", messages=[user("x" * 1000)])
    assert refused.value.status_code == 413


async def test_a_compressed_body_is_unpacked_up_to_the_limit_and_for_nobody_without_a_key(opened, monkeypatch):
    monkeypatch.setattr(openai_endpoint, "MAX_BODY_BYTES", 1 << 20)
    _, access, _ = await opened("4")
    request = json.dumps({"model": "m", "messages": [user("2+2=")]}).encode()
    bomb = gzip.compress(bytes(64 << 20), 1)
    bodies = {
        (access.api_key, "gzip", gzip.compress(request)): 200,
        (access.api_key, "gzip", bomb): 413,
        ("sample-0", "gzip", bomb): 401,
        (access.api_key, "gzip", gzip.compress(request)[:-9]): 400,
        (access.api_key, "gzip", gzip.compress(b"{}") * 2): 400,
        (access.api_key, "deflate", request): 400,
        (access.api_key, "zstd", request): 415,
    }
    async with aiohttp.ClientSession() as client:
        tracemalloc.start()
        for (key, encoding, body), status in bodies.items():
            headers = {"Authorization": f"Bearer {key}", "Content-Encoding": encoding}
            async with client.post(f"{access.base_url}/chat/completions", data=body, headers=headers) as answer:
                assert answer.status == status, await answer.text()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 << 20


async def test_a_client_that_goes_away_stops_its_generation_and_may_call_again(opened):
    policy, _, chat = await opened(None, "4")
    call = asyncio.create_task(chat.create(model="m", messages=[user("?")]))
    async with asyncio.timeout(60):
        await policy.changed.until(lambda: policy.busy)
        call.cancel()
        await policy.changed.until(lambda: policy.stopped)
    assert (await chat.create(model="m", messages=[user("?")])).choices[0].message.content == "4"


async def test_calls_at_the_same_time_run_at_the_same_time(opened):
    policy, _, chat = await opened(None, None)
    calls = [asyncio.create_task(chat.create(model="m", messages=[user("?")])) for _ in range(2)]
    async with asyncio.timeout(60):
        await policy.changed.until(lambda: policy.busy == 2)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


async def test_a_call_may_have_a_reward_of_its_own_for_which_the_sample_s_reward_key_is_needed(opened):
    policy, api, chat = await opened("4", "yes")
    first = await chat.create(model="m", messages=[user("2+2?")])
    second = await chat.create(model="m", messages=[user("2+2?"), first.choices[0].message, user("Sure?")])
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api.api_key}"}) as http:
        for body, status in [
            ({"reward": 0.5, "call": first.id, "key": api.reward_key}, 200),
            ({"reward": 0.25, "call": second.id, "key": api.reward_key}, 200),
            ({"reward": 1.0, "call": "chatcmpl-0", "key": api.reward_key}, 400),
            ({"reward": 1.0, "call": second.id}, 403),
            ({"reward": 1.0, "key": api.api_key}, 403),
        ]:
            async with http.post(f"{api.base_url}/reward", json=body) as answer:
                assert answer.status == status
    trajectory = policy.trajectory()
    assert (trajectory.reward, trajectory.returns) == (0.75, None)
    item = policy.forest.trajectory(None, "call", 1.0)
    assert item.returns[item.sampled].tolist() == [0.5, 0.5, *[0.25] * 4]


async def test_the_end_of_a_sample_stops_its_calls(tokenizer):
    policy = Policy(tokenizer, None)
    async with asyncio.timeout(60):
        async with policy._endpoint.serve(policy) as api:
            client = clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0)
            call = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("?")]))
            await policy.changed.until(lambda: policy.busy)
        assert policy.stopped == 1
        with pytest.raises(clients.openai.BadRequestError, match="the sample has ended"):
            await call
    await client.close()
    await policy._endpoint.close()


# --- the workflow


def ask(base_url: str, api_key: str) -> clients.openai.AsyncOpenAI:
    return clients.openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def hasty(base_url, row):
    """Is not called."""


async def asks(base_url, api_key, row):
    async with ask(base_url, api_key) as client:
        response = await client.chat.completions.create(model="m", messages=[user(row["prompt"])])
        return float(response.choices[0].message.content == row["answer"])


async def asks_in_a_sandbox(base_url, api_key, row, sandboxes):
    async with sandboxes.opened("bubble", Task(), Limits(), seconds=60) as sandbox:
        assert "works" in await SandboxTools(sandbox).call("shell", '{"command": "echo works"}')
    await asks(base_url, api_key, row)


async def asks_only(*access):
    await asks(*access)


async def reports(base_url, api_key, row, reward_key, value=0.5):
    await asks(base_url, api_key, row)
    async with ask(base_url, api_key) as client:
        await client.post("/reward", body={"reward": value, "key": reward_key}, cast_to=object)
        with pytest.raises(clients.openai.BadRequestError):
            await client.post("/reward", body={"reward": "much", "key": reward_key}, cast_to=object)


async def reports_too_much(*access, reward_key):
    await reports(*access, reward_key, 1.5)


async def returns_too_little(*access):
    await asks(*access)
    return -0.5


async def returns_a_list(*access):
    await asks(*access)
    return [0.5]


async def rewards_calls_with_too_much(base_url, api_key, row, reward_key):
    async with ask(base_url, api_key) as client:
        for _ in range(2):
            response = await client.chat.completions.create(model="m", messages=[user("?")])
            await client.post("/reward", body={"reward": 0.6, "call": response.id, "key": reward_key}, cast_to=object)


async def blocks_all_threads(base_url, api_key, row):
    """As an agent of a library without asyncio, in one of the threads that asyncio has for such calls."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))

    def ask() -> bool:
        with clients.openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
            response = client.chat.completions.create(model="m", messages=[user(row["prompt"])], tools=[WEATHER])
            return response.choices[0].finish_reason == "tool_calls"

    return float(await asyncio.to_thread(ask))


async def says_nothing(*access):
    return 1.0


async def breaks(*access):
    await asks(*access)
    raise LookupError("no such tool")


async def hangs(*access):
    await asks(*access)
    await asyncio.sleep(3600)


async def is_not_finite(*access):
    await asks(*access)
    return math.nan


async def carries_on(*access):
    with contextlib.suppress(clients.openai.BadRequestError):
        await asks(*access)
    await asyncio.sleep(3600)


def not_async(*access): ...


async def sample(tokenizer, monkeypatch, *says, **options):
    """(policy, trajectory) of one run of the workflow."""
    monkeypatch.setitem(sys.modules, "its_agents", sys.modules[__name__])
    policy = Policy(tokenizer, *says)
    async with asyncio.timeout(60):
        return policy, await agent(policy, ROW, **options)


@pytest.mark.parametrize(
    ("name", "reward", "scored"),
    [("asks", 1.0, []), ("reports", 0.5, []), ("asks_only", 0.25, ["4"]), ("asks_in_a_sandbox", 0.25, ["4"])],
)
async def test_the_agent_gives_the_reward_or_the_row_s_functions_do(tokenizer, monkeypatch, name, reward, scored):
    policy, trajectory = await sample(tokenizer, monkeypatch, "4", agent=f"its_agents:{name}", agent_reward=True)
    assert (trajectory.reward, policy.scored) == (reward, scored)
    assert tokenizer.decode(trajectory.tokens[trajectory.sampled]) == "4<end>"
    await policy.sandboxes.close()


async def test_without_agent_reward_the_row_s_functions_score_and_no_reward_is_taken(tokenizer, monkeypatch):
    policy, trajectory = await sample(tokenizer, monkeypatch, "4", agent="its_agents:asks_only")
    assert (trajectory.reward, policy.scored) == (0.25, ["4"])
    with pytest.raises(AgentFailed, match="returned the reward 1.0, but .* set rollout_manager.*agent_reward=true"):
        await sample(tokenizer, monkeypatch, "4", agent="its_agents:asks")
    with pytest.raises(clients.openai.PermissionDeniedError, match="agent_reward"):
        await sample(tokenizer, monkeypatch, "4", agent="its_agents:reports")


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("is_not_finite", "[nan]"),
        ("reports_too_much", "[1.5]"),
        ("returns_too_little", "[-0.5]"),
        ("returns_a_list", "[[0.5]]"),
        ("rewards_calls_with_too_much", "[0.6, 0.6]"),
    ],
)
async def test_a_reward_that_is_no_number_or_out_of_range_fails_the_sample(tokenizer, monkeypatch, name, rewards):
    says = ["4", "5"]
    with pytest.raises(AgentFailed, match=re.escape(f"the rewards {rewards}, but ") + ".* from 0 to 1 "):
        await sample(tokenizer, monkeypatch, *says, agent=f"its_agents:{name}", agent_reward=True)


async def plays_two(base_url, api_key, row, reward_key):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
        for caller, text in ("a1", "2+2?"), ("b", "Is it 4?"), ("a2", "3+3?"), ("c", "Sure?"):
            body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
            await http.post(f"{base_url}/chat/completions", json=body, headers={"X-Session-Id": caller})
        for caller, agent, reward in (
            ("a1", "solver", 1.0),
            ("a2", "solver", 0.0),
            ("b", "critic", 0.5),
            ("c", "", None),
        ):
            body = {"session": caller, "agent": agent, "reward": reward, "key": reward_key}
            assert (await http.post(f"{base_url}/reward", json=body)).status == 200
        for wrong in {"session": "d", "reward": 1}, {"reward": None}, {"session": "a1", "call": "x", "reward": 1}:
            assert (await http.post(f"{base_url}/reward", json=wrong | {"key": reward_key})).status == 400


async def test_each_of_several_agents_is_trained_on_its_own_reward_or_not_at_all(tokenizer, monkeypatch):
    says = "4", "Yes", "5", "No"
    policy, trajectory = await sample(tokenizer, monkeypatch, *says, agent="its_agents:plays_two", agent_reward=True)
    assert (trajectory.reward, policy.scored) == (0.5, [])
    paths = [(tokenizer.decode(p.tokens[p.sampled]), {*p.returns[p.sampled]}) for p in trajectory.sequences()]
    assert sorted(paths) == [(f"4{END}", {1.0}), (f"5{END}", {0.0}), (f"Yes{END}", {0.5})]
    assert policy.agents == [("solver", 1.0), ("solver", 0.0), ("critic", 0.5), ("", None)]


async def test_the_range_of_rewards_may_be_set(tokenizer, monkeypatch):
    how = {"agent": "its_agents:returns_too_little", "agent_reward": True, "reward_range": [-1.0, 1.0]}
    _, trajectory = await sample(tokenizer, monkeypatch, "4", **how)
    assert trajectory.reward == -0.5


async def test_agents_that_block_all_threads_of_asyncio_get_their_tool_calls(tokenizer, monkeypatch):
    _, trajectory = await sample(tokenizer, monkeypatch, CALL, agent="its_agents:blocks_all_threads", agent_reward=True)
    assert trajectory.reward == 1


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("says_nothing", AgentFailed, "without a single call"),
        ("breaks", LookupError, "no such tool"),
        ("hangs", AgentFailed, "timeout_seconds"),
    ],
)
async def test_an_agent_that_does_not_do_its_work_fails_the_sample(tokenizer, monkeypatch, name, error, reason):
    seconds = 1 if name == "hangs" else 60
    with pytest.raises(error, match=reason):
        await sample(tokenizer, monkeypatch, "4", agent=f"its_agents:{name}", timeout_seconds=seconds)


async def test_a_turn_that_is_lost_fails_the_sample_whatever_the_agent_makes_of_it(tokenizer, monkeypatch):
    lost = RuntimeError("the generator refused the prompt")
    with pytest.raises(RuntimeError, match="refused the prompt"):
        await sample(tokenizer, monkeypatch, lost, agent="its_agents:carries_on")


PROGRAM = """
import json, os, subprocess, sys, urllib.request
reward_key = os.read(int(os.environ["AREAL_REWARD_FD"]), 99).decode()
row = json.load(sys.stdin)
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
done = post("/chat/completions", {"messages": [{"role": "user", "content": row["prompt"]}]})
answer = done["choices"][0]["message"]["content"]
def give(reward):
    post("/reward", {"reward": reward, "key": reward_key})
"""


def program(folder: Path, last: str) -> str:
    path = folder / "its agent.py"
    path.write_text(PROGRAM + last)
    return f"{sys.executable} '{path}'"


@pytest.mark.parametrize(
    ("last", "reward"), [("give(0.5)", 0.5), ("print(json.dumps({'reward': 0.75}))", 0.25)], ids=["given", "none"]
)
async def test_a_program_may_be_the_agent(tokenizer, monkeypatch, tmp_path, last, reward):
    _, trajectory = await sample(tokenizer, monkeypatch, "4", command=program(tmp_path, last), agent_reward=True)
    assert trajectory.reward == reward
    assert tokenizer.decode(trajectory.tokens) == "<start>user 2+2=<end><start>assistant 4<end>"


async def test_a_program_gets_the_variables_that_its_user_names_and_no_secret_of_the_manager(
    tokenizer, monkeypatch, tmp_path
):
    for name in ("HF_TOKEN", "AREAL_KEYS", "TASK_1"):
        monkeypatch.setenv(name, name.lower())
    last = """give(0.25 * all(name in os.environ for name in ("PATH", "TASK_1"))
     + 0.5 * any(name in os.environ for name in ("HF_TOKEN", "AREAL_KEYS")))"""
    command = program(tmp_path, last)
    _, trajectory = await sample(tokenizer, monkeypatch, "4", command=command, agent_reward=True, pass_env=["TASK_*"])
    assert trajectory.reward == 0.25


# What a policy with a shell can do as the agent's user, short of debugging the agent. It looks at no process but those
# from itself up to the agent, which leads the session.
ATTACK = """
import contextlib, json, os, re, subprocess, sys, urllib.error, urllib.request
keys = {"", os.environ["OPENAI_API_KEY"]}
descriptor, process = os.environ["AREAL_REWARD_FD"], os.getpid()
with contextlib.suppress(OSError):
    keys.add(os.read(int(descriptor), 99).decode())
while process:
    for name in "environ", "cmdline", "fd/0", "fd/" + descriptor:
        with contextlib.suppress(OSError), open(f"/proc/{process}/{name}", errors="replace") as file:
            keys.update(re.findall(r"reward-[\\w-]+", file.read()))
    for name in f"/proc/{process}/fd/{descriptor}", f"/dev/fd/{descriptor}":
        with contextlib.suppress(OSError), open(name, "w") as file:
            file.write('{"reward": 1}')
    parent = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
    process = parent if process != os.getsid(0) else None
for line in '{"reward": 1}', '{"reward": 9}':
    with contextlib.suppress(OSError):
        os.write(int(descriptor), line.encode() + b"\\n")
for key in keys:
    for header in os.environ["OPENAI_API_KEY"], key:
        for value in 1, 9, float("nan"):
            body = json.dumps({"reward": value, "key": key}).encode()
            headers = {"Authorization": "Bearer " + header}
            request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/reward", body, headers)
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(request)
                open(sys.argv[1], "w").write("a reward was taken")
print('{"reward": 1}')
"""
RUNS_THE_ANSWER = {
    "inherits descriptors": "subprocess.run(answer, shell=True, close_fds=False)",
    "inherits none": "print(subprocess.run(answer, shell=True, stdout=subprocess.PIPE, text=True).stdout)",
    "is the agent": "os.execlp('sh', 'sh', '-c', answer)",
}


@pytest.mark.parametrize("agent_reward", [True, False])
@pytest.mark.parametrize("how", RUNS_THE_ANSWER)
async def test_a_policy_with_a_shell_gives_itself_no_reward(tokenizer, monkeypatch, tmp_path, how, agent_reward):
    (tmp_path / "attack.py").write_text(ATTACK)
    gives, success = "give(0.125)" if agent_reward else "", tmp_path / "success"
    policy, trajectory = await sample(
        tokenizer,
        monkeypatch,
        f"{sys.executable} {tmp_path / 'attack.py'} {success}",
        command=program(tmp_path, f"{gives}\n{RUNS_THE_ANSWER[how]}"),
        agent_reward=agent_reward,
    )
    assert trajectory.reward == (0.125 if agent_reward else 0.25)
    assert not success.exists()
    statuses = [line.removeprefix("POST /v1/reward: ")[:3] for line in policy.refused]
    assert Counter(statuses) == {"403": 9, "401": 3}  # the last with no key to the endpoint at all


async def test_what_a_program_starts_does_not_get_the_row_with_its_answer(tokenizer, monkeypatch, tmp_path):
    looks = "subprocess.run('cat - /proc/self/fd/0 /proc/$PPID/fd/0', shell=True, stdout=subprocess.PIPE).stdout"
    _, trajectory = await sample(tokenizer, monkeypatch, "4", command=program(tmp_path, f"assert {looks} == b''"))
    assert trajectory.reward == 0.25


async def test_a_program_need_not_read_its_row(tokenizer):
    row = Row(0, "", "", None, {"prompt": "x" * 1_000_000})
    with pytest.raises(AgentFailed, match="without a single call"):
        await agent(Policy(tokenizer), row, command="true")


async def test_a_program_that_fails_says_why(tokenizer, monkeypatch, tmp_path):
    with pytest.raises(AgentFailed, match=r"exit code 3: no tool today"):
        await sample(
            tokenizer, monkeypatch, "4", command=program(tmp_path, "sys.stderr.write('no tool today'); sys.exit(3)")
        )


async def test_a_program_is_killed_with_what_it_has_started(tokenizer, monkeypatch, tmp_path):
    below = tmp_path / "pid"
    # A shell starts within the deadline on a busy machine too; an interpreter may not.
    starts = f"sleep 3600 & echo $! > {shlex.quote(str(below))}"
    for script in (f"{starts}; wait", starts):
        with contextlib.suppress(AgentFailed):
            await sample(tokenizer, monkeypatch, "4", command=f"sh -c {shlex.quote(script)}", timeout_seconds=4)
        for _ in range(1000):
            if not _alive(int(below.read_text())):
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("what the program has started is still alive")


def _alive(pid: int) -> bool:
    """A process without a parent may stay a zombie here."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "needs one of"),
        ({"agent": "m:f", "command": "true"}, "needs one of"),
        ({"agnt": "m:f"}, "'agnt'"),
        ({"agent": "its_agents:not_async"}, "async def"),
        ({"agent": "its_agents:hasty"}, "too many positional arguments: it is called with base_url, api_key and row"),
        ({"command": "no-such-program --fast"}, "no-such-program"),
        ({"command": "python 'my agent.py"}, "no command line"),
        ({"command": "true", "reward_range": [0.0, 2.0]}, "agent_reward=true"),
        ({"command": "true", "agent_reward": True, "reward_range": [1.0, 0.0]}, "the lowest reward, then the highest"),
        ({"command": "true", "agent_reward": True, "reward_range": [0.0, math.inf]}, "finite"),
    ],
)
def test_a_mistake_in_the_options_is_told_before_anything_starts(monkeypatch, options, advice):
    monkeypatch.setitem(sys.modules, "its_agents", sys.modules[__name__])
    with pytest.raises(UserError, match=advice):
        resolve_workflow("agent", options)


async def loop_of_openai(api) -> str:
    async with clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key) as client:
        return await tool_loop(functools.partial(client.chat.completions.create, model="policy"))


async def loop_of_litellm(api) -> str:
    library = pytest.importorskip("litellm")
    access = {"api_base": api.base_url, "api_key": api.api_key}
    return await tool_loop(functools.partial(library.acompletion, model="openai/policy", **access))


async def tool_loop(complete) -> str:
    messages = [user("Weather?")]
    while True:
        message = (await complete(messages=messages, tools=[WEATHER])).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"clear sky over {city}"})


async def loop_of_pydantic_ai(api) -> str:
    library = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    def weather(city: str) -> str:
        return f"clear sky over {city}"

    provider = providers.OpenAIProvider(base_url=api.base_url, api_key=api.api_key)
    guide = library.Agent(models.OpenAIChatModel("policy", provider=provider), tools=[weather])
    return (await guide.run("Weather?")).output


async def loop_of_anthropic(api) -> str:
    anthropic = clients.anthropic

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Today's."""
        return f"clear sky over {city}"

    async with anthropic.AsyncAnthropic(api_key=api.api_key, base_url=api.base_url.removesuffix("/v1")) as client:
        messages = [user("Weather?")]
        runner = client.beta.messages.tool_runner(max_tokens=99, model="m", tools=[weather], messages=messages)
        return (await runner.until_done()).content[0].text


@pytest.mark.parametrize("loop", [loop_of_openai, loop_of_anthropic, loop_of_litellm, loop_of_pydantic_ai])
async def test_a_tool_loop_of_a_client_is_one_conversation_of_exact_tokens(opened, monkeypatch, loop):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    policy, api, _ = await opened(CALL, CALL.replace("Köln", "Rome"), "Sunny.")
    assert await loop(api) == "Sunny."
    assert [prompt.count("clear sky over") for prompt in policy.prompts] == [0, 1, 2]
    assert "clear sky over Köln" in policy.prompts[1] and "clear sky over Rome" in policy.prompts[2]
    assert len(policy.calls) == 3 and not policy.trajectory(1.0).branches


@pytest.mark.parametrize("protocol", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_of_a_library_needs_another_base_url_only(opened, protocol, stream):
    library = pytest.importorskip("agents")
    library.set_tracing_disabled(True)
    requests = []

    @library.function_tool
    def weather(city: str) -> str:
        requests.append(city)
        return "clear sky"

    policy, api, chat = await opened(CALL, CALL.replace("Köln", "Rome"), "Sunny.")
    model = getattr(library, protocol)(model="m", openai_client=chat._client)
    guide = library.Agent("guide", instructions="Be brief.", tools=[weather], model=model)
    if stream:
        outcome = library.Runner.run_streamed(guide, "Weather?")
        [event async for event in outcome.stream_events()]
    else:
        outcome = await library.Runner.run(guide, "Weather?")
    assert (outcome.final_output, requests) == ("Sunny.", ["Köln", "Rome"])
    assert len(policy.calls) == 3 and not policy.trajectory(1.0).branches


async def test_a_graph_of_langgraph_goes_on_in_one_conversation(opened):
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    chat_model = pytest.importorskip("langchain_openai").ChatOpenAI

    def weather(city: str) -> str:
        """Today's."""
        return f"clear sky over {city}"

    policy, api, _ = await opened("fair: " + CALL, CALL.replace("Köln", "Rome"), "Sunny.")
    model = chat_model(model="m", base_url=api.base_url, api_key=api.api_key, max_retries=0)
    graph = prebuilt.create_react_agent(model, [weather], prompt="Be brief.")
    response = await graph.ainvoke({"messages": [("user", "Weather?")]})
    told = ["clear sky over Köln", "", "clear sky over Rome", "Sunny."]
    assert [message.content for message in response["messages"]][2:] == told
    assert len(policy.calls) == 3 and not policy.trajectory(1.0).branches


async def test_mini_swe_agent_goes_on_in_one_conversation(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "settings"))
    default = pytest.importorskip("minisweagent.agents.default")
    local = pytest.importorskip("minisweagent.environments.local")
    litellm_model = pytest.importorskip("minisweagent.models.litellm_model")
    commands = ["echo begun", "echo fixed > code", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands]
    policy, api, _ = await opened(*(f"So: <tool_call>{call}</tool_call>" for call in calls))
    model = litellm_model.LitellmModel(
        model_name="openai/policy",
        cost_tracking="ignore_errors",
        model_kwargs={"api_base": api.base_url, "api_key": api.api_key},
    )
    coder = default.DefaultAgent(
        model, local.LocalEnvironment(cwd=str(tmp_path)), system_template="Fix it.", instance_template="{{task}}"
    )
    outcome = await asyncio.to_thread(coder.run, "Fix code.")
    assert (outcome["exit_status"], (tmp_path / "code").read_text()) == ("Submitted", "fixed\n")
    assert len(policy.calls) == 3 and not policy.trajectory(1.0).branches


PRICES = """
import verifiers.v1 as vf


class PriceTools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def price(self, fruit: str) -> int:
        return {"fig": 7}[fruit]


class Price(vf.Task):
    @vf.reward
    async def told(self, trace) -> float:
        return {"7": 1.0}[trace.last_reply]

    @classmethod
    def toolsets(cls, config):
        return [PriceTools(vf.ToolsetConfig())]


class Prices(vf.Taskset[Price]):
    def load(self):
        yield Price(vf.TaskData(prompt="Say 7."), self.config.task)
        yield Price(vf.TaskData(prompt="How much is a fig?"), self.config.task)


__all__ = ["Prices"]
if __name__ == "__main__":
    PriceTools.run()
"""


@pytest.fixture
def priced(monkeypatch, tmp_path):
    """A row of a task set of verifiers, with the policy's call of the task's tool."""
    pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed")
    (tmp_path / "prices.py").write_text(PRICES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the tools' process
    source = open_source(DataConfig(source="verifiers:prices", eval_size=0), seed=0)
    row = next(row for row in map(source.row, range(2)) if row.prompt == "How much is a fig?")
    return row, '<tool_call>{"name": "price_tools_price", "arguments": {"fruit": "fig"}}</tool_call>'


async def test_a_task_of_verifiers_is_done_with_its_tools_and_scored_by_its_reward(tokenizer, priced):
    row, call = priced
    policy = Policy(tokenizer, call, "7")
    outcome = await resolve_workflow("verifiers", {})(policy, row)
    assert "tools price_tools_price<end><start>user How much is a fig?" in policy.prompts[0]
    assert policy.prompts[1].endswith("<start>tool 7<end><start>assistant ")
    assert (outcome.reward, int(outcome.sampled.sum())) == (1.0, len(call) + len("7") + 2)


async def test_a_task_of_verifiers_that_fails_is_no_score(tokenizer, priced):
    row, _ = priced
    with pytest.raises(RuntimeError, match="task set 'prices': .*KeyError: '8'"):
        await resolve_workflow("verifiers", {})(Policy(tokenizer, "8"), row)


async def test_a_task_of_verifiers_has_a_time_limit_and_leaves_no_program(tokenizer, priced):
    row, _ = priced
    with pytest.raises(AgentFailed, match="did not end within"):
        await resolve_workflow("verifiers", {"timeout_seconds": 12})(Policy(tokenizer, None), row)
    assert not processes_mentioning("prices")


SHARED = """
import itertools

import verifiers.v1 as vf


class Stock(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def stock(self, fruit: str) -> int:
        return {"fig": 7}[fruit]


class Ask(vf.Task):
    @vf.reward
    async def said(self, trace) -> float:
        return float(trace.last_reply == "7")


class Asks(vf.Taskset[Ask]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield Ask(vf.TaskData(id=f"ask-{n}", prompt=f"How many figs? ({n})"), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Stock(vf.SharedToolsetConfig())]


__all__ = ["Asks"]
if __name__ == "__main__":
    Stock.run()
"""


@pytest.fixture
def asking(monkeypatch, tmp_path):
    """The source of an endless task set whose tasks share tools; options: of the environment."""
    pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed")
    (tmp_path / "asks.py").write_text(SHARED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the tools' process
    return lambda **options: open_source(DataConfig(source="verifiers:asks", eval_size=2, options=options), seed=0)


STOCK = '<tool_call>{"name": "stock_stock", "arguments": {"fruit": "fig"}}</tool_call>'


async def test_tasks_without_end_that_share_tools_are_rows_and_are_done(tokenizer, asking):
    source = asking()
    rows = [source.row(4), *source.held_out]
    assert source.size is None and [row.prompt for row in rows] == [f"How many figs? ({n})" for n in (8, 1, 3)]
    assert rows[0].fields["task_id"] == "ask-8" and len(rows[0].fields["task_key"]) > 8
    policy = Policy(tokenizer, STOCK, "7")
    outcome = await resolve_workflow("verifiers", {})(policy, rows[0])
    assert policy.prompts[1].endswith("<start>tool 7<end><start>assistant ") and outcome.reward == 1.0


async def test_several_attempts_of_one_agent_are_one_sample_with_their_mean_reward(tokenizer, asking):
    policy = Policy(tokenizer, "7", "8")
    outcome = await resolve_workflow("verifiers", {})(policy, asking(id="best-of-n", n=2).row(0))
    assert outcome.reward == 0.5 and len(policy.calls) == 2


async def test_an_agent_that_is_not_to_be_trained_is_the_same_policy_without_training(tokenizer, asking):
    row, says = asking(id="user-sim").row(0), ("Figs?", "7", "###DONE###")
    policy = Policy(tokenizer, *says)
    outcome = await resolve_workflow("verifiers", {})(policy, row)
    assert tokenizer.decode(outcome.tokens[outcome.sampled]) == f"7{END}" and outcome.reward == 1.0
    assert policy.agents == [("assistant", 1.0), ("user", None)]
    with pytest.raises(RuntimeError, match="'asks': assistant can be trained in this task, not user: correct"):
        await resolve_workflow("verifiers", {"train": ["assistant", "user"]})(Policy(tokenizer, *says), row)


DUEL = """
import verifiers.v1 as vf
from asks import Ask, Asks


class DuelConfig(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig()
    answerer: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        question = await agents.asker.run(vf.Task(vf.TaskData(prompt="Ask.")))
        await agents.answerer.run(Ask(vf.TaskData(prompt=question.last_reply)))

    async def finalize(self, task, episode):
        asker, answerer = episode.traces
        asker.record_reward("stumped", 1.0 - answerer.reward)


__all__ = ["Duel", "Asks"]
"""


@pytest.mark.parametrize(
    ("train", "sampled", "reward", "returns"),
    [(None, "Six?8", 0.5, {1.0, 0.0}), (["answerer"], "8", 0.0, None), (["asker"], "Six?", 1.0, None)],
)
async def test_each_agent_of_an_environment_is_trained_on_its_own_reward(
    tokenizer, asking, tmp_path, train, sampled, reward, returns
):
    (tmp_path / "duel.py").write_text(DUEL)
    source = open_source(DataConfig(source="verifiers:duel", eval_size=0), seed=0)
    policy = Policy(tokenizer, "Six?", "8")
    outcome = await resolve_workflow("verifiers", {"train": train})(policy, source.row(0))
    assert tokenizer.decode(outcome.tokens[outcome.sampled]).replace(END, "") == sampled
    assert outcome.reward == reward
    assert outcome.returns is None if returns is None else {*outcome.returns[outcome.sampled]} == returns


def test_a_harness_that_runs_commands_of_the_policy_needs_a_place(asking):
    with pytest.raises(
        UserError, match="the program of agent runs commands of the policy: .* data.options.agent.runtime"
    ):
        asking(agent={"harness": {"id": "bash"}})
    assert asking(agent={"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}).row(0).prompt
