"""The arithmetic of `python -m areal plan`, and what it makes of a command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from areal.__main__ import main
from areal.base.errors import UserError
from areal.config import Config, dump_config, load_config
from areal.config.engine_sections import WeightsConfig
from areal.config.trainer_section import TrainerConfig
from areal.extensions.desk import activations
from areal.extensions.desk import plan as command
from areal.extensions.desk.activations import Activations, measure_activations
from areal.extensions.desk.split import GIB, ModelSizes, Plan, Planner, Workload, training_memory
from areal.training.optimizer import bucket_elements

# DeepSeek-R1-Distill-Qwen 1.5B and 7B, from their config.json; bytes of activations as `measure_activations` has them.
SMALL_ACTIVATIONS = Activations(3_139_628, 3_181_352), Activations(95_760, 249_156)
SMALL = ModelSizes(1_777_088_000, 1_777_088_000, 28, 1536, 151_936, 2, 128, *SMALL_ACTIVATIONS)
LARGE_ACTIVATIONS = Activations(6_885_164, 7_048_488), Activations(222_736, 630_916)
LARGE = ModelSizes(7_615_616_512, 7_615_616_512, 28, 3584, 152_064, 4, 128, *LARGE_ACTIVATIONS)
PAPER_LENGTHS = {"prompt": 1024, "mean": 9300, "longest": 27 * 1024}
# 371.7 k tokens/s on 128 devices of which 96 generate: the paper's throughput, if neither pool ever waited.
PAPER = Workload(generation_rate=371_700 / 96, training_rate=371_700 / 32, **PAPER_LENGTHS)


MEASURED: dict[str, Activations] = {}


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """The activations of each model and each way to train it are measured once: it takes seconds."""

    def measure(sizes: Any, trainer: TrainerConfig, *, checkpointing: bool) -> Activations:
        key = f"{sizes.to_json_string()} {trainer.dtype} {trainer.lora} {checkpointing}"
        if key not in MEASURED:
            MEASURED[key] = measure_activations(sizes, trainer, checkpointing=checkpointing)
        return MEASURED[key]

    monkeypatch.setattr(command, "measure_activations", measure)


def config(**changes) -> Config:
    values = {
        "model": "m",
        "steps": 250,
        "batch_size": 512,
        "group_size": 16,
        "data": {"source": "rows.jsonl"},
        "sampling": {"max_new_tokens": 27 * 1024},
        "reward": {"functions": ["math"]},
        "trainer": {"dtype": "bfloat16"},
        "generator": {"dtype": "bfloat16", "max_concurrent_rollouts": 128},
    }
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    return Config.model_validate(values)


def paper(**changes) -> Plan:
    return Planner(config(**changes), SMALL, PAPER, 128, 80 * GIB).plan()


def test_the_papers_setting_gives_the_papers_split():
    split = paper()
    assert (split.generating_devices, split.ranks) == (96, 32)
    assert split.throughput == pytest.approx(371_700)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("rates", [(100, 1000), (1000, 100), (300, 310)])
def test_no_other_split_is_faster(tensor_parallel, rates):
    devices = 16
    settings = config(generator={"tensor_parallel": tensor_parallel})
    split = Planner(settings, SMALL, Workload(*rates, **PAPER_LENGTHS), devices, 80 * GIB).plan()
    assert split.generating_devices + split.ranks == devices
    for generating in range(tensor_parallel, devices, tensor_parallel):
        assert min(generating * rates[0], (devices - generating) * rates[1]) <= split.throughput


def test_a_split_whose_training_does_not_fit_is_not_taken():
    split = Planner(config(), LARGE, Workload(100, 10_000, 1024, 2000, 8192), 8, 80 * GIB).plan()
    assert split.ranks > 1  # one alone has no room for 18 bytes a parameter
    assert split.training.total <= 0.9 * 80 * GIB


def test_zero_divides_what_its_stage_says_by_the_ranks():
    def states(stage: int, **trainer) -> list[float]:
        memory = training_memory(config(trainer=trainer), LARGE, 8, stage, False, 2048)
        return [part / LARGE.parameters for part in (memory.weights, memory.gradients, memory.optimizer)]

    assert states(1) == pytest.approx([2, 6, 12 / 8])
    assert states(2) == pytest.approx([2, 4 / 8, 12 / 8])
    assert states(3) == pytest.approx([2 / 8, 4 / 8, 12 / 8])
    assert states(0, dtype="float32") == pytest.approx([4, 4, 8])
    assert states(2, offload="optimizer") == pytest.approx([2, 2 / 8, 0])
    assert states(3, offload="all", zero_stage=3) == pytest.approx([2 * 2 / 28, 2 / 8, 0])


def test_the_cheapest_stage_that_fits_is_taken_and_checkpointing_only_if_need_be():
    assert (paper().zero_stage, paper().gradient_checkpointing) == (1, True)  # 28k tokens alone would take 91 GB
    assert paper(trainer={"zero_stage": 3}).zero_stage == 3  # what the configuration wants is kept
    tight = Planner(config(), LARGE, PAPER, 128, 80 * GIB).plan()
    assert (tight.zero_stage, tight.gradient_checkpointing) == (2, True)
    roomy = Planner(config(), LARGE, PAPER, 128, 400 * GIB).plan()
    assert (roomy.zero_stage, roomy.gradient_checkpointing) == (1, False)


def test_ranks_that_compute_rows_together_share_the_tokens_and_are_whole_groups():
    alone, together = (
        training_memory(config(trainer={"sequence_parallel": n}), LARGE, 8, 2, True, 32768).activations for n in (1, 4)
    )
    assert together == alone / 4
    assert paper(trainer={"sequence_parallel": 24}).ranks % 24 == 0
    with pytest.raises(UserError, match=r"2 devices cannot be split .* in multiples of 2 .trainer.sequence_parallel."):
        Planner(config(trainer={"sequence_parallel": 2}), LARGE, PAPER, 2, 80 * GIB).plan()


def test_adapters_need_neither_gradients_nor_moments_of_the_model():
    adapters = ModelSizes(LARGE.parameters, 40_000_000, *(getattr(LARGE, n) for n in LARGE.__slots__[2:]))
    memory = training_memory(config(), adapters, 1, 1, True, 2048)
    assert memory.gradients + memory.optimizer == 18 * 40_000_000
    assert memory.weights == 2 * LARGE.parameters


def test_a_penalty_takes_a_second_model_unless_adapters_can_be_put_aside():
    def reference(**trainer) -> float:
        return training_memory(config(trainer=trainer), LARGE, 1, 1, True, 2048).reference

    assert reference() == 0
    assert reference(kl_coef=0.1) == 2 * LARGE.parameters
    assert reference(kl_coef=0.1, lora={}) == 0
    assert reference(kl_coef=0.1, lora={}, reference="/other") == 2 * LARGE.parameters
    run = config(trainer={"kl_coef": 0.1})
    trainer = run.trainer.model_copy(update={"reference": "scorer:other"})
    assert training_memory(run.model_copy(update={"trainer": trainer}), LARGE, 1, 1, True, 2048).reference == 0


def test_activations_grow_with_the_longest_sequence_where_it_is_above_the_cap():
    def activations(longest: int) -> float:
        return training_memory(config(), SMALL, 1, 1, True, longest).activations

    assert activations(1) == activations(16384)
    assert activations(3 * 16384) - activations(2 * 16384) == activations(2 * 16384) - activations(16384) > 0


def test_one_of_a_fixed_number_of_microbatches_may_hold_nothing_but_the_longest():
    def activations(longest: int, **trainer) -> float:
        return training_memory(config(trainer=trainer), SMALL, 32, 3, True, longest).activations

    # 512 * 16 sequences, of which a rank has 64 in each of 4 minibatches.
    assert activations(10_000, microbatches=16) == activations(1, max_tokens_per_microbatch=40_000)
    assert activations(10_000, microbatches=100) == activations(1, max_tokens_per_microbatch=10_000)


def test_a_generators_kv_is_what_its_sequences_take_at_full_length():
    settings = config(generator={"tensor_parallel": 2, "max_concurrent_rollouts": 10})
    split = Planner(settings, LARGE, Workload(1, 1, 1024, 5000, 15 * 1024), 8, 80 * GIB).plan()
    weights, step, overhead, room, of_sequence = split.generation.values()
    assert of_sequence == 16384 * 57_344 / 2
    assert weights == LARGE.parameters
    assert weights + step + overhead + room == pytest.approx(0.9 * 80 * GIB)
    assert split.sequences == 10


def test_a_token_is_on_every_device_where_there_are_fewer_heads_than_devices():
    def wanted(tensor_parallel: int) -> float:
        generator = {"tensor_parallel": tensor_parallel}
        planner = Planner(config(generator=generator), LARGE, Workload(1, 1, 1, 1, 1), 16, 80 * GIB)
        return planner.generation_memory()["KV cache of a sequence of full length"]

    assert wanted(8) == wanted(4) == wanted(1) / 4


def test_two_devices_are_enough_and_one_is_shared_if_the_engine_needs_no_more():
    split = Planner(config(), SMALL, Workload(1, 100, **PAPER_LENGTHS), 2, 141 * GIB).plan()
    assert (split.generators, split.ranks) == (1, 1)
    shared = Planner(config(), SMALL, Workload(200, 300, 512, 500, 1024), 1, 80 * GIB).plan()
    assert (shared.generators, shared.ranks, shared.throughput) == (1, 1, pytest.approx(120))
    assert shared.overrides["generator.memory_share"] == "0.3"
    assert sum([*shared.generation.values()][:-1]) == pytest.approx(0.3 * 80 * GIB)
    assert shared.training.total <= 0.6 * 80 * GIB
    with pytest.raises(UserError, match="1 devices cannot be split into generators of 2 devices"):
        Planner(config(generator={"tensor_parallel": 2}), SMALL, PAPER, 1, 80 * GIB).plan()


def test_a_bucket_is_as_large_as_a_layers_largest_weight_and_at_most_as_deepspeeds_own():
    layers = {
        f"model.layers.{n}.{name}": size for n in range(36) for name, size in (("q", 16_777_216), ("up", 60_000_000))
    }
    assert bucket_elements({"model.embed_tokens": 622_329_856, **layers}) == 60_000_000
    assert bucket_elements({"model.layers.0.experts": 805_306_368}) == 500_000_000
    assert bucket_elements({"model.layers.0.q": 4096, "lm_head": 8192}) == 12_288  # it is never full
    assert bucket_elements({f"model.layers.{n}.q": 16_777_216 for n in range(28)}) == 50_000_000


def test_buckets_are_planned_as_deepspeed_makes_them():
    def buckets(stage: int, ranks: int = 8, **trainer) -> float:
        return training_memory(config(trainer=trainer), LARGE, ranks, stage, True, 2048).buckets

    assert buckets(1) == 4 * LARGE.bucket
    assert buckets(2) == (2 + 4) * LARGE.bucket
    assert buckets(3) == 4 * LARGE.bucket + 2 * 10**9  # and what is gathered
    assert buckets(2, dtype="float32") == 4 * LARGE.bucket
    assert (buckets(0, dtype="float32"), buckets(0, ranks=1, dtype="float32")) == (4 * 500_000_000, 0)


def test_the_experts_of_a_layer_are_gathered_and_their_gradients_sent_whole():
    """Of Qwen3-235B-A22B: 128 experts, each with two matrices of 4096 x 1536 that are one, and a third."""
    expert = 128 * 4096 * 1536
    experts = replace(LARGE, parameters=235 * 10**9, trained=235 * 10**9, bucket=500_000_000)
    stacked = replace(experts, part=3 * expert, part_tensor=2 * expert)

    def buckets(model: ModelSizes, stage: int) -> float:
        return training_memory(config(), model, 64, stage, True, 2048).buckets

    assert buckets(experts, 3) == 4 * 500_000_000 + 2 * 10**9
    assert buckets(stacked, 3) == 4 * 2 * expert + 2 * 3 * expert + 2 * 3 * expert
    assert 10 * GIB < buckets(stacked, 3) - buckets(experts, 3) < 14 * GIB
    assert buckets(stacked, 2) == (2 + 4) * 2 * expert
    frozen = replace(stacked, trained=10**7)
    assert buckets(frozen, 3) == 4 * 10**7 + 2 * 3 * expert
    small = replace(stacked, part=3 * 10**8, part_tensor=2 * 10**8)
    assert buckets(small, 3) == 4 * 500_000_000 + 2 * 2 * 10**8 + 2 * 10**9


def test_the_gradients_of_experts_do_not_grow_with_the_number_of_tokens(monkeypatch):
    sizes = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    )
    peaks = []
    for tokens in (1021, 8167):
        monkeypatch.setattr(activations, "TOKENS", tokens)
        peaks.append(measure_activations(sizes, TrainerConfig(dtype="bfloat16"), checkpointing=True).peak)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    in_fp32 = measure_activations(sizes, TrainerConfig(dtype="float32"), checkpointing=True)
    assert in_fp32.peak == 2 * peaks[1]


# Qwen3-30B-A3B and Qwen3-235B-A22B, from their config.json, as `areal plan` reads them.
EXPERTS_30B = {"bucket": 402_653_184, "part": 603_979_776, "part_tensor": 402_653_184, "largest": 402_653_184}
QWEN_30B = ModelSizes(
    *(30_532_122_624, 30_532_122_624, 48, 2048, 151_936, 4, 128),
    *(Activations(10_440_780, 10_534_988), Activations(209_424, 520_796)),
    **{"intermediate": 6144, **EXPERTS_30B},
)
ADAPTED_30B = replace(QWEN_30B, trained=26_738_688)
EXPERTS_235B = {"bucket": 500_000_000, "part": 2_415_919_104, "part_tensor": 1_610_612_736, "largest": 1_610_612_736}
QWEN_235B = ModelSizes(
    *(235_093_634_560, 235_093_634_560, 94, 4096, 151_936, 4, 128),
    *(Activations(40_492_020, 40_680_440), Activations(795_152, 1_413_984)),
    **{"intermediate": 12_288, **EXPERTS_235B},
)
OFFLOADED, LORA = {"offload": "optimizer"}, {"lora": {"rank": 32, "target_modules": ["q_proj"]}}
REFERENCE = {"kl_coef": 0.001, "reference": "other"}
PUBLISHED = {
    "verl 30B, 8 of 96 GiB": (QWEN_30B, 8, 8, 4, 96, 2048, 8192, 10_240, OFFLOADED, 2),
    "verl 30B, 32": (QWEN_30B, 32, 32, 4, 80, 1024, 2048, 12_288, REFERENCE, 3),
    "verl 235B, 32 of 96 GiB": (QWEN_235B, 32, 32, 8, 96, 2048, 9632, 11_680, OFFLOADED | REFERENCE, 3),
    "verl 235B, 256 of 96 GiB": (QWEN_235B, 256, 256, 8, 96, 2048, 4096, 6144, {}, 3),
    "slime 30B, 8": (QWEN_30B, 8, 8, 8, 80, 2048, 8192, 20_480, OFFLOADED, 3),
    "slime 30B by FSDP, 8": (QWEN_30B, 8, 8, 8, 80, 2048, 8192, 20_480, {}, None),
    "slime 235B, 64 and 64": (QWEN_235B, 64, 64, 8, 80, 2048, 8192, 16_384, OFFLOADED, 3),
    "prime-rl 30B, 16 and 16": (QWEN_30B, 16, 16, 8, 80, 1024, 130_048, 131_072, {"sequence_parallel": 2}, 3),
    # Which has 8 and 8: those that train would need 78 GiB of 72.
    "prime-rl 30B, 16": (QWEN_30B, 12, 4, 4, 80, 1024, 31_744, 32_768, {"sequence_parallel": 2}, 3),
    "NeMo-RL 30B, 16 and 16": (QWEN_30B, 16, 16, 4, 80, 1024, 3072, 4096, {}, 3),
    "NeMo-RL 235B, 128 and 128": (QWEN_235B, 128, 128, 8, 80, 1024, 7168, 8192, {"sequence_parallel": 2}, 3),
    "AReaL 30B, 6 and 2": (ADAPTED_30B, 6, 2, 2, 80, 1024, 1024, 10_240, LORA, 1),
}
"""Settings of other systems, most by tensor and expert parallelism: the model, the devices that train and that generate
(where they take turns, as many each), the size of an engine, the memory of a device in GiB, the tokens of a prompt, of
a completion and of a micro-batch, and the stage of ZeRO at which training fits here; None: it does not."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_of_what_others_run(name):
    model, training, generating, engine, memory, prompt, longest, tokens, changes, stage = PUBLISHED[name]
    work = Workload(1 / generating, 1 / training, prompt, longest / 4, longest)

    def planned(**trainer) -> Plan:
        trainer |= {"max_tokens_per_microbatch": tokens, **changes}
        settings = config(trainer=trainer, generator={"tensor_parallel": engine}, sampling={"max_new_tokens": longest})
        return Planner(settings, model, work, training + generating, memory * GIB).plan()

    if stage is None:
        with pytest.raises(UserError, match="Training does not fit"):
            planned()
        assert planned(**OFFLOADED).training.total < 0.6 * memory * GIB
    else:
        split = planned()
        assert (split.ranks, split.generating_devices, split.zero_stage) == (training, generating, stage)


