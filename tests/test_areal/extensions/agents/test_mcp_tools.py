"""The policy calls tools of MCP servers, as programs and by HTTP. The library is real; most programs speak its protocol
without it, since its import takes longer than a sample."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.scripted_policy import Session, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from support.process_tree import processes_mentioning

from areal.base.errors import UserError
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.extensions.agents import mcp_tools
from areal.extensions.agents.mcp_tools import ServerFailed
from areal.workflows.named_workflows import rehearse, resolve_workflow

pytest.importorskip("mcp", reason="the MCP library is not installed")
FAKES = Path(__file__).parents[3] / "fakes"
SCRIPT = str(FAKES / "notes_server.py")
ROW = Row(index=0, prompt="Note it.", answer=None, reward=None, fields={})


def chat(*turns: str, **scores: float) -> Session:
    return Session(*turns, scores=scores, tokenizer=byte_tokenizer())


def program(*arguments: str, script: str = "brief_notes_server.py") -> dict:
    """The server as a program; `arguments` only mark its process."""
    return {"notes": {"command": sys.executable, "args": [str(FAKES / script), *arguments]}}


def call(tool: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


async def run(session: Session, servers: dict, **options):
    return await resolve_workflow("tools", {"servers": servers, **options})(session, ROW)


@pytest.fixture
def url(free_port):
    """The server, by HTTP."""
    with subprocess.Popen([sys.executable, SCRIPT, str(free_port)], stderr=subprocess.DEVNULL) as process:
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", free_port)):
                time.sleep(0.05)
        yield f"http://127.0.0.1:{free_port}/mcp"
        process.kill()


async def test_the_policy_sees_tools_calls_them_and_its_turn_without_a_call_is_scored(tmp_path):
    session = chat(f"So: {call('note', text='Köln')}", "Noted.", **{"Noted.": 0.5})
    outcome = await run(session, program(str(tmp_path), script="notes_server.py"))
    assert session.prompts[0] == "tools notesleepvariabledieuser Note it.assistant "
    assert session.prompts[1].endswith("</tool_call>tool Kölnassistant ")
    assert outcome.reward == 0.5
    assert "Köln" in session.tokenizer.decode(outcome.tokens[outcome.sampled])
    assert not processes_mentioning(str(tmp_path))


async def test_no_sample_sees_what_another_one_has_left_in_a_program():
    sessions = [chat(call("note", text=text), "Done.") for text in "ab"]
    await asyncio.gather(*(run(session, program()) for session in sessions))
    assert [session.prompts[1].rpartition("tool ")[2] for session in sessions] == ["aassistant ", "bassistant "]


async def test_a_program_gets_the_variables_that_its_user_names_and_no_secret_of_the_manager(monkeypatch):
    for name in ("HF_TOKEN", "AREAL_KEYS", "MY_NAME", "TASK_1"):
        monkeypatch.setenv(name, name.lower())
    servers = program()
    servers["notes"] |= {"pass_env": ["TASK_*"], "env": {"MY_NAME": "given"}}
    names = ["HF_TOKEN", "AREAL_KEYS", "MY_NAME", "TASK_1"]
    session = chat(*(call("variable", name=name) for name in names), "Done.")
    await run(session, servers, max_turns=5)
    answers = [prompt.rpartition("tool ")[2].removesuffix("assistant ") for prompt in session.prompts[1:]]
    assert answers == ["not set", "not set", "given", "task_1"]


async def test_all_calls_of_a_turn_are_made_in_order_and_the_errors_of_tools_are_told_to_the_policy():
    turns = [call("note", text="a") + call("note", text="b"), call("read"), call("note")]
    turns += ['<tool_call>{"name": "note", "arguments": [1]}</tool_call>', "Sorry."]
    session = chat(*turns, **{"Sorry.": 0.25})
    outcome = await run(session, program(script="notes_server.py"))
    assert "tool atool a, bassistant" in session.prompts[1]
    assert "Error: there is no tool read" in session.prompts[2]
    assert "Field required" in session.prompts[3]
    assert "Error: the arguments of note are no JSON object" in session.prompts[4]
    assert outcome.reward == 0.25


async def test_results_are_all_that_a_tool_says_or_fail_the_sample():
    forms = {name: mcp_tools.Server(**server) for name, server in program(script="mcp_forms_server.py").items()}
    expected = {
        "structured": '{"temperature": 7, "sky": "rain"}',
        "summary": '2 rows.\n{"rows": ["a", "b"]}',
        "repeated": '{"n": 1}',
        "wrapped": "seven",
        "listed": "a\nb",
        "empty": "",
        "link": "notes 7 file:///notes/7.txt",
        "resource": "inside",
        "error": "no such place",
    }
    async with mcp_tools.opened(forms, 30) as tools:
        assert {name: await tools.call(name, "{}") for name in expected} == expected
        for name, kind in {"picture": "image .image/png.", "blob": "resource .a/b."}.items():
            with pytest.raises(ServerFailed, match=f"{name} has answered with a part of the type {kind}"):
                await tools.call(name, "{}")


texts = st.text(min_size=1, max_size=6)
resources = st.fixed_dictionaries({"uri": st.just("file:///a"), "text": texts}) | st.fixed_dictionaries(
    {"uri": st.just("file:///a"), "blob": st.just("AAAA")}
)
contents = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts | st.sampled_from(["1", "true", "[]", '{"a": 1}'])})
    | st.fixed_dictionaries({"type": st.just("resource"), "resource": resources})
    | st.fixed_dictionaries(
        {"type": st.just("resource_link"), "uri": st.just("file:///b"), "name": texts},
        optional={"title": texts, "description": texts},
    ),
    max_size=2,
)
values = st.recursive(
    texts | st.none() | st.booleans() | st.integers(0, 2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts | st.just("result"), inner, max_size=2),
    max_leaves=4,
)


def leaves(value) -> list[str]:
    """What a value says: its texts, those of keys among them, and the JSON of all else."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [key, *leaves(item)]]
    if isinstance(value, list):
        return [text for item in value for text in leaves(item)]
    return [value if isinstance(value, str) else json.dumps(value)]


