"""Where the models of a run come from."""

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areal.base.errors import UserError
from areal.config.trainer_section import LoraConfig
from areal.extensions.lora.adapter_checks import check_adapters
from areal.models import check_mixture, check_trainable, context_of, default_context
from areal.weights.model_files import check_same, digests_of, weight_sizes

COMMIT = "c" * 40
FILES = {"config.json": b"{}", "tokenizer_config.json": b"{}", "model.safetensors": bytes(30_000_000), "notes.md": b"#"}
FIND = """
import sys
from areal.extensions.lora.adapter_checks import check_adapters
from areal.models import find_model
print(find_model(sys.argv[1], "model", print))
"""


@pytest.fixture
def hub():
    """The address of a server that has the model me/mine, as the Hugging Face hub answers for it."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/api/models/me/mine/revision/"):
                files = [{"rfilename": name} for name in FILES]
                self.answer(json.dumps({"id": "me/mine", "sha": COMMIT, "siblings": files}).encode())
            elif self.path.startswith("/api/models/me/mine/tree/"):
                files = [{"type": "file", "path": name, "size": len(body), "oid": name} for name, body in FILES.items()]
                self.answer(json.dumps(files).encode())
            elif self.path.startswith(f"/me/mine/resolve/{COMMIT}/"):
                name = self.path.rpartition("/")[2]
                self.answer(FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def answer(self, body, headers=()):
            self.send_response(200)
            for key, value in {"Content-Length": len(body), **dict(headers)}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def find(hub, cache, name):
    environment = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [sys.executable, "-c", FIND, name], env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_model_of_the_hub_is_downloaded_and_the_progress_told(hub, tmp_path):
    process = find(hub, tmp_path, "me/mine")
    assert process.returncode == 0, process.stderr
    message = [line for line in process.stdout.splitlines() if line.startswith("it ")]
    assert message[0] == "it downloads me/mine"
    assert message[-1] == "it downloads me/mine: 0.03 of 0.03 GB"
    (folder,) = set(process.stdout.splitlines()) - set(message)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert "%" not in process.stderr  # no bar is drawn


def test_a_model_that_the_hub_does_not_have_is_told(hub, tmp_path):
    process = find(hub, tmp_path, "me/yours")
    assert "The model me/yours (model) is not a folder here, and it could not be downloaded (" in process.stderr


LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("sizes", "context"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"text_config": {"n_positions": 1024}}, 1024),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": LONG, "original_max_position_embeddings": 64}, 512),
        ({}, None),
    ],
)
def test_a_model_says_how_long_its_sequences_may_be(tmp_path, sizes, context):
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert context_of(tmp_path) == context
    shorter = sizes.get("original_max_position_embeddings")
    assert default_context(tmp_path) == (shorter or context)


LONG = {"max_position_embeddings": 4096, "sliding_window": 512}


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "its weights are quantized: name the original"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "or a copy of it in bf16"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "its rope_type, dynamic, .*: set linear or yarn"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "its attention is sparse, by an indexer .*: take another"),
        ({"model_type": "t5"}, "no causal language model of the type t5: name a model of text"),
        ({"model_type": "falcon"}, "lets nobody replace the attention of models of the type falcon: take another"),
        ({"model_type": "mpt"}, "lets nobody replace the attention of models of the type mpt: take another"),
        ({"model_type": "inkling_text"}, "its attention has a bias by position, .*: take another"),
        ({"model_type": "phimoe", **LONG}, "tell the attention function their window of 512 tokens, so set"),
        ({"layer_types": ["full_attention", "wave"]}, "does not compute layers of the type wave: take another"),
    ],
)
def test_a_model_that_cannot_be_trained_is_told_by_its_config_json_alone(tmp_path, sizes, why):
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(UserError, match=f"model {tmp_path} cannot be trained: .*{why}"):
        check_trainable(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "longest"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0, **LONG}, None),
        ({"model_type": "gpt_oss", **LONG}, None),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "attention_chunk_size": 8192}}, None),
        ({"model_type": "mixtral", **LONG}, None),
        ({"model_type": "qwen2_moe", "use_sliding_window": False, **LONG}, None),
        ({"model_type": "phimoe", **LONG}, 512),
        ({"model_type": "mamba"}, None),
    ],
)
def test_a_model_that_can_be_trained_is_not_refused(tmp_path, sizes, longest):
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    check_trainable(tmp_path, 1, longest)


@pytest.mark.parametrize(
    ("targets", "cuda", "sentence"),
    [
        ("all-linear", True, "all-linear, but the model .* is a mixture of experts, .* such as .q_proj, k_proj"),
        (["q_proj"], False, "trainer.lora is set and the model .*, whose adapters vLLM computes on GPUs alone"),
        (["q_proj"], True, None),
    ],
)
@pytest.mark.parametrize("sizes", [{"num_experts": 8}, {"text_config": {"n_routed_experts": 8}}])
def test_adapters_that_engines_do_not_compute_on_experts_are_refused(tmp_path, targets, cuda, sentence, sizes):
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    lora = LoraConfig(rank=4, target_modules=targets)
    with pytest.raises(UserError, match=sentence) if sentence else nullcontext():
        check_mixture(tmp_path, lora, cuda=cuda)
    check_mixture(tmp_path, None, cuda=cuda)
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": None, "num_local_experts": 1}))
    check_mixture(tmp_path, lora, cuda=cuda)


def test_a_model_whose_experts_engines_compute_on_gpus_alone_is_refused_on_a_cpu(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "num_local_experts": 32}))
    check_mixture(tmp_path, None, cuda=True)
    with pytest.raises(UserError, match="computes the experts of gpt-oss on GPUs alone"):
        check_mixture(tmp_path, None, cuda=False)


def test_latent_attention_with_experts_is_refused_on_cpus(tmp_path):
    sizes = {"n_routed_experts": 8, "kv_lora_rank": 512, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(
        UserError, match="On CPUs vLLM and the trainer compute other log-probs where, as here, the model .* latent"
    ):
        check_mixture(tmp_path, None, cuda=False)
    check_mixture(tmp_path, None, cuda=True)
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"first_k_dense_replace": 2}))
    check_mixture(tmp_path, None, cuda=False)


def test_a_damaged_model_is_told(tmp_path, tiny_model):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json cannot be read .*copy it again"):
        context_of(tmp_path)
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    complete = (tiny_model / "model.safetensors").read_bytes()
    for content in b"\xff" * 99, complete[:100], complete[:-1]:
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"model.safetensors is damaged: copy or download it again"):
            weight_sizes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(complete)
    assert weight_sizes(tmp_path) == weight_sizes(tiny_model)


def change_json(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_copy_of_a_model_is_the_same_whatever_copied_it_and_another_model_is_not(tmp_path, tiny_model):
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    digests = digests_of(tiny_model)
    assert {*digests} == {"config.json", "list of weights", "tokenizer.json"}
    change_json(copy / "config.json", transformers_version="0.1", dtype="bfloat16", _name_or_path="elsewhere")
    check_same(copy, digests)
    (copy / "model.safetensors").unlink()  # where only text is made of tokens
    check_same(copy, digests)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    change_json(copy / "tokenizer.json", model=tokenizer["model"] | {"vocab": {"other": 0}})
    with pytest.raises(UserError, match=r"copy on this machine is not the model of the run, its tokenizer.json "):
        check_same(copy, digests)
    shutil.copy(tiny_model / "tokenizer.json", copy)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    check_same(copy, digests)  # the run's has none
    with pytest.raises(UserError, match=r"its chat template differs"):
        check_same(copy, digests | {"chat template": "another"})
    change_json(copy / "config.json", vocab_size=7)
    with pytest.raises(UserError, match=r"its config.json differs"):
        check_same(copy, digests)


def test_each_layer_that_gets_an_adapter_has_to_be_there(tiny_model):
    weights = weight_sizes(tiny_model)
    check_adapters(tiny_model, weights, LoraConfig())
    check_adapters(tiny_model, weights, LoraConfig(target_modules=["q_proj", "self_attn.v_proj"]))
    assert sum(weights.values()) > 700_000
    with pytest.raises(UserError, match=r"names 'o_prj', but the model .* has no such layer: did you mean o_proj?"):
        check_adapters(tiny_model, weights, LoraConfig(target_modules=["q_proj", "o_prj"]))
    with pytest.raises(UserError, match=r"no such layer: it has down_proj, gate_proj, k_proj"):
        check_adapters(tiny_model, weights, LoraConfig(target_modules=["Wxyz"]))