DIVIDED_30B = replace(QWEN_30B, experts=48 * 603_979_776)
DENSE_32B = replace(LARGE, parameters=32_762_123_264, trained=32_762_123_264, inner=31_205_621_760, layers=64)


def divided(model: ModelSizes, **trainer) -> tuple[ModelSizes, Config]:
    return model, config(trainer={"dtype": "bfloat16", "max_tokens_per_microbatch": 16_384, **trainer})


def test_divided_weights_are_fewer_on_a_rank_at_each_stage_of_zero():
    def weights(stage: int, ranks: int, model: ModelSizes, **trainer) -> float:
        model, settings = divided(model, **trainer)
        return training_memory(settings, model, ranks, stage, True, 2048).weights / 2

    others = QWEN_30B.parameters - DIVIDED_30B.experts
    assert weights(1, 16, DIVIDED_30B, expert_parallel=8) == pytest.approx(others + DIVIDED_30B.experts / 8)
    assert weights(3, 16, DIVIDED_30B, expert_parallel=8) == pytest.approx(QWEN_30B.parameters / 16)
    outer = DENSE_32B.parameters - DENSE_32B.inner
    assert weights(2, 8, DENSE_32B, tensor_parallel=4) == pytest.approx(outer + DENSE_32B.inner / 4)
    assert weights(3, 8, DENSE_32B, tensor_parallel=4) == pytest.approx(outer / 2 + DENSE_32B.inner / 8)


