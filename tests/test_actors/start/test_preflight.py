import contextlib
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from fakes.scripted_policy import byte_tokenizer
from safetensors.torch import save_file
from support.process_tree import needs_namespaces
from support.tiny_training import make_model

from actors.scorer import scorer_checks
from actors.start import preflight, row_checks
from areal.base.errors import UserError
from areal.config import Config
from areal.data.sources import open_source
from areal.extensions.programs import code_reward


def config_of(rows, **changes):
    values = {
        "model": "m",
        "steps": 1,
        "batch_size": 4,
        "group_size": 2,
        "data": {"source": str(rows), "eval_size": 0},
        "sampling": {"max_new_tokens": 64},
        "reward": {"functions": "math"},
    }
    return Config.model_validate(values | changes)


@pytest.fixture
def check(tmp_path):
    """Checks the answers of rows with these answers and other fields."""

    def check(answers, eval_size=0, rewards="math", **fields):
        file = tmp_path / "rows.jsonl"
        rows = [{"prompt": f"What is {n}?", "answer": answer, **fields} for n, answer in enumerate(answers)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"source": str(file), "eval_size": eval_size}
        config = config_of(file, data=data, reward={"functions": rewards})
        row_checks.check_answers(config, open_source(config.data, config.seed))

    return check


GOOD = ["72", 7, 0.5, "5 + 2 = 7\n#### 1,007", "\\frac{1}{2}", ["x+1", 3], "so it is \\boxed{\\pi}", "Paris"]


def test_answers_that_can_be_read_pass_silently(check, capsys):
    check(GOOD * 3, eval_size=5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("bad", ["x^2 +* 3", None, [], ["5", "\\frac{1}{0}"]])
@pytest.mark.parametrize("eval_size", [0, 8])
def test_answers_that_cannot_be_read_are_refused_before_the_run(check, bad, eval_size):
    named = repr(bad if isinstance(bad, str) else bad[-1]) if bad else "the row of the prompt 'What is 8?'"
    with pytest.raises(UserError) as error:
        check([*GOOD, bad], eval_size=eval_size)
    assert "cannot score 1 of the 9 rows of data.source" in str(error.value)
    assert "correct or remove these rows" in str(error.value)
    assert f"that were checked, such as {named}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"trainer": {"minibatches": 1, "deepspeed_options": {"zero_optimization": {"reduce_bucket_size": "many"}}}},
            "DeepSpeed does not take trainer.deepspeed_options: .* reduce_bucket_size Input should be a valid integer",
        ),
        pytest.param(
            {"generator": {"engine_options": {"kv_cache_dtype": "fp9"}}},
            "vLLM cannot run the model .* cache_dtype Input should be 'auto'",
            marks=pytest.mark.slow,  # imports vLLM in the same way
        ),
    ],
)
def test_options_that_the_engines_refuse_are_refused_in_a_rehearsal(tmp_path, changes, sentence):
    (make_model(tmp_path) / "tokenizer_config.json").write_text("{}")
    config = config_of("rows.jsonl", model=str(tmp_path), **changes)
    with pytest.raises(UserError, match=sentence):
        preflight.check_options(config)


@pytest.mark.parametrize("sandbox", [{"url": "http://127.0.0.1:1"}, {"mode": "none"}])
def test_a_sandbox_of_namespaces_is_tried_before_the_run(sandbox):
    workflow = {"workflow": "environment", "workflow_options": {"environment": "bubble"}}
    workflow["workflow_options"]["environment_options"] = {"folder": None, "command": "true"}
    with pytest.raises(UserError, match="`bubble` is namespaces of this machine"):
        preflight.check_code(config_of([], rollout_manager=workflow, sandbox=sandbox))


def test_a_few_answers_that_cannot_be_read_are_told(check, capsys):
    check([*GOOD * 3, "x^2 +* 3"])
    assert "cannot score 1 of the 25 rows" in capsys.readouterr().err


def test_only_rows_that_math_scores_are_checked(check, capsys):
    check(["x^2 +* 3"], rewards="exact_match")
    check(["x^2 +* 3"], reward="exact_match")
    with pytest.raises(UserError, match="cannot score 1 of the 1 rows"):
        check(["x^2 +* 3"], rewards="exact_match", reward={"math": 1.0, "exact_match": 0.5})
    assert capsys.readouterr() == ("", "")


