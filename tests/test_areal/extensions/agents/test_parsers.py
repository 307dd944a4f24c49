"""Turns are read by vLLM's own parsers, with tokenizers that have the tokens these parsers look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from fakes.scripted_policy import END, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import UserError
from areal.config import load_config
from areal.config.role_sections import RolloutManagerConfig
from areal.extensions.agents import parsers
from areal.extensions.agents.parsers import Parsed, Parsers
from areal.samples.table import Generation

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS = {"city": "Köln", "days": 3}
AS_JSON = json.dumps({"name": "weather", "arguments": ARGUMENTS})
# Tokens of models: those of the first line are text, those of the second are special.
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
GLM_MARKS = [*WORDS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
SPECIAL = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


@pytest.fixture(scope="module")
def tokenizer():
    fast_tokenizer = byte_tokenizer()
    fast_tokenizer.add_tokens(WORDS)
    fast_tokenizer.add_tokens(SPECIAL, special_tokens=True)
    return fast_tokenizer


def with_marks(*marks: str, calls: str | None = None):
    """A tokenizer with these tokens. calls: what its chat template writes for each call `c`."""
    marked = byte_tokenizer()
    marked.add_tokens([*marks])
    if calls is not None:
        marked.chat_template = (
            "{% for m in messages %}<start>{{ m.role }} {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
            f"{{% set c = call.function %}}{calls}{{% endfor %}}<end>{{% endfor %}}"
            "{% if add_generation_prompt %}<start>assistant {% endif %}"
        )
    return marked


@pytest.fixture
def read(tokenizer):
    """Reads a turn of this text by the parsers of these names."""

    def read(text: str, tools="hermes", reasoning=None, offered=(WEATHER,), template=None, **keywords) -> Parsed:
        return Parsers(tokenizer, tools, reasoning, template).parse(turn(tokenizer, text), list(offered), **keywords)

    return read


def turn(tokenizer, text: str, end: str = END) -> Generation:
    tokens = np.array(tokenizer.encode(text + end, add_special_tokens=False), np.int32)
    n = len(tokens)
    return Generation(tokens, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop" if end else "length")


def called(parsed: Parsed) -> list[tuple[str, dict]]:
    assert all(call["type"] == "function" for call in parsed.calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parsed.calls]


QWEN3 = """<tool_call>
<function=weather>
<parameter=city>
Köln
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<tool_call>{AS_JSON}</tool_call>"),
        ("qwen3_xml", QWEN3),
        ("qwen3_coder", QWEN3),
        ("llama3_json", f"<|python_tag|>{AS_JSON}"),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}"),
    ],
)
def test_calls_are_read_as_the_model_s_parser_in_vllm_reads_them(read, name, text):
    parsed = read(text, name)
    assert called(parsed) == [("weather", ARGUMENTS)]
    assert (parsed.content, parsed.reasoning, parsed.stopped) == ("", None, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"Let me see. <tool_call>{AS_JSON}</tool_call>\n<tool_call>{AS_JSON}</tool_call>"),
        ("qwen3_xml", f"Let me see. {QWEN3}\n{QWEN3}"),
        ("mistral", f"Let me see. {f'[TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}' * 2}"),
    ],
)
def test_every_call_of_a_turn_has_an_id_of_its_own_and_the_text_before_them_remains(read, name, text):
    parsed = read(text, name)
    assert called(parsed) == [("weather", ARGUMENTS)] * 2
    assert len({call["id"] for call in parsed.calls}) == 2
    assert parsed.content == "Let me see."


def test_an_id_that_the_policy_writes_is_kept_unless_the_sample_has_it_already(tokenizer):
    words = ["calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end"]
    marks = [f"<|tool_{word}|>" for word in words]
    kimi = byte_tokenizer()
    kimi.add_tokens(marks, special_tokens=True)
    first, last, begin, arguments, end = marks
    call = f"{begin}functions.weather:0{arguments}{json.dumps(ARGUMENTS)}{end}"
    kimi_k2 = Parsers(kimi, "kimi_k2")
    once, twice = (kimi_k2.parse(turn(kimi, first + call * n + last), [WEATHER]) for n in (1, 2))
    assert [item["id"] for item in once.calls] == ["functions.weather:0"]
    assert len({item["id"] for item in twice.calls}) == 2
    again = kimi_k2.parse(turn(kimi, first + call + last), [WEATHER], taken=["functions.weather:0"])
    assert called(again) == called(once) and again.calls[0]["id"] != "functions.weather:0"


