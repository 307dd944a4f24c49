"""The trainer's log-probs among the words that sampling kept, against float64, one sequence at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.small_runs import ten_steps
from support.tiny_training import (
    TEMPERATURE,
    VOCAB,
    assert_same_gradients,
    eager,
    make_batch,
    make_forest,
    make_model,
    make_tree,
    settings,
    step_and_gradients,
)

from areal.base.errors import UserError
from areal.models import MOST_KEPT, MOST_TOP_K, kept_words_of
from areal.samples.table import NO_WORD
from areal.samples.trajectory import Trajectory, check_kept_words
from areal.training.training_engine import TrainingEngine

WIDTH = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def with_kept_words(batch, seed=0):
    """The batch, each sampled token with itself and up to WIDTH - 1 other words."""
    random = np.random.default_rng(seed)

    def kept(trajectory):
        words, most = np.full((len(trajectory), WIDTH), NO_WORD, np.int32), random.integers(1, WIDTH)
        for place in np.flatnonzero(trajectory.sampled):
            count, token = random.integers(0, most + 1), trajectory.tokens[place]
            rest = random.permutation(np.delete(np.arange(VOCAB), token))[:count]
            words[place, : count + 1] = random.permutation([token, *rest])
        return replace(trajectory, kept_words=words)

    return [replace(group, trajectories=tuple(map(kept, group.trajectories))) for group in batch]


def distributions(model, sequence):
    """log pi of all words but those left out, float64 [T - 1, VOCAB], of every token but the first."""
    logits = model(input_ids=torch.from_numpy(sequence.tokens).long()[None]).logits[0, :-1] / TEMPERATURE
    allowed = torch.zeros(logits.shape, dtype=torch.bool)
    for place, words in enumerate(sequence.kept_words[1:]):
        allowed[place, words[words != NO_WORD]] = True
    allowed |= ~allowed.any(1, keepdim=True)  # a token that was not sampled has no such words
    return logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)


def exact(folder, batch, entropy_coef):
    """The gradients of -1/N sum_t (w_t A_t u_t + entropy_coef H_t) at u = 1, and log-probs of all sampled tokens, by
    float64."""
    model = eager(folder, torch.float64)
    samples = [t for group in batch for t in group.trajectories]
    credits = [np.array([t.reward]) if t.returns is None else t.returns[t.sampled] for t in samples]
    mean = np.mean([credit.mean() for credit in credits])
    std = np.sqrt(np.mean([((credit - mean) ** 2).mean() for credit in credits]))
    loss, count, found = torch.zeros((), dtype=torch.float64), 0, []
    for sequence in (sequence for sample in samples for sequence in sample.sequences()):
        trained = torch.from_numpy(sequence.sampled)[1:]
        all_words = distributions(model, sequence)[trained]
        logp = all_words.gather(1, torch.from_numpy(sequence.tokens).long()[1:][trained, None])[:, 0]
        returns = np.full(len(sequence), sequence.reward) if sequence.returns is None else sequence.returns
        A = torch.from_numpy((returns - mean) / std)[1:][trained]
        w = torch.exp(logp.detach() - torch.from_numpy(sequence.logprobs)[1:][trained])
        entropy = -(all_words.exp() * all_words.masked_fill(all_words.isneginf(), 0)).sum(1)
        loss = loss - (w * A * logp).sum() - entropy_coef * entropy.sum()
        count += int(trained.sum())
        found.append(logp.detach().numpy())
    (loss / count).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}, np.concatenate(found)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_batch, {}),
        (make_batch, {"zero_stage": 3}),
        (make_tree, {"prefix_tree": True, "entropy_coef": 0.3}),
        (make_forest, {"max_tokens_per_microbatch": 10_000}),
    ],
)
def test_log_probs_ratios_and_gradients_are_those_among_the_words_that_each_token_was_drawn_from(folder, make, changes):
    batch = with_kept_words(make())
    narrow = [replace(g, trajectories=tuple(Trajectory.of_frame(t.frame()) for t in g.trajectories)) for g in batch]
    assert len({t.kept_words.shape[1] for group in narrow for t in group.trajectories}) > 1
    engine = TrainingEngine(folder, settings(**changes), seed=0, keep_values=True)
    expected, logprobs = exact(folder, batch, changes.get("entropy_coef", 0.0))
    sampled = np.concatenate([s.sampled for group in batch for t in group.trajectories for s in t.sequences()])
    computed = engine.logprobs(batch, temperature=TEMPERATURE)[sampled]
    np.testing.assert_allclose(computed, logprobs, atol=1e-5)
    result, gradients = step_and_gradients(engine, narrow)  # samples as the spool has them
    assert_same_gradients(gradients, expected)
    np.testing.assert_allclose(engine.values.proximal_logprobs[sampled], logprobs, atol=1e-5)
    behaviour = np.concatenate([s.logprobs for group in batch for t in group.trajectories for s in t.sequences()])
    assert result.weight_mean == pytest.approx(np.exp(logprobs - behaviour[sampled]).mean(), rel=1e-5)
    engine.close()


def test_score_centring_takes_the_mean_score_of_the_words_that_each_token_was_drawn_from(folder):
    random, batch = np.random.default_rng(0), with_kept_words(make_batch())

    def with_logprobs(t):
        weights = np.where(t.kept_words == NO_WORD, 0, random.random(t.kept_words.shape))
        q = weights / np.maximum(weights.sum(1, keepdims=True), 1e-9)
        return replace(t, kept_logprobs=np.log(np.where(q > 0, q, 1)))

    batch = [replace(group, trajectories=tuple(map(with_logprobs, group.trajectories))) for group in batch]
    engine = TrainingEngine(folder, settings(objective="score_centring"), seed=0)
    _, gradients = step_and_gradients(engine, batch)
    model, loss, count = eager(folder, torch.float64), torch.zeros((), dtype=torch.float64), 0
    for group in batch:
        mean = np.mean([t.reward for t in group.trajectories])
        for t in group.trajectories:
            logps = distributions(model, t)
            for place in np.flatnonzero(t.sampled):
                words = t.kept_words[place] != NO_WORD
                kept, q = t.kept_words[place][words], torch.from_numpy(np.exp(t.kept_logprobs[place][words]))
                of_word = logps[place - 1][torch.from_numpy(kept).long()]
                loss = loss - (t.reward - mean) * (logps[place - 1][int(t.tokens[place])] - (q * of_word).sum())
                count += 1
    (loss / count).backward()
    expected = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(gradients, expected)
    engine.close()
    with pytest.raises(ValueError, match="have no kept_logprobs, which trainer.objective=score_centring needs"):
        engine.step(with_kept_words(make_batch()), version=3, temperature=TEMPERATURE)


def test_an_adapter_is_trained_on_the_log_probs_among_the_kept_words(folder):
    batch = with_kept_words(make_batch())
    engine = TrainingEngine(folder, settings(lora={"rank": 4, "alpha": 8}), seed=0)
    _, logprobs = exact(folder, batch, 0.0)
    sampled = np.concatenate([t.sampled for group in batch for t in group.trajectories])
    before = engine.logprobs(batch, temperature=TEMPERATURE)[sampled]  # the adapter begins with none of its own
    np.testing.assert_allclose(before, logprobs, atol=1e-5)
    assert engine.step(batch, version=3, temperature=TEMPERATURE).grad_norm > 0
    engine.close()


def test_engines_are_compared_by_the_log_probs_among_all_words_of_the_first_minibatch(folder):
    batch, whole = with_kept_words(make_batch()), make_batch()
    engine = TrainingEngine(folder, settings(minibatches=2), seed=0, keep_values=True)
    among_all = engine.logprobs(whole, temperature=TEMPERATURE)
    engine.step(batch, version=3, temperature=TEMPERATURE)
    first = np.concatenate([np.full(len(t), g % 2 == 0) for g, group in enumerate(batch) for t in group.trajectories])
    np.testing.assert_allclose(engine.whole_logprobs[first], among_all[first], atol=1e-5)
    assert not engine.whole_logprobs[~first].any()
    engine.close()


def config_of(folder, vocabulary, **sampling):
    (folder / "config.json").write_text(f'{{"vocab_size": {vocabulary}}}')
    return ten_steps(model=str(folder), sampling={"max_new_tokens": 8, **sampling})


@pytest.mark.parametrize(
    ("vocabulary", "sampling", "width"),
    [
        (1000, {}, 0),
        (MOST_KEPT, {"top_p": 0.9}, MOST_KEPT),
        (1000, {"top_k": 20, "top_p": 0.9}, 38),
        (1000, {"top_k": MOST_TOP_K, "min_new_tokens": 2}, 248),
        (1000, {"top_p": 0.9}, None),
        (1000, {"min_p": 0.1, "top_k": MOST_TOP_K + 1}, None),
        (1000, {"min_new_tokens": 2}, None),
    ],
)
def test_a_run_that_would_store_too_many_words_with_a_token_is_refused(tmp_path, vocabulary, sampling, width):
    config = config_of(tmp_path, vocabulary, **sampling)
    if width is None:
        with pytest.raises(UserError, match="they are too many: set sampling.top_k from 1 to"):
            kept_words_of(config)
    else:
        assert kept_words_of(config) == width


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (None, "have no kept_words"),
        ([[3, 5]], "drawn from 2 words or more"),
        ([[4, NO_WORD]], "not words among which it is"),
        ([[5, 9, NO_WORD]], "not words among which it is"),
    ],
)
def test_a_sample_without_all_words_that_a_token_was_drawn_from_is_refused(words, sentence):
    kept = None if words is None else np.int32([[NO_WORD] * len(words[0]), *words])
    sample = Trajectory([1, 5], [0, -0.5], [-1, 0], 0.0, "stop", kept_words=kept)
    with pytest.raises(ValueError, match=sentence):
        check_kept_words(sample, 9)
    whole = np.int32([[NO_WORD] * 3, [3, 5, NO_WORD]])
    check_kept_words(replace(sample, kept_words=whole), 9)