def test_a_layers_experts_are_gathered_as_parts_where_they_are_divided():
    def buckets(**trainer) -> float:
        model, settings = divided(replace(DIVIDED_30B, parameters=10**9), **trainer)
        return training_memory(settings, model, 16, 3, True, 2048).buckets

    assert buckets(expert_parallel=8) < buckets()


def test_ranks_are_whole_groups_of_all_kinds():
    settings = config(trainer={"sequence_parallel": 2, "expert_parallel": 3})
    with pytest.raises(UserError, match=r"trainer ranks in multiples of 6 .trainer.sequence_parallel, trainer.expert_"):
        Planner(settings, LARGE, PAPER, 6, 80 * GIB).plan()


def test_weights_that_are_sent_directly_take_what_the_packs_of_two_transfers_take():
    largest = 622_329_856  # embedding of Qwen3-8B: 151,936 x 4,096
    model = replace(LARGE, largest=largest)

    def sending(transport: str) -> float:
        settings = config().model_copy(update={"weights": WeightsConfig(transport=transport)})
        return training_memory(settings, model, 2, 2, True, 2048).buckets - 6 * model.bucket

    assert [sending(name) for name in ("folder", "stream")] == [0, 0]
    assert sending("direct") == 2 * (16 * 2**20 + 2 * largest)


