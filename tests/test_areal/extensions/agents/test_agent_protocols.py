"""Agents sample through OpenAI's responses and Anthropic's messages: real clients, and a policy that says what the test
has written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

import aiohttp
import numpy as np
import pytest
from fakes.scripted_policy import CHATML, Session, byte_tokenizer
from support import clients

from areal.data.rows import Row
from areal.extensions.agents import openai_endpoint
from areal.extensions.agents.agents import agent
from areal.extensions.agents.anthropic_api import MessageReply, MessagesRequest
from areal.extensions.agents.openai_api import Answer, ApiError, ChatReply, ChatRequest, ChatSession
from areal.extensions.agents.openai_endpoint import OpenAIEndpoint
from areal.extensions.agents.responses_api import ResponseReply, ResponsesRequest
from areal.samples.table import Generation

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "weather", "description": "Today's.", "parameters": SCHEMA}
TOOL = {"name": "weather", "description": "Today's.", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


def prompt_tokens(session: Session) -> int:
    """Of the first call."""
    return int(session.trajectory(0.0).sampled.argmax())


def user(content) -> dict:
    return {"role": "user", "content": content}


@pytest.fixture
async def serve():
    """Opens a sample of the session: its access."""
    async with contextlib.AsyncExitStack() as stack:
        endpoint = OpenAIEndpoint("policy", "127.0.0.1")
        stack.push_async_callback(endpoint.close)
        yield lambda session: stack.enter_async_context(endpoint.serve(session))


@pytest.fixture
async def opened(serve):
    """Opens a sample whose policy says the texts, with a client that `make` makes: (session, access, client)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(make, *says):
            session = Session(*says, tokenizer=byte_tokenizer())
            api = await serve(session)
            return session, api, await stack.enter_async_context(make(api))

        yield start


@pytest.fixture
def responses(opened):
    """Opens a sample whose policy says the texts: (session, access, client.responses)."""

    async def start(*says):
        session, api, client = await opened(
            lambda api: clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0), *says
        )
        return session, api, client.responses

    return start


@pytest.fixture
def messages(opened):
    """Opens a sample whose policy says the texts: (session, access, client.messages)."""

    async def start(*says):
        session, api, client = await opened(claude, *says)
        return session, api, client.messages

    return start


def claude(api, **key) -> clients.anthropic.AsyncAnthropic:
    address = api.base_url.removesuffix("/v1")
    return clients.anthropic.AsyncAnthropic(base_url=address, **(key or {"api_key": api.api_key}), max_retries=0)


async def collected(events) -> list:
    return [event async for event in events]


# --- responses


async def test_a_response_is_what_the_policy_sampled(responses):
    session, _, client = await responses("4")
    with pytest.raises(clients.openai.BadRequestError, match=r"temperature: 0.3 is not possible"):
        await client.create(model="m", input="2+2?", temperature=0.3)
    response = await client.create(model="m", input="2+2?", instructions="Be brief.", temperature=1.0, store=False)
    assert session.prompts == ["system Be brief.user 2+2?assistant "]
    assert (response.output_text, response.status, response.model, response.instructions) == (
        "4",
        "completed",
        "m",
        "Be brief.",
    )
    assert (response.usage.output_tokens, response.usage.total_tokens) == (2, response.usage.input_tokens + 2)


async def test_the_calls_and_results_of_functions_are_turns_of_one_conversation(responses):
    session, api, client = await responses("fair: " + CALL + CALL, "Sunny.")
    inputs = [{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}, user("Weather?")]
    response = await client.create(model="m", input=inputs, tools=[FUNCTION])
    words, call, _ = response.output
    assert (words.content[0].text, call.name, json.loads(call.arguments)) == ("fair:", "weather", {"city": "Köln"})
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "clear"}]}
        for call in response.output[1:]
    ]
    response = await client.create(model="m", input=[*inputs, *response.output, *results], tools=[FUNCTION])
    assert response.output_text == "Sunny."
    assert len(session.calls) == 2 and not session.trajectory(1.0).branches
    assert session.prompts[1].startswith(session.prompts[0])


