"""The examples of configs/examples: each passes the checks of a dry run, and its code does what its text says.

What has to be downloaded is replaced: models by a tiny one, data by rows in their set's format, services by one that
answers from a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from types import ModuleType

import msgpack
import pytest
import torch
from aiohttp import web
from conftest import ROOT
from fakes.scripted_policy import CHATML, Session, byte_tokenizer
from support.process_tree import descendants

from actors.start.start_checks import on_this_machine, rehearse_start
from areal.__main__ import main
from areal.base.errors import UserError
from areal.config import Config, from_message, load_config
from areal.config.scoring import SandboxConfig
from areal.data.rows import Row
from areal.extensions.agents import mcp_tools
from areal.extensions.environments import environments
from areal.extensions.programs.slots import Programs
from areal.extensions.recipes.recipe import RunRecipe
from areal.extensions.sandboxes.sandbox_owner import Sandboxes
from areal.training import Tokens
from areal.workflows.named_workflows import resolve_workflow

SIBLINGS = sorted((ROOT / "configs" / "examples").glob("*/*_small.yaml"))
EXAMPLES = sorted(path.parent.name for path in (ROOT / "configs" / "examples").glob("*/run.yaml"))
ON_CPUS = ("own_reward", "own_loss", "difficulty", "feedback", "openai_agent", "distillation", "repositories", "dots")
SMALL = ("async_judge", "code_sandbox", "gsm8k_lora")
PACKAGES = {"agents_sdk": "agents", "dots": "torchvision", "gymnasium_game": "gymnasium", "mcp_tools": "mcp"}
MOST_LINES_OF_TEXT, MOST_LINES_OF_CODE = 20, 70
GSM8K = {"question": "Sum 70 and 2.", "answer": "70+2 = <<70+2=72>>72\n#### 72"}
DEEPCODER = {"problem": "Add.", "tests": json.dumps({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]})}
TAU2 = {"prompt": "retail task 7", "domain": "retail", "task": "7", "split": "train"}


def code_of(example: str, file: str) -> ModuleType:
    path = ROOT / "configs" / "examples" / example / file
    spec = importlib.util.spec_from_file_location(f"{example}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def chat_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model's weights with a tokenizer of bytes, whose template shows tools and knows of thinking."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML + "{% if enable_thinking %}{% endif %}"
    tokenizer.save_pretrained(folder)
    settings = json.loads((tiny_model / "config.json").read_text()) | {"max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    return folder


@pytest.fixture
def configured(tiny_model, chat_model, free_port, tmp_path, monkeypatch) -> Callable[..., Config]:
    """The configuration of an example, with what is here in place of what would be downloaded."""
    monkeypatch.chdir(tmp_path)  # its paths are relative to its file

    def rows(row: dict) -> str:
        path = tmp_path / "rows.jsonl"
        prompt = next(iter(row))  # the first field
        path.write_text("".join(json.dumps(row | {prompt: f"{n}. {row[prompt]}"}) + "\n" for n in range(3)))
        return str(path)

    def sources(row: dict, *names: str) -> str:
        return json.dumps([{"base": f"configs/data/deepcoder-{name}.yaml", "source": rows(row)} for name in names])

    def dots() -> list[str]:
        monkeypatch.syspath_prepend(str(ROOT / "configs" / "examples" / "dots"))
        make = importlib.import_module("make")
        make.write_model(tmp_path / "dots" / "model")
        for name in "rows", "held_out":
            make.write_rows(tmp_path / "dots" / f"{name}.jsonl", 32)
        files = {"data.source": "rows.jsonl", "data.eval_source": "held_out.jsonl", "model": "model"}
        return [f"{key}={tmp_path / 'dots' / file}" for key, file in files.items()]

    def configure(example: str, *overrides: str) -> Config:
        replaced = {
            "dots": lambda: [*dots(), "data.eval_size=8"],
            "distillation": lambda: [f"scorers.teacher.model={tiny_model}"],
            "gsm8k_lora": lambda: [f"data.source={rows(GSM8K)}", "data.eval_source=null", "data.eval_size=1"],
            "code_sandbox": lambda: [f"data.sources={sources(DEEPCODER, 'taco')}", "data.eval_size=1"],
            "tau2_retail": lambda: [
                f"data.source={rows(TAU2)}",
                "data.eval_source=null",
                "data.eval_size=1",
                f"rollout_manager.workflow_options.command=python {ROOT}/configs/examples/tau2_retail/agent.py",
            ],
        }.get(example, list)
        file = ROOT / "configs" / "examples" / example / "run.yaml"
        quickstart = load_config(file, replaced()).model == "quickstart"
        values = [
            f"model={tiny_model if quickstart else chat_model}",
            f"master.address=tcp://127.0.0.1:{free_port}",
            f"run_dir={tmp_path / 'runs'}",
            *replaced(),
            *overrides,
        ]
        return load_config(file, values)

    return configure


def test_there_are_sixteen_examples():
    assert len(EXAMPLES) == 16 and set(ON_CPUS) | set(PACKAGES) < set(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short_and_its_text_has_the_command_and_links_that_lead_somewhere(example):
    folder = ROOT / "configs" / "examples" / example
    text = (folder / "README.md").read_text()
    assert f"configs/examples/{example}/run.yaml" in text and ("Expect" in text or "Seen" in text)
    assert len(text.splitlines()) <= MOST_LINES_OF_TEXT
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links and all((folder / link).is_file() for link in links)
    assert all(len(path.read_text().splitlines()) <= MOST_LINES_OF_CODE for path in folder.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_passes_the_checks_of_a_dry_run(example, configured):
    if example in PACKAGES:
        pytest.importorskip(PACKAGES[example])
    config = on_this_machine(configured(example))
    rehearse_start(config, resume=False)
    assert config.name == example.replace("_", "-")


@pytest.mark.parametrize("example", SMALL)
def test_a_small_sibling_passes_the_checks_of_a_dry_run(example, chat_model, free_port, tmp_path):
    values = [f"model={chat_model}", f"master.address=tcp://127.0.0.1:{free_port}", f"run_dir={tmp_path}"]
    values += ["data.max_prompt_tokens=null", "generator.max_model_len=1024"]  # the tokens of `chat_model` are bytes
    config = load_config(ROOT / "configs" / "examples" / example / f"{example}_small.yaml", values)
    rehearse_start(on_this_machine(config), resume=False)
    assert config.name == f"{example}_small".replace("_", "-")


@pytest.mark.parametrize("file", SIBLINGS, ids=[file.stem for file in SIBLINGS])
def test_a_small_sibling_says_what_is_smaller_and_its_page_has_its_command(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert file.read_text().startswith("# ") and "base: run.yaml" in file.read_text().splitlines()
    assert load_config(file).name == file.stem.replace("_", "-")
    assert RunRecipe.of(file).name == file.stem and file.name in (file.parent / "README.md").read_text()


@pytest.mark.parametrize(("example", "package"), PACKAGES.items())
def test_without_its_package_an_example_says_what_is_missing(example, package, configured):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=package):
        rehearse_start(configured(example), resume=False)


@pytest.mark.slow  # each repeats a run of tests/test_run.py with the example's code
@pytest.mark.parametrize("example", ON_CPUS)
def test_an_example_runs(example, configured, run, tmp_path, tiny_model):
    if example in PACKAGES:
        pytest.importorskip(PACKAGES[example])
    overrides = ["steps=2", "batch_size=4", "group_size=4", "data.eval_size=4", "generator.kv_cache_gib=0.25"]
    if example == "distillation":
        overrides += ["data.eval_size=0", "evaluator.benchmarks.sums.size=4"]
    if example == "repositories":
        overrides += ["data.eval_size=1"]
    config = configured(example, *overrides, "sampling.max_new_tokens=64")
    (tmp_path / "run.json").write_text(config.model_dump_json())
    started = run("--config", "run.json")
    output = started.wait(240)
    assert started.code == 0, output
    metrics = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in metrics] == [1, 2]
    if example == "distillation":
        assert all(step["reward_mean"] == 0 and step["kl_teacher"] is not None for step in metrics)


@pytest.mark.slow  # a run with users' HTTP beside it, in which each role is started again
@pytest.mark.timeout(600)
def test_sessions_of_users_are_trained_once_though_each_role_is_killed(tiny_model, free_port, tmp_path):
    overrides = [f"model={tiny_model}", f"run_dir={tmp_path}", f"gateway.port={free_port}", "steps=16", "batch_size=8"]
    overrides += ["data.eval_size=4", "generator.kv_cache_gib=0.25", "sampling.max_new_tokens=16"]
    users = [sys.executable, str(ROOT / "configs/examples/gateway/users.py"), *overrides]
    metrics, to_kill = tmp_path / "gateway" / "metrics.jsonl", ["generator", "trainer", "master", "gateway"]
    with subprocess.Popen(users, env=os.environ | {"PYTHONPATH": str(ROOT)}) as started:
        try:
            for _ in range(2000):
                if started.poll() is not None:
                    break
                steps = metrics.read_text().count("\n") if metrics.exists() else 0
                if to_kill and steps > 4 - len(to_kill):
                    role = to_kill.pop()
                    for process in descendants(started.pid):
                        if f"--role {role} " in f"{process.command} ":
                            os.kill(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(0.2)
            assert started.poll() == 0 and not to_kill
        finally:
            started.kill()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["sessions_trained"] for step in steps] == [8] * 16
    assert all(prompt < 0 for step in steps for prompt in step["prompts"])
    assert len({prompt for step in steps for prompt in step["prompts"]}) == 128, "each session is trained once"
    assert main(["audit", str(metrics.parent)]) == 0


def repository_rows() -> list[Row]:
    rows = (ROOT / "configs/examples/repositories/rows.jsonl").read_text().splitlines()
    return [Row(index=0, prompt="Go.", answer=None, reward=None, fields=json.loads(row)) for row in rows]


MENDS = {
    "leap": "sed -i 's/and year % 100 != 0/and year % 100 != 0 or year % 400 == 0/' leap.py",
    "second": "sed -i 's/sorted(numbers)/sorted(set(numbers))/' second.py",
    "words": "sed -i 's/text.split(\" \")/text.lower().split()/' words.py",
    "merge": "sed -i 's/start < /start <= /; s/\\[0\\], end)/[0], max(end, merged[-1][1]))/' merge.py",
    "bank": "sed -i 's/history=\\[\\]/history=()/; s/= balance, history/= balance, [*history]/' bank.py",
}


async def test_the_rows_are_those_of_the_script_and_each_mistake_is_found_and_can_be_mended():
    make = code_of("repositories", "make.py")
    rows = repository_rows()
    assert [row.fields for row in rows] == [make.row(name) for name in make.TASKS]
    options = load_config(ROOT / "configs/examples/repositories/run.yaml").rollout_manager.workflow_options
    episode = resolve_workflow("environment", options)
    programs = Programs(SandboxConfig())
    sandboxes = Sandboxes("test", programs)
    for row in rows:
        session = Session(
            f"```bash\ncd /tmp/repository && {MENDS[row.fields['name']]}\n```", "Done.", sandboxes=sandboxes
        )
        assert (await episode(session, row)).reward == 1.0, session.prompts
    cheat = Session(
        "```bash\necho 'def test(): pass' > /tmp/repository/test_leap.py\n```", "Done.", sandboxes=sandboxes
    )
    assert (await episode(cheat, rows[0])).reward == 0.0
    await sandboxes.close()
    await programs.close()


def test_the_own_reward_knows_right_from_wrong():
    digits_right = code_of("own_reward", "reward.py").digits_right
    scores = [
        digits_right("a75b48c30=", completion, {"answer": "432"})
        for completion in ("a7512b4813c3004", "a7512b4812c3004", "a7512", "", "a7512b4813c3004" * 2)
    ]
    assert [score for score, _ in scores] == [1, 2 / 3, 1 / 3, 0, 1 / 2]
    assert [parts["complete"] for _, parts in scores] == [1, 1, 0, 0, 0]


def test_the_own_loss_pushes_down_only_what_the_policy_still_does():
    tapered = code_of("own_loss", "loss.py").tapered
    logp = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-2.0, 0.0, -2.0, 0.0])
    tokens = Tokens(logp, logp.detach(), behaviour, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.arange(4))
    tapered(tokens, load_config(ROOT / "configs" / "quickstart.yaml").trainer).loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-1, -1, 1, 0.36788], abs=1e-4)


async def test_the_workflow_gives_back_what_was_right_and_halves_the_reward():
    problem, row = "a75b48c30=", Row(index=0, prompt="a75b48c30=", answer="432", reward=None, fields={"answer": "432"})
    session = Session("a7512b4812c3004", "b4813c3004", scores={"a7512b4813c3004": 1.0})
    sample = await code_of("feedback", "workflow.py").mend(session, row)
    assert session.prompts[1].endswith(f"{problem}a7512")
    assert sample.reward == 0.5
    assert "".join(chr(token) for token in sample.tokens[sample.sampled] if token) == "a7512b4812c3004b4813c3004"


class Endpoint:
    """An OpenAI endpoint that answers from a list; `requests` are the bodies of what was asked."""

    def __init__(self) -> None:
        self.answers: list[dict] = []
        self.requests: list[dict] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return web.json_response(self.answers.pop(0))

    def chat(self, *texts: str) -> None:
        """Answer the next call with these choices."""
        choices = [
            {"index": n, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for n, text in enumerate(texts)
        ]
        self.answers.append({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": choices})

    def response(self, *items: dict) -> None:
        """Answer the next call with these items of a response."""
        fixed = {"object": "response", "created_at": 0, "model": "policy", "status": "completed", "tools": []}
        self.answers.append({"id": "1", **fixed, "parallel_tool_calls": True, "tool_choice": "auto", "output": items})


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    served, app = Endpoint(), web.Application()
    app.router.add_post("/v1/{path:.*}", served.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    served.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    yield served
    await runner.cleanup()


async def test_the_judge_asks_for_a_mark_and_an_answer_without_one_is_no_score(endpoint):
    judge = code_of("async_judge", "judge.py").Judge(endpoint.url, "judge")
    endpoint.chat("7/10")
    assert await judge.score("chat", "Light scatters.", {"prompt": "Why is the sky blue?"}) == (0.7, {"characters": 15})
    question = endpoint.requests[0]["messages"][0]["content"]
    assert "Why is the sky blue?" in question and "Light scatters." in question
    endpoint.chat("It is good.")
    with pytest.raises(ValueError, match="the judge wrote no mark, but 'It is good.'"):
        await judge.score("chat", "Light scatters.", {"prompt": "Why is the sky blue?"})


async def test_a_judge_that_does_not_answer_is_named_by_its_address(free_port):
    judge = code_of("async_judge", "judge.py").Judge(f"http://127.0.0.1:{free_port}/v1", "judge")
    judge.client.max_retries = 0
    with pytest.raises(ConnectionError, match=f"the judge at http://127.0.0.1:{free_port}/v1/ does not answer"):
        await judge.score("chat", "Light scatters.", {"prompt": "Why is the sky blue?"})


async def test_the_agent_with_openais_client_votes(endpoint):
    endpoint.chat("a7512b4813c3004", "a7512b4812c3004", "a7512b4813c3004")
    agent = code_of("openai_agent", "agent.py")
    reward = await agent.solve(endpoint.url, "key", {"prompt": "a75b48c30=", "answer": "432"})
    assert reward == pytest.approx(1 / 2 + 1 / 3)
    assert endpoint.requests[0]["n"] == agent.DRAFTS
    assert agent.answer_of("") == ""


async def test_the_agent_of_the_agents_sdk_looks_prices_up(endpoint):
    pytest.importorskip("agents")
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "price", "arguments": '{"fruit": "apple"}'}
    endpoint.response(call | {"status": "completed"})
    text = {"type": "output_text", "text": "The answer is 6.", "annotations": []}
    endpoint.response({"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]})
    agent = code_of("agents_sdk", "agent.py")
    assert await agent.solve(endpoint.url, "key", {"prompt": "What do 2 apples cost?", "answer": "6"}) == 1.0
    assert "One apple costs 3." in json.dumps(endpoint.requests[1]["input"])


def test_lists_in_options_of_a_workflow_are_lists_where_a_message_brings_them(configured):
    pytest.importorskip("mcp")
    config = configured("mcp_tools")
    body = msgpack.unpackb(msgpack.packb(config.model_dump(mode="json")), use_list=False)  # as protocols.codec reads it
    section = from_message(body).rollout_manager
    resolve_workflow(section.workflow, section.workflow_options)
    assert section == config.rollout_manager


async def test_the_tool_of_the_mcp_server_knows_the_prices(configured):
    pytest.importorskip("mcp")
    servers = configured("mcp_tools").rollout_manager.workflow_options["servers"]
    async with mcp_tools.opened({name: mcp_tools.Server(**server) for name, server in servers.items()}, 60) as offered:
        assert await offered.call("price", '{"fruit": "apple"}') == "One apple costs 3."
        assert await offered.call("price", '{"fruit": "brick"}') == "There is no brick."


def test_the_answers_of_the_shops_rows_are_those_of_the_prices():
    pytest.importorskip("mcp")
    prices = code_of("mcp_tools", "server.py").PRICES
    for line in (ROOT / "configs/examples/mcp_tools/rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        (n, a), (m, b) = re.findall(r"(\d) (\w+?)(?:ies|s) ", row["prompt"])
        cost = {**prices, "cherr": prices["cherry"]}
        assert int(row["answer"]) == int(n) * cost[a] + int(m) * cost[b]


def test_the_clerk_who_looks_prices_up_sums_right(monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.syspath_prepend(ROOT / "configs" / "examples" / "mcp_tools")
    clerk, random = code_of("mcp_tools", "clerk.py"), Random(0)
    for basket in clerk.baskets(random):
        *calls, last = clerk.demonstrations(random, basket)
        assert not calls or last["completion"].endswith(f"The answer is {clerk.row(basket)['answer']}.")


def test_the_server_of_the_shop_serves_while_a_command_runs(free_port):
    pytest.importorskip("mcp")
    code = f"import socket, sys; sys.exit(7 + socket.socket().connect_ex(('127.0.0.1', {free_port})))"
    server = [sys.executable, str(ROOT / "configs/examples/mcp_tools/server.py"), str(free_port), "-c", code]
    assert subprocess.run(server, timeout=60).returncode == 7


async def test_the_walk_is_shown_as_the_environment_shows_the_lake():
    pytest.importorskip("gymnasium")
    options = load_config(ROOT / "configs/examples/gymnasium_game/run.yaml").rollout_manager.workflow_options
    world = environments.resolve(options["environment"], options["environment_options"])()
    first, *turns = code_of("gymnasium_game", "walk.py").game(Random(0), "Go.")
    assert await world.reset(Row(index=0, prompt="Go.", answer=None, reward=None, fields={})) == first["content"]
    for said, shown in zip(turns[::2], turns[1::2], strict=True):
        assert (await world.step(said["content"]))[0] == shown["content"]
    await world.close()


TAU2_STAND_IN = {
    "__init__.py": "from tau2.runner import TextRunConfig",
    "evaluator/__init__.py": "",
    "evaluator/evaluator_nl_assertions.py": "DEFAULT_LLM_NL_ASSERTIONS, DEFAULT_LLM_NL_ASSERTIONS_ARGS = 'gpt-4.1', {}",
    "runner.py": """