def test_a_step_of_an_engine_has_the_tokens_that_vllm_takes_for_throughput():
    model = replace(LARGE, intermediate=18_944)

    def step(device: int, **generator) -> float:
        settings = config(generator={"max_concurrent_rollouts": 10} | generator)
        return Planner(settings, model, Workload(1, 1, 1, 1, 1), 16, device * GIB).generation_memory()["step"]

    logits = 10 * 3 * 4 * model.vocabulary
    assert step(80) == 2 * 16_384 * (4 * 3584 + 3 * 18_944) + logits
    assert step(48) == 2 * 8192 * (4 * 3584 + 3 * 18_944) + logits
    assert step(80, tensor_parallel=4) == 2 * 16_384 * (4 * 3584 + 3 * 18_944 / 4) + logits
    assert step(80, engine_options={"max_num_batched_tokens": 2048}) == (step(80) - logits) / 8 + logits


@pytest.mark.parametrize(
    ("memory", "trainer", "sentence"),
    [
        (10, {}, "raise generator.tensor_parallel"),
        (24, {}, r"Training does not fit: on 1 devices each .* take trainer.offload=optimizer, trainer.lora, more"),
        (24, {"offload": "optimizer"}, r"Training does not fit: on 1 devices each .* take trainer.lora, more"),
    ],
)
def test_what_does_not_fit_is_told_with_what_to_do(memory, trainer, sentence):
    with pytest.raises(UserError, match=sentence):
        Planner(config(trainer=trainer), LARGE, Workload(1, 1, 512, 500, 1024), 2, memory * GIB).plan()


