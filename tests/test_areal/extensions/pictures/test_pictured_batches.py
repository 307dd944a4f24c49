"""Pictures in prompts: the trainer computes what the whole model of transformers does, sequence by sequence."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from support.tiny_pictures import END, PLACEHOLDER, START, png, prompt_with
from support.tiny_training import SIZES, TEMPERATURE, assert_same_gradients, settings, step_and_gradients

from areal.base.errors import UserError
from areal.extensions.pictures.picture_files import part_of
from areal.extensions.pictures.picture_store import PictureStore
from areal.extensions.pictures.vision import sight_of
from areal.models import packages_of_vision
from areal.samples.pictures import digest_of, digests_in
from areal.samples.trajectory import Branch, Group, Trajectory
from areal.training.training_engine import TrainingEngine

TOWER = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
QWEN = {"num_heads": 2, "out_hidden_size": 32}
IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 6, "vision_start_token_id": START, "vision_end_token_id": END}
# Of each type of model: what its tower has besides, how rotary angles are divided, and other sizes of its text.
KINDS = {
    "qwen2_5_vl": (
        {**QWEN, "depth": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        {"mrope_section": [1, 1, 2]},
        {},
    ),
    "qwen3_vl": (
        {**QWEN, "depth": 3, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        {"head_dim": 16},
    ),
    "smolvlm": (
        {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16},
        {},
        {"model_type": "llama"},
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """The folder of a tiny model that sees."""
    folder, (tower, rotary, more) = tmp_path_factory.mktemp("model"), KINDS[request.param]
    torch.manual_seed(0)
    rotary = {"rope_type": "default", "rope_theta": 10000.0, **rotary}
    text = {**SIZES, **more, "max_position_embeddings": 256, "rope_parameters": rotary, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(
        request.param, text_config=text, vision_config={**TOWER, **tower}, tie_word_embeddings=False, **IDS
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    unit = 2 * tower["patch_size"]
    sizes = {"min_pixels": unit**2, "max_pixels": 16 * unit**2, "patch_size": tower["patch_size"], "merge_size": 2}
    if request.param == "smolvlm":
        sizes = {"do_image_splitting": False, "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


def sample(pictures, sight, rng, begin):
    """A sample of a prompt as of `prompt_with`."""
    prompt = prompt_with(pictures, sight, begin)
    seen = sight.column(np.array(prompt), [*map(part_of, pictures)])
    answer = rng.integers(10, 36, int(rng.integers(4, 9))).tolist()
    versions = np.array([-1] * len(prompt) + [3] * len(answer), np.int32)
    logprobs = np.where(versions >= 0, rng.normal(-3.5, 0.3, len(versions)), 0).astype(np.float32)
    seen = np.zeros((len(prompt), 16), np.uint8) if seen is None else seen
    seen = np.concatenate([seen, np.zeros((len(answer), 16), np.uint8)])
    tokens = np.array(prompt + answer, np.int32)
    return Trajectory(tokens, logprobs, versions, float(rng.random()), "stop", pictures=seen)


def branching(trajectory, rng):
    """The sample with more calls of the policy: one that goes on from its picture, one from the middle of its answer,
    and one without the picture, which samples a placeholder."""
    prompt, columns = int((trajectory.versions < 0).sum()), [trajectory]
    branches = [Branch(0, len(trajectory)), Branch(prompt - 2, 5), Branch(prompt + 1, 6), Branch(1, 7)]
    for branch in branches[1:]:
        versions = np.array([-1, *[3] * (branch.new - 1)], np.int32)
        logprobs = np.where(versions >= 0, rng.normal(-3.5, 0.3, branch.new), 0).astype(np.float32)
        tokens, seen = rng.integers(10, 36, branch.new).astype(np.int32), np.zeros((branch.new, 16), np.uint8)
        columns.append(Trajectory(tokens, logprobs, versions, 0.0, "stop", pictures=seen))
    names = ("tokens", "logprobs", "versions", "pictures")
    arrays = {name: np.concatenate([getattr(c, name) for c in columns]) for name in names}
    arrays["tokens"][-1] = PLACEHOLDER
    return replace(trajectory, **arrays, branches=tuple(branches))


@pytest.fixture(scope="module")
def batch(model, tmp_path_factory):
    """Groups, and the folder of their pictures: two samples that share a picture, two with two of different sizes,
    one without a picture, two that branch."""
    rng, sight = np.random.default_rng(0), sight_of(str(model))
    wide, tall = png(84, 56, 1), png(30, 150, 2)
    store = PictureStore(tmp_path_factory.mktemp("run") / "pictures")
    store.put_all([wide, tall])
    groups = []
    for number, (pictures, count) in enumerate([([wide], 2), ([tall, wide], 2), ([], 1), ([tall, wide], 2)]):
        samples = [sample(pictures, sight, rng, [1, number + 20]) for _ in range(count)]
        if number == 3:
            samples = [branching(t, rng) for t in samples]
        groups.append(Group(str(number), number, tuple(samples)))
    return groups, store


def stock_logprobs(model, trajectory, pictures, sight):
    """log pi of all tokens but the first, from the sequence by itself, as the wrapper computes it with its own
    positions."""
    tokens = torch.from_numpy(trajectory.tokens).long()[None]
    kinds = ((tokens == PLACEHOLDER) & torch.from_numpy(trajectory.versions < 0)).int()
    tiles = "smolvlm" in model.config.model_type
    more = {} if tiles else {"mm_token_type_ids": kinds}
    if kinds.any() and tiles:
        more["pixel_values"] = torch.from_numpy(np.stack([sight.look(p).patches for p in pictures])).double()
        more["pixel_values"] = more["pixel_values"].view(1, len(pictures), 3, 64, 64)
    elif kinds.any():
        looked = [sight.look(picture) for picture in pictures]
        more["pixel_values"] = torch.from_numpy(np.concatenate([p.patches for p in looked])).double()
        more["image_grid_thw"] = torch.tensor([p.grid for p in looked])
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **more).logits[0, :-1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def stock(model):
    return transformers.AutoModelForImageTextToText.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager"
    )


def training_engine(model, store, **changes):
    return TrainingEngine(model, settings(max_tokens_per_microbatch=96, **changes), seed=0, pictures=store.folder)


@pytest.mark.parametrize("changes", [{"prefix_tree": True, "gradient_checkpointing": True}, {"prefix_tree": False}])
def test_logprobs_and_gradients_are_those_of_the_whole_model(model, batch, changes):
    (groups, store), whole = batch, stock(model)
    engine = training_engine(model, store, **changes)
    computed = torch.from_numpy(engine.logprobs(groups, temperature=TEMPERATURE))
    _, gradients = step_and_gradients(engine, groups)
    engine.close()
    rewards = np.array([t.reward for group in groups for t in group.trajectories])
    sequences = [sequence for group in groups for t in group.trajectories for sequence in t.sequences()]
    expected, loss, count = [], torch.zeros(()), 0
    for t in sequences:
        pictures = [store.get(name) for name in digests_in(t.pictures)]
        logp, sampled = stock_logprobs(whole, t, pictures, sight_of(str(model))), torch.from_numpy(t.sampled[1:])
        expected.append(torch.cat([torch.zeros(1), logp.detach() * sampled]))
        ratio = torch.exp(logp.detach() - torch.from_numpy(t.logprobs)[1:])
        loss = loss - (ratio * logp * (t.reward - rewards.mean()) / (rewards.std() + 1e-6))[sampled].sum()
        count += int(sampled.sum())
    torch.testing.assert_close(computed.double(), torch.cat(expected), rtol=0, atol=1e-5)
    (loss / count).backward()
    body = "text_model" if "smolvlm" in whole.config.model_type else "language_model"
    found = {name.replace("model.", f"model.{body}.", 1): gradient for name, gradient in gradients.items()}
    exact = {n: p.grad.float() for n, p in whole.named_parameters() if n.startswith((f"model.{body}.", "lm_head."))}
    assert_same_gradients(found, exact)


def test_a_picture_that_a_later_turn_shows_counts_as_in_the_whole_model(model, batch):
    (groups, store), rng, sight = batch, np.random.default_rng(1), sight_of(str(model))
    second = groups[0].trajectories[0]
    (wide,) = map(store.get, digests_in(second.pictures))
    first = rng.integers(10, 36, 5).tolist()  # what was sampled before the picture is shown
    tokens = np.array([1, 20, 4, 9, *first, *second.tokens[1:]], np.int32)
    versions = np.array([-1] * 4 + [3] * 5 + second.versions[1:].tolist(), np.int32)
    seen = np.concatenate([np.zeros((8, 16), np.uint8), second.pictures])
    turns = Trajectory(tokens, np.zeros(len(tokens), np.float32), versions, 1.0, "stop", pictures=seen)
    group = replace(groups[0], trajectories=(turns, groups[0].trajectories[1]))
    engine = training_engine(model, store)
    computed = torch.from_numpy(engine.logprobs([group], temperature=TEMPERATURE))[: len(tokens)]
    engine.close()
    expected = stock_logprobs(stock(model), turns, [wide], sight).detach()
    sampled = torch.from_numpy(turns.sampled)
    torch.testing.assert_close(computed.double()[sampled], expected[sampled[1:]], rtol=0, atol=1e-5)


def test_a_placeholder_that_was_sampled_is_a_token_like_any_other(model, batch):
    groups, store = batch
    engine = training_engine(model, store)
    expected = engine.logprobs(groups[:1], temperature=TEMPERATURE)
    (first, *others), last = groups[0].trajectories, len(groups[0].trajectories[0]) - 1
    tokens = first.tokens.copy()
    tokens[last] = PLACEHOLDER  # nothing comes after it
    changed = replace(groups[0], trajectories=(replace(first, tokens=tokens), *others))
    computed = engine.logprobs([changed], temperature=TEMPERATURE)
    engine.close()
    np.testing.assert_allclose(np.delete(computed, last), np.delete(expected, last), atol=1e-6)
    assert computed[last] != expected[last]


def test_a_batch_whose_tokens_do_not_stand_for_its_pictures_is_refused(model, batch):
    groups, store = batch
    engine = training_engine(model, store)
    first, second = groups[1].trajectories
    places = np.flatnonzero(first.pictures.any(1))
    for count in (1, len(places) - 1):
        cut = first.pictures.copy()
        cut[places[count:]] = 0
        with pytest.raises(ValueError, match="are not as many as it has parts"):
            engine.logprobs([replace(groups[1], trajectories=(replace(first, pictures=cut), second))], temperature=1.0)
    engine.close()


def test_a_picture_is_processed_once_for_all_batches(model, batch, monkeypatch):
    (groups, store), read, get = batch, [], PictureStore.get
    monkeypatch.setattr(PictureStore, "get", lambda self, name: (read.append(name), get(self, name))[1])
    engine = training_engine(model, store)
    first, again = (engine.logprobs(groups, temperature=TEMPERATURE) for _ in range(2))
    engine.close()
    assert (first == again).all() and sorted(read) == sorted({*read}) and len(read) == 2


def test_a_picture_that_changed_on_disk_is_refused(model, batch, tmp_path):
    store = PictureStore(tmp_path / "pictures")
    store.put_all([png(30, 30, 3)])
    (file,) = store.folder.iterdir()
    file.write_bytes(png(30, 30, 4))
    with pytest.raises(UserError, match="is damaged"):
        store.get(file.name)


def test_several_threads_may_store_the_same_pictures(tmp_path):
    store, contents = PictureStore(tmp_path / "pictures"), [bytes([n]) * (1 << 16) for n in range(32)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(store.put_all, [contents] * 4))
    assert [store.get(digest_of(content)) for content in contents] == contents
    assert len([*store.folder.iterdir()]) == len(contents)


def test_as_many_placeholders_are_written_as_the_processor_makes_parts(model):
    sight = sight_of(str(model))
    for width, height in [(28, 28), (5, 40), (84, 56), (30, 150), (400, 200), (1000, 9), (57, 57)]:
        assert sight.tokens(width, height) == sight.look(png(width, height, 0)).tokens


def test_smolvlm_sees_a_picture_as_one_square_or_not_at_all(tmp_path):
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    (tmp_path / "config.json").write_text('{"model_type": "smolvlm", "image_token_id": 5, "scale_factor": 4}')
    with pytest.raises(UserError, match="set do_image_splitting to false in its preprocessor_config.json"):
        sight_of(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text('{"do_image_splitting": false}')
    assert packages_of_vision(tmp_path) == ["torchvision", "num2words"]
    whole = get_image_prompt_string(0, 0, 1, "<fake_token_around_image>", "<image>", "<global-img>")
    assert sight_of(str(tmp_path)).expand("a <image> b", [(30, 40)]) == f"a {whole} b"