async def test_a_call_may_name_an_earlier_response_instead_of_its_messages(responses):
    session, _, client = await responses(CALL, "Sunny.", "Yes.", "Rainy.")
    how = {"model": "m", "instructions": "Be brief.", "tools": [FUNCTION]}
    first = await client.create(input="Weather?", **how)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "clear sky"}
    second = await client.create(input=[result], previous_response_id=first.id, **how)
    third = await client.create(input="Sure?", previous_response_id=second.id, **how)
    assert (second.output_text, third.output_text, third.previous_response_id) == ("Sunny.", "Yes.", second.id)
    assert not session.trajectory(1.0).branches
    again = await client.create(input=[result], previous_response_id=first.id, **how)
    assert (again.output_text, len(session.trajectory(1.0).branches)) == ("Rainy.", 2)


async def test_a_streamed_response_has_the_same_parts(responses):
    session, _, client = await responses("fair: " + CALL, "4")
    async with client.stream(model="m", input="Weather?", tools=[FUNCTION]) as stream:
        events = await collected(stream)
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events if event.type != "response.completed"] == [*range(11)]
    words, call = response.output
    assert ([words.content[0].text], call.arguments) == (
        [event.text for event in events if event.type == "response.output_text.done"],
        "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta"),
    )
    assert (words.content[0].text, call.name, response.usage.input_tokens) == (
        "fair:",
        "weather",
        prompt_tokens(session),
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "clear sky"}
    how = {"model": "m", "tools": [FUNCTION], "previous_response_id": response.id}
    assert (await client.create(input=[result], **how)).output_text == "4"


async def test_a_response_that_was_cut_is_incomplete(responses):
    _, _, client = await responses("long answ…")
    last = (await collected(await client.create(model="m", input="?", stream=True)))[-1]
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert (last.response.output_text, last.response.output[0].status) == ("long answ", "incomplete")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input": []}, "no message"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"role": "oracle", "content": "x"}]}, "oracle"),
        ({"input": [user([{"type": "input_image", "image_url": "x"}])]}, "neither a data URL nor of the row"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            "arguments of the call '1' are not JSON",
        ),
        ({"tools": [{"type": "web_search"}]}, "the type 'web_search' cannot be called, .*in Codex, set web_search = "),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "the tool 'apply_patch' of .*apply_patch_freeform"),
        ({"tools": [{"type": "local_shell"}]}, "the type 'local_shell' cannot be called, .*name another model"),
        ({"tools": [{"type": "namespace", "name": "mcp"}]}, "the tool 'mcp' of the type 'namespace' .*of MCP servers"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "'web_search_call': the tool of the type 'web_search'"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "1"}]}, "'custom_tool_call_output': .*apply_patch"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.type: only text can be trained"),
        ({"max_output_tokens": 0}, "max_output_tokens: "),
        ({"background": True}, "background: "),
        ({"conversation": "c"}, "conversation: "),
        ({"prompt": {"id": "p"}}, "prompt: "),
        ({"previous_response_id": "resp_1"}, "response of this sample"),
    ],
)
async def test_what_a_response_cannot_do_is_said(responses, fields, reason):
    session, _, client = await responses("4")
    with pytest.raises(clients.openai.BadRequestError, match=reason):
        await client.create(**({"model": "m", "input": "?"} | fields))
    assert not session.prompts


# --- messages


async def test_a_message_is_what_the_policy_sampled(messages):
    session, _, client = await messages("4")
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "Be brief."}]
    how = {"model": "m", "max_tokens": 9, "messages": [user("2+2?")]}
    with pytest.raises(clients.anthropic.BadRequestError, match=r"top_k: 5 is not possible"):
        await client.create(**how, extra_body={"top_k": 5})
    response = await client.create(system=system, **how, extra_body={"temperature": 1})
    assert session.prompts == ["system Be brief.user 2+2?assistant "]
    assert ([block.to_dict() for block in response.content], response.model) == ([{"type": "text", "text": "4"}], "m")
    assert (response.stop_reason, response.stop_sequence, response.role) == ("end_turn", None, "assistant")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (prompt_tokens(session), 2)


