"""Pictures in chats: the template writes one placeholder for each, and the tokens have as many as the model needs."""

import base64
import json

import numpy as np
import pytest
from fakes.scripted_policy import Session
from support.tiny_pictures import bomb, png
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.base.errors import UserError
from areal.extensions.agents.anthropic_api import CountRequest
from areal.extensions.agents.openai_api import ApiError, ChatRequest, ChatSession, messages_of, prompt_tokens
from areal.extensions.agents.responses_api import ResponseReply, ResponsesRequest
from areal.extensions.pictures.pictured_rows import place
from areal.extensions.pictures.vision import PLACEHOLDER
from areal.samples.pictures import digest_of, digests_in
from areal.samples.table import Generation
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import Trajectory
from areal.workflows.conversation import begin, user

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} [ <|image_pad|> ] {% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %} . "
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
WORDS = ["?", "user", "assistant", "[", "]", ".", "how", "many", "two", "sure", PLACEHOLDER]


@pytest.fixture
def tokenizer(tmp_path):
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=".", additional_special_tokens=[PLACEHOLDER])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "image_token_id": 10}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 28 * 28}))
    return load_tokenizer(str(tmp_path))


def test_a_chat_with_pictures_goes_on_after_an_answer(tokenizer, tmp_path):
    files = [png(56, 84, 0), png(28, 28, 1)]
    prompt, _ = place("<image> how many <image>", {"images": files}, tmp_path, "the row")
    talk, messages = begin(tokenizer, prompt)
    first = talk.prompt(messages)
    assert first == [1, 3, *[10] * 6, 4, 6, 7, 3, 10, 4, 5, 2]
    messages.append(talk.add(Generation(np.int32([8, 5]), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")))
    messages.append(user("sure"))
    assert talk.prompt(messages) == [*first, 8, 5, 1, 9, 5, 2]


def test_a_placeholder_in_the_text_of_a_chat_fails_the_sample(tokenizer, tmp_path):
    prompt, _ = place(f"<image> how many {PLACEHOLDER}", {"images": [png(28, 28, 0)]}, tmp_path, "the row")
    talk, messages = begin(tokenizer, prompt)
    with pytest.raises(ValueError, match="the text of the chat has 2 placeholders for 1 pictures"):
        talk.prompt(messages)


def test_a_model_that_does_not_see_refuses_pictures(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    prompt, _ = place("<image> how many", {"images": [png(28, 28, 0)]}, tmp_path, "the row")
    talk, messages = begin(load_tokenizer(str(tmp_path)), prompt)
    with pytest.raises(UserError, match="sees no pictures here, which qwen2_5_vl, qwen3_vl, smolvlm alone do"):
        talk.prompt(messages)


WIDE, SMALL = png(56, 84, 0), png(28, 28, 1)


def url(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def shown(*contents):
    """A turn of the user with these pictures, as OpenAI's clients write it."""
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(c)}} for c in contents]}


@pytest.fixture
def session(tokenizer):
    """Of a row with two pictures. The policy says sure."""
    made = Session(*["sure"] * 4, tokenizer=tokenizer)
    made.end, made.asked = tokenizer.eos_token_id, []
    for content in (WIDE, SMALL):
        made.show(content)
    generate = made.generate

    async def generate_and_note(tokens, *more):
        made.asked.append(list(tokens))
        return await generate(tokens, *more)

    made.generate = generate_and_note
    return made


PADS = [3, *[10] * 6, 4, 3, 10, 4]  # of both


async def test_the_rows_pictures_come_in_any_turn_and_as_the_result_of_a_tool(session, tmp_path):
    chat = ChatSession(session)
    messages = [{"role": "user", "content": "how many"}]
    answer = await chat.complete(ChatRequest(messages=messages))
    messages += [answer.message, shown(WIDE, SMALL)]
    answer = await chat.complete(ChatRequest(messages=messages))
    begin = [1, 6, 7, 5, 2, 9, 5]
    assert session.asked[1] == [*begin, 1, *PADS, 5, 2]
    messages += [answer.message, {"role": "user", "content": "sure"}]
    await chat.complete(ChatRequest(messages=messages))
    assert session.asked[2] == [*session.asked[1], 9, 5, 1, 9, 5, 2]
    (trained,) = session.trajectory(1.0).sequences()
    assert trained.tokens.tolist() == [*session.asked[2], 9, 5], "what the engine had is what is trained"
    prompt, _ = place("how many", {"images": [WIDE, SMALL]}, tmp_path, "the row")
    as_in_the_row = ChatRequest(messages=json.loads(json.dumps(prompt)))
    assert await prompt_tokens(as_in_the_row, chat.tokenizer, 10_000, session) == len([1, *PADS, 6, 7, 5, 2])


async def test_the_protocols_say_the_same(session):
    wide, small = map(url, (WIDE, SMALL))
    openai = ChatRequest(messages=[{"role": "user", "content": "how"}, {"role": "user", **shown(WIDE, SMALL)}])
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}}
        for data in (wide, small)
    ]
    anthropic = CountRequest(messages=[{"role": "user", "content": "how"}, {"role": "user", "content": blocks}]).chat()
    inputs = [{"type": "input_image", "image_url": data} for data in (wide, small)]
    responses = ResponseReply(
        ResponsesRequest(input=[{"role": "user", "content": "how"}, {"role": "user", "content": inputs}]), {}
    )
    made = [messages_of(request, session) for request in (openai, anthropic, responses.request)]
    assert made[0] == made[1] == made[2] and [part["digest"] for part in made[0][1]["content"]] == [
        digest_of(WIDE),
        digest_of(SMALL),
    ]
    result = [{"type": "tool_result", "tool_use_id": "1", "content": blocks}]
    tool = CountRequest(messages=[{"role": "user", "content": result}]).chat()
    assert messages_of(tool, session) == [{"role": "tool", "tool_call_id": "1", "content": made[0][1]["content"]}]


