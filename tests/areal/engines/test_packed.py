import numpy as np
import pytest
import torch

from areal.engines import packed
from areal.engines.packed import FlatBatch, pack, packed_sdpa, token_logprobs
from areal.trajectory import Group, Trajectory

CPU = torch.device("cpu")


def trajectory(first, versions, reward=0.0):
    T = len(versions)
    return Trajectory(
        np.arange(first, first + T, dtype=np.int32),
        np.linspace(-1, -2, T, dtype=np.float32),
        np.array(versions, np.int32),
        reward,
        "stop",
    )


def batch():
    groups = [
        Group("a", 0, (trajectory(10, [-1, -1, 3, 4], 1.0), trajectory(20, [-1, 4, -1, 4]))),
        Group("b", 1, (trajectory(30, [-1, 2]),)),
    ]
    return FlatBatch.of(groups, minibatches=2)


def test_a_row_has_the_sampled_tokens_and_the_places_that_predict_them():
    flat = batch()
    row = pack(flat, flat.trained(None), [2, 1], CPU)
    assert row.tokens.tolist() == [[30, 31, 20, 21, 22, 23]]
    assert row.positions.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert row.lengths == [2, 4]
    assert row.targets.tolist() == [31, 21, 23]
    assert row.predicts.tolist() == [0, 2, 4]
    assert row.versions.tolist() == [2, 4, 4]
    assert row.places.tolist() == [9, 5, 7]
    assert row.sequence.tolist() == [0, 1, 1]


def test_tokens_that_are_too_old_are_not_trained():
    flat = batch()
    assert pack(flat, flat.trained(4), [0, 1, 2], CPU).targets.tolist() == [13, 21, 23]


def test_a_rank_without_work_has_a_row_without_targets():
    flat = batch()
    row = pack(flat, flat.trained(None), [], CPU)
    assert row.tokens.shape == (1, 1)
    assert len(row.targets) == 0


def test_groups_stay_whole_in_a_minibatch():
    assert batch().minibatch.tolist() == [0, 0, 1]


def test_a_batch_smaller_than_the_number_of_minibatches_has_one_for_each_group():
    groups = [Group("a", 0, (trajectory(10, [-1, 0]),)), Group("b", 1, (trajectory(20, [-1, 0]),))]
    assert FlatBatch.of(groups, minibatches=4).minibatch.tolist() == [0, 1]


def test_a_trajectory_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="group c"):
        FlatBatch.of([Group("c", 0, (trajectory(0, [1, 1]),))], minibatches=1)


def test_log_probs_in_chunks_equal_those_at_once(monkeypatch):
    torch.manual_seed(0)
    logits, targets = torch.randn(50, 11, requires_grad=True), torch.randint(0, 11, (50,))
    weights = torch.randn(50)
    results = []
    for at_once in (10_000, 77):
        monkeypatch.setattr(packed, "LOGITS_AT_ONCE", at_once)
        logps, entropy = token_logprobs(logits, targets, 0.7)
        (gradient,) = torch.autograd.grad((logps * weights).sum(), logits)
        results.append((logps, entropy, gradient))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)
    distribution = torch.distributions.Categorical(logits=logits / 0.7)
    torch.testing.assert_close(results[0][0], distribution.log_prob(targets))
    torch.testing.assert_close(results[0][1], distribution.entropy())


@pytest.mark.parametrize("kind", [{"sliding_window": 3}, {"softcap": 30.0}])
def test_attention_that_is_not_supported_is_refused(kind):
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(NotImplementedError):
        packed_sdpa(torch.nn.Module(), q, q, q, None, sequence_lengths=[4], **kind)
