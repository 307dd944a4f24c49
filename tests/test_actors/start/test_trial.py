"""`python -m areal agent try` as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from conftest import ROOT
from support.process_tree import descendants

from areal import __main__ as tools

# Another conversation, one that goes on, a refused request, and a reward of a call.
PROGRAM = """
import json, os, sys, urllib.error, urllib.request
row = json.loads(sys.stdin.readline())
def post(path, **body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
messages = [{"role": "user", "content": row["prompt"]}]
first = post("/chat/completions", messages=messages)
messages += [first["choices"][0]["message"], {"role": "user", "content": "b12="}]
key = os.read(int(os.environ["AREAL_REWARD_FD"]), 99).decode()
post("/reward", reward=0.5, key=key, call=post("/chat/completions", messages=messages, max_tokens=4)["id"])
try:
    post("/chat/completions", messages=messages, response_format={"type": "json_object"})
except urllib.error.HTTPError:
    sys.exit(row.get("exit"))
"""
FUNCTIONS = """
import asyncio, urllib.request
async def hangs(base_url, api_key, row):
    open("began", "w").close()
    await asyncio.sleep(3600)
"""
ROW = {"prompt": "a75b48c30=", "answer": "432"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A working directory with agents, a row and a chat template."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "row.json").write_text(json.dumps(ROW, indent=1))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"exit": "out of luck"}))
    calls = "{% for c in m.tool_calls or [] %}({{ c.function.name }} of {{ c.function.arguments }}){% endfor %}"
    (tmp_path / "plain.jinja").write_text(f"{{% for m in messages %}}{{{{ m.content }}}}{calls}{{% endfor %}}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    yield tmp_path
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def start(folder: Path, model: Path, *arguments: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "areal",
        "agent",
        "try",
        *arguments,
        "--model",
        str(model),
        "sampling.max_new_tokens=48",
        "data.chat_template=plain.jinja",
        "generator.kv_cache_gib=0.25",
        "generator.memory_share=0.1",
        "rollout_manager.workflow_options.agent_reward=true",
    ]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow  # on a real engine; test_episode.py shows episodes, test_agent_protocols.py runs agents
def test_an_agent_s_episode_is_shown_with_what_it_sampled_and_its_reward(folder, tiny_model):
    trial = start(folder, tiny_model, f"{sys.executable} agent.py", "--row", "row.json")
    out, errors = trial.communicate(timeout=240)
    assert trial.returncode == 0, errors
    assert "agent.py on row 0 of row.json" in out
    assert re.search(r"not sampled: 10 tokens\n\W+a75b48c30=\n\W+call 1: \d+ tokens of version 0", out)
    assert re.search(r"call 2: [1-4] tokens? of version 0, finish \w+, reward 0.5", out)
    assert "reward 0.5 (rewards of calls: call 2 0.5)" in out and "calls 2, branches 1" in out
    assert "! The endpoint refused a request: POST /v1/chat/completions: 400, response_format" in out
    assert "! A sample fails if its agent offers tools. " in out  # the template writes letters that the tokenizer lacks


@pytest.mark.slow
def test_an_agent_that_fails_is_told_with_what_was_sampled_before(folder, tiny_model):
    trial = start(folder, tiny_model, f"{sys.executable} agent.py", "--row", "rows.jsonl", "--index", "1")
    out, errors = trial.communicate(timeout=240)
    assert trial.returncode == 1 and "call 2: " in out
    assert "The sample has failed: the agent ended with exit code 1: out of luck" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_trial_that_is_stopped_leaves_no_process(folder, tiny_model, sign):
    trial = start(folder, tiny_model, "mine.py:hangs", "--row", "row.json")
    deadline = time.monotonic() + 240
    while not (folder / "began").exists():
        assert trial.poll() is None and time.monotonic() < deadline, trial.communicate()
        time.sleep(0.05)
    below = descendants(trial.pid)
    assert below
    trial.send_signal(sign)
    _, errors = trial.communicate(timeout=120)
    assert trial.returncode == 128 + sign and "Traceback" not in errors
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process.pid}").exists() for process in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mine.py:hang"], "has no hang: did you mean hangs?"),
        (["no-such-program"], "There is no program 'no-such-program'"),
        (["python agent.py", "x"], "'python agent.py' and 'x' are two agents: quote a command with arguments."),
        (["mine.py:hangs", "--model", "none"], "There is no model folder none"),
        (["mine.py:hangs", "reward.functions=jury"], "there is no reward 'jury'"),
        (["mine.py:hangs", "reward.functions=no.py:J", "reward.options.no.py:J.model=x"], "'no.py:J'"),
        (["mine.py:hangs", "--row", "none.jsonl"], "cannot be read .No such file or directory.: correct the path"),
        (["mine.py:hangs", "--row", "rows.jsonl", "--index", "2"], "has no row 2, counted from 0"),
        (["mine.py:hangs", "--index", "-1"], "--index is -1, but rows are counted from 0"),
        (["rollout_manager.workflow=tool"], "tool"),
    ],
)
def test_a_mistake_gets_one_sentence_and_no_engine_starts(folder, tiny_model, capsys, arguments, sentence):
    assert tools.main(["agent", "try", "--model", str(tiny_model), "--row", "row.json", *arguments]) == 2
    error_text = capsys.readouterr().err
    assert re.search(sentence, error_text) and len(error_text.splitlines()) == 1
