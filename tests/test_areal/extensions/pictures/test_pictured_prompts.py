"""Pictures in prompts: the engine's log-probs are the trainer's. vLLM runs models with vision only with torchvision."""

import json
from collections import UserDict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from support.tiny_pictures import PLACEHOLDER, png, prompt_with
from support.tiny_training import sampled, settings

from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.extensions.pictures.picture_files import part_of
from areal.extensions.pictures.picture_store import PictureStore
from areal.extensions.pictures.vision import sight_of
from areal.generation.generation_engine import GenerationEngine
from areal.samples.trajectory import Group
from areal.training.training_engine import TrainingEngine

SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=24)
CONFIG = GeneratorConfig(dtype="float32", max_concurrent_rollouts=8, kv_cache_gib=0.1, max_model_len=192)
WIDTH = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
TEXT = {**WIDTH, **HEADS, "vocab_size": 64, "max_position_embeddings": 256, "eos_token_id": 2}
QWEN = {**WIDTH, "num_heads": 2, "out_hidden_size": 64}
IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
# Of each type of model: its tower, how its text turns positions, other sizes of its text, and its tokens from 5 on.
KINDS = {
    "qwen2_5_vl": (
        {**QWEN, "depth": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        {"mrope_section": [4, 6, 6]},
        {},
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    ),
    "qwen3_vl": (
        {**QWEN, "depth": 3, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        {"head_dim": 32},
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
        | {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
    ),
    "smolvlm": (
        {**WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16},
        {},
        {"model_type": "llama"},
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        }
        | {"end_of_utterance_token": "<end_of_utterance>"},
    ),
}


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    torch.manual_seed(0)
    kind, (tower, rotary, more, names) = request.param, KINDS[request.param]
    if kind == "smolvlm":
        pytest.importorskip("num2words")
    rotary = {"rope_type": "default", "rope_theta": 10000.0, **rotary}
    config = transformers.AutoConfig.for_model(
        kind,
        text_config={**TEXT, **more, "rope_parameters": rotary, "tie_word_embeddings": False},
        vision_config=tower,
        tie_word_embeddings=False,
        **IDS,
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    words = [f"w{token}" for token in range(64)]
    words[5 : 5 + len(names)] = names.values()
    raw = {"type": "WordLevel", "vocab": {word: token for token, word in enumerate(words)}, "unk_token": "w0"}
    file = tmp_path / "tokenizer.json"
    file.write_text(
        json.dumps({"version": "1.0", "model": raw, "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}})
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token="w2", pad_token="w0", extra_special_tokens=names
    )
    tokenizer.save_pretrained(tmp_path / "model")
    for name, settings_of_it in processors(kind, tower["patch_size"]).items():
        (tmp_path / "model" / f"{name}_config.json").write_text(json.dumps(settings_of_it))
    return tmp_path / "model"


def processors(kind, patch_size):
    """The files of a model's processors. Without `image_mean` vLLM's own normalisation would leave the pixels of Qwen's
    as bytes, 0.1 nats off."""
    if kind == "smolvlm":
        sizes = {"do_image_splitting": False, "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}}
        said = {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"}
        return {"preprocessor": sizes | said, "processor": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"}}
    unit = 2 * patch_size
    sizes = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2}
    sizes |= {"min_pixels": unit**2, "max_pixels": 16 * unit**2}
    video, processor = ("Qwen3VL", "Qwen3VL") if kind == "qwen3_vl" else ("Qwen2VL", "Qwen2_5_VL")
    said = {"processor_class": f"{processor}Processor"}
    return {
        "preprocessor": sizes | said | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor": sizes | said | {"video_processor_type": f"{video}VideoProcessor"},
    }


@pytest.mark.slow
async def test_the_logprobs_of_sampled_tokens_are_the_trainers_before_and_after_an_update(model, tmp_path):
    pytest.importorskip("torchvision")
    wide, tall, sight = png(84, 56, 1), png(30, 150, 2), sight_of(str(model))
    store = PictureStore(tmp_path / "pictures")
    store.put_all([wide, tall])
    prompts = {"one": [wide], "two": [tall, wide], "none": []}
    trainer = TrainingEngine(model, settings(max_tokens_per_microbatch=256), seed=0, pictures=store.folder)
    engine = await GenerationEngine.start(model, CONFIG, version=0)
    for version in range(2):
        groups = []
        for number, (name, contents) in enumerate(prompts.items()):
            seen = [sight.look(content) for content in contents]
            prompt = prompt_with(contents, sight, [1, 20])
            samples = [await sampled(engine, f"{name} {n}", prompt, SAMPLING, seen) for n in range(2)]
            shown = sight.column(np.array(prompt), [*map(part_of, contents)])
            if shown is not None:
                padded = [np.concatenate([shown, np.zeros((len(t) - len(prompt), 16), np.uint8)]) for t in samples]
                samples = [replace(t, pictures=seen) for t, seen in zip(samples, padded, strict=True)]
            groups.append(Group(name, number, tuple(samples)))
        computed = trainer.logprobs(groups, temperature=1.0)
        by_engine = np.concatenate([t.logprobs for group in groups for t in group.trajectories])
        was_sampled = np.concatenate([t.sampled for group in groups for t in group.trajectories])
        assert {t.versions[-1] for group in groups for t in group.trajectories} == {version}
        assert np.abs(computed - by_engine)[was_sampled].max() < 1e-4
        unseen = tuple(replace(t, pictures=None) for t in groups[0].trajectories)
        blind = [replace(groups[0], trajectories=unseen), *groups[1:]]
        assert np.abs(trainer.logprobs(blind, temperature=1.0) - by_engine)[was_sampled].max() > 0.01
        trainer.step(groups, version=version, temperature=1.0)
        await engine.load(trainer.storage.publish(tmp_path / f"{version + 1}"), version + 1)
    with pytest.raises(ValueError, match="placeholders of a prompt are not those of its 1 pictures"):
        await sampled(engine, "wrong", prompt_with([tall], sight, [1])[:-4], SAMPLING, [sight.look(tall)])
    await engine.close()
    trainer.close()


@pytest.mark.slow
def test_sequences_that_see_the_same_picture_hold_its_patches_once():
    from areal.generation.gathering_scheduler import _Gathers

    class Waiting:
        def add_request(self, request):
            added.append(request)

    class Scheduler(_Gathers, Waiting):
        pass

    scheduler, added = Scheduler(), []
    for name in ("a", "a", "b"):
        feature = SimpleNamespace(identifier=name, data=UserDict(patches=np.zeros(4)))
        scheduler.add_request(SimpleNamespace(mm_features=[feature]))
    first, second, other = (request.mm_features[0].data for request in added)
    assert first is second is not other
    added.clear()
    del first, second
    assert [*scheduler._patches] == ["b"], "what no sequence sees any more is forgotten"