async def test_the_uses_and_results_of_tools_are_turns_of_one_conversation(messages):
    session, _, client = await messages("fair: " + CALL + CALL, "Sunny.", "Yes.")
    how = {"model": "m", "max_tokens": 9, "tools": [TOOL], "tool_choice": {"type": "any"}}
    inputs = [user([{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}])]
    response = await client.create(messages=inputs, **how)
    words, use, second = response.content
    assert (response.stop_reason, words.text, use.name, use.input) == ("tool_use", "fair:", "weather", {"city": "Köln"})
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "clear sky"}]},
        {"type": "tool_result", "tool_use_id": second.id, "content": "no such city", "is_error": True},
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    inputs += [{"role": "assistant", "content": [thought, *response.content]}]
    inputs += [user([*results, {"type": "text", "text": "So?"}])]
    response = await client.create(messages=inputs, **how)
    assert response.content[0].text == "Sunny."
    inputs += [
        {"role": "assistant", "content": response.content},
        {"role": "system", "content": "Be kind."},
        user("Sure?"),
    ]
    assert (await client.create(messages=inputs, **how)).content[0].text == "Yes."
    words = session.tokenizer.decode(session.trajectory(1.0).tokens, skip_special_tokens=True)
    results = "tool clear skytool no such cityuser So?"
    assert words.endswith(f"{results}assistant Sunny.system Be kind.user Sure?assistant Yes.")
    assert len(session.calls) == 3


async def test_a_streamed_message_has_the_same_parts(messages):
    session, _, client = await messages("fair: " + CALL, "4")
    how = {"model": "m", "max_tokens": 9, "tools": [TOOL]}
    async with client.stream(messages=[user("Weather?")], **how) as stream:
        response = await stream.get_final_message()
    words, use = response.content
    assert (words.text, use.name, use.input, response.stop_reason) == ("fair:", "weather", {"city": "Köln"}, "tool_use")
    sampled = len(("fair: " + CALL).encode()) + 1
    assert (response.usage.input_tokens, response.usage.output_tokens) == (prompt_tokens(session), sampled)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "clear sky"}
    inputs = [user("Weather?"), {"role": "assistant", "content": response.content}, user([result])]
    events = await collected(await client.create(messages=inputs, stream=True, **how))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_the_tool_runner_of_anthropic_s_client_goes_on_in_one_conversation(opened):
    @clients.anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Today's."""
        return f"clear sky over {city}"

    session, _, client = await opened(lambda api: claude(api, api_key=api.api_key), CALL, "Sunny.")
    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=9, system="Be brief.", tools=[weather], messages=[user("Weather?")]
    )
    assert (await runner.until_done()).content[0].text == "Sunny."
    words = session.tokenizer.decode(session.trajectory(1.0).tokens, skip_special_tokens=True)
    assert (
        words == f"tools weathersystem Be brief.user Weather?assistant {CALL}tool clear sky over Kölnassistant Sunny."
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_has_the_messages_the_system_prompt_and_the_tools_that_came_before(opened, stream):
    session, _, client = await opened(lambda api: claude(api, api_key=api.api_key), "4", "Yes.", "No.")
    how = {"model": "m", "max_tokens": 9, "betas": ["message-threads-2026-08-12"], "stream": stream}

    async def say(text: str, thread: dict, **fields) -> str:
        response = await client.beta.messages.create(messages=[user(text)], thread=thread, **how, **fields)
        return (await collected(response))[0].message.id if stream else response.id

    first = await say("2+2?", {"type": "create"}, system="Be brief.", tools=[TOOL])
    for text in ("Sure?", "No?"):
        await say(text, {"type": "continue", "previous_message_id": first})
    begun = "tools weathersystem Be brief.user 2+2?assistant 4user "
    assert session.prompts[1:] == [f"{begun}Sure?assistant ", f"{begun}No?assistant "]
    with pytest.raises(clients.anthropic.types.ThreadNotFoundError):
        await say("?", {"type": "continue", "previous_message_id": "msg_0"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "text", "reason", "sequence"),
    [
        ("run() # now; end", "run() ", "stop_sequence", "# "),
        ("run()", "run()", "end_turn", None),
        ("run…", "run", "max_tokens", None),
    ],
)
async def test_a_message_says_why_it_ended(messages, stream, says, text, reason, sequence):
    _, _, client = await messages(says)
    how = {"model": "m", "max_tokens": 99, "messages": [user("?")], "stop_sequences": ["never", "; ", "# "]}
    if stream:
        async with client.stream(**how) as events:
            response = await events.get_final_message()
    else:
        response = await client.create(**how)
    assert (response.content[0].text, response.stop_reason, response.stop_sequence) == (text, reason, sequence)


async def test_tokens_are_counted_without_a_turn(messages):
    session, _, client = await messages("4")
    how = {"model": "m", "system": "Be brief.", "messages": [user("2+2?")], "tools": [TOOL]}
    counted = await client.count_tokens(**how)
    response = await client.create(max_tokens=9, **how)
    assert (counted.input_tokens, len(session.prompts)) == (response.usage.input_tokens, 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [user([{"type": "image", "source": {}}])]}, "neither a data URL nor of the row"),
        ({"messages": [user([{"type": "tool_use", "id": "1", "name": "f", "input": {}}])]}, "'tool_use'"),
        ({"messages": [user([{"type": "tool_result", "tool_use_id": "1", "content": [{}]}])]}, "text"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [user("?"), {"role": "assistant", "content": "The answer is"}]}, "last message"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "permissions.deny has to have WebSearch"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
        ({"max_tokens": 0}, "max_tokens: "),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format: only text can be trained",
        ),
    ],
)
async def test_what_a_message_cannot_do_is_said(messages, fields, reason):
    session, _, client = await messages("4")
    with pytest.raises(clients.anthropic.BadRequestError, match=reason) as refused:
        await client.create(**({"model": "m", "max_tokens": 9, "messages": [user("?")]} | fields))
    assert (refused.value.body["type"], refused.value.type) == ("error", "invalid_request_error")
    assert not session.prompts