@given(contents, st.none() | st.dictionaries(texts | st.just("result"), values, max_size=2))
def test_what_is_read_of_a_result_has_all_that_it_says_or_it_is_refused(content, structured):
    from mcp_types import CallToolResult
    from pydantic import ValidationError

    try:
        result = CallToolResult.model_validate({"content": content, "structuredContent": structured})
        shown = mcp_tools.text_of_result(result, "tool")
    except (ValidationError, ServerFailed):
        return
    said = [text for part in content for text in leaves({key: part[key] for key in part if key != "type"})]
    keys = {"text", "resource", "uri", "name", "title", "description", "file:///a"}
    said = [text for text in said if text not in keys] + [text for text in leaves(structured or {}) if text != "result"]
    assert not [text for text in said if text not in shown and json.dumps(text, ensure_ascii=False)[1:-1] not in shown]


async def test_long_results_are_cut_and_the_last_turn_is_scored_without_its_calls():
    calls = [call("note", text="abc"), call("die")]
    session = chat(*calls, **{calls[1]: 0.75})
    outcome = await run(session, program(), max_turns=2, max_output=2)
    assert "tool ab\n[1 more characters]assistant" in session.prompts[1]
    assert outcome.reward == 0.75


async def test_a_program_that_dies_fails_its_sample_and_no_other():
    second = asyncio.create_task(run(chat(call("note", text="a"), "Done.", **{"Done.": 1.0}), program()))
    with pytest.raises(ServerFailed, match="the MCP server 'notes' was lost while die ran"):
        await run(chat(call("die")), program())
    assert (await second).reward == 1.0


async def test_what_the_sample_itself_raises_stays_what_it_is(tmp_path):
    with pytest.raises(IndexError):
        await run(chat(), program(str(tmp_path)))
    assert not processes_mentioning(str(tmp_path))


async def test_a_sample_that_is_given_up_leaves_no_program(tmp_path):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4):
            await run(chat(call("sleep", seconds=3600)), program(str(tmp_path)))
    assert not processes_mentioning(str(tmp_path))


async def test_a_server_at_a_url_answers_all_samples_and_a_call_that_takes_too_long_is_told(url, monkeypatch):
    first = chat(call("note", text="a"), "Done.")
    await run(first, {"far": {"url": url}})
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", None)  # slow, so that only the first sample does it
    second = chat(call("note", text="b"), call("sleep", seconds=30), "Done.")
    await run(second, {"far": {"url": url}}, timeout_seconds=3.0)
    assert second.prompts[1].endswith("tool a, bassistant ")
    assert "Error: Request 'tools/call' timed out" in second.prompts[2]


async def test_a_server_at_a_url_that_is_lost_fails_the_sample(url):
    with pytest.raises(ServerFailed, match="the MCP server 'far' was lost while die ran"):
        await run(chat(call("die")), {"far": {"url": url}})


async def test_a_model_whose_template_shows_no_tools_is_refused():
    with pytest.raises(ValueError, match="the model's chat template shows it no tools"):
        await run(Session("x"), program())


NOTES = program()["notes"]


@pytest.mark.parametrize(
    ("servers", "sentence"),
    [
        ({}, "needs tools: set rollout_manager.workflow_options.tools="),
        ({"a": {"comand": "python"}}, "Extra inputs are not permitted"),
        ({"a": {}}, "servers.a needs one of command and url"),
        ({"a": NOTES | {"url": "http://localhost"}}, "servers.a needs one of command and url"),
        ({"a": {"command": "no-such-program"}}, "There is no program 'no-such-program' to start"),
    ],
)
def test_a_mistake_in_the_servers_is_told(servers, sentence):
    with pytest.raises(UserError) as error:
        resolve_workflow("tools", {"servers": servers})
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("servers", "sentence"),
    [
        ({"a": {"command": sys.executable, "args": ["-c", "import no_such"]}}, "No module named 'no_such'"),
        ({"a": {"url": "http://127.0.0.1:9/mcp"}}, "'a' did not start: All connection attempts failed"),
        ({"a": {"command": "sleep", "args": ["3600"]}}, "'a' did not start: it took too long"),
        ({"a": NOTES, "b": NOTES}, "MCP servers 'a' and 'b' both have note"),
    ],
)
def test_a_server_that_does_not_start_is_told_before_the_run(servers, sentence):
    with pytest.raises(UserError) as error:
        rehearse("tools", {"servers": servers, "timeout_seconds": 2.0 if "took" in sentence else 60.0}, SandboxConfig())
    assert sentence in str(error.value) and "\n" not in str(error.value)
