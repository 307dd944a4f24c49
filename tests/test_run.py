"""The whole system, by the commands a user types: real processes, real vLLM, real DeepSpeed, real ZeroMQ."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
import zmq
from prometheus_client.parser import text_string_to_metric_families
from support.networks import keys_folder
from support.process_tree import descendants, processes_mentioning
from support.small_runs import SHORT, check_adapters, read_jsonl

from actors.runtime.supervisor import Supervisor
from actors.start.preflight import check_port
from actors.start.preflight import free_port as hold_free_port
from actors.start.run_command import keep_report, main, port_is_named
from actors.start.start_checks import own_port
from areal.base.processes import KEYS
from areal.config import load_config
from areal.data.addition import ALPHABET
from areal.extensions.desk.grafana import dashboard
from areal.extensions.desk.panels import panels

CONFIGS = Path(__file__).parent.parent / "configs"
CONFIG = str(CONFIGS / "quickstart.yaml")
METRICS = {
    "step",
    "reward_mean",
    "staleness_mean",
    "staleness_max",
    "tokens_trained",
    "tokens_generated",
    "step_seconds",
    "trainer_wait_seconds",
    "train_seconds",
    "publish_wait_seconds",
    "write_seconds",
    "logprob_gap",
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "clip_fraction",
    "reward_mean_all",
    "groups_filtered",
    "staleness_histogram",
    "reloads",
    "pause_seconds",
    "load_seconds",
    "resume_seconds",
    "sequences_interrupted",
    "tokens_recomputed",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "reward_parts",
}
SUMMARY = {
    "steps",
    "accuracy_before",
    "accuracy_after",
    "staleness_max",
    "max_staleness",
    "logprob_gap_max",
    "samples_trained",
    "samples_per_second",
    "seconds",
    "trainer_idle",
}


@pytest.fixture
def small(tiny_model: Path, free_port: int) -> list[str]:
    """Overrides that make the quickstart small: a tiny model, few and short samples."""
    return [
        f"model={tiny_model}",
        f"master.address=tcp://127.0.0.1:{free_port}",
        "name=test",
        "steps=4",
        "batch_size=4",
        "group_size=4",
        "max_staleness=2",
        "sampling.max_new_tokens=32",
        "data.eval_size=16",
        "generator.kv_cache_gib=0.25",
        "generator.memory_share=0.1",
    ]


def check_finished(folder: Path, steps: int, max_staleness: int) -> tuple[list[dict], dict]:
    metrics = read_jsonl(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    assert all(m.keys() >= METRICS for m in metrics)
    assert summary.keys() >= SUMMARY
    assert all(m["staleness_max"] <= max_staleness for m in metrics)
    for gap in ("logprob_gap", "engine_gap"):
        measured = [m[gap] for m in metrics if m[gap] is not None]
        assert measured and max(measured) < 1e-3
    assert summary["logprob_gap_max"] is not None
    assert summary["steps"] == steps
    assert 0 <= summary["accuracy_before"] <= 1
    assert 0 <= summary["accuracy_after"] <= 1
    assert (folder / "config.yaml").is_file()
    assert '"title": "Reward"' in (folder / "report.html").read_text()
    of_steps, of_versions = ({m for p in panels() if p.of == of for m in p.metrics} for of in ("step", "version"))
    assert {name for name in of_steps if not name.startswith("sessions_")} <= metrics[-1].keys()
    assert of_versions <= read_jsonl(folder / "evaluations.jsonl")[-1].keys()
    assert list((folder / "logs").glob("generator-0.jsonl"))
    return metrics, summary


@pytest.mark.slow
def test_one_command_runs_several_of_every_role_and_leaves_a_model_behind(run, small, another_free_port, tmp_path):
    from transformers import AutoModelForCausalLM

    counts = ["generator.count=2", "trainer.ranks=2", "rollout_manager.count=2", "reward.count=2"]
    # A manager that may run one group at a time has to notice that the trainer took it.
    counts += ["rollout_manager.max_concurrent_groups=1", "weights.transport=stream"]
    started = run(
        "--config",
        CONFIG,
        *small,
        *counts,
        "steps=20",
        "evaluator.every=5",
        "evaluator.samples=2",
        "evaluator.benchmarks={sums: {source: addition, size: 8, samples: 2, reward: addition, every: 2}}",
        "weights.transport=stream",
        f"observe.prometheus_port={another_free_port}",
    )
    folder = tmp_path / "runs" / "test"
    check_numbers(numbers_of(folder, started))
    output = started.wait(280)
    assert started.code == 0, output
    _, summary = check_finished(folder, steps=20, max_staleness=2)
    check_evaluations(read_jsonl(folder / "evaluations.jsonl"), summary)
    assert summary["samples_trained"] == 20 * 4 * 4
    assert "step 20/20" in output
    assert "held-out accuracy" in output
    assert AutoModelForCausalLM.from_pretrained(summary["checkpoint"]).num_parameters() > 0
    logs = {path.stem for path in (folder / "logs").glob("*.jsonl")}
    assert logs >= {"generator-0", "generator-1", "rollout_manager-1", "reward-1", "trainer-0", "evaluator-0"}
    arrived = read_jsonl(folder / "logs" / "generator-1.jsonl")
    assert "generator 0" in {line.get("sender") for line in arrived}  # weights come over the bus, and are passed on
    assert not processes_mentioning(str(tmp_path))


@pytest.mark.slow  # test_scorer.py has such a scorer, test_policy_judges.py such a policy, test_config.py the roles
def test_all_rewards_may_be_judgements_of_the_policy_and_of_a_scorer(run, small, tiny_model, tmp_path):
    """There is then no reward actor, which evaluations need not wait for."""
    from fakes.scorers import write_brief  # which imports the actor

    choices = json.dumps({character: (n + 1) / 60 for n, character in enumerate(ALPHABET)})
    options = f'{{template: "{{{{ prompt }}}}", verdict: choice, choices: {choices}, url: '
    judges = [f"reward.options.judge={options}policy}}", f"reward.options.judge/strict={options}scorer:big}}"]
    write_brief(tmp_path / "brief", tiny_model, ends=ALPHABET)  # a single character, a verdict
    scorer = f"scorers.big={{kind: judge, kv_cache_gib: 0.25, model: {tmp_path / 'brief'}}}"
    functions = "reward.functions={judge: 0.5, judge/strict: 0.5}"
    settings = ["steps=1", f"model={tmp_path / 'brief'}", functions, *judges, scorer]
    started = run("--config", CONFIG, *small, *settings)
    output = started.wait(280)
    assert started.code == 0, output
    folder = tmp_path / "runs" / "test"
    metrics = read_jsonl(folder / "metrics.jsonl")
    for name in ("judge", "judge/strict"):
        assert all(0 < m["reward_parts"][name] < 1 < m["reward_parts"][f"{name}/tokens"] for m in metrics)
    assert [line["rows"] - line["failed"] for line in read_jsonl(folder / "evaluations.jsonl")] == [16, 16]
    assert not [*(folder / "logs").glob("reward-*")]


@pytest.mark.slow
def test_weights_go_from_a_trainer_with_zero_3_straight_into_generators_one_of_which_is_killed(run, small, tmp_path):
    overrides = ["generator.count=2", "trainer.ranks=2", "trainer.zero_stage=3", "weights.transport=direct", "steps=12"]
    started = run("--config", CONFIG, *small, *overrides)
    folder = tmp_path / "runs" / "test"
    while not (folder / "metrics.jsonl").is_file() or len(read_jsonl(folder / "metrics.jsonl")) < 3:
        assert started.code is None, started.output
        time.sleep(0.2)
    killed = [process.pid for process in descendants(started.process.pid) if "generator --index 1 " in process.command]
    os.kill(killed[0], signal.SIGKILL)
    output = started.wait(280)
    assert started.code == 0, output
    metrics, _ = check_finished(folder, steps=12, max_staleness=2)
    assert sum(m["reloads"] for m in metrics) >= 8
    assert all(m["weight_max"] == pytest.approx(1, abs=1e-3) for m in metrics if m["staleness_max"] == 0)
    logs = [line for index in range(2) for line in read_jsonl(folder / "logs" / f"generator-{index}.jsonl")]
    assert not [line for line in logs if line["event"] == "weights did not load"]
    assert not list((folder / "weights").glob("generator-*/*"))  # no generator had to fetch files


def numbers_of(folder: Path, started) -> list:
    """What all actors serve to Prometheus, once a run serves all that the dashboard for Grafana shows."""
    queries = " ".join(target["expr"] for panel in dashboard()["panels"] for target in panel["targets"])
    shown = {name for name in re.findall(r"areal_\w+", queries) if not name.startswith("areal_step_")}
    deadline = time.monotonic() + 280
    while True:
        logs = "".join(path.read_text() for path in (folder / "logs").glob("*.jsonl"))
        pages = [read_page(address) for address in re.findall(r"http://\S+/metrics", logs)]
        samples = [s for page in pages for family in text_string_to_metric_families(page) for s in family.samples]
        missing = shown - {sample.name for sample in samples}
        if len(pages) == 9 and not missing:
            return samples
        assert started.code is None and time.monotonic() < deadline, (missing, len(pages), started.output)
        time.sleep(0.2)


def read_page(address: str) -> str:
    """Empty if the actor has left."""
    try:
        return urlopen(address, timeout=10).read().decode()
    except OSError:
        return ""


def check_numbers(samples: list) -> None:
    """Each says whose it is and is possible."""
    assert {(s.labels["role"], s.labels["index"]) for s in samples} > {("master", "0"), ("generator", "1")}
    for sample in samples:
        assert math.isfinite(sample.value), sample
        assert sample.value >= 0 or sample.name in ("areal_step_loss", "areal_step_kl_behaviour"), sample


def check_evaluations(evaluations: list[dict], summary: dict) -> None:
    """Each of the very version it names, while training went on."""
    of_the_record = {"time", "run", "crc"}
    assert [{key: e[key] for key in e.keys() - of_the_record} for e in evaluations] == summary["evaluations"]
    # One that takes longer than five steps has the next one skipped.
    expected = [version for version in (0, 5, 10, 15, 20) if str(version) not in summary["not_evaluated"]]
    assert [e["version"] for e in evaluations] == expected
    assert len(expected) > 2
    for e in evaluations:
        assert e["rows"] == 16 and e["failed"] == 0 and e["completion_tokens_mean"] > 0
        assert e["pass_at"].keys() == {"1", "2"}
        assert e["pass_at"]["2"] >= e["pass_at"]["1"]
        assert e["benchmarks"].keys() == ({"sums"} if e["version"] % 2 == 0 else set())
        assert all(scores["scored"] == 16 and 0 <= scores["accuracy"] <= 1 for scores in e["benchmarks"].values())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (
        evaluations[0]["accuracy"],
        evaluations[-1]["accuracy"],
    )


@pytest.mark.slow  # test_chaos.py has adapters, and a reward that joins by hand; test_scorer.py has such a scorer
@pytest.mark.parametrize("reference", ["null", "scorer:first"])
def test_roles_started_by_hand_train_adapters_in_turns_by_a_reward_and_a_reference_of_their_own(
    run, small, tmp_path, tiny_model, reference
):
    (tmp_path / "mine.py").write_text(SHORT)
    changes = [
        "max_staleness=0",
        "reward.functions=[mine:Short]",
        "trainer.lora.rank=4",
        "trainer.lora.target_modules=[q_proj,v_proj]",
        "trainer.lr=1e-3",
        "trainer.lr_schedule=linear",
        "trainer.kl_coef=0.01",
        "trainer.zero_stage=2",
        "colocate=true",
        f"trainer.reference={reference}",
    ]
    roles = ["trainer", "generator", "rollout_manager", "evaluator"]
    arguments = [["--role", role] for role in roles]
    if reference == "scorer:first":
        scorer = f"{{model: {tiny_model}, count: 0, dtype: float32, kv_cache_gib: 0.25}}"
        changes += ["trainer.teacher=first", f"scorers.first={scorer}"]
        arguments.append(["--role", "scorer", "--scorer", "first"])
    arguments.append(["--role", "reward", "--reward", "mine:Short", "characters=1"])
    runs = [run("--role", "master", "--config", CONFIG, *small, *changes)]
    # There the master writes its address, and the keys of this run.
    runs += [run(*role, "--master", "runs/test") for role in arguments]
    outputs = [started.wait(240) for started in runs]
    assert [started.code for started in runs] == [0] * len(runs), "\n".join(outputs)
    folder = tmp_path / "runs" / "test"
    metrics, summary = check_finished(folder, steps=4, max_staleness=0)
    assert all(0 < m["reward_mean"] < 1 for m in metrics)
    for m in metrics:
        assert m["staleness_mean"] == m["staleness_max"] == 0
        # Each token was sampled by the very weights that are trained: the weight pi_prox / pi_behav is 1.
        assert m["weight_max"] == pytest.approx(1, abs=1e-3)
        assert m["logprob_gap"] is not None and m["offload_seconds"] > 0
    # The reference is the model that the run begins with.
    assert 0 <= metrics[0]["kl_reference"] < 1e-9 < metrics[-1]["kl_reference"]
    if reference == "scorer:first":
        assert abs(metrics[0]["kl_teacher"]) < 1e-4 and metrics[0]["teacher_agreement"] > 0.999
        assert metrics[0]["teacher_agreement"] > metrics[-1]["teacher_agreement"]
    check_adapters(folder, tiny_model, summary["checkpoint"])


ROW = '{"prompt": "a12b34=", "answer": "415"}\n'


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generater.count=2"], "did you mean 'generator.count'?"),
        (["batch_size=many"], "batch_size is 'many'"),
        (["filter_zero_signal=true", "group_size=1"], "raise group_size"),
        (["model=./nowhere"], "There is no model folder ./nowhere"),
        (["trainer.kl_coef=0.1", "trainer.reference=./gone"], "no model folder ./gone (trainer.reference): name one"),
        (["trainer.lora.rnk=4"], "did you mean 'trainer.lora.rank'?"),
        (["reward.functions=[nowhere.rewards:mine]"], "nowhere.rewards"),
        (
            ["reward.functions={rows.jsonl: 1, addition: many}"],
            "reward.functions is neither a name, nor a list of names",
        ),
        (["reward.options={addition: {base: 3}}"], "reward 'addition' has options"),
        (["data.source=rows.jsonl", "data.eval_size=0"], "rows.jsonl"),
        (["reward.functions=math", "data.source=sums.jsonl", "data.eval_size=0"], "cannot score 1 of the 1 rows"),
        (["model=quickstart", "data.source=words.jsonl", "data.eval_size=0"], "in data.source 'words.jsonl' has ' '"),
        (["rollout_manager.workflow=triple_turn"], "triple_turn"),
        (["rollout_manager.workflow=verifiers"], "set data.source=verifiers:NAME"),
        (["rollout_manager.workflow_options.max_turns=2"], "it takes no options"),
        (
            ["rollout_manager.workflow=tools", "rollout_manager.workflow_options.servers={files: {command: 'false'}}"],
            "the MCP server 'files' did not start",
        ),
        (["evaluator.temperature=0", "evaluator.samples=4"], "evaluator.samples is 4"),
        (["evaluator.benchmarks=[livecodebench]"], "The benchmark livecodebench names no source: set evaluator."),
        (["evaluator.benchmarks={mine: {source: none.jsonl}}"], "the source 'none.jsonl' of the benchmark mine"),
        (["evaluator.benchmarks={mine: {source: addition}}"], "of the benchmark mine has no end"),
        (
            ["evaluator.benchmarks={mine: {source: words.jsonl, reward: math}}"],
            "cannot score 1 of the 1 rows of the benchmark mine",
        ),
        (["steps=0", "data.eval_size=0"], "there is nothing to evaluate"),
        (["sampling.temperature=0"], "sampling.temperature is 0"),
        (
            ["sampling.top_p=0.9", "trainer.sequence_parallel=2", "trainer.ranks=2"],
            "trainer.sequence_parallel computes log-probs among all words, but with sampling.top_p losses are over",
        ),
        (
            ["sampling.min_p=0.1", "generator.engine_options.speculative_config={method: ngram}"],
            "speculative_config was never tried with words left out, but with sampling.min_p losses are over",
        ),
        (["master.address=tcp://*:5999"], "* is beyond this machine, where links need keys"),
        (["network.keys=no_such_folder"], "There are no keys in"),
        (["network.ports=[20100, 20000]"], "network.ports is [20100, 20000]"),
        (["network.ports=[20000, 20004]"], "and the master at one more: give 6"),
        (["trainer.objective=gropo"], "Unknown objective 'gropo'"),
        (["weights.transport=direct", "colocate=true"], "sends weights straight into them"),
        (
            ["weights.transport=direct", "trainer.lora.rank=4"],
            "sends whole models, but trainer.lora publishes adapters",
        ),
        (["observe.prometheus_port=0"], "observe.prometheus_port is 0"),
    ],
)
def test_a_mistake_gets_one_sentence_before_anything_is_started(
    small, tmp_path, monkeypatch, capsys, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROW + '{"prompt": "a12b34="}\n')
    Path("words.jsonl").write_text('{"prompt": "one and two", "answer": "three +"}\n')
    Path("sums.jsonl").write_text('{"prompt": "a12b34=", "answer": "three +"}\n')
    check_refused(monkeypatch, capsys, ["--config", CONFIG, *small, *arguments], sentence)


def test_a_port_in_use_is_told(small, free_port, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        arguments = ["--config", CONFIG, *small]
        check_refused(monkeypatch, capsys, arguments, f"cannot listen at tcp://127.0.0.1:{free_port}")


def test_a_start_that_is_refused_says_nothing_of_its_port(small, free_port, monkeypatch, capsys):
    monkeypatch.setattr("actors.start.run_command.port_is_named", lambda *_: False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        check_refused(monkeypatch, capsys, ["--config", CONFIG, *small, "model=./nowhere"], "no model folder ./nowhere")


def test_a_port_in_use_is_replaced_by_a_free_one(free_port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        with hold_free_port(f"tcp://127.0.0.1:{free_port}") as address:
            assert address != f"tcp://127.0.0.1:{free_port}"
    with hold_free_port(f"tcp://127.0.0.1:{free_port}") as address:
        assert address == f"tcp://127.0.0.1:{free_port}"


def test_the_port_of_a_start_is_kept_for_its_master(free_port):
    with hold_free_port(f"tcp://127.0.0.1:{free_port}") as address:
        with socket.socket() as server, pytest.raises(OSError):
            server.bind(("127.0.0.1", free_port))
        check_port(address)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as master, context.socket(zmq.DEALER) as actor:
            master.bind(address)
            actor.connect(address)
            actor.send(b"hello")
            assert master.recv_multipart()[1] == b"hello"


def test_two_starts_at_once_have_two_ports(free_port):
    address = f"tcp://127.0.0.1:{free_port}"
    with hold_free_port(address) as first, hold_free_port(address) as second:
        assert first == address and second != address
    with hold_free_port(address) as third:
        assert third == address


@pytest.mark.parametrize(
    ("overrides", "resume", "another"),
    [
        ([], None, True),
        (["master.address=tcp://127.0.0.1:5555"], None, False),
        ([], Path("runs/test"), True),  # its configuration has all keys
        (["master.address=tcp://*:5555"], None, False),
    ],
)
def test_only_a_port_that_nobody_asked_for_is_replaced(monkeypatch, overrides, resume, another):
    monkeypatch.setattr("actors.start.start_checks.free_port", lambda address: nullcontext("tcp://127.0.0.1:5999"))
    arguments = Namespace(config=None, resume=resume, fork=None, overrides=list(overrides))
    config = load_config(Path(CONFIG), overrides if resume is None else ["master.address=tcp://127.0.0.1:5555"])
    with own_port(config, port_is_named(arguments, config)) as config:
        assert (config.master.address == "tcp://127.0.0.1:5999") is another


@pytest.mark.parametrize(
    ("arguments", "gpus", "dtype", "checkpointing"),
    [
        ([], "", "float32", False),
        ([], "0,1", "bfloat16", True),
        (["trainer.dtype=float32"], "0", "float32", True),
        (["--role", "master"], "0", "auto", "auto"),  # its trainers may have other devices
    ],
)
def test_what_is_automatic_depends_on_the_devices_of_the_trainer(
    monkeypatch, capsys, tmp_path, tiny_model, arguments, gpus, dtype, checkpointing
):
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"{{model: {tiny_model}, steps: 1, batch_size: 4, group_size: 4, data: {{source: addition}}, sampling: "
        f"{{max_new_tokens: 8}}, reward: {{functions: [addition]}}, run_dir: {tmp_path}}}"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("actors.start.preflight.check_names", lambda config: None)  # takes a process, and is no part
    monkeypatch.setattr(sys, "argv", ["run.py", "--config", str(config), "--dry-run", *arguments])
    assert main() == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (trainer["dtype"], trainer["gradient_checkpointing"]) == (dtype, checkpointing)


PLAIN = "def plain(session, row):\n    return None\n\ndef ranks(prompt, completions, rows):\n    return []\n"
PLAIN += "\ndef nothing(prompt, completion, row):\n    pass\n"
JUDGE = "class Judge:\n    def __init__(self, address, model): ...\n    def score(self, prompt, completion, row): ...\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model=./nowhere"], "There is no model folder ./nowhere"),
        (["data.source=none.jsonl"], "none.jsonl cannot be read"),
        (["reward.functions=[nowhere.rewards:mine]"], "nowhere.rewards"),
        (["network.keys=no_such_folder"], "There are no keys in"),
        (["run_dir=rows.jsonl"], "run folder rows.jsonl/test cannot be used"),
        (["run_dir=/proc/x"], "run folder /proc/x/test cannot be used (no folder can be made in /proc)"),
        ([f"reward.functions={[f'many.py:r{n}' for n in range(33)]}"], "reward.functions names more than 32 rewards"),
        (["trainer.lora.target_modules=[q_proj,v_porj]"], "no such layer: did you mean v_proj?"),
        (["model=quickstart", "trainer.lora.target_modules=[q_prok]"], "model quickstart has no such layer: did you"),
        (
            ["reward.functions=judges.py:Judge", "reward.options.judges.py:Judge.model=x"],
            "required argument: 'address'",
        ),
        (["sampling.max_new_tokens=512"], "has room for 512 tokens of prompt and completion: lower it"),
        (["generator.max_model_len=513"], "but the model"),
        (["learning_rate=1e-5"], "Unknown key 'learning_rate' in the overrides: here it is trainer.lr."),
        (["reward.functions=judges.py:Judge", "reward.options.judges.py:Judge.adress=x"], "its options are address"),
        (["reward.functions=plain.py:nothing"], "fails for the completion '' of the prompt"),
        (["network.ports=[20000, 20002]"], "network.ports has 3 ports, but each of 4 processes listens at one"),
        (["master.address=tcp://127.0.0.1:99999"], "ports end at 65535"),
        (["group_size=1"], "compares the samples of a group, but group_size is 1, so nothing is learned"),
        (["generator.max_model_len=32"], "generator.max_model_len has room for 32 tokens"),
        (["data.max_prompt_tokens=3"], "checked are longer than data.max_prompt_tokens, 3 tokens; the shortest has 7"),
        (
            ["data.source=words.jsonl"],
            "cannot be made into tokens, such as that of the prompt 'one and two' (the token",
        ),
        (["generator.count=64"], "generator.count is 64, but this machine has 2 cores and no GPU: lower it to 1"),
        (["reward.functions=code"], "cannot score 1 of the 1 rows"),
        (["data.answer_key=null", "reward.functions=exact_match"], "cannot score 1 of the 1 rows"),
        (["rollout_manager.workflow=plain.py:plain"], "The workflow 'plain.py:plain' is no async function"),
        (["rollout_manager.workflow=multi_turn"], "The workflow multi_turn writes 'That is not correct. Try again.'"),
        (
            ["rollout_manager.workflow=multi_turn", "reward.functions=plain.py:ranks"],
            "The workflow multi_turn scores each attempt by itself, but the reward plain.py:ranks scores all samples",
        ),
        (["--config", "twice.yaml"], "twice.yaml has the key 'steps' twice, in lines 1 and 3: remove one"),
        (["trainer.betas=[0.9]"], "trainer.betas.1 is [0.9]"),
        (["model=quickstart", "data.chat_template=none.jinja"], "The chat template none.jinja cannot be read"),
        (["--config", "dots.yaml"], "Unknown key 'trainer.lr' in dots.yaml: keys with dots are for"),
        (["data.split=test"], "is a file, which has no data.split: remove it"),
        (["--config", "binary.yaml"], "binary.yaml is not YAML"),
    ],
)
def test_a_dry_run_finds_what_a_start_would(small, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    Path("rows.jsonl").write_text(ROW)
    Path("words.jsonl").write_text('{"prompt": "one and two", "answer": "three"}\n')
    Path("plain.py").write_text(PLAIN)
    Path("judges.py").write_text(JUDGE)
    Path("many.py").write_text("".join(f"def r{n}(prompt, completion, row):\n    return 0.0\n" for n in range(33)))
    Path("twice.yaml").write_text("steps: 1\nname: a\nsteps: 2\n")
    Path("dots.yaml").write_text(f"base: {CONFIG}\ntrainer.lr: 1\n")
    Path("binary.yaml").write_bytes(b"\x80\x81\xff")
    monkeypatch.setattr(
        sys,
        "argv",
        ["run.py", "--config", CONFIG, "--dry-run", *small, "data.source=rows.jsonl", "data.eval_size=0", *arguments],
    )
    monkeypatch.setenv(KEYS, "")
    assert main() == 2
    *heading, line = capsys.readouterr().err.strip().splitlines()
    assert sentence in line and heading in ([], ["--- What the checks say:"])
    assert not Path("runs").exists()


def test_a_dry_run_is_of_a_run_or_its_master(monkeypatch, capsys):
    check_refused(monkeypatch, capsys, ["--dry-run", "--role", "generator"], "--dry-run checks a run, or its master")


def test_a_configuration_is_named_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--config", CONFIG, "other.yaml"])
    with pytest.raises(SystemExit):
        main()
    assert f"there are two configurations, {CONFIG} and other.yaml: give one" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["run.py", "steps=3", "--dry-run", "nowhere.yaml"])
    assert main() == 2 and "There is no configuration file nowhere.yaml" in capsys.readouterr().err


def test_a_dry_run_without_a_mistake_says_so_and_leaves_nothing(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", CONFIG, small[0], "--dry-run", *small[1:]])
    assert main() == 0
    out, error = capsys.readouterr()
    assert yaml.safe_load(out)["name"] == "test"
    verdict = "The configuration and what it names were checked: the run can be started."
    assert error.splitlines() == ["--- What the checks say:", verdict]
    monkeypatch.setattr(sys, "argv", ["run.py", CONFIG, small[1], "--dry-run", "--quiet"])  # without engines
    assert main() == 0 and not capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--role", "monitor"], "Give the address of the master"),
        (["--role", "monitor", "--role", "reward", "--master", "tcp://127.0.0.1:1"], "Start the monitor by itself"),
        (["--role", "monitor", "--master", "node0"], "is no address"),
        (
            ["--role", "generator", "--master", "tcp://127.0.0.1:1", "--index", "-3"],
            "--index is -3: the indices of a role are",
        ),
        (
            ["--role", "generator", "--master", "tcp://127.0.0.1:1", "--ports", "9-8"],
            "--ports '9-8' is not a range of ports",
        ),
    ],
)
def test_a_role_that_cannot_join_says_so_before_it_waits_for_a_master(monkeypatch, capsys, arguments, sentence):
    check_refused(monkeypatch, capsys, arguments, sentence)


def check_refused(monkeypatch, capsys, arguments: list[str], sentence: str) -> None:
    """What run.py does with the arguments, in this process: importing everything again takes longer than the check."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setattr(Supervisor, "run_everything", None)
    monkeypatch.setenv(KEYS, "")
    assert main() == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert sentence in error
    assert len([line for line in error.strip().splitlines() if not line.endswith("are checked")]) == 1


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("data.source=reasoning_gym:nothing", "nothing"),
        pytest.param(
            "trainer.objective=json:dumps", "'json:dumps', called on 3 tokens, raised TypeError", marks=pytest.mark.slow
        ),
    ],
)
def test_what_has_to_be_imported_to_find_a_mistake_says_nothing_itself(run, small, argument, sentence):
    started = run("--config", CONFIG, *small, argument)
    output = started.wait(60)
    assert started.code == 2
    assert sentence in output
    assert len(output.strip().splitlines()) == 1