async def test_the_key_may_come_in_either_header(serve):
    api = await serve(Session("4"))
    async with claude(api, auth_token=api.api_key) as client:
        assert (await client.messages.count_tokens(model="m", messages=[user("?")])).input_tokens == 1
    async with claude(api, api_key="sample-0") as client:
        with pytest.raises(clients.anthropic.AuthenticationError) as refused:
            await client.messages.create(model="m", max_tokens=9, messages=[user("?")])
        assert refused.value.type == "authentication_error"


async def test_a_sample_may_be_asked_in_every_protocol(serve):
    session = Session("4", "yes", "9")
    api = await serve(session)
    inputs = [user("2+2?")]
    async with clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0) as client:
        response = await client.chat.completions.create(model="m", messages=inputs)
        inputs += [{"role": "assistant", "content": response.choices[0].message.content}, user("Sure?")]
        response = await client.responses.create(model="m", input=inputs)
        inputs += [{"role": "assistant", "content": response.output_text}, user("3*3?")]
    async with claude(api) as client:
        response = await client.messages.create(model="m", max_tokens=9, messages=inputs)
    assert response.content[0].text == "9"
    assert len(session.calls) == 3 and not session.trajectory(1.0).branches


# --- streams


def replies() -> dict:
    chat = ChatRequest(messages=[user("?")], stream=True)
    response = ResponsesRequest(input="?", stream=True)
    message = MessagesRequest(messages=[user("?")], stream=True)
    return {
        "chat": ChatReply(chat, Session().tokenizer),
        "response": ResponseReply(response, {}),
        "message": MessageReply(message, Session().tokenizer, {}),
    }


def answer(**message) -> Answer:
    sampled = Generation(np.zeros(3, np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32), "stop")
    return Answer({"role": "assistant", "content": "four"} | message, "stop", sampled, 1)


def texts(events: list) -> list[str]:
    """The pieces of text in the events of any protocol."""
    results = []
    for event in events:
        match event:
            case {"choices": [{"delta": {"content": text}}]}:
                results.append(text)
            case {"type": "response.output_text.delta", "delta": text}:
                results.append(text)
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
                results.append(text)
    return [text for text in results if text]


