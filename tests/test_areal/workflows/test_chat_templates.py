"""What stands between two sampled turns is what the template writes there, in the manners of many families."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.samples.table import Generation
from areal.workflows.chat_templates import EXAMPLE_TOOL, ChatTemplate, check_shown
from areal.workflows.conversation import Conversation, user

SPECIAL = ["<bos>", "<start>", "<end>", "<close>", "<call>", "<after>", "<result>", "<tools>"]
TEXT = "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
THINKS = "<think>\n"

# Of chat.
CHAT = {
    "as it is": TEXT + PROMPT,
    "white space trimmed": TEXT.replace("m.content", "m.content | trim") + PROMPT,
    "an end of several tokens": TEXT.replace("<end>", "<close><end>") + PROMPT,
    "white space before the end": TEXT.replace("<end>", " \n<end>") + PROMPT,
    "no end of its own": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "system merged, alternation enforced": (
        "<bos>{% if messages[0].role == 'system' %}{% set said = messages[0].content + '\n' %}"
        "{% set messages = messages[1:] %}{% else %}{% set said = '' %}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}<start>{% if loop.first %}{{ said }}{% endif %}{{ m.content }} [/]{% else %}"
        " {{ m.content }} <end>{% endif %}{% endfor %}"
    ),
    "thinking removed from older turns": (
        "{% for m in messages %}<start>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}" + PROMPT
    ),
    "a prompt that begins to think": TEXT + PROMPT.replace("assistant\n", f"assistant\n{THINKS}"),
    "a date": "{{ strftime_now('%d %B %Y') }}" + TEXT + PROMPT,
    "content as parts": TEXT.replace(
        "{{ m.content }}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    + PROMPT,
}

CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}\n{% endfor %}"
SAID = "<start>{{ m.role }}\n{{ m.content }}<end>\n"
# Of tools: what a turn with calls looks like, and what stands in place of a message of the role tool.
TOOLS = {
    "results as turns": (f"<start>assistant\n{CALLS}<end>\n", "<start>tool\n{{ m.content }}<end>\n"),
    "results as turns of the user, in one block": (
        f"<start>assistant\n{CALLS}<end>\n",
        "{% if messages[loop.index0 - 1].role != 'tool' %}<start>user\n{% endif %}<result>{{ m.content }}\n"
        "{% if loop.last or messages[loop.index].role != 'tool' %}<end>\n{% endif %}",
    ),
    "results inside the turn of the calls": (
        f"<start>assistant\n{CALLS}<after>"
        "{% for t in messages[loop.index:] %}{% if t.role != 'tool' %}{% break %}{% endif %}"
        "<result>{{ t.content }}<close>{% endfor %}",
        "",
    ),
    "results known by the place of their call": (
        "{% for c in m.tool_calls %}{% set ns.ids = ns.ids + [c.id] %}{% endfor %}"
        f"<start>assistant\n{CALLS}<close><end>\n",
        "<start>tool\n{% for i in ns.ids %}{% if i == m.tool_call_id %}{{ loop.index0 }}{% endif %}{% endfor %}: "
        "{{ m.content }}<end>\n",
    ),
    "results known by the id of their call": (
        f"<start>assistant\n{CALLS}<end>\n",
        "{% if not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}"
        "<result>{{ m.tool_call_id }} {{ m.content | tojson }}<end>\n",
    ),
    "calls that end with another token than text": (
        f"<start>assistant\n{CALLS}<after>",
        "<result>{{ m.content }}<end>\n",
    ),
    "arguments as text": (
        "<start>assistant\n{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}{% endfor %}"
        "<close><end>\n",
        "<result>{{ m.content }}<end>\n",
    ),
    "a call refused beside text": (
        "{% if m.content %}{{ raise_exception('either content or calls') }}{% endif %}"
        f"<start>assistant\n{CALLS}<end>\n",
        "<start>tool\n{{ m.content }}<end>\n",
    ),
    "calls whose arguments are not shown": (
        "<start>assistant\n<call>f<close><end>\n",
        "<result>{{ m.content }}<end>\n",
    ),
}
TOOLS_SHOWN = {
    "in the system's turn": "<start>system\n{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}<end>\n",
    "apart": "{% if tools %}<tools>{{ tools | tojson }}<end>{% endif %}",
}


def tool_template(family: str, tools: str = "") -> str:
    calls, result = TOOLS[family]
    return (
        f"{{% set ns = namespace(ids=[]) %}}{tools}{{% for m in messages %}}{{% if m.tool_calls %}}{calls}"
        f"{{% elif m.role == 'tool' %}}{result}{{% else %}}{SAID}{{% endif %}}{{% endfor %}}{PROMPT}"
    )


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A token for each byte, and for each of SPECIAL."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", additional_special_tokens=SPECIAL)
    fast_tokenizer.chat_template = template
    fast_tokenizer.name_or_path = "a-model"
    return fast_tokenizer


def sampled(of: PreTrainedTokenizerFast, text: str, finish: str = "stop") -> Generation:
    tokens = np.array(of.encode(text, add_special_tokens=False), np.int32)
    return Generation(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), finish)


def written(of: PreTrainedTokenizerFast, messages: list, **options) -> str:
    if of.chat_template == CHAT["content as parts"]:
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return of.apply_chat_template(messages, tokenize=False, **options)


def continued(
    talk: Conversation, of: PreTrainedTokenizerFast, messages: list, turn: Generation, message: dict, new: list
):
    """The text of all tokens of the next prompt."""
    text_before = of.decode(talk.prompt(messages))
    messages += [talk.add(turn, message), *new]
    prompt = of.decode(talk.prompt(messages))
    assert prompt.startswith(text_before + of.decode(turn.tokens))
    return prompt


@pytest.mark.parametrize("family", CHAT)
def test_a_chat_of_several_turns_is_what_the_template_writes_itself(family):
    of = tokenizer(CHAT[family])
    talk, messages = Conversation(of), [{"role": "system", "content": "Be brief."}, user("Which city?")]
    for answer, question in ("Oslo it is", "And now?"), ("", "Nothing?"), ("Rome", "Sure?"):
        head = written(of, messages, add_generation_prompt=True).removesuffix(THINKS)
        message = {"role": "assistant", "content": answer}
        item = written(of, [*messages, message]).removeprefix(head).rstrip("\n")
        prompt = continued(talk, of, messages, sampled(of, item), message, [user(question)])
        complete = written(of, messages, add_generation_prompt=True)
        assert prompt.endswith(THINKS) == complete.endswith(THINKS)
        assert prompt.replace(THINKS, "") == complete.replace(THINKS, "")  # older turns have none


@pytest.mark.parametrize("family", TOOLS)
@pytest.mark.parametrize("shown", TOOLS_SHOWN)
def test_results_of_tools_stand_beside_their_calls_as_the_template_writes_them_itself(family, shown):
    of = tokenizer(tool_template(family, TOOLS_SHOWN[shown]))
    as_text = family == "arguments as text"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    talk, messages = Conversation(of, tools), [user("Weather?")]
    for turn in range(2):
        arguments = ['{"n": 5}', '{"city": "Oslo"}'] if as_text else [{"n": 5}, {"city": "Oslo"}]
        calls = [
            {"id": f"id{turn}{i}", "type": "function", "function": {"name": "f", "arguments": value}}
            for i, value in enumerate(arguments)
        ][turn:]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        new = [{"role": "tool", "tool_call_id": call["id"], "content": f"rain {i}"} for i, call in enumerate(calls)]
        head = written(of, messages, tools=tools, add_generation_prompt=True)
        item = written(of, [*messages, message], tools=tools)[len(head) :].rstrip("\n")
        prompt = continued(talk, of, messages, sampled(of, item), message, new)
        assert prompt == written(of, messages, tools=tools, add_generation_prompt=True)
        assert all(f"rain {i}" in prompt for i in range(len(calls)))
    prompt = continued(
        talk, of, messages, sampled(of, "It rains<end>"), {"role": "assistant", "content": "It rains"}, [user("Yes")]
    )
    assert prompt == written(of, messages, tools=tools, add_generation_prompt=True)


def test_a_template_that_begins_another_turn_after_calls_is_exact():
    """As Command R7B's does. The policy's own turn ends with the first token that ends a sequence."""
    family = tool_template("results as turns", TOOLS_SHOWN["apart"])
    of = tokenizer(
        family.replace(f"{CALLS}<end>", f"{CALLS}<end>{{% if loop.last %}}<start>assistant\n<call>{{% endif %}}")
    )
    check_shown(of, [user("Hello")], [EXAMPLE_TOOL])
    turn, _ = ChatTemplate(of, [EXAMPLE_TOOL]).example_calls()
    assert of.decode(turn) == '<call>look_up {"argument": "value 8305"}\n<end>'


@pytest.mark.parametrize("family", ["an end of several tokens", "white space before the end"])
def test_of_an_end_that_the_policy_wrote_in_part_the_template_writes_nothing_twice(family):
    of = tokenizer(CHAT[family])
    for end, finish, remainder in (
        ("<end>", "stop", ""),
        ("", "length", written(of, [user("")])[len("<start>user\n") :].rstrip("\n")),
        *([("<close>", "length", "<end>")] if "several" in family else []),
    ):
        talk, messages = Conversation(of), [user("Hello")]
        turn, answer = sampled(of, f"Oslo{end}", finish), {"role": "assistant", "content": "Oslo"}
        prompt = continued(talk, of, messages, turn, answer, [user("Yes")])
        assert f"Oslo{end}{remainder}\n<start>user\nYes" in prompt


def test_what_a_template_does_not_show_is_said_with_its_name_and_not_dropped():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    no_tools = TEXT.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}") + PROMPT
    no_system = TEXT.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}") + PROMPT
    nothing = "{% for m in messages %}<start>{{ m.role }}\n{{ m.text }}<end>\n{% endfor %}" + PROMPT
    of = tokenizer(no_tools)
    talk, messages = Conversation(of), [user("Weather?")]
    talk.prompt(messages)
    messages.append(talk.add(sampled(of, "<call>f<end>"), {"role": "assistant", "content": "", "tool_calls": calls}))
    with pytest.raises(
        ValueError, match="the chat template of a-model does not show 'rain 7', which the role tool says"
    ):
        talk.prompt([*messages, {"role": "tool", "tool_call_id": "1", "content": "rain 7"}])
    with pytest.raises(ValueError, match="a-model does not show 'Be brief.', which the role system says"):
        Conversation(tokenizer(no_system)).prompt([{"role": "system", "content": "Be brief."}, user("Weather?")])
    with pytest.raises(ValueError, match="a-model does not show 'Weather"):
        Conversation(tokenizer(nothing)).prompt([user("Weather?")])


@pytest.mark.parametrize(
    ("content", "filter_"),
    [
        (' {"a": "b\nc"}\n', "tojson"),
        ("é\nà", "tojson(ensure_ascii=true)"),
        ("x /no_think please", "replace('/no_think', '')"),
    ],
)
def test_a_message_that_a_template_trims_or_quotes_is_shown(content, filter_):
    of = tokenizer(TEXT.replace("m.content", f"m.content | {filter_}") + PROMPT)
    assert of.decode(Conversation(of).prompt([user(content)])).startswith("<start>user\n")


SHOWN = ["", "| trim", "| upper", "| tojson", "| replace('/no_think', '')", "[:6]", "[6:]", "| first", "| length"]
said = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool"]),
            "content": st.text(min_size=1, max_size=16)
            | st.sampled_from(["/no_think", "so /no_think", "?", "a b c d"]),
        }
    ),
    min_size=1,
    max_size=3,
)


def is_in(text: str, shown: str) -> bool:
    """Whether all words of a text are there, or the text itself if it has none; marks may be missing."""
    words = re.findall(r"\w+", re.sub(r"(?<!\S)/\w+(?!\S)", "", text.casefold())) or [text.strip().casefold()]
    return all(word in shown.casefold() or json.dumps(word)[1:-1] in shown for word in words) or text.strip()[:1] == "/"


@given(said, st.sampled_from(SHOWN), st.sampled_from(["none", "system", "tool", "user"]))
def test_what_a_template_shows_has_every_text_of_the_messages_or_they_are_refused(messages, filter_, left_out):
    template = TEXT.replace("m.content", f"m.content {filter_}").replace(
        "in messages", f"in messages if m.role != '{left_out}'"
    )
    of = tokenizer(template + PROMPT)
    try:
        shown = of.decode(Conversation(of).prompt(messages))
    except ValueError:
        return
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    for message in messages:
        text = message["content"].rpartition("</think>")[2] if message["content"] in answers else message["content"]
        assert not text.strip() or is_in(text, shown)


@given(
    st.lists(st.text(min_size=1, max_size=16), min_size=1, max_size=3),
    st.sampled_from([*TOOLS]),
    st.sampled_from(SHOWN),
)
def test_what_a_template_shows_of_results_has_every_text_of_them_or_they_are_refused(results, family, filter_):
    of = tokenizer(
        tool_template(family, TOOLS_SHOWN[next(iter(TOOLS_SHOWN))]).replace("t.content", f"t.content {filter_}")
    )
    of.chat_template = of.chat_template.replace("m.content }}<end>", f"m.content {filter_} }}}}<end>")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    arguments = '{"n": 5}' if family == "arguments as text" else {"n": 5}
    calls = [
        {"id": f"id{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for i in range(len(results))
    ]
    talk, messages = Conversation(of, tools), [user("Weather?")]
    try:
        head = written(of, messages, tools=tools, add_generation_prompt=True)
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        turn = sampled(of, written(of, [*messages, message], tools=tools)[len(head) :].rstrip("\n"))
        talk.prompt(messages)
        messages += [talk.add(turn, message)]
        new = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, results, strict=True)
        ]
        shown = of.decode(talk.prompt([*messages, *new]))
    except ValueError:
        return
    assert all(not text.strip() or is_in(text, shown) for text in results)


def test_a_template_that_shows_a_part_of_a_message_is_refused():
    of = tokenizer(TEXT.replace("m.content", "m.content[:14]") + PROMPT)
    Conversation(of).prompt([user("two words here")])
    with pytest.raises(ValueError, match="does not show 'two words here and more', which the role user says"):
        Conversation(of).prompt([user("two words here and more")])
    first = tokenizer(TEXT.replace("m.content", "m.content | first") + PROMPT)
    with pytest.raises(ValueError, match="does not show 'two', which the role user says"):
        Conversation(first).prompt([user("two")])


def test_a_template_that_shows_no_tools_or_not_all_is_refused():
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look_up", "sum_up")]
    asked = [user("look_up or sum_up?")]
    with pytest.raises(ValueError, match="the model's chat template shows it no tools"):
        Conversation(tokenizer(TEXT + PROMPT), tools).prompt(asked)
    with pytest.raises(ValueError, match="the model's chat template shows it no tools"):
        Conversation(tokenizer(None), tools).prompt(asked)
    with pytest.raises(ValueError, match="a-model does not show the tool sum_up"):
        Conversation(tokenizer("<tools>{{ tools[0].function.name }}" + TEXT + PROMPT), tools).prompt([user("Which?")])