@pytest.mark.parametrize(
    ("name", "text", "plain"),
    [
        ("hermes", '<tool_call>{"name": "weather",</tool_call>', None),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None),
        ("hermes", f"<tool_call>{AS_JSON}</tool_call><tool_call>[]</tool_call>", None),
        ("hermes", "<tool_call>" + '{"a":' * 10_000, None),
        ("qwen3_xml", "see <tool_call>\n<funct", None),
        ("qwen3_xml", "<tool_call>weather</tool_call>", None),
        ("llama3_json", '{"city": "Köln"}', None),
        ("llama3_json", '<|python_tag|>{"name":', '{"name":'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city":', 'weather{"city":'),
        ("mistral", "[TOOL_CALLS][ARGS]{}", "{}"),
    ],
)
def test_a_turn_with_a_malformed_call_is_text_without_special_tokens(read, name, text, plain):
    assert read(text, name) == Parsed(plain or text, None, [], False)


@pytest.mark.slow  # imports vLLM once more
def test_vllm_is_imported_for_the_first_turn_with_tools_and_starts_nothing_and_leaves_no_variables():
    code = (
        "import os, sys; from test_parsers import Parsers, byte_tokenizer, turn;"
        "made = byte_tokenizer(); parsers = Parsers(made); text = '<tool_call>{}</tool_call>';"
        "assert parsers.parse(turn(made, text), None).content == text; assert 'vllm' not in sys.modules;"
        "before = dict(os.environ); parsers.load(); import torch;"
        "assert dict(os.environ) == before; assert not torch.cuda.is_initialized();"
        "import multiprocessing; assert not multiprocessing.active_children()"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("begin", ["<think>", ""], ids=["the policy begins", "the prompt has begun"])
def test_thinking_is_told_apart_with_and_without_tools(read, name, begin):
    text = f"{begin}hm</think>Let me see."
    assert read(text, None, name, offered=()) == Parsed("Let me see.", "hm", [], False)
    assert read(text, "hermes", name) == Parsed("Let me see.", "hm", [], False)
    parsed = read(f"{text} <tool_call>{AS_JSON}</tool_call>", "hermes", name)
    assert (called(parsed), parsed.content, parsed.reasoning) == ([("weather", ARGUMENTS)], "Let me see.", "hm")
    malformed = read(f"{text}<tool_call>{{</tool_call>", "hermes", name)
    assert (malformed.content, malformed.reasoning) == ("Let me see.<tool_call>{</tool_call>", "hm")


@pytest.mark.parametrize(("reasoning", "thinking"), [("openai_gptoss", "hm"), (None, None)])
def test_turns_of_gpt_oss_are_read_from_their_tokens(tokenizer, reasoning, thinking):
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    gpt_oss = Parsers(tokenizer, "openai", reasoning)

    def parse(text: str, tools) -> Parsed:
        text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>{text}"
        tokens = np.array(harmony.encode(text, allowed_special="all"), np.int32)
        return gpt_oss.parse(Generation(tokens, *np.zeros((2, len(tokens))), "stop"), tools)

    for tools in ([WEATHER], None):
        assert parse("final<|message|>four<|return|>", tools) == Parsed("four", thinking, [], False)
    call = f"commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
    assert called(parse(call, [WEATHER])) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_turn_that_is_cut_while_it_thinks_has_no_content(tokenizer, name):
    parsed = Parsers(tokenizer, reasoning_parser=name).parse(turn(tokenizer, "<think>hm", end=""), None)
    assert parsed == Parsed("", "hm", [], False)


def test_a_policy_that_the_template_keeps_from_thinking_does_not_think(read):
    assert read("four", None, "qwen3").reasoning == "four"
    assert read("four", None, "qwen3", template={"enable_thinking": False}) == Parsed("four", None, [], False)


def test_a_turn_is_read_up_to_a_stop_text(read):
    stops = ["Observation:", "never"]
    assert read("run()\nObservation: 7", stops=stops) == Parsed("run()\n", None, [], True)
    assert read("hm Observation: 7</think>", None, "qwen3", stops=stops) == Parsed("", "hm ", [], True)
    call = f"<tool_call>{AS_JSON}</tool_call>"
    assert read(f"{call}Observation: ", stops=stops) == Parsed(call, None, [], True), "its template shows no calls"


CUT = QWEN3.partition("ln")[0]
CUT_GLM = "<tool_call>weather<arg_key>city</arg_key><arg_value>Kö"


@pytest.mark.parametrize(("name", "text"), [("qwen3_xml", CUT), ("glm45", CUT_GLM), ("glm47", "<tool_call>weather")])
def test_a_call_that_was_cut_is_no_call(name, text):
    """These parsers give out what there is of it as a whole call."""
    tokenizer = with_marks(*GLM_MARKS)
    assert Parsers(tokenizer, name).parse(turn(tokenizer, text, end=""), [WEATHER]) == Parsed(text, None, [], False)


def test_a_parser_that_raises_finds_no_calls_and_is_told_of_once(tokenizer, capsys):
    internlm = Parsers(tokenizer, "internlm")
    text = "<|action_start|><|plugin|>weather<|action_end|>"
    for _ in range(2):
        assert internlm.parse(turn(tokenizer, text), [WEATHER]) == Parsed(text, None, [], False)
    assert capsys.readouterr().out.count("a parser fails on what the policy writes") == 1


def test_a_parser_that_takes_too_long_is_given_up(tokenizer, monkeypatch):
    monkeypatch.setattr(parsers, "PARSE_SECONDS", 0.2)
    result = Parsers(tokenizer, "qwen3_xml")
    text = "<tool_call><function=f><parameter=x>" * 20_000
    assert result.parse(turn(tokenizer, text), [WEATHER]) == Parsed(text, None, [], False)
    assert called(result.parse(turn(tokenizer, QWEN3), [WEATHER])) == [("weather", ARGUMENTS)]
    assert sys.getprofile() is None and threading.getprofile() is None


@pytest.mark.parametrize(
    ("tools", "reasoning", "lacks"),
    [("llama3_json", None, "bot token"), ("mistral", None, "tool call token"), ("hermes", "deepseek_r1", "think")],
)
def test_a_tokenizer_without_the_tokens_of_a_parser_is_refused(tools, reasoning, lacks):
    with pytest.raises(UserError, match=f"tool_call_parser={tools} .*with this model: .*{lacks}") as raised:
        Parsers(byte_tokenizer(), tools, reasoning).load()
    assert "\n" not in str(raised.value)


QWEN_TEMPLATE = (
    "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>"
)
GLM_TEMPLATE = (
    "<tool_call>{{ c.name }}\n{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
)


KIMI = ["calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end"]
KIMI = [f"<|tool_{word}|>" for word in KIMI]
DEEPSEEK = [f"<｜tool▁{word}｜>" for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
IN_JSON = "{{ c.arguments | tojson }}"
HERMES_TEMPLATE = "<tool_call>{{ {'name': c.name, 'arguments': c.arguments} | tojson }}</tool_call>"
FAMILIES = {
    "hermes": (WORDS, HERMES_TEMPLATE),
    "qwen3_coder": (WORDS, QWEN_TEMPLATE),
    "qwen3_xml": (WORDS, QWEN_TEMPLATE),
    "seed_oss": (["<seed:tool_call>", "</seed:tool_call>"], QWEN_TEMPLATE.replace("tool_call>", "seed:tool_call>")),
    "glm45": (GLM_MARKS, GLM_TEMPLATE),
    "glm47": (GLM_MARKS, GLM_TEMPLATE),
    "mistral": (SPECIAL, "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    "llama3_json": (SPECIAL, "<|python_tag|>{{ {'name': c.name, 'parameters': c.arguments} | tojson }}"),
    "llama4_pythonic": (
        [],
        "[{{ c.name }}({% for k, v in c.arguments | items %}{{ k }}={{ v | tojson }}, {% endfor %})]",
    ),
    "kimi_k2": (KIMI, f"{KIMI[0]}{KIMI[1]}functions.{{{{ c.name }}}}:0{KIMI[2]}{IN_JSON}{KIMI[3]}{KIMI[4]}"),
    "deepseek_v31": (
        DEEPSEEK,
        f"{DEEPSEEK[0]}{DEEPSEEK[1]}{{{{ c.name }}}}{DEEPSEEK[2]}{IN_JSON}{DEEPSEEK[3]}{DEEPSEEK[4]}",
    ),
    "minimax_m2": (
        ["<minimax:tool_call>", "</minimax:tool_call>"],
        '<minimax:tool_call>\n<invoke name="{{ c.name }}">\n{% for k, v in c.arguments | items %}'
        '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """The parsers of a model, and two calls as its chat template writes them, each in a turn of its own."""
    marks, calls = FAMILIES[request.param]
    tokenizer = with_marks(*marks, calls=calls)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    question = [{"role": "user", "content": "?"}]
    conversation = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    head = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(conversation, tokenize=False).removeprefix(head).removesuffix(END)
    return Parsers(tokenizer, request.param), tokenizer, text


@given(data=st.data())
def test_a_call_that_a_stop_text_cuts_is_no_call_in_any_parser(family, data):
    parsers, tokenizer, call = family
    place = data.draw(st.integers(1, 2 * len(call) + 1))
    text = f"{call}\n{call}"[:place]
    parsed = parsers.parse(turn(tokenizer, f"{text}§"), [WEATHER], ["§"])
    complete = [("weather", ARGUMENTS)] * ((place >= len(call)) + (place > 2 * len(call)))
    assert called(parsed) in ([complete] if place in (len(call), len(call) + 1) else [[], complete[:1], complete])
    assert parsed.calls or parsed.content == tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True)
    assert parsed.stopped


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        ("", "hermes"),  # it shows none
        (HERMES_TEMPLATE, "hermes"),
        (
            "<tool_call>{{ '{\"name\": ' + c.name | tojson + ', \"arguments\": ' + c.arguments + '}' }}</tool_call>",
            "hermes",
        ),
        (QWEN_TEMPLATE, "qwen3_coder"),
        (QWEN_TEMPLATE.replace("tool_call>", "seed:tool_call>"), "seed_oss"),  # several read it
        (GLM_TEMPLATE, "glm45"),
        ("<|channel|>commentary to=functions.{{ c.name }}<|message|>{{ c.arguments | tojson }}<|call|>", "openai"),
    ],
)
def test_the_parser_is_one_that_reads_what_the_chat_template_writes(calls, name):
    chosen = Parsers(with_marks(*GLM_MARKS, "<seed:tool_call>", "</seed:tool_call>", calls=calls))
    chosen.load()
    assert chosen.tool_call_parser == name


@pytest.mark.parametrize(
    ("name", "calls", "sentence"),
    [
        (
            "hermes",
            QWEN_TEMPLATE,
            "tool_call_parser=hermes does not read .*<function=look_up>.*: leave it out, or name qwen3_",
        ),
        (
            "auto",
            "[{{ c.name }} of {{ c.arguments }}]",
            "No parser of vLLM reads .*look_up of .*: set data.chat_template",
        ),
        ("auto", "{{ raise_exception('no calls') }}", "refuses a call: no calls: set data.chat_template"),
    ],
)
def test_calls_of_the_chat_template_that_the_parser_does_not_read_are_refused(name, calls, sentence):
    tokenizer = with_marks(*GLM_MARKS, calls=calls)
    with pytest.raises(UserError, match=sentence) as raised:
        Parsers(tokenizer, name).check([WEATHER])
    assert "\n" not in str(raised.value)
    Parsers(tokenizer, name).check(None)


def test_a_parser_that_is_named_is_taken_if_none_reads_the_calls_of_the_template():
    named = Parsers(with_marks(*GLM_MARKS, calls="[{{ c.name }} of {{ c.arguments }}]"), "hermes")
    named.load()
    assert named.tool_call_parser == "hermes"


def test_the_names_that_are_known_are_those_that_vllm_registers():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, names in (
        ("tool_call_parser", ToolParserManager.list_registered()),
        ("reasoning_parser", ReasoningParserManager.list_registered()),
    ):
        with pytest.raises(UserError, match=f"known are {', '.join(names)} "):
            load_config(None, [f"{key}=none-such"], RolloutManagerConfig)
        assert all(load_config(None, [f"{key}={name}"], RolloutManagerConfig) for name in names)


@pytest.mark.parametrize("tool", [{"name": "weather"}, {"type": "function", "function": {"description": "x"}}])
def test_tools_in_another_form_are_refused(tokenizer, tool):
    with pytest.raises(ValueError, match=r"tools\.0\.function") as raised:
        Parsers(tokenizer).check([tool])
    assert "\n" not in str(raised.value)