@pytest.mark.parametrize("kind", replies())
@pytest.mark.parametrize("pieces", [[], ["fo"], ["fo", "u"], ["fo", "ur"]])
def test_the_end_of_a_stream_tells_what_was_not_told_before(kind, pieces):
    reply = replies()[kind]
    events = [*reply.start(), *(event for piece in pieces for event in reply.text(piece)), *reply.finish(answer())]
    remainder = "four".removeprefix("".join(pieces))
    assert texts(events) == [*pieces, *([remainder] if remainder else [])]


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("chat", lambda body: body["choices"][0]["message"]["reasoning"]),
        ("response", lambda body: body["output"][0]["content"][0]["text"]),
        ("message", lambda body: body["content"][0]["thinking"]),
    ],
)
def test_reasoning_comes_before_the_text(kind, where):
    assert where(replies()[kind].body(answer(reasoning="2+2"))) == "2+2"
    reply = replies()[kind]
    report = json.dumps([*reply.start(), *reply.finish(answer(reasoning="2+2"))])
    assert 0 < report.index('"2+2"') < report.index('"four"')


class Halting(ChatSession):
    """Tells a piece of text, and fails when it is let go."""

    async def complete(self, request, name, on_text=None):
        self.go, self.stopped = asyncio.Event(), asyncio.Event()
        on_text("fo")
        try:
            await self.go.wait()
        finally:
            self.stopped.set()
        raise ApiError("the sample has failed", "sample_failed")


@pytest.fixture
async def halting(serve, monkeypatch):
    """Opens a sample that tells a piece of text: (chat, an iterator over the events of a stream)."""
    monkeypatch.setattr(openai_endpoint, "ChatSession", Halting)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):

        async def start(kind):
            api = await serve(Session())
            openai_client = clients.openai.AsyncOpenAI(base_url=api.base_url, api_key=api.api_key, max_retries=0)
            claude_client = claude(api)
            await stack.enter_async_context(openai_client)
            await stack.enter_async_context(claude_client)
            match kind:
                case "chat":
                    stream = await openai_client.chat.completions.create(model="m", messages=[user("?")], stream=True)
                case "response":
                    stream = await openai_client.responses.create(model="m", input="?", stream=True)
                case _:
                    how = {"model": "m", "max_tokens": 9, "stream": True}
                    stream = await claude_client.messages.create(messages=[user("?")], **how)
            return api.chat, stream

        yield start


async def until_text(stream) -> None:
    async for event in stream:
        if texts([event.to_dict()]):
            return
    pytest.fail("there is no text in the stream")


@pytest.mark.parametrize("kind", replies())
async def test_text_is_sent_while_it_is_sampled_and_an_error_after_it_is_an_event(halting, kind):
    chat, stream = await halting(kind)
    await until_text(stream)
    chat.go.set()
    if kind == "response":
        assert [(event.type, event.code) for event in await collected(stream)] == [("error", "sample_failed")]
    else:
        with pytest.raises((clients.openai.APIError, clients.anthropic.APIError), match="the sample has failed"):
            await collected(stream)


@pytest.mark.parametrize("kind", replies())
async def test_a_client_that_leaves_a_stream_stops_its_call(halting, kind):
    chat, stream = await halting(kind)
    await until_text(stream)
    await stream.close()
    await chat.stopped.wait()


# --- the workflow


PROGRAM = """
import anthropic, json, os, sys
reward_key = os.read(int(os.environ["AREAL_REWARD_FD"]), 99).decode()
given = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
done = anthropic.Anthropic().messages.create(model="m", max_tokens=9, messages=given)
given = {"reward": float(done.content[0].text), "key": reward_key}
anthropic.Anthropic().post("/v1/reward", body=given, cast_to=object)
"""


async def test_a_program_s_client_finds_the_endpoint_by_itself(serve, tmp_path):
    class OfAgent(Session):
        def endpoint(self):
            return contextlib.nullcontext(api)

    session = OfAgent("0.5")
    api = await serve(session)
    (tmp_path / "program.py").write_text(PROGRAM)
    row = Row(0, "?", "", None, {"prompt": "?"})
    outcome = await agent(session, row, command=f"{sys.executable} {tmp_path / 'program.py'}", agent_reward=True)
    assert outcome.reward == 0.5


# --- bodies that Codex and Claude Code have sent, with shorter texts: recorded ones (ccproxy-api has those of Codex
# 0.34.0 and Claude Code 1.0.113, a page on Claude's wire format that of Claude Code 2.1.69), later ones as reported