def test_ranks_that_do_not_make_up_sequence_groups_are_refused_before_the_run():
    with pytest.raises(UserError, match=r"trainer.ranks is 3, but trainer.sequence_parallel is 2"):
        preflight.check(config_of("rows.jsonl", trainer={"ranks": 3, "sequence_parallel": 2, "minibatches": 1}))


def test_weights_beside_a_model_are_told_and_a_folder_that_is_read_in_two_ways_is_refused(tmp_path, capsys):
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1?", "answer": "1"}\n')
    folder = make_model(tmp_path / "model")
    byte_tokenizer().save_pretrained(folder)
    config = config_of(rows, model=str(folder), batch_size=4, sampling={"max_new_tokens": 4})
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    preflight.check(config, machine=False)
    assert "consolidated.safetensors is no part of the model there" in capsys.readouterr().err
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has an adapter beside its model"):
        preflight.check(config, machine=False)


def test_heads_that_the_ranks_cannot_divide_are_refused_before_the_run(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1?", "answer": "1"}\n')
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 12, "num_key_value_heads": 2}}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    trainer = {"ranks": 3, "sequence_parallel": 3, "minibatches": 1}
    config = config_of(
        tmp_path / "rows.jsonl", model=str(tmp_path), trainer=trainer, master={"address": "tcp://127.0.0.1:0"}
    )
    with pytest.raises(UserError, match=r"has 12 attention heads, and 2 for keys and values"):
        preflight.check(config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(  # imports vLLM; test_parsers.py has the tokenizer, test_examples.py the process
            {"rollout_manager": {"tool_call_parser": "llama3_json", "reasoning_parser": "qwen3"}},
            "vLLM cannot use rollout_manager.tool_call_parser=llama3_json and rollout_manager.reasoning_parser=qwen3 "
            "with this model: Llama3JsonToolParser could not locate the bot token '<|python_tag|>' in the tokenizer.",
            marks=pytest.mark.slow,
        ),
        ({"data": {"chat_template": "none.jinja"}}, "The chat template none.jinja cannot be read"),
    ],
)
def test_parsers_and_templates_that_do_not_fit_the_model_are_refused_before_the_run(tmp_path, changes, sentence):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1?", "answer": "1"}\n')
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    data = {"source": str(tmp_path / "rows.jsonl"), "eval_size": 0} | changes.pop("data", {})
    config = config_of(None, model=str(tmp_path), data=data, master={"address": "tcp://127.0.0.1:0"}, **changes)
    with pytest.raises(UserError, match=re.escape(sentence)):
        preflight.check(config)


@pytest.mark.slow  # imports vLLM; test_parsers.py has the sentence
def test_an_agent_whose_calls_no_parser_reads_is_told_before_the_run(tmp_path, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<start>{{ m.role }} {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "({{ c.function.name }} of {{ c.function.arguments }}){% endfor %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder := make_model(tmp_path / "model"))
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1?", "answer": "1"}\n')
    settings = {"master": {"address": "tcp://127.0.0.1:0"}, "batch_size": 4, "sampling": {"max_new_tokens": 4}}
    workflow = {"workflow": "agent", "workflow_options": {"command": "true"}}
    config = config_of(rows, model=str(folder), rollout_manager=workflow, **settings)
    preflight.check(config, machine=False)
    errors = capsys.readouterr().err
    assert "Note: samples fail if the agent offers tools. No parser of vLLM reads the calls" in errors


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "wise has room for 90 tokens, but a prompt of 26 and sampling.max_new_tokens=64 need one more than 90"),
        ({"data": {"max_prompt_tokens": 25}}, None),
        ({"scorers": {"wise": {"model": "m", "max_model_len": 91}}}, None),
        ({"generator": {"max_model_len": 89}}, None),
    ],
)
def test_a_scorer_without_room_for_the_longest_sample_is_refused_before_the_run(tmp_path, changes, sentence):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1?"}\n{"prompt": "What is 1 and what is one?"}\n')
    data = {"source": str(tmp_path / "rows.jsonl"), "eval_size": 0, "answer_key": None} | changes.pop("data", {})
    scorers = {"wise": {"model": "m", "max_model_len": 90}}
    config = config_of(None, data=data, **{"scorers": scorers, "trainer": {"teacher": "wise"}, **changes})
    source = open_source(config.data, config.seed)
    rooms = scorer_checks.rooms_of(config, {"wise": tmp_path})
    with pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext():
        row_checks.check_prompts(config, source, byte_tokenizer(), None, rooms)