async def test_an_agents_own_pictures_are_seen_and_trained_in_each_branch_as_it_was_asked(session):
    chat, own = ChatSession(session), png(28, 56, 2)
    session.turns = ["sure"] * 5
    for contents in ([WIDE], [own], [SMALL, own, WIDE, own], [SMALL]):
        await chat.complete(ChatRequest(messages=[shown(*contents), {"role": "user", "content": "how"}]))
    sample = session.trajectory(1.0)
    names = {digest_of(content): content for content in (WIDE, SMALL, own)}
    seen = [[names[name] for name in digests_in(branch.pictures)] for branch in sample.sequences()]
    assert sorted(seen) == sorted([[WIDE], [own], [SMALL, own, WIDE], [SMALL]])
    for branch in sample.sequences():
        assert (branch.pictures.any(1) == (branch.tokens == 10)).all()
    tokens = [branch.tokens.tolist() for branch in sample.sequences()]
    assert len(set(map(tuple, tokens))) == 4 and len(sample) < sum(map(len, tokens)), "they share what they can"
    again = Trajectory.of_frame(sample.frame())
    assert again.branches == sample.branches and (again.pictures == sample.pictures).all()


async def test_equal_tokens_of_other_pictures_are_other_branches(session):
    chat, other = ChatSession(session), png(28, 28, 5)
    for content in (SMALL, other, SMALL):
        await chat.complete(ChatRequest(messages=[shown(content)]))
    first, *others = session.trajectory(1.0).sequences()
    assert all((first.tokens == sequence.tokens).all() for sequence in others)
    assert [digests_in(s.pictures) for s in (first, *others)].count([digest_of(other)]) == 1
    assert sorted(branch.shared for branch in session.trajectory(1.0).branches) == [0, 2, len([1, 3, 10, 4, 5, 2])]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}],
        [{"type": "image_url", "image_url": "/etc/passwd"}],
        [{"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}],
        [{"type": "image", "path": "/etc/passwd", "digest": None}],
        [{"type": "image", "digest": digest_of(b"of another row")}],
    ],
)
async def test_pictures_without_their_files_are_refused(session, content):
    with pytest.raises(ApiError, match="neither a data URL nor of the row"):
        await ChatSession(session).complete(ChatRequest(messages=[{"role": "user", "content": content}]))


@pytest.mark.parametrize("content", [b"<svg/>", bomb(9_000, 8_000), b""], ids=["text", "bomb", "nothing"])
async def test_an_agents_file_that_is_no_picture_is_told(session, content):
    with pytest.raises(ApiError, match="a picture of a message cannot be read"):
        await ChatSession(session).complete(ChatRequest(messages=[shown(content)]))
