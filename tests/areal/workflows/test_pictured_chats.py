"""Pictures in chats: the template writes one placeholder for each, and the tokens have as many as the model needs."""

import json

import numpy as np
import pytest
from tiny_pictures import png
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal.config import UserError
from areal.data.pictured import place
from areal.sampled import Generation
from areal.sight import PLACEHOLDER
from areal.tokens import load_tokenizer
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
    prompt, _ = place("<image> how many <image>", files, tmp_path, "the row")
    talk, messages = begin(tokenizer, prompt)
    first = talk.prompt(messages)
    assert first == [1, 3, *[10] * 6, 4, 6, 7, 3, 10, 4, 5, 2]
    messages.append(talk.add(Generation(np.int32([8, 5]), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")))
    messages.append(user("sure"))
    assert talk.prompt(messages) == [*first, 8, 5, 1, 9, 5, 2]


def test_a_placeholder_in_the_text_of_a_chat_fails_the_sample(tokenizer, tmp_path):
    prompt, _ = place(f"<image> how many {PLACEHOLDER}", [png(28, 28, 0)], tmp_path, "the row")
    talk, messages = begin(tokenizer, prompt)
    with pytest.raises(ValueError, match="the text of the chat has 2 placeholders for 1 pictures"):
        talk.prompt(messages)


def test_a_model_that_does_not_see_refuses_pictures(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    prompt, _ = place("<image> how many", [png(28, 28, 0)], tmp_path, "the row")
    talk, messages = begin(load_tokenizer(str(tmp_path)), prompt)
    with pytest.raises(UserError, match="does not see pictures here, which qwen2_5_vl, qwen3_vl, smolvlm alone do"):
        talk.prompt(messages)