CHATML = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def chat_tokenizer(template):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    tokenizer.chat_template = template
    return tokenizer


def config_of_chat(tmp_path, messages, **rollout_manager):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": messages, "answer": "1"}) + "\n")
    data = {"source": str(tmp_path / "rows.jsonl"), "eval_size": 0}
    return config_of(None, data=data, rollout_manager=rollout_manager)


@pytest.mark.parametrize(
    ("template", "workflow", "sentence"),
    [
        (CHATML, "multi_turn", None),
        (CHATML, "tools", None),
        (CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'"), "multi_turn", None),
        (
            CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'"),
            "tools",
            "does not show 'Result 7394.', which the role tool says",
        ),
        (CHATML.replace("tools or []", "[]"), "tools", "shows it no tools"),
        (
            "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + CHATML,
            "multi_turn",
            "(the chat template refuses such a conversation: one message)",
        ),
        ("{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + CHATML, "single_turn", None),
    ],
)
def test_a_template_that_loses_a_turn_of_the_workflow_is_refused_before_the_run(tmp_path, template, workflow, sentence):
    options = {"workflow_options": {"servers": {"x": {"command": ["x"]}}}} if workflow == "tools" else {}
    config = config_of_chat(tmp_path, [{"role": "user", "content": "What is 1?"}], workflow=workflow, **options)
    source = open_source(config.data, config.seed)
    with pytest.raises(UserError, match=re.escape(sentence)) if sentence else contextlib.nullcontext():
        preflight.check_template(config, source, chat_tokenizer(template))


def test_prompts_that_a_template_does_not_show_are_refused_and_those_that_end_with_an_answer_told(tmp_path, capsys):
    messages = [{"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "One."}]
    config = config_of_chat(tmp_path, messages)
    source = open_source(config.data, config.seed)
    row_checks.check_prompts(config, source, chat_tokenizer(CHATML), None, {})
    assert "1 of 1 prompts" in (note := capsys.readouterr().err) and "end with a turn of the assistant" in note
    with pytest.raises(UserError, match="the chat template does not show 'What is 1\\?', which the role user says"):
        row_checks.check_prompts(config, source, chat_tokenizer(CHATML.replace("m.content", "m.text")), None, {})


def test_a_teacher_has_the_policys_tokenizer(tmp_path):
    from areal.data.warm_start import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path / "few")
    byte_tokenizer().save_pretrained(tmp_path / "many")
    for folder in tmp_path.iterdir():
        (folder / "config.json").write_text("{}")
    config = config_of("rows.jsonl", scorers={"wise": {"model": "m"}}, trainer={"teacher": "wise"})
    scorer_checks.check_scorer(config, "wise", tmp_path / "many", tmp_path / "many")
    with pytest.raises(UserError, match="another tokenizer than the model .*few, whose tokens it is to score"):
        scorer_checks.check_scorer(config, "wise", tmp_path / "many", tmp_path / "few")


@pytest.fixture
def much_time(monkeypatch):
    """All rows are looked at, however busy the machine is."""
    monkeypatch.setattr(code_reward, "TESTS_SECONDS", 200.0)


def check_tests(tmp_path, *tests, sandbox=(), **data):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Write {test}", "tests": test}) + "\n" for test in tests))
    config = config_of(
        file,
        data={"source": str(file), "eval_size": 0, "answer_key": None, **data},
        reward={"functions": "code"},
        sandbox=dict(sandbox),
    )
    code_reward.check_tests(config, row_checks._rows(config, open_source(config.data, config.seed)))


def test_rows_whose_tests_are_passed_by_what_computes_nothing_are_told_or_refused(tmp_path, capsys, much_time):
    good, weak, unreadable = "assert f([1]) == 2", "assert f([1]) == []\nassert f([2]) == []", "assert f("
    check_tests(tmp_path, good)
    assert capsys.readouterr() == ("", "")
    check_tests(tmp_path, good, weak, unreadable)
    note = capsys.readouterr().err
    assert "of the 3 rows of data.source" in note and "that were checked, 2 have tests worth nothing, such as" in note
    with pytest.raises(UserError, match=r"its tests are passed if functions return \[\]\): remove these rows"):
        check_tests(tmp_path, good, weak, weak_tests="refuse")


def test_the_start_says_how_many_rows_are_judged_beside_the_program(tmp_path, capsys, much_time):
    tests = "assert f([1]) == 2", "assert f([1]).left == 2", "class Mine: pass\nassert f(Mine()) == 2"
    check_tests(tmp_path, *tests, sandbox={"tests": "inside_where_needed"})
    note = capsys.readouterr().err
    assert note.startswith("Note: the tests of 2 of the 3 rows of data.source") and len(note.splitlines()) == 1
    assert note.endswith(
        "that were checked run beside the program, which can forge their verdict (areal docs sandbox).\n"
    )


def test_prompts_that_do_not_name_what_their_tests_call_are_refused_or_told(tmp_path, capsys):
    checks = "def check(candidate):\n    assert candidate(a=1, b=2) == 3\n\ncheck({})".format
    rows = [
        {"prompt": "Add two numbers.", "tests": {"functional": checks("Solution().add")}},
        {"prompt": "Add two numbers.", "tests": {"functional": checks("add")}},
        {
            "prompt": "Add.",
            "tests": [{"input": "[1, 2]", "output": "3", "fn_name": "addition", "type": "function_call"}],
        },
        {"prompt": "Print the sum.", "tests": [{"input": "1 2", "output": "3"}]},
        {"prompt": "Write `add`.", "tests": {"functional": checks("Solution().add")}},
        {"prompt": "Write Stack.", "tests": "assert Stack().size() == Stack(2).left()"},
    ]
    file = tmp_path / "rows.jsonl"
    config = config_of(
        file, data={"source": str(file), "eval_size": 0, "answer_key": None}, reward={"functions": "code"}
    )
    sentence = (
        r"3 prompts of .* do not name what their tests call, such as .* \(its tests use add(ition)?\): let data.prompt_"
    )
    for chosen, refusal in ((rows[:3], pytest.raises(UserError, match=sentence)), (rows[1:], contextlib.nullcontext())):
        file.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        with refusal:
            code_reward.check_prompts_name_calls(
                config, row_checks._rows(config, open_source(config.data, config.seed))
            )
    assert "2 of the 5 prompts" in capsys.readouterr().err


def test_rows_all_of_which_lack_tests_are_refused(tmp_path, much_time):
    with pytest.raises(UserError, match="of the 1 rows .* 1 have tests worth nothing, .*: give rows with tests"):
        check_tests(tmp_path, "assert f([1]) == []\nassert f([2]) == []")


@pytest.mark.parametrize(
    ("changes", "gib", "sentence"),
    [
        ({}, 64, None),
        ({}, 16, "16 GiB of memory, but the run needs at least 6.5 for the generators, 24.3 for the trainer, 0.2 for"),
        ({"trainer": {"lora": {"rank": 4}, "minibatches": 1}}, 16, None),
        (
            {"generator": {"count": 8}},
            48,
            "at least 51.7 for the generators, 24.3 for the trainer, 0.2 for the other roles",
        ),
        ({"reward": {"functions": "math", "count": 999}}, 64, "124.9 for the other roles"),
        (
            {
                "scorers": {"wise": {"model": "m", "count": 256, "dtype": "float32"}},
                "trainer": {"teacher": "wise", "minibatches": 1},
            },
            64,
            "129.0 for the scorers",
        ),
        ({"generator": {"count": 17}}, 999, "generator.count is 17, but this machine has 2 cores and no GPU: lower it"),
    ],
)
def test_what_does_not_fit_this_machine_is_refused(monkeypatch, tmp_path, changes, gib, sentence):
    save_file({"weight": torch.empty(1 << 20, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(preflight, "host_memory", lambda: gib << 30)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    config = config_of("rows.jsonl", **{"trainer": {"minibatches": 1}} | changes)
    if sentence is None:
        return preflight.check_machine(config, {"weight": 1_600_000_000}, {})
    with pytest.raises(UserError, match=re.escape(sentence)):
        preflight.check_machine(config, {"weight": 1_600_000_000}, {"wise": tmp_path})


def test_more_threads_of_engines_than_cores_are_told(monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("areal.cpu.processor._cpu_flags", lambda: "avx512_bf16")
    preflight.check_machine(config_of("rows.jsonl", generator={"count": 2}), {}, {})
    assert capsys.readouterr().err == ""
    teacher = {"scorers": {"wise": {"model": "m"}}, "trainer": {"teacher": "wise", "minibatches": 1}}
    for sections in {"generator": {"count": 3}}, {"generator": {"count": 2}, **teacher}:
        preflight.check_machine(config_of("rows.jsonl", **sections), {}, {})
        assert "Note: the engines have 3 threads together, but this machine has 2 cores" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "notes"), [("avx2 fma", 1), ("avx512_bf16 avx2", 0), ("bf16 sve", 0)])
def test_bfloat16_on_a_processor_without_it_is_noted(monkeypatch, capsys, flags, notes):
    monkeypatch.setattr("areal.cpu.processor._cpu_flags", lambda: flags)
    preflight.check_machine(config_of("rows.jsonl", generator={"dtype": "bfloat16"}), {}, {})
    assert capsys.readouterr().err.count("set generator.dtype to float32") == notes
    preflight.check_machine(config_of("rows.jsonl", generator={"dtype": "float32"}), {}, {})
    assert capsys.readouterr().err == ""


def test_the_context_and_the_layers_of_the_quickstarts_model_are_known():
    from areal.data.warm_start import MAX_LENGTH, make_model, make_tokenizer

    assert preflight.QUICKSTART_CONTEXT == MAX_LENGTH
    layers = {name.rpartition(".")[2] for name, _ in make_model(make_tokenizer()).named_modules() if "proj" in name}
    assert {name.removeprefix("layers.") for name in preflight.QUICKSTART_LAYERS} == layers


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("judge", {"verdict": "choice", "choices": {"GOOD": 1}, "samples": 3}, None),
        ("group_judge", {"sampling": {"temperature": 0.5}}, None),
        ("group_judge", {"verdict": "json"}, "reward 'group_judge/strict': Unknown key 'verdict' in its options"),
        ("judge", {"sampling": {"top_p": 2}}, "reward 'judge/strict': top_p is 2 in its option sampling"),
        ("judge", {"sampling": {"stop": ["."]}}, "reward 'judge/strict': stop ends no answer of a judge"),
        ("judge", {"template": "{{"}, "reward 'judge/strict': its template is not a Jinja template"),
    ],
)
def test_the_options_of_a_judge_that_is_a_scorer_are_checked(kind, options, sentence):
    name = f"{kind}/strict"
    reward = {"functions": name, "options": {name: {"url": "scorer:big", **options}}}
    config = config_of("rows.jsonl", scorers={"big": {"model": "m", "kind": "judge"}}, reward=reward)
    with pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext():
        preflight.check_code(config)


ESTIMATOR = """
class Signs:
    compares_group = True

    def __call__(self, credits):
        return credits.of_samples - credits.in_groups(lambda totals: totals.mean())
"""


def test_an_estimator_that_compares_the_samples_of_a_group_needs_several(tmp_path):
    (tmp_path / "estimator.py").write_text(ESTIMATOR)
    trainer = {"advantage": f"{tmp_path}/estimator.py:Signs"}
    preflight.check_code(config_of("rows.jsonl", trainer=trainer))
    sentence = r"trainer\.advantage=.*:Signs compares the samples of a group, but group_size is 1"
    with pytest.raises(UserError, match=sentence):
        preflight.check_code(config_of("rows.jsonl", trainer=trainer, group_size=1))


@pytest.mark.parametrize(
    ("changes", "architecture", "sentence"),
    [
        ({}, "Qwen3ForCausalLM", "is a language model without a head"),
        ({}, "Qwen3ForSequenceClassification", "has no chat template: set scorers.liked.chat=false"),
        ({"chat": False}, "Qwen3ForSequenceClassification", None),
        ({"max_model_len": 64}, "Qwen3ForSequenceClassification", "liked has room for 64 tokens"),
    ],
)
def test_a_reward_model_has_a_head_and_reads_a_chat(tmp_path, changes, architecture, sentence):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    liked = {"model": str(tmp_path), "kind": "reward_model", **changes}
    config = config_of("rows.jsonl", scorers={"liked": liked}, reward={"functions": "liked"})
    with pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext():
        scorer_checks.check_scorer(config, "liked", tmp_path, None)


@needs_namespaces
def test_a_machine_whose_loopback_interface_is_down_is_told_so_at_once():
    script = "from actors.start.preflight import check_port\ncheck_port('tcp://127.0.0.1:0')"
    command = ["unshare", "-Urn", sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert said.endswith("its loopback interface is down: ip link set lo up.\n")
    preflight.check_port("tcp://127.0.0.1:0")
