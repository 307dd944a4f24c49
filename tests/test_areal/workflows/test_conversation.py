"""Several turns are one sequence of tokens, in which what was sampled is never encoded again."""

from __future__ import annotations

from types import SimpleNamespace

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.base.text import python_call
from areal.samples.table import Generation
from areal.workflows.conversation import Conversation, begin, user
from areal.workflows.turn_ends import keep_until

START, END, EOS = "<start>", "<end>", "<eos>"

CHATML = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
# As Qwen3 does it: the thinking of all turns but the last is left out.
THINKING = (
    "{% for m in messages %}<start>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n<think>{% endif %}"
)
# An end of turn that is not the token the policy stops with, and a system prompt when there is none.
PECULIAR = (
    "{% if messages[0].role != 'system' %}[SYSTEM: be kind]{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<eos>{% else %}"
    "[{{ m.role }} {{ loop.index }}: {{ m.content }}]{% endif %}{% endfor %}"
)

# As gpt-oss and Mistral do it: the first refuses a tool's message without a call before it, the second two turns of the
# assistant without a user between them, if they have no calls.
CALL_BEFORE_TOOL = (
    "{% set ns = namespace(call=none) %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content %}<start>analysis {{ m.content }}<end>{% endif %}{% set ns.call = m.tool_calls[0].function %}"
    "<start>to={{ ns.call.name }} {{ ns.call.arguments | tojson }}<eos>{% elif m.role == 'tool' %}"
    "{% if ns.call is none %}{{ raise_exception('a tool without a call') }}{% endif %}"
    "<start>{{ ns.call.name }} says {{ m.content }}<end>{% else %}<start>{{ m.role }} {{ m.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<start>{% endif %}"
)
ALTERNATING = (
    "{% set ns = namespace(turns=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turns = ns.turns + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[{{ m.content }}]{% elif m.tool_calls %}"
    "{{ m.tool_calls | map(attribute='function') | list | tojson }}<eos>"
    "{% elif m.role == 'tool' %}<start>f says {{ m.content }}<end>{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes, some of them merged: `he` is one token when encoded, and may be sampled as two."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "he", "ll", "llo", "hello", START, END, EOS]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, additional_special_tokens=[START, END]
    )
    fast_tokenizer.chat_template = template
    return fast_tokenizer


def sampled(of: PreTrainedTokenizerFast, *words: str, version: int = 3, finish: str = "stop") -> Generation:
    """Exactly these tokens."""
    n = len(words)
    tokens = of.convert_tokens_to_ids(list(words))
    return Generation(
        np.array(tokens, np.int32), np.full(n, -0.5, np.float32), np.full(n, version, np.int32), finish=finish
    )


def test_what_was_sampled_stays_though_its_text_would_be_encoded_otherwise():
    of = tokenizer(CHATML)
    talk = Conversation(of)
    messages = [user("say hello")]
    first = talk.prompt(messages)
    assert first == of.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    messages.append(talk.add(sampled(of, "h", "e", "l", "l", "o", END)))
    assert messages[-1] == {"role": "assistant", "content": "hello"}
    messages.append(user("again"))
    second = talk.prompt(messages)
    assert of.decode(second) == of.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert second != of.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert second[: len(first) + 6] == [*first, *of.convert_tokens_to_ids(["h", "e", "l", "l", "o", END])]


def test_only_sampled_tokens_are_trained_each_with_its_own_version():
    of = tokenizer(CHATML)
    talk = Conversation(of)
    messages = [user("x")]
    first = talk.prompt(messages)
    messages += [talk.add(sampled(of, "h", END, version=3)), user("y")]
    second = talk.prompt(messages)
    talk.add(sampled(of, "l", "o", version=5, finish="length"))
    result = talk.trajectory(0.5)
    between = len(second) - len(first) - 2
    assert result.versions.tolist() == [-1] * len(first) + [3, 3] + [-1] * between + [5, 5]
    assert result.logprobs[result.sampled].tolist() == [-0.5] * 4
    assert not result.logprobs[~result.sampled].any()
    assert result.tokens.tolist() == [*second, *of.convert_tokens_to_ids(["l", "o"])]
    assert (result.reward, result.finish, len(talk)) == (0.5, "length", len(result))


@pytest.mark.parametrize("template", [CHATML, THINKING, PECULIAR])
@pytest.mark.parametrize("ended", [True, False])
def test_the_end_of_a_turn_is_written_once_by_the_policy_or_else_by_the_template(template, ended):
    of = tokenizer(template)
    end = EOS if template is PECULIAR else END
    talk = Conversation(of)
    messages = [user("x")]
    first = talk.prompt(messages)
    words = ["h", "e", end] if ended else ["h", "e"]
    messages += [talk.add(sampled(of, *words, finish="stop" if ended else "length")), user("y")]
    second = talk.prompt(messages)
    assert second[: len(first) + 3] == [*first, *of.convert_tokens_to_ids(["h", "e", end])]
    text_after = of.decode(second[len(first) + 3 :])
    new_turn = {
        CHATML: "\n<start>user\ny<end>\n<start>assistant\n",
        THINKING: "\n<start>user\ny<end>\n<start>assistant\n<think>",
        PECULIAR: "[user 3: y]",
    }
    assert text_after == new_turn[template]
    talk.add(sampled(of, "h", end))
    assert talk.trajectory(1.0).sampled.sum() == len(words) + 2