SHELL = {"cmd": {"type": "string"}}
CODEX = {
    "model": "policy",
    "instructions": "You are Codex.",
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": SHELL, "required": ["cmd"], "additionalProperties": False},
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
CLAUDE_CODE = {
    "model": "policy",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.208; cch=0a1;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object", "properties": SHELL}}
    ],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


def codex_item(role: str, text: str) -> dict:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


ARGV = {"command": {"type": "array", "items": {"type": "string"}, "description": "The command"}}
ARGV |= {"timeout_ms": {"type": "number", "description": "Its limit"}, "workdir": {"type": "string"}}
CODEX_0_34 = {
    "model": "gpt-5",
    "instructions": "You are a coding agent.",
    "tools": [
        {"type": "function", "name": name, "description": what, "strict": False}
        | {"parameters": {"type": "object", "properties": of, "required": required, "additionalProperties": False}}
        for name, what, of, required in (
            ("shell", "Runs a shell command and returns its output", ARGV, ["command"]),
            ("view_image", "Attach a local image.", {"path": {"type": "string"}}, ["path"]),
        )
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "2442d30f-2543-48fc-8fd2-bf595e099655",
}
CONTEXT = "<environment_context>\n  <cwd>/w</cwd>\n  <shell>zsh</shell>\n</environment_context>"
OF_CODEX = {
    "0.34.0": (
        CODEX_0_34,
        [
            codex_item("user", text)
            for text in ("<user_instructions>\n\nBe brief.</user_instructions>", CONTEXT, "List.")
        ],
        {"name": "shell", "arguments": {"command": ["ls"], "timeout_ms": 1000}},
        "tools shellview_imagesystem You are a coding agent.user <user_instructions>\n\nBe brief.</user_instructions>",
    ),
    "later": (
        CODEX,
        [
            codex_item("developer", "<permissions instructions>read-only</permissions instructions>"),
            codex_item("user", CONTEXT),
            codex_item("user", "List."),
        ],
        {"name": "exec_command", "arguments": {"cmd": "ls"}},
        "tools exec_commandsystem You are Codex.\n\n<permissions instructions>read-only",
    ),
}
SCHEMA = {"type": "object", "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}
BASH = {"command": {"type": "string"}, "timeout": {"type": "number", "description": "in milliseconds (max 600000)"}}
TODO = {"todos": {"type": "array", "items": {"type": "object", "properties": {"content": {"type": "string"}}}}}
CLAUDE_CODE_1_0_113 = {
    "model": "claude-sonnet-4-20250514",
    "temperature": 1,
    "system": [
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "\nBe concise.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {"name": name, "description": what, "input_schema": SCHEMA | {"properties": of, "required": [*of][:1]}}
        for name, what, of in (("Bash", "Executes a command.", BASH), ("TodoWrite", "Keeps a list.", TODO))
    ],
    "metadata": {"user_id": "user_a7_account_79_session_8e"},
    "max_tokens": 21333,
}
CLAUDE_CODE_2_1_69 = CLAUDE_CODE | {
    "tools": CLAUDE_CODE_1_0_113["tools"][:1],
    "metadata": {"user_id": "user_07_account_26_session_b4"},
    "output_config": {"effort": "medium"},
}
REMINDER = {"type": "text", "text": "<system-reminder>Today.</system-reminder>"}
ASKED = {
    "role": "user",
    "content": [REMINDER, {"type": "text", "text": "List.", "cache_control": {"type": "ephemeral"}}],
}
SAID = "user <system-reminder>Today.</system-reminder>List."
OF_CLAUDE_CODE = {
    "1.0.113": (
        CLAUDE_CODE_1_0_113,
        [ASKED],
        {"name": "Bash", "arguments": {"command": "ls", "timeout": 1000}},
        f"tools BashTodoWritesystem You are Claude Code.\nBe concise.{SAID}assistant ",
    ),
    "2.1.69": (
        CLAUDE_CODE_2_1_69,
        [{"role": "user", "content": "<available-deferred-tools>\nWebFetch\n</available-deferred-tools>"}, ASKED],
        {"name": "Bash", "arguments": {"command": "ls"}},
        "tools Bashsystem You are Claude Code.user <available-deferred-tools>\nWebFetch\n</available-deferred-tools>"
        f"{SAID}assistant ",
    ),
    "2.1.208": (
        CLAUDE_CODE,
        [ASKED, {"role": "system", "content": "Available agents: none."}],
        {"name": "Bash", "arguments": {"cmd": "ls"}},
        f"tools Bashsystem You are Claude Code.{SAID}\n\nAvailable agents: none.assistant ",
    ),
}


@pytest.fixture
async def posted(serve):
    """Posts a body to a sample whose chat template takes one system message, the first: the answer or its events."""
    tokenizer = byte_tokenizer()
    system = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}{% endif %}"
    tokenizer.chat_template = CHATML.replace("{% for m in messages %}", "{% for m in messages %}" + system)
    async with contextlib.AsyncExitStack() as stack:

        async def start(*says):
            session = Session(*says, tokenizer=tokenizer)
            api = await serve(session)
            http = await stack.enter_async_context(aiohttp.ClientSession(headers={"x-api-key": api.api_key}))

            async def post(path: str, body: dict, stream: bool):
                async with http.post(f"{api.base_url}/{path}", json=body | {"stream": stream}) as answer:
                    assert answer.status == 200, await answer.text()
                    if not stream:
                        return await answer.json()
                    lines = (await answer.text()).splitlines()
                    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

            return session, post

        yield start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", OF_CODEX)
async def test_a_tool_loop_of_codex_is_one_conversation(posted, version, stream):
    body, items, function, beginning = OF_CODEX[version]
    call = f"<tool_call>{json.dumps(function)}</tool_call>"
    session, post = await posted(f"I look.{call}", "Done.")
    answer = await post("responses", body | {"input": items}, stream)
    items_done = (
        [event["item"] for event in answer if event["type"] == "response.output_item.done"]
        if stream
        else answer["output"]
    )
    message, called = items_done
    assert message["content"][0]["text"] == "I look."
    assert {"name": called["name"], "arguments": json.loads(called["arguments"])} == function
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "a.py"}
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    await post("responses", body | {"input": [*items, reasoning, message, called, result]}, stream)
    assert session.prompts[0].startswith(beginning)
    assert session.prompts[1] == f"{session.prompts[0]}I look.{call}tool a.pyassistant "
    assert not session.trajectory(1.0).branches


async def test_tools_of_later_versions_of_codex_are_refused_with_how_they_are_switched_off(posted):
    _, post = await posted()
    agents = {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": CODEX["tools"]}
    for tool, how in (agents, "--disable multi_agent"), ({"type": "image_generation"}, "--disable image_generation"):
        with pytest.raises(AssertionError, match=f"cannot be called, .*in Codex, .*{how}"):
            await post("responses", CODEX | {"input": "List.", "tools": [*CODEX["tools"], tool]}, False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", OF_CLAUDE_CODE)
async def test_a_tool_loop_of_claude_code_is_one_conversation(posted, version, stream):
    body, messages, function, prompt = OF_CLAUDE_CODE[version]
    call = f"<tool_call>{json.dumps(function)}</tool_call>"
    session, post = await posted(f"I look.{call}", "Done.")
    answer = await post("messages", body | {"messages": messages}, stream)
    if stream:
        blocks = [event["content_block"] for event in answer if event["type"] == "content_block_start"]
        deltas = [event["delta"] for event in answer if event["type"] == "content_block_delta"]
        blocks = [blocks[0] | {"text": deltas[0]["text"]}, blocks[1] | {"input": json.loads(deltas[1]["partial_json"])}]
    else:
        blocks = answer["content"]
    assert [block.get("text") or block["input"] for block in blocks] == ["I look.", function["arguments"]]
    result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "a.py", "is_error": False}
    later = [*messages, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    billed = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.208; cch=9f2;"}
    system = [billed if block["text"].startswith("x-") else block for block in body["system"]]
    await post("messages", body | {"messages": later, "system": system}, stream)
    assert session.prompts[0] == prompt
    assert session.prompts[1] == f"{session.prompts[0]}I look.{call}tool a.pyassistant "
    assert not session.trajectory(1.0).branches