import os
from types import SimpleNamespace
from tau2.evaluator import evaluator_nl_assertions as judge
TextRunConfig = SimpleNamespace
def get_tasks(domain, task_split_name, task_ids=None):
    return [SimpleNamespace(id=n) for n in task_ids or ["7", "8"]]
def build_text_orchestrator(config, task):
    assert config.llm_args_agent["api_base"] != config.llm_args_user["api_base"] == "http://user/v1"
    judged_by = judge.DEFAULT_LLM_NL_ASSERTIONS, judge.DEFAULT_LLM_NL_ASSERTIONS_ARGS
    assert judged_by == (config.llm_user, config.llm_args_user)
    assert config.seed is None and "OPENAI_BASE_URL" not in os.environ and "OPENAI_API_KEY" not in os.environ
    return SimpleNamespace(task=task, done=task.id == "judge", to_role="user" if task.id == "user" else "agent")
def run_simulation(conversation):
    if conversation.task.id != "7":
        raise ValueError("AssistantMessage must have either content or tool_calls.")
    return SimpleNamespace(reward_info=SimpleNamespace(reward=1.0))
""",
}


@pytest.fixture
def tau2_program(tmp_path) -> Callable[..., Awaitable[tuple[int, bytes]]]:
    """Run the example's program with a stand-in for tau2. Returns the exit code and the output."""
    for name, text in TAU2_STAND_IN.items():
        path = tmp_path / "tau2" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    async def start(
        *arguments: str, row: dict | None = None, url: str = "", file: str = "agent.py"
    ) -> tuple[int, bytes]:
        readable, writable = os.pipe()
        os.write(writable, b"the key")
        os.close(writable)
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "AREAL_REWARD_FD": str(readable)}
        environment |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k"}
        environment |= {"TAU2_USER_URL": "http://user/v1", "TAU2_USER_MODEL": "user"}
        program = [sys.executable, str(ROOT / "configs" / "examples" / "tau2_retail" / file), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [readable]}
        process = await asyncio.create_subprocess_exec(*program, env=environment, **pipes)
        output, _ = await process.communicate(json.dumps(row).encode() + b"\n")
        os.close(readable)
        return process.returncode, output

    return start