def test_a_master_that_is_told_to_stop_ends_without_drawing_a_report(run, small, tmp_path):
    started = run("--role", "master", "--config", CONFIG, *small)
    while "master ready" not in started.output:
        assert started.code is None, started.output
        time.sleep(0.1)
    started.process.terminate()
    started.wait(60)
    folder = tmp_path / "runs" / "test"
    assert started.code == 1
    assert json.loads((folder / "summary.json").read_text())["reason"] == "told to stop by SIGTERM"
    assert not (folder / "report.html").exists()


def test_roles_without_a_master_say_so(run, free_port):
    master = f"tcp://127.0.0.1:{free_port}"
    started = run("--role", "generator", "--role", "reward", "--master", master, "--wait", "4", "--keys", keys_folder())
    output = started.wait(60)
    assert started.code == 2
    assert "waiting for the master" in output
    assert f"No master answers at tcp://127.0.0.1:{free_port}" in output
    assert "Traceback" not in output


def test_a_report_that_cannot_be_written_is_told_in_a_line_and_fails_nothing(tmp_path, capsys):
    keep_report(tmp_path)
    line = capsys.readouterr().err
    assert f"The report was not written ({tmp_path} is not the folder of a run: " in line
    (tmp_path / "config.yaml").write_text("name: demo\n")
    keep_report(tmp_path)
    assert (tmp_path / "report.html").is_file() and not capsys.readouterr().err
