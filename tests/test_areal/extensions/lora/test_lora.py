"""Training adapters, with real DeepSpeed on a tiny model; on two ranks in test_engine and test_numerics."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_training import TEMPERATURE, assert_same_state, make_batch, make_model, settings
from transformers import AutoModelForCausalLM

from areal.base.errors import UserError
from areal.config.trainer_section import LoraConfig
from areal.extensions.lora.lora import add_adapters, write_adapter
from areal.training.training_engine import TrainingEngine
from areal.weights.folders import write_weights

BATCHES = [make_batch(seed=seed) for seed in range(4)]
LORA = {"rank": 4, "alpha": 8}
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def start(folder, stage=0, seed=0, lora=LORA, **changes):
    return TrainingEngine(folder, settings(zero_stage=stage, lora=lora, lr=0.01, **changes), seed=seed)


def train(engine, batches):
    for version, batch in enumerate(batches):
        engine.step(batch if engine.rank == 0 else None, version=version, temperature=TEMPERATURE)


def logits(model):
    tokens = torch.from_numpy(BATCHES[0][0].trajectories[0].tokens).long()[None]
    with torch.no_grad():
        return model(tokens).logits


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_published_is_an_adapter_that_peft_loads_and_a_checkpoint_is_the_merged_model(folder, tmp_path, stage):
    from peft import PeftModel

    engine = start(folder, stage)
    train(engine, BATCHES[:1])
    published, saved = engine.storage.publish(tmp_path / "published"), engine.storage.save(tmp_path / "saved")
    engine.close()
    assert {file.name for file in published.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    with_adapter = logits(PeftModel.from_pretrained(plain(folder), published))
    assert (with_adapter - logits(plain(folder))).abs().max() > 0.01
    torch.testing.assert_close(logits(plain(saved)), with_adapter, rtol=1e-4, atol=1e-5)
    assert (saved / "adapter" / "adapter_model.safetensors").read_bytes() == (
        published / "adapter_model.safetensors"
    ).read_bytes()


def test_the_files_of_an_adapter_are_the_same_in_each_process(folder, tmp_path):
    """A replay compares their stamp with that of the run. peft has the layers in a set, whose order is random."""
    write_adapter(add_adapters(plain(folder), LoraConfig(**LORA)), {"A": torch.zeros(2)}, tmp_path)
    layers = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert len(layers) == 14 and layers == sorted(layers)


def test_weights_without_an_adapter_stay_as_they_are_to_the_bit(folder, tmp_path):
    engine = start(folder, lora=LORA | {"target_modules": ["q_proj", "down_proj"]})
    train(engine, BATCHES[:1])
    weights_before = load_file(folder / "model.safetensors")
    weights_after = load_file(engine.storage.save(tmp_path / "saved") / "model.safetensors")
    engine.close()
    assert weights_before.keys() == weights_after.keys()
    changed = {name for name in weights_before if not torch.equal(weights_before[name], weights_after[name])}
    assert changed == {name for name in weights_before if "q_proj" in name or "down_proj" in name}


def test_a_new_engine_goes_on_from_a_checkpoint_to_the_same_bits(folder, tmp_path):
    for stage in (0, 2):  # the others in training/test_engine
        engine = start(folder, stage, warmup_steps=3, minibatches=2)
        train(engine, BATCHES[:2])
        engine.storage.save(tmp_path / f"checkpoint-{stage}")
        train(engine, BATCHES[2:])
        engine.storage.publish(tmp_path / f"straight-{stage}")
        engine.close()
        go_on(folder, tmp_path, stage, warmup_steps=3, minibatches=2)
        assert same_adapters(tmp_path / f"straight-{stage}", tmp_path / f"resumed-{stage}")


def go_on(folder, out, stage, **changes):
    engine = start(folder, stage, seed=1, **changes)
    engine.storage.load(out / f"checkpoint-{stage}")
    train(engine, BATCHES[2:])
    engine.storage.publish(out / f"resumed-{stage}")
    engine.close()


def same_adapters(first, second):
    return (first / "adapter_model.safetensors").read_bytes() == (second / "adapter_model.safetensors").read_bytes()


def test_a_checkpoint_goes_from_any_zero_stage_to_any_other(folder, tmp_path):
    for stage in STAGES:
        engine = start(folder, stage)
        train(engine, BATCHES[:1])
        written = engine.storage.save(tmp_path / "written")
        engine.close()
        second = start(folder, (stage + 1) % 4, seed=1)
        second.storage.load(written)
        again = second.storage.save(tmp_path / "again")
        second.close()
        for file in ("model", "adapter/adapter_model"):
            assert (again / f"{file}.safetensors").read_bytes() == (written / f"{file}.safetensors").read_bytes()
        assert_same_state(again, written)


def test_a_checkpoint_of_other_adapters_is_the_users_mistake(folder, tmp_path):
    engine = start(folder)
    engine.storage.save(tmp_path / "saved")
    engine.close()
    for lora in (None, LORA | {"rank": 8}):
        second = start(folder, lora=lora)
        with pytest.raises(UserError, match=r"has another trainer\.lora"):
            second.storage.load(tmp_path / "saved")
        second.close()


def test_layers_that_the_model_does_not_have_are_the_users_mistake(folder):
    with pytest.raises(UserError, match=r"trainer\.lora\.target_modules does not fit"):
        start(folder, lora=LORA | {"target_modules": ["query_key_value"]})


def test_adapters_that_no_checkpoint_could_merge_are_the_users_mistake(folder, tmp_path):
    with pytest.raises(UserError, match=r"includes model\.embed_tokens, of type Embedding, which is no linear layer"):
        start(folder, lora=LORA | {"target_modules": ["embed_tokens"]})
    second = shutil.copytree(folder, tmp_path / "other")  # transformers finds its weights under these names, too
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(second / "model.safetensors").items()}
    write_weights(weights, second)
    with pytest.raises(UserError, match=r"includes model\.layers\.0\.self_attn\.q_proj, of type Linear, which is no"):
        start(second)