@pytest.mark.parametrize(("template", "opening"), [(CALL_BEFORE_TOOL, "<start>"), (ALTERNATING, "")])
def test_a_template_that_wants_the_calls_before_their_results_gets_them_and_what_was_sampled_stays(template, opening):
    of = tokenizer(template)
    talk = Conversation(of)
    messages = [user("x")]
    talk.prompt(messages)
    calls = [{"id": "call12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for answer in ("1", "2"):
        value_before = len(talk)
        turn = talk.add(sampled(of, "h", "e", EOS), {"role": "assistant", "content": "", "tool_calls": calls})
        messages += [turn, {"role": "tool", "tool_call_id": "call12345", "content": answer}]
        tokens = talk.prompt(messages)
        assert of.decode(tokens[value_before:]).endswith(f"he<eos><start>f says {answer}<end>{opening}")
    messages += [talk.add(sampled(of, "o", EOS)), user("y")]
    assert of.decode(talk.prompt(messages)).endswith("o<eos><end><start>user y<end><start>" if opening else "o<eos>[y]")
    assert talk.trajectory(1.0).sampled.sum() == 3 + 3 + 2


def test_a_turn_with_calls_that_did_not_end_as_the_template_ends_it_has_no_place_in_one_that_wants_the_calls():
    of = tokenizer(CALL_BEFORE_TOOL)
    call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for turn in sampled(of, "h", finish="length"), sampled(of, "h", END):
        talk = Conversation(of)
        talk.prompt([user("x")])
        message = talk.add(turn, {"role": "assistant", "content": "", "tool_calls": [call]})
        with pytest.raises(jinja2.TemplateError, match="a tool without a call"):
            talk.prompt([user("x"), message, {"role": "tool", "tool_call_id": "call12345", "content": "1"}])


def test_thinking_that_the_template_would_leave_out_of_an_earlier_turn_stays():
    of = tokenizer(THINKING)
    talk = Conversation(of)
    messages = [user("x")]
    talk.prompt(messages)
    messages += [talk.add(sampled(of, "h", *"</think>", "o", END)), user("y")]
    assert "h</think>" not in of.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "<think>h</think>o<end>\n<start>user\ny<end>" in of.decode(talk.prompt(messages))


def test_a_token_that_ends_a_turn_otherwise_than_the_template_is_kept_beside_it():
    of = tokenizer(CHATML)
    talk = Conversation(of)
    messages = [user("x")]
    talk.prompt(messages)
    messages += [talk.add(sampled(of, "h", EOS)), user("y")]
    assert "h<eos><end>\n<start>user" in of.decode(talk.prompt(messages))


def test_messages_that_branch_need_a_conversation_of_their_own():
    of = tokenizer(CHATML)
    talk = Conversation(of)
    messages = [user("x")]
    talk.prompt(messages)
    messages.append(talk.add(sampled(of, "h", END)))
    for branch in ([user("x")], [user("z"), messages[1], user("y")], [user("x"), user("y")]):
        assert not talk.continues(branch)
        with pytest.raises(ValueError, match="do not begin with"):
            talk.prompt(branch)
    assert talk.continues([*messages, user("y")])


def test_a_prompt_may_be_asked_again_as_long_as_nothing_was_added():
    talk = Conversation(of := tokenizer(CHATML))
    talk.prompt([user("x")])
    again = talk.prompt([user("y")])
    talk.add(sampled(of, "h", END))
    assert talk.trajectory(0).tokens[:-2].tolist() == again
    with pytest.raises(ValueError, match="nothing was asked"):
        talk.add(sampled(of, "h", END))


def test_a_turn_is_known_again_in_the_form_the_other_side_was_shown():
    of = tokenizer(CHATML)
    talk = Conversation(of)
    talk.prompt([user("x")])
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    talk.add(sampled(of, "h", END), {"role": "assistant", "content": None, "tool_calls": call})
    back = {"role": "assistant", "content": "", "tool_calls": call, "refusal": None, "reasoning_content": "hm"}
    requests = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, back]
    assert talk.continues(requests)
    tokens = talk.prompt([*requests, {"role": "tool", "content": "4", "tool_call_id": "1"}])
    assert of.decode(tokens).endswith("h<end>\n<start>tool\n4<end>\n<start>assistant\n")


@pytest.mark.parametrize(
    "conversations", [lambda: Conversation(tokenizer()), lambda: Conversation(tokenizer(CHATML), plain=True)]
)
def test_without_a_template_texts_follow_one_another_as_they_are(conversations):
    talk, of = conversations(), tokenizer()
    messages = [user("hell")]
    talk.prompt(messages)
    messages += [talk.add(sampled(of, "o", EOS)), user("!")]
    assert of.decode(talk.prompt(messages)) == "hello<eos>!"


def test_messages_begin_with_the_template_where_there_is_one_and_text_as_it_is():
    def prompt_of(conversation, prompt):
        talk, messages = begin(conversation, prompt)
        return conversation.decode(talk.prompt(messages))

    chat = [{"role": "system", "content": "abc"}, user("hello")]
    assert prompt_of(tokenizer(CHATML), "hello") == "hello"
    assert prompt_of(tokenizer(CHATML), chat).startswith("<start>system\nabc<end>\n<start>user\nhello<end>")
    assert prompt_of(tokenizer(), chat) == "abc\n\nhello"


def test_tools_are_shown_by_the_template():
    of = tokenizer("{{ tools[0].function.name }}" + CHATML)
    tools = [{"type": "function", "function": {"name": "lookup"}}]
    assert of.decode(Conversation(of, tools).prompt([user("x")])).startswith("lookup<start>")


def test_a_conversation_in_which_nothing_was_sampled_is_no_sample():
    talk = Conversation(of := tokenizer(CHATML))
    talk.prompt([user("x")])
    talk.add(sampled(of, finish="length"))
    with pytest.raises(ValueError, match="nothing was sampled"):
        talk.trajectory(0)


def test_a_reward_that_is_no_finite_number_is_no_score():
    talk = Conversation(of := tokenizer(CHATML))
    talk.prompt([user("x")])
    talk.add(sampled(of, "h", END))
    with pytest.raises(ValueError, match="a reward of nan"):
        talk.trajectory(float("nan"))


def characters() -> SimpleNamespace:
    """A tokenizer of one character a token, which counts what it decodes."""
    counts = SimpleNamespace(decoded=0)

    def decode(tokens, skip_special_tokens):
        counts.decoded += len(tokens)
        return "".join(map(chr, tokens))

    counts.decode = decode
    return counts


def looks(tokenizer, text: str, marks=("</tool>", "```"), interval: int = 3) -> int | None:
    keep = keep_until(tokenizer, marks, lambda seen: any(mark in seen for mark in marks))
    tokens = np.array([ord(letter) for letter in text])
    ends = (keep(tokens[:n]) for n in range(interval, len(tokens) + interval, interval))
    return next((end for end in ends if end is not None), None)


def test_a_turn_ends_with_the_first_mark_also_where_two_looks_share_it():
    for earlier in range(8):
        text = "x" * earlier + "</tool>" + "more"
        assert looks(characters(), text) == earlier + len("</tool>")
    assert looks(characters(), "nothing of the kind") is None


def test_looking_for_the_end_of_a_turn_costs_no_more_than_its_length():
    tokenizer = characters()
    assert looks(tokenizer, "x" * 20_000, interval=16) is None
    assert tokenizer.decoded < 20_000 * 4


def test_a_turn_of_nothing_but_marks_costs_no_more_than_its_length():
    tokenizer = characters()
    keep = keep_until(tokenizer, ("```",), lambda text: python_call(text) is not None)
    tokens = np.array([ord(letter) for letter in "```python" + "``` " * 5000])
    assert all(keep(tokens[:n]) is None for n in range(16, len(tokens), 16))
    assert tokenizer.decoded < len(tokens) * 4


def bytewise() -> SimpleNamespace:
    """A tokenizer of one byte a token, which counts what it decodes."""
    counts = SimpleNamespace(decoded=0)

    def decode(tokens, skip_special_tokens):
        counts.decoded += len(tokens)
        return bytes(tokens).decode(errors="replace")

    counts.decode = decode
    return counts


@pytest.mark.parametrize("interval", range(1, 8))
def test_a_mark_is_found_where_characters_take_several_tokens(interval):
    text = "xé🙂終わり🙂" * 3 + "終🙂" + "more"
    mark = "終🙂"
    keep = keep_until(bytewise(), (mark,), lambda seen: mark in seen)
    tokens = np.frombuffer(text.encode(), np.uint8)
    ends = (keep(tokens[:n]) for n in range(interval, len(tokens) + interval, interval))
    assert next(end for end in ends if end is not None) == len(text[: text.index(mark) + len(mark)].encode())


def test_tokens_that_make_up_no_character_cost_no_more_than_their_number():
    tokenizer = bytewise()
    keep = keep_until(tokenizer, ("!",), lambda text: "!" in text)
    tokens = np.full(20_000, 0xF0, np.uint8)
    assert all(keep(tokens[:n]) is None for n in range(16, len(tokens), 16))
    assert tokenizer.decoded < len(tokens) * 12
    assert keep(np.append(tokens, ord("!"))) == len(tokens) + 1


def test_a_keep_may_be_used_for_one_turn_after_the_other():
    keep = keep_until(characters(), ("!",), lambda text: "!" in text)
    assert keep(np.array([120] * 50)) is None
    assert keep(np.array([33, 120])) == 1
