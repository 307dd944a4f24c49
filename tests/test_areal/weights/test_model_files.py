"""Folders of models as they are found: all who read them see the same model, or the folder is refused."""

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_training import (
    TEMPERATURE,
    eager,
    logprobs_alone,
    make_batch,
    make_kind,
    make_model,
    settings,
    weights_of,
)

from areal.base.errors import UserError
from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.extensions.lora.lora import merged_tensors
from areal.generation.generation_engine import GenerationEngine
from areal.training.training_engine import TrainingEngine
from areal.weights.model_files import model_files, only_model

BATCH = make_batch()
LORA = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIGMOIDS = {
    **{"n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 24, "head_dim": 8},
}


def save(folder, name, tensors):
    save_file(tensors, folder / name, metadata={"format": "pt"})


def zeros(folder):
    return {name: torch.zeros_like(tensor) for name, tensor in weights_of(folder).items()}


def shard(folder, *, index=True):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = len(tensors) // 2
    weight_map = {name: PARTS[number >= half] for number, name in enumerate(tensors)}
    for part in PARTS:
        save(folder, part, {name: tensors[name] for name in tensors if weight_map[name] == part})
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def with_second_copy(folder):
    save(folder, "consolidated.safetensors", {f"layers.{name}": t for name, t in zeros(folder).items()})
    (folder / "params.json").write_text("{}")


def with_stray_shard(folder):
    shard(folder)
    save(folder, "model-old.safetensors", zeros(folder))


def with_stray_file(folder):
    save(folder, "zzz.safetensors", zeros(folder))


def with_equal_head(folder):
    tensors = weights_of(folder)
    save(folder, "model.safetensors", tensors | {HEAD: tensors[EMBEDDINGS].clone()})


def as_snapshot(folder):
    """As the hub's cache has a model: links to files that are named by their digests."""
    shard(folder)
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / f"{number:040x}")
        path.symlink_to(f"../../blobs/{number:040x}")


def with_stray_in_snapshot(folder):
    as_snapshot(folder)
    save(folder, "consolidated.safetensors", zeros(folder))


ODD = {
    "one file": lambda folder: None,
    "shards": shard,
    "shards without an index": lambda folder: shard(folder, index=False),
    "a second copy": with_second_copy,
    "a stray shard": with_stray_shard,
    "a stray file": with_stray_file,
    "an equal head": with_equal_head,
    "a snapshot": as_snapshot,
    "a stray file in a snapshot": with_stray_in_snapshot,
}
SOME = ("a second copy", "a stray shard", "a stray file in a snapshot")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(plain, tmp_path_factory):
    """By the names of ODD."""
    folders = {name: tmp_path_factory.mktemp("hub") / "models--me--mine" / "snapshots" / "c0" for name in ODD}
    for name, folder in folders.items():
        shutil.copytree(plain, folder)
        ODD[name](folder)
    return folders


@pytest.fixture(scope="module")
def expected(plain):
    return of_model(plain)


def of_model(folder):
    """Log-probs of the sampled tokens of BATCH by transformers alone, one sequence at a time."""
    with torch.no_grad():
        model, samples = eager(folder), [sample for group in BATCH for sample in group.trajectories]
        return np.concatenate([np.append(0, logprobs_alone(model, s).numpy()) * s.sampled for s in samples])


@pytest.mark.parametrize(
    ("kind", "stage", "lora"),
    [
        *((kind, 0, lora) for kind in SOME for lora in (None, LORA)),
        *((kind, 3, None) for kind in SOME),
        *(
            pytest.param(kind, stage, lora, marks=pytest.mark.slow)
            for kind in ODD
            for stage, lora in ((0, None), (0, LORA), (3, None), (3, LORA))
            if kind not in SOME or (stage, bool(lora)) == (3, True)
        ),
    ],
)
def test_trainers_and_their_exports_have_the_model(folders, expected, tmp_path, kind, stage, lora):
    engine = TrainingEngine(folders[kind], settings(zero_stage=stage, lora=lora), seed=0)
    np.testing.assert_allclose(engine.logprobs(BATCH, temperature=TEMPERATURE), expected, atol=1e-5)
    exported = engine.storage.export(tmp_path / "exported")
    engine.close()
    np.testing.assert_allclose(of_model(exported), expected, atol=1e-5)
    assert {path.name for path in exported.glob("*.safetensors")} == {"model.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a second copy", "a stray file", "shards without an index", "an equal head"])
def test_engines_have_the_model_before_and_after_a_load(tmp_path, kind):
    heads = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}  # as vLLM on CPUs
    plain = make_kind("Qwen3", tmp_path / "plain", tie_word_embeddings=True, **heads)
    folder = shutil.copytree(plain, tmp_path / "hub" / "snapshots" / "c0")
    ODD[kind](folder)
    config = GeneratorConfig(dtype="float32", max_concurrent_rollouts=4, kv_cache_gib=0.01, max_model_len=64)
    prompt, sampling = [3, 4, 5], SamplingConfig(max_new_tokens=12, temperature=TEMPERATURE)

    async def sample():
        engine = await GenerationEngine.start(folder, config, version=0)
        parts = []
        try:
            for version in range(2):
                parts += [[part async for part in engine.generate(f"r{version}", prompt, sampling)]]
                if not version:
                    await engine.load(plain, 1)
        finally:
            await engine.close()
        return parts

    model = eager(plain)
    for parts in asyncio.run(sample()):
        tokens, logprobs = (np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "logprobs"))
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, 2:-1] / TEMPERATURE
        by_model = logits.log_softmax(-1).gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, by_model, atol=1e-5)