# --- the tool


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose model is the config.json of a small Qwen3 with 4 layers."""
    sizes = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    path = tmp_path / "run.yaml"
    changes = {"model": str(tmp_path / "model"), "sampling": {"max_new_tokens": 512}}
    path.write_text(dump_config(config(**changes)))
    return path


RATES = ["--generation-rate", "1000", "--training-rate", "3000", "--mean-tokens", "200"]
SIZES = ["--devices", "16", "--device-memory", "80"]


def test_the_tool_prints_changes_that_the_configuration_takes(file, capsys):
    assert main(["plan", "--config", str(file), *SIZES, *RATES]) == 0
    output = capsys.readouterr().out
    assert "12 (75%)" in output
    overrides = output.splitlines()[-1].split()
    planned = load_config(file, overrides)
    assert (planned.generator.count, planned.trainer.ranks) == (12, 4)


def test_scorers_have_devices_beside_the_split(file, capsys):
    model = load_config(file).model
    scorers = [f"scorers.wise={{model: {model}, count: 2, tensor_parallel: 2}}", "trainer.teacher=wise"]
    assert main(["plan", "--config", str(file), *SIZES, *RATES, *scorers]) == 0
    output = capsys.readouterr().out
    assert "The scorers (wise, wise) have 4 more devices of the 16." in output
    assert load_config(file, output.splitlines()[-1].split()).generator.count == 9  # three quarters of 12


def test_a_model_is_counted_from_its_config_json(file, monkeypatch):
    attention = 64 * (4 * 32) * 2 + 64 * (2 * 32) * 2 + 2 * 32
    layer = attention + 3 * 64 * 128 + 2 * 64
    model = command.read_model(load_config(file))
    parameters = 4 * layer + 1000 * 64 + 64
    shapes = [1000 * 64, 64]  # embeddings, which are the head, and the last norm
    shapes += 4 * [64 * 128, 128 * 64, 64 * 64, 64 * 64, 32, 32, 64, 64, *3 * [64 * 128]]
    assert sum(shapes) == parameters
    activations = model.activations, model.checkpointed
    sizes = ModelSizes(parameters, parameters, 4, 64, 1000, 2, 32, *activations, 128, parameters, 1000 * 64)
    inner = 4 * (attention - 2 * 32 + 3 * 64 * 128)
    assert model == replace(sizes, part=64 * 128, part_tensor=64 * 128, inner=inner)
    # In each layer, in bf16: the input, and what norms, projections, attention and the MLP keep of their inputs.
    assert model.checkpointed.saved < model.activations.saved / 10 < model.activations.peak / 10
    assert model.checkpointed.saved >= 2 * 64 * 4
    adapted = command.read_model(load_config(file, ["trainer.lora.rank=8", "trainer.lora.target_modules=[q_proj]"]))
    assert adapted.trained == 4 * 8 * (64 + 128)
    everywhere = 64 + 128 + 2 * (64 + 64) + 128 + 64 + 3 * (64 + 128)
    monkeypatch.setattr(command, "measure_activations", lambda *_, checkpointing: activations[checkpointing])
    assert command.read_model(load_config(file, ["trainer.lora.rank=8"])).trained == 4 * 8 * everywhere


def test_a_model_whose_frequencies_follow_from_the_longest_position_is_counted_as_any_other(file, tmp_path):
    from areal.extensions.desk.plan import read_model

    folder = Path(load_config(file).model)
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 16, "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(load_config(file, [f"model={tmp_path}"])) == read_model(load_config(file))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "nowhere.yaml", *SIZES, *RATES], "There is no configuration file"),
        (["--config", "FILE", "--devices", "0", "--device-memory", "80", *RATES], "--devices is 0"),
        (["--config", "FILE", "--devices", "4", "--device-memory", "nan", *RATES], "--device-memory is nan"),
        (["--config", "FILE", *SIZES, *RATES, "sampling.max_new_tokens=100"], "longer than sampling.max_new_tokens"),
        (["--config", "FILE", *SIZES, *RATES, "model=quickstart"], "name its folder by model=FOLDER"),
        (["--config", "FILE", *SIZES, *RATES, "colocate=true"], "colocate=false"),
        (["--config", "FILE", *SIZES, *RATES, "model=./nowhere"], "There is no model folder ./nowhere"),
        (["--config", "FILE", *SIZES, *RATES, "generator.count=0"], "generator.count"),
    ],
)
def test_a_mistake_gets_one_sentence(file, capsys, arguments, sentence):
    assert main(["plan", *(str(file) if word == "FILE" else word for word in arguments)]) == 2
    output = capsys.readouterr()
    assert sentence in output.err and output.err.count("\n") == 1 and not output.out
