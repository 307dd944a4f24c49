"""A tokenizer comes with the chat template that the configuration asks for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fakes.scripted_policy import byte_tokenizer
from safetensors.numpy import save_file
from support.tiny_training import settings

from areal.base.errors import UserError
from areal.config import load_config
from areal.config.data_section import RowsConfig
from areal.extensions.desk.bare_models import read_modules
from areal.samples.table import Generation
from areal.samples.tokenizer import load_tokenizer
from areal.training.training_engine import TrainingEngine
from areal.weights.wrappers import published_shapes
from areal.workflows.conversation import Conversation, begin, user

THINKS = (
    "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant {% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
SHOUTS = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}"


@pytest.fixture
def model(tmp_path):
    """Saves a tokenizer with this template. Returns its folder."""

    def save(template: str | None):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


CODE = "open({mark!r}, 'w')\nfrom transformers import *\nclass Mine(PreTrainedTokenizer): pass\n"


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """The folder of a model that comes with Python code, which leaves a mark where it runs. Nobody may be asked."""
    (folder := tmp_path / "hostile").mkdir()
    (folder / "code.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": [None, "code.Mine"]}
    config = {"model_type": "hostile", "architectures": ["Model"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Mine", "auto_map": auto}))
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    yield folder
    assert not (tmp_path / "mark").exists()


NEVER = "it needs Python code of its own, which is never run"


@pytest.mark.parametrize("reads", ["tokenizer", "plan", "shapes", "trainer"])
def test_code_that_comes_with_a_model_never_runs_and_nobody_is_asked(with_code, reads):
    match reads:
        case "tokenizer":
            with pytest.raises(UserError, match=NEVER):
                load_tokenizer(str(with_code))
        case "plan":
            with pytest.raises(UserError, match=NEVER):
                read_modules(str(with_code))
        case "shapes":
            with pytest.raises(ValueError, match="custom code"):
                published_shapes(with_code)
        case "trainer":
            with pytest.raises(UserError, match=NEVER):
                TrainingEngine(with_code, settings(), seed=0)


def data(**settings) -> RowsConfig:
    return RowsConfig(source="addition", **settings)


def asked(tokenizer, messages=None) -> str:
    return tokenizer.decode(Conversation(tokenizer).prompt(messages or [user("2+2?")]))


def test_variables_reach_every_prompt_and_what_comes_between_turns(model):
    folder = model(THINKS)
    plain = load_tokenizer(folder)
    changed = load_tokenizer(folder, data(chat_template_kwargs={"enable_thinking": False}))
    assert asked(plain) == "<start>user 2+2?<end><start>assistant "
    assert asked(changed) == "<start>user 2+2?<end><start>assistant <think></think>"
    assert asked(load_tokenizer(folder, data())) == asked(plain)
    talk, messages = begin(changed, [user("2+2?")])
    talk.prompt(messages)
    tokens = np.array(changed.encode("4<end>", add_special_tokens=False), np.int32)
    n = len(tokens)
    messages.append(talk.add(Generation(tokens, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop")))
    second = changed.decode(talk.prompt([*messages, user("Sure?")]))
    assert second.endswith("assistant <think></think>4<end><start>user Sure?<end><start>assistant <think></think>")


def test_a_template_of_ones_own_replaces_the_tokenizer_s(model, tmp_path):
    (tmp_path / "mine.jinja").write_text(SHOUTS)
    for template in (THINKS, None):
        mine = load_tokenizer(model(template), data(chat_template=tmp_path / "mine.jinja"))
        assert asked(mine, [user("hello")]) == "HELLO!"


@pytest.mark.parametrize(
    ("template", "settings", "sentence"),
    [
        (None, {"chat_template_kwargs": {"enable_thinking": False}}, "has no chat template"),
        (THINKS, {"chat_template_kwargs": {"thinking": False}}, "has no variable 'thinking': correct"),
        (THINKS, {"chat_template": "none.jinja"}, r"The chat template none.jinja cannot be read .*No such file"),
        (THINKS, {"chat_template": "bad.jinja"}, r"The chat template of bad.jinja does not render .*endfor"),
        (THINKS, {"chat_template": "raises.jinja"}, "does not render one message of the user .*only tools"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_sentence(model, tmp_path, monkeypatch, template, settings, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    (tmp_path / "raises.jinja").write_text("{{ raise_exception('only tools') }}")
    with pytest.raises(UserError, match=sentence) as error:
        load_tokenizer(model(template), data(**settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{}", "{", '{"model": {}, "added_tokens": []}'])
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path))


def test_what_every_template_gets_is_no_variable():
    with pytest.raises(UserError, match=r"data.chat_template_kwargs.tools cannot be set"):
        load_config(None, ["source=addition", "chat_template_kwargs={tools: []}"], RowsConfig)