def two_models(folder):
    shard(folder)
    save(folder, "model.safetensors", zeros(folder))


def adapter_beside(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "peft_type": "LORA"}))


def another_head(folder):
    tensors = weights_of(folder)
    save(folder, "model.safetensors", tensors | {HEAD: tensors[EMBEDDINGS] * 1.004})


def missing_shard(folder):
    shard(folder)
    (folder / PARTS[1]).unlink()


def missing_shard_without_index(folder):
    shard(folder, index=False)
    (folder / PARTS[1]).unlink()


def twice(folder):
    shard(folder)
    first = load_file(folder / PARTS[0])
    name = next(iter(first))
    save(folder, PARTS[1], load_file(folder / PARTS[1]) | {name: torch.zeros_like(first[name])})


def named_otherwise(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def named_in_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))


REFUSED = {
    named_in_the_config: r"has transformers_weights=other.safetensors, a file that transformers would read in place of",
    two_models: r"has two models, model.safetensors and the files that .*index.json names: remove one",
    adapter_beside: r"has an adapter beside its model, .*: remove its adapter_config.json",
    another_head: r"lm_head.weight, that differs from its embeddings, but its config.json has tie_word_embeddings=true",
    missing_shard: r"lacks model-00002-of-00002.safetensors, which its .*index.json names",
    missing_shard_without_index: r"has model-00001-of-00002.safetensors, but neither",
    twice: r"have model\S+ 2 times",
    named_otherwise: r"has weights.safetensors, but neither .* rename the file to model.safetensors",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_folder_that_libraries_would_read_as_different_models_is_refused(plain, tmp_path, change):
    folder = shutil.copytree(plain, tmp_path / "model")
    change(folder)
    for read in (
        model_files,
        lambda folder: TrainingEngine(folder, settings(), seed=0),
        lambda folder: asyncio.run(GenerationEngine.start(folder, GeneratorConfig(), version=0)),
    ):
        with pytest.raises(UserError, match=REFUSED[change]):
            read(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_of_another_shape_is_told_at_any_stage(plain, tmp_path, stage):
    folder, name = shutil.copytree(plain, tmp_path / "model"), "model.layers.0.mlp.up_proj.weight"
    tensors = weights_of(folder)
    save(folder, "model.safetensors", tensors | {name: tensors[name][:-1].clone()})
    with pytest.raises(UserError, match=rf"has no {name} of the shape that its config.json describes"):
        TrainingEngine(folder, settings(zero_stage=stage), seed=0)


def test_weights_that_are_no_safetensors_are_no_model(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert model_files(folder).tensors == model_files(folder).beside == ()


def test_what_is_beside_a_model_is_listed_and_not_in_the_view_of_libraries(folders):
    for kind, folder in folders.items():
        read, stray = model_files(folder), [name for name in ("consolidated", "model-old", "zzz") if name]
        beside = [path.name for path in folder.glob("*.safetensors") if path.stem in stray]
        assert read.beside == tuple(beside)
        assert {tensor.dtype for tensor in read.tensors} == {"F32"}
        assert [tensor.name for tensor in read.tensors if tensor.tied] == [HEAD] * (kind == "an equal head")
        with only_model(folder) as view:
            assert {path.name for path in view.glob("*.safetensors")} == {file.name for file in read.files}
            assert (view / "config.json").is_file()
            assert (view == folder) == (not beside and kind != "shards without an index")
        assert view == folder or not view.exists()


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_what_no_adapter_touches_keeps_its_type_and_its_bits(tmp_path, stage):
    folder = make_kind("Glm4Moe", tmp_path / "model", **SIGMOIDS)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()} | {bias: 6.8 + 0.2 * torch.rand(64)}
    save(folder, "model.safetensors", tensors)
    for lora in (None, LORA):
        engine = TrainingEngine(folder, settings(zero_stage=stage, dtype="bfloat16", lora=lora), seed=0)
        exported = weights_of(engine.storage.export(tmp_path / f"{bool(lora)}"))
        engine.close()
        assert exported[bias].dtype == torch.float32 and exported[bias].equal(tensors[bias])
        assert {exported[name].dtype for name in tensors if name != bias} == {torch.bfloat16}


def test_a_merged_weight_is_not_narrower_than_the_models_or_the_trainers(plain, tmp_path):
    engine = TrainingEngine(plain, settings(lora=LORA), seed=0)
    adapter = engine.storage.publish(tmp_path / "adapter")
    engine.close()
    adapted, other = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    half = shutil.copytree(plain, tmp_path / "half")
    save(half, "model.safetensors", {name: tensor.bfloat16() for name, tensor in weights_of(half).items()})
    for folder, dtype, types in (
        (plain, torch.bfloat16, (torch.float32, torch.float32)),
        (half, torch.bfloat16, (torch.bfloat16, torch.bfloat16)),
        (half, torch.float32, (torch.float32, torch.bfloat16)),
    ):
        merged = dict(merged_tensors(folder, adapter, dtype=dtype))
        assert (merged[adapted].dtype, merged[other].dtype) == types