async def test_the_program_for_tau2_posts_the_reward_with_the_key_of_the_sample(endpoint, tau2_program):
    code, rows = await tau2_program("rows", "retail", "train")
    assert code == 0 and json.loads(rows.splitlines()[0]) == TAU2
    endpoint.answers.append({})
    assert (await tau2_program(row=TAU2, url=endpoint.url))[0] == 0
    assert endpoint.requests == [{"reward": 1.0, "key": "the key"}]


@pytest.mark.parametrize(("turn", "posted"), [("agent", [0.0]), ("user", []), ("judge", [])])
async def test_only_an_empty_turn_of_the_policy_is_a_task_not_done(turn, posted, endpoint, tau2_program):
    endpoint.answers.append({})
    code, _ = await tau2_program(row=TAU2 | {"task": turn}, url=endpoint.url)
    assert [request["reward"] for request in endpoint.requests] == posted
    assert (code == 0) == bool(posted)


async def test_a_server_plays_rows_for_the_small_siblings_programs(endpoint, tau2_program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build" / "tau2").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(ROOT / "configs" / "examples" / "tau2_retail"))
    for name in "OPENAI_BASE_URL", "OPENAI_API_KEY", "LITELLM_LOCAL_MODEL_COST_MAP":  # which the import changes
        monkeypatch.setenv(name, "")
    episodes, played = code_of("tau2_retail", "episodes.py"), []
    monkeypatch.setattr(episodes.agent, "play", lambda *played_by, user: played.append((*played_by, user)) or 0.5)
    episodes.serve()
    endpoint.answers.append({})
    assert (await tau2_program(row=TAU2, url=endpoint.url, file="episodes.py"))[0] == 0
    assert played == [(TAU2, {"api_base": endpoint.url, "api_key": "k"}, "reader")]
    assert endpoint.requests == [{"reward": 0.5, "key": "the key"}]
