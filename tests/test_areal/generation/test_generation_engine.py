"""Generation on a real vLLM engine, checked against transformers. One engine serves the module; the last test kills it.

The models are random: three sets of weights so far apart that log-probs under the wrong one cannot be mistaken.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_training import divide
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from areal.base.errors import UserError
from areal.config.engine_sections import GeneratorConfig, SamplingConfig
from areal.config.trainer_section import LoraConfig
from areal.cpu.vllm_on_cpu import BLOCK_SIZE
from areal.devices import SHARES
from areal.extensions.lora.lora import add_adapters, write_adapter
from areal.extensions.selftest.transfer_checks import Receiving, Sending
from areal.generation import engine_start, engine_weights
from areal.generation.engine_process import EngineError, EngineStats
from areal.generation.engine_start import EngineUse, stop_tokens
from areal.generation.generation_engine import GenerationEngine
from areal.generation.offered_weights import WeightLoadError
from areal.samples.table import Generation
from areal.samples.tokenizer import load_tokenizer
from areal.samples.trajectory import TokenScores
from areal.weights.wrappers import arguments_for_text, published_shapes

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCABULARY = 512
EOS = 1
MAX_LEN = 1024
CONFIG = GeneratorConfig(dtype="float32", max_concurrent_rollouts=16, stream_interval=4, kv_cache_gib=0.25)
SAMPLING = SamplingConfig(temperature=0.8, max_new_tokens=96)
ENDLESS = SamplingConfig(max_new_tokens=MAX_LEN)
LORA = LoraConfig(rank=4, alpha=8)
KEPT_WORDS = 32
SECONDS = 120.0
PROMPT = list(range(10, 90))  # longer than two KV blocks, so that it is cached

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": EOS,
}

Models = dict[int, Path]


@pytest.fixture(scope="module", autouse=True)
def no_long_pauses() -> Iterator[None]:
    """As in an actor's process (areal.devices.settle): going through all objects of a process that has run many tests
    takes longer than some sequences here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folders of three policies, by version. The first and the last have their weights in several files. The first is
    as a hub has it: with tensors that transformers has no place for, and with other defaults of sampling."""
    folders = {version: tmp_path_factory.mktemp(f"policy{version}") for version in range(3)}
    write_models(folders, lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)))
    weights = load_file(folders[0] / "model.safetensors")
    weights |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(16) for layer in range(2)}
    save_file(weights, folders[0] / "model.safetensors", metadata={"format": "pt"})
    defaults = {"eos_token_id": EOS, "do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 3.0}
    (folders[0] / "generation_config.json").write_text(json.dumps(defaults))
    divide(folders[0], 3)
    divide(folders[2], 3)
    published_shapes(folders[0])  # the first call takes longer than the short sequences of a test
    return folders


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folders of three policies of a mixture of experts, by version; the second has its weights in several files."""
    folders = {version: tmp_path_factory.mktemp(f"experts{version}") for version in range(3)}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    write_models(folders, lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | mixture | {"decoder_sparse_step": 1})))
    divide(folders[1], 3)
    return folders


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folders of three policies with latent attention and interleaved rotation, by version."""
    folders = {version: tmp_path_factory.mktemp(f"latent{version}") for version in range(3)}
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"first_k_dense_replace": 2, "num_key_value_heads": 4, "tie_word_embeddings": False}
    base = {name: value for name, value in SIZES.items() if name != "head_dim"}
    write_models(folders, lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**base | sizes)))
    return folders


def write_models(folders: Models, make: Callable[[], PreTrainedModel]) -> None:
    for version, folder in folders.items():
        torch.manual_seed(version)
        make().save_pretrained(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(models: Models) -> AsyncGenerator[GenerationEngine, None]:
    engine = await GenerationEngine.start(models[0], CONFIG, version=0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: GenerationEngine, models: Models) -> GenerationEngine:
    """The module's engine, idle and at version 0."""
    await shared_engine.load(models[0], 0)
    return shared_engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_adapting(models: Models) -> AsyncGenerator[GenerationEngine, None]:
    """An engine whose versions are adapters of the first model, and whose tokens come with the words that were kept."""
    engine = await GenerationEngine.start(
        models[0], CONFIG, version=0, lora=LORA, kept_words=KEPT_WORDS, kept_logprobs=True
    )
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def adapting(shared_adapting: GenerationEngine, models: Models, tmp_path: Path) -> GenerationEngine:
    """That engine, idle and at version 0, the model itself. Before its first load it has no adapter."""
    if shared_adapting.version:
        await shared_adapting.load(write_adapter_of(models[0], tmp_path / "none", scale=0), 0)
    return shared_adapting


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_keeping(models: Models) -> AsyncGenerator[GenerationEngine, None]:
    """An engine whose sequences keep their KV cache on new weights."""
    engine = await GenerationEngine.start(models[0], CONFIG.model_copy(update={"kv_on_update": "keep"}), version=0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def keeping(shared_keeping: GenerationEngine, models: Models) -> GenerationEngine:
    """That engine, idle and at version 0, of which it has no KV cache."""
    await shared_keeping.load(models[0], 0)
    return shared_keeping


async def collect(stream: AsyncGenerator[Generation, None], progress: list[Generation] | None = None) -> Generation:
    """The whole sequence as one chunk; `progress` sees its parts while they come."""
    parts = [] if progress is None else progress
    async for chunk in stream:
        parts.append(chunk)
    fields = (np.concatenate([getattr(c, name) for c in parts]) for name in ("tokens", "logprobs", "versions"))
    return Generation(*fields, parts[-1].finish)


@cache
def exact(model: Path) -> PreTrainedModel:
    """In float64, by transformers."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager", **arguments_for_text(model)}
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, **how)


@cache
def single(model: Path) -> PreTrainedModel:
    """In float32."""
    return Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)


def reference(
    model: Path, prompt: list[int], tokens: np.ndarray, temperature: float = 1.0, without: int | None = None
) -> np.ndarray:
    """Log-probs of `tokens` after `prompt`, float64 [n], all under the weights of `model`, by transformers. without: a
    token that cannot be drawn."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        logits = exact(model)(ids).logits[0, len(prompt) - 1 : -1]
    if without is not None:
        logits[:, without] = -torch.inf
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def surprises(
    model: Path, prompt: list[int], tokens: np.ndarray, temperature: float, without: int
) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the variance of -log p under the distribution of each of `tokens`, float64 [n]; as `reference`."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        logits = exact(model)(ids).logits[0, len(prompt) - 1 : -1]
    logits[:, without] = -torch.inf
    p = torch.softmax(logits / temperature, -1)
    surprise = -torch.where(p > 0, p.log(), 0)
    mean = (p * surprise).sum(-1)
    return mean.numpy(), ((p * surprise**2).sum(-1) - mean**2).numpy()


def reference_on_old_cache(old: Path, new: Path, prompt: list[int], tokens: np.ndarray, split: int) -> np.ndarray:
    """Log-probs of tokens[split:] under `new` where the KV cache of everything before was left as `old` made it."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    start = len(prompt) + split - 1
    with torch.no_grad():
        stored = single(old)(ids[:, :start]).past_key_values
        logits = single(new)(ids[:, start:-1], past_key_values=stored).logits[0]
    logprobs = torch.log_softmax(logits / SAMPLING.temperature, -1)
    return logprobs.gather(1, ids[0, start + 1 :, None])[:, 0].numpy()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event to offer
            await asyncio.sleep(0.001)


async def stats_at_rest(engine: GenerationEngine) -> EngineStats:
    """The engine's, once it has sampled nothing for a while."""
    async with asyncio.timeout(SECONDS):
        while True:
            stats_before = engine.stats()
            await asyncio.sleep(0.2)
            if engine.stats() == stats_before:
                return stats_before


async def test_each_part_of_an_interrupted_sequence_has_the_logprobs_of_the_weights_that_sampled_it(
    engine: GenerationEngine, models: Models
) -> None:
    sequence, prompt = await check_interruption(engine, models)
    split = int((sequence.versions == 0).sum())
    stale = reference_on_old_cache(models[0], models[1], prompt, sequence.tokens, split)
    part = (sequence.versions == 1)[split:]
    assert np.abs(stale - sequence.logprobs[split:])[part].mean() > 0.01


async def test_queries_with_an_axis_of_heads_are_rotated_as_those_without_one() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.platforms import current_platform

    from areal.cpu import kernels

    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(16, 64, is_neox_style=False, rope_parameters={"rope_theta": 1e4}, dtype=torch.float32)
    positions, query, key = torch.arange(7), torch.randn(7, 4, 24)[..., 8:], torch.randn(7, 1, 40)[..., 24:]
    exact = rope.forward_native(positions, query.clone(), key.clone())
    for part, exact_part in zip(kernels.rotate(rope, positions, query, key), exact, strict=True):
        torch.testing.assert_close(part, exact_part, rtol=0, atol=1e-5)


@pytest.mark.slow
async def test_latent_attention_has_the_logprobs_of_the_weights_that_sampled_on_a_cpu(latent: Models) -> None:
    engine = await GenerationEngine.start(latent[0], CONFIG, version=0)
    await check_interruption(engine, latent)
    await engine.close()


ROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
TOWER = {"hidden_size": 64, "intermediate_size": 64, "patch_size": 14}
FAMILIES = {
    "Gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0, "sliding_window": 32},
    "Gemma3": {
        "text_config": {**SIZES, "sliding_window": 32, "query_pre_attn_scalar": 32},
        "vision_config": {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
        **{"mm_tokens_per_image": 4, "boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5},
    },
    "Qwen3VL": {
        "text_config": {**SIZES, "rope_parameters": ROPE, "tie_word_embeddings": False},
        "vision_config": {
            **TOWER,
            **{"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
            "deepstack_visual_indexes": [0],
        },
        **{"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8},
        "tie_word_embeddings": False,
    },
}
"""Softcapping, and wrappers, of which versions have the text alone, as a trainer publishes it."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_models_that_only_some_engines_compute_have_the_logprobs_of_the_weights_that_sampled(
    tmp_path: Path, family: str
) -> None:
    folders, wrapper = {version: tmp_path / f"{version}" for version in range(3)}, "text_config" in FAMILIES[family]
    if wrapper:
        pytest.importorskip("torchvision")  # without it vLLM has no wrappers
    settings = FAMILIES[family] if wrapper else SIZES | FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**settings)
    kind = getattr(transformers, f"{family}For{'ConditionalGeneration' if wrapper else 'CausalLM'}")
    write_models(folders, lambda: kind(config))
    for file in (folders[version] / "model.safetensors" for version in (1, 2) if wrapper):
        tensors = {name: tensor for name, tensor in load_file(file).items() if not re.search("vis|multi_modal", name)}
        save_file(tensors, file, metadata={"format": "pt"})
    options = {"engine_options": {"language_model_only": True}} if wrapper else {}
    engine = await GenerationEngine.start(folders[0], CONFIG.model_copy(update=options), version=0)
    await check_interruption(engine, folders)
    await engine.close()


def check_likely(model: Path, scores: TokenScores) -> None:
    """The three likeliest tokens at each place of PROMPT, and their log-probs."""
    with torch.no_grad():
        logps = torch.log_softmax(exact(model)(torch.tensor([PROMPT])).logits[0, :-1], -1)
    expected, tokens = logps.topk(3)
    assert np.abs(scores.top_logprobs - expected.numpy()).max() < 1e-4
    assert np.abs(logps.gather(1, torch.tensor(scores.top_tokens).long()) - expected).max() < 1e-4
    assert (scores.top_tokens == tokens.numpy()).mean() > 0.95  # but for ties


async def check_interruption(engine: GenerationEngine, models: Models) -> tuple[Generation, list[int]]:
    """Load two versions while sequences run. Each token has to have the log-prob of the version that it names. Returns
    a sequence that went through all versions, with its prompt. The engine is at version 0 before."""
    prompts = [PROMPT[: 5 + 7 * i] for i in range(8)]
    progress: list[list[Generation]] = [[] for _ in prompts]
    tasks = [
        asyncio.create_task(collect(engine.generate(f"r{i}", prompt, SAMPLING), progress[i]))
        for i, prompt in enumerate(prompts)
    ]
    await until(lambda: all(len(parts) >= 2 or task.done() for parts, task in zip(progress, tasks, strict=True)))
    scoring = [asyncio.create_task(engine.score("old", PROMPT))]
    first = await engine.load(models[1], 1)
    scoring.append(asyncio.create_task(engine.score("new", PROMPT)))
    counts = [len(parts) for parts in progress]
    await until(lambda: sum(len(p) >= n + 2 or t.done() for p, n, t in zip(progress, counts, tasks, strict=True)) == 8)
    await engine.load(models[2], 2)
    sequences = await asyncio.gather(*tasks)
    scored = [*await asyncio.gather(*scoring), await engine.score("newest", PROMPT, 3)]
    check_likely(models[2], scored[-1])

    assert {scores.version for scores in scored} == {scored[0].version, 1, 2}
    for scores in scored:
        for version, model in models.items():
            difference = np.abs(reference(model, PROMPT[:1], np.array(PROMPT[1:])) - scores.logprobs)
            assert difference.max() < 1e-4 if version == scores.version else difference.mean() > 0.1
    assert first.sequences_interrupted >= 4
    assert min(first.pause_seconds, first.load_seconds, first.resume_seconds) > 0
    through_all = [i for i, sequence in enumerate(sequences) if set(sequence.versions) == {0, 1, 2}]
    assert len(through_all) >= 4
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert (np.diff(sequence.versions) >= 0).all()
        under = [reference(models[v], prompt, sequence.tokens, SAMPLING.temperature) for v in range(3)]
        for version in set(sequence.versions.tolist()):
            part = sequence.versions == version
            assert np.abs(under[version] - sequence.logprobs)[part].max() < 1e-4
            for wrong in {0, 1, 2} - {version}:
                assert np.abs(under[wrong] - sequence.logprobs)[part].mean() > 0.1
    return sequences[through_all[0]], prompts[through_all[0]]


@pytest.mark.parametrize(
    ("folders", "changes"),
    [
        pytest.param("experts", {}, marks=pytest.mark.slow),
        pytest.param("models", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("experts", {"tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
)
async def test_as_gpus_load_and_schedule_tokens_of_dense_models_and_experts_have_the_logprobs_of_their_version(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folders: str, changes: dict[str, Any]
) -> None:
    """By vLLM's own reload, and with the next step scheduled while one is computed, on one worker or two. And after
    a direct transfer."""

    def as_on_gpus(*arguments: Any) -> Any:
        from vllm.platforms.cpu import CpuPlatform

        check = CpuPlatform.check_and_update_config

        def check_and_schedule_ahead(config: Any) -> None:
            check(config)
            config.scheduler_config.async_scheduling = True

        monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_schedule_ahead))
        result = engine_args(*arguments)
        result.worker_extension_cls = "fakes.reloading_worker.ReloadingWorker"
        return result

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # vLLM sets it, and the trainers of later tests read it
    engine_args = engine_start.engine_arguments
    monkeypatch.setattr(engine_start, "engine_arguments", as_on_gpus)
    policies: Models = request.getfixturevalue(folders)
    workers = changes.get("tensor_parallel", 1)
    engine = await GenerationEngine.start(policies[0], CONFIG.model_copy(update=changes), version=0, transfer="gloo")
    assert await engine._process.core.collective_rpc_async("schedules_ahead") == [True] * workers
    await check_interruption(engine, policies)
    assert await engine._process.core.collective_rpc_async("reloaded_with_the_config") == [True] * workers

    sending, receiving = Sending("gloo", workers, policies[1]), Receiving(engine)
    while "call" in (call := await asyncio.to_thread(sending.next_call)):
        await receiving.follow(**call)
        sending.acknowledge()
    sequence = await collect(engine.generate("sent", PROMPT, SAMPLING))
    exact = reference(policies[1], PROMPT, sequence.tokens, SAMPLING.temperature)
    assert np.abs(exact - sequence.logprobs).max() < 1e-4
    await engine.close()


async def test_nothing_is_sampled_or_loaded_while_the_engine_sleeps(engine: GenerationEngine, models: Models) -> None:
    progress: list[list[Generation]] = [[] for _ in range(4)]
    tasks = [
        asyncio.create_task(collect(engine.generate(f"r{i}", PROMPT[: 9 + 7 * i], SAMPLING), progress[i]))
        for i in range(4)
    ]
    await until(lambda: all(progress))
    await engine.sleep()
    load = asyncio.create_task(engine.load(models[1], 1))
    tasks.append(asyncio.create_task(collect(engine.generate("late", PROMPT, SAMPLING))))
    stats_before = await stats_at_rest(engine)
    await asyncio.sleep(0.5)
    assert (engine.stats(), engine.version, load.done()) == (stats_before, 0, False)
    await engine.wake()
    await load
    sequences = await asyncio.gather(*tasks)
    assert engine.stats().preemptions == stats_before.preemptions
    assert any(set(sequence.versions) == {0, 1} for sequence in sequences)
    for i, sequence in enumerate(sequences):
        prompt = PROMPT if i == 4 else PROMPT[: 9 + 7 * i]
        for version in set(sequence.versions.tolist()):
            part = sequence.versions == version
            under = reference(models[version], prompt, sequence.tokens, SAMPLING.temperature)
            assert np.abs(under - sequence.logprobs)[part].max() < 1e-4


async def test_a_prompt_cached_under_old_weights_is_computed_again(engine: GenerationEngine, models: Models) -> None:
    await collect(engine.generate("old", PROMPT, SAMPLING))
    await engine.load(models[1], 1)
    sequence = await collect(engine.generate("new", PROMPT, SAMPLING))
    assert set(sequence.versions) == {1}
    expected = reference(models[1], PROMPT, sequence.tokens, SAMPLING.temperature)
    assert np.abs(expected - sequence.logprobs).max() < 1e-4


async def test_tensors_that_transformers_has_no_place_for_need_not_be_published(
    engine: GenerationEngine, models: Models, tmp_path: Path
) -> None:
    assert published_shapes(models[0]).keys() == load_file(models[1] / "model.safetensors").keys()
    stored = {name: tensor for file in models[0].glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert published_shapes(models[0]).keys() < stored.keys()
    await engine.load(models[1], 1)
    sequence = await collect(engine.generate("r", PROMPT, SAMPLING))
    assert set(sequence.versions) == {1}
    expected = reference(models[1], PROMPT, sequence.tokens, SAMPLING.temperature)
    assert np.abs(expected - sequence.logprobs).max() < 1e-4
    del stored["model.embed_tokens.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightLoadError, match="3 tensors differ, the first is model.embed_tokens.weight"):
        await engine.load(tmp_path, 2)


async def test_defaults_of_the_model_folder_do_not_change_what_is_sampled(
    engine: GenerationEngine, models: Models
) -> None:
    plain = SamplingConfig(max_new_tokens=64)
    group = await asyncio.gather(*(collect(engine.generate("r", PROMPT, plain)) for _ in range(4)))
    assert len({sample.tokens.tobytes() for sample in group}) == 4  # not with top_k of 1
    for sample in group:
        assert np.abs(reference(models[0], PROMPT, sample.tokens) - sample.logprobs).max() < 1e-4


async def test_the_end_of_sequence_of_the_tokenizer_stops_as_what_the_generation_config_lists_does(
    tiny_model: Path, models: Models, tmp_path: Path
) -> None:
    eos_token = load_tokenizer(str(tiny_model)).eos_token_id
    assert [stop_tokens(tiny_model, listed) for listed in (None, eos_token, [eos_token + 1])] == [
        [eos_token],
        [eos_token],
        [eos_token, eos_token + 1],
    ]
    assert [stop_tokens(tmp_path, listed) for listed in (None, [7, 5])] == [[], [5, 7]]
    assert stop_tokens(models[1], [7]) == [7]  # it has no tokenizer, where transformers would make one up


async def test_no_stop_token_comes_before_the_minimum_whatever_is_loaded_meanwhile(
    engine: GenerationEngine, models: Models
) -> None:
    few, prompt = 80, [5]
    sampling = SamplingConfig(max_new_tokens=MAX_LEN - 2, min_new_tokens=few)
    progress: list[list[Generation]] = [[] for _ in range(8)]
    tasks = [asyncio.create_task(collect(engine.generate("r", prompt, sampling), parts)) for parts in progress]
    await until(lambda: all(len(parts) >= 2 for parts in progress))
    await engine.load(models[1], 1)
    sequences = await asyncio.gather(*tasks)
    assert min(len(s.tokens) for s in sequences) > few
    assert any(s.finish == "stop" for s in sequences)
    for sequence in sequences:
        assert EOS not in sequence.tokens[:-1]
        for version in (0, 1):
            held = reference(models[version], prompt, sequence.tokens[:few], without=EOS)
            free = reference(models[version], prompt, sequence.tokens)
            part = sequence.versions == version
            assert np.abs(held - sequence.logprobs[:few])[part[:few]].max() < 1e-4
            assert np.abs(free - sequence.logprobs)[few:][part[few:]].max(initial=0) < 1e-4
        assert np.abs(free - sequence.logprobs)[:few][part[:few]].max() > 1e-3


async def test_the_samples_of_a_group_differ_and_each_is_right(engine: GenerationEngine, models: Models) -> None:
    group = await asyncio.gather(*(collect(engine.generate("same id", PROMPT, SAMPLING)) for _ in range(8)))
    assert len({sample.tokens.tobytes() for sample in group}) == 8
    for sample in group:
        expected = reference(models[0], PROMPT, sample.tokens, SAMPLING.temperature)
        assert np.abs(expected - sample.logprobs).max() < 1e-4


async def test_at_temperature_zero_every_token_is_the_likeliest_one(engine: GenerationEngine, models: Models) -> None:
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=12)
    ways = [greedy, greedy, *(SamplingConfig(max_new_tokens=12, **only) for only in ({"top_k": 1}, {"min_p": 1.0}))]
    first, *remainder = await asyncio.gather(*(collect(engine.generate("greedy", PROMPT, way)) for way in ways))
    assert all(neighbour.tokens.tolist() == first.tokens.tolist() for neighbour in remainder)
    ids = torch.tensor([[*PROMPT, *first.tokens.tolist()]])
    with torch.no_grad():
        logits = single(models[0])(ids).logits[0, len(PROMPT) - 1 : -1]
    assert first.tokens.tolist() == logits.argmax(-1).tolist()


async def test_requests_with_one_seed_draw_the_same_tokens_whatever_else_the_engine_samples(
    engine: GenerationEngine, models: Models
) -> None:
    """Some of the long prompts are computed in several steps, of which all but the last draw nothing."""
    long = [2 + i % 90 for i in range(MAX_LEN - 16)]

    async def draw(number: int, seed: int | None) -> Generation:
        how = {"max_new_tokens": 8, "cache_salt": f"{number}"}
        return await collect(engine.generate(f"{number}", long, SAMPLING.with_seed(seed), **how))

    every = await asyncio.gather(*(draw(i, seed) for i, seed in enumerate([7, 8, *[None] * 6, 7])))
    alone = await draw(99, 7)
    first, second, *_, last = (sequence.tokens.tolist() for sequence in every)
    assert alone.tokens.tolist() == first == last != second
    assert np.abs(reference(models[0], long, alone.tokens, SAMPLING.temperature) - alone.logprobs).max() < 1e-4


async def test_what_vllm_would_sample_otherwise_than_asked_is_refused(engine: GenerationEngine) -> None:
    low = SamplingConfig.model_construct(**SamplingConfig(max_new_tokens=2).model_dump() | {"temperature": 0.002})
    with pytest.raises(ValueError, match=r"vLLM samples with temperature=0\.01, not with 0\.002 as asked"):
        await anext(engine.generate("low", [5, 6], low))


async def test_the_engine_sends_tokens_together(engine: GenerationEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of earlier steps and that of the last one, for each chunk."""
    sent_count = 0
    deliver = engine._process._deliver

    def count(outputs: Any) -> None:
        nonlocal sent_count
        sent_count += len(outputs.outputs)
        deliver(outputs)

    monkeypatch.setattr(engine._process, "_deliver", count)
    streams = [engine.generate(f"r{i}", PROMPT, SamplingConfig(max_new_tokens=64, min_new_tokens=64)) for i in range(8)]
    sequences = await asyncio.gather(*map(collect, streams))
    assert sum(len(sequence.tokens) for sequence in sequences) == 8 * 64
    assert sent_count <= 8 * 64 / CONFIG.stream_interval * 2


async def test_chunks_are_typed_and_about_as_long_as_the_stream_interval(engine: GenerationEngine) -> None:
    chunks = [chunk async for chunk in engine.generate("r", PROMPT, SAMPLING, max_new_tokens=10)]
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for chunk in chunks:
        assert (chunk.tokens.dtype, chunk.logprobs.dtype, chunk.versions.dtype) == (np.int32, np.float32, np.int32)
        assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.versions) > 0
    assert all(len(chunk.tokens) >= CONFIG.stream_interval for chunk in chunks[:-1])


async def test_the_first_token_of_a_user_comes_at_once(engine: GenerationEngine) -> None:
    parts = engine.generate("r", PROMPT, SamplingConfig(max_new_tokens=10, min_new_tokens=10), cache_salt="user")
    lengths = [len(part.tokens) async for part in parts]
    assert lengths[0] == 1 and all(length >= CONFIG.stream_interval for length in lengths[1:-1])
    assert sum(lengths) == 10


async def test_a_sequence_of_which_nothing_is_read_before_its_end_comes_in_longer_chunks(
    engine: GenerationEngine,
) -> None:
    sampling = SamplingConfig(max_new_tokens=100, min_new_tokens=100)
    lengths = [len(part.tokens) async for part in engine.generate("r", PROMPT, sampling, whole=True)]
    assert lengths[0] >= CONFIG.stream_interval and sum(lengths) == 100
    assert len(lengths) > 2 and all(length >= 8 * CONFIG.stream_interval for length in lengths[1:-1])


async def test_steps_that_follow_each_other_closely_share_a_message(engine: GenerationEngine) -> None:
    before = engine.stats().steps
    await collect(engine.generate("r", PROMPT, SamplingConfig(max_new_tokens=256, min_new_tokens=256)))
    assert engine.stats().steps - before < 256


async def test_a_sequence_that_ends_just_before_the_last_of_the_others_is_given_up_is_whole(
    engine: GenerationEngine,
) -> None:
    for number in range(10):
        other = asyncio.create_task(collect(engine.generate(f"other{number}", PROMPT, ENDLESS)))
        ending = asyncio.create_task(
            collect(engine.generate(f"r{number}", PROMPT, SAMPLING, max_new_tokens=1 + number))
        )
        await asyncio.sleep(0.005 * number)
        other.cancel()
        async with asyncio.timeout(SECONDS):
            assert len((await ending).tokens) <= 1 + number


async def test_a_stopped_sequence_ends_with_its_stop_token_and_a_cut_one_has_all_its_tokens(
    engine: GenerationEngine, models: Models
) -> None:
    short = await asyncio.gather(*(collect(engine.generate(f"s{i}", [5], ENDLESS, max_new_tokens=3)) for i in range(8)))
    long = await asyncio.gather(*(collect(engine.generate(f"l{i}", [5], ENDLESS)) for i in range(8)))
    assert {"length"} <= {sequence.finish for sequence in short}
    assert {"stop"} <= {sequence.finish for sequence in long} <= {"stop", "length"}
    for limit, sequence in [*((3, s) for s in short), *((MAX_LEN - 1, s) for s in long)]:
        assert EOS not in sequence.tokens[:-1]
        if sequence.finish == "stop":
            assert sequence.tokens[-1] == EOS
        else:
            assert len(sequence.tokens) == limit
    stopped = next(sequence for sequence in long if sequence.finish == "stop")
    assert abs(reference(models[0], [5], stopped.tokens)[-1] - stopped.logprobs[-1]) < 1e-4


@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_a_reader_that_leaves_aborts_its_sequence_in_the_engine(engine: GenerationEngine, way: str) -> None:
    long = SamplingConfig(max_new_tokens=MAX_LEN, min_new_tokens=600)

    async def read_one() -> None:
        async with aclosing(engine.generate("r", PROMPT, long)) as stream:
            async for _ in stream:
                if way == "cancel":
                    await asyncio.sleep(60)
                return

    stats_before = engine.stats().tokens_generated
    readers = [asyncio.create_task(read_one()) for _ in range(8)]
    if way == "cancel":
        await until(lambda: engine.stats().running == 8 and engine.stats().tokens_generated > stats_before)
        assert engine.stats().kv_use > 0
        for reader in readers:
            reader.cancel()
    await asyncio.wait(readers)
    stats_after = await stats_at_rest(engine)
    assert (stats_after.running, stats_after.waiting, stats_after.kv_use) == (0, 0, 0.0)
    assert 0 < stats_after.tokens_generated - stats_before < 8 * 600


def write_adapter_of(model: Path, folder: Path, *, seed: int = 7, scale: float = 0.1) -> Path:
    module = add_adapters(Qwen3ForCausalLM.from_pretrained(model), LORA)
    torch.manual_seed(seed)
    factors = {name: torch.randn_like(p) * scale for name, p in module.named_parameters() if p.requires_grad}
    folder.mkdir(exist_ok=True)
    write_adapter(module, factors, folder)
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """By peft."""
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(model), adapter).merge_and_unload()
    adapted.save_pretrained(folder)
    return folder


async def test_a_prompt_is_scored_with_the_adapter_while_sequences_run(
    adapting: GenerationEngine, models: Models, tmp_path: Path
) -> None:
    adapter = write_adapter_of(models[0], tmp_path / "adapter")
    await adapting.load(adapter, 1)
    progress: list[list[Generation]] = [[], []]
    running = [asyncio.create_task(collect(adapting.generate("r", PROMPT, SAMPLING), parts)) for parts in progress]
    await until(lambda: all(progress))
    scores = await adapting.score("scored", PROMPT)
    policy = merge(models[0], adapter, tmp_path / "merged")
    assert np.abs(reference(policy, PROMPT[:1], np.array(PROMPT[1:])) - scores.logprobs).max() < 1e-4
    for sequence in await asyncio.gather(*running):
        expected = reference(policy, PROMPT, sequence.tokens, SAMPLING.temperature)
        assert np.abs(expected - sequence.logprobs).max() < 1e-4


async def test_each_part_of_an_interrupted_sequence_has_the_logprobs_of_the_adapter_that_sampled_it(
    adapting: GenerationEngine, models: Models, tmp_path: Path
) -> None:
    adapters = [write_adapter_of(models[0], tmp_path / f"{seed}", seed=seed) for seed in (7, 8)]
    policies = [models[0], *(merge(models[0], adapter, adapter / "merged") for adapter in adapters)]
    progress: list[Generation] = []
    running = asyncio.create_task(collect(adapting.generate("r", PROMPT, SAMPLING), progress))
    for version, adapter in enumerate(adapters, 1):
        seen = len(progress)
        await until(lambda seen=seen: len(progress) >= seen + 2)  # type: ignore[misc]
        await adapting.load(adapter, version)
    sequences = [await running, await collect(adapting.generate("after", PROMPT, SAMPLING))]
    assert [set(sequence.versions) for sequence in sequences] == [{0, 1, 2}, {2}]
    scores = await adapting.score("scored", PROMPT)
    assert scores.version == 2
    assert np.abs(reference(policies[2], PROMPT[:1], np.array(PROMPT[1:])) - scores.logprobs).max() < 1e-4
    for sequence in sequences:
        under = [reference(policy, PROMPT, sequence.tokens, SAMPLING.temperature) for policy in policies]
        for version in set(sequence.versions.tolist()):
            part = sequence.versions == version
            assert np.abs(under[version] - sequence.logprobs)[part].max() < 1e-4
            for wrong in {0, 1, 2} - {version}:
                assert np.abs(under[wrong] - sequence.logprobs)[part].mean() > 0.1


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 20}, {"top_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "min_new_tokens": 90}],
    ids=["top-k", "top-p", "all"],
)
async def test_tokens_come_with_the_words_that_they_were_drawn_from_through_a_new_adapter(
    adapting: GenerationEngine, models: Models, tmp_path: Path, changes: dict[str, Any]
) -> None:
    sampling, adapter = SAMPLING.model_copy(update=changes), write_adapter_of(models[0], tmp_path / "new")
    policies = [models[0], merge(models[0], adapter, adapter / "merged")]
    parts: list[Generation] = []
    running = asyncio.create_task(collect(adapting.generate("r", PROMPT, sampling), parts))
    await until(lambda: len(parts) >= 2)
    await adapting.load(adapter, 1)
    sequence = await running
    words, logprobs = (
        np.concatenate([part.columns[name] for part in parts]) for name in ("kept_words", "kept_logprobs")
    )
    assert set(sequence.versions) == {0, 1} and words.shape == (len(sequence), KEPT_WORDS)
    ids = torch.tensor([[*PROMPT, *sequence.tokens.tolist()]])
    with torch.no_grad():
        logits = [exact(policy)(ids).logits[0, len(PROMPT) - 1 : -1] / sampling.temperature for policy in policies]
    full = 0
    for place, (token, row) in enumerate(zip(sequence.tokens, words, strict=True)):
        own = logits[sequence.versions[place]][place]
        if place < sampling.min_new_tokens:
            own[EOS] = -torch.inf
        kept = row[row >= 0]
        if full_row := len(kept) == KEPT_WORDS:  # there may be more
            full += full_row
            continue
        assert token in kept
        ordered = own.sort(descending=True).values
        assert sorted(own[kept].tolist()) == pytest.approx(sorted(ordered[: len(kept)].tolist()), abs=1e-4)
        among = own[kept].log_softmax(-1)[kept.tolist().index(token)]
        assert float(among) == pytest.approx(float(sequence.logprobs[place]), abs=1e-5)
        assert logprobs[place][: len(kept)].tolist() == pytest.approx(own[kept].log_softmax(-1).tolist(), abs=1e-5)
        assert not logprobs[place][len(kept) :].any()
        assert len(kept) <= (sampling.top_k or VOCABULARY)
        p = ordered[: sampling.top_k or None].softmax(-1)
        p = p[p >= sampling.min_p * p[0] * (1 - 1e-5)]
        share = p.cumsum(-1) / p.sum()
        assert share[len(kept) - 1] > sampling.top_p - 1e-4
        assert len(kept) == 1 or sampling.top_p == 1 or share[len(kept) - 2] < sampling.top_p + 1e-4
    assert full < len(sequence) / 2 and (full == 0 or not sampling.top_k)


async def test_an_adapter_that_does_not_fit_is_refused(
    adapting: GenerationEngine, models: Models, tmp_path: Path
) -> None:
    factors = load_file(write_adapter_of(models[0], tmp_path) / "adapter_model.safetensors")
    name = next(iter(factors))
    for wrong in ({name: factors[name][:2]}, {name.replace("layers.0", "layers.9"): factors[name].clone()}):
        save_file(factors | wrong, tmp_path / "adapter_model.safetensors")
        with pytest.raises(WeightLoadError, match="1 tensors differ"):
            await adapting.load(tmp_path, 9)
    with pytest.raises(WeightLoadError, match="does not fit"):
        await adapting.load(models[1], 9)
    assert adapting.version == 0


async def test_an_engine_without_adapters_refuses_one(engine: GenerationEngine, models: Models, tmp_path: Path) -> None:
    with pytest.raises(WeightLoadError, match="does not fit"):
        await engine.load(write_adapter_of(models[0], tmp_path), 9)


async def test_an_adapter_of_too_high_a_rank_is_told(models: Models) -> None:
    with pytest.raises(UserError, match=r"trainer.lora.rank is 1000, but vLLM takes at most \d+: lower it"):
        await GenerationEngine.start(models[0], CONFIG, version=0, lora=LoraConfig(rank=1000))


def missing(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """No file at all."""


def cut_short(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def cut_in_the_header(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")
    os.truncate(folder / "model.safetensors", 20)


def without_a_tensor(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(dict(list(tensors.items())[1:]), folder / "model.safetensors")


def of_another_shape(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors | {"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")


@pytest.mark.parametrize("write", [missing, cut_short, cut_in_the_header, without_a_tensor, of_another_shape])
async def test_weights_that_do_not_fit_are_refused_and_generation_goes_on(
    engine: GenerationEngine, models: Models, tmp_path: Path, write: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    write(tmp_path, load_file(models[1] / "model.safetensors"))
    progress: list[Generation] = []
    running = asyncio.create_task(collect(engine.generate("r", PROMPT, SAMPLING), progress))
    await until(lambda: bool(progress))
    with pytest.raises(WeightLoadError, match=r"model\.safetensors|does not fit the model: 1 tensors differ"):
        await engine.load(tmp_path, 1)
    sequence = await running
    assert engine.version == 0
    assert set(sequence.versions) == {0}
    expected = reference(models[0], PROMPT, sequence.tokens, SAMPLING.temperature)
    assert np.abs(expected - sequence.logprobs).max() < 1e-4


@pytest.mark.parametrize("adapter", [False, True])
async def test_weights_that_are_removed_once_checked_are_refused_and_once_open_are_loaded_whole(
    engine: GenerationEngine,
    adapting: GenerationEngine,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapter: bool,
) -> None:
    def write(folder: Path) -> Path:
        return write_adapter_of(models[0], folder) if adapter else Path(shutil.copytree(models[1], folder))

    engine = adapting if adapter else engine

    def check_and_remove(folder: Path, model: Any) -> None:
        check(folder, model)
        shutil.rmtree(folder)

    async def remove_and_pause(**options: Any) -> None:
        shutil.rmtree(tmp_path / "open")
        await pause(**options)

    check, pause = engine_weights.check_offer, engine._process.core.pause_scheduler_async
    write(tmp_path / "whole")
    progress: list[Generation] = []
    running = asyncio.create_task(collect(engine.generate("r", PROMPT, SAMPLING), progress))
    await until(lambda: bool(progress))
    with monkeypatch.context() as removing:
        removing.setattr(engine_weights, "check_offer", check_and_remove)
        with pytest.raises(WeightLoadError, match="checked cannot be read"):
            await engine.load(write(tmp_path / "checked"), 1)
    sequence = await running
    assert set(sequence.versions) == {0}
    expected = reference(models[0], PROMPT, sequence.tokens, SAMPLING.temperature)
    assert np.abs(expected - sequence.logprobs).max() < 1e-4

    monkeypatch.setattr(engine._process.core, "pause_scheduler_async", remove_and_pause)
    await engine.load(write(tmp_path / "open"), 2)
    sequence = await collect(engine.generate("r", PROMPT, SAMPLING))
    assert not (tmp_path / "open").exists()
    assert set(sequence.versions) == {2}
    if adapter:
        merge(models[0], tmp_path / "whole", tmp_path / "merged")
    expected = reference(tmp_path / "merged" if adapter else models[1], PROMPT, sequence.tokens, SAMPLING.temperature)
    assert np.abs(expected - sequence.logprobs).max() < 1e-4


async def test_a_cancelled_load_does_not_leave_the_engine_paused(engine: GenerationEngine, models: Models) -> None:
    load = asyncio.create_task(engine.load(models[1], 1))
    await asyncio.sleep(0.01)
    load.cancel()
    await asyncio.wait({load})
    async with asyncio.timeout(SECONDS):
        sequence = await collect(engine.generate("r", PROMPT, SAMPLING))
    assert set(sequence.versions) == {engine.version}
    expected = reference(models[engine.version], PROMPT, sequence.tokens, SAMPLING.temperature)
    assert np.abs(expected - sequence.logprobs).max() < 1e-4


@pytest.mark.parametrize("tokens", [[], [VOCABULARY], [-1], [5] * MAX_LEN])
async def test_tokens_the_model_cannot_take_are_refused_before_the_engine_sees_them(
    engine: GenerationEngine, tokens: list[int]
) -> None:
    with pytest.raises(ValueError, match="the prompt has"):
        await collect(engine.generate("r", tokens, SAMPLING))


async def test_a_mistaken_model_folder_is_told_before_anything_starts(models: Models, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not the folder of a Hugging Face model"):
        await GenerationEngine.start(tmp_path / "nowhere", CONFIG, version=0)
    (tmp_path / "config.json").write_bytes((models[0] / "config.json").read_bytes())
    with pytest.raises(UserError, match="no weights in safetensors format"):
        await GenerationEngine.start(tmp_path, CONFIG, version=0)
    (tmp_path / "model.safetensors").write_bytes((models[1] / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        await GenerationEngine.start(tmp_path, CONFIG, version=0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"engine_options": {"speculative_config": {"method": "n-gram", "num_speculative_tokens": 2}}}, "n-gram"),
        ({"engine_options": {"max_num_batched_tokens": "many"}}, "many"),
        ({"engine_options": {"data_parallel_size": 2}}, "data_parallel_size is 2, but"),
    ],
)
async def test_settings_the_model_cannot_have_are_a_user_error(
    models: Models, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as raised:
        await GenerationEngine.start(models[0], CONFIG.model_copy(update=changes), version=0)
    assert "\n" not in str(raised.value)


async def test_the_engine_s_arguments_are_the_settings_with_the_options_on_top(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arguments(cpu: bool = False, sleeps: bool = False, **changes: Any) -> Any:
        return engine_start.engine_arguments(models[0], GeneratorConfig(**changes), EngineUse(7, None, sleeps), cpu)

    results = arguments(engine_options={"kv_cache_dtype": "fp8", "enable_prefix_caching": False}, tensor_parallel=2)
    assert (results.kv_cache_dtype, results.enable_prefix_caching, results.tensor_parallel_size) == ("fp8", False, 2)
    assert results.distributed_executor_backend.endswith("ManyProcessExecutor")
    for name in ("dtype", "model", "tensor_parallel_size", "stream_interval", "logprobs_mode"):
        with pytest.raises(UserError, match=rf"engine_options.{name} cannot be set: a key does that"):
            arguments(engine_options={name: None})
    alone = arguments(engine_options={"data_parallel_size": 2})
    assert alone.distributed_executor_backend.endswith("OneProcessExecutor")
    assert (alone.gpu_memory_utilization, alone.kv_cache_memory_bytes, alone.seed) == (0.9, None, 7)
    assert arguments(kv_cache_gib=2, memory_share=0.5).kv_cache_memory_bytes == 2 * 2**30
    assert arguments(memory_share=0.5).gpu_memory_utilization == 0.5
    assert arguments(cpu=True).kv_cache_memory_bytes == 2**30
    taking_turns = arguments(sleeps=True)
    assert (taking_turns.enable_sleep_mode, taking_turns.gpu_memory_utilization) == (True, 0.8)
    assert not arguments(sleeps=True, cpu=True).enable_sleep_mode
    monkeypatch.setenv(SHARES, "1")
    assert arguments().gpu_memory_utilization == 0.3


@pytest.mark.parametrize(
    ("device", "gib", "tokens"), [("NVIDIA H100 80GB HBM3", 79, 16384), ("NVIDIA A100-SXM4-80GB", 79, 8192)]
)
async def test_a_step_of_a_gpu_has_as_many_tokens_as_vllm_takes_for_throughput(
    models: Models, monkeypatch: pytest.MonkeyPatch, device: str, gib: int, tokens: int
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.cpu import CpuPlatform

    of_platform = EngineArgs.get_batch_defaults

    def of_the_device(world_size: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CpuPlatform, "is_cpu", lambda self: False)
            patch.setattr(CpuPlatform, "get_device_name", lambda self: device)
            patch.setattr(CpuPlatform, "get_device_total_memory", lambda self: gib * 2**30)
            return of_platform(world_size)

    monkeypatch.setattr(EngineArgs, "get_batch_defaults", staticmethod(of_the_device))

    def scheduler(on_cpu: bool, **options: Any) -> Any:
        config = CONFIG.model_copy(update={"max_concurrent_rollouts": 200, "engine_options": options})
        arguments = engine_start.engine_arguments(models[0], config, EngineUse(7), on_cpu)
        return engine_start._vllm_config(arguments, config, on_cpu).scheduler_config

    settings = scheduler(on_cpu=False)
    assert (settings.max_num_batched_tokens, settings.max_num_seqs) == (tokens, 200)
    assert scheduler(on_cpu=False, max_num_batched_tokens=4096).max_num_batched_tokens == 4096
    assert scheduler(on_cpu=True).max_num_batched_tokens == 2048  # as before on a CPU


async def test_importing_the_module_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, areal.generation.generation_engine; sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


async def test_a_missing_library_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "libnuma.so.1").touch()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from areal.cpu.vllm_on_cpu import check_libraries; check_libraries()",
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, words = await process.communicate()
    assert b"UserError: vLLM needs libnuma on the CPU" in words.splitlines()[-1]


async def queue_up(engine: GenerationEngine, count: int) -> list[asyncio.Task[Generation]]:
    """`count` samples of the same prompt, once those that find room in the engine are running."""
    progress: list[list[Generation]] = [[] for _ in range(count)]
    tasks = [asyncio.create_task(collect(engine.generate("r", PROMPT, SAMPLING), parts)) for parts in progress]
    await until(lambda: sum(map(bool, progress)) >= CONFIG.max_concurrent_rollouts)
    return tasks


async def test_updates_neither_lose_nor_repeat_a_request_or_a_token(
    engine: GenerationEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload: list[str] = []
    add = engine._process.core.add_request_async

    async def add_and_note(request: Any) -> None:
        payload.append(request.request_id)
        await add(request)

    monkeypatch.setattr(engine._process.core, "add_request_async", add_and_note)
    stats_before = engine.stats().tokens_generated
    tasks = await queue_up(engine, 24)
    times = [await engine.load(models[version], version) for version in (1, 2, 0)]
    sequences = await asyncio.gather(*tasks)
    assert len(payload) == len(set(payload)) == 24
    assert sum(len(sequence.tokens) for sequence in sequences) == engine.stats().tokens_generated - stats_before
    assert all(len(s.tokens) == SAMPLING.max_new_tokens or s.tokens[-1] == EOS for s in sequences)
    for cost in times:
        assert 0 < cost.sequences_interrupted <= CONFIG.max_concurrent_rollouts
        limit = len(PROMPT) + SAMPLING.max_new_tokens
        assert len(PROMPT) < cost.tokens_recomputed / cost.sequences_interrupted < limit


async def test_without_interruption_what_runs_is_finished_and_what_waits_begins_under_the_new_weights(
    engine: GenerationEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.weights, "_config", CONFIG.model_copy(update={"interrupt": False}))
    tasks = await queue_up(engine, 24)
    load = asyncio.create_task(engine.load(models[1], 1))
    await until(lambda: engine.stats().running < CONFIG.max_concurrent_rollouts)
    late = asyncio.create_task(collect(engine.generate("late", PROMPT, SAMPLING)))
    cost = await load
    assert (cost.sequences_interrupted, cost.tokens_recomputed) == (0, 0)
    sequences = [*await asyncio.gather(*tasks), await late]
    assert [len(set(s.versions)) for s in sequences] == [1] * 25
    versions = [int(s.versions[0]) for s in sequences]
    assert versions.count(0) >= CONFIG.max_concurrent_rollouts
    assert versions.count(1) >= 4 and versions[-1] == 1
    for sequence, version in zip(sequences, versions, strict=True):
        expected = reference(models[version], PROMPT, sequence.tokens, SAMPLING.temperature)
        assert np.abs(expected - sequence.logprobs).max() < 1e-4


async def test_a_load_that_is_cancelled_while_sequences_finish_leaves_the_engine_as_it_was(
    engine: GenerationEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.weights, "_config", CONFIG.model_copy(update={"interrupt": False}))
    tasks = await queue_up(engine, 24)
    load = asyncio.create_task(engine.load(models[1], 1))
    await until(lambda: engine.stats().running < CONFIG.max_concurrent_rollouts)
    load.cancel()
    await asyncio.wait({load})
    async with asyncio.timeout(SECONDS):
        sequences = await asyncio.gather(*tasks)
    assert load.cancelled() and engine.version == 0
    assert all(set(s.versions) == {0} for s in sequences)


@pytest.mark.slow  # vLLM compiles what guesses
async def test_guessed_tokens_have_the_logprobs_and_versions_of_what_accepts_them(models: Models) -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    config = CONFIG.model_copy(update={"engine_options": {"speculative_config": guesses}})
    engine = await GenerationEngine.start(models[0], config, version=0)
    accepted = {"0": 0, "1": 0}  # tokens that were right guesses, by version
    deliver = engine._process._deliver

    def count_and_deliver(outputs: Any) -> None:
        if outputs.scheduler_stats is not None and (step := outputs.scheduler_stats.spec_decoding_stats) is not None:
            accepted[outputs.weight_version] += step.num_accepted_tokens
        deliver(outputs)

    engine._process._deliver = count_and_deliver
    sampling = SamplingConfig(temperature=0.3, max_new_tokens=400, min_new_tokens=400)
    prompts = [PROMPT[: 5 + 7 * i] for i in range(6)]
    progress: list[list[Generation]] = [[] for _ in prompts]
    tasks = [
        asyncio.create_task(collect(engine.generate("r", prompt, sampling), parts))
        for prompt, parts in zip(prompts, progress, strict=True)
    ]
    await until(lambda: all(progress) and accepted["0"] >= 8)
    cost = await engine.load(models[1], 1)
    sequences = await asyncio.gather(*tasks)
    await engine.close()
    assert cost.sequences_interrupted == 6
    assert accepted["1"] >= 8
    excess = variance = 0.0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.versions) == 400
        for version in (0, 1):
            expected = reference(models[version], prompt, sequence.tokens, sampling.temperature, without=EOS)
            part = sequence.versions == version
            assert part.any()
            assert np.abs(expected - sequence.logprobs)[part].max() < 1e-4
            assert np.abs(expected - sequence.logprobs)[~part].mean() > 0.1
            entropies, variances = surprises(models[version], prompt, sequence.tokens, sampling.temperature, EOS)
            excess -= (sequence.logprobs + entropies)[part].sum()
            variance += variances[part].sum()
    assert abs(excess) < 5 * variance**0.5  # they are drawn as often as their log-probs say


async def test_sequences_that_a_full_kv_cache_preempts_lose_no_token_and_have_the_logprobs_of_their_version(
    models: Models,
) -> None:
    """Ten blocks of KV cache for four sequences that need six each, and an update in the middle."""
    block = 2 * 2 * 2 * 32 * 4 * BLOCK_SIZE  # bytes: keys and values, layers, heads, head size, fp32
    sizes = {"max_model_len": 200, "kv_cache_gib": 10 * block / 2**30}
    engine = await GenerationEngine.start(models[0], CONFIG.model_copy(update=sizes), version=0)
    sampling = SamplingConfig(temperature=0.8, max_new_tokens=150, min_new_tokens=150)
    prompts = [PROMPT[i : 40 + i] for i in range(4)]  # no two share a block
    tasks = [asyncio.create_task(collect(engine.generate("r", prompt, sampling))) for prompt in prompts]
    await until(lambda: engine.stats().preemptions > 0)
    await engine.load(models[1], 1)
    sequences = await asyncio.gather(*tasks)
    await engine.close()
    assert 1 in np.concatenate([sequence.versions for sequence in sequences])
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.versions) == 150
        for version in set(sequence.versions.tolist()):
            part = sequence.versions == version
            expected = reference(models[version], prompt, sequence.tokens, sampling.temperature, without=EOS)
            assert np.abs(expected - sequence.logprobs)[part].max() < 1e-4


async def test_a_kept_kv_cache_serves_the_sequences_that_run_and_no_later_prompt(
    keeping: GenerationEngine, models: Models
) -> None:
    tasks = await queue_up(keeping, 24)
    cost = await keeping.load(models[1], 1)
    tasks.append(asyncio.create_task(collect(keeping.generate("later", PROMPT, SAMPLING))))
    sequences = await asyncio.gather(*tasks)
    through_both = [s for s in sequences if set(s.versions) == {0, 1}]
    later = [s for s in sequences if set(s.versions) == {1}]
    assert (
        len(through_both) >= 8 and len(later) >= 4
    )  # those that waited in the engine's queue, and one sent afterwards
    assert (cost.sequences_interrupted >= len(through_both), cost.tokens_recomputed) == (True, 0)
    for sequence in through_both:
        split = int((sequence.versions == 0).sum())
        old, new = (reference(models[v], PROMPT, sequence.tokens, SAMPLING.temperature) for v in (0, 1))
        stored = reference_on_old_cache(models[0], models[1], PROMPT, sequence.tokens, split)
        assert np.abs(old - sequence.logprobs)[:split].max() < 1e-4
        assert np.abs(stored - sequence.logprobs[split:]).max() < 1e-4
        assert np.abs(new - sequence.logprobs)[split:].mean() > 0.01
    for sequence in later:
        expected = reference(models[1], PROMPT, sequence.tokens, SAMPLING.temperature)
        assert np.abs(expected - sequence.logprobs).max() < 1e-4


async def test_an_engine_that_hands_over_gives_out_what_it_has_and_takes_nothing_more(
    engine: GenerationEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._sequences, "_handed_over", False)  # afterwards too: the module's engine is to go on
    begun = engine.stats()
    progress: list[list[Generation]] = [[] for _ in range(8)]
    readers = [asyncio.create_task(collect(engine.generate("r", PROMPT, ENDLESS), parts)) for parts in progress]

    async def all_have(chunks: list[int]) -> None:
        """But for those that happen to sample the end."""
        item = list(zip(readers, progress, chunks, strict=True))
        await until(lambda: all(len(parts) >= n or reader.done() for reader, parts, n in item))

    await all_have([3] * 8)
    await engine.load(models[1], 1)
    await all_have([len(parts) + 2 for parts in progress])
    going_on = [(reader, parts) for reader, parts in zip(readers, progress, strict=True) if not reader.done()]
    progress = [parts for _, parts in going_on]
    value_before = [b"".join(chunk.tokens.tobytes() for chunk in parts) for parts in progress]
    undelivered = sum(len(sequence.rows) for sequence in engine._sequences._sequences.values())
    engine.hand_over()
    assert len(going_on) >= 2
    for reader, _ in going_on:
        with pytest.raises(EngineError, match="handed over"):
            await reader

    delivered = sum(len(tokens) // 4 for tokens in value_before)
    assert sum(len(chunk.tokens) for parts in progress for chunk in parts) >= delivered + undelivered
    for parts, start in zip(progress, value_before, strict=True):
        tokens, logprobs, versions = (
            np.concatenate([getattr(chunk, name) for chunk in parts]) for name in ("tokens", "logprobs", "versions")
        )
        assert tokens.tobytes().startswith(start)
        assert len(tokens) == len(logprobs) == len(versions)
        assert [chunk.finish for chunk in parts] == [None] * len(parts)
        for version in (0, 1):
            part = versions == version
            expected = reference(models[version], PROMPT, tokens)
            assert part.any()
            assert np.abs(expected - logprobs)[part].max() < 1e-4
    with pytest.raises(EngineError, match="handed over"):
        await collect(engine.generate("r", PROMPT, SAMPLING))
    stats_after = await stats_at_rest(engine)
    assert stats_after.tokens_generated - begun.tokens_generated < 8 * (MAX_LEN - len(PROMPT))
    assert stats_after.preemptions == begun.preemptions  # what new weights stop is none


async def test_prompt_tokens_are_counted_and_those_that_an_earlier_sequence_left(engine: GenerationEngine) -> None:
    prompt = PROMPT[: 2 * BLOCK_SIZE + 5]
    stats_before = engine.stats()
    for name in ("first", "second"):
        await collect(engine.generate(name, prompt, SAMPLING))
    stats_after = engine.stats()
    assert stats_after.prefix_cache_queries - stats_before.prefix_cache_queries == 2 * len(prompt)
    assert stats_after.prefix_cache_hits - stats_before.prefix_cache_hits == 2 * BLOCK_SIZE


async def test_a_prefix_is_shared_with_the_same_user_alone_also_where_the_kv_cache_is_kept(
    keeping: GenerationEngine,
) -> None:
    prompt = [*PROMPT[: 2 * BLOCK_SIZE], 9]
    for keeps in (False, True):
        keeping.keeps_cache, hits = keeps, []
        for user in ("", "anna", "bert", "anna", ""):
            before = keeping.stats().prefix_cache_hits
            await collect(keeping.generate("call", prompt, SAMPLING, cache_salt=user and f"{user} {keeps}"))
            hits.append(keeping.stats().prefix_cache_hits - before)
        assert hits[1:] == [0, 0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE]


async def test_a_later_turn_reuses_the_kept_kv_cache_of_its_sample(keeping: GenerationEngine, models: Models) -> None:
    prompt = PROMPT[: 2 * BLOCK_SIZE + 5]
    turn = await collect(keeping.generate("first turn", prompt, SAMPLING))
    await keeping.load(models[1], 1)
    hits = []
    for first_version in (None, 0, 0):
        stats_before = keeping.stats().prefix_cache_hits
        await collect(keeping.generate("second turn", [*prompt, *turn.tokens], SAMPLING, first_version=first_version))
        hits.append(keeping.stats().prefix_cache_hits - stats_before)
    # The key and value of the turn's last token were never computed.
    assert hits == [0, *[(len(prompt) + len(turn.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE] * 2]


async def test_one_sequence_can_be_handed_over_while_the_others_go_on(engine: GenerationEngine) -> None:
    async def read(name: str) -> tuple[int, bool]:
        """Tokens, and whether they were all."""
        tokens = 0
        try:
            async for chunk in engine.generate(name, PROMPT, SamplingConfig(max_new_tokens=256, min_new_tokens=256)):
                tokens += len(chunk.tokens)
                begun.add(name)
        except EngineError:
            return tokens, False
        return tokens, True

    begun: set[str] = set()
    leaves, stays = asyncio.create_task(read("leaves")), asyncio.create_task(read("stays"))
    await until(lambda: begun == {"leaves", "stays"})
    engine.hand_over({"leaves"})
    tokens, complete = await leaves
    assert tokens > 0
    assert not complete
    assert (await stays)[1]
    assert engine.stats().preemptions == 0


async def test_the_death_of_the_engine_is_told_and_what_was_sampled_before_is_kept(
    engine: GenerationEngine, models: Models
) -> None:
    progress: list[Generation] = []
    sampling = SamplingConfig(max_new_tokens=900, min_new_tokens=900)
    running = asyncio.create_task(collect(engine.generate("r", PROMPT, sampling), progress))
    await until(lambda: bool(progress))
    for child in psutil.Process().children(recursive=True):
        if child.status() != psutil.STATUS_ZOMBIE and "EngineCore" in " ".join(child.cmdline()):
            child.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="The vLLM engine process died"):
        async with asyncio.timeout(SECONDS):
            await running
    assert sum(len(chunk.tokens) for chunk in progress) >= CONFIG.stream_interval
    with pytest.raises(EngineError):
        await engine.load(models[1], 1)
    with pytest.raises(EngineError):
        await collect(engine.generate("r", PROMPT, SAMPLING))
